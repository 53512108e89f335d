"""Grouped matrix product in a loop over blocks of rows: the work grows with the rows, whatever the backend."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.config.validate import set_positive
from nnxmoe.layers.linear.kernel import Kernel, as_kernel
from nnxmoe.layers.linear.multilinear import multilinear
from nnxmoe.layers.linear.xla_cpu import as_bits, carried, from_bits
from nnxmoe.moe.grouped_matmul import GroupedKernel
from nnxmoe.sharding import is_static


@dataclasses.dataclass(frozen=True)
class BlockedMatmul:
    """A loop over blocks of rows, each within one group: the work grows with the rows, not with the experts.

    ``block`` None: the smallest of several sizes that holds the group (of fewer sizes under differentiation). The
    backward pass saves only the inputs. For Hessian-vector products use forward over reverse: JAX 0.10 cannot apply
    reverse mode twice to these loops within ``jax.checkpoint``.
    """

    block: int | None = None

    def __post_init__(self) -> None:
        set_positive(self, "block")

    def __call__(self, rows: Float[Array, "R I"], kernel: GroupedKernel, sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
        kernel = as_kernel(kernel)
        count, groups = rows.shape[0], kernel.shape[0]
        if not is_static(count):  # blocks of one size; the last may extend beyond the rows
            block = self.block or 64
            rows = jnp.concatenate([rows, jnp.zeros((block, rows.shape[1]), rows.dtype)])
            return self._in_blocks(rows, kernel, sizes, (block,), (block,))[:count]
        if count == 0:
            return jnp.zeros((0, kernel.shape[2]), rows.dtype)
        fewer = block_sizes(count, groups, FEW_BLOCK_SIZES) if self.block is None else (min(self.block, count),)
        # With few rows per group the product is bound by reading the kernels, so padded rows cost nothing.
        many = self.block is None and count >= 32 * groups
        blocks = block_sizes(count, groups, MANY_BLOCK_SIZES) if many else fewer
        return self._in_blocks(rows, kernel, sizes, fewer, blocks)

    def _in_blocks(
        self, rows: Array, kernel: Kernel, sizes: Array, fewer: tuple[int, ...], blocks: tuple[int, ...]
    ) -> Array:
        """Compute the product in ``blocks`` of these sizes, and its gradients in blocks of the sizes ``fewer``."""
        leaves, tree = jax.tree.flatten(kernel)
        form = _Form(tree, tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves), kernel.trainable)

        def multiply(back: bool, rows: Array, sizes: Array, *leaves: Array, blocks: tuple[int, ...] = fewer) -> Array:
            return _apply(blocks, rows, tree.unflatten(leaves), sizes, back)

        def outer(rows: Array, d_out: Array, sizes: Array) -> Array:
            (leaf,) = jax.tree.leaves(_kernel_gradient(fewer, form, rows, d_out, sizes))
            return leaf

        first = functools.partial(multiply, False, blocks=blocks)
        return differentiable_grouped_matmul(multiply, outer, kernel.trainable, first=first)(rows, sizes, *leaves)


# Block sizes as multiples of the mean group size. Densest just above 1: half of balanced loads lie slightly above it.
FEW_BLOCK_SIZES = (0.5, 1.125, 1.5, 2)
MANY_BLOCK_SIZES = (0.5, 0.75, 1, 1.125, 1.25, 1.5, 2, 4)


def block_sizes(rows: int, groups: int, means: Sequence[float]) -> tuple[int, ...]:
    """Block sizes, ascending: multiples of the mean group size up to 2048, each compiled separately and holding a whole
    group. Larger groups are cut into blocks of the last size, at most 512 so that little padding is computed."""
    mean = max(1, rows // groups)
    wanted = [math.ceil(mean * times) for times in means]
    # Multiples of 16 rows, the tile of matrix products, from 32 on.
    sizes = sorted({min(-(-size // 16) * 16 if size >= 32 else size, rows) for size in wanted})
    whole = tuple(size for size in sizes if size <= 2048)
    return whole if sizes[-1] <= 512 else (*whole, 512)


def _for_each_group(blocks, sizes, body, init):
    """Fold ``body(block, several, first row, end, group, carry)`` over the non-empty groups, with the smallest block
    that holds the group, or the last block size, of which it may need ``several``. One loop per block size:
    `lax.switch` inside a single loop copies its operands."""
    ends = jnp.cumsum(sizes)
    which = jnp.sum(sizes[:, None] > jnp.asarray(blocks[:-1], sizes.dtype)[None, :], axis=1)
    which = jnp.where(sizes == 0, len(blocks), which)
    order, stops = jnp.argsort(which, stable=True), jnp.sum(which[:, None] <= jnp.arange(len(blocks))[None, :], axis=0)
    carry, first = init, 0
    for i, block in enumerate(blocks):
        several = i == len(blocks) - 1

        def step(j, carry, block=block, several=several):
            group = order[j]
            return body(block, several, ends[group] - sizes[group], ends[group], group, carry)

        carry = jax.lax.fori_loop(first, stops[i], step, carry)
        first = stops[i]
    return carry


def _for_each_block(block, several, start, end, body, init):
    """Fold ``body(first row, carry)`` over the blocks of a group; only one block unless ``several``."""
    if not several:
        return body(start, init)
    count = (end - start + block - 1) // block
    return jax.lax.fori_loop(0, count, lambda i, carry: body(start + i * block, carry), init)


def _window(block, start, end, rows):
    """Start of a slice of ``block`` rows within ``rows``, and the mask of its rows in ``start`` to ``end``."""
    first = jnp.minimum(start, rows - block)
    index = first + jnp.arange(block)
    return first, ((index >= start) & (index < end))[:, None]


@functools.partial(jax.jit, static_argnums=(0, 4))  # without jit, every eager call would recompile the loops
def _apply(blocks, rows, kernel, sizes, back):
    """The grouped product, or with ``back`` the product with each kernel's transpose."""
    count, width = rows.shape[0], kernel.shape[1 if back else 2]

    def group_product(block, several, start, end, group, carry):
        rows, kernel, out = carry
        one = kernel.expert(group)

        def block_product(start, carry):
            rows, one, out = carry
            first, mine = _window(block, start, end, count)
            tile = jax.lax.dynamic_slice_in_dim(rows, first, block)
            tile = as_bits(one.vjp_input(tile) if back else one(tile))
            old = jax.lax.dynamic_slice_in_dim(out, first, block)
            out = jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mine, tile, old), first, 0)
            return *carried(rows, one), out

        out = _for_each_block(block, several, start, end, block_product, (rows, one, out))[-1]
        return *carried(rows, kernel), out

    out = as_bits(jnp.zeros((count, width), rows.dtype))
    out = _for_each_group(blocks, sizes, group_product, (rows, kernel, out))[-1]
    return from_bits(out, rows.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _kernel_gradient(blocks, form, rows, d_out, sizes):
    """``rows.T @ d_out`` per group, as a kernel of this form."""
    kernel = form.zeros()  # only its shape is used

    def group_product(block, several, start, end, group, carry):
        rows, d_out, d_kernel = carry

        def block_product(start, carry):
            rows, d_out, total = carry
            first, mine = _window(block, start, end, rows.shape[0])
            # Mask both: rows of other groups may hold NaN, and 0 * NaN is NaN.
            tile, d_tile = (jnp.where(mine, jax.lax.dynamic_slice_in_dim(a, first, block), 0) for a in (rows, d_out))
            product = kernel.expert(0).vjp_kernel(tile, d_tile)
            return *carried(rows, d_out), product if total is None else jax.tree.map(jnp.add, total, product)

        total = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], jnp.float32), kernel) if several else None
        total = _for_each_block(block, several, start, end, block_product, (rows, d_out, total))[-1]

        def put(every, one, like):
            return jax.lax.dynamic_update_index_in_dim(every, as_bits(one.astype(like.dtype)), group, 0)

        return *carried(rows, d_out), jax.tree.map(put, d_kernel, total, kernel)

    d_kernel = jax.tree.map(lambda a: as_bits(jnp.zeros(a.shape, a.dtype)), kernel)
    d_kernel = _for_each_group(blocks, sizes, group_product, (rows, d_out, d_kernel))[-1]
    return jax.tree.map(lambda bits, a: from_bits(bits, a.dtype), d_kernel, kernel)


@dataclasses.dataclass(frozen=True)
class _Form:
    """The tree structure, shapes and dtypes of a kernel; hashable."""

    tree: Any
    leaves: tuple[tuple[tuple[int, ...], jnp.dtype], ...]
    trained: bool

    def zeros(self) -> Kernel:
        return self.tree.unflatten([jnp.zeros(*leaf) for leaf in self.leaves])


def differentiable_grouped_matmul(
    multiply: Callable[..., Array],
    outer: Callable[..., Array],
    trained: bool,
    back: bool = False,
    first: Callable[..., Array] | None = None,
) -> Callable[..., Array]:
    """``(rows, sizes, *leaves) -> rows``: the product with each group's kernel with derivatives, to any order, because
    the product, the product with the transpose and the outer product are closed under differentiation.

    Args:
        multiply: ``(back, rows, sizes, *leaves) -> rows``; ``back``: with each kernel's transpose.
        outer: ``(rows, d_out, sizes) -> leaf``: ``rows.T @ d_out`` of every group, for kernels of one leaf.
        trained: whether the kernel has a gradient.
        first: the product where nothing is differentiated; None: ``multiply``.
    """

    def d_rows(sizes: Array, *rest: Array) -> Array:
        *leaves, d_out = rest
        return differentiable_grouped_matmul(multiply, outer, trained, not back)(d_out, sizes, *leaves)

    def d_kernel(rows: Array, sizes: Array, d_out: Array) -> Array:
        return _outer_product(multiply, outer)(*((d_out, rows) if back else (rows, d_out)), sizes)

    def forward(*given: Array) -> Array:
        return differentiable_grouped_matmul(multiply, outer, trained, back)(*given)

    transposes = {0: d_rows, 2: d_kernel} if trained else {0: d_rows}
    return multilinear(first or functools.partial(multiply, back), transposes, forward)


def _outer_product(multiply: Callable[..., Array], outer: Callable[..., Array]) -> Callable[..., Array]:
    def d_rows(d_out: Array, sizes: Array, d_kernel: Array) -> Array:
        return differentiable_grouped_matmul(multiply, outer, True, back=True)(d_out, sizes, d_kernel)

    def d_d_out(rows: Array, sizes: Array, d_kernel: Array) -> Array:
        return differentiable_grouped_matmul(multiply, outer, True)(rows, sizes, d_kernel)

    def forward(*given: Array) -> Array:
        return _outer_product(multiply, outer)(*given)

    return multilinear(outer, {0: d_rows, 1: d_d_out}, forward)
