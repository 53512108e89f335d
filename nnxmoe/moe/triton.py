"""Grouped matrix products in one Pallas Triton kernel for GPUs, with float kernels or codes of 4 and 8 bits."""

import dataclasses
import functools
import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from nnxmoe.layers.linear.code_format import INT4_ZERO, CodeFormat
from nnxmoe.layers.linear.kernel import DenseKernel, Kernel, as_kernel
from nnxmoe.layers.linear.quantized import QuantizedKernel, QuantizedProduct
from nnxmoe.layers.linear.quantized_products import CastProduct
from nnxmoe.moe.blocked import BlockedMatmul, differentiable_grouped_matmul
from nnxmoe.moe.grouped_matmul import GroupedKernel, GroupedMatmul
from nnxmoe.sharding_rules import Rules

SIZES = (128, 64, 32, 16)  # candidate tile sizes; the first size that divides is used
COMPUTED = ("int8", "int4", "fp8", "fp4")  # code dtypes whose values are computed instead of looked up


class Tiles(NamedTuple):
    """Sizes of a Triton program.

    Attributes:
        height: Rows of the output tile.
        width: Columns of the output tile.
        depth: Inputs per step of the loop.
        warps: Number of warps.
        stages: Number of pipeline stages.
    """

    height: int
    width: int
    depth: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class TritonMatmul:
    """Grouped product in one Triton kernel for all groups, for 16-bit rows with widths that are multiples of 16.

    Each program multiplies a tile of one group's rows by a tile of the group's kernel. Codes of 4 and 8 bits are
    decoded tile by tile, so a decoding step reads each chosen expert's codes once.

    Attributes:
        fallback: The product for unsupported rows and kernels.
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
            return _sums(*((rows, d_out) if ins_first else (d_out, rows)), sizes, self.interpret)

        return differentiable_grouped_matmul(multiply, outer, kernel.trainable)(rows, sizes, *leaves)


@dataclasses.dataclass(frozen=True)
class TritonProduct:
    """Product of a few 16-bit rows with one quantized kernel, for decoding. Reads the codes once.

    Attributes:
        fallback: The product for more than ``max_rows`` rows and for unsupported kernels. Also the product on a mesh,
            because XLA cannot partition this product.
        max_rows: Largest number of rows.
        interpret: Whether to run in Pallas's interpreter.
    """

    fallback: QuantizedProduct = CastProduct()
    max_rows: int = 16
    interpret: bool = False

    def with_mesh(self, mesh: Mesh | None, rules: Rules) -> QuantizedProduct:
        return self if mesh is None or mesh.size == 1 else self.fallback

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, transpose: bool = False) -> Float[Array, "R _"]:
        stacked = jax.tree.map(lambda leaf: leaf[None], kernel)
        is_supported = 0 < x.shape[0] <= self.max_rows and x.dtype.itemsize == 2
        tiles = _tiles(x, stacked, transpose) if is_supported else None
        if tiles is None:
            return self.fallback(x, kernel, transpose)
        return _multiply(x, stacked, jnp.array([x.shape[0]]), transpose, tiles, self.interpret, jnp.dtype(jnp.float32))


def _tiles(rows: Array, kernel: Kernel, transpose: bool) -> Tiles | None:
    """Return the tile sizes of a product, or None if the kernel is not supported."""
    groups, ins, outs = kernel.shape
    ins, outs = (outs, ins) if transpose else (ins, outs)
    if isinstance(kernel, QuantizedKernel):
        kind = kernel.format
        if transpose or kernel.order is not None or kind.code_dtype not in COMPUTED:
            return None
        halves = 1 + kind.is_packed
        lengths = min(ins, kind.tile[1]) // halves, ins // halves  # codes per scale, and codes per output
    elif isinstance(kernel, DenseKernel):
        lengths = (ins,)
    else:
        return None
    mean = rows.shape[0] // min(groups, rows.shape[0])
    height = 16 if mean <= 16 else 64 if mean <= 64 else 128
    codes = len(lengths) > 1
    # The fastest sizes on an H200 (tests/benchmarks/README.md). Programs that decode codes need narrow tiles.
    widest, deepest = {16: 64, 64: 32, 128: 128}[height] if codes else 128, 128 if codes and height == 16 else 64
    depth = next((size for size in SIZES if size <= deepest and not any(length % size for length in lengths)), None)
    width = next((size for size in SIZES if size <= widest and outs % size == 0), None)
    if depth is None or width is None:
        return None
    return Tiles(height, width, depth, 8 if height == 128 else 4, 3 if height == 128 else 4)


def _language() -> Any:
    """Import Pallas's Triton module on first use, because the import takes 0.25 s."""
    return importlib.import_module("jax.experimental.pallas.triton")


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _multiply(rows, kernel, sizes, transpose, tiles, interpret, dtype=None):
    """Multiply rows by the kernel of their group. If ``dtype`` is None, the output has the rows' dtype."""
    count, groups, (height, width, depth, warps, stages) = rows.shape[0], sizes.shape[0], tiles
    outs, dtype = kernel.shape[1 if transpose else 2], dtype or rows.dtype
    sizes = jnp.append(sizes, count - jnp.sum(sizes)).astype(jnp.int32)  # the last group has the rows that are zero
    ends, needed = jnp.cumsum(sizes), -(-sizes // height)
    tile = jnp.arange(count // height + min(groups + 1, count), dtype=jnp.int32)
    group = jnp.searchsorted(jnp.cumsum(needed), tile, side="right", method="compare_all").astype(jnp.int32)
    of_group = jnp.minimum(group, groups)  # programs beyond the last tile have group number groups + 1
    first = (ends - sizes)[of_group] + (tile - (jnp.cumsum(needed) - needed)[of_group]) * height
    leaves, tree = jax.tree.flatten(kernel)

    def body(group_ref, first_ref, end_ref, rows_ref, *refs):
        *weights, out_ref = refs
        group, column = group_ref[pl.program_id(1)], pl.program_id(0) * width
        first, end = first_ref[pl.program_id(1)], end_ref[pl.program_id(1)]
        index = first + jnp.arange(height)

        def store(values):
            tile_ref = out_ref.at[pl.ds(first, height), pl.ds(column, width)]
            _language().store(tile_ref, values.astype(dtype), mask=(index < end)[:, None])

        @pl.when(group < groups)
        def _():
            refs = tree.unflatten(weights)
            codes = isinstance(kernel, QuantizedKernel)
            add = _add_codes if codes else functools.partial(_add_floats, transpose=transpose)
            step = functools.partial(add, rows_ref, jnp.minimum(index, count - 1), refs, group, column, tiles)
            length = kernel.codes.shape[-1] if codes else rows.shape[1]
            store(jax.lax.fori_loop(0, length // depth, step, jnp.zeros((height, width), jnp.float32)))

        @pl.when(group == groups)
        def _():
            store(jnp.zeros((height, width), jnp.float32))

    out_rows = count + height * interpret  # the interpreter shifts slices that extend beyond the end
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((out_rows, outs), dtype),
        grid=(outs // width, tile.shape[0]),
        compiler_params=_language().CompilerParams(warps, stages),
        interpret=interpret,
        name="differentiable_grouped_matmul",
    )(group, first, ends[of_group], rows, *leaves)[:count]


def _dot(x, y, of_x, of_y):
    """Contract axis ``of_x`` of x with axis ``of_y`` of y, accumulated in float32."""
    axes = (((of_x,), (of_y,)), ((), ()))
    return jax.lax.dot_general(x, y, axes, jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32)


def _add_floats(rows_ref, index, kernel, group, column, tiles, i, total, transpose):
    """Add the product with the i-th tile of a float kernel to ``total``."""
    outs_first = kernel.ins_first == transpose  # whether tiles are [outputs, inputs] in memory
    depth = pl.ds(i * tiles.depth, tiles.depth)
    place = (pl.ds(column, tiles.width), depth) if outs_first else (depth, pl.ds(column, tiles.width))
    return total + _dot(rows_ref[index, depth], kernel.array[(group, *place)], 1, int(outs_first))


def _add_codes(rows_ref, index, kernel, group, column, tiles, i, total):
    """Add the product with the i-th tile of codes to ``total``. A tile of 4-bit codes contains two tiles of inputs."""
    kind: CodeFormat = kernel.format
    depth = tiles.depth
    codes = kernel.codes[group, pl.ds(column, tiles.width), pl.ds(i * depth, depth)]
    inside = min(kind.tile[1] // (1 + kind.is_packed), kernel.codes.shape[-1])  # codes that share a scale
    block, within = jax.lax.div(i * depth, inside), jax.lax.rem(i * depth, inside)
    line = jax.lax.div(column + jnp.arange(tiles.width), kind.tile[0])

    def of_tile(grid):
        return grid[group, line, block if grid.shape[-1] > 1 else 0].astype(jnp.float32)[:, None]

    for half, part in enumerate((codes & 15, codes >> 4) if kind.is_packed else (codes,)):
        values = _value(kind, part)
        if kernel.zero is not None and not kind.offset:
            values = values - of_tile(kernel.zero)
        elif kind.code_dtype == "int4" and not kind.offset:
            values = values - INT4_ZERO
        weights = values * of_tile(kernel.scale) + (of_tile(kernel.zero) if kind.offset else 0.0)
        first = block * inside * (1 + kind.is_packed) + half * inside + within
        x = rows_ref[index, pl.ds(first, depth)]
        total = total + _dot(x, weights.astype(x.dtype), 1, 1)
    return total


def _value(kind: CodeFormat, codes: Any) -> Any:
    """Convert codes to float32 values.

    fp8 and fp4 codes are shifted into the bits of a float16. A factor corrects the larger exponent bias of float16.
    """
    if kind.code_dtype not in ("fp8", "fp4"):
        return codes.astype(jnp.float32)
    low, sign, up, over, bias = (0x7F, 0x80, 7, 8, 2.0**8) if kind.code_dtype == "fp8" else (7, 8, 9, 12, 2.0**14)
    codes = codes.astype(jnp.uint16)
    bits = (codes & low) << up | (codes & sign) << over
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * bias


@functools.partial(jax.jit, static_argnums=3)
def _sums(left, right, sizes, interpret):
    """Compute ``left.T @ right`` per group, ``[E, L, R]``."""
    count, groups, widths = left.shape[0], sizes.shape[0], (left.shape[1], right.shape[1])
    tiles = [next((size for size in SIZES if width % size == 0), 0) for width in widths]
    height = 32 if count // groups <= 64 else 64
    ends = jnp.cumsum(sizes).astype(jnp.int32)

    def body(start_ref, end_ref, left_ref, right_ref, out_ref):
        group = pl.program_id(2)
        places = [pl.ds(pl.program_id(axis) * tile, tile) for axis, tile in zip((1, 0), tiles, strict=True)]
        start, end = start_ref[group], end_ref[group]

        def step(i, total):
            index = start + i * height + jnp.arange(height)
            valid, index = (index < end)[:, None], jnp.minimum(index, count - 1)
            x, d = (jnp.where(valid, ref[index, p], 0) for ref, p in zip((left_ref, right_ref), places, strict=True))
            return total + _dot(x, d, 0, 0)

        total = jax.lax.fori_loop(0, (end - start + height - 1) // height, step, jnp.zeros(tiles, jnp.float32))
        out_ref[group, places[0], places[1]] = total.astype(left.dtype)

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((groups, *widths), left.dtype),
        grid=(widths[1] // tiles[1], widths[0] // tiles[0], groups),
        compiler_params=_language().CompilerParams(8, 3),
        interpret=interpret,
        name="grouped_kernel_gradient",
    )((ends - sizes).astype(jnp.int32), ends, left, right)
