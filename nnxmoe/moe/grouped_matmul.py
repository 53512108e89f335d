"""Grouped matmuls: rows are sorted by group, and each group has a separate kernel.

Outputs of rows beyond ``sum(sizes)`` are zero on every backend.
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
    """Protocol for differentiable grouped matmuls. For each group e, multiplies ``sizes[e]`` rows by ``kernel[e]``."""

    def __call__(
        self, rows: Float[Array, "R I"], kernel: GroupedKernel, sizes: Int[Array, "E"]
    ) -> Float[Array, "R O"]: ...


def batched_matmul(rows: Float[Array, "E R I"], kernel: GroupedKernel) -> Float[Array, "E R O"]:
    """Multiply groups of equal size by their kernels. XLA can partition this batched matmul over devices."""
    return as_kernel(kernel).batched_matmul(rows)


@dataclasses.dataclass(frozen=True)
class MaskedMatmul:
    """Grouped matmul that multiplies every row by every kernel and masks the other groups' results.

    This implementation costs E times the FLOPs and is the reference for all others.
    """

    def __call__(self, rows: Float[Array, "R I"], kernel: GroupedKernel, sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
        kernel, ends = as_kernel(kernel), jnp.cumsum(sizes)
        index = jnp.arange(rows.shape[0])[None, :]
        in_group = (index >= (ends - sizes)[:, None]) & (index < ends[:, None])
        outputs = [jnp.where(mask[:, None], kernel.expert(e)(rows), 0) for e, mask in enumerate(in_group)]
        return functools.reduce(jnp.add, outputs)


@dataclasses.dataclass(frozen=True)
class RaggedDotMatmul:
    """Grouped matmul with `jax.lax.ragged_dot`: a grouped kernel on TPUs, a masked dense product on CPUs and GPUs."""

    def __call__(self, rows: Float[Array, "R I"], kernel: GroupedKernel, sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
        rows = zero_unused_rows(rows, sizes)
        dense_kernel = as_kernel(kernel).dense(rows.dtype)
        out = jax.lax.ragged_dot(rows, dense_kernel, sizes, preferred_element_type=jnp.float32)
        return zero_unused_rows(out, sizes).astype(rows.dtype)


def zero_unused_rows(rows: Float[Array, "R D"], sizes: Int[Array, "E"]) -> Float[Array, "R D"]:
    """Zero the rows beyond ``sum(sizes)``. Backends may return arbitrary values or gradients for these rows."""
    is_used = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
    return jnp.where(is_used[:, None], rows, 0)


@dataclasses.dataclass(frozen=True)
class AlignedMatmul:
    """Grouped matmul that pads each group to a multiple of ``block`` rows and calls ``inner``.

    The padded array has ``R + E * (block - 1)`` rows, rounded up to a multiple of ``block``.
    """

    inner: GroupedMatmul
    block: int

    def __post_init__(self) -> None:
        set_positive(self, "block")

    def __call__(self, rows: Float[Array, "R I"], kernel: GroupedKernel, sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
        num_rows, num_groups = rows.shape[0], sizes.shape[0]
        if num_rows == 0:
            return jnp.zeros((0, as_kernel(kernel).shape[2]), rows.dtype)
        num_padded = -(-(num_rows + num_groups * (self.block - 1)) // self.block) * self.block
        padded_sizes = (sizes + self.block - 1) // self.block * self.block
        row_of_padded = _row_mapping(padded_sizes, sizes, num_padded, num_rows)
        padded_of_row = _row_mapping(sizes, padded_sizes, num_rows, num_padded)
        outputs = self.inner(gather_rows(rows, row_of_padded, padded_of_row[:, None]), kernel, padded_sizes)
        return gather_rows(outputs, padded_of_row, row_of_padded[:, None])


def _row_mapping(
    from_sizes: Int[Array, "E"], to_sizes: Int[Array, "E"], num_from: int, num_to: int
) -> Int[Array, "num_from"]:
    """Map row indices in a layout with group sizes ``from_sizes`` to row indices in a layout with ``to_sizes``.

    Rows that do not fit into the target group are mapped to ``num_to``.
    """
    index, ends = jnp.arange(num_from), jnp.cumsum(from_sizes)
    group = jnp.minimum(jnp.searchsorted(ends, index, side="right"), from_sizes.shape[0] - 1)
    offset = index - (ends - from_sizes)[group]
    target = (jnp.cumsum(to_sizes) - to_sizes)[group] + offset
    return jnp.where(offset < jnp.minimum(from_sizes, to_sizes)[group], target, num_to).astype(jnp.int32)
