"""Layers with a recurrence instead of keys and values: the state that they store, and the loop over tokens."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from nnxmoe.layers.cache import CacheMetadata, RecurrentState, gather_tokens
from nnxmoe.layers.context import Context


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OrderedTokens:
    """The tokens of a pass with the real tokens of each row first and padding after them, for layers in which a token
    depends on those before it in the row.

    ``count``: real tokens per row. ``real``: which are real; None: all. ``order``, ``place``: of the tokens in the
    pass, and back. ``run``: the number of segments that begin up to each token; None: there is only one. ``before``:
    tokens of each row in the cache.
    """

    count: Int[Array, "B"]
    before: Int[Array, "B"]
    real: Bool[Array, "B T"] | None = None
    order: Int[Array, "B T"] | None = None
    place: Int[Array, "B T"] | None = None
    run: Int[Array, "B T"] | None = None

    @classmethod
    def of(cls, context: Context, shape: tuple[int, int], cached: bool) -> Self:
        """The order of the tokens of a context, ``[B, T]`` of them."""
        batch, length = shape
        past, valid = context.past if cached else None, context.valid
        before = jnp.zeros(batch, jnp.int32) if past is None else past.before
        made = cls(jnp.full(batch, length, jnp.int32), before)
        if valid is not None:
            order = jnp.argsort(~valid, axis=1, stable=True)
            place = jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)
            count = jnp.sum(valid, axis=1, dtype=jnp.int32)
            made = cls(count, before, jnp.arange(length) < count[:, None], order, place)
        if context.segment is None:
            return made
        ordered = made.ordered(context.segment)
        first = ordered != jnp.concatenate([_last_segment(ordered, past), ordered[:, :-1]], axis=1)
        first = first if made.real is None else first & made.real
        return dataclasses.replace(made, run=jnp.cumsum(first, axis=1, dtype=jnp.int32))

    def ordered(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
        """Real tokens first."""
        return x if self.order is None else gather_tokens(x, self.order)

    def given(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
        """The inverse of `ordered`; padding gets values of real tokens."""
        return x if self.place is None else gather_tokens(x, self.place)

    def index_of(self, at: Int[Array, "B n"]) -> Int[Array, "B n"]:
        """The index in the row of the tokens at these places; -1 for padding and negative places."""
        return jnp.where((at >= 0) & (at < self.count[:, None]), self.before[:, None] + at, -1)


def _last_segment(segment: Int[Array, "B T"], past: CacheMetadata | None) -> Int[Array, "B 1"]:
    """The segment of the token before the first: the newest in the cache."""
    if past is None:
        return segment[:, :1]
    return jnp.take_along_axis(past.segment, jnp.maximum(past.before - 1, 0)[:, None], axis=1)


def recurrence(
    step: Callable[[Any, Any], tuple[Any, Array]], zero: Any, inputs: Any, context: Context, cache: Any
) -> tuple[Array, Any]:
    """Outputs ``[B, T, ...]`` of a recurrence over tokens, and its cache, a `RecurrentState` or None.

    ``step(state, inputs of a token) -> state, output``. ``zero``: arrays ``[B, ...]`` of zeros, the state before a
    row's or a segment's first token. ``inputs``: arrays ``[B, T, ...]``. Padding leaves the state as it is.
    """
    shape = jax.tree.leaves(inputs)[0].shape[:2]
    past = None if cache is None else context.past
    valid = jnp.ones(shape, bool) if context.valid is None else context.valid
    state, index = zero, jnp.zeros(shape, jnp.int32)
    if cache is not None and past is not None:
        state, index = cache.before(past), past.index

    def masked(keep: Bool[Array, "B"], new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(keep.reshape(-1, *(1,) * (a.ndim - 1)), a, b), new, old)

    def one(carry: tuple[Any, Any], given: tuple[Any, Array, Array, Array]) -> tuple[tuple[Any, Any], Array]:
        (state, cache), (x, real, first, index) = carry, given
        new, out = step(masked(first, zero, state), x)
        state = masked(real, new, state)
        return (state, None if cache is None else _after(cache, state, index)), out

    given = inputs, valid, _first_of_segment(context, past, shape), index
    given = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), given)
    (_, cache), out = jax.lax.scan(one, (state, cache), given)
    return jnp.moveaxis(out, 0, 1), cache


def _first_of_segment(context: Context, past: CacheMetadata | None, shape: tuple[int, ...]) -> Bool[Array, "B T"]:
    """Whether a token's segment is not that of the token before it, in its row or in the cache."""
    if context.segment is None:
        return jnp.zeros(shape, bool)
    last = _last_segment(context.segment, past)
    return context.segment != jnp.concatenate([last, context.segment[:, :-1]], axis=1)


def _after(cache: RecurrentState, state: Any, index: Int[Array, "B"]) -> RecurrentState:
    return cache.written(jax.tree.map(lambda a: a[:, None], state), index[:, None])
