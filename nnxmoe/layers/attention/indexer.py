"""Selection of keys for sparse attention: an indexer scores all keys for each query (DeepSeek-V3.2, 2025).

Scores are computed for a block of queries at a time. The selected keys are returned as slots ``[B, T, X]``.
"""

from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.axes import ParamOptions
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.attention.sparse_attention import BLOCK_SCORES, NO_SLOT, SelectedSlots, map_blocks, query_parts
from nnxmoe.layers.cache import SlotMetadata
from nnxmoe.layers.cache_buffer import gather_tokens
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.linear.matmul import dot_f32
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.norm import LayerNorm
from nnxmoe.layers.rope import RotateFn

KEY_NORM_EPS = 1e-6


class Indexer(nnx.Module):
    """Selects for each query the keys with the highest ``sum_n weights(x)_n relu(q_n · key)``.

    ``q`` computes ``heads`` queries of width ``head_dim`` from the query latents of MLA. There is one key per token,
    normalized. The first ``rotary.dim`` components of queries and keys are rotated; without ``rotary``, none are. The
    reference also multiplies scores by positive constants, which do not change the selection. Of equal scores the
    earlier key is selected; torch leaves the order open. The selection has no gradient, as in transformers: a loss of
    the model's output does not train an indexer.
    """

    def __init__(
        self,
        dim: int,
        q_rank: int,
        heads: int,
        head_dim: int,
        *,
        rotary: Rope | None,
        rotate: RotateFn,
        **kw: Unpack[ParamOptions],
    ):
        self.rotary, self.rotate = rotary, rotate
        self.q = Linear((q_rank,), (heads, head_dim), ("q_rank", None, "head"), **kw)
        self.k = Linear((dim,), (head_dim,), ("embed", "latent"), **kw)
        self.k_norm = LayerNorm(head_dim, KEY_NORM_EPS, **kw)
        self.weights = Linear((dim,), (heads,), ("embed", None), **kw)

    @property
    def key_width(self) -> int:
        """Numbers per token in the cache."""
        return self.k.outs[0]

    def keys(self, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T H"]:
        """Compute one key per token."""
        return self._rotate(self.k_norm(self.k(x))[:, :, None], context)[:, :, 0]

    def select(
        self,
        x: Float[Array, "B asked D"],
        q_latent: Float[Array, "B asked q_rank"],
        keys: Float[Array, "B S H"],
        mask: Mask,
        topk: int,
        context: Context,
    ) -> SelectedSlots:
        """Return the slots of the selected keys of each query, ascending, `NO_SLOT` where fewer keys are allowed.

        The first ``topk`` queries of a causal pass get `NO_SLOT`: they attend to all keys before them.
        """
        inputs = self._rotate(self.q(q_latent), context), self.weights(x), keys
        return select_keys(*jax.lax.stop_gradient(inputs), mask, topk)

    def _rotate(self, x: Float[Array, "B T N H"], context: Context) -> Float[Array, "B T N H"]:
        if self.rotary is None:
            return x
        rotated, rest = jnp.split(x, [self.rotary.dim], axis=-1)
        return jnp.concatenate([context.rotated(rotated, self.rotary, self.rotate), rest], axis=-1)


def select_keys(
    q: Float[Array, "B T N H"], weights: Float[Array, "B T N"], keys: Float[Array, "B S H"], mask: Mask, topk: int
) -> SelectedSlots:
    """Select the ``topk`` keys with the highest weighted scores; see `Indexer`."""

    def select(allowed: Bool[Array, "B T S"], key_slice: slice, q: Array, weights: Array) -> SelectedSlots:
        head_scores = jax.nn.relu(query_key_products(q, keys[:, key_slice]))
        scores = jnp.sum(head_scores * weights.astype(jnp.float32)[..., None], axis=2)
        return topk_slots(scores, allowed, topk)

    return select_in_blocks(select, mask, topk, topk, q.shape[2], q, weights)


def query_key_products(q: Float[Array, "B T N H"], keys: Float[Array, "B S H"]) -> Float[Array, "B T N S"]:
    """Multiply the queries of all heads with the keys, in float32."""
    return dot_f32(q.reshape(q.shape[0], -1, q.shape[-1]), keys, -1, -1).reshape(*q.shape[:3], -1)


def select_in_blocks(
    select: Callable[..., SelectedSlots],
    mask: Mask,
    topk: int,
    width: int,
    heads: int,
    *query_arrays: Float[Array, "B T ..."],
) -> Int[Array, "B T width"]:
    """Call ``select(allowed, key_slice, *query_arrays) -> [B, t, width]`` for blocks of t queries.

    Args:
        select: ``key_slice`` is the slice of keys that the queries may attend to, and ``allowed [B, t, S]`` the mask
            over these keys.
        mask: the mask of all queries.
        topk: number of first queries of a causal pass, for which `NO_SLOT` is returned.
        width: number of slots per query.
        heads: scores per query and key that ``select`` computes, which sets t.
        *query_arrays: arrays with a token axis, of which ``select`` gets the block's queries.
    """
    batch, length = query_arrays[0].shape[:2]
    outputs = [jnp.full((batch, topk if mask.causal else 0, width), NO_SLOT, jnp.int32)]
    for queries, keys in query_parts(mask, length, topk):
        part = mask.select(queries, keys)

        def select_block(
            index: Array, *arrays: Array, slots: SlotMetadata = part.keys, keys: slice = keys
        ) -> SelectedSlots:
            segment, arrays = (None, arrays) if mask.query_segment is None else (arrays[0], arrays[1:])
            return select(Mask(index, segment, slots, None).allowed(), keys, *arrays)

        index = jnp.broadcast_to(part.query_index, (batch, part.query_index.shape[-1]))
        segments = () if part.query_segment is None else (part.query_segment,)
        block = BLOCK_SCORES // (batch * heads * (keys.stop - keys.start))
        outputs.append(map_blocks(select_block, block, index, *segments, *(a[:, queries] for a in query_arrays)))
    return jnp.concatenate(outputs, axis=1)


def sort_padding_last(
    keys: SlotMetadata, shape: tuple[int, ...]
) -> tuple[Int[Array, "B S"], SlotMetadata, Int[Array, "B S"]]:
    """Sort the slots by their tokens, padding last; ``shape``: ``B, S``. The slots of a cache are sorted already.

    Returns the order of the slots, the tokens in this order, and the number of tokens before each in its segment.
    """
    index, segment = (None if a is None else jnp.broadcast_to(a, shape) for a in (keys.index, keys.segment))
    assert index is not None
    order = places = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    if keys.valid is not None:
        index = jnp.where(keys.valid, index, -1)
        order = jnp.argsort(index < 0, axis=1, stable=True)
        index = gather_tokens(index, order)
        segment = None if segment is None else gather_tokens(segment, order)
    if segment is None:
        return order, SlotMetadata(index, None, None), places
    is_first = jnp.concatenate([jnp.ones((shape[0], 1), bool), segment[:, 1:] != segment[:, :-1]], axis=1)
    segment_start = jax.lax.cummax(jnp.where(is_first, places, 0), axis=1)
    return order, SlotMetadata(index, None, segment), places - segment_start


def gather_or_none(x: Int[Array, "B S ..."], places: Int[Array, "B ..."]) -> Int[Array, "B ..."]:
    """Gather ``places`` of each row; `NO_SLOT` where a place is `NO_SLOT`."""
    missing = places == NO_SLOT
    gathered = gather_tokens(x, jnp.where(missing, 0, places))
    return jnp.where(missing.reshape(*places.shape, *(1,) * (x.ndim - 2)), NO_SLOT, gathered)


def topk_slots(scores: Float[Array, "*rows S"], allowed: Bool[Array, "*#rows S"], count: int) -> Int[Array, "*rows X"]:
    """Return the indices of the ``count`` highest allowed scores, ascending; `NO_SLOT` where fewer are allowed.

    Among equal scores the lower index wins. The threshold is found bit by bit instead of by a sort: 8 ms instead of 20
    with ``jax.lax.top_k`` for 2048 of 4096 scores in 64 rows, on two cores (jax 0.10.2).
    """
    lowest = np.int32(np.iinfo(np.int32).min)
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)  # -0.0 as 0.0
    ranks = jnp.where(allowed, jnp.where(bits < 0, bits ^ np.int32(2**31 - 1), bits), lowest)  # ordered as the scores

    def add_bit(i: Int[Array, ""], threshold: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        higher = threshold + jax.lax.shift_left(np.int32(1), 31 - i)
        is_enough = jnp.sum((ranks >= higher[..., None]).astype(jnp.int32), axis=-1) >= count
        return jnp.where(is_enough, higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, add_bit, jnp.full(ranks.shape[:-1], lowest))[..., None]
    above, equal = ranks > threshold, (ranks == threshold) & (ranks > lowest)
    remaining = count - jnp.sum(above, axis=-1, keepdims=True)
    is_selected = above | (equal & (jnp.cumsum(equal, axis=-1) <= remaining))

    def nonzero(row: Bool[Array, "S"]) -> Int[Array, "X"]:
        return jnp.nonzero(row, size=count, fill_value=NO_SLOT)[0].astype(jnp.int32)

    slots = jax.vmap(nonzero)(is_selected.reshape(-1, is_selected.shape[-1]))
    return slots.reshape(*is_selected.shape[:-1], count)
