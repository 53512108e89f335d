"""Arrays of a pytree by name, the differences between two such sets, and values that JSON preserves."""

import json
from collections.abc import Mapping
from typing import Any

import jax

from nnxmoe.config.printable import short
from nnxmoe.storage.errors import CheckpointError

_MAX_EXTRA = 1_000_000  # bytes of JSON
_SHOWN = 40  # lines per error message


def named(tree: Any, what: str) -> dict[str, Any]:
    """``{"a": {"b": x}}`` -> ``{"a/b": x}``. Leaves must be jax arrays or ShapeDtypeStructs."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise CheckpointError(f"{what}: {name or 'the value'} is a {type(leaf).__name__}: pass dicts of jax arrays")
        if name in found:
            raise CheckpointError(f"{what}: two arrays have the name {short(name)}: use keys without '/'")
        found[name] = leaf
    return found


def signature(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Shape and dtype of each array, as text."""
    return {name: f"{list(array.shape)} {array.dtype}" for name, array in arrays.items()}


def differences(wanted: Mapping[str, str], found: Mapping[str, str]) -> str:
    """One line per array that is missing in ``found``, unexpected, or of another shape or dtype; empty if none is."""
    lines = []
    for name in sorted(wanted.keys() | found.keys()):
        ours, theirs = wanted.get(name), found.get(name)
        if theirs is None:
            lines.append(f"\n  {name} {ours} is missing")
        elif ours is None:
            lines.append(f"\n  {name} {theirs} is unexpected")
        elif ours != theirs:
            lines.append(f"\n  {name} is {theirs}, not {ours}")
    return "".join(lines[:_SHOWN]) + (f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")


def plain(extra: Mapping[str, Any], what: str = "extra") -> dict[str, Any]:
    """Copy ``extra`` by way of JSON. Raises CheckpointError, which names it ``what``, if JSON does not preserve it."""
    given = dict(extra)
    try:
        text = json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}={short(given)} cannot be stored as JSON: {error}") from None
    if json.loads(text) != given:
        raise CheckpointError(
            f"{what}={short(given)} is not preserved by JSON: use str keys, and lists instead of tuples"
        )
    if len(text) > _MAX_EXTRA:
        raise CheckpointError(f"{what} has {len(text)} bytes as JSON, more than {_MAX_EXTRA}: save arrays as arrays")
    return json.loads(text)
