"""Grouped matmul that loops over blocks of rows. FLOPs scale with the number of rows on every backend."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.config.arguments import CheckedFields
from nnxmoe.config.validate import set_positive
from nnxmoe.layers.linear.kernel import Kernel, as_kernel
from nnxmoe.layers.linear.multilinear import multilinear
from nnxmoe.layers.linear.xla_cpu import as_bits, from_bits, with_barrier
from nnxmoe.moe.grouped_matmul import GroupedKernel
from nnxmoe.sharding import is_static


@dataclasses.dataclass(frozen=True)
class BlockedMatmul(CheckedFields):
    """Grouped matmul that loops over blocks of rows. All rows of a block belong to the same group.

    FLOPs scale with the number of rows, not with the number of experts. The backward pass saves only the inputs.
    Compute Hessian-vector products in forward-over-reverse mode, because JAX 0.10 cannot apply reverse mode twice to
    these loops inside ``jax.checkpoint``.

    Attributes:
        block: Rows per block. If ``None``, each group uses the smallest of several block sizes that fits the group.
            Under differentiation, at most as many block sizes are used.
    """

    block: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        set_positive(self, "block")

    def __call__(self, rows: Float[Array, "R I"], kernel: GroupedKernel, sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
        kernel = as_kernel(kernel)
        num_rows, num_groups = rows.shape[0], kernel.shape[0]
        if not is_static(num_rows):  # use one block size, and pad because the last block may extend beyond the rows
            block = self.block or 64
            rows = jnp.concatenate([rows, jnp.zeros((block, rows.shape[1]), rows.dtype)])
            return self._multiply_in_blocks(rows, kernel, sizes, (block,), (block,))[:num_rows]
        if num_rows == 0:
            return jnp.zeros((0, kernel.shape[2]), rows.dtype)
        if self.block is not None:
            blocks = (min(self.block, num_rows),)
            return self._multiply_in_blocks(rows, kernel, sizes, blocks, blocks)
        vjp_blocks = block_sizes(num_rows, num_groups, FEW_SIZE_FACTORS)
        if num_rows >= 32 * num_groups:
            blocks = block_sizes(num_rows, num_groups, MANY_SIZE_FACTORS)
        elif num_rows > 4 * num_groups:  # reading the kernels dominates the run time, so extra padding costs nothing
            blocks = vjp_blocks
        else:
            blocks = block_sizes(num_rows, num_groups, DECODE_SIZE_FACTORS)
        return self._multiply_in_blocks(rows, kernel, sizes, vjp_blocks, blocks)

    def _multiply_in_blocks(
        self, rows: Array, kernel: Kernel, sizes: Array, vjp_blocks: tuple[int, ...], blocks: tuple[int, ...]
    ) -> Array:
        """Compute the product with block sizes ``blocks``, and its derivatives with block sizes ``vjp_blocks``."""
        leaves, tree = jax.tree.flatten(kernel)
        spec = _KernelSpec(tree, tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves), kernel.trainable)

        def multiply(transpose: bool, rows: Array, sizes: Array, *leaves: Array) -> Array:
            return _apply(vjp_blocks, rows, tree.unflatten(leaves), sizes, transpose)

        def primal(rows: Array, sizes: Array, *leaves: Array) -> Array:
            return _apply(blocks, rows, tree.unflatten(leaves), sizes, False)

        def outer(rows: Array, d_out: Array, sizes: Array) -> Array:
            (leaf,) = jax.tree.leaves(_kernel_gradient(vjp_blocks, spec, rows, d_out, sizes))
            return leaf

        product = differentiable_grouped_matmul(multiply, outer, kernel.trainable, primal=primal)
        return product(rows, sizes, *leaves)


# Block sizes as multiples of the mean group size. The factors are dense just above 1, because about half of the groups
# are slightly larger than the mean if the load is balanced. Groups of decoding steps have only a few rows, and each
# additional block reads the whole kernel again.
FEW_SIZE_FACTORS = (0.5, 1.125, 1.5, 2)
DECODE_SIZE_FACTORS = (0.5, 1, 2, 4)
MANY_SIZE_FACTORS = (0.5, 0.75, 1, 1.125, 1.25, 1.5, 2, 4)


def block_sizes(rows: int, groups: int, factors: Sequence[float]) -> tuple[int, ...]:
    """Return the block sizes: the mean group size times each factor, ascending, up to 2048.

    A group that fits into a block uses a single block. Larger groups are split into blocks of the last size. If the
    largest size exceeds 512, 512 is appended as the last size to limit padding. Each size is compiled separately.
    """
    mean_size = max(1, rows // groups)
    sizes: set[int] = set()
    for factor in factors:
        size = math.ceil(mean_size * factor)
        if size >= 32:
            size = -(-size // 16) * 16  # matrix products use tiles of 16 rows
        sizes.add(min(size, rows))
    group_sizes = tuple(size for size in sorted(sizes) if size <= 2048)
    return group_sizes if max(sizes) <= 512 else (*group_sizes, 512)


def _for_each_group(blocks, sizes, body, init):
    """Fold ``body(block, is_last_size, first_row, end_row, group, carry)`` over the non-empty groups.

    Each group uses the smallest block size that fits the group, or several blocks of the last size. The function runs
    one loop per block size, because `lax.switch` inside a single loop copies its operands.
    """
    ends = jnp.cumsum(sizes)
    size_index = jnp.sum(sizes[:, None] > jnp.asarray(blocks[:-1], sizes.dtype)[None, :], axis=1)
    size_index = jnp.where(sizes == 0, len(blocks), size_index)
    order, end_indices = (
        jnp.argsort(size_index, stable=True),
        jnp.sum(size_index[:, None] <= jnp.arange(len(blocks))[None, :], axis=0),
    )
    carry, first_index = init, 0
    for i, block in enumerate(blocks):
        is_last_size = i == len(blocks) - 1

        def step(j, carry, block=block, is_last_size=is_last_size):
            group = order[j]
            return body(block, is_last_size, ends[group] - sizes[group], ends[group], group, carry)

        carry = jax.lax.fori_loop(first_index, end_indices[i], step, carry)
        first_index = end_indices[i]
    return carry


def _for_each_block(block, is_last_size, start, end, body, init):
    """Fold ``body(first_row, carry)`` over the blocks of a group. Only the last block size may need several blocks."""
    if not is_last_size:
        return body(start, init)
    num_blocks = (end - start + block - 1) // block
    return jax.lax.fori_loop(0, num_blocks, lambda i, carry: body(start + i * block, carry), init)


def _window(block, start, end, rows):
    """Return the start of a slice of ``block`` rows, and a mask of the slice's rows in ``[start, end)``."""
    first_row = jnp.minimum(start, rows - block)
    index = first_row + jnp.arange(block)
    return first_row, ((index >= start) & (index < end))[:, None]


@functools.partial(jax.jit, static_argnums=(0, 4))  # without jit, each eager call would recompile the loops
def _apply(blocks, rows, kernel, sizes, transpose):
    """Compute the grouped matmul. If ``transpose``, multiply by the transposed kernels."""
    num_rows, width = rows.shape[0], kernel.shape[1 if transpose else 2]

    def group_product(block, is_last_size, start, end, group, carry):
        def block_product(start, carry):
            rows, kernel, out = carry
            bits = jax.tree.map(as_bits, kernel).expert(group)  # in this loop, because XLA:CPU copies a carried slice
            group_kernel = jax.tree.map(lambda leaf, leaf_bits: from_bits(leaf_bits, leaf.dtype), kernel, bits)
            first_row, mask = _window(block, start, end, num_rows)
            tile = jax.lax.dynamic_slice_in_dim(rows, first_row, block)
            tile = as_bits(group_kernel.vjp_input(tile) if transpose else group_kernel(tile))
            old_tile = jax.lax.dynamic_slice_in_dim(out, first_row, block)
            out = jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mask, tile, old_tile), first_row, 0)
            return *with_barrier(rows, kernel), out

        return _for_each_block(block, is_last_size, start, end, block_product, carry)

    out = as_bits(jnp.zeros((num_rows, width), rows.dtype))
    out = _for_each_group(blocks, sizes, group_product, (rows, kernel, out))[-1]
    return from_bits(out, rows.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _kernel_gradient(blocks, spec, rows, d_out, sizes):
    """Compute ``rows.T @ d_out`` per group, as a kernel with the structure of ``spec``."""
    kernel = spec.zeros()  # only its shape is used

    def group_product(block, is_last_size, start, end, group, carry):
        rows, d_out, d_kernel = carry

        def block_product(start, carry):
            rows, d_out, total = carry
            first_row, mask = _window(block, start, end, rows.shape[0])
            # Mask both operands, because rows of other groups may be NaN, and 0 * NaN is NaN.
            tile, d_tile = (
                jnp.where(mask, jax.lax.dynamic_slice_in_dim(x, first_row, block), 0) for x in (rows, d_out)
            )
            product = kernel.expert(0).vjp_kernel(tile, d_tile)
            return *with_barrier(rows, d_out), product if total is None else jax.tree.map(jnp.add, total, product)

        total = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], jnp.float32), kernel) if is_last_size else None
        total = _for_each_block(block, is_last_size, start, end, block_product, (rows, d_out, total))[-1]

        def write_group(bits, gradient, leaf):
            return jax.lax.dynamic_update_index_in_dim(bits, as_bits(gradient.astype(leaf.dtype)), group, 0)

        return *with_barrier(rows, d_out), jax.tree.map(write_group, d_kernel, total, kernel)

    d_kernel = jax.tree.map(lambda a: as_bits(jnp.zeros(a.shape, a.dtype)), kernel)
    d_kernel = _for_each_group(blocks, sizes, group_product, (rows, d_out, d_kernel))[-1]
    return jax.tree.map(lambda bits, a: from_bits(bits, a.dtype), d_kernel, kernel)


@dataclasses.dataclass(frozen=True)
class _KernelSpec:
    """Hashable description of a kernel: tree structure, shapes and dtypes."""

    tree: Any
    leaves: tuple[tuple[tuple[int, ...], jnp.dtype], ...]
    trained: bool

    def zeros(self) -> Kernel:
        return self.tree.unflatten([jnp.zeros(*leaf) for leaf in self.leaves])


def differentiable_grouped_matmul(
    multiply: Callable[..., Array],
    outer: Callable[..., Array],
    trainable: bool,
    transpose: bool = False,
    primal: Callable[..., Array] | None = None,
) -> Callable[..., Array]:
    """Return a grouped matmul ``(rows, sizes, *leaves) -> rows`` that is differentiable to any order.

    Derivatives of any order are again products with the kernels, products with the transposed kernels, or outer
    products per group.

    Args:
        multiply: ``(transpose, rows, sizes, *leaves) -> rows``. Multiplies by the kernels or the transposed kernels.
        outer: ``(rows, d_out, sizes) -> leaf``. Computes ``rows.T @ d_out`` per group, for kernels with a single leaf.
        trainable: Whether the kernel has a gradient.
        transpose: Whether to multiply by the transposed kernels.
        primal: Product for calls that are not differentiated. Defaults to ``multiply``.
    """

    def d_rows(sizes: Array, *rest: Array) -> Array:
        *leaves, d_out = rest
        return differentiable_grouped_matmul(multiply, outer, trainable, not transpose)(d_out, sizes, *leaves)

    def d_kernel(rows: Array, sizes: Array, d_out: Array) -> Array:
        return _outer_product(multiply, outer)(*((d_out, rows) if transpose else (rows, d_out)), sizes)

    def forward(*args: Array) -> Array:
        return differentiable_grouped_matmul(multiply, outer, trainable, transpose)(*args)

    transposes = {0: d_rows, 2: d_kernel} if trainable else {0: d_rows}
    return multilinear(primal or functools.partial(multiply, transpose), transposes, forward)


def _outer_product(multiply: Callable[..., Array], outer: Callable[..., Array]) -> Callable[..., Array]:
    def d_rows(d_out: Array, sizes: Array, d_kernel: Array) -> Array:
        return differentiable_grouped_matmul(multiply, outer, True, transpose=True)(d_out, sizes, d_kernel)

    def d_d_out(rows: Array, sizes: Array, d_kernel: Array) -> Array:
        return differentiable_grouped_matmul(multiply, outer, True)(rows, sizes, d_kernel)

    def forward(*args: Array) -> Array:
        return _outer_product(multiply, outer)(*args)

    return multilinear(outer, {0: d_rows, 1: d_d_out}, forward)
