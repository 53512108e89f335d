"""Products of rows with a quantized kernel: the options for ``Strategy.quantized``."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxmoe.config.arguments import CheckedFields
from nnxmoe.config.validate import set_positive
from nnxmoe.layers.linear.matmul import dot_f32, matmul_f32
from nnxmoe.layers.linear.quantized import QuantizedKernel, QuantizedProduct
from nnxmoe.layers.linear.xla_cpu import on_cpu, output_blocks, sum_in_one_loop, with_barrier
from nnxmoe.sharding import is_static

INT8_MAX = 127.0
MAX_LOOP_ROWS = 8  # up to this number of rows, dequantization takes longer than multiplication on CPUs


@dataclasses.dataclass(frozen=True)
class DequantizedProduct:
    """Product that dequantizes the whole kernel. This product is the reference for all others."""

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, transpose: bool = False) -> Float[Array, "R _"]:
        return matmul_f32(x, kernel.transposed(x.dtype), not transpose)


@dataclasses.dataclass(frozen=True)
class BlockwiseProduct(CheckedFields):
    """Product that dequantizes and multiplies one block of outputs at a time.

    Up to `MAX_LOOP_ROWS` 16-bit rows are multiplied in float32, because CPUs dequantize to float32 faster than to
    bfloat16.

    Attributes:
        size: Maximum number of weights per block. A block has at most a quarter of all outputs.
    """

    size: int = 2**20

    def __post_init__(self) -> None:
        super().__post_init__()
        set_positive(self, "size")

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, transpose: bool = False) -> Float[Array, "R _"]:
        ins, outs = kernel.shape
        block = max(1, min(self.size // ins, outs // 4))
        if x.dtype.itemsize == 2:
            # Skip the format's rounding of the weights, because the rows are rounded to 16 bits anyway.
            kernel = dataclasses.replace(kernel, format=dataclasses.replace(kernel.format, round_dtype=None))
            if is_static(x.shape[0]) and x.shape[0] <= MAX_LOOP_ROWS:
                x = x.astype(jnp.float32)
        return (_multiply_transposed_blocks if transpose else _multiply_blocks)(x, kernel, block)


def _multiply_blocks(x: Float[Array, "R I"], kernel: QuantizedKernel, block: int) -> Float[Array, "R O"]:
    """Return ``x @ kernel``, ``block`` outputs at a time."""
    outs, dtype = kernel.shape[1], x.dtype

    def step(i: Array, carry: Any) -> Any:
        halves, kernel, out = carry
        start = jnp.minimum(i * block, outs - block)  # the last block may repeat outputs of the previous block
        weights = kernel.decode_rows(start, block)
        products = [matmul_f32(half, w.astype(dtype), True) for half, w in zip(halves, weights, strict=True)]
        out = jax.lax.dynamic_update_slice_in_dim(out, functools.reduce(jnp.add, products), start, 1)
        return *with_barrier(halves, kernel), out

    zeros = jnp.zeros((x.shape[0], outs), jnp.float32)
    return jax.lax.fori_loop(0, -(-outs // block), step, (kernel.format.split_halves(x), kernel, zeros))[-1]


def _multiply_transposed_blocks(x: Float[Array, "R O"], kernel: QuantizedKernel, block: int) -> Float[Array, "R I"]:
    """Return ``x @ kernel.T``, ``block`` outputs of the kernel at a time."""
    (ins, outs), dtype = kernel.shape, x.dtype

    def step(i: Array, carry: Any) -> Any:
        x, kernel, sums = carry
        start = jnp.minimum(i * block, outs - block)
        columns = jax.lax.dynamic_slice_in_dim(x, start, block, 1)
        is_new = start + jnp.arange(block) >= i * block  # the last block may repeat outputs of the previous block
        columns = jnp.where(is_new, columns, 0)
        weights = kernel.decode_rows(start, block)
        sums = tuple(s + dot_f32(columns, w.astype(dtype), -1, -2) for s, w in zip(sums, weights, strict=True))
        return *with_barrier(x, kernel), sums

    zeros = kernel.format.split_halves(jnp.zeros((x.shape[0], ins), jnp.float32))
    return kernel.format.join_halves(jax.lax.fori_loop(0, -(-outs // block), step, (x, kernel, zeros))[-1])


@dataclasses.dataclass(frozen=True)
class TwoInt8Product(CheckedFields):
    """Integer product of int8 codes with rows that are split into two int8 rows each.

    Each row is approximated by a sum of two int8 rows. The first int8 row has a step size of 1/127 of the row's largest
    magnitude. The second int8 row is the remainder, with a step size 254 times smaller. The error is at most 4e-5 of
    the largest magnitude. Supported kernels have one scale per output and no zero points.

    Attributes:
        fallback: Product for unsupported kernels, for transposed kernels, and for more than ``max_rows`` rows.
        max_rows: Maximum number of rows for which two integer products are faster than dequantization.
    """

    fallback: QuantizedProduct = BlockwiseProduct()
    max_rows: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        set_positive(self, "max_rows")

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, transpose: bool = False) -> Float[Array, "R _"]:
        if transpose or not _is_int8_per_output(kernel, x) or len(x) > self.max_rows:
            return self.fallback(x, kernel, transpose)
        x = x.astype(jnp.float32)
        step = _int8_step(x)
        coarse = jnp.round(x / step)
        fine = jnp.round((x - coarse * step) * (2 * INT8_MAX) / step)
        coarse_out, fine_out = jnp.split(_multiply_int8(jnp.concatenate([coarse, fine]), kernel), 2)
        return (coarse_out + fine_out / (2 * INT8_MAX)) * (step * _output_scales(kernel))


@dataclasses.dataclass(frozen=True)
class FewRowsProduct(CheckedFields):
    """Product of up to 8 rows that dequantizes the weights inside the loop of `sum_in_one_loop`.

    Attributes:
        fallback: Product for more rows, for transposed kernels, for tiles with several outputs, and for programs
            outside of `jit_outermost`.
    """

    fallback: QuantizedProduct = BlockwiseProduct()

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, transpose: bool = False) -> Float[Array, "R _"]:
        blocks = output_blocks(x, kernel.shape[1], max_rows=MAX_LOOP_ROWS)
        if transpose or not blocks or not _is_summable(kernel, x):
            return self.fallback(x, kernel, transpose)
        format, groups = kernel.format, kernel.scale.shape[-1]
        row_halves = [half.reshape(len(x), groups, -1) for half in format.split_halves(x.astype(jnp.float32))]

        def block_terms(codes: Array, scale: Array, zero: Array | None) -> list[Float[Array, "block G _"]]:
            """Return the terms of the products of each row with the weights of a block of outputs."""
            values = format.decode_values(codes, has_zero=zero is not None)
            values = [half.reshape(-1, *rows.shape[1:]) for half, rows in zip(values, row_halves, strict=True)]
            scale = scale.astype(jnp.float32)[..., None] if groups > 1 else jnp.float32(1)

            def multiply(*row: Float[Array, "G _"]) -> Float[Array, "block G _"]:
                product = sum(value * half for value, half in zip(values, row, strict=True))
                if zero is None:
                    return product * scale
                offset = zero.astype(jnp.float32)[..., None] * sum(row)
                return product * scale + offset if format.offset else (product - offset) * scale

            return [multiply(*row) for row in zip(*row_halves, strict=True)]

        out = sum_in_one_loop(blocks, block_terms, kernel.codes, kernel.scale, kernel.zero)
        return out if groups > 1 else out * _output_scales(kernel)


@dataclasses.dataclass(frozen=True)
class W8A8Product(CheckedFields):
    """Integer product of int8 codes with rows rounded to int8, with one scale per row. Must be selected explicitly.

    **Changes numbers** by about 1 %, unlike all other products.

    Attributes:
        fallback: Product for transposed kernels and for kernels that `TwoInt8Product` does not support.
    """

    fallback: QuantizedProduct = BlockwiseProduct()

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, transpose: bool = False) -> Float[Array, "R _"]:
        if transpose or not _is_int8_per_output(kernel, x):
            return self.fallback(x, kernel, transpose)
        x = x.astype(jnp.float32)
        step = _int8_step(x)
        # Append a row of zeros to a single row, because XLA:CPU multiplies one row by int8 codes 30 times slower than
        # two rows (jax 0.10.2).
        rows = jnp.pad(jnp.round(x / step), ((0, 1 if len(x) == 1 else 0), (0, 0)))
        return _multiply_int8(rows, kernel)[: len(x)] * (step * _output_scales(kernel))


@dataclasses.dataclass(frozen=True)
class CastProduct:
    """Product with the codes cast to the dtype of the rows. On GPUs and TPUs, XLA fuses the cast into the product.

    The result is multiplied by the scale of each output. `DequantizedProduct` is used for transposed kernels, and for
    kernels with zero points, multiple scales per output, or packed codes.
    """

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, transpose: bool = False) -> Float[Array, "R _"]:
        has_tiles = kernel.zero is not None or kernel.scale.shape[-1] > 1 or kernel.format.is_packed
        if transpose or has_tiles or not _may_scale_result(kernel, x):
            return DequantizedProduct()(x, kernel, transpose)
        return matmul_f32(x, kernel.format.code_values(kernel.codes).astype(x.dtype), True) * _output_scales(kernel)


@dataclasses.dataclass(frozen=True)
class AutoProduct:
    """Product selected by backend, and by number and dtype of the rows. GPUs and TPUs use `CastProduct`.

    CPUs use `FewRowsProduct` for up to 8 rows in programs of `jit_outermost`. Otherwise, CPUs use `BlockwiseProduct`
    for float32 rows, and `TwoInt8Product` for 16-bit rows, because its error is smaller than the rounding error of
    16-bit rows.
    """

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, transpose: bool = False) -> Float[Array, "R _"]:
        if not on_cpu():
            return CastProduct()(x, kernel, transpose)
        product = TwoInt8Product() if x.dtype.itemsize == 2 else BlockwiseProduct()
        return FewRowsProduct(product)(x, kernel, transpose)


def _is_int8_per_output(kernel: QuantizedKernel, x: Float[Array, "R _"]) -> bool:
    """Return whether the kernel has int8 codes, one scale per output, no zero points and a scalable product."""
    is_plain = kernel.format.code_dtype == "int8" and kernel.zero is None and kernel.scale.shape[-1] == 1
    return is_plain and _may_scale_result(kernel, x)


def _is_summable(kernel: QuantizedKernel, x: Float[Array, "R _"]) -> bool:
    """Return whether `FewRowsProduct` supports the kernel."""
    format, groups = kernel.format, kernel.scale.shape[-1]
    is_even = groups == 1 or kernel.shape[0] == groups * format.tile[1]
    is_per_output = format.tile[0] == 1 and (groups > 1 or kernel.zero is None)
    return is_even and is_per_output and _may_scale_result(kernel, x)


def _may_scale_result(kernel: QuantizedKernel, x: Float[Array, "R _"]) -> bool:
    """Return whether the result may be multiplied by the scales instead of the weights.

    This skips the rounding of the weights to the format's dtype. For 16-bit rows, the rounding may be skipped, because
    the rounding error of the rows is equally large.
    """
    return kernel.format.round_dtype is None or x.dtype.itemsize == 2


def _int8_step(x: Float[Array, "R I"]) -> Float[Array, "R 1"]:
    """Return the int8 step size of each row: 1/127 of the row's largest magnitude, with a positive lower bound."""
    return jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny * 2**24) / INT8_MAX


def _multiply_int8(rows: Float[Array, "R I"], kernel: QuantizedKernel) -> Float[Array, "R O"]:
    dimensions = (((1,), (1,)), ((), ()))
    rows = rows.astype(jnp.int8)
    sums = jax.lax.dot_general(rows, kernel.codes, dimensions, preferred_element_type=jnp.int32)
    return sums.astype(jnp.float32)


def _output_scales(kernel: QuantizedKernel) -> Float[Array, "1 O"]:
    return kernel.format.gather_rows(kernel.scale, slice(0, kernel.codes.shape[-2])).T
