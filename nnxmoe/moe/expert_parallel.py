"""Expert parallelism: experts are sharded over a mesh axis (GShard, 2020; MaxText's sparse modes).

``ExpertParallel(Sorted(), RaggedAllToAll())`` sends each row to the device of its expert and back.
``ExpertParallel(Sorted(), RingOfExperts())`` all-gathers the tokens over the axis and reduce-scatters the outputs.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.axes import AnyMesh
from nnxmoe.config.arguments import CheckedFields
from nnxmoe.config.validate import check_object, check_type, set_positive
from nnxmoe.layers.chunks import map_chunks
from nnxmoe.moe.capacity import check_batch, check_factor
from nnxmoe.moe.dispatch import Assignments, Dispatch, DispatchInfo, apply_sorted, dispatch_info, mask_padding
from nnxmoe.moe.experts import ExpertFn
from nnxmoe.moe.permute import permute, unpermute, weighted_sum
from nnxmoe.moe.ragged import ExchangePlan, ragged_all_to_all
from nnxmoe.moe.selection import Routing
from nnxmoe.moe.shard_map_dispatch import shard_map_dispatch
from nnxmoe.sharding import batch_axes, context_shard_axes
from nnxmoe.sharding_rules import shard_count


class Exchange(Protocol):
    """Protocol for token exchanges between shards. An exchange runs inside ``shard_map`` and receives local shards.

    An exchange returns the outputs in float32 and the number of dropped assignments.
    """

    def __call__(
        self, x: Float[Array, "B T D"], assignments: Assignments, experts: ExpertFn, axis: str
    ) -> tuple[Float[Array, "B T D"], Int[Array, ""]]: ...


@dataclasses.dataclass(frozen=True)
class ExpertParallel(CheckedFields):
    """Dispatch that shards the experts over ``axis``, and the batch over ``data_axes`` and ``axis``.

    Attributes:
        inner: Dispatch to use without a mesh, or if ``axis`` has size 1.
        exchange: Exchanges tokens between shards and applies the experts.
        axis: Mesh axis of the experts.
        data_axes: Mesh axes of the batch. Defaults to all batch axes of the mesh.

    Raises:
        ValueError: If the number of shards does not divide the batch size or the number of experts, a mesh axis is
            missing or repeated, or the sharding rules do not shard experts over ``axis``.
    """

    inner: Dispatch
    exchange: Exchange
    axis: str = "expert"
    data_axes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_object("ExpertParallel", "inner", self.inner, "Sorted()")
        check_object("ExpertParallel", "exchange", self.exchange, "RaggedAllToAll() or RingOfExperts()")
        check_type("ExpertParallel: axis", self.axis, str, "the name of a mesh axis")
        if not isinstance(self.data_axes, list | tuple | None):
            raise ValueError(f"ExpertParallel(data_axes={self.data_axes!r}): data_axes must be a tuple of axis names")
        if self.data_axes is None:
            return
        object.__setattr__(self, "data_axes", tuple(self.data_axes))
        if self.axis in self.data_axes:
            raise ValueError(f"ExpertParallel: the expert axis {self.axis!r} is also in data_axes {self.data_axes}")
        if len(set(self.data_axes)) != len(self.data_axes):
            raise ValueError(f"ExpertParallel: a mesh axis is repeated in data_axes {self.data_axes}")

    @property
    def token_independent(self) -> bool:
        """Whether tokens are processed independently. With a ``buffer_factor``, they compete for the receive buffer."""
        return getattr(self.exchange, "buffer_factor", 0) is None and getattr(self.inner, "token_independent", False)

    def _row_axes(self, mesh: AnyMesh | None) -> tuple[str, ...]:
        data_axes = batch_axes(mesh) if self.data_axes is None else self.data_axes
        return (*(axis for axis in data_axes if axis != self.axis), self.axis)

    def needed_factor(self, routing: Routing, mesh: AnyMesh | None = None) -> Float[Array, ""]:
        """Return the smallest buffer factor at which this routing drops no assignments."""
        return jnp.divide(*_shard_load(routing, mesh, self._row_axes(mesh)))

    def fits(self, routing: Routing, mesh: AnyMesh | None = None) -> Bool[Array, ""]:
        """Return whether this routing drops no assignments. Raises ValueError without a ``buffer_factor``."""
        if not isinstance(self.exchange, BufferedExchange) or self.exchange.buffer_factor is None:
            raise ValueError(
                f"ExpertParallel(…, {self.exchange}): only an exchange with a buffer_factor and without chunks can be "
                "checked for drops, such as RaggedAllToAll(buffer_factor)"
            )
        load, balanced = _shard_load(routing, mesh, self._row_axes(mesh))
        return load <= max(1, math.ceil(self.exchange.buffer_factor * balanced))

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        if mesh is None:
            return self.inner(x, routing, experts)
        axes = self._row_axes(mesh)
        if missing_axes := [axis for axis in axes if axis not in mesh.shape]:
            raise ValueError(f"ExpertParallel: the mesh {dict(mesh.shape)} has no axis {missing_axes[0]!r}")
        size = mesh.shape[self.axis]
        if experts.count % size:
            raise ValueError(f"{experts.count} experts are not divisible by the {size} devices of {self.axis}")
        axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
        check_batch("ExpertParallel", x.shape[0], mesh, axes)
        if size == 1:
            return self.inner(x, routing, experts, mesh)
        if experts.rules["expert"] != self.axis:
            raise ValueError(
                f"ExpertParallel: the rules shard experts over {experts.rules['expert']!r}, not over {self.axis!r}"
            )
        body = functools.partial(self.exchange, axis=self.axis)
        y, dropped = shard_map_dispatch(body, x, mask_padding(routing), experts, mesh, axes, self.axis)
        return y.astype(x.dtype), dispatch_info(routing, jnp.sum(dropped), dropped)


def _shard_load(routing: Routing, mesh: AnyMesh | None, row_axes: Sequence[str]) -> tuple[Int[Array, ""], int]:
    """Compute the largest and the balanced load of an expert shard in an exchange.

    Args:
        routing: Routing of all tokens.
        mesh: Device mesh.
        row_axes: Mesh axes that shard the batch. The last axis also shards the experts. Devices along the last axis
            exchange rows.

    Returns:
        The largest load and the balanced load. A load is the number of assignments that an expert shard receives. The
        largest load covers all groups of devices that exchange rows.
    """
    if mesh is None or mesh.shape[row_axes[-1]] == 1:  # no exchange
        return jnp.zeros((), jnp.int32), 1
    batch, length, _ = routing.experts.shape
    shards, groups = mesh.shape[row_axes[-1]], shard_count(mesh, row_axes[:-1])
    token_shards = shard_count(mesh, context_shard_axes(length, mesh))
    # Padding has the expert id E. Its owner is out of range, so `one_hot` does not count it.
    owners = mask_padding(routing).ids // (routing.scores.shape[-1] // shards)
    counts = jnp.sum(jax.nn.one_hot(owners, shards, dtype=jnp.int32), axis=2)
    loads = jnp.sum(counts.reshape(groups, batch // groups, token_shards, -1, shards), axis=(1, 3))
    return jnp.max(loads), owners.size // (groups * shards * token_shards)


@dataclasses.dataclass(frozen=True)
class BufferedExchange(CheckedFields):
    """Exchange with a receive buffer.

    Attributes:
        buffer_factor: Buffer size as a multiple of the balanced load. Rows that do not fit are dropped and counted. If
            ``None``, the buffer has the worst-case size, all rows of the axis, and no rows are dropped.
    """

    buffer_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer_factor is not None:
            factor = check_factor(f"{type(self).__name__}(buffer_factor", self.buffer_factor)
            object.__setattr__(self, "buffer_factor", factor)


@dataclasses.dataclass(frozen=True)
class RaggedAllToAll(BufferedExchange):
    """Exchange that sends each row to the device of its expert and back."""

    def __call__(
        self, x: Float[Array, "B T D"], assignments: Assignments, experts: ExpertFn, axis: str
    ) -> tuple[Float[Array, "B T D"], Int[Array, ""]]:
        shards, shard, local_experts = jax.lax.axis_size(axis), jax.lax.axis_index(axis), experts.count
        ids, weights = (array.reshape(-1, array.shape[-1]) for array in assignments)
        tokens, experts_per_token = ids.shape
        capacity = buffer_size(self.buffer_factor, tokens, experts_per_token, shards, local_experts)
        # Sort this shard's rows by global expert id. Plan the exchange from the row counts per expert of all shards.
        rows, order = permute(x.reshape(tokens, x.shape[-1]), ids, ids.size, shards * local_experts)
        counts = jnp.bincount(ids.reshape(-1), length=shards * local_experts).astype(jnp.int32)
        all_counts = jax.lax.all_gather(counts, axis).reshape(shards, shards, local_experts)
        plan = ExchangePlan.from_counts(all_counts, shard, capacity)
        # Send the rows to the shards of their experts, where they arrive sorted by local expert.
        max_rows = min(tokens * min(experts_per_token, local_experts), capacity)
        exchange = functools.partial(ragged_all_to_all, axis=axis, max_rows=max_rows)
        grouped_rows = exchange(rows, capacity, plan.send, plan.receive)
        outputs = experts(grouped_rows, plan.sizes)
        # Send the outputs back. Dropped rows stay zero.
        returned_rows = exchange(outputs, ids.size, plan.receive, plan.send)
        # `combine` would need up to 10 % more memory in a training step of DeepSeek-V3 (compiled for TPU v5p).
        token_rows = unpermute(returned_rows, order).reshape(tokens, experts_per_token, -1)
        return weighted_sum(weights, token_rows, axis=1).reshape(x.shape), plan.dropped


@dataclasses.dataclass(frozen=True)
class RingOfExperts(BufferedExchange):
    """Exchange that all-gathers the tokens over the axis.

    Each device applies its experts to all gathered tokens. A reduce-scatter sums the partial outputs.
    """

    def __call__(
        self, x: Float[Array, "B T D"], assignments: Assignments, experts: ExpertFn, axis: str
    ) -> tuple[Float[Array, "B T D"], Int[Array, ""]]:
        shards, local_experts = jax.lax.axis_size(axis), experts.count
        all_tokens = jax.lax.all_gather(x, axis, axis=0, tiled=True)
        packed_assignments = jnp.concatenate([array.astype(jnp.float32) for array in assignments], axis=-1)
        ids, weights = jnp.split(jax.lax.all_gather(packed_assignments, axis, axis=0, tiled=True), 2, axis=-1)
        local_ids = ids.astype(jnp.int32) - jax.lax.axis_index(axis) * local_experts
        local_ids = jnp.where((local_ids >= 0) & (local_ids < local_experts), local_ids, local_experts)
        capacity = buffer_size(self.buffer_factor, x.shape[0] * x.shape[1], ids.shape[-1], shards, local_experts)
        partial_outputs, dropped = apply_sorted(all_tokens, Assignments(local_ids, weights), experts, max_rows=capacity)
        y = jax.lax.psum_scatter(partial_outputs.astype(x.dtype), axis, scatter_dimension=0, tiled=True)
        return y.astype(jnp.float32), dropped


MAX_BUFFER_FACTOR = 8  # multiple of the balanced load that covers the worst case on up to eight devices


@dataclasses.dataclass(frozen=True)
class ChunkedExchange(CheckedFields):
    """Exchange that runs ``exchange`` on one chunk of each sequence at a time. The backward pass rematerializes chunks.

    The receive buffer only needs to fit the rows of one chunk. Unlike `Chunked` around `ExpertParallel`, this class
    gathers the kernels once for all chunks. Padding in the last chunk is not assigned to experts.

    Attributes:
        exchange: Exchange of a single chunk.
        chunks: Number of chunks. By default 1 if ``exchange`` has a buffer factor or the axis has at most eight
            devices. Otherwise the smallest number for which the receive buffer is at most eight times the buffer of
            perfectly balanced routing.
    """

    exchange: Exchange
    chunks: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_object("ChunkedExchange", "exchange", self.exchange, "RaggedAllToAll() or RingOfExperts()")
        set_positive(self, "chunks")

    @property
    def buffer_factor(self) -> float | None:
        """Buffer factor of ``exchange``, or ``None`` if no rows are dropped."""
        return getattr(self.exchange, "buffer_factor", 0.0)

    def __call__(
        self, x: Float[Array, "B T D"], assignments: Assignments, experts: ExpertFn, axis: str
    ) -> tuple[Float[Array, "B T D"], Int[Array, ""]]:
        shards, chunks = jax.lax.axis_size(axis), self.chunks
        if chunks is None:
            chunks = min_chunks(self.buffer_factor, assignments.ids.shape[-1], shards, experts.count)
        if min(chunks, x.shape[1]) == 1:
            return self.exchange(x, assignments, experts, axis)
        # `map_chunks` pads ids with 0. Subtracting and re-adding E turns the padding into the out-of-range id E.
        num_experts = shards * experts.count

        def exchange_chunk(x: Array, ids: Array, weights: Array) -> tuple[Array, Array]:
            return self.exchange(x, Assignments(ids + num_experts, weights), experts, axis)

        y, dropped = map_chunks(exchange_chunk, chunks, x, assignments.ids - num_experts, assignments.weights)
        return y, jnp.sum(dropped)


def buffer_size(factor: float | None, tokens: int, experts_per_token: int, shards: int, local_experts: int) -> int:
    """Return the number of rows in a shard's receive buffer.

    Args:
        factor: Buffer size as a multiple of the balanced load. ``None`` for the worst-case size.
        tokens: Number of tokens per shard.
        experts_per_token: Number of experts per token, X.
        shards: Number of shards of the expert axis.
        local_experts: Number of experts per shard.
    """
    worst_case = shards * tokens * min(experts_per_token, local_experts)
    return worst_case if factor is None else min(worst_case, max(1, math.ceil(factor * tokens * experts_per_token)))


def min_chunks(factor: float | None, experts_per_token: int, shards: int, local_experts: int) -> int:
    """Return the smallest number of chunks that limits the buffer to ``MAX_BUFFER_FACTOR``; see `buffer_size`."""
    if factor is not None:
        return 1
    rows_per_token = buffer_size(None, 1, experts_per_token, shards, local_experts)
    return math.ceil(rows_per_token / (experts_per_token * MAX_BUFFER_FACTOR))
