"""Attention with one head of keys, which are also the values (DeepSeek-V4, 2026).

Queries attend to a window of tokens and, in compressed layers, to the entries of all windows before them
(`nnxmoe.layers.attention.compressed`). Values carry a rotation, so outputs are rotated back by the query's position.
"""

import dataclasses
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.axes import ParamOptions
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.attention.compressed import CompressedCache, Compressor, PassRows, gather_by_index
from nnxmoe.layers.attention.gqa import Sinks
from nnxmoe.layers.attention.indexer import NO_SLOT, SelectedMask, highest
from nnxmoe.layers.attention.softmax_attention import AttentionFn, MaskedSoftmax, ReferenceAttention
from nnxmoe.layers.cache import SlotMetadata, TokenCache
from nnxmoe.layers.chunks import map_chunks
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.mask import ConcatenatedMask, Mask
from nnxmoe.layers.norm import RMSNorm, rms_normalize
from nnxmoe.layers.rope import TrailingPairs

MOST_SCORES, MOST_QUERIES = 2**23, 256  # of a row, in one block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedKVCache:
    """The window of a layer, its entries, and those of its `EntryIndexer`; None for what a layer does not have."""

    window: TokenCache
    entries: CompressedCache | None
    index: CompressedCache | None


@dataclasses.dataclass(frozen=True)
class Far:
    """The entries of a pass ``[B, n, H]``, the slots of their last tokens, and what chooses among them: products with
    ``keys [B, n, h]``; None: queries attend to all entries."""

    entries: Array
    slots: SlotMetadata
    keys: Array | None = None


@dataclasses.dataclass(frozen=True)
class SharedKVDims:
    """Widths of `SharedKV`: heads and their width, ranks of queries and of outputs, and groups of heads."""

    heads: int
    head_dim: int
    q_rank: int
    o_rank: int
    groups: int


class EntryIndexer(nnx.Module):
    """Scores of entries, of which a query attends to the ``k`` best: ``sum_h w_h(x) relu(q_h . key)`` with keys from a
    compressor of its own (lightning indexer; paper 2.3.1, equations 13 to 17). Of equal scores the earlier wins."""

    def __init__(self, dim: int, q_rank: int, heads: int, *, k: int, keys: Compressor, **kw: Unpack[ParamOptions]):
        self.k, self.keys = k, keys
        width = keys.norm.scale.shape[-1]
        self.q = Linear((q_rank,), (heads, width), ("q_rank", "heads", "head"), **kw)
        self.weights = Linear((dim,), (heads,), ("embed", "heads"), **kw)

    def _queries(
        self, x: Float[Array, "B asked D"], low: Float[Array, "B asked q_rank"], context: Context
    ) -> tuple[Float[Array, "B asked h W"], Float[Array, "B asked h"]]:
        """Rotated queries, and the weights of their heads with all factors."""
        q = context.rotated(self.q(low), self.keys.rotary, self.keys.rotate)
        heads, width = q.shape[2:]
        return q, self.weights(x).astype(jnp.float32) * (heads * width) ** -0.5

    def _chosen(
        self, q: Float[Array, "B t h W"], weights: Float[Array, "B t h"], far: Far, seen: Bool[Array, "B t n"]
    ) -> Int[Array, "B t k"]:
        """The slots of the ``k`` best entries among those seen, `NO_SLOT` in place of missing ones."""
        assert far.keys is not None
        products = jnp.einsum("bthw,bnw->bthn", q.astype(jnp.float32), far.keys.astype(jnp.float32))
        scores = jnp.einsum("bthn,bth->btn", jax.nn.relu(products), weights)
        return highest(jax.lax.stop_gradient(scores), seen, self.k)


class SharedKV(nnx.Module):
    """N query heads over one head that is key and value; ``q``: low-rank queries with unit norms, ``kv``: the head,
    ``o_a``, ``o_b``: a low-rank output projection in ``groups`` of heads. ``compressor`` None: the window is all.

    ``DeepseekV4Attention`` in transformers.
    """

    def __init__(
        self,
        dim: int,
        widths: SharedKVDims,
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
        w = widths
        self.rotate, self.scale = TrailingPairs(rotary.dim), w.head_dim**-0.5
        self.q_a = Linear((dim,), (w.q_rank,), ("embed", "latent"), **kw)
        self.q_norm = RMSNorm(w.q_rank, eps, **kw)
        self.q_b = Linear((w.q_rank,), (w.heads, w.head_dim), ("q_rank", "heads", "head"), **kw)
        self.kv = Linear((dim,), (w.head_dim,), ("embed", "latent"), **kw)
        self.kv_norm = RMSNorm(w.head_dim, eps, **kw)
        group = w.heads * w.head_dim // w.groups
        self.o_a = Linear((group,), (w.groups, w.o_rank), ("head", "heads", "latent"), **kw)
        self.o_b = Linear((w.groups, w.o_rank), (dim,), ("heads", "head", "embed"), **kw)
        self.sinks = Sinks(w.heads, **kw)
        self.compressor, self.indexer = compressor, indexer

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: SharedKVCache | None = None
    ) -> tuple[Float[Array, "B asked D"], SharedKVCache | None]:
        asked = context.output_tokens(x)
        low = self.q_norm(self.q_a(asked))
        q = context.rotated(rms_normalize(self.q_b(low), self.eps), self.rotary, self.rotate)
        kv = context.rotated(self.kv_norm(self.kv(x))[:, :, None], self.rotary, self.rotate)[:, :, 0]
        window, seen, mask = context.append_to_cache(None if cache is None else cache.window, kv, self.window)
        kept: tuple[Any, Any] = None, None
        if self.compressor is None:
            shared, q = seen[:, None].astype(q.dtype), jnp.swapaxes(q, 1, 2)
            y = jnp.swapaxes(self.attention_fn(q, shared, shared, self._scores(mask)), 1, 2)
        else:
            rows = PassRows.of(context, *x.shape[:2])
            kept, far = self._compressed(x, context, rows, cache)
            picked = ()
            if self.indexer is not None and far.keys is not None:
                picked = self.indexer._queries(asked, low, context)
            y = self._attended(q, seen, mask, rows, far, picked)
        y = context.rotated(y, self.rotary, self.rotate.back)
        y = self.o_b(self._grouped(y))
        return y, None if cache is None else SharedKVCache(window, *kept)

    def _grouped(self, y: Float[Array, "B asked N H"]) -> Float[Array, "B asked groups rank"]:
        """The first half of the output projection, a product for each group of heads."""
        batch, count, groups = *y.shape[:2], self.o_a.outs[0]
        rows = jnp.moveaxis(y.reshape(batch * count, groups, -1), 1, 0)
        out = self.o_a.weight().matmul_per_head(rows, 0, self.o_a.outs[1])
        return jnp.moveaxis(out, 0, 1).reshape(batch, count, groups, -1)

    def _compressed(
        self, x: Float[Array, "B T D"], context: Context, rows: PassRows, cache: SharedKVCache | None
    ) -> tuple[tuple[Any, Any], Far]:
        """The caches of the entries and of the index, and the entries; with keys if there are more than are chosen."""
        assert self.compressor is not None
        entries, index = (None, None) if cache is None else (cache.entries, cache.index)
        entries, values, slots = self.compressor(x, context=context, rows=rows, cache=entries)
        if self.indexer is None:
            return (entries, None), Far(values, slots)
        index, keys, _ = self.indexer.keys(x, context=context, rows=rows, cache=index)
        return (entries, index), Far(values, slots, keys if values.shape[1] > self.indexer.k else None)

    def _attended(
        self,
        q: Float[Array, "B t N H"],
        seen: Float[Array, "B S H"],
        mask: Mask,
        rows: PassRows,
        far: Far,
        picked: tuple[Array, ...],
    ) -> Float[Array, "B t N H"]:
        """Attention over the tokens seen and the entries, a block of queries at a time."""
        batch, count, heads = q.shape[:3]
        most = max(8, min(MOST_QUERIES, MOST_SCORES // (heads * (far.entries.shape[1] + self.window))))
        if count <= most:
            return self._block(q, seen, mask, far, picked)
        chunks, back = -(-count // most), self.window - 1
        step = -(-count // chunks)
        keys, start = mask.keys, rows.before - back
        index = jnp.broadcast_to(
            keys.index if keys.valid is None else jnp.where(keys.valid, keys.index, -1), seen.shape[:2]
        )
        near = gather_by_index(seen, index, start, back + chunks * step)

        def run(q: Array, index: Array, segment: Array, *picked: Array) -> tuple[Array, None]:
            first = jnp.clip(index[:, 0] - rows.before, 0, (chunks - 1) * step)
            part = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, back + q.shape[1]))(near, first)
            at = (start + first)[:, None] + jnp.arange(part.shape[1], dtype=jnp.int32)
            of_segment = None if mask.query_segment is None else segment
            block = Mask(index, of_segment, rows.slots(jnp.maximum(at, -1)), self.window)
            return self._block(q, part, block, far, picked), None

        given = mask.query_index, index[:, :1] * 0 if mask.query_segment is None else mask.query_segment
        of_queries = (jnp.broadcast_to(a, (batch, count)) for a in given)
        return map_chunks(run, chunks, q, *of_queries, *picked)[0]

    def _block(
        self, q: Float[Array, "B t N H"], near: Float[Array, "B S H"], mask: Mask, far: Far, picked: tuple[Array, ...]
    ) -> Float[Array, "B t N H"]:
        of_far, entries, chosen = Mask(mask.query_index, mask.query_segment, far.slots, None), far.entries, None
        if picked:
            assert self.indexer is not None
            seen = of_far.allowed()
            wanted, weights = picked
            best = self.indexer._chosen(wanted, weights, far, jnp.broadcast_to(seen, (len(q), *seen.shape[1:])))
            if q.shape[1] == 1:  # one query reads what it attends to, and no more
                at = jnp.minimum(best[:, 0], entries.shape[1] - 1)
                entries = jnp.take_along_axis(entries, at[..., None], axis=1)
                of_far = of_far.map(lambda a: a, lambda a: jnp.take_along_axis(a, at, axis=1))
                index = jnp.where(best[:, 0] != NO_SLOT, of_far.keys.index, -1)
                of_far = dataclasses.replace(of_far, keys=dataclasses.replace(of_far.keys, index=index))
            else:
                chosen = SelectedMask(mask.query_index, None, far.slots, None, slots=best).allowed()
        keys = jnp.concatenate([near.astype(q.dtype), entries.astype(q.dtype)], axis=1)[:, None]
        scores = self._scores(ConcatenatedMask(mask, of_far, chosen))
        return jnp.swapaxes(ReferenceAttention()(jnp.swapaxes(q, 1, 2), keys, keys, scores), 1, 2)

    def _scores(self, mask: Mask | ConcatenatedMask) -> MaskedSoftmax:
        return MaskedSoftmax(mask, self.scale, sinks=self.sinks())

    def score_ops(self, seen: float) -> list[tuple[int, float]]:
        """For queries after ``seen`` tokens: multiplications per query and key, and keys per query, of its products."""
        width = 2 * math.prod(self.q_b.outs)
        if self.compressor is None:
            return [(width, min(self.window, seen))]
        far = seen / self.compressor.rate
        if self.indexer is None:
            return [(width, min(self.window, seen) + far)]
        return [
            (width, min(self.window, seen) + min(self.indexer.k, far)),
            (math.prod(self.indexer.q.outs), far),
        ]

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> SharedKVCache:
        """A ring of the window's size and ``lookahead`` slots more, and the entries of the compressors."""
        size = min(self.window + lookahead, capacity)
        window = TokenCache(jnp.zeros((batch, size, self.kv.outs[0]), dtype), ring=True, lookahead=lookahead)
        parts = self.compressor, None if self.indexer is None else self.indexer.keys
        made = (None if part is None else part.empty_cache(batch, capacity, dtype, lookahead) for part in parts)
        return SharedKVCache(window, *made)
