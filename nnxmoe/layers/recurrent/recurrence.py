"""Token order for recurrent layers, and a scan over tokens."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from nnxmoe.layers.cache import CacheMetadata
from nnxmoe.layers.cache_buffer import gather_tokens
from nnxmoe.layers.context import Context


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OrderedTokens:
    """Token order of a pass in which the real tokens of each row come first and padding comes last.

    Recurrent layers require this order, because a token depends on all earlier tokens in the row.

    Attributes:
        count: Number of real tokens per row.
        length_before: Number of cached tokens per row.
        real: Mask of the sorted tokens, False for padding. ``None`` if there is no padding.
        order: Original index of each sorted token. ``None`` if the order does not change.
        inverse: Sorted index of each original token. ``None`` if the order does not change.
        segment: Segment of each sorted token: the number of segments that start at or before the token. ``None`` if
            there is a single segment.
    """

    count: Int[Array, "B"]
    length_before: Int[Array, "B"]
    real: Bool[Array, "B T"] | None = None
    order: Int[Array, "B T"] | None = None
    inverse: Int[Array, "B T"] | None = None
    segment: Int[Array, "B T"] | None = None

    @classmethod
    def from_context(cls, context: Context, batch: int, length: int, cached: bool) -> Self:
        """Sort the tokens ``[B, T]`` of a context. ``cached`` indicates whether the layer has a cache."""
        past, valid = context.past if cached else None, context.valid
        length_before = jnp.zeros(batch, jnp.int32) if past is None else past.length_before
        tokens = cls(jnp.full(batch, length, jnp.int32), length_before)
        if valid is not None:
            order = jnp.argsort(~valid, axis=1, stable=True)
            inverse = jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)
            count = jnp.sum(valid, axis=1, dtype=jnp.int32)
            tokens = cls(count, length_before, jnp.arange(length) < count[:, None], order, inverse)
        if context.segment is None:
            return tokens
        is_first = _starts_segment(tokens.sort(context.segment), past)
        if tokens.real is not None:
            is_first = is_first & tokens.real
        return dataclasses.replace(tokens, segment=jnp.cumsum(is_first, axis=1, dtype=jnp.int32))

    def sort(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
        """Move the real tokens of each row before the padding."""
        return x if self.order is None else gather_tokens(x, self.order)

    def unsort(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
        """Undo `sort`. Values of padding tokens are copies of the values of real tokens."""
        return x if self.inverse is None else gather_tokens(x, self.inverse)

    def token_indices(self, sorted_indices: Int[Array, "B n"]) -> Int[Array, "B n"]:
        """Convert sorted indices to token indices in the row, or to -1 for padding and negative indices."""
        is_real = (sorted_indices >= 0) & (sorted_indices < self.count[:, None])
        return jnp.where(is_real, self.length_before[:, None] + sorted_indices, -1)


def _starts_segment(segment: Int[Array, "B T"], past: CacheMetadata | None) -> Bool[Array, "B T"]:
    """Return whether each token's segment differs from the previous token's segment, in the row or in the cache."""
    if past is None:
        previous_segment = segment[:, :1]
    else:
        previous_segment = jnp.take_along_axis(past.segment, jnp.maximum(past.length_before - 1, 0)[:, None], axis=1)
    return segment != jnp.concatenate([previous_segment, segment[:, :-1]], axis=1)


def scan_tokens(
    step: Callable[[Any, Any], tuple[Any, Array]], zero: Any, inputs: Any, context: Context, cache: Any
) -> tuple[Array, Any]:
    """Scan a recurrence over tokens. Padding does not change the state.

    Args:
        step: Function ``(state, token_inputs) -> state, output``.
        zero: Zero arrays ``[B, ...]``, the state before the first token of a row or segment.
        inputs: Arrays ``[B, T, ...]``.
        context: Context of the pass.
        cache: Optional `RecurrentState`.

    Returns:
        The outputs ``[B, T, ...]``, and the updated cache.
    """
    shape = jax.tree.leaves(inputs)[0].shape[:2]
    past = None if cache is None else context.past
    valid = jnp.ones(shape, bool) if context.valid is None else context.valid
    starts_segment = jnp.zeros(shape, bool) if context.segment is None else _starts_segment(context.segment, past)
    state, index = zero, jnp.zeros(shape, jnp.int32)
    if cache is not None and past is not None:
        state, index = cache.state_before(past), past.index

    def where(condition: Bool[Array, "B"], new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(condition.reshape(-1, *(1,) * (a.ndim - 1)), a, b), new, old)

    def scan_step(carry: tuple[Any, Any], token: tuple[Any, Array, Array, Array]) -> tuple[tuple[Any, Any], Array]:
        (state, cache), (x, is_real, starts_segment, index) = carry, token
        new_state, output = step(where(starts_segment, zero, state), x)
        state = where(is_real, new_state, state)
        if cache is not None:
            cache = cache.write(jax.tree.map(lambda a: a[:, None], state), index[:, None])
        return (state, cache), output

    tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (inputs, valid, starts_segment, index))
    (_, cache), outputs = jax.lax.scan(scan_step, (state, cache), tokens)
    return jnp.moveaxis(outputs, 0, 1), cache
