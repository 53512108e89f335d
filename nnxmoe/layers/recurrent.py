"""Layers with a recurrence instead of keys and values: the state that they store, and the loop over tokens."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from nnxmoe.layers.cache import Past, written
from nnxmoe.layers.context import Context


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentState:
    """A pytree of state arrays ``[*L, B, 1 + spare, ...]`` after each of the newest tokens of a row.

    Token i's is at ``i % (1 + spare)``, so that the ``spare`` newest tokens may be taken back by a smaller
    `Cache.length`, as for keys and values.
    """

    states: Any

    exact: ClassVar[bool] = True  # whatever the `CacheFormat`

    @classmethod
    def empty(cls, zero: Any, spare: int) -> Self:
        """The state of rows without tokens, from arrays ``[B, ...]`` of zeros."""
        return cls(jax.tree.map(lambda a: jnp.repeat(a[:, None], 1 + spare, axis=1), zero))

    def before(self, past: Past) -> Any:
        """The state ``[B, ...]`` before the new tokens."""

        def one(states: Array) -> Array:
            shape = (-1, *(1,) * (states.ndim - 1))
            found = jnp.take_along_axis(states, ((past.before - 1) % states.shape[1]).reshape(shape), axis=1)[:, 0]
            return jnp.where((past.before > 0).reshape(shape[:-1]), found, 0)

        return jax.tree.map(one, self.states)

    def written(self, state: Any, index: Int[Array, "B"]) -> Self:
        """Store the state after the token at ``index`` of each row; nothing for negative indices (padding)."""

        def one(states: Array, new: Array) -> Array:
            size = states.shape[1]
            return written(states, new[:, None], jnp.where(index < 0, size, index % size)[:, None], 1)

        return type(self)(jax.tree.map(one, self.states, state))


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
        return (state, None if cache is None else cache.written(state, index)), out

    given = inputs, valid, _first_of_segment(context, past, shape), index
    given = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), given)
    (_, cache), out = jax.lax.scan(one, (state, cache), given)
    return jnp.moveaxis(out, 0, 1), cache


def _first_of_segment(context: Context, past: Past | None, shape: tuple[int, ...]) -> Bool[Array, "B T"]:
    """Whether a token's segment is not that of the token before it, in its row or in the cache."""
    if context.segment is None:
        return jnp.zeros(shape, bool)
    if past is None:
        last = context.segment[:, :1]
    else:
        last = jnp.take_along_axis(past.segment, jnp.maximum(past.before - 1, 0)[:, None], axis=1)
    return context.segment != jnp.concatenate([last, context.segment[:, :-1]], axis=1)
