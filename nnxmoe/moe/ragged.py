"""Ragged all-to-all: the shards of a mesh axis exchange variable numbers of rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.layers.linear.multilinear import multilinear


class TransferPlan(NamedTuple):
    """Row ranges that one shard sends to, or receives from, each of the S shards of an axis.

    Attributes:
        offsets: First row in this shard's array.
        sizes: Number of rows.
        remote_offsets: First row in the remote shard's array.
    """

    offsets: Int[Array, "S"]
    sizes: Int[Array, "S"]
    remote_offsets: Int[Array, "S"]


def ragged_all_to_all(
    rows: Float[Array, "R D"], buffer_size: int, send: TransferPlan, receive: TransferPlan, *, axis: str, max_rows: int
) -> Float[Array, "buffer_size D"]:
    """Exchange rows between the shards of a mesh axis. The backward pass swaps ``send`` and ``receive``.

    TPUs and GPUs use `jax.lax.ragged_all_to_all`. XLA:CPU does not support this operation, so CPUs use an all-to-all of
    blocks padded to ``max_rows`` rows. The results are bitwise equal.

    Args:
        rows: Rows of this shard.
        buffer_size: Number of rows in the receive buffer.
        send: Rows to send to each shard.
        receive: Rows to receive from each shard.
        axis: Mesh axis of the exchange.
        max_rows: Upper bound on the number of rows that a shard sends to any single shard.

    Returns:
        The receive buffer. Unused rows are zero.
    """
    num_rows = rows.shape[0]

    def exchange(rows: Array, *plans: Array) -> Array:
        send, receive = TransferPlan(*plans[:3]), TransferPlan(*plans[3:])
        return _exchange(rows, send, receive, buffer_size, axis, max_rows)

    def rows_grad(*args: Array) -> Array:
        *plans, d_out = args
        send, receive = TransferPlan(*plans[:3]), TransferPlan(*plans[3:])
        return _exchange(d_out, receive, send, num_rows, axis, max_rows)

    return multilinear(exchange, {0: rows_grad})(rows, *send, *receive)


def _exchange(rows: Any, send: TransferPlan, receive: TransferPlan, buffer_size: int, axis: str, max_rows: int) -> Any:
    def ragged(rows: Array) -> Array:
        output = jnp.zeros((buffer_size, rows.shape[1]), rows.dtype)
        sizes = (send.offsets, send.sizes, send.remote_offsets, receive.sizes)
        return jax.lax.ragged_all_to_all(rows, output, *sizes, axis_name=axis)

    def padded(rows: Array) -> Array:
        shards, offset, position = send.sizes.shape[0], jnp.arange(max_rows)[None, :], jnp.arange(buffer_size)
        index = jnp.where(offset < send.sizes[:, None], send.offsets[:, None] + offset, rows.shape[0])
        blocks = rows.at[index].get(mode="fill", fill_value=0)
        blocks = jax.lax.all_to_all(blocks, axis, split_axis=0, concat_axis=0).reshape(shards * max_rows, -1)
        starts = receive.offsets
        sender = jnp.clip(jnp.searchsorted(starts, position, side="right") - 1, 0, shards - 1)
        offset = position - starts[sender]
        index = jnp.where(offset < receive.sizes[sender], sender * max_rows + offset, shards * max_rows)
        return blocks.at[index].get(mode="fill", fill_value=0)

    return jax.lax.platform_dependent(rows, cpu=padded, default=ragged)
