"""Flatten parameter trees of MaxText and Flax, which may contain boxes and state other than parameters."""

import re
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
_TEXTS = str, jax.sharding.PartitionSpec
_VALUES = ("value", "raw_value")  # Names of the array in a saved box.
# Type of state -> names of branches, and names of integer arrays, that contain this state anywhere in a tree.
_STATES = {
    "state of random number generators": (
        frozenset({"rngs", "rng"}),
        frozenset({"key", "rng_key", "prng_key", "dropout_rng"}),
    ),
    "state of training": (
        frozenset({"opt_state", "optimizer", "mu", "nu"}),
        frozenset({"step", "global_step", "epoch", "count"}),
    ),
}


def flatten_arrays(tree: Tree) -> dict[str, Any]:
    """Flatten nested mappings to arrays by name. Removes boxes and random keys.

    As in MaxText, the names of NNX variables that are not parameters start with ``nnx_aux``. Raises ValueError for
    values that are not arrays.
    """
    key_dtype = jax.dtypes.prng_key
    arrays = {
        name: array
        for name, array in flatten_tree(tree).items()
        if not isinstance(array, jax.Array | jax.ShapeDtypeStruct) or not jnp.issubdtype(array.dtype, key_dtype)
    }
    check_arrays(arrays)
    return arrays


def check_arrays(arrays: Mapping[str, Any]) -> None:
    """Raise ValueError unless all values are arrays or numbers."""
    if invalid := [
        f"{name} ({type(array).__name__})" for name, array in arrays.items() if not isinstance(array, _ARRAYS)
    ]:
        raise ValueError(f"the tree contains values that are not JAX or NumPy arrays: {some(invalid)}")


def flatten_tree(tree: Tree) -> dict[str, Any]:
    """Flatten nested mappings to values by name, with path components joined by ``/``. Removes boxes.

    Raises ValueError if ``tree`` is not a mapping.
    """
    if not isinstance(tree, Mapping):
        raise ValueError(
            f"the tree is a {type(tree).__name__}: pass nested dicts of arrays, such as state.params or "
            "nnx.state(module)"
        )
    return dict(_leaves(tree, ()))


def _is_box(tree: Any) -> bool:
    """Return whether ``tree`` is a saved box: ``value`` or ``raw_value`` is an array or a box.

    A module may also have one of these names.
    """
    values = [tree[name] for name in _VALUES if name in tree] if isinstance(tree, Mapping) else []
    return any(not isinstance(value, Mapping) or _is_box(value) for value in values)


def _is_metadata(branch: Any, of_box: bool) -> bool:
    """Return whether a sibling of ``value`` is metadata, such as ``sharding``. It may have any type in boxes."""
    leaves = jax.tree.leaves(branch)
    if of_box:
        return not any(isinstance(leaf, _ARRAYS) for leaf in leaves)
    return not isinstance(branch, Mapping) and all(isinstance(leaf, _TEXTS) for leaf in leaves)


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        has_value, is_box = any(name in tree for name in _VALUES), _is_box(tree)
        for name, branch in tree.items():
            if not (has_value and _is_metadata(branch, is_box and name not in _VALUES)):
                yield from _leaves(branch, (*path, str(name)))
        return
    value = tree.unbox() if isinstance(tree, meta.AxisMetadata) else tree
    value = tree.get_value() if isinstance(tree, nnx.Variable) else value
    aux = isinstance(tree, nnx.Variable) and not isinstance(tree, nnx.Param)
    yield "/".join(("nnx_aux", *path) if aux else path), value


def strip_boxes(name: str) -> str:
    """Remove the suffixes ``/value`` and ``/raw_value`` of saved boxes and of `nnx.State`, which may be nested."""
    return re.sub(f"(/({'|'.join(_VALUES)}))+$", "", name)


def split_off_states(values: Mapping[str, T]) -> tuple[dict[str, T], dict[str, tuple[str, ...]]]:
    """Separate parameters from training state, random state and duplicate values of boxes.

    Returns:
        Tuple of the values that may be parameters, by name, and the names of skipped branches, by reason.
    """
    parameters, skipped = dict[str, T](), dict[str, set[str]]()
    for name, value in values.items():
        value_name = name.removesuffix("raw_value") + "value"
        if name.endswith("/raw_value") and values.keys() & {value_name, *(f"{value_name}/{v}" for v in _VALUES)}:
            skipped.setdefault("raw_value of boxes that also have value", set()).add(name)
            continue
        components = strip_boxes(name).split("/")
        dtype = getattr(value, "dtype", np.dtype(type(value)) if isinstance(value, int) else None)
        is_integer = dtype is not None and not jnp.issubdtype(dtype, jnp.inexact)
        is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)  # random keys may have any name
        leaf = "key" if is_key else components[-1]
        for state, (branch_names, integer_names) in _STATES.items():
            index = next((position for position, component in enumerate(components) if component in branch_names), None)
            if index is not None or (is_integer and leaf in integer_names):
                skipped.setdefault(state, set()).add("/".join(components if index is None else components[: index + 1]))
                break
        else:
            parameters[name] = value
    return parameters, {state: tuple(sorted(names)) for state, names in skipped.items()}
