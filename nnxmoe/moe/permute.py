"""Sorting rows by expert and back, by gathers in the forward and the backward pass."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.layers.linear.multilinear import multilinear
from nnxmoe.sharding import is_static


class SortOrder(NamedTuple):
    """Permutation of assignments to rows sorted by expert: ``assignment[row]``, and its inverse ``row[assignment]``; a
    dropped assignment has the number of rows (out of range)."""

    assignment: Int[Array, "rows"]
    row: Int[Array, "R"]


def sort_by_expert(ids: Int[Array, "R"], rows: int, groups: int) -> SortOrder:
    """The first ``rows`` assignments, sorted by expert (stable); ids are 0 to ``groups``, the last one of none.

    Sorts one int32 of id and index, which is distinct, instead of pairs: 0.05 ms instead of 0.54 for 4096 assignments
    on XLA:CPU, and a program that XLA:TPU compiles in 1.5 s instead of 6 to 17 s.
    """
    bits = max(1, (ids.size - 1).bit_length()) if is_static(ids.size) else 32
    if (groups + 1) << bits > jnp.iinfo(jnp.int32).max:
        order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    else:
        packed = (ids.astype(jnp.int32) << bits) | jnp.arange(ids.size, dtype=jnp.int32)
        order = jnp.sort(packed, stable=False) & ((1 << bits) - 1)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    return SortOrder(order[:rows], jnp.minimum(back, rows))


def gather_rows(rows: Float[Array, "N D"], index: Int[Array, "M"], back: Int[Array, "N K"]) -> Float[Array, "M D"]:
    """``rows[index]``, zeros where the index is N. ``back``: the output indices of each row (M: none).

    ``back`` makes the backward pass a gather and a sum; the transpose of a gather would be a scatter-add.
    """

    def gather(rows: Array, index: Array, back: Array) -> Array:
        return rows.at[index].get(mode="fill", fill_value=0)

    def sums(index: Array, back: Array, d_out: Array) -> Array:
        d_rows = d_out.at[back].get(mode="fill", fill_value=0)
        return jnp.sum(d_rows, axis=1, dtype=jnp.float32).astype(d_out.dtype)

    return multilinear(gather, {0: sums})(rows, index, back)


def permute(
    x: Float[Array, "N D"], ids: Int[Array, "N X"], rows: int, groups: int
) -> tuple[Float[Array, "rows D"], SortOrder]:
    """One row per assignment, sorted by expert (0 to ``groups``, the last one of none), cut to the first ``rows``."""
    order = sort_by_expert(ids.reshape(-1), rows, groups)
    return gather_rows(x, order.assignment // ids.shape[1], order.row.reshape(ids.shape)), order


def unpermute(rows: Float[Array, "rows D"], order: SortOrder) -> Float[Array, "R D"]:
    """Rows in the order of the assignments; zeros for dropped assignments."""
    return gather_rows(rows, order.row, order.assignment[:, None])


def combine(rows: Float[Array, "rows D"], order: SortOrder, weights: Float[Array, "N X"]) -> Float[Array, "N D"]:
    """Undo `permute` and return the weighted sum of each token's rows, in float32."""
    back = unpermute(rows, order).reshape(*weights.shape, rows.shape[-1])
    return weighted_sum(weights, back, axis=1)


def weighted_sum(weights: Float[Array, "M N"], rows: Float[Array, "M N D"], axis: int) -> Float[Array, "_ D"]:
    """``sum(weights * rows)`` over axis 0 or 1, in float32, without materialising the rows in float32.

    XLA fuses the cast, the product and the sum; a dot would need a float32 operand. The backward pass casts again.
    """
    if rows.dtype == jnp.float32:
        return jnp.einsum(
            "MN,MND->ND" if axis == 0 else "MN,MND->MD", weights, rows, precision=jax.lax.Precision.HIGHEST
        )

    def add(weights: Array, rows: Array) -> Array:
        return jnp.sum(weights[..., None] * rows.astype(jnp.float32), axis=axis)

    return jax.checkpoint(add)(weights, rows)


def clip_to_capacity(sizes: Int[Array, "E"], rows: int) -> Int[Array, "E"]:
    """The number of rows of each group within the first ``rows`` rows."""
    start = jnp.cumsum(sizes) - sizes
    return jnp.clip(rows - start, 0, sizes)
