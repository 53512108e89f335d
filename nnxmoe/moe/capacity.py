"""Dispatches with bounded memory: fixed slots per expert, or one chunk of the sequence at a time."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxmoe.axes import AnyMesh
from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_number, check_object, set_positive
from nnxmoe.layers.chunks import map_chunks
from nnxmoe.layers.linear.matmul import einsum_f32
from nnxmoe.moe.dispatch import Dispatch, DispatchInfo, dispatch_info, expert_row_axes, mask_padding
from nnxmoe.moe.experts import ExpertFn
from nnxmoe.moe.router import Routing
from nnxmoe.sharding import batch_axes, shard_constraint
from nnxmoe.sharding_rules import shard_count


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Dispatch with a fixed number of slots per expert and batch row (GShard, 2020).

    Assignments use the slots in the order of the tokens. Assignments beyond the last slot are dropped. The number of
    slots is ``max(ceil(T * X / E) * factor, factor)``, rounded down as in MaxText, but at least 1 and at most T. On a
    mesh, the ``expert`` axis shards the dispatched tokens ``[E, B, C, D]`` along E instead of B.

    Attributes:
        factor: Number of slots as a multiple of the balanced load.
    """

    token_independent: ClassVar[bool] = False

    factor: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", check_factor("Capacity(factor", self.factor))

    def slots(self, length: int, experts_per_token: int, num_experts: int) -> int:
        """Return the slots per expert, C, for batch rows of ``length`` tokens."""
        slots = int(max(math.ceil(length * experts_per_token / num_experts) * self.factor, self.factor))
        return min(max(slots, 1), length)  # an expert receives each token at most once

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        batch, length, experts_per_token = routing.experts.shape
        num_experts = routing.scores.shape[-1]
        check_batch("Capacity", batch, mesh, batch_axes(mesh))
        slots = self.slots(length, experts_per_token, num_experts)
        ids, weights = mask_padding(routing)
        assigned = jax.nn.one_hot(ids, num_experts, dtype=jnp.int32)  # zeros for padding, whose id is out of range
        # Assignments use slots in the order of the sequence. Assignments beyond the last slot are dropped.
        in_order = assigned.reshape(batch, length * experts_per_token, num_experts)
        position = (jnp.cumsum(in_order, axis=1) - in_order).reshape(assigned.shape)
        accepted = assigned * (position < slots)
        # A token has at most one assignment per expert, so the choices can be summed before the one-hot over slots.
        slot = jax.nn.one_hot(jnp.sum(position * accepted, axis=2), slots, dtype=x.dtype)
        dispatch_mask = slot * jnp.sum(accepted, axis=2)[..., None].astype(x.dtype)
        combine_weights = jnp.sum(accepted * weights[..., None], axis=2).astype(x.dtype)[..., None] * dispatch_mask
        axes, by_batch = expert_row_axes(batch_axes(mesh)), (None, batch_axes(mesh))
        sent = shard_constraint(jnp.einsum("BTEC,BTD->EBCD", dispatch_mask, x), mesh, *by_batch)
        rows = shard_constraint(sent, mesh, *axes).reshape(num_experts, batch * slots, x.shape[-1])
        outputs = shard_constraint(experts(rows, None).reshape(sent.shape), mesh, *axes)
        outputs = shard_constraint(outputs, mesh, *by_batch)
        y = einsum_f32("BTEC,EBCD->BTD", combine_weights, outputs)
        return y.astype(x.dtype), dispatch_info(routing, jnp.sum(assigned) - jnp.sum(accepted))


@dataclasses.dataclass(frozen=True)
class Chunked:
    """Dispatch that applies ``inner`` to one chunk of the sequence at a time. The backward pass rematerializes chunks.

    Memory contains the activations of one chunk only. An inner `Capacity` has its slots per chunk.

    Attributes:
        inner: Dispatch of one chunk.
        chunks: Number of chunks.
    """

    token_independent: ClassVar[bool] = False

    inner: Dispatch
    chunks: int

    def __post_init__(self) -> None:
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
    """Convert the factor of a buffer size to a Python number. Raise ValueError unless it is in (0, 2**63)."""
    if (number := as_number(factor)) is None or not 0 < number < 2**63:
        raise ValueError(f"{field}={short(factor)}): give a positive multiple of the balanced load")
    return number


def check_batch(dispatch: str, batch: int, mesh: AnyMesh | None, axes: Sequence[str]) -> None:
    """Raise ValueError unless the batch size is divisible by the number of shards over these mesh axes."""
    if mesh is not None and batch % shard_count(mesh, axes):
        raise ValueError(
            f"{dispatch}: a batch of {batch} rows is not divisible by the {shard_count(mesh, axes)} devices of "
            f"{' x '.join(axes)}: add rows of padding, or use Sorted()"
        )
