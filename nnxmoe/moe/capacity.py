"""Dispatches with bounded memory: a fixed number of slots per expert, or a slice of the sequence at a time."""

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
from nnxmoe.moe.dispatch import Dispatch, DispatchInfo, assignments, dispatch_info, expert_row_axes
from nnxmoe.moe.experts import ExpertFn
from nnxmoe.moe.router import Routing
from nnxmoe.sharding import batch_axes, shard_constraint
from nnxmoe.sharding_rules import shard_count


@dataclasses.dataclass(frozen=True)
class Capacity:
    """A fixed number of slots per expert and batch row; later tokens of the sequence are dropped (GShard, 2020).

    Slots: ``max(ceil(T * X / E) * factor, factor)`` rounded down, as in MaxText. On a mesh the ``expert`` axis shards
    the dispatched tokens ``[E, B, C, D]`` along E instead of B.
    """

    token_independent: ClassVar[bool] = False

    factor: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", check_factor("Capacity(factor", self.factor))

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
        axes, by_batch = expert_row_axes(batch_axes(mesh)), (None, batch_axes(mesh))
        sent = shard_constraint(jnp.einsum("BTEC,BTD->EBCD", mask, x), mesh, *by_batch)
        rows = shard_constraint(sent, mesh, *axes).reshape(count, batch * slots, x.shape[-1])
        back = shard_constraint(experts(rows, None).reshape(sent.shape), mesh, *axes)
        back = shard_constraint(back, mesh, *by_batch)
        y = einsum_f32("BTEC,EBCD->BTD", weights, back)
        return y.astype(x.dtype), dispatch_info(routing, jnp.sum(wanted) - jnp.sum(kept))


@dataclasses.dataclass(frozen=True)
class Chunked:
    """Applies ``inner`` to one slice of the sequence at a time, recomputed in the backward pass, so that only one
    slice's activations are in memory. (The slots of ``Capacity`` are then per slice.)"""

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

        def one(*leaves: Array) -> tuple[Array, DispatchInfo]:
            x, routing = tree.unflatten(leaves)
            return self.inner(x, routing, experts, mesh)

        y, infos = map_chunks(one, self.chunks, *leaves)
        return y, jax.tree.map(lambda value: jnp.sum(value, axis=0, dtype=value.dtype), infos)


def check_factor(what: str, factor: float) -> float:
    """Return a buffer size factor as a Python number. Raises ValueError unless it is positive and finite."""
    if (number := as_number(factor)) is None or not 0 < number < 2**63:
        raise ValueError(f"{what}={short(factor)}): give a positive multiple of the balanced load")
    return number


def check_batch(who: str, batch: int, mesh: AnyMesh | None, axes: Sequence[str]) -> None:
    """Raise ValueError unless the batch size is divisible by the number of shards over these mesh axes."""
    if mesh is not None and batch % shard_count(mesh, axes):
        raise ValueError(
            f"{who}: a batch of {batch} rows is not divisible by the {shard_count(mesh, axes)} devices of "
            f"{' x '.join(axes)}: add rows of padding, or use Sorted()"
        )
