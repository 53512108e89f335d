"""Expert parallelism: experts sharded over a mesh axis (GShard, 2020; MaxText's sparse modes).

``ExpertParallel(Sorted(), RaggedAllToAll())`` sends each row to the device of its expert and back.
``ExpertParallel(Sorted(), RingOfExperts())`` gathers all tokens of the axis on each device and sums the outputs.
"""

import dataclasses
import functools
import math
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.axes import AnyMesh
from nnxmoe.config.validate import check_object, set_positive
from nnxmoe.layers.chunks import map_chunks
from nnxmoe.moe.capacity import check_batch, check_factor
from nnxmoe.moe.dispatch import Assignments, Dispatch, DispatchInfo, assignments, dispatch_info, sorted_rows
from nnxmoe.moe.experts import ExpertFn
from nnxmoe.moe.permute import clip_to_capacity, combine, permute, unpermute
from nnxmoe.moe.ragged import TransferPlan, ragged_all_to_all
from nnxmoe.moe.router import Routing
from nnxmoe.moe.shard_map_dispatch import shard_map_dispatch
from nnxmoe.sharding import batch_axes


class Exchange(Protocol):
    """Exchange of tokens between shards, called inside ``shard_map``; returns y in float32 and the dropped count."""

    def __call__(
        self, x: Float[Array, "B T D"], chosen: Assignments, experts: ExpertFn, axis: str
    ) -> tuple[Float[Array, "B T D"], Int[Array, ""]]: ...


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """Shards the experts over ``axis`` and the batch over ``data_axes`` and ``axis``; None: all axes of the batch.

    ``inner`` is the dispatch without a mesh, and on a mesh whose ``axis`` has one device. Raises ValueError if the
    batch or the number of experts is not divisible by the shards, or if a mesh axis is missing or repeated.
    """

    inner: Dispatch
    exchange: Exchange
    axis: str = "expert"
    data_axes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_object("ExpertParallel", "inner", self.inner, "Sorted()")
        check_object("ExpertParallel", "exchange", self.exchange, "RaggedAllToAll() or RingOfExperts()")
        if isinstance(self.data_axes, str):
            raise ValueError(f"ExpertParallel(data_axes={self.data_axes!r}): give a tuple of axis names")
        if self.data_axes is None:
            return
        object.__setattr__(self, "data_axes", tuple(self.data_axes))
        named = (*self.data_axes, self.axis)
        if self.axis in self.data_axes:
            raise ValueError(f"ExpertParallel: the expert axis {self.axis!r} is also among data_axes {self.data_axes}")
        if len(set(named)) != len(named):
            raise ValueError(f"ExpertParallel: a mesh axis is named twice in data_axes {self.data_axes}")

    @property
    def token_independent(self) -> bool:
        """Not with a ``buffer_factor``: tokens compete for a buffer of limited size."""
        return getattr(self.exchange, "buffer_factor", 0) is None and getattr(self.inner, "token_independent", False)

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        if mesh is None:
            return self.inner(x, routing, experts)
        others = batch_axes(mesh) if self.data_axes is None else self.data_axes
        named = (*(axis for axis in others if axis != self.axis), self.axis)
        if missing := [axis for axis in named if axis not in mesh.shape]:
            raise ValueError(f"ExpertParallel: the mesh {dict(mesh.shape)} has no axis {missing[0]!r}")
        size = mesh.shape[self.axis]
        if experts.count % size:
            raise ValueError(f"{experts.count} experts are not divisible by the {size} devices of {self.axis}")
        axes = tuple(axis for axis in named if mesh.shape[axis] > 1)
        check_batch("ExpertParallel", x.shape[0], mesh, axes)
        if size == 1:
            return self.inner(x, routing, experts, mesh)
        if experts.rules["expert"] != self.axis:
            raise ValueError(
                f"ExpertParallel: the rules split experts over {experts.rules['expert']!r}, not over {self.axis!r}"
            )
        body = functools.partial(self.exchange, axis=self.axis)
        y, dropped = shard_map_dispatch(body, x, assignments(routing), experts, mesh, axes, self.axis)
        return y.astype(x.dtype), dispatch_info(routing, jnp.sum(dropped), dropped)


@dataclasses.dataclass(frozen=True)
class BufferedExchange:
    """``buffer_factor`` None: the receive buffer fits the worst case, all rows of the axis on one device, so nothing is
    dropped. A number: the buffer size in multiples of the balanced load; rows that do not fit are dropped and counted.
    """

    buffer_factor: float | None = None

    def __post_init__(self) -> None:
        if self.buffer_factor is not None:
            factor = check_factor(f"{type(self).__name__}(buffer_factor", self.buffer_factor)
            object.__setattr__(self, "buffer_factor", factor)


@dataclasses.dataclass(frozen=True)
class RaggedAllToAll(BufferedExchange):
    """Sends each row to its expert's device and back: permute, exchange, local permute, experts, and the inverses."""

    def __call__(
        self, x: Float[Array, "B T D"], chosen: Assignments, experts: ExpertFn, axis: str
    ) -> tuple[Float[Array, "B T D"], Int[Array, ""]]:
        size, me, mine = jax.lax.axis_size(axis), jax.lax.axis_index(axis), experts.count
        ids, weights = (a.reshape(-1, a.shape[-1]) for a in chosen)
        tokens, count = ids.shape
        room = buffer_size(self.buffer_factor, tokens, count, size, mine)
        # Permute: this shard's rows sorted by global expert, and the number of rows per expert.
        rows, order = permute(x.reshape(tokens, x.shape[-1]), ids, ids.size, size * mine)
        counts = jnp.bincount(ids.reshape(-1), length=size * mine).astype(jnp.int32)
        plan = ExchangePlan.of(jax.lax.all_gather(counts, axis).reshape(size, size, mine), me, room)
        # Exchange.
        most = min(tokens * min(count, mine), room)  # upper bound on rows from one shard to another
        move = functools.partial(ragged_all_to_all, axis=axis, most=most)
        received = move(rows, room, plan.send, plan.receive)
        # Local permute, this shard's experts, local unpermute.
        grouped, local = permute(received, plan.expert[:, None], room, mine)
        back = unpermute(experts(grouped, plan.sizes), local)
        # Exchange back; dropped rows stay zero.
        returned = move(back, ids.size, plan.receive, plan.send)
        return combine(returned, order, weights).reshape(x.shape), plan.dropped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """Send and receive counts and offsets of one shard of the axis (S shards with L experts each).

    ``expert``: local expert of each row of the receive buffer, L for unused rows; ``sizes``: rows per local expert.
    """

    send: TransferPlan
    receive: TransferPlan
    expert: Int[Array, "room"]
    sizes: Int[Array, "L"]
    dropped: Int[Array, ""]

    @classmethod
    def of(cls, counts: Int[Array, "S S L"], me: Int[Array, ""], room: int) -> "ExchangePlan":
        """The plan of shard ``me`` from ``counts[s, r, l]``, the rows of shard s for expert l of shard r. Buffers are
        filled in the order of the senders; rows beyond ``room`` are dropped."""
        wanted = jnp.sum(counts, axis=-1)
        begins = jnp.cumsum(wanted, axis=1) - wanted  # in the sender's rows
        arrives = jnp.cumsum(wanted, axis=0) - wanted  # in the receiver's buffer
        sent = jnp.clip(room - arrives, 0, wanted)
        arrives = jnp.minimum(arrives, room)
        mine = counts[:, me].reshape(-1)  # by sender, then by expert: the order in which the buffer is filled
        fits = clip_to_capacity(mine, room)
        ends = jnp.cumsum(fits)
        expert = jnp.searchsorted(ends, jnp.arange(room), side="right").astype(jnp.int32) % counts.shape[-1]
        expert = jnp.where(jnp.arange(room) < ends[-1], expert, counts.shape[-1])
        return cls(
            send=TransferPlan(begins[me], sent[me], arrives[me]),
            receive=TransferPlan(arrives[:, me], sent[:, me], begins[:, me]),
            expert=expert,
            sizes=jnp.sum(fits.reshape(counts.shape[0], -1), axis=0, dtype=jnp.int32),
            dropped=jnp.sum(mine) - jnp.sum(fits),
        )


@dataclasses.dataclass(frozen=True)
class RingOfExperts(BufferedExchange):
    """All-gathers the tokens of the axis; each device applies its own experts to all of them, and the partial outputs
    are reduce-scattered."""

    def __call__(
        self, x: Float[Array, "B T D"], chosen: Assignments, experts: ExpertFn, axis: str
    ) -> tuple[Float[Array, "B T D"], Int[Array, ""]]:
        size, mine = jax.lax.axis_size(axis), experts.count
        everyone = jax.lax.all_gather(x, axis, axis=0, tiled=True)
        routing = jnp.concatenate([a.astype(jnp.float32) for a in chosen], axis=-1)
        ids, weights = jnp.split(jax.lax.all_gather(routing, axis, axis=0, tiled=True), 2, axis=-1)
        local = ids.astype(jnp.int32) - jax.lax.axis_index(axis) * mine
        local = jnp.where((local >= 0) & (local < mine), local, mine)
        room = buffer_size(self.buffer_factor, x.shape[0] * x.shape[1], ids.shape[-1], size, mine)
        part, dropped = sorted_rows(everyone, Assignments(local, weights), experts, limit=room)
        y = jax.lax.psum_scatter(part.astype(x.dtype), axis, scatter_dimension=0, tiled=True)
        return y.astype(jnp.float32), dropped


MAX_BUFFER_FACTOR = 8  # times the balanced load, in the worst case: the most that an axis of eight devices needs


@dataclasses.dataclass(frozen=True)
class ChunkedExchange:
    """Runs ``exchange`` on one slice of each shard's sequences at a time, recomputed in the backward pass.

    The receive buffer for the worst case is that of one slice, and nothing is dropped. ``chunks`` None: as few slices
    as keep it within eight times the balanced load of all tokens: one if the axis has up to eight devices. Unlike
    `Chunked` around `ExpertParallel`, kernels are gathered once for all slices. Padding of the last slice is sent to
    no expert.
    """

    exchange: Exchange
    chunks: int | None = None

    def __post_init__(self) -> None:
        check_object("ChunkedExchange", "exchange", self.exchange, "RaggedAllToAll() or RingOfExperts()")
        set_positive(self, "chunks")

    @property
    def buffer_factor(self) -> float | None:
        """Of ``exchange``: None if nothing is dropped."""
        return getattr(self.exchange, "buffer_factor", 0.0)

    def __call__(
        self, x: Float[Array, "B T D"], chosen: Assignments, experts: ExpertFn, axis: str
    ) -> tuple[Float[Array, "B T D"], Int[Array, ""]]:
        size, factor, chunks = jax.lax.axis_size(axis), self.buffer_factor, self.chunks
        if chunks is None:
            chunks = min_chunks(factor, chosen.ids.shape[-1], size, experts.count)
        if min(chunks, x.shape[1]) == 1:
            return self.exchange(x, chosen, experts, axis)
        none = size * experts.count  # the id of no expert, as which the zeros of padding count

        def one(x: Array, ids: Array, weights: Array) -> tuple[Array, Array]:
            return self.exchange(x, Assignments(ids + none, weights), experts, axis)

        y, dropped = map_chunks(one, chunks, x, chosen.ids - none, chosen.weights)
        return y, jnp.sum(dropped)


def buffer_size(factor: float | None, tokens: int, chosen: int, size: int, mine: int) -> int:
    """Rows in a shard's buffer, given ``tokens`` on each of ``size`` shards with ``mine`` experts each."""
    worst = size * tokens * min(chosen, mine)
    return worst if factor is None else min(worst, max(1, math.ceil(factor * tokens * chosen)))


def min_chunks(factor: float | None, chosen: int, size: int, mine: int) -> int:
    """Slices that bound the receive room by ``MAX_BUFFER_FACTOR``; arguments as of `buffer_size`."""
    return (
        1 if factor is not None else math.ceil(buffer_size(None, 1, chosen, size, mine) / (chosen * MAX_BUFFER_FACTOR))
    )
