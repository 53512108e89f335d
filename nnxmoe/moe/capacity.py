"""Dispatches with bounded memory: `Capacity` limits the slots per expert, and `Chunked` splits the sequence."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.axes import AnyMesh
from nnxmoe.config.arguments import CheckedFields
from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_number, check_object, set_positive
from nnxmoe.layers.chunks import map_chunks
from nnxmoe.layers.linear.matmul import einsum_f32
from nnxmoe.moe.dispatch import Dispatch, DispatchInfo, dispatch_info, expert_row_axes, mask_padding
from nnxmoe.moe.experts import ExpertFn
from nnxmoe.moe.selection import Routing
from nnxmoe.sharding import batch_axes, shard_constraint
from nnxmoe.sharding_rules import shard_count


@dataclasses.dataclass(frozen=True)
class Capacity(CheckedFields):
    """Dispatch with a fixed number of slots per expert and batch row (GShard, 2020).

    Assignments fill the slots in token order. Assignments beyond the last slot are dropped. The number of slots is
    ``max(ceil(T * X / E) * factor, factor)``, rounded down as in MaxText and clipped to ``[1, T]``. On a mesh, the
    ``expert`` axis shards the dispatched tokens ``[E, B, C, D]`` along E instead of B.

    Attributes:
        factor: Capacity factor: the number of slots as a multiple of the balanced load.
    """

    token_independent: ClassVar[bool] = False

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factor", check_factor("Capacity(factor", self.factor))

    def slots(self, length: int, experts_per_token: int, num_experts: int) -> int:
        """Return the number of slots per expert, C, for batch rows of ``length`` tokens."""
        slots = int(max(math.ceil(length * experts_per_token / num_experts) * self.factor, self.factor))
        return min(max(slots, 1), length)  # an expert receives each token at most once

    def needed_factor(self, routing: Routing, mesh: AnyMesh | None = None) -> Float[Array, ""]:
        """Return the smallest factor at which this routing drops no assignments, rounded up."""
        _, length, experts_per_token = routing.experts.shape
        balanced_load = math.ceil(length * experts_per_token / routing.scores.shape[-1])
        return jnp.nextafter(_max_load(routing) / balanced_load, jnp.inf)

    def fits(self, routing: Routing, mesh: AnyMesh | None = None) -> Bool[Array, ""]:
        """Return whether this routing drops no assignments."""
        _, length, experts_per_token = routing.experts.shape
        return _max_load(routing) <= self.slots(length, experts_per_token, routing.scores.shape[-1])

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        batch, length, experts_per_token = routing.experts.shape
        num_experts = routing.scores.shape[-1]
        check_batch("Capacity", batch, mesh, batch_axes(mesh))
        slots = self.slots(length, experts_per_token, num_experts)
        ids, weights = mask_padding(routing)
        # Padding has an out-of-range id, so the mask is all zeros for padding.
        assignment_mask = jax.nn.one_hot(ids, num_experts, dtype=jnp.int32)
        # Each assignment takes the expert's next free slot, in sequence order.
        flat_mask = assignment_mask.reshape(batch, length * experts_per_token, num_experts)
        position = (jnp.cumsum(flat_mask, axis=1) - flat_mask).reshape(assignment_mask.shape)
        accepted_mask = assignment_mask * (position < slots)
        # A token has at most one assignment per expert, so the X axis can be summed before the one-hot over slots.
        slot = jax.nn.one_hot(jnp.sum(position * accepted_mask, axis=2), slots, dtype=x.dtype)
        dispatch_mask = slot * jnp.sum(accepted_mask, axis=2)[..., None].astype(x.dtype)
        combine_weights = jnp.sum(accepted_mask * weights[..., None], axis=2).astype(x.dtype)[..., None] * dispatch_mask
        axes, by_batch = expert_row_axes(batch_axes(mesh)), (None, batch_axes(mesh))
        expert_inputs = shard_constraint(jnp.einsum("BTEC,BTD->EBCD", dispatch_mask, x), mesh, *by_batch)
        rows = shard_constraint(expert_inputs, mesh, *axes).reshape(num_experts, batch * slots, x.shape[-1])
        outputs = shard_constraint(experts(rows, None).reshape(expert_inputs.shape), mesh, *axes)
        outputs = shard_constraint(outputs, mesh, *by_batch)
        y = einsum_f32("BTEC,EBCD->BTD", combine_weights, outputs)
        return y.astype(x.dtype), dispatch_info(routing, jnp.sum(assignment_mask) - jnp.sum(accepted_mask))


def _max_load(routing: Routing) -> Int[Array, ""]:
    """Return the largest number of assignments from one batch row to one expert."""
    mask = jax.nn.one_hot(mask_padding(routing).ids, routing.scores.shape[-1], dtype=jnp.int32)
    return jnp.max(jnp.sum(mask, axis=(1, 2)))


@dataclasses.dataclass(frozen=True)
class Chunked(CheckedFields):
    """Dispatch that applies ``inner`` to one chunk of the sequence at a time. The backward pass rematerializes chunks.

    Only the activations of one chunk are in memory. If ``inner`` is a `Capacity`, each chunk has separate slots.

    Attributes:
        inner: Dispatch of a single chunk.
        chunks: Number of chunks.
    """

    token_independent: ClassVar[bool] = False

    inner: Dispatch
    chunks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        set_positive(self, "chunks")
        check_object("Chunked", "inner", self.inner, "Sorted()")

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        valid = jnp.ones(x.shape[:2], bool) if routing.valid is None else routing.valid
        leaves, tree = jax.tree.flatten((x, dataclasses.replace(routing, valid=valid)))

        def dispatch_chunk(*leaves: Array) -> tuple[Array, DispatchInfo]:
            x, routing = tree.unflatten(leaves)
            return self.inner(x, routing, experts, mesh)

        y, infos = map_chunks(dispatch_chunk, self.chunks, *leaves)
        return y, jax.tree.map(lambda value: jnp.sum(value, axis=0, dtype=value.dtype), infos)


def check_factor(field: str, factor: float) -> float:
    """Convert a buffer size factor to a Python number. Raise ValueError if the factor is not in (0, 2**63)."""
    if (number := as_number(factor)) is None or not 0 < number < 2**63:
        raise ValueError(f"{field}={short(factor)}): the factor must be a positive multiple of the balanced load")
    return number


def check_batch(dispatch: str, batch: int, mesh: AnyMesh | None, axes: Sequence[str]) -> None:
    """Raise ValueError if the number of shards over these mesh axes does not divide the batch size."""
    if mesh is not None and batch % shard_count(mesh, axes):
        raise ValueError(
            f"{dispatch}: a batch of {batch} rows is not divisible by the {shard_count(mesh, axes)} devices of "
            f"{' x '.join(axes)}. Pad the batch, or use Sorted()."
        )
