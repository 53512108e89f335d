"""Dispatch of tokens to experts, and combination of the expert outputs.

An assignment is a pair of a token and one of the token's X experts. A dispatch creates one row per assignment, calls
the experts with rows grouped by expert, multiplies the outputs by the router's weights and sums them per token. All
dispatches return the same output, except for dropped assignments (see `DispatchInfo`). Padding is not assigned to
experts, and the output for padding is 0.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.axes import AnyMesh
from nnxmoe.moe.experts import ExpertFn
from nnxmoe.moe.permute import clip_to_capacity, combine, permute, weighted_sum
from nnxmoe.moe.selection import Routing
from nnxmoe.sharding import batch_shard_axes, context_shard_axes, shard_constraint


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchInfo:
    """Assignment counts, excluding padding. Stacked layers have a leading axis L.

    Attributes:
        load: Number of assignments per expert, including dropped assignments.
        dropped: Number of assignments dropped for lack of capacity.
        dropped_by_shard: Number of dropped assignments per token shard.
    """

    load: Int[Array, "*L E"]
    dropped: Int[Array, "*L"]
    dropped_by_shard: Int[Array, "*L S"]


class Assignments(NamedTuple):
    """Expert ids and weights of each token. Dispatches skip out-of-range ids."""

    ids: Int[Array, "*rows X"]
    weights: Float[Array, "*rows X"]


class Dispatch(Protocol):
    """Protocol for dispatches.

    A dispatch with ``token_independent = True`` computes each token's output independently of the other tokens.
    Without this attribute, tokens are assumed to compete for capacity, so the layer always receives the whole batch.
    """

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]: ...


@dataclasses.dataclass(frozen=True)
class Dense:
    """Dispatch that applies every expert to every token. Slow; the reference for all other dispatches."""

    token_independent: ClassVar[bool] = True

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        num_experts = routing.scores.shape[-1]
        num_tokens = x.shape[0] * x.shape[1]
        tokens = x.reshape(num_tokens, x.shape[-1])
        axes = expert_row_axes(batch_shard_axes(x.shape[0], mesh))
        rows = shard_constraint(jnp.broadcast_to(tokens, (num_experts, *tokens.shape)), mesh, *axes)
        outputs = shard_constraint(experts(rows, None), mesh, *axes)
        ids, weights = mask_padding(routing)
        all_weights = jnp.sum(jax.nn.one_hot(ids, num_experts, dtype=bool) * weights[..., None], axis=-2)
        y = weighted_sum(all_weights.reshape(num_tokens, num_experts).T, outputs, axis=0)
        return y.reshape(x.shape).astype(x.dtype), dispatch_info(routing)


@dataclasses.dataclass(frozen=True)
class Sorted:
    """Dropless dispatch that sorts the assignments by expert, without padding.

    On a mesh, each device sorts its shard of the tokens and all-gathers the experts' kernels. If the number of shards
    does not divide the batch, every device computes the whole batch.
    """

    token_independent: ClassVar[bool] = True

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        axes = batch_shard_axes(x.shape[0], mesh)
        if mesh is None or not (axes or context_shard_axes(x.shape[1], mesh)):
            y, _ = apply_sorted(x, mask_padding(routing), experts)
        else:
            from nnxmoe.moe.shard_map_dispatch import shard_map_dispatch

            y, _ = shard_map_dispatch(apply_sorted, x, mask_padding(routing), experts, mesh, axes, expert_axis=None)
        return y.astype(x.dtype), dispatch_info(routing)


def apply_sorted(
    x: Float[Array, "B T D"], assignments: Assignments, experts: ExpertFn, max_rows: int | None = None
) -> tuple[Float[Array, "B T D"], Int[Array, ""]]:
    """Sort the assignments by expert, apply the experts, and sum the weighted outputs of each token.

    Args:
        x: Token activations.
        assignments: Expert ids and weights of each token.
        experts: Experts to apply.
        max_rows: Maximum number of rows to compute. Excess rows are dropped, starting with the last experts. If
            ``None``, all rows are computed.

    Returns:
        The outputs in float32, and the number of dropped assignments.
    """
    ids, weights = (array.reshape(-1, array.shape[-1]) for array in assignments)
    num_rows = ids.size if max_rows is None else min(max_rows, ids.size)
    rows, order = permute(x.reshape(-1, x.shape[-1]), ids, num_rows, experts.count)
    group_sizes = jnp.bincount(ids.reshape(-1), length=experts.count).astype(jnp.int32)
    computed_sizes = clip_to_capacity(group_sizes, num_rows)
    y = combine(experts(rows, computed_sizes), order, weights)
    return y.reshape(x.shape), jnp.sum(group_sizes) - jnp.sum(computed_sizes)


def mask_padding(routing: Routing) -> Assignments:
    """Return the expert ids and weights of each token. Padding is assigned the out-of-range id E with weight 0."""
    if routing.valid is None:
        return Assignments(routing.experts, routing.weights)
    valid = routing.valid[..., None]
    ids = jnp.where(valid, routing.experts, routing.scores.shape[-1])
    return Assignments(ids, jnp.where(valid, routing.weights, 0))


def expert_row_axes(axes: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Split a batch's mesh axes for rows ``[E, B, ...]``: axis ``expert``, if present, shards E. All others shard B."""
    return "expert" if "expert" in axes else None, tuple(axis for axis in axes if axis != "expert")


def dispatch_info(
    routing: Routing, dropped: int | Int[Array, ""] = 0, dropped_by_shard: Int[Array, "S"] | None = None
) -> DispatchInfo:
    """Count the assignments per expert over all shards. ``dropped_by_shard`` defaults to a single shard."""
    dropped = jnp.asarray(dropped, jnp.int32)
    dropped_by_shard = dropped[None] if dropped_by_shard is None else dropped_by_shard
    expert_mask = jax.nn.one_hot(mask_padding(routing).ids, routing.scores.shape[-1], dtype=bool)
    load = jnp.sum(expert_mask, axis=tuple(range(expert_mask.ndim - 1)), dtype=jnp.int32)
    return DispatchInfo(load, dropped, dropped_by_shard)
