"""Read array trees of MaxText and Flax: nested dicts or states, boxed or not, with parameters and other state."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta

from nnxmoe.config.printable import some

Tree = Mapping[str, Any]
T = TypeVar("T")
_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, int, float)
# Type of state -> names of branches with this state, and names of integer arrays with this state, anywhere in a tree.
_STATES = {
    "state of random number generators": (frozenset({"rngs", "rng"}), frozenset({"key"})),
    "state of training": (frozenset({"opt_state", "optimizer", "mu", "nu"}), frozenset({"step", "count"})),
}


def flatten_arrays(tree: Tree) -> dict[str, Any]:
    """Flatten a tree of mappings, boxed or not, to arrays by name, without random keys.

    As in MaxText, the names of NNX variables that are not parameters start with ``nnx_aux``. Raises ValueError for
    values that are not arrays.
    """
    keys = jax.dtypes.prng_key
    found = {
        n: a for n, a in flatten_tree(tree).items() if not jnp.issubdtype(getattr(a, "dtype", np.dtype(bool)), keys)
    }
    check_arrays(found)
    return found


def check_arrays(found: Mapping[str, Any]) -> None:
    """Raise ValueError unless all values are arrays or numbers."""
    if odd := [f"{name} ({type(a).__name__})" for name, a in found.items() if not isinstance(a, _ARRAYS)]:
        raise ValueError(f"the tree contains values that are not JAX or NumPy arrays: {some(odd)}")


def flatten_tree(tree: Tree) -> dict[str, Any]:
    """Flatten a tree of mappings to values by name, with path components joined by ``/``.

    Raises ValueError if ``tree`` is not a mapping.
    """
    if not isinstance(tree, Mapping):
        raise ValueError(
            f"the tree is a {type(tree).__name__}: pass nested dicts of arrays, such as state.params or "
            "nnx.state(module)"
        )
    return dict(_leaves(tree, ()))


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for name, branch in tree.items():
            yield from _leaves(branch, (*path, str(name)))
        return
    value = tree.unbox() if isinstance(tree, meta.AxisMetadata) else tree
    value = tree.get_value() if isinstance(tree, nnx.Variable) else value
    aux = isinstance(tree, nnx.Variable) and not isinstance(tree, nnx.Param)
    yield "/".join(("nnx_aux", *path) if aux else path), value


def split_off_states(found: Mapping[str, T]) -> tuple[dict[str, T], dict[str, tuple[str, ...]]]:
    """Separate parameters from other state.

    Returns:
        Tuple of the values that may be parameters, by name, and the names of skipped branches, by type of state.
    """
    kept, skipped = dict[str, T](), dict[str, set[str]]()
    for name, value in found.items():
        parts = name.removesuffix("/value").split("/")
        dtype = getattr(value, "dtype", np.dtype(type(value)) if isinstance(value, int) else None)
        whole = dtype is not None and not jnp.issubdtype(dtype, jnp.inexact)
        for state, (branches, integers) in _STATES.items():
            at = next((i for i, part in enumerate(parts) if part in branches), None)
            if at is not None or (whole and parts[-1] in integers):
                skipped.setdefault(state, set()).add("/".join(parts if at is None else parts[: at + 1]))
                break
        else:
            kept[name] = value
    return kept, {state: tuple(sorted(names)) for state, names in skipped.items()}
