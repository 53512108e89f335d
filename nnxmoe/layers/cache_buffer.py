"""Cache buffers of floats or int8 codes, and functions that read, write and gather slots."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from nnxmoe.layers.linear.xla_cpu import is_single_cpu, write_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Array:
    """Array of int8 codes, with one float32 scale per vector along the last dimension."""

    codes: Array  # [..., W]
    scale: Array  # [..., 1]

    @classmethod
    def quantize(cls, array: Float[Array, "..."]) -> Self:
        """Quantize each vector along the last dimension in steps of 1/127 of the vector's largest magnitude."""
        array_f32 = array.astype(jnp.float32)
        scale = jnp.max(jnp.abs(array_f32), axis=-1, keepdims=True) / 127
        codes = jnp.round(array_f32 / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)
        return cls(codes, scale)

    def dequantize(self, dtype: Any) -> Float[Array, "..."]:
        """Return ``codes * scale`` in ``dtype``."""
        return (self.codes.astype(jnp.float32) * self.scale).astype(dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape


Buffer = Array | Int8Array


def as_float(buffer: Buffer, dtype: Any) -> Array:
    """Dequantize an `Int8Array` to ``dtype``. Float buffers are returned unchanged."""
    return buffer.dequantize(dtype) if isinstance(buffer, Int8Array) else buffer


def write_slots(buffer: Buffer, new: Array, slots: Int[Array, "B T"], axis: int) -> Any:
    """Write token t of row b of ``new`` to slot ``slots[b, t]`` along ``axis``. Out-of-range slots are dropped.

    XLA updates the buffer in place if the buffer is donated or carried by a loop.
    """
    if isinstance(buffer, Int8Array):
        quantized_new = Int8Array.quantize(new)
        return jax.tree.map(lambda leaf, values: write_slots(leaf, values, slots, axis), buffer, quantized_new)
    new = new.astype(buffer.dtype)
    if slots.shape[1] == 1 and is_single_cpu():
        return write_rows(buffer, new, slots, axis)
    leading_slices = (slice(None),) * (axis - 1)
    return jax.vmap(lambda row, new, slots: row.at[(*leading_slices, slots)].set(new, mode="drop"))(buffer, new, slots)


def gather_tokens(x: Shaped[Array, "B S ..."], indices: Int[Array, "B ..."]) -> Shaped[Array, "B ..."]:
    """Gather tokens of each row by ``indices``."""
    return jax.vmap(lambda row, indices: row[indices])(x, indices)


CacheFormat = Callable[[Array], Buffer]
"""Converts an empty cache buffer ``[..., W]`` to the storage format; see ``Strategy.cache``."""


@dataclasses.dataclass(frozen=True)
class Int8Cache:
    """Cache format that stores keys, values and latents as int8, with one float32 scale per token and head.

    **Changes numbers**: each component of a key or value changes by up to 1/254 of the largest component. With heads of
    width 128, the cache needs 0.52 times the memory of bfloat16.
    """

    def __call__(self, buffer: Array) -> Int8Array:
        return Int8Array.quantize(buffer)
