"""Key selection for sparse attention: an indexer scores all keys for each query (DeepSeek-V3.2, 2025).

Scores are computed for one block of queries at a time. The result is the slots ``[B, T, X]`` of the selected keys.
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
    """Indexer that selects, per query, the keys with the highest ``sum_n weights(x)_n relu(q_n · key)``.

    ``q`` computes the queries from the query latents of MLA. Each token has one normalized key. The reference
    implementation also multiplies the scores by positive constants, which do not change the selection and are omitted
    here. Ties go to the earlier key (torch does not define an order). As in transformers, the selection has no
    gradient, so a loss on the model's output does not train the indexer.

    Args:
        dim: Width of the layer's input, D.
        q_rank: Width of the query latents.
        heads: Number of queries per token, N.
        head_dim: Width of queries and keys, H.
        rotary: Rotary embedding of the first ``rotary.dim`` components of queries and keys. ``None`` disables rotation.
        rotate: Function that applies the rotary embedding to queries and keys.
        **kw: Parameter dtype and rngs.
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
        """Width of a token's cache entry."""
        return self.k.outs[0]

    def keys(self, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T H"]:
        """Compute one key per token."""
        return self._rotate(self.k_norm(self.k(x))[:, :, None], context)[:, :, 0]

    def select(
        self,
        x: Float[Array, "B T_out D"],
        q_latent: Float[Array, "B T_out q_rank"],
        keys: Float[Array, "B S H"],
        mask: Mask,
        topk: int,
        context: Context,
    ) -> SelectedSlots:
        """Return the slots of the selected keys per query, in ascending order, padded with `NO_SLOT`.

        The slots of the first ``topk`` queries of a causal pass are all `NO_SLOT`, because these queries attend to all
        earlier keys.
        """
        inputs = self._rotate(self.q(q_latent), context), self.weights(x), keys
        return select_keys(*jax.lax.stop_gradient(inputs), mask, topk)

    def _rotate(self, x: Float[Array, "B T N H"], context: Context) -> Float[Array, "B T N H"]:
        if self.rotary is None:
            return x
        x_rope, x_nope = jnp.split(x, [self.rotary.dim], axis=-1)
        return jnp.concatenate([context.rotate(x_rope, self.rotary, self.rotate), x_nope], axis=-1)


class TrailingIndexer(Indexer):
    """`Indexer` that rotates the last ``rotary.dim`` components of queries and keys (Hy4, 2026)."""

    def _rotate(self, x: Float[Array, "B T N H"], context: Context) -> Float[Array, "B T N H"]:
        assert self.rotary is not None
        x_nope, x_rope = jnp.split(x, [x.shape[-1] - self.rotary.dim], axis=-1)
        return jnp.concatenate([x_nope, context.rotate(x_rope, self.rotary, self.rotate)], axis=-1)


def select_keys(
    q: Float[Array, "B T N H"], weights: Float[Array, "B T N"], keys: Float[Array, "B S H"], mask: Mask, topk: int
) -> SelectedSlots:
    """Select the ``topk`` keys with the highest weighted scores; see `Indexer`."""

    def select(allowed: Bool[Array, "B T S"], key_slice: slice, q: Array, weights: Array) -> SelectedSlots:
        return topk_slots(weighted_scores(q, weights, keys[:, key_slice]), allowed, topk)

    return select_in_blocks(select, mask, topk, topk, q.shape[2], q, weights)


def weighted_scores(
    q: Float[Array, "B T N H"], weights: Float[Array, "B T N"], keys: Float[Array, "B S H"]
) -> Float[Array, "B T S"]:
    """Compute the score of each key for each query, the weighted sum over the heads; see `Indexer`."""
    head_scores = jax.nn.relu(query_key_products(q, keys))
    return jnp.sum(head_scores * weights.astype(jnp.float32)[..., None], axis=2)


def query_key_products(q: Float[Array, "B T N H"], keys: Float[Array, "B S H"]) -> Float[Array, "B T N S"]:
    """Compute the dot products of the queries of all heads with the keys, in float32."""
    return dot_f32(q.reshape(q.shape[0], -1, q.shape[-1]), keys, -1, -1).reshape(*q.shape[:3], -1)


def select_in_blocks(
    select: Callable[..., SelectedSlots],
    mask: Mask,
    topk: int,
    width: int,
    heads: int,
    *query_arrays: Float[Array, "B T ..."] | Int[Array, "B T ..."],
) -> Int[Array, "B T width"]:
    """Call ``select(allowed, key_slice, *query_arrays) -> [B, t, width]`` for blocks of t queries.

    Args:
        select: Selects slots for a block of queries. ``key_slice`` is the slice of keys that the queries may attend to.
            ``allowed [B, t, S]`` is the mask over these keys.
        mask: Mask of all queries.
        topk: In a causal pass, the slots of the first ``topk`` queries are all `NO_SLOT`.
        width: Number of slots per query.
        heads: Number of scores per query-key pair that ``select`` computes. Determines the block size t.
        *query_arrays: Arrays with a query axis. ``select`` receives the slices of the block.
    """
    batch, length = query_arrays[0].shape[:2]
    outputs = [jnp.full((batch, topk if mask.causal else 0, width), NO_SLOT, jnp.int32)]
    for queries, keys in query_parts(mask, length, topk):
        part_mask = mask.select(queries, keys)

        def select_block(
            index: Array, *arrays: Array, slots: SlotMetadata = part_mask.keys, keys: slice = keys
        ) -> SelectedSlots:
            segment, arrays = (None, arrays) if mask.query_segment is None else (arrays[0], arrays[1:])
            return select(Mask(index, segment, slots, None).allowed(), keys, *arrays)

        index = jnp.broadcast_to(part_mask.query_index, (batch, part_mask.query_index.shape[-1]))
        segments = () if part_mask.query_segment is None else (part_mask.query_segment,)
        block = BLOCK_SCORES // (batch * heads * (keys.stop - keys.start))
        outputs.append(map_blocks(select_block, block, index, *segments, *(a[:, queries] for a in query_arrays)))
    return jnp.concatenate(outputs, axis=1)


def sort_padding_last(
    keys: SlotMetadata, shape: tuple[int, ...]
) -> tuple[Int[Array, "B S"], SlotMetadata, Int[Array, "B S"]]:
    """Sort the slots in token order, with padding last. Cache slots are already sorted.

    Args:
        keys: Metadata of the slots.
        shape: Batch size and number of slots, ``(B, S)``.

    Returns:
        The order of the slots, the sorted metadata, and the number of earlier tokens in each token's segment.
    """
    index, segment = (None if a is None else jnp.broadcast_to(a, shape) for a in (keys.index, keys.segment))
    assert index is not None
    order = token_index = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    if keys.valid is not None:
        index = jnp.where(keys.valid, index, -1)
        order = jnp.argsort(index < 0, axis=1, stable=True)
        index = gather_tokens(index, order)
        segment = None if segment is None else gather_tokens(segment, order)
    if segment is None:
        return order, SlotMetadata(index, None, None), token_index
    is_first = jnp.concatenate([jnp.ones((shape[0], 1), bool), segment[:, 1:] != segment[:, :-1]], axis=1)
    segment_start = jax.lax.cummax(jnp.where(is_first, token_index, 0), axis=1)
    return order, SlotMetadata(index, None, segment), token_index - segment_start


def gather_slots(x: Int[Array, "B S ..."], indices: Int[Array, "B ..."]) -> Int[Array, "B ..."]:
    """Gather integers of each row at ``indices``. Index `NO_SLOT` yields `NO_SLOT`."""
    is_missing = indices == NO_SLOT
    values = gather_tokens(x, jnp.where(is_missing, 0, indices))
    return jnp.where(is_missing.reshape(*indices.shape, *(1,) * (x.ndim - 2)), NO_SLOT, values)


def topk_slots(scores: Float[Array, "*rows S"], allowed: Bool[Array, "*#rows S"], count: int) -> Int[Array, "*rows X"]:
    """Return the indices of the ``count`` highest allowed scores in ascending order, padded with `NO_SLOT`.

    Ties go to the lower index. A binary search over the bits of the threshold replaces a sort. Selecting 2048 of 4096
    scores in 64 rows on two cores takes 8 ms, compared to 20 ms with ``jax.lax.top_k`` (jax 0.10.2).
    """
    lowest = np.int32(np.iinfo(np.int32).min)
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    bits = jnp.where(bits == lowest, 0, bits)  # Maps -0.0 to 0.0. Compilers may drop a comparison of floats with 0.
    ranks = jnp.where(allowed, jnp.where(bits < 0, bits ^ np.int32(2**31 - 1), bits), lowest)  # Ordered like scores.

    def add_bit(i: Int[Array, ""], threshold: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        candidate = threshold + jax.lax.shift_left(np.int32(1), 31 - i)
        is_enough = jnp.sum((ranks >= candidate[..., None]).astype(jnp.int32), axis=-1) >= count
        return jnp.where(is_enough, candidate, threshold)

    threshold = jax.lax.fori_loop(0, 32, add_bit, jnp.full(ranks.shape[:-1], lowest))[..., None]
    is_above, is_equal = ranks > threshold, (ranks == threshold) & (ranks > lowest)
    num_equal = count - jnp.sum(is_above, axis=-1, keepdims=True)
    is_selected = is_above | (is_equal & (jnp.cumsum(is_equal, axis=-1) <= num_equal))

    def nonzero(row: Bool[Array, "S"]) -> Int[Array, "X"]:
        return jnp.nonzero(row, size=count, fill_value=NO_SLOT)[0].astype(jnp.int32)

    slots = jax.vmap(nonzero)(is_selected.reshape(-1, is_selected.shape[-1]))
    return slots.reshape(*is_selected.shape[:-1], count)
