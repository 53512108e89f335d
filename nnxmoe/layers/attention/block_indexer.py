"""Grouped-query attention to key blocks selected by an indexer (MiniMax-M3, 2026)."""

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
    gather_slots,
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
    """Block selection parameters of a `BlockIndexer`.

    Attributes:
        size: Number of consecutive keys per block.
        count: Number of selected blocks per query.
        local: Number of most recent blocks that are always selected, including the query's own block.
    """

    size: int
    count: int
    local: int


class BlockIndexer(nnx.Module):
    """Indexer that selects key blocks for each query and head group.

    Each token has one query per group and one key. Queries and keys are normalized and rotated. The score of a block is
    the maximum of ``q · key`` over the block's keys up to the query. Blocks are counted from the first token of each
    segment. Unlike transformers, this class does not count padding. The selection has no gradient. Source:
    ``MiniMaxM3VLIndexer`` in transformers 5.24.

    Args:
        dim: Width of the layer's input, D.
        heads: Number of head groups.
        head_dim: Width of queries and keys, H.
        blocks: Block selection parameters.
        eps: Epsilon for the norms.
        rotary: Rotary position embedding.
        rotate: Function that applies the rotary embedding to queries and keys.
        **kw: Parameter dtype and rngs.
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
        """Number of selected keys per query."""
        return self.blocks.size * self.blocks.count

    @property
    def groups(self) -> int:
        """Number of head groups."""
        return self.q.outs[0]

    def empty_keys(self, batch: int, capacity: int, dtype: jnp.dtype) -> Any:
        """Create the cache buffers of `keys`."""
        return jnp.zeros((batch, capacity, self.k.outs[0]), dtype)

    def keys(self, x: Float[Array, "B T D"], context: Context) -> Any:
        """Compute one key per token, ``[B, T, H]``."""
        return context.rotate(self.k_norm(self.k(x))[:, :, None], self.rotary, self.rotate)[:, :, 0]

    def select(self, x: Float[Array, "B T_out D"], keys: Any, mask: Mask, context: Context) -> SelectedSlots:
        """Select the slots of the keys ``[B, S, H]`` that each query attends to.

        Returns:
            Slots ``[B * heads, T, topk]`` of the keys in the selected blocks up to each query, in ascending order. The
            slots of the first `topk` queries of a causal pass are `NO_SLOT`, because these queries attend to all
            earlier keys.
        """
        q = context.rotate(self.q_norm(self.q(x)), self.rotary, self.rotate)
        order, tokens, offset = sort_padding_last(mask.keys, keys.shape[:2])
        has_padding, is_packed = mask.keys.valid is not None, tokens.segment is not None
        q, keys = jax.lax.stop_gradient((q, gather_tokens(keys, order) if has_padding else keys))

        def select(allowed: Bool[Array, "B T S"], key_slice: slice, q: Float[Array, "B T N H"]) -> Int[Array, "B T _"]:
            key_indices = self._select_places(q, keys[:, key_slice], allowed, offset[:, key_slice], is_packed)
            slots = gather_slots(order, key_indices) if has_padding else key_indices
            return slots.reshape(*slots.shape[:2], -1)

        heads, mask = q.shape[2], dataclasses.replace(mask, keys=tokens)
        slots = select_in_blocks(select, mask, self.topk, heads * self.topk, heads, q)
        head_slots = slots.reshape(*slots.shape[:2], heads, self.topk)
        return jnp.moveaxis(head_slots, 2, 1).reshape(-1, slots.shape[1], self.topk)

    def _select_places(
        self,
        q: Float[Array, "B T N H"],
        keys: Float[Array, "B S H"],
        allowed: Bool[Array, "B T S"],
        offset: Int[Array, "B S"],
        is_packed: bool,
    ) -> Int[Array, "B T N X"]:
        """Select key indices for keys in token order. ``offset``: number of earlier tokens in each key's segment."""
        blocks, size, key_indices = self.blocks, keys.shape[1], jnp.arange(keys.shape[1])
        scores = jnp.where(allowed[:, :, None], query_key_products(q, keys), -jnp.inf)
        if is_packed:  # blocks start at segment starts, so a block may start at any key
            block_indices, block_scores = key_indices, windowed_max(scores, blocks.size)
        else:
            block_indices, padding = key_indices[:: blocks.size], -size % blocks.size
            padded_scores = jnp.pad(scores, ((0, 0),) * 3 + ((0, padding),), constant_values=-jnp.inf)
            block_scores = padded_scores.reshape(*scores.shape[:3], -1, blocks.size).max(axis=-1)
        is_start = allowed[..., block_indices] & (offset[:, None, block_indices] % blocks.size == 0)
        query_offset = jnp.sum(allowed, axis=-1, keepdims=True) - 1
        is_local = query_offset // blocks.size - offset[:, None, block_indices] // blocks.size < blocks.local
        block_scores = jnp.where((is_local & is_start)[:, :, None], jnp.inf, block_scores)
        selected = topk_slots(block_scores, is_start[:, :, None], blocks.count)
        is_missing = selected == NO_SLOT
        starts = jnp.where(is_missing, size, block_indices[jnp.where(is_missing, 0, selected)])
        last_allowed = jnp.max(jnp.where(allowed, key_indices, -1), axis=-1)
        selected = starts[..., None] + jnp.arange(blocks.size)
        selected = jnp.where(selected <= last_allowed[:, :, None, None, None], selected, NO_SLOT)
        return selected.reshape(*selected.shape[:3], -1)


def windowed_max(x: Float[Array, "*rows S"], width: int) -> Float[Array, "*rows S"]:
    """Compute the maximum of every window of ``width`` elements. Window i starts at element i."""
    window = 1
    while window < width:
        step = min(window, width - window)
        x_shifted = jnp.pad(x[..., step:], ((0, 0),) * (x.ndim - 1) + ((0, step),), constant_values=-jnp.inf)
        x, window = jnp.maximum(x, x_shifted), window + step
    return x


class IndexedGQA(GQA):
    """`GQA` in which each head group attends only to the keys selected by a `BlockIndexer`.

    The outputs are bitwise equal to the outputs of `GQA` if there are at most ``topk`` keys.
    """

    supports_context_parallel: ClassVar[bool] = False

    def __init__(self, dims: AttentionDims, *, indexer: BlockIndexer, **options: Any):
        super().__init__(dims, **options)
        self.indexer, self.topk = indexer, indexer.topk

    def _append_to_cache(
        self, x: Float[Array, "B T D"], k: Array, v: Array, context: Context, cache: TokenCache | None
    ) -> tuple[TokenCache | None, Array, Array, Mask, AttentionFn]:
        new_values = k, v, self.indexer.keys(x, context=context)
        cache, (k, v, index_keys), mask = context.append_to_cache(cache, new_values, None)
        attention_fn = self.attention_fn
        if k.shape[2] > self.topk:
            selected = self.indexer.select(context.output_tokens(x), index_keys, mask=mask, context=context)
            attention_fn = PerGroupAttention(SparseAttention(selected, attention_fn), self.indexer.groups)
        return cache, k, v, mask, attention_fn

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> TokenCache:
        """Create a cache with one slot per token, for keys, values and indexer keys."""
        cache = super().empty_cache(batch, capacity, dtype, lookahead)
        return dataclasses.replace(cache, buffers=(*cache.buffers, self.indexer.empty_keys(batch, capacity, dtype)))


@dataclasses.dataclass(frozen=True)
class PerGroupAttention:
    """Attention that treats each head group as a separate batch row, so groups may attend to different keys.

    Attributes:
        attention_fn: Attention function that computes the rows.
        groups: Number of groups. Must be a divisor or a multiple of the number of key/value heads.
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
