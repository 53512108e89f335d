"""Arrays of a pytree by name, the differences between two such sets, a checksum, and values that JSON preserves."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

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


def fingerprint(arrays: Mapping[str, Array]) -> str | None:
    """A digest of the names and bits of arrays, the same on every mesh; None without arrays."""
    if not arrays:
        return None
    sums = jax.device_get(_sums(dict(arrays)))
    lines = [f"{name} {arrays[name].shape} {arrays[name].dtype} {int(sums[name])}" for name in sorted(arrays)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _sum(array: Array) -> UInt32[Array, ""]:
    """The sum of the bits, weighted by position: it is exact, so that shards may be added in any order."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    size = min(array.dtype.itemsize, 4)
    array = array.astype(np.uint8) if array.dtype == bool else array
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * size}").astype(jnp.uint32)
    weights = jnp.uint32(1)
    for axis in range(bits.ndim):  # an index of the flat array would gather the shards
        weights = weights * jnp.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.sum(bits * (2 * weights + 1), dtype=jnp.uint32)


_sums = jax.jit(lambda arrays: jax.tree.map(_sum, arrays))
