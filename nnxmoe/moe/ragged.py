"""Ragged all-to-all: exchange of a variable number of rows between the shards of a mesh axis."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.layers.linear.multilinear import multilinear


class TransferPlan(NamedTuple):
    """One side of an exchange with each shard of the axis: start of the rows ``here``, their ``count``, and their start
    ``there``, in the other shard's rows."""

    here: Int[Array, "S"]
    count: Int[Array, "S"]
    there: Int[Array, "S"]


def ragged_all_to_all(
    rows: Float[Array, "R D"], room: int, send: TransferPlan, receive: TransferPlan, *, axis: str, most: int
) -> Float[Array, "room D"]:
    """The ``room`` rows that this shard receives, padded with zeros. One shard sends at most ``most`` rows to another.

    On TPUs and GPUs this is `jax.lax.ragged_all_to_all`, which XLA:CPU does not compile. On CPU it is an all-to-all of
    pieces padded to ``most`` rows, bitwise equal. The backward pass is the exchange with the two sides swapped.
    """

    def there(rows: Array, *sides: Array) -> Array:
        return _move(rows, TransferPlan(*sides[:3]), TransferPlan(*sides[3:]), room, have, axis, most)

    def back(*given: Array) -> Array:
        *sides, d_out = given
        return _move(d_out, TransferPlan(*sides[3:]), TransferPlan(*sides[:3]), have, room, axis, most)

    have = rows.shape[0]
    return multilinear(there, {0: back})(rows, *send, *receive)


def _move(rows: Any, send: TransferPlan, receive: TransferPlan, room: int, have: int, axis: str, most: int) -> Any:
    def ragged(rows: Array) -> Array:
        out = jnp.zeros((room, rows.shape[1]), rows.dtype)
        sizes = (send.here, send.count, send.there, receive.count)
        return jax.lax.ragged_all_to_all(rows, out, *sizes, axis_name=axis)

    def padded(rows: Array) -> Array:
        shards, within, place = send.count.shape[0], jnp.arange(most)[None, :], jnp.arange(room)
        index = jnp.where(within < send.count[:, None], send.here[:, None] + within, have)
        pieces = rows.at[index].get(mode="fill", fill_value=0)
        pieces = jax.lax.all_to_all(pieces, axis, split_axis=0, concat_axis=0).reshape(shards * most, -1)
        begins = receive.here
        sender = jnp.clip(jnp.searchsorted(begins, place, side="right") - 1, 0, shards - 1)
        offset = place - begins[sender]
        index = jnp.where(offset < receive.count[sender], sender * most + offset, shards * most)
        return pieces.at[index].get(mode="fill", fill_value=0)

    return jax.lax.platform_dependent(rows, cpu=padded, default=ragged)
