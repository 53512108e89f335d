"""Grouped matrix product, one kernel per group: ``rows[R I], kernel[E I O], sizes[E] -> [R O]``, rows sorted by group.

The output of rows beyond ``sum(sizes)`` is zero on every backend.
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.config.validate import set_positive
from nnxmoe.layers.linear.kernel import Kernel, as_kernel
from nnxmoe.moe.permute import gather_rows

GroupedKernel = Kernel | Float[Array, "E I O"]


class GroupedMatmul(Protocol):
    """A backend of the grouped product, with its own backward pass. ``kernel`` may be an array."""

    def __call__(
        self, rows: Float[Array, "R I"], kernel: GroupedKernel, sizes: Int[Array, "E"]
    ) -> Float[Array, "R O"]: ...


def equal_groups(rows: Float[Array, "E R I"], kernel: GroupedKernel) -> Float[Array, "E R O"]:
    """The product for equally sized groups: one batched dot, which XLA can partition over devices."""
    return as_kernel(kernel).batched_matmul(rows)


@dataclasses.dataclass(frozen=True)
class MaskedMatmul:
    """Multiplies every row by every kernel and masks the result: E times the work. The reference for the others."""

    def __call__(self, rows: Float[Array, "R I"], kernel: GroupedKernel, sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
        kernel, ends = as_kernel(kernel), jnp.cumsum(sizes)
        index = jnp.arange(rows.shape[0])[None, :]
        member = (index >= (ends - sizes)[:, None]) & (index < ends[:, None])
        outs = [jnp.where(mine[:, None], kernel.expert(e)(rows), 0) for e, mine in enumerate(member)]
        return functools.reduce(jnp.add, outs)


@dataclasses.dataclass(frozen=True)
class RaggedDotMatmul:
    """``jax.lax.ragged_dot``: a grouped kernel on TPU, a masked dense product on CPU and NVIDIA GPUs."""

    def __call__(self, rows: Float[Array, "R I"], kernel: GroupedKernel, sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
        rows = zero_unused_rows(rows, sizes)
        dense = as_kernel(kernel).dense(rows.dtype)
        out = jax.lax.ragged_dot(rows, dense, sizes, preferred_element_type=jnp.float32)
        return zero_unused_rows(out, sizes).astype(rows.dtype)


def zero_unused_rows(rows: Float[Array, "R D"], sizes: Int[Array, "E"]) -> Float[Array, "R D"]:
    """``rows`` with those beyond ``sum(sizes)`` set to zero. Backends may return any values there, or gradients."""
    inside = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
    return jnp.where(inside[:, None], rows, 0)


@dataclasses.dataclass(frozen=True)
class AlignedMatmul:
    """Calls ``inner`` with group sizes rounded up to multiples of ``block``, for backends that require it.

    Groups are padded with zeros, at most ``E * (block - 1)`` rows in total.
    """

    inner: GroupedMatmul
    block: int

    def __post_init__(self) -> None:
        set_positive(self, "block")

    def __call__(self, rows: Float[Array, "R I"], kernel: GroupedKernel, sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
        have, groups = rows.shape[0], sizes.shape[0]
        if have == 0:
            return jnp.zeros((0, as_kernel(kernel).shape[2]), rows.dtype)
        room = -(-(have + groups * (self.block - 1)) // self.block) * self.block
        filled = (sizes + self.block - 1) // self.block * self.block
        source, place = _moved(filled, sizes, room, have), _moved(sizes, filled, have, room)
        out = self.inner(gather_rows(rows, source, place[:, None]), kernel, filled)
        return gather_rows(out, place, source[:, None])


def _moved(ours: Int[Array, "E"], theirs: Int[Array, "E"], count: int, nowhere: int) -> Int[Array, "count"]:
    """Index of each row of groups ``ours`` within groups ``theirs``; ``nowhere`` beyond the end of the group."""
    index, ends = jnp.arange(count), jnp.cumsum(ours)
    group = jnp.minimum(jnp.searchsorted(ends, index, side="right"), ours.shape[0] - 1)
    within = index - (ends - ours)[group]
    there = (jnp.cumsum(theirs) - theirs)[group] + within
    return jnp.where(within < jnp.minimum(ours, theirs)[group], there, nowhere).astype(jnp.int32)
