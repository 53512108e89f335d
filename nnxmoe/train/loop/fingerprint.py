"""A checksum of frozen arrays, by which a resumed run recognises its base model."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32


def fingerprint(arrays: Mapping[str, Array]) -> str | None:
    """A digest of the names and bits of arrays, the same on every mesh; None without arrays."""
    if not arrays:
        return None
    sums = jax.device_get(_sums(dict(arrays)))
    lines = [f"{name} {arrays[name].shape} {arrays[name].dtype} {int(sums[name])}" for name in sorted(arrays)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@jax.jit
def _sums(arrays: dict[str, Array]) -> dict[str, Any]:
    return {name: _sum(array) for name, array in arrays.items()}


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
