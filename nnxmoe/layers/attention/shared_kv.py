"""Attention with a single shared key/value head (DeepSeek-V4, 2026).

Queries attend to a sliding window of tokens. In compressed layers, queries also attend to one entry per earlier window
of ``rate`` tokens (`nnxmoe.layers.attention.compressed`). Because values are rotated, outputs are rotated back by the
query's position.
"""

import dataclasses
import math
from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.attention.compressed import CompressedCache, Compressor, RowMetadata, gather_by_index
from nnxmoe.layers.attention.gqa import Sinks
from nnxmoe.layers.attention.indexer import select_keys
from nnxmoe.layers.attention.softmax_attention import AttentionFn, MaskedSoftmax, ReferenceAttention
from nnxmoe.layers.attention.sparse_attention import NO_SLOT, SelectedSlots, selection_mask
from nnxmoe.layers.cache import SlotMetadata, TokenCache
from nnxmoe.layers.chunks import map_chunks
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.mask import ConcatenatedMask, Mask
from nnxmoe.layers.norm import RMSNorm, rms_normalize
from nnxmoe.layers.rope import TrailingPairs

MAX_SCORES, MAX_QUERIES = 2**23, 256  # limits on scores and queries per row and query block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedKVCache:
    """Cache of a `SharedKV` layer.

    Attributes:
        window: Keys in the sliding window.
        entries: Compressed entries, or ``None`` if the layer has no compressor.
        index: Keys of the `EntryIndexer`, or ``None`` unless the indexer has a compressor.
    """

    window: TokenCache
    entries: CompressedCache | None
    index: CompressedCache | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entries:
    """Compressed entries that the queries of a pass may attend to.

    Attributes:
        values: Keys and values ``[B, n, H]``.
        slots: Metadata of the last token of each entry.
        selected: Slots of the selected entries per query. If ``None``, queries attend to all entries.
    """

    values: Array
    slots: SlotMetadata
    selected: SelectedSlots | None = None

    def mask(self, queries: Mask) -> Mask:
        """Return the mask of the queries over the entries."""
        return Mask(queries.query_index, queries.query_segment, self.slots, None)


@dataclasses.dataclass(frozen=True)
class SharedKVDims:
    """Sizes of `SharedKV`.

    Attributes:
        heads, head_dim: Number of query heads, N, and width of a head, H.
        q_rank: Rank of the query projection.
        o_rank: Rank of the output projection per group.
        groups: Number of groups of heads in the output projection.
    """

    heads: int
    head_dim: int
    q_rank: int
    o_rank: int
    groups: int


EntryCaches = tuple[CompressedCache | None, CompressedCache | None]
"""Caches of the compressed entries and of the index."""


class EntryIndexer(nnx.Module):
    """Indexer that selects, per query, the ``k`` entries with the highest ``sum_h w_h(x) relu(q_h . key)``.

    Ties go to the earlier entry. This is the lightning indexer of DeepSeek-V4, section 2.3.1, equations 13 to 17.

    Args:
        dim, q_rank: Widths of the layer's input, D, and of the query latents.
        heads, head_dim: Number of indexer heads, h, and their width, W.
        k: Number of entries to select.
        rotary: Rotary position embedding of the queries.
        keys: Compressor that computes the keys. ``None`` if the keys are computed elsewhere.
        **kw: Parameter dtype and rngs.
    """

    def __init__(
        self,
        dim: int,
        q_rank: int,
        heads: int,
        head_dim: int,
        *,
        k: int,
        rotary: Rope,
        keys: Compressor | None,
        **kw: Unpack[ParamOptions],
    ):
        self.k, self.rotary, self.keys = k, rotary, keys
        self.q = Linear((q_rank,), (heads, head_dim), ("q_rank", "heads", "head"), **kw)
        self.weights = Linear((dim,), (heads,), ("embed", "heads"), **kw)

    def queries(
        self, x: Float[Array, "B T_out D"], q_latent: Float[Array, "B T_out q_rank"], context: Context
    ) -> tuple[Float[Array, "B T_out h W"], Float[Array, "B T_out h"]]:
        """Compute the rotated queries and their weights. Constant factors of the weights are omitted."""
        q = context.rotate(self.q(q_latent), self.rotary, TrailingPairs(self.rotary.dim))
        return jax.lax.stop_gradient((q, self.weights(x)))


class SharedKV(nnx.Module):
    """Attention of N query heads to a single shared key/value head.

    The kernels are ``q_a`` and ``q_b`` for low-rank queries, ``kv`` for the shared head, and ``o_a`` and ``o_b`` for a
    low-rank output projection per group of heads. Queries are RMS-normalized without a scale. Source:
    ``DeepseekV4Attention`` in transformers.

    Args:
        dim: Width of the layer's input, D.
        dims: Sizes of the heads and projections.
        window: Size of the sliding window.
        eps: Epsilon for the norms.
        rotary: Rotary position embedding.
        attention_fn: Attention function for layers without a compressor.
        compressor: Computes the entries. If ``None``, queries attend to the window only.
        indexer: Selects entries. If ``None``, queries attend to all entries.
        **kw: Parameter dtype and rngs.
    """

    def __init__(
        self,
        dim: int,
        dims: SharedKVDims,
        *,
        window: int,
        eps: float,
        rotary: Rope,
        attention_fn: AttentionFn,
        compressor: Compressor | None,
        indexer: EntryIndexer | None,
        **kw: Unpack[ParamOptions],
    ):
        self.window, self.eps, self.attention_fn, self.rotary = window, eps, attention_fn, rotary
        self.rotate, self.scale = TrailingPairs(rotary.dim), dims.head_dim**-0.5
        self.q_a = Linear((dim,), (dims.q_rank,), ("embed", "latent"), **kw)
        self.q_norm = RMSNorm(dims.q_rank, eps, **kw)
        self.q_b = Linear((dims.q_rank,), (dims.heads, dims.head_dim), ("q_rank", "heads", "head"), **kw)
        self.kv = Linear((dim,), (dims.head_dim,), ("embed", "latent"), **kw)
        self.kv_norm = RMSNorm(dims.head_dim, eps, **kw)
        group_width = dims.heads * dims.head_dim // dims.groups
        self.o_a = Linear((group_width,), (dims.groups, dims.o_rank), ("head", "heads", "latent"), **kw)
        self.o_b = Linear((dims.groups, dims.o_rank), (dim,), ("heads", "head", "embed"), **kw)
        self.sinks = Sinks(dims.heads, **kw)
        self.compressor, self.indexer = compressor, indexer

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: SharedKVCache | None = None
    ) -> tuple[Float[Array, "B T_out D"], SharedKVCache | None]:
        q_latent = self.q_norm(self.q_a(context.output_tokens(x)))
        rows = RowMetadata.from_context(context, *x.shape[:2])
        window, kv, mask = self._append_to_window(x, context, cache)
        entries, entry_caches = None, (None, None)
        if self.compressor is not None:
            entries, entry_caches = self._compress(x, q_latent, mask, rows, context, cache)
        y = self._attend(q_latent, kv, mask, entries, rows, context)
        return y, None if window is None else SharedKVCache(window, *entry_caches)

    def _append_to_window(
        self, x: Float[Array, "B T D"], context: Context, cache: SharedKVCache | None
    ) -> tuple[TokenCache | None, Float[Array, "B S H"], Mask]:
        """Compute the rotated keys. Return the updated cache of the window, its keys and the mask."""
        kv = context.rotate(self.kv_norm(self.kv(x))[:, :, None], self.rotary, self.rotate)[:, :, 0]
        return context.append_to_cache(None if cache is None else cache.window, kv, self.window)

    def _attend(
        self,
        q_latent: Float[Array, "B T_out q_rank"],
        kv: Float[Array, "B S H"],
        mask: Mask,
        entries: Entries | None,
        rows: RowMetadata,
        context: Context,
    ) -> Float[Array, "B T_out D"]:
        """Attend to the window tokens ``kv`` and to the entries, and project the outputs of the heads."""
        q = context.rotate(self.project_queries(q_latent), self.rotary, self.rotate)
        if entries is None:
            keys = kv[:, None].astype(q.dtype)
            heads = jnp.swapaxes(self.attention_fn(jnp.swapaxes(q, 1, 2), keys, keys, self._softmax(mask)), 1, 2)
        else:
            heads = self._attend_to_entries(q, kv, mask, entries, rows)
        return self.o_b(self._project_groups(context.rotate(heads, self.rotary, self.rotate.inverse)))

    def project_queries(self, q_latent: Float[Array, "B T_out q_rank"]) -> Float[Array, "B T_out N H"]:
        """Compute the queries before rotation."""
        return rms_normalize(self.q_b(q_latent), self.eps)

    def _project_groups(self, heads: Float[Array, "B T_out N H"]) -> Float[Array, "B T_out groups rank"]:
        """Apply the first kernel of the output projection, ``o_a``, to each group of heads."""
        batch, length, groups = *heads.shape[:2], self.o_a.outs[0]
        rows = jnp.moveaxis(heads.reshape(batch * length, groups, -1), 1, 0)
        outputs = self.o_a.weight().matmul_per_head(rows, 0, self.o_a.outs[1])
        return jnp.moveaxis(outputs, 0, 1).reshape(batch, length, groups, -1)

    def _compress(
        self,
        x: Float[Array, "B T D"],
        q_latent: Float[Array, "B T_out q_rank"],
        mask: Mask,
        rows: RowMetadata,
        context: Context,
        cache: SharedKVCache | None,
    ) -> tuple[Entries, EntryCaches]:
        """Return the entries with the selection of the indexer, and the caches of the entries and of the indexer."""
        assert self.compressor is not None
        entry_cache, index_cache = (None, None) if cache is None else (cache.entries, cache.index)
        entry_cache, values, slots = self.compressor(x, context=context, rows=rows, cache=entry_cache)
        entries = Entries(values, slots)
        if self.indexer is None:
            return entries, (entry_cache, None)
        assert self.indexer.keys is not None
        index_cache, index_keys, _ = self.indexer.keys(x, context=context, rows=rows, cache=index_cache)
        if values.shape[1] > self.indexer.k:
            queries = self.indexer.queries(context.output_tokens(x), q_latent, context=context)
            selected = select_keys(*queries, index_keys, entries.mask(mask), self.indexer.k)
            entries = dataclasses.replace(entries, selected=selected)
        return entries, (entry_cache, index_cache)

    def _attend_to_entries(
        self, q: Float[Array, "B t N H"], kv: Float[Array, "B S H"], mask: Mask, entries: Entries, rows: RowMetadata
    ) -> Float[Array, "B t N H"]:
        """Attend to the window tokens ``kv`` and to the entries, one block of queries at a time."""
        batch, length, heads = q.shape[:3]
        block_size = max(8, min(MAX_QUERIES, MAX_SCORES // (heads * (entries.values.shape[1] + self.window))))
        if length <= block_size:
            return self._attend_block(q, kv, mask, entries)
        blocks, reach = -(-length // block_size), self.window - 1
        step = -(-length // blocks)
        keys, start = mask.keys, rows.length_before - reach
        key_index = keys.index if keys.valid is None else jnp.where(keys.valid, keys.index, -1)
        key_index = jnp.broadcast_to(key_index, kv.shape[:2])
        kv = gather_by_index(kv, key_index, start, reach + blocks * step)

        def attend_block(q: Array, index: Array, segment: Array, *selected: Array) -> tuple[Array, None]:
            offset = jnp.clip(index[:, 0] - rows.length_before, 0, (blocks - 1) * step)
            window_kv = jax.vmap(lambda row, i: jax.lax.dynamic_slice_in_dim(row, i, reach + q.shape[1]))(kv, offset)
            window_index = (start + offset)[:, None] + jnp.arange(window_kv.shape[1], dtype=jnp.int32)
            query_segment = None if mask.query_segment is None else segment
            block_mask = Mask(index, query_segment, rows.slots(jnp.maximum(window_index, -1)), self.window)
            block_entries = dataclasses.replace(entries, selected=selected[0] if selected else None)
            return self._attend_block(q, window_kv, block_mask, block_entries), None

        segment = key_index[:, :1] * 0 if mask.query_segment is None else mask.query_segment
        query_arrays = (jnp.broadcast_to(array, (batch, length)) for array in (mask.query_index, segment))
        selected = () if entries.selected is None else (entries.selected,)
        return map_chunks(attend_block, blocks, q, *query_arrays, *selected)[0]

    def _attend_block(
        self, q: Float[Array, "B t N H"], kv: Float[Array, "B S H"], mask: Mask, entries: Entries
    ) -> Float[Array, "B t N H"]:
        values, slots, entry_mask, is_selected = entries.values, entries.selected, entries.mask(mask), None
        if slots is not None and q.shape[1] == 1:  # gather, so a single query only reads the selected entries
            indices = jnp.minimum(slots[:, 0], values.shape[1] - 1)
            values = jnp.take_along_axis(values, indices[..., None], axis=1)
            entry_mask = entry_mask.map(lambda a: a, lambda a: jnp.take_along_axis(a, indices, axis=1))
            index = jnp.where(slots[:, 0] != NO_SLOT, entry_mask.keys.index, -1)
            entry_mask = dataclasses.replace(entry_mask, keys=dataclasses.replace(entry_mask.keys, index=index))
        elif slots is not None:
            is_selected = selection_mask(slots, values.shape[1])
        kv = jnp.concatenate([kv.astype(q.dtype), values.astype(q.dtype)], axis=1)[:, None]
        softmax = self._softmax(ConcatenatedMask(mask, entry_mask, is_selected))
        return jnp.swapaxes(ReferenceAttention()(jnp.swapaxes(q, 1, 2), kv, kv, softmax), 1, 2)

    def _softmax(self, mask: Mask | ConcatenatedMask) -> MaskedSoftmax:
        return MaskedSoftmax(mask, self.scale, sinks=self.sinks())

    def score_ops(self, num_keys: float) -> list[tuple[int, float]]:
        """Return (multiplications per query-key pair, keys per query) per product, after ``num_keys`` tokens."""
        width, window = 2 * math.prod(self.q_b.outs), min(self.window, num_keys)
        if self.compressor is None:
            return [(width, window)]
        entries = num_keys / self.compressor.rate
        if self.indexer is None:
            return [(width, window + entries)]
        return [(width, window + min(self.indexer.k, entries)), (math.prod(self.indexer.q.outs), entries)]

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> SharedKVCache:
        """Create a ring of ``window + lookahead`` slots, and the caches of the compressors."""
        size = min(self.window + lookahead, capacity)
        window = TokenCache(jnp.zeros((batch, size, self.kv.outs[0]), dtype), ring=True, lookahead=lookahead)
        compressors = self.compressor, None if self.indexer is None else self.indexer.keys
        entry_caches = (
            None if compressor is None else compressor.empty_cache(batch, capacity, dtype, lookahead)
            for compressor in compressors
        )
        return SharedKVCache(window, *entry_caches)
