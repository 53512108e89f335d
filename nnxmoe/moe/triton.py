"""Grouped matmuls in a single Pallas Triton kernel for GPUs, with float, 8-bit or 4-bit weights."""

import dataclasses
import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from nnxmoe.config.arguments import CheckedFields
from nnxmoe.config.validate import set_positive
from nnxmoe.layers.linear.code_format import INT4_ZERO, CodeFormat
from nnxmoe.layers.linear.kernel import DenseKernel, Kernel, as_kernel
from nnxmoe.layers.linear.quantized import QuantizedKernel, QuantizedProduct
from nnxmoe.layers.linear.quantized_products import CastProduct
from nnxmoe.moe.blocked import BlockedMatmul, differentiable_grouped_matmul
from nnxmoe.moe.grouped_matmul import GroupedKernel, GroupedMatmul
from nnxmoe.sharding_rules import Rules

TILE_SIZES = (128, 64, 32, 16)  # Candidate tile sizes. The largest size that divides the dimension is used.
COMPUTED = ("int8", "int4", "fp8", "fp4")  # Code dtypes that are dequantized without a lookup table.


class Tiles(NamedTuple):
    """Tile sizes and launch options of a Triton program.

    Attributes:
        height: Number of rows of the output tile.
        width: Number of columns of the output tile.
        depth: Number of inputs per loop step.
        warps: Number of warps.
        stages: Number of pipeline stages.
    """

    height: int
    width: int
    depth: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class TritonMatmul(CheckedFields):
    """Grouped matmul in a single Triton kernel, for 16-bit rows and widths that are multiples of 16.

    Each program multiplies a tile of one group's rows by a tile of the group's kernel. 4-bit and 8-bit codes are
    dequantized tile by tile, so a decoding step reads the codes of each selected expert once.

    Attributes:
        fallback: Implementation for unsupported rows and kernels.
        interpret: Whether to run in Pallas's interpreter, on any backend.
    """

    fallback: GroupedMatmul = BlockedMatmul()
    interpret: bool = False

    def __call__(self, rows: Float[Array, "R I"], kernel: GroupedKernel, sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
        kernel = as_kernel(kernel)
        if isinstance(kernel, DenseKernel):
            kernel = kernel.cast(rows.dtype)
        if rows.shape[0] == 0 or rows.dtype.itemsize != 2 or _tiles(rows, kernel, False) is None:
            return self.fallback(rows, kernel, sizes)
        leaves, tree = jax.tree.flatten(kernel)

        def multiply(transpose: bool, rows: Array, sizes: Array, *leaves: Array) -> Array:
            kernel = tree.unflatten(leaves)
            tiles = _tiles(rows, kernel, transpose)
            if tiles is not None:
                return _multiply(rows, kernel, sizes, transpose, tiles, self.interpret)
            return self.fallback(rows, DenseKernel(kernel.transposed(rows.dtype), ins_first=transpose), sizes)

        def outer(rows: Array, d_out: Array, sizes: Array) -> Array:
            ins_first = tree.unflatten([0]).ins_first
            return _kernel_gradient(*((rows, d_out) if ins_first else (d_out, rows)), sizes, self.interpret)

        return differentiable_grouped_matmul(multiply, outer, kernel.trainable)(rows, sizes, *leaves)


@dataclasses.dataclass(frozen=True)
class TritonProduct(CheckedFields):
    """Product of a few 16-bit rows with one quantized kernel, for decoding. Reads the codes once.

    Attributes:
        fallback: Product for more than ``max_rows`` rows, for unsupported kernels, and for meshes with several devices.
            XLA cannot partition the Triton kernel.
        max_rows: Maximum number of rows.
        interpret: Whether to run in Pallas's interpreter.
    """

    fallback: QuantizedProduct = CastProduct()
    max_rows: int = 16
    interpret: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        set_positive(self, "max_rows")

    def with_mesh(self, mesh: Mesh | None, rules: Rules) -> QuantizedProduct:
        return self if mesh is None or mesh.size == 1 else self.fallback

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, transpose: bool = False) -> Float[Array, "R _"]:
        stacked_kernel = jax.tree.map(lambda leaf: leaf[None], kernel)
        is_supported = 0 < x.shape[0] <= self.max_rows and x.dtype.itemsize == 2
        tiles = _tiles(x, stacked_kernel, transpose) if is_supported else None
        if tiles is None:
            return self.fallback(x, kernel, transpose)
        return _multiply(
            x, stacked_kernel, jnp.array([x.shape[0]]), transpose, tiles, self.interpret, jnp.dtype(jnp.float32)
        )


def _tiles(rows: Array, kernel: Kernel, transpose: bool) -> Tiles | None:
    """Return the tile sizes for a product, or ``None`` if the kernel does not support the operands."""
    groups, ins, outs = kernel.shape
    ins, outs = (outs, ins) if transpose else (ins, outs)
    if isinstance(kernel, QuantizedKernel):
        code_format = kernel.format
        if transpose or kernel.order is not None or code_format.code_dtype not in COMPUTED:
            return None
        codes_per_byte = 1 + code_format.is_packed
        # bytes per scale, and bytes per output
        lengths = min(ins, code_format.tile[1]) // codes_per_byte, ins // codes_per_byte
    elif isinstance(kernel, DenseKernel):
        lengths = (ins,)
    else:
        return None
    mean_rows = rows.shape[0] // min(groups, rows.shape[0])
    height = 16 if mean_rows <= 16 else 64 if mean_rows <= 64 else 128
    is_quantized = len(lengths) > 1
    # Fastest sizes on an H200 (tests/benchmarks/README.md). Programs that dequantize codes need narrow tiles.
    width_limit, depth_limit = (
        {16: 64, 64: 32, 128: 128}[height] if is_quantized else 128,
        128 if is_quantized and height == 16 else 64,
    )
    depth = next(
        (size for size in TILE_SIZES if size <= depth_limit and not any(length % size for length in lengths)), None
    )
    width = next((size for size in TILE_SIZES if size <= width_limit and outs % size == 0), None)
    if depth is None or width is None:
        return None
    return Tiles(height, width, depth, 8 if height == 128 else 4, 3 if height == 128 else 4)


def _language() -> Any:
    """Import Pallas's Triton module. The import takes 0.25 s, so it is deferred to the first use."""
    return importlib.import_module("jax.experimental.pallas.triton")


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _multiply(rows, kernel, sizes, transpose, tiles, interpret, dtype=None):
    """Multiply rows by the kernel of their group. The output dtype defaults to the dtype of the rows."""
    count, groups, (height, width, depth, warps, stages) = rows.shape[0], sizes.shape[0], tiles
    outs, dtype = kernel.shape[1 if transpose else 2], dtype or rows.dtype
    # The extra group contains the rows beyond the last group. The output of these rows is zero.
    sizes = jnp.append(sizes, count - jnp.sum(sizes)).astype(jnp.int32)
    ends, num_tiles = jnp.cumsum(sizes), -(-sizes // height)
    tile = jnp.arange(count // height + min(groups + 1, count), dtype=jnp.int32)
    group = jnp.searchsorted(jnp.cumsum(num_tiles), tile, side="right", method="compare_all").astype(jnp.int32)
    group_index = jnp.minimum(group, groups)  # `group` is `groups + 1` for programs past the last tile
    first_row = (ends - sizes)[group_index] + (tile - (jnp.cumsum(num_tiles) - num_tiles)[group_index]) * height
    leaves, tree = jax.tree.flatten(kernel)

    def body(group_ref, first_ref, end_ref, rows_ref, *refs):
        *weights, out_ref = refs
        group, column = group_ref[pl.program_id(1)], pl.program_id(0) * width
        first_row, end = first_ref[pl.program_id(1)], end_ref[pl.program_id(1)]
        row_index = first_row + jnp.arange(height)

        def store(values):
            tile_ref = out_ref.at[pl.ds(first_row, height), pl.ds(column, width)]
            _language().store(tile_ref, values.astype(dtype), mask=(row_index < end)[:, None])

        @pl.when(group < groups)
        def _():
            refs = tree.unflatten(weights)
            is_quantized = isinstance(kernel, QuantizedKernel)
            add = _add_codes if is_quantized else functools.partial(_add_floats, transpose=transpose)
            step = functools.partial(add, rows_ref, jnp.minimum(row_index, count - 1), refs, group, column, tiles)
            length = kernel.codes.shape[-1] if is_quantized else rows.shape[1]
            store(jax.lax.fori_loop(0, length // depth, step, jnp.zeros((height, width), jnp.float32)))

        @pl.when(group == groups)
        def _():
            store(jnp.zeros((height, width), jnp.float32))

    out_rows = count + height * interpret  # the interpreter shifts out-of-bounds slices
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((out_rows, outs), dtype),
        grid=(outs // width, tile.shape[0]),
        compiler_params=_language().CompilerParams(warps, stages),
        interpret=interpret,
        name="differentiable_grouped_matmul",
    )(group, first_row, ends[group_index], rows, *leaves)[:count]


def _dot(x, y, x_axis, y_axis):
    """Contract axis ``x_axis`` of x with axis ``y_axis`` of y, accumulated in float32."""
    axes = (((x_axis,), (y_axis,)), ((), ()))
    return jax.lax.dot_general(x, y, axes, jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32)


def _add_floats(rows_ref, index, kernel, group, column, tiles, i, total, transpose):
    """Add the product with the i-th tile of a float kernel to ``total``."""
    outs_first = kernel.ins_first == transpose  # True if tiles are [outputs, inputs] in memory
    depth = pl.ds(i * tiles.depth, tiles.depth)
    tile_slices = (pl.ds(column, tiles.width), depth) if outs_first else (depth, pl.ds(column, tiles.width))
    return total + _dot(rows_ref[index, depth], kernel.array[(group, *tile_slices)], 1, int(outs_first))


def _add_codes(rows_ref, index, kernel, group, column, tiles, i, total):
    """Add the product with the i-th tile of codes to ``total``. A tile of 4-bit codes covers two tiles of inputs."""
    code_format: CodeFormat = kernel.format
    depth = tiles.depth
    codes = kernel.codes[group, pl.ds(column, tiles.width), pl.ds(i * depth, depth)]
    codes_per_scale = min(code_format.tile[1] // (1 + code_format.is_packed), kernel.codes.shape[-1])  # codes per scale
    block, offset = jax.lax.div(i * depth, codes_per_scale), jax.lax.rem(i * depth, codes_per_scale)
    scale_row = jax.lax.div(column + jnp.arange(tiles.width), code_format.tile[0])

    def scales_of_tile(grid):
        return grid[group, scale_row, block if grid.shape[-1] > 1 else 0].astype(jnp.float32)[:, None]

    for half, tile_codes in enumerate((codes & 15, codes >> 4) if code_format.is_packed else (codes,)):
        values = _value(code_format, tile_codes)
        if kernel.zero is not None and not code_format.offset:
            values = values - scales_of_tile(kernel.zero)
        elif code_format.code_dtype == "int4" and not code_format.offset:
            values = values - INT4_ZERO
        weights = values * scales_of_tile(kernel.scale) + (scales_of_tile(kernel.zero) if code_format.offset else 0.0)
        first_input = block * codes_per_scale * (1 + code_format.is_packed) + half * codes_per_scale + offset
        x = rows_ref[index, pl.ds(first_input, depth)]
        total = total + _dot(x, weights.astype(x.dtype), 1, 1)
    return total


def _value(code_format: CodeFormat, codes: Any) -> Any:
    """Convert codes to float32 values.

    The bits of fp8 and fp4 codes are shifted into a float16. A factor corrects for the larger exponent bias of float16.
    """
    if code_format.code_dtype not in ("fp8", "fp4"):
        return codes.astype(jnp.float32)
    magnitude_mask, sign_mask, magnitude_shift, sign_shift, scale = (
        (0x7F, 0x80, 7, 8, 2.0**8) if code_format.code_dtype == "fp8" else (7, 8, 9, 12, 2.0**14)
    )
    codes = codes.astype(jnp.uint16)
    bits = (codes & magnitude_mask) << magnitude_shift | (codes & sign_mask) << sign_shift
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * scale


@functools.partial(jax.jit, static_argnums=3)
def _kernel_gradient(left, right, sizes, interpret):
    """Compute ``left.T @ right`` per group, ``[E, L, R]``."""
    count, groups, widths = left.shape[0], sizes.shape[0], (left.shape[1], right.shape[1])
    tiles = [next((size for size in TILE_SIZES if width % size == 0), 0) for width in widths]
    height = 32 if count // groups <= 64 else 64
    ends = jnp.cumsum(sizes).astype(jnp.int32)

    def body(start_ref, end_ref, left_ref, right_ref, out_ref):
        group = pl.program_id(2)
        column_slices = [pl.ds(pl.program_id(axis) * tile, tile) for axis, tile in zip((1, 0), tiles, strict=True)]
        start, end = start_ref[group], end_ref[group]

        def step(i, total):
            row_index = start + i * height + jnp.arange(height)
            valid, row_index = (row_index < end)[:, None], jnp.minimum(row_index, count - 1)
            x, y = (
                jnp.where(valid, ref[row_index, p], 0)
                for ref, p in zip((left_ref, right_ref), column_slices, strict=True)
            )
            return total + _dot(x, y, 0, 0)

        total = jax.lax.fori_loop(0, (end - start + height - 1) // height, step, jnp.zeros(tiles, jnp.float32))
        out_ref[group, column_slices[0], column_slices[1]] = total.astype(left.dtype)

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((groups, *widths), left.dtype),
        grid=(widths[1] // tiles[1], widths[0] // tiles[0], groups),
        compiler_params=_language().CompilerParams(8, 3),
        interpret=interpret,
        name="grouped_kernel_gradient",
    )((ends - sizes).astype(jnp.int32), ends, left, right)
