"""How tokens reach their experts and come back: ``(x, routing, experts) -> y, DispatchInfo``.

Experts only ever see rows grouped by expert and the sizes of the groups; a dispatch wraps the experts it is given.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.moe.router import Routing

ExpertFn = Callable[[Float[Array, "R D"], Int[Array, "E"]], Float[Array, "R D"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchInfo:
    """Assignments computed by each expert, and assignments (token, expert) that found no room."""

    load: Int[Array, "*L E"]
    dropped: Int[Array, "*L"]


class Dispatch(Protocol):
    """One way to bring tokens to experts. All give the same y, but for the assignments they say they dropped."""

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]: ...


@dataclasses.dataclass(frozen=True)
class Dense:
    """Every expert on every token, then the weighted sum. Slow and obvious: the oracle of the others."""

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        count = routing.scores.shape[-1]
        flat = x.reshape(-1, x.shape[-1])
        sizes = jnp.full((count,), flat.shape[0], jnp.int32)
        outs = experts(jnp.tile(flat, (count, 1)), sizes).reshape(count, *flat.shape)
        chosen = routing.experts[..., None] == jnp.arange(count)
        weights = jnp.sum(chosen * routing.weights[..., None], axis=-2).reshape(-1, count)
        y = jnp.einsum("RE,ERD->RD", weights, outs.astype(jnp.float32))
        return y.reshape(x.shape).astype(x.dtype), DispatchInfo(count_experts(routing, routing.valid), jnp.int32(0))


@dataclasses.dataclass(frozen=True)
class Sorted:
    """Sort the assignments by expert, compute exactly those, put them back. Nothing is dropped, nothing padded."""

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        rows, order = permute(x, routing)
        y = combine(experts(rows, count_experts(routing)), order, routing)
        load = count_experts(routing, routing.valid)
        return y.reshape(x.shape).astype(x.dtype), DispatchInfo(load, jnp.int32(0))


@dataclasses.dataclass(frozen=True)
class Capacity:
    """A fixed number of slots an expert and batch row; what comes later in the sequence is dropped (GShard, 2020).

    Slots: ``max(ceil(T * X / E) * factor, factor)`` rounded down, as in MaxText.
    """

    factor: float

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"Capacity(factor={self.factor}): the factor is a positive multiple of the balanced load")

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        batch, length, chosen = routing.experts.shape
        count = routing.scores.shape[-1]
        slots = int(max(math.ceil(length * chosen / count) * self.factor, self.factor))
        slots = min(max(slots, 1), length)  # an expert gets a token at most once
        wanted = jax.nn.one_hot(routing.experts, count, dtype=jnp.int32)
        if routing.valid is not None:
            wanted = wanted * routing.valid[:, :, None, None]
        flat = wanted.reshape(batch, length * chosen, count)  # sequence order, choices of a token side by side
        place = (jnp.cumsum(flat, axis=1) - flat).reshape(wanted.shape)
        kept = wanted * (place < slots)
        slot = jax.nn.one_hot(place, slots, dtype=jnp.float32) * kept[..., None]
        weights = jnp.einsum("BTX,BTXEC->BTEC", routing.weights, slot)
        mask = jnp.einsum("BTXEC->BTEC", slot).astype(x.dtype)
        sent = jnp.einsum("BTEC,BTD->EBCD", mask, x)
        sizes = jnp.full((count,), batch * slots, jnp.int32)
        back = experts(sent.reshape(count * batch * slots, -1), sizes).reshape(sent.shape)
        y = jnp.einsum("BTEC,EBCD->BTD", weights, back.astype(jnp.float32))
        info = DispatchInfo(jnp.sum(kept, axis=(0, 1, 2)), jnp.sum(wanted) - jnp.sum(kept))
        return y.astype(x.dtype), info


def permute(x: Float[Array, "B T D"], routing: Routing) -> tuple[Float[Array, "R D"], Int[Array, "R"]]:
    """One row for each assignment, sorted by expert (stable); also which assignment each row is. R = B T X."""
    order = jnp.argsort(routing.experts.reshape(-1), stable=True)
    return x.reshape(-1, x.shape[-1])[order // routing.experts.shape[-1]], order


def combine(rows: Float[Array, "R D"], order: Int[Array, "R"], routing: Routing) -> Float[Array, "tokens D"]:
    """Undo ``permute`` and add up each token's rows by weight, in float32."""
    chosen = routing.experts.shape[-1]
    back = rows[jnp.argsort(order)].reshape(-1, chosen, rows.shape[-1])
    return jnp.einsum("RX,RXD->RD", routing.weights.reshape(-1, chosen), back.astype(jnp.float32))


def count_experts(routing: Routing, valid: Bool[Array, "*rows"] | None = None) -> Int[Array, "E"]:
    """Assignments to each expert, of all tokens or of the ``valid`` ones."""
    hits = routing.experts[..., None] == jnp.arange(routing.scores.shape[-1])
    if valid is not None:
        hits &= valid[..., None, None]
    return jnp.sum(hits, axis=tuple(range(hits.ndim - 1)), dtype=jnp.int32)
