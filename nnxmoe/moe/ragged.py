"""Ragged all-to-all: the shards of a mesh axis exchange variable numbers of rows."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.layers.linear.multilinear import multilinear
from nnxmoe.moe.permute import clip_to_capacity, take_or_zero


class TransferPlan(NamedTuple):
    """Row ranges that one shard sends to, or receives from, the S shards of an axis, with L ranges per shard.

    Attributes:
        offsets: First row in this shard's array.
        sizes: Number of rows.
        remote_offsets: First row in the remote shard's array.
    """

    offsets: Int[Array, "S L"]
    sizes: Int[Array, "S L"]
    remote_offsets: Int[Array, "S L"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """Rows that one shard sends and receives, on an axis with S shards and L experts per shard.

    Attributes:
        send: Rows to send to each expert of each shard.
        receive: Rows to receive from each shard for each local expert. The receive buffer is sorted by local expert,
            and within each expert by sender.
        sizes: Number of received rows per local expert.
        dropped: Number of rows that are assigned to this shard's experts but do not fit into the receive buffer.
    """

    send: TransferPlan
    receive: TransferPlan
    sizes: Int[Array, "L"]
    dropped: Int[Array, ""]

    @classmethod
    def from_counts(cls, counts: Int[Array, "S S L"], shard: Int[Array, ""], capacity: int) -> "ExchangePlan":
        """Plan the exchange of one shard. If the receive buffer is too small, rows of the last senders are dropped.

        Args:
            counts: ``counts[s, r, l]`` is the number of rows that shard s sends to expert l of shard r.
            shard: Index of this shard.
            capacity: Number of rows in the receive buffer. Excess rows are dropped.
        """
        shards, _, local_experts = counts.shape
        by_receiver = counts.swapaxes(0, 1).reshape(shards, -1)  # by sender, then by expert
        accepted = jax.vmap(clip_to_capacity, (0, None))(by_receiver, capacity)
        accepted = accepted.reshape(shards, shards, local_experts).swapaxes(0, 1)  # in the axis order of ``counts``
        send_offsets = _offsets(counts)
        receive_offsets = _offsets(accepted.transpose(1, 2, 0)).transpose(2, 0, 1)  # by expert, then by sender
        sent = send_offsets[shard], accepted[shard], receive_offsets[shard]
        received = receive_offsets[:, shard], accepted[:, shard], send_offsets[:, shard]
        return cls(
            send=TransferPlan(*sent),
            receive=TransferPlan(*received),
            sizes=jnp.sum(accepted[:, shard], axis=0, dtype=jnp.int32),
            dropped=jnp.sum(counts[:, shard]) - jnp.sum(accepted[:, shard]),
        )


def _offsets(sizes: Int[Array, "S M N"]) -> Int[Array, "S M N"]:
    """Return the first row of each of the M * N consecutive ranges in each of S arrays."""
    flat_sizes = sizes.reshape(len(sizes), -1)
    return (jnp.cumsum(flat_sizes, axis=1) - flat_sizes).reshape(sizes.shape)


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
        ranges = (send.offsets, send.sizes, send.remote_offsets, receive.sizes)
        return jax.lax.ragged_all_to_all(rows, output, *(array.reshape(-1) for array in ranges), axis_name=axis)

    def padded(rows: Array) -> Array:
        blocks = take_or_zero(rows, _row_indices(send, max_rows, rows.shape[0]))
        blocks = jax.lax.all_to_all(blocks, axis, split_axis=0, concat_axis=0).reshape(-1, rows.shape[1])
        buffer_rows = _row_indices(receive, max_rows, buffer_size).reshape(-1)
        count = buffer_rows.size  # the index of unused rows of the buffer
        block_rows = jnp.full(buffer_size, count).at[buffer_rows].set(jnp.arange(count), mode="drop")
        return take_or_zero(blocks, block_rows)

    return jax.lax.platform_dependent(rows, cpu=padded, default=ragged)


def _row_indices(plan: TransferPlan, max_rows: int, out_of_range: int) -> Int[Array, "S max_rows"]:
    """Return the indices of this shard's rows in the ranges of each remote shard, padded with ``out_of_range``."""
    ends = jnp.cumsum(plan.sizes, axis=1)
    position = jnp.arange(max_rows)

    def shard_indices(offsets: Array, sizes: Array, ends: Array) -> Array:
        range_index = jnp.searchsorted(ends, position, side="right")  # index of the range that contains the row
        shift = (offsets - (ends - sizes)).at[range_index].get(mode="fill", fill_value=0)
        return jnp.where(position < ends[-1], position + shift, out_of_range)

    return jax.vmap(shard_indices)(plan.offsets, plan.sizes, ends)
