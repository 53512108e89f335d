"""Record the results of NNX and Linen submodules in execution order, even under jit, scan and remat."""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Path = tuple[Any, ...]
Values = tuple[np.ndarray | None, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a submodule.

    Attributes:
        number: Layer index if a scan over layers calls the submodule, else 0.
        of: Number of calls in the scan, else 1.
        given: First floating-point array of the arguments, if any.
        returned: First floating-point array of the result.
    """

    path: Path
    number: int
    of: int
    given: np.ndarray | None
    returned: np.ndarray

    def __str__(self) -> str:
        name = "/".join(map(str, self.path)) or "the whole module"
        return f"{name} [layer {self.number} of {self.of}]" if self.of > 1 else name


class Tape:
    """Recorder of the submodule calls of one run. Read `calls` after the run. Use a new tape per run."""

    def __init__(self) -> None:
        self._sites: list[tuple[Path, list[Values] | None]] = []  # in program order

    def attach(self, module: nnx.Module) -> None:
        """Record the calls of this module's submodules and of their copies."""
        for path, node in list(nnx.iter_graph(module)):
            if isinstance(node, nnx.Module) and callable(node):
                object.__setattr__(node, "__class__", _taped(type(node)))
                vars(node)["_take"] = functools.partial(self.take, path)  # copies of the module share this method

    def intercept(self, next_call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext):
        """Record Linen's calls, as an interceptor for ``nn.intercept_methods``."""
        output = next_call(*args, **kwargs)
        return self.take(context.module.path, (args, kwargs), output) if context.method_name == "__call__" else output

    def take(self, path: Path, given: Any, returned: Any) -> Any:
        """Return ``returned``, and record it each time the compiled program executes this call.

        The value passes through a host callback, since Linen's scan rejects debug callbacks whose results
        are unused.
        """
        leaves, tree = jax.tree.flatten(returned)
        index = next((i for i, leaf in enumerate(leaves) if is_floating(leaf)), None)
        values: list[Values] = []
        self._sites.append((path, None if index is None else values))
        if index is None:
            return returned

        def record(given: Any, returned: Any) -> np.ndarray:
            values.append((None if given is None else np.array(given), np.array(returned)))
            return values[-1][1]

        shape = jax.ShapeDtypeStruct(leaves[index].shape, leaves[index].dtype)
        first_input = next(filter(is_floating, jax.tree.leaves(given)), None)
        leaves[index] = jax.pure_callback(record, shape, first_input, leaves[index], vmap_method="sequential")
        return jax.tree.unflatten(tree, leaves)

    def calls(self) -> list[Call]:
        """Return the calls in execution order. Neighboring submodules with equal counts share a scan and alternate."""
        # An empty list belongs to a call that was traced but never executed.
        executed = [(path, values or []) for path, values in self._sites if values != []]
        calls = []
        for count, sites in itertools.groupby(executed, key=lambda site: len(site[1])):
            sites = list(sites)
            calls += [Call(path, i, count, *values[i]) for i in range(count) for path, values in sites]
        return calls


@functools.cache
def _taped(module_class: type[nnx.Module]) -> type[nnx.Module]:
    """Create a subclass that records its calls."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = module_class.__call__(self, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return self._take((args, kwargs), output)

    return types.new_class(
        module_class.__name__,
        (module_class,),
        {},
        lambda body: body.update(__call__=call, __module__=module_class.__module__),
    )


def is_floating(leaf: Any) -> bool:
    """Check whether a pytree leaf is a floating-point JAX array."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
