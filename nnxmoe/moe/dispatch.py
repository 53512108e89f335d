"""Dispatch of tokens to experts and combination of the outputs: ``(x, routing, experts, mesh) -> y, DispatchInfo``.

The experts receive only rows grouped by expert and the group sizes. All dispatches return the same y, except for the
assignments that they report as dropped. Padding is not sent to any expert and its y is 0.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.axes import AnyMesh, batch_axes, constrain, divided_over, shards
from nnxmoe.config.printable import short
from nnxmoe.config.validate import check_object, check_positive, is_between
from nnxmoe.layers.chunks import chunk_by_chunk
from nnxmoe.layers.dots import einsum
from nnxmoe.moe.experts import ExpertFn
from nnxmoe.moe.on_shards import on_shards
from nnxmoe.moe.permute import combine, fitting, permute, weighted_sum
from nnxmoe.moe.router import Routing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchInfo:
    """Number of assignments (token, expert) per expert, padding excluded, and how many of them were dropped for lack
    of capacity, in total and per shard of the tokens."""

    load: Int[Array, "*L E"]
    dropped: Int[Array, "*L"]
    dropped_by_shard: Int[Array, "*L S"]


class Dispatch(Protocol):
    """Protocol of a dispatch, on one device or on a mesh.

    Set ``by_token = True`` if a token's output does not depend on the other tokens. Otherwise (the
    default) tokens may compete for capacity, and the layer is always called with all of them.
    """

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]: ...


@dataclasses.dataclass(frozen=True)
class Dense:
    """Computes every expert for every token, then the weighted sum. Slow: the reference for the other dispatches."""

    by_token: ClassVar[bool] = True

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        count = routing.scores.shape[-1]
        tokens = x.shape[0] * x.shape[1]
        flat = x.reshape(tokens, x.shape[-1])
        axes = by_expert(divided_over(x.shape[0], mesh))
        rows = constrain(jnp.broadcast_to(flat, (count, *flat.shape)), mesh, *axes)
        outs = constrain(experts(rows, None), mesh, *axes)
        ids, scales = assignments(routing)
        weights = jnp.sum(jax.nn.one_hot(ids, count, dtype=bool) * scales[..., None], axis=-2)
        y = weighted_sum(weights.reshape(tokens, count).T, outs, axis=0)
        return y.reshape(x.shape).astype(x.dtype), information(routing)


@dataclasses.dataclass(frozen=True)
class Sorted:
    """Sorts the assignments by expert, computes exactly those and restores the order. No dropping, no padding.

    On a mesh each shard of the batch sorts its own tokens and gathers the experts' weights. If the batch is not
    divisible by the number of shards, every device computes the whole batch.
    """

    by_token: ClassVar[bool] = True

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        ids, weights = assignments(routing)
        axes = divided_over(x.shape[0], mesh)
        if mesh is None or not axes:
            y, _ = sorted_rows(x, ids, weights, experts, limit=None)
            return y.astype(x.dtype), information(routing)
        body = functools.partial(sorted_rows, limit=None)
        y, _ = on_shards(body, x, ids, weights, experts, mesh, axes, expert_axis=None)
        return y.astype(x.dtype), information(routing)


def sorted_rows(
    x: Float[Array, "B T D"],
    ids: Int[Array, "B T X"],
    weights: Float[Array, "B T X"],
    experts: ExpertFn,
    limit: int | None,
) -> tuple[Float[Array, "B T D"], Int[Array, ""]]:
    """``y`` in float32, and the number of assignments beyond the first ``limit`` rows, which are dropped.

    Out-of-range ids are skipped. Rows are sorted by expert, so the last experts lose rows first.
    """
    tokens, chosen = x.shape[0] * x.shape[1], ids.shape[-1]
    total = ids.size if limit is None else min(limit, ids.size)
    rows, order = permute(x.reshape(tokens, x.shape[-1]), ids.reshape(tokens, chosen), total, experts.count)
    sizes = jnp.bincount(ids.reshape(-1), length=experts.count).astype(jnp.int32)
    kept = fitting(sizes, total)
    y = combine(experts(rows, kept), order, weights.reshape(tokens, chosen))
    return y.reshape(x.shape), jnp.sum(sizes) - jnp.sum(kept)


@dataclasses.dataclass(frozen=True)
class Capacity:
    """A fixed number of slots per expert and batch row; later tokens of the sequence are dropped (GShard, 2020).

    Slots: ``max(ceil(T * X / E) * factor, factor)`` rounded down, as in MaxText. On a mesh the ``expert`` axis shards
    the dispatched tokens ``[E, B, C, D]`` along E instead of B.
    """

    by_token: ClassVar[bool] = False

    factor: float

    def __post_init__(self) -> None:
        check_factor("Capacity(factor", self.factor)

    def slots(self, length: int, chosen: int, count: int) -> int:
        """Slots per expert, C, for rows of ``length`` tokens with ``chosen`` of ``count`` experts per token."""
        slots = int(max(math.ceil(length * chosen / count) * self.factor, self.factor))
        return min(max(slots, 1), length)  # an expert receives each token at most once

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        batch, length, chosen = routing.experts.shape
        count = routing.scores.shape[-1]
        check_batch("Capacity", batch, mesh, batch_axes(mesh))
        slots = self.slots(length, chosen, count)
        ids, scales = assignments(routing)
        wanted = jax.nn.one_hot(ids, count, dtype=jnp.int32)  # all zeros for padding, whose id is out of range
        flat = wanted.reshape(batch, length * chosen, count)  # sequence order, the choices of a token adjacent
        place = (jnp.cumsum(flat, axis=1) - flat).reshape(wanted.shape)
        kept = wanted * (place < slots)
        # A token is sent to an expert at most once, so its choices can be summed before the one-hot over slots.
        slot = jax.nn.one_hot(jnp.sum(place * kept, axis=2), slots, dtype=x.dtype)
        mask = slot * jnp.sum(kept, axis=2)[..., None].astype(x.dtype)
        weights = jnp.sum(kept * scales[..., None], axis=2).astype(x.dtype)[..., None] * mask
        sent = self._to_experts(jnp.einsum("BTEC,BTD->EBCD", mask, x), mesh)
        rows = sent.reshape(count, batch * slots, x.shape[-1])
        back = self._from_experts(experts(rows, None).reshape(sent.shape), mesh)
        y = einsum("BTEC,EBCD->BTD", weights, back)
        return y.astype(x.dtype), information(routing, jnp.sum(wanted) - jnp.sum(kept))

    def _to_experts(self, rows: Float[Array, "E B C D"], mesh: AnyMesh | None) -> Float[Array, "E B C D"]:
        return constrain(constrain(rows, mesh, None, batch_axes(mesh)), mesh, *by_expert(batch_axes(mesh)))

    def _from_experts(self, rows: Float[Array, "E B C D"], mesh: AnyMesh | None) -> Float[Array, "E B C D"]:
        return constrain(constrain(rows, mesh, *by_expert(batch_axes(mesh))), mesh, None, batch_axes(mesh))


@dataclasses.dataclass(frozen=True)
class Chunked:
    """Applies ``inner`` to one slice of the sequence at a time, recomputed in the backward pass, so that only one
    slice's activations are in memory. (The slots of ``Capacity`` are then per slice.)"""

    by_token: ClassVar[bool] = False

    inner: Dispatch
    chunks: int

    def __post_init__(self) -> None:
        check_positive("Chunked", "chunks", self.chunks)
        check_object("Chunked", "inner", self.inner, "Sorted()")

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        valid = jnp.ones(x.shape[:2], bool) if routing.valid is None else routing.valid
        leaves, tree = jax.tree.flatten((x, dataclasses.replace(routing, valid=valid)))

        def one(*leaves: Array) -> tuple[Array, DispatchInfo]:
            x, routing = tree.unflatten(leaves)
            return self.inner(x, routing, experts, mesh)

        y, infos = chunk_by_chunk(one, self.chunks, *leaves)
        return y, jax.tree.map(lambda value: jnp.sum(value, axis=0, dtype=value.dtype), infos)


# Stages


def assignments(routing: Routing) -> tuple[Int[Array, "*rows X"], Float[Array, "*rows X"]]:
    """Expert ids and weights; padding gets the out-of-range id E and weight 0."""
    if routing.valid is None:
        return routing.experts, routing.weights
    valid = routing.valid[..., None]
    return jnp.where(valid, routing.experts, routing.scores.shape[-1]), jnp.where(valid, routing.weights, 0)


def by_expert(axes: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Mesh axes of the two leading dimensions of rows ``[E, B, ...]``: ``expert`` if present, and the other axes."""
    return "expert" if "expert" in axes else None, tuple(axis for axis in axes if axis != "expert")


def check_factor(what: str, factor: float) -> None:
    """Raise ValueError unless a buffer size factor is a positive finite number."""
    if not is_between(factor, 0, 2**63):
        raise ValueError(f"{what}={short(factor)}): give a positive multiple of the balanced load")


def check_batch(who: str, batch: int, mesh: AnyMesh | None, axes: Sequence[str]) -> None:
    """Raise ValueError unless the batch size is divisible by the number of shards over these mesh axes."""
    if mesh is not None and batch % shards(mesh, axes):
        raise ValueError(
            f"{who}: a batch of {batch} does not divide over {shards(mesh, axes)} devices, "
            f"{ {axis: mesh.shape[axis] for axis in axes} }: add rows of padding, or use Sorted()"
        )


def information(routing: Routing, dropped: Any = 0, by_shard: Any = None) -> DispatchInfo:
    """The `DispatchInfo` for all shards together."""
    dropped = jnp.asarray(dropped, jnp.int32)
    by_shard = dropped[None] if by_shard is None else by_shard
    return DispatchInfo(count_experts(routing), dropped, by_shard)


def count_experts(routing: Routing) -> Int[Array, "E"]:
    """Number of assignments per expert, padding excluded."""
    hits = jax.nn.one_hot(assignments(routing)[0], routing.scores.shape[-1], dtype=bool)
    return jnp.sum(hits, axis=tuple(range(hits.ndim - 1)), dtype=jnp.int32)
