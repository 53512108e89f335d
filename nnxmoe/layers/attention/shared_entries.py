"""Attention with compressed entries and selections that several layers share (DeepSeek-V4.1, 2026).

A few layers compress tokens to entries. The other layers attend to the entries of the last such layer before them. A
few layers select entries. The other layers use the selection of the last such layer before them. One selecting layer
also selects candidate blocks of consecutive entries. The selecting layers after it choose only among these candidates.
"""

import dataclasses
import math
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.axes import ParamOptions
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.attention.compressed import Compressor, RowMetadata, gather_clipped
from nnxmoe.layers.attention.indexer import select_in_blocks, topk_slots, weighted_scores
from nnxmoe.layers.attention.shared_kv import Entries, EntryIndexer, SharedKV, SharedKVCache
from nnxmoe.layers.attention.sparse_attention import SelectedSlots, selection_mask
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.rope import TrailingPairs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedEntries(Entries):
    """`Entries` that layers pass to the next layer.

    Attributes:
        index_keys: Indexer keys ``[B, n, h]`` of the entries.
        candidates: First entries of the candidate blocks per query. If ``None``, all entries are candidates.
    """

    index_keys: Array | None = None
    candidates: Int[Array, "B T count"] | None = None


class IndexerKeys(nnx.Module):
    """Projection of latents ``[B, n, W]`` to indexer keys ``[B, n, h]`` before rotation."""

    def __init__(self, width: int, index_width: int, eps: float, **kw: Unpack[ParamOptions]):
        self.k = Linear((width,), (index_width,), ("latent", None), **kw)
        self.norm = RMSNorm(index_width, eps, **kw)

    def __call__(self, latents: Float[Array, "B n W"]) -> Float[Array, "B n h"]:
        return self.norm(self.k(latents))


class IndexedCompressor(Compressor):
    """`Compressor` without position bias. It also computes an indexer key from each latent, before rotation.

    An entry is the concatenation of the rotated latent and the rotated key. With rate 1 there are no gates.

    Args:
        dim: Width of the layer's input, D.
        width, index_width: Widths of a latent and of an indexer key.
        rate: Number of tokens per window.
        eps: Epsilon for the norms.
        rotary: Rotary position embedding of the latents and of the keys.
        **kw: Parameter dtype and rngs.
    """

    def __init__(
        self, dim: int, width: int, index_width: int, *, rate: int, eps: float, rotary: Rope, **kw: Unpack[ParamOptions]
    ):
        super().__init__(
            dim, width, rate=rate, series=1, eps=eps, rotary=rotary, rotate=TrailingPairs(rotary.dim), **kw
        )
        del self.place
        if rate == 1:
            del self.gate
        self.indexer = IndexerKeys(width, index_width, eps, **kw)

    @property
    def entry_width(self) -> int:
        return super().entry_width + self.indexer.k.outs[0]

    def project(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T W"], Float[Array, "B T W"]]:
        kv = self.kv(x)
        return kv, jnp.zeros_like(kv) if self.rate == 1 else self.gate(x)

    def position_bias(self, series: int) -> float:
        return 0.0

    def to_entries(
        self, latents: Float[Array, "B n W"], first_positions: Int[Array, "B n"]
    ) -> Float[Array, "B n entry_width"]:
        rotate = super().to_entries
        return jnp.concatenate([rotate(x, first_positions) for x in (latents, self.indexer(latents))], axis=-1)


@dataclasses.dataclass(frozen=True)
class CandidateBlocks:
    """Blocks of consecutive entries that later layers select from.

    Attributes:
        size: Number of entries per block. The first block starts at the first entry of a segment.
        count: Number of blocks per query. The block with the newest entry is always a candidate.
    """

    size: int
    count: int

    def starts(self, last_tokens: Int[Array, "B n"], rows: RowMetadata, rate: int) -> Int[Array, "B n"]:
        """Return, per entry, the index of the first entry of its block.

        Args:
            last_tokens: Index of each entry's last token.
            rows: Metadata of the rows.
            rate: Number of tokens per entry.
        """
        ordinal = gather_clipped(rows.segment_offset, last_tokens) // rate
        return jnp.arange(last_tokens.shape[1], dtype=jnp.int32) - ordinal % self.size

    def select(
        self, scores: Float[Array, "B t n"], allowed: Bool[Array, "#B t n"], starts: Int[Array, "B n"]
    ) -> Int[Array, "B t count"]:
        """Return the first entries of the blocks with the highest maximum score, and of the newest block."""
        n = starts.shape[1]
        indices = jnp.arange(n, dtype=jnp.int32)
        scores = jnp.where(allowed, scores, -jnp.inf)
        later_starts = jnp.pad(starts, ((0, 0), (0, self.size - 1)), constant_values=-1)
        later_scores = jnp.pad(scores, ((0, 0), (0, 0), (0, self.size - 1)), constant_values=-jnp.inf)
        block_scores = jnp.full(scores.shape, -jnp.inf)
        for i in range(self.size):
            is_in_block = later_starts[:, None, i : i + n] == indices
            block_scores = jnp.maximum(block_scores, jnp.where(is_in_block, later_scores[..., i : i + n], -jnp.inf))
        newest = jnp.max(jnp.where(allowed, indices, -1), axis=-1)
        newest_start = jnp.where(newest < 0, -1, gather_clipped(starts, jnp.broadcast_to(newest, scores.shape[:2])))
        block_scores = jnp.where(newest_start[..., None] == indices, jnp.inf, block_scores)
        return topk_slots(block_scores, block_scores > -jnp.inf, self.count)


class CandidateIndexer(EntryIndexer):
    """`EntryIndexer` that selects from the candidates of an earlier layer, or selects the candidates.

    Args:
        *sizes: See `EntryIndexer`.
        blocks: Size and number of the candidate blocks.
        selects_candidates: Whether the layer selects the candidates. Its own selection is not restricted to them.
        **options: See `EntryIndexer`.
    """

    def __init__(self, *sizes: int, blocks: CandidateBlocks, selects_candidates: bool, **options: Any):
        super().__init__(*sizes, keys=None, **options)
        self.blocks, self.selects_candidates = blocks, selects_candidates

    def select(
        self,
        queries: tuple[Float[Array, "B t h W"], Float[Array, "B t h"]],
        entries: SharedEntries,
        mask: Mask,
        starts: Int[Array, "B n"],
    ) -> SharedEntries:
        """Return the entries with this layer's selection, and with its candidates if it selects candidates.

        Args:
            queries: Output of `EntryIndexer.queries`.
            entries: Entries of this layer or of an earlier layer.
            mask: Mask of the queries over the entries.
            starts: First entry of each entry's block.
        """
        count, keys = entries.values.shape[1], entries.index_keys
        if count <= self.k or keys is None:
            return dataclasses.replace(entries, selected=None)
        stores_candidates = self.selects_candidates and count > self.blocks.count
        candidates = () if entries.candidates is None or self.selects_candidates else (entries.candidates,)

        def select(allowed: Array, _: slice, q: Array, weights: Array, *candidates: Array) -> SelectedSlots:
            # The slice contains all keys, because the mask of entries is never causal.
            scores = weighted_scores(q, weights, keys)
            if stores_candidates:
                slots = topk_slots(scores, allowed, self.k), self.blocks.select(scores, allowed, starts)
                return jnp.concatenate(slots, axis=-1)
            if candidates:
                is_selected = selection_mask(candidates[0], count)
                allowed = allowed & jnp.take_along_axis(is_selected, starts[:, None], axis=2)
            return topk_slots(scores, allowed, self.k)

        width = self.k + (self.blocks.count if stores_candidates else 0)
        slots = select_in_blocks(select, mask, self.k, width, queries[0].shape[2], *queries, *candidates)
        changes = {"candidates": slots[..., self.k :]} if stores_candidates else {}
        return dataclasses.replace(entries, selected=slots[..., : self.k], **changes)


class SharedEntriesKV(SharedKV):
    """`SharedKV` of DeepSeek-V4.1, which attends to compressed entries of its own or of an earlier layer.

    Unlike in `SharedKV`, the queries of the heads are not RMS-normalized. The rounding of cached keys to FP8 and FP4 in
    DeepSeek's code is not implemented. Source: ``deepseek_v41.py`` in mlx-lm 0.32.2.

    Args:
        *sizes: See `SharedKV`.
        rate: Number of tokens per entry. If 0, the layer attends to the window only.
        topk: Maximum number of entries per query, for `score_ops`.
        compressor: Computes the entries. If ``None``, the layer attends to the entries of an earlier layer.
        indexer: Selects entries. If ``None``, the layer uses the selection of an earlier layer.
        **options: See `SharedKV`.
    """

    supports_context_parallel: ClassVar[bool] = False
    compressor: IndexedCompressor | None
    indexer: CandidateIndexer | None

    def __init__(self, *sizes: Any, rate: int, topk: int, **options: Any):
        super().__init__(*sizes, **options)
        self.rate, self.topk = rate, topk

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: SharedKVCache | None = None
    ) -> tuple[Float[Array, "B T_out D"], SharedKVCache | None]:
        y, _, cache = self.attend_and_share(x, None, context=context, cache=cache)
        return y, cache

    def project_queries(self, q_latent: Float[Array, "B T_out q_rank"]) -> Float[Array, "B T_out N H"]:
        return self.q_b(q_latent)

    def attend_and_share(
        self,
        x: Float[Array, "B T D"],
        entries: SharedEntries | None,
        context: Context,
        cache: SharedKVCache | None,
    ) -> tuple[Float[Array, "B T_out D"], SharedEntries | None, SharedKVCache | None]:
        """Attend to the window and to the entries.

        Args:
            x: Input of the layer.
            entries: Entries and selection of earlier layers, if any.
            context: Context of the layer.
            cache: Cache of the layer, if any.

        Returns:
            The output, the entries and selection for the next layer, and the cache.

        Raises:
            ValueError: If the layer attends to entries, but neither it nor an earlier layer computes entries.
        """
        q_latent = self.q_norm(self.q_a(context.output_tokens(x)))
        rows = RowMetadata.from_context(context, *x.shape[:2])
        window, kv, mask = self._append_to_window(x, context, cache)
        entry_cache = None if cache is None else cache.entries
        if self.compressor is not None:
            entry_cache, values, slots = self.compressor(x, context=context, rows=rows, cache=entry_cache)
            values, index_keys = jnp.split(values, [self.kv.outs[0]], axis=-1)
            entries = SharedEntries(values, slots, index_keys=index_keys)
        elif entries is not None:
            selected, candidates = jax.tree.map(context.output_tokens, (entries.selected, entries.candidates))
            entries = dataclasses.replace(entries, selected=selected, candidates=candidates)
        if self.rate and entries is None:
            raise ValueError("no entries: this layer or an earlier layer must have a compressor")
        if self.indexer is not None and entries is not None:
            queries = self.indexer.queries(context.output_tokens(x), q_latent, context=context)
            starts = self.indexer.blocks.starts(entries.slots.index, rows, self.rate)
            entries = self.indexer.select(queries, entries, entries.mask(mask), starts)
        y = self._attend(q_latent, kv, mask, entries if self.rate else None, rows, context)
        return y, entries, None if window is None else SharedKVCache(window, entry_cache, None)

    def score_ops(self, num_keys: float) -> list[tuple[int, float]]:
        width, window = 2 * math.prod(self.q_b.outs), min(self.window, num_keys)
        if not self.rate:
            return [(width, window)]
        entries = num_keys / self.rate
        ops = [(width, window + min(self.topk, entries))]
        return ops if self.indexer is None else [*ops, (math.prod(self.indexer.q.outs), entries)]
