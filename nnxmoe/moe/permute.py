"""Sorting of rows by expert, and the inverse. Forward and backward passes are gathers, not scatters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from nnxmoe.layers.linear.multilinear import multilinear
from nnxmoe.sharding import is_static


class SortOrder(NamedTuple):
    """Permutation between assignments and rows sorted by expert.

    Attributes:
        assignment: Assignment index of each row.
        row: Row index of each assignment, or the out-of-range index ``num_rows`` for dropped assignments.
    """

    assignment: Int[Array, "num_rows"]
    row: Int[Array, "R"]


def sort_by_expert(ids: Int[Array, "R"], num_rows: int, num_experts: int) -> SortOrder:
    """Sort assignments by expert id with a stable sort, and drop all but the first ``num_rows``. The id E sorts last.

    Each id and index are packed into a single int32. On XLA:CPU, the packed sort of 4096 assignments takes 0.05 ms
    instead of 0.54 ms. XLA:TPU compiles the packed sort in 1.5 s instead of 6 to 17 s.
    """
    bits = max(1, (ids.size - 1).bit_length()) if is_static(ids.size) else 32
    if (num_experts + 1) << bits > jnp.iinfo(jnp.int32).max:
        order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    else:
        packed_keys = (ids.astype(jnp.int32) << bits) | jnp.arange(ids.size, dtype=jnp.int32)
        order = jnp.sort(packed_keys, stable=False) & ((1 << bits) - 1)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    return SortOrder(order[:num_rows], jnp.minimum(inverse, num_rows))


def take_or_zero(values: Array, index: Int[Array, "..."]) -> Array:
    """Return ``values[index]``, with zeros where the index is out of range."""
    return values.at[index].get(mode="fill", fill_value=0)


def gather_rows(rows: Float[Array, "N D"], index: Int[Array, "M"], inverse: Int[Array, "N K"]) -> Float[Array, "M D"]:
    """Return ``rows[index]``, with zeros where the index is N.

    Args:
        rows: Rows to gather from.
        index: Row index of each output.
        inverse: Indices of up to K outputs per row, padded with M. The backward pass uses these indices for a gather
            and a sum instead of a scatter-add.
    """

    def gather(rows: Array, index: Array, inverse: Array) -> Array:
        return take_or_zero(rows, index)

    def rows_grad(index: Array, inverse: Array, d_out: Array) -> Array:
        d_rows = take_or_zero(d_out, inverse)
        return jnp.sum(d_rows, axis=1, dtype=jnp.float32).astype(d_out.dtype)

    return multilinear(gather, {0: rows_grad})(rows, index, inverse)


def permute(
    x: Float[Array, "N D"], ids: Int[Array, "N X"], num_rows: int, num_experts: int
) -> tuple[Float[Array, "num_rows D"], SortOrder]:
    """Gather one row per assignment, sorted by expert, and drop all but the first ``num_rows`` rows.

    Assignments with the out-of-range id E sort last.
    """
    order = sort_by_expert(ids.reshape(-1), num_rows, num_experts)
    token = order.assignment // ids.shape[1]
    return gather_rows(x, token, order.row.reshape(ids.shape)), order


def unpermute(rows: Float[Array, "num_rows D"], order: SortOrder) -> Float[Array, "R D"]:
    """Return the rows in assignment order, with zero rows for dropped assignments."""
    return gather_rows(rows, order.row, order.assignment[:, None])


def combine(rows: Float[Array, "num_rows D"], order: SortOrder, weights: Float[Array, "N X"]) -> Float[Array, "N D"]:
    """Undo `permute`, and return the weighted sum of each token's rows in float32.

    The backward pass rounds the output's gradient to the rows' dtype and gathers it once per row. JAX's derivative
    would materialize a float32 array ``[N, X, D]``, and two of them on TPUs.
    """
    rows, weights = compute_gradients_together(rows, weights)
    dtype, weights_dtype, shape = rows.dtype, weights.dtype, weights.shape

    def combine_rows(rows: Array, weights: Array, assignment: Array, row: Array) -> Array:
        token_rows = take_or_zero(rows, row)
        return weighted_sum(weights, token_rows.reshape(*shape, rows.shape[-1]), axis=1)

    def output_grad_per_row(assignment: Array, d_y: Array) -> Array:
        return d_y.astype(dtype)[assignment // shape[1]]

    def rows_grad(weights: Array, assignment: Array, row: Array, d_y: Array) -> Array:
        row_weights = weights.reshape(-1)[assignment]
        return (row_weights[:, None] * output_grad_per_row(assignment, d_y)).astype(dtype)

    def weights_grad(rows: Array, assignment: Array, row: Array, d_y: Array) -> Array:
        d_y_rows = output_grad_per_row(assignment, d_y).astype(jnp.float32)
        products = jnp.sum(rows.astype(jnp.float32) * d_y_rows, axis=-1)
        return take_or_zero(products, row).reshape(shape).astype(weights_dtype)

    return multilinear(combine_rows, {0: rows_grad, 1: weights_grad})(rows, weights, *order)


@jax.custom_jvp
def compute_gradients_together(*arrays: Array) -> tuple[Array, ...]:
    """Return the arrays unchanged. The backward pass computes all of their gradients before it uses any of them.

    XLA can then free the operands of a matmul early. Compiled for TPU v5p, a training step of Mixtral-8x7B with
    `RingOfExperts` needs 5.5 GB of temporary memory instead of 6.2 GB.
    """
    return arrays


def _barrier_jvp(arrays: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    positions = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
    tangents_out = list(tangents)
    for i, tangent in zip(positions, jax.lax.optimization_barrier([tangents[i] for i in positions]), strict=True):
        tangents_out[i] = tangent
    return arrays, tuple(tangents_out)


compute_gradients_together.defjvp(_barrier_jvp, symbolic_zeros=True)


def weighted_sum(weights: Float[Array, "M N"], rows: Float[Array, "M N D"], axis: int) -> Float[Array, "_ D"]:
    """Return ``sum(weights * rows)`` over axis 0 or 1, accumulated in float32 without a float32 copy of the rows.

    XLA fuses the cast, the product and the sum. A dot product would materialize a float32 operand. The backward pass
    repeats the cast instead of saving float32 rows.
    """
    weights, rows = compute_gradients_together(weights, rows)
    if rows.dtype == jnp.float32:
        equation = "MN,MND->ND" if axis == 0 else "MN,MND->MD"
        return jnp.einsum(equation, weights, rows, precision=jax.lax.Precision.HIGHEST)

    def multiply_and_sum(weights: Array, rows: Array) -> Array:
        return jnp.sum(weights[..., None] * rows.astype(jnp.float32), axis=axis)

    return jax.checkpoint(multiply_and_sum)(weights, rows)


def clip_to_capacity(group_sizes: Int[Array, "E"], num_rows: int) -> Int[Array, "E"]:
    """Return the number of rows per group among the first ``num_rows`` rows."""
    starts = jnp.cumsum(group_sizes) - group_sizes
    return jnp.clip(num_rows - starts, 0, group_sizes)
