"""What the submodules of an NNX or a Linen module return, in order of execution, also under jit, scan and remat."""

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


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a submodule: the first floating-point array of its arguments and of its result, None without one.

    A scan over L layers calls a submodule ``of`` L times; ``number`` is the layer.
    """

    path: Path
    number: int
    of: int
    given: np.ndarray | None
    returned: np.ndarray | None

    def __str__(self) -> str:
        name = "/".join(map(str, self.path)) or "(the whole)"
        return f"{name} [layer {self.number} of {self.of}]" if self.of > 1 else name


class Tape:
    """Takes down the calls of one run; ``calls`` once it is over. Every run needs a tape of its own."""

    def __init__(self) -> None:
        self._sites: list[tuple[Path, list[tuple[Any, Any]]]] = []  # in the order of the program

    def attach(self, module: nnx.Module) -> None:
        """From now on this module's submodules, and copies that it makes of them, are taken down."""
        for path, node in list(nnx.iter_graph(module)):
            if isinstance(node, nnx.Module) and callable(node):
                object.__setattr__(node, "__class__", _taped(type(node)))
                vars(node)["_tap"] = _Tap(self, path)

    def intercept(self, next_call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext):
        """For ``nn.intercept_methods``: takes down Linen's."""
        out = next_call(*args, **kwargs)
        if context.method_name == "__call__":
            self.take(context.module.path, (args, kwargs), out)
        return out

    def take(self, path: Path, given: Any, returned: Any) -> None:
        """Keeps the values of one call, as often as the compiled program comes by."""
        values: list[tuple[Any, Any]] = []
        self._sites.append((path, values))

        def keep(*arrays: Any) -> None:
            values.append(tuple(None if a is None else np.array(a) for a in arrays))  # pyright: ignore[reportArgumentType]

        jax.debug.callback(keep, _first_array(given), _first_array(returned))

    def calls(self) -> list[Call]:
        """In order of execution. Of a scan all places in the program are met equally often, and in turn."""
        jax.effects_barrier()
        met = [(path, values) for path, values in self._sites if values]  # the others were traced only
        found = []
        for count, sites in itertools.groupby(met, key=lambda site: len(site[1])):
            sites = list(sites)
            found += [Call(path, i, count, *values[i]) for i in range(count) for path, values in sites]
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class _Tap:
    """An attribute of a module that goes along with its copies."""

    tape: Tape
    path: Path


@functools.cache
def _taped(kind: type[nnx.Module]) -> type[nnx.Module]:
    """The same class, but that a call is taken down."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = kind.__call__(self, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self._tap.tape.take(self._tap.path, (args, kwargs), out)
        return out

    return types.new_class(
        kind.__name__, (kind,), {}, lambda body: body.update(__call__=call, __module__=kind.__module__)
    )


def _first_array(tree: Any) -> Any:
    """The first floating-point array of a pytree, None without one."""
    leaves = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array | np.ndarray))
    return next((leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)), None)
