"""How to multiply rows with a quantised kernel: the choices of ``Strategy.quantized``."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxmoe.config.validate import set_positive
from nnxmoe.layers.linear.dots import dot_f32, matmul_f32
from nnxmoe.layers.linear.quantized import QuantizedKernel, QuantizedProduct
from nnxmoe.layers.linear.xla_cpu import carried, kernel_on_the_left, on_cpu
from nnxmoe.sharding import is_static

LAST = 127.0  # the largest int8
FEW = 8  # rows up to which CPUs decode a kernel for longer than they multiply with it


@dataclasses.dataclass(frozen=True)
class DequantizedProduct:
    """Decodes the whole kernel to floats and multiplies with them: the reference for the others."""

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, back: bool = False) -> Float[Array, "R _"]:
        return matmul_f32(x, kernel.transposed(x.dtype), not back)


@dataclasses.dataclass(frozen=True)
class BlockwiseProduct:
    """Decodes and multiplies a block of outputs at a time in a loop: at most ``size`` weights, or a quarter of all, are
    floats at once.

    Few rows of 16 bits are multiplied in float32, to which CPUs decode codes faster than to bfloat16.
    """

    size: int = 2**20

    def __post_init__(self) -> None:
        set_positive(self, "size")

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, back: bool = False) -> Float[Array, "R _"]:
        ins, outs = kernel.shape
        count, dtype = max(1, min(self.size // ins, outs // 4)), x.dtype
        if dtype.itemsize == 2:  # rounding weights to 16 bits adds nothing to the rounding of the rows
            kernel = dataclasses.replace(kernel, format=dataclasses.replace(kernel.format, round_dtype=None))
            dtype = jnp.dtype(jnp.float32) if is_static(x.shape[0]) and x.shape[0] <= FEW else dtype
        x = x.astype(dtype)

        def forward(i: Array, state: Any) -> Any:
            xs, kernel, out = state
            start = jnp.minimum(i * count, outs - count)  # the last block may repeat rows of the one before
            pairs = zip(xs, kernel.rows(start, count), strict=True)
            part = functools.reduce(jnp.add, [matmul_f32(x, w.astype(dtype), True) for x, w in pairs])
            return *carried(xs, kernel), jax.lax.dynamic_update_slice_in_dim(out, part, start, 1)

        def backward(i: Array, state: Any) -> Any:
            x, kernel, sums = state
            start = jnp.minimum(i * count, outs - count)
            part = jax.lax.dynamic_slice_in_dim(x, start, count, 1)
            part = jnp.where(start + jnp.arange(count) >= i * count, part, 0)
            weights = kernel.rows(start, count)
            added = tuple(s + dot_f32(part, w.astype(dtype), -1, -2) for s, w in zip(sums, weights, strict=True))
            return *carried(x, kernel), added

        blocks = -(-outs // count)
        if back:
            zeros = kernel.format.split_halves(jnp.zeros((x.shape[0], kernel.shape[0]), jnp.float32))
            return kernel.format.join_halves(jax.lax.fori_loop(0, blocks, backward, (x, kernel, zeros))[-1])
        zeros = jnp.zeros((x.shape[0], outs), jnp.float32)
        return jax.lax.fori_loop(0, blocks, forward, (kernel.format.split_halves(x), kernel, zeros))[-1]


@dataclasses.dataclass(frozen=True)
class TwoInt8Product:
    """Multiplies int8 codes with integers instead of decoding them. Each row becomes the sum of two int8 rows, the
    first rounded to a 127th of its largest magnitude, the second the remainder in steps 254 times as small; what
    remains is at most 4e-5 of that magnitude.

    Takes kernels with one scale per output and no zero points, and up to ``most`` rows, beyond which two products take
    longer than decoding. ``fallback`` computes the rest.
    """

    fallback: QuantizedProduct = BlockwiseProduct()
    most: int = 16

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, back: bool = False) -> Float[Array, "R _"]:
        if back or not _per_output_int8(kernel, x) or len(x) > self.most:
            return self.fallback(x, kernel, back)
        x = x.astype(jnp.float32)
        step = _steps(x)
        first = jnp.round(x / step)
        second = jnp.round((x - first * step) * (2 * LAST) / step)
        high, low = jnp.split(_int8_sums(jnp.concatenate([first, second]), kernel), 2)
        return (high + low / (2 * LAST)) * (step * _per_output(kernel))


@dataclasses.dataclass(frozen=True)
class W8A8Product:
    """Multiplies int8 codes with rows rounded to int8, one scale per row. **Changes numbers** by about 1 %, as no other
    product does; never a default. ``fallback`` computes kernels that `TwoInt8Product` does not take."""

    fallback: QuantizedProduct = BlockwiseProduct()

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, back: bool = False) -> Float[Array, "R _"]:
        if back or not _per_output_int8(kernel, x):
            return self.fallback(x, kernel, back)
        x = x.astype(jnp.float32)
        step = _steps(x)
        # A second row of zeros: XLA:CPU multiplies one row by int8 codes 30 times slower than two (jax 0.10.2).
        rows = jnp.pad(jnp.round(x / step), ((0, 1 if len(x) == 1 else 0), (0, 0)))
        return _int8_sums(rows, kernel)[: len(x)] * (step * _per_output(kernel))


def _per_output_int8(kernel: QuantizedKernel, x: Float[Array, "R _"]) -> bool:
    """Whether a kernel has int8 codes, one scale per output and no zero points, and `_need_no_rounding`."""
    plain = kernel.format.code_dtype == "int8" and kernel.zero is None and kernel.scale.shape[-1] == 1
    return plain and _need_no_rounding(kernel, x)


def _need_no_rounding(kernel: QuantizedKernel, x: Float[Array, "R _"]) -> bool:
    """Whether scales may multiply the result, which skips the rounding of weights to `CodeFormat.round_dtype`: the
    rounding of rows of 16 bits is as large."""
    return kernel.format.round_dtype is None or x.dtype.itemsize == 2


def _steps(x: Float[Array, "R I"]) -> Float[Array, "R 1"]:
    """The size of an int8 step in each row: a 127th of its largest magnitude, and never zero."""
    return jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny * 2**24) / LAST


def _int8_sums(rows: Float[Array, "R I"], kernel: QuantizedKernel) -> Float[Array, "R O"]:
    codes, rows = kernel.codes, rows.astype(jnp.int8)
    left = kernel_on_the_left(rows)
    x, y = (codes, rows) if left else (rows, codes)
    sums = jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32).astype(jnp.float32)
    return sums.T if left else sums


def _per_output(kernel: QuantizedKernel) -> Float[Array, "1 O"]:
    return kernel.format.gather_rows(kernel.scale, slice(0, kernel.codes.shape[-2])).T


@dataclasses.dataclass(frozen=True)
class CastProduct:
    """Casts codes and multiplies with them in one product, into which compilers for GPUs and TPUs fuse the cast; the
    result is multiplied by the scales, one per output. `DequantizedProduct` computes other kernels."""

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, back: bool = False) -> Float[Array, "R _"]:
        tiles = kernel.zero is not None or kernel.scale.shape[-1] > 1 or kernel.format.is_packed
        if back or tiles or not _need_no_rounding(kernel, x):
            return DequantizedProduct()(x, kernel, back)
        return matmul_f32(x, kernel.format.code_values(kernel.codes).astype(x.dtype), True) * _per_output(kernel)


@dataclasses.dataclass(frozen=True)
class AutoProduct:
    """`CastProduct` on GPUs and TPUs, `BlockwiseProduct` for float32 rows on CPUs, `TwoInt8Product` for 16-bit rows on
    CPUs: the rounding of 16-bit rows is larger than the error of `TwoInt8Product`."""

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, back: bool = False) -> Float[Array, "R _"]:
        if not on_cpu():
            return CastProduct()(x, kernel, back)
        return (TwoInt8Product() if x.dtype.itemsize == 2 else BlockwiseProduct())(x, kernel, back)
