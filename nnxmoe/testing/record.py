"""Records what submodules of NNX and Linen modules return, in order of execution, also under jit, scan and remat."""

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
    """One call of a submodule: the first floating-point array of its arguments (None without one) and of its result.

    A scan over L layers calls a submodule ``of`` L times; ``number`` is the layer.
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
    """Records the calls of one run, and returns them from ``calls`` afterwards. Each run needs a new tape."""

    def __init__(self) -> None:
        self._sites: list[tuple[Path, list[Values] | None]] = []  # in the order of the program

    def attach(self, module: nnx.Module) -> None:
        """Start recording this module's submodules and their copies."""
        for path, node in list(nnx.iter_graph(module)):
            if isinstance(node, nnx.Module) and callable(node):
                object.__setattr__(node, "__class__", _taped(type(node)))
                vars(node)["_take"] = functools.partial(self.take, path)  # which copies of the module share

    def intercept(self, next_call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext):
        """Interceptor for ``nn.intercept_methods``: records Linen's calls."""
        out = next_call(*args, **kwargs)
        return self.take(context.module.path, (args, kwargs), out) if context.method_name == "__call__" else out

    def take(self, path: Path, given: Any, returned: Any) -> Any:
        """Return ``returned``, and record a copy each time the compiled program executes this call.

        The value passes through the host, since Linen's scan refuses debugging callbacks, whose results are not used.
        """
        leaves, tree = jax.tree.flatten(returned)
        at = next((i for i, leaf in enumerate(leaves) if is_floating(leaf)), None)
        values: list[Values] = []
        self._sites.append((path, None if at is None else values))
        if at is None:
            return returned

        def keep(given: Any, returned: Any) -> np.ndarray:
            values.append((None if given is None else np.array(given), np.array(returned)))
            return values[-1][1]

        shape = jax.ShapeDtypeStruct(leaves[at].shape, leaves[at].dtype)
        first = next(filter(is_floating, jax.tree.leaves(given)), None)
        leaves[at] = jax.pure_callback(keep, shape, first, leaves[at], vmap_method="sequential")
        return jax.tree.unflatten(tree, leaves)

    def calls(self) -> list[Call]:
        """The calls in order of execution. All calls inside a scan execute equally often, in turn."""
        # An empty list: traced but never executed.
        met = [(path, values or []) for path, values in self._sites if values != []]
        found = []
        for count, sites in itertools.groupby(met, key=lambda site: len(site[1])):
            sites = list(sites)
            found += [Call(path, i, count, *values[i]) for i in range(count) for path, values in sites]
        return found


@functools.cache
def _taped(kind: type[nnx.Module]) -> type[nnx.Module]:
    """A subclass whose calls are recorded."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = kind.__call__(self, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return self._take((args, kwargs), out)

    return types.new_class(
        kind.__name__, (kind,), {}, lambda body: body.update(__call__=call, __module__=kind.__module__)
    )


def is_floating(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
