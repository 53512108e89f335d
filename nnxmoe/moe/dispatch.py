"""Dispatch of tokens to experts and combination of the outputs: ``(x, routing, experts, mesh) -> y, DispatchInfo``.

The experts receive only rows grouped by expert and the group sizes. All dispatches return the same y, except for the
assignments that they report as dropped. Padding is not sent to any expert and its y is 0.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.axes import AnyMesh
from nnxmoe.moe.experts import ExpertFn
from nnxmoe.moe.permute import clip_to_capacity, combine, permute, weighted_sum
from nnxmoe.moe.router import Routing
from nnxmoe.sharding import batch_shard_axes, context_shard_axes, shard_constraint


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchInfo:
    """Number of assignments (token, expert) per expert, padding excluded, and how many of them were dropped for lack
    of capacity, in total and per shard of the tokens."""

    load: Int[Array, "*L E"]
    dropped: Int[Array, "*L"]
    dropped_by_shard: Int[Array, "*L S"]


class Assignments(NamedTuple):
    """The experts of each token and their weights; ids that are out of range are skipped."""

    ids: Int[Array, "*rows X"]
    weights: Float[Array, "*rows X"]


class Dispatch(Protocol):
    """Protocol of a dispatch, on one device or on a mesh.

    Set ``token_independent = True`` if a token's output does not depend on the other tokens. Otherwise (the
    default) tokens may compete for capacity, and the layer is always called with all of them.
    """

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]: ...


@dataclasses.dataclass(frozen=True)
class Dense:
    """Computes every expert for every token, then the weighted sum. Slow: the reference for the other dispatches."""

    token_independent: ClassVar[bool] = True

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        count = routing.scores.shape[-1]
        tokens = x.shape[0] * x.shape[1]
        flat = x.reshape(tokens, x.shape[-1])
        axes = expert_row_axes(batch_shard_axes(x.shape[0], mesh))
        rows = shard_constraint(jnp.broadcast_to(flat, (count, *flat.shape)), mesh, *axes)
        outs = shard_constraint(experts(rows, None), mesh, *axes)
        ids, scales = assignments(routing)
        weights = jnp.sum(jax.nn.one_hot(ids, count, dtype=bool) * scales[..., None], axis=-2)
        y = weighted_sum(weights.reshape(tokens, count).T, outs, axis=0)
        return y.reshape(x.shape).astype(x.dtype), dispatch_info(routing)


@dataclasses.dataclass(frozen=True)
class Sorted:
    """Sorts the assignments by expert, computes exactly those and restores the order. No dropping, no padding.

    On a mesh each shard of the batch sorts its own tokens and gathers the experts' weights. If the batch is not
    divisible by the number of shards, every device computes the whole batch.
    """

    token_independent: ClassVar[bool] = True

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        axes = batch_shard_axes(x.shape[0], mesh)
        if mesh is None or not (axes or context_shard_axes(x.shape[1], mesh)):
            y, _ = sorted_rows(x, assignments(routing), experts)
        else:
            from nnxmoe.moe.shard_map_dispatch import shard_map_dispatch

            y, _ = shard_map_dispatch(sorted_rows, x, assignments(routing), experts, mesh, axes, expert_axis=None)
        return y.astype(x.dtype), dispatch_info(routing)


def sorted_rows(
    x: Float[Array, "B T D"], chosen: Assignments, experts: ExpertFn, limit: int | None = None
) -> tuple[Float[Array, "B T D"], Int[Array, ""]]:
    """``y`` in float32, and the number of assignments beyond the first ``limit`` rows, which are dropped.

    Rows are sorted by expert, so the last experts lose rows first.
    """
    ids, weights = (a.reshape(-1, a.shape[-1]) for a in chosen)
    total = ids.size if limit is None else min(limit, ids.size)
    rows, order = permute(x.reshape(-1, x.shape[-1]), ids, total, experts.count)
    sizes = jnp.bincount(ids.reshape(-1), length=experts.count).astype(jnp.int32)
    kept = clip_to_capacity(sizes, total)
    y = combine(experts(rows, kept), order, weights)
    return y.reshape(x.shape), jnp.sum(sizes) - jnp.sum(kept)


def assignments(routing: Routing) -> Assignments:
    """Expert ids and weights; padding gets the out-of-range id E and weight 0."""
    if routing.valid is None:
        return Assignments(routing.experts, routing.weights)
    valid = routing.valid[..., None]
    ids = jnp.where(valid, routing.experts, routing.scores.shape[-1])
    return Assignments(ids, jnp.where(valid, routing.weights, 0))


def expert_row_axes(axes: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Mesh axes of the two leading dimensions of rows ``[E, B, ...]``: ``expert`` if present, and the other axes."""
    return "expert" if "expert" in axes else None, tuple(axis for axis in axes if axis != "expert")


def dispatch_info(routing: Routing, dropped: Any = 0, by_shard: Any = None) -> DispatchInfo:
    """The `DispatchInfo` for all shards together."""
    dropped = jnp.asarray(dropped, jnp.int32)
    by_shard = dropped[None] if by_shard is None else by_shard
    hits = jax.nn.one_hot(assignments(routing).ids, routing.scores.shape[-1], dtype=bool)
    load = jnp.sum(hits, axis=tuple(range(hits.ndim - 1)), dtype=jnp.int32)
    return DispatchInfo(load, dropped, by_shard)
