"""One matrix per group of rows: ``rows[R I], kernel[E I O], sizes[E] -> [R O]``, rows sorted by group.

Rows beyond ``sum(sizes)`` belong to no group and come out as zeros, on every backend.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.layers.linear import einsum, matmul, matmul_f32
from nnxmoe.moe.permute import gather_rows


class GroupedMatmul(Protocol):
    """A backend of the grouped product, with its own backward."""

    def __call__(
        self, rows: Float[Array, "R I"], kernel: Float[Array, "E I O"], sizes: Int[Array, "E"]
    ) -> Float[Array, "R O"]: ...


def equal_groups(rows: Float[Array, "E R I"], kernel: Float[Array, "E I O"]) -> Float[Array, "E R O"]:
    """As many rows for each kernel: one batched product, which also compilers split over devices."""
    return einsum("ERI,EIO->ERO", rows, kernel.astype(rows.dtype)).astype(rows.dtype)


@dataclasses.dataclass(frozen=True)
class Masked:
    """Every kernel on every row, all but the right one masked: E times the work, nothing to get wrong. The oracle."""

    def __call__(
        self, rows: Float[Array, "R I"], kernel: Float[Array, "E I O"], sizes: Int[Array, "E"]
    ) -> Float[Array, "R O"]:
        ends = jnp.cumsum(sizes)
        index = jnp.arange(rows.shape[0])
        member = (index >= (ends - sizes)[:, None]) & (index < ends[:, None])
        outs = [jnp.where(mine[:, None], matmul(rows, k), 0) for mine, k in zip(member, kernel, strict=True)]
        return functools.reduce(jnp.add, outs)


@dataclasses.dataclass(frozen=True)
class RaggedDot:
    """``jax.lax.ragged_dot``: a real grouped kernel on TPU; a masked dense product on CPU and NVIDIA GPUs."""

    def __call__(
        self, rows: Float[Array, "R I"], kernel: Float[Array, "E I O"], sizes: Int[Array, "E"]
    ) -> Float[Array, "R O"]:
        rows = zeros_beyond(rows, sizes)
        out = jax.lax.ragged_dot(rows, kernel.astype(rows.dtype), sizes, preferred_element_type=jnp.float32)
        return zeros_beyond(out, sizes).astype(rows.dtype)


def zeros_beyond(rows: Float[Array, "R D"], sizes: Int[Array, "E"]) -> Float[Array, "R D"]:
    """Rows of no group set to zero, and their gradients: kernels may leave anything there, in both directions."""
    inside = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
    return jnp.where(inside[:, None], rows, 0)


@dataclasses.dataclass(frozen=True)
class Aligned:
    """Another backend, given groups whose sizes are multiples of ``block`` rows: for kernels that need it so.

    Each group is filled up with zeros, at most ``E * (block - 1)`` rows in all.
    """

    inner: GroupedMatmul
    block: int

    def __post_init__(self) -> None:
        _check_block(self)

    def __call__(
        self, rows: Float[Array, "R I"], kernel: Float[Array, "E I O"], sizes: Int[Array, "E"]
    ) -> Float[Array, "R O"]:
        have, groups = rows.shape[0], sizes.shape[0]
        if have == 0:
            return jnp.zeros((0, kernel.shape[2]), rows.dtype)
        room = -(-(have + groups * (self.block - 1)) // self.block) * self.block
        filled = (sizes + self.block - 1) // self.block * self.block
        source, place = _moved(filled, sizes, room, have), _moved(sizes, filled, have, room)
        out = self.inner(gather_rows(rows, source, place[:, None]), kernel, filled)
        return gather_rows(out, place, source[:, None])


def _check_block(backend: Any) -> None:
    if isinstance(backend.block, bool) or not isinstance(backend.block, int) or backend.block < 1:
        raise ValueError(f"{type(backend).__name__}(block={backend.block!r}): the number of rows, a positive integer")


def _moved(ours: Int[Array, "E"], theirs: Int[Array, "E"], count: int, nowhere: int) -> Int[Array, "count"]:
    """Of ``count`` rows in groups of ``ours``, where each lies in groups of ``theirs``, which may lack it."""
    index, ends = jnp.arange(count), jnp.cumsum(ours)
    group = jnp.minimum(jnp.searchsorted(ends, index, side="right"), ours.shape[0] - 1)
    within = index - (ends - ours)[group]
    there = (jnp.cumsum(theirs) - theirs)[group] + within
    return jnp.where(within < jnp.minimum(ours, theirs)[group], there, nowhere).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Blocked:
    """A loop over blocks of rows of one group, as many as there are: work grows with the rows, not with the experts.

    A group's last block may run into the next group's rows; those are written again, rightly, by the next block.
    ``block`` None: about the mean group size. Its own backward keeps nothing but the inputs.
    """

    block: int | None = None

    def __post_init__(self) -> None:
        if self.block is not None:
            _check_block(self)

    def __call__(
        self, rows: Float[Array, "R I"], kernel: Float[Array, "E I O"], sizes: Int[Array, "E"]
    ) -> Float[Array, "R O"]:
        if rows.shape[0] == 0:
            return jnp.zeros((0, kernel.shape[2]), rows.dtype)
        return _blocked(self.block or _block_size(rows.shape[0], kernel.shape[0], rows.dtype), rows, kernel, sizes)


def _block_size(rows: int, groups: int, dtype: jnp.dtype) -> int:
    mean = max(1, rows // groups)
    smallest = 1 if dtype == jnp.float32 else 2  # XLA:CPU has no fast matrix-vector product in bfloat16
    return max(smallest, min(128, 1 << (mean - 1).bit_length()))


def _for_each_block(block, sizes, body, init):
    """Fold ``body(group, first row, end of group, carry)`` over the blocks in row order; empty groups have none."""
    ends = jnp.cumsum(sizes)
    counts = (sizes + block - 1) // block
    last = jnp.cumsum(counts)

    def step(i, carry):
        group = jnp.searchsorted(last, i, side="right")
        within = i - (last[group] - counts[group])
        return body(group, ends[group] - sizes[group] + within * block, ends[group], carry)

    return jax.lax.fori_loop(0, last[-1], step, init)


def _pad(rows, block):
    return jnp.pad(rows, ((0, block), (0, 0)))


@functools.partial(jax.jit, static_argnums=(0, 4))  # called eagerly, a loop would compile at every call
def _apply(block, rows, kernel, sizes, transpose):
    """The grouped product, or with ``transpose`` the product with each kernel's transpose."""
    padded = _pad(rows, block)

    def body(group, start, _, out):
        tile = jax.lax.dynamic_slice_in_dim(padded, start, block)
        one = jax.lax.dynamic_index_in_dim(kernel, group, keepdims=False)
        return jax.lax.dynamic_update_slice_in_dim(out, matmul(tile, one.T if transpose else one), start, 0)

    width = kernel.shape[1] if transpose else kernel.shape[2]
    out = _for_each_block(block, sizes, body, jnp.zeros((padded.shape[0], width), rows.dtype))
    inside = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
    return jnp.where(inside[:, None], out[: rows.shape[0]], 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(block, rows, kernel, sizes):
    return _apply(block, rows, kernel, sizes, False)


def _blocked_forward(block, rows, kernel, sizes):
    return _apply(block, rows, kernel, sizes, False), (rows, kernel, sizes)


@functools.partial(jax.jit, static_argnums=0)
def _blocked_backward(block, kept, d_out):
    rows, kernel, sizes = kept
    x, dy = _pad(rows, block), _pad(d_out, block)

    def body(group, start, end, d_kernel):
        mine = (start + jnp.arange(block) < end)[:, None]
        tile = jax.lax.dynamic_slice_in_dim(x, start, block)
        d_tile = jnp.where(mine, jax.lax.dynamic_slice_in_dim(dy, start, block), 0)
        old = jax.lax.dynamic_index_in_dim(d_kernel, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(d_kernel, old + matmul_f32(tile.T, d_tile), group, 0)

    d_kernel = _for_each_block(block, sizes, body, jnp.zeros(kernel.shape, jnp.float32)).astype(kernel.dtype)
    return _apply(block, d_out, kernel, sizes, True), d_kernel, None


_blocked.defvjp(_blocked_forward, _blocked_backward)
