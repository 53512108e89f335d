"""Grouped-query attention to blocks of keys selected by an indexer (MiniMax-M3, 2026)."""

import dataclasses
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.axes import ParamOptions
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.attention.gqa import GQA, AttentionDims
from nnxmoe.layers.attention.indexer import (
    gather_or_none,
    query_key_products,
    select_in_blocks,
    sort_padding_last,
    topk_slots,
)
from nnxmoe.layers.attention.softmax_attention import AttentionFn, HeadOutputs, Keys, MaskedSoftmax, Queries, Values
from nnxmoe.layers.attention.sparse_attention import NO_SLOT, SelectedSlots, SparseAttention
from nnxmoe.layers.cache import TokenCache
from nnxmoe.layers.cache_buffer import gather_tokens
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.norm import OffsetNorm
from nnxmoe.layers.rope import RotateFn


@dataclasses.dataclass(frozen=True)
class KeyBlocks:
    """Sizes of the selection of a `BlockIndexer`.

    Attributes:
        size: Number of consecutive keys per block.
        count: Number of blocks per query.
        local: Number of latest blocks that are always selected, including the block of the query's token.
    """

    size: int
    count: int
    local: int


class BlockIndexer(nnx.Module):
    """Indexer that selects blocks of keys for each query and each group of heads.

    Each token has one query per group and one key, both normalized and rotated. The score of a block is the highest
    ``q · key`` over the block's keys up to the query. Blocks are counted from the first token of each segment.
    transformers also counts padding. The selection has no gradient. Source: ``MiniMaxM3VLIndexer`` in
    transformers 5.24.

    Args:
        dim: Width of the layer's input, D.
        heads: Number of groups of heads.
        head_dim: Width of queries and keys, H.
        blocks: Sizes of the selection.
        eps: Epsilon of the norms.
        rotary: Rotary position embedding.
        rotate: Rotates queries and keys.
        **kw: The dtype and rngs of the parameters.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        *,
        blocks: KeyBlocks,
        eps: float,
        rotary: Rope,
        rotate: RotateFn,
        **kw: Unpack[ParamOptions],
    ):
        self.blocks = blocks
        self.rotary, self.rotate = rotary, rotate
        self.q = Linear((dim,), (heads, head_dim), ("embed", None, "head"), **kw)
        self.k = Linear((dim,), (head_dim,), ("embed", "latent"), **kw)
        self.q_norm, self.k_norm = (OffsetNorm(head_dim, eps, **kw) for _ in "qk")

    @property
    def topk(self) -> int:
        """Number of keys per query."""
        return self.blocks.size * self.blocks.count

    def keys(self, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T H"]:
        """Compute one key per token."""
        return context.rotated(self.k_norm(self.k(x))[:, :, None], self.rotary, self.rotate)[:, :, 0]

    def select(
        self, x: Float[Array, "B asked D"], keys: Float[Array, "B S H"], mask: Mask, context: Context
    ) -> SelectedSlots:
        """Return the slots of the keys in the selected blocks up to each query, ``[B * heads, T, topk]``, ascending.

        The first `topk` queries of a causal pass have only `NO_SLOT`, because they attend to all earlier keys.
        """
        q = context.rotated(self.q_norm(self.q(x)), self.rotary, self.rotate)
        order, tokens, offset = sort_padding_last(mask.keys, keys.shape[:2])
        has_padding, is_packed = mask.keys.valid is not None, tokens.segment is not None
        q, keys = jax.lax.stop_gradient((q, gather_tokens(keys, order) if has_padding else keys))

        def select(allowed: Bool[Array, "B T S"], key_slice: slice, q: Float[Array, "B T N H"]) -> Int[Array, "B T _"]:
            places = self._select_places(q, keys[:, key_slice], allowed, offset[:, key_slice], is_packed)
            slots = gather_or_none(order, places) if has_padding else places
            return slots.reshape(*slots.shape[:2], -1)

        heads, mask = q.shape[2], dataclasses.replace(mask, keys=tokens)
        slots = select_in_blocks(select, mask, self.topk, heads * self.topk, heads, q)
        by_head = slots.reshape(*slots.shape[:2], heads, self.topk)
        return jnp.moveaxis(by_head, 2, 1).reshape(-1, slots.shape[1], self.topk)

    def _select_places(
        self,
        q: Float[Array, "B T N H"],
        keys: Float[Array, "B S H"],
        allowed: Bool[Array, "B T S"],
        offset: Int[Array, "B S"],
        is_packed: bool,
    ) -> Int[Array, "B T N X"]:
        """Select places among keys sorted by their tokens. ``offset`` is the offset of each key in its segment."""
        blocks, size, places = self.blocks, keys.shape[1], jnp.arange(keys.shape[1])
        scores = jnp.where(allowed[:, :, None], query_key_products(q, keys), -jnp.inf)
        if is_packed:  # a block may start at any key
            first, block_scores = places, windowed_max(scores, blocks.size)
        else:
            first, padding = places[:: blocks.size], -size % blocks.size
            padded = jnp.pad(scores, ((0, 0),) * 3 + ((0, padding),), constant_values=-jnp.inf)
            block_scores = padded.reshape(*scores.shape[:3], -1, blocks.size).max(axis=-1)
        is_start = allowed[..., first] & (offset[:, None, first] % blocks.size == 0)
        query_offset = jnp.sum(allowed, axis=-1, keepdims=True) - 1
        is_local = query_offset // blocks.size - offset[:, None, first] // blocks.size < blocks.local
        block_scores = jnp.where((is_local & is_start)[:, :, None], jnp.inf, block_scores)
        selected = topk_slots(block_scores, is_start[:, :, None], blocks.count)
        is_missing = selected == NO_SLOT
        starts = jnp.where(is_missing, size, first[jnp.where(is_missing, 0, selected)])
        last = jnp.max(jnp.where(allowed, places, -1), axis=-1)
        selected = starts[..., None] + jnp.arange(blocks.size)
        selected = jnp.where(selected <= last[:, :, None, None, None], selected, NO_SLOT)
        return selected.reshape(*selected.shape[:3], -1)


def windowed_max(x: Float[Array, "*rows S"], width: int) -> Float[Array, "*rows S"]:
    """Compute the maximum over each window of ``width`` elements that starts at an element."""
    covered = 1
    while covered < width:
        step = min(covered, width - covered)
        later = jnp.pad(x[..., step:], ((0, 0),) * (x.ndim - 1) + ((0, step),), constant_values=-jnp.inf)
        x, covered = jnp.maximum(x, later), covered + step
    return x


class IndexedGQA(GQA):
    """`GQA` with attention to the blocks of keys that a `BlockIndexer` selects per group of heads.

    Bit-equal to `GQA` if there are at most ``topk`` keys.
    """

    supports_context_parallel: ClassVar[bool] = False

    def __init__(self, dims: AttentionDims, *, indexer: BlockIndexer, **options: Any):
        super().__init__(dims, **options)
        self.indexer, self.topk = indexer, indexer.topk

    def _append_to_cache(
        self, x: Float[Array, "B T D"], k: Array, v: Array, context: Context, cache: Any
    ) -> tuple[Any, Array, Array, Mask, AttentionFn]:
        stored = k, v, self.indexer.keys(x, context=context)
        cache, (k, v, index_keys), mask = context.append_to_cache(cache, stored, None)
        attention_fn = self.attention_fn
        if index_keys.shape[1] > self.topk:
            selected = self.indexer.select(context.output_tokens(x), index_keys, mask=mask, context=context)
            attention_fn = PerGroupAttention(SparseAttention(selected, attention_fn), self.indexer.q.outs[0])
        return cache, k, v, mask, attention_fn

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> TokenCache:
        """Create a cache with one slot per token for the token's keys, values and indexer key."""
        cache, width = super().empty_cache(batch, capacity, dtype, lookahead), self.indexer.k.outs[0]
        return dataclasses.replace(cache, buffers=(*cache.buffers, jnp.zeros((batch, capacity, width), dtype)))


@dataclasses.dataclass(frozen=True)
class PerGroupAttention:
    """Attention with each group of heads as a separate row of the batch, so groups may attend to different keys.

    Attributes:
        attention_fn: Attention of the rows.
        groups: Number of groups, a divisor or a multiple of the number of key/value heads.
    """

    attention_fn: AttentionFn
    groups: int

    def __call__(self, q: Queries, k: Keys, v: Values, softmax: MaskedSoftmax) -> HeadOutputs:
        (batch, kv_heads), groups = k.shape[:2], self.groups
        assert softmax.sinks is None, "sinks are per head"
        if groups > kv_heads:
            k, v = (jnp.repeat(a, groups // kv_heads, axis=1) for a in (k, v))

        def repeat_rows(a: Array) -> Array:
            return jnp.repeat(a, groups, axis=0) if a.ndim > 1 and a.shape[0] == batch else a

        q, k, v = (a.reshape(batch * groups, -1, *a.shape[2:]) for a in (q, k, v))
        mask = jax.tree.map(repeat_rows, softmax.mask)
        outputs = self.attention_fn(q, k, v, dataclasses.replace(softmax, mask=mask))
        return outputs.reshape(batch, -1, *outputs.shape[2:])
