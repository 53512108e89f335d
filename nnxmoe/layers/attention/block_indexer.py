"""Grouped-query attention to blocks of keys that an indexer chooses (MiniMax-M3, 2026)."""

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
    NO_SLOT,
    SelectedSlots,
    SparseAttention,
    choose_in_blocks,
    gather_or_none,
    highest,
    products,
    sort_padding_last,
)
from nnxmoe.layers.attention.softmax_attention import AttentionFn, MaskedSoftmax
from nnxmoe.layers.cache import TokenCache, gather_tokens
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.norm import OffsetNorm
from nnxmoe.layers.rope import RotateFn


@dataclasses.dataclass(frozen=True)
class KeyBlocks:
    """Blocks of ``size`` consecutive keys, of which a query attends to ``count``: always to the ``local`` last ones,
    its own among them."""

    size: int
    count: int
    local: int


class BlockIndexer(nnx.Module):
    """Chooses blocks of keys for each query and each of ``heads`` groups of heads.

    The score of a block is the highest ``q · key`` of its keys up to the query. Each segment is divided into blocks
    from its first token on, where transformers also counts padding. ``q``: ``heads`` queries of width
    ``head_dim``; one key per token; both are normalised and rotated. The choice has no gradient. Source:
    ``MiniMaxM3VLIndexer`` in transformers 5.24.
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
        """Keys per query."""
        return self.blocks.size * self.blocks.count

    def keys(self, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T H"]:
        """Compute one key per token."""
        return context.rotated(self.k_norm(self.k(x))[:, :, None], self.rotary, self.rotate)[:, :, 0]

    def choose(
        self, x: Float[Array, "B asked D"], keys: Float[Array, "B S H"], mask: Mask, context: Context
    ) -> SelectedSlots:
        """The slots of the keys in the chosen blocks up to each query, ``[B * heads, T, topk]``, in ascending
        order. Of a causal pass the first `topk` queries have none, since they attend to all keys before them."""
        q = context.rotated(self.q_norm(self.q(x)), self.rotary, self.rotate)
        order, tokens, offset = sort_padding_last(mask.keys, keys.shape[:2])
        moved, packed = mask.keys.valid is not None, tokens.segment is not None
        q, keys = jax.lax.stop_gradient((q, gather_tokens(keys, order) if moved else keys))

        def run(allowed: Bool[Array, "B T S"], seen: slice, q: Float[Array, "B T N H"]) -> Int[Array, "B T _"]:
            chosen = self._places(q, keys[:, seen], allowed, offset[:, seen], packed)
            chosen = gather_or_none(order, chosen) if moved else chosen
            return chosen.reshape(*chosen.shape[:2], -1)

        heads, mask = q.shape[2], dataclasses.replace(mask, keys=tokens)
        chosen = choose_in_blocks(run, mask, self.topk, heads * self.topk, heads, q)
        split = chosen.reshape(*chosen.shape[:2], heads, self.topk)
        return jnp.moveaxis(split, 2, 1).reshape(-1, chosen.shape[1], self.topk)

    def _places(
        self,
        q: Float[Array, "B T N H"],
        keys: Float[Array, "B S H"],
        allowed: Bool[Array, "B T S"],
        offset: Int[Array, "B S"],
        packed: bool,
    ) -> Int[Array, "B T N X"]:
        """The places of the chosen keys among all that are in order. ``offset``: of each key in its segment."""
        blocks, size, places = self.blocks, keys.shape[1], jnp.arange(keys.shape[1])
        scores = jnp.where(allowed[:, :, None], products(q, keys), -jnp.inf)
        if packed:  # a block may begin anywhere
            first, best = places, running_max(scores, blocks.size)
        else:
            first, pad = places[:: blocks.size], -size % blocks.size
            wide = jnp.pad(scores, ((0, 0),) * 3 + ((0, pad),), constant_values=-jnp.inf)
            best = wide.reshape(*scores.shape[:3], -1, blocks.size).max(axis=-1)
        starts = allowed[..., first] & (offset[:, None, first] % blocks.size == 0)
        own = jnp.sum(allowed, axis=-1, keepdims=True) - 1  # the query's offset in its segment
        near = own // blocks.size - offset[:, None, first] // blocks.size < blocks.local
        best = jnp.where((near & starts)[:, :, None], jnp.inf, best)
        chosen = highest(best, starts[:, :, None], blocks.count)
        begin = jnp.where(chosen == NO_SLOT, size, first[jnp.where(chosen == NO_SLOT, 0, chosen)])
        last = jnp.max(jnp.where(allowed, places, -1), axis=-1)
        found = begin[..., None] + jnp.arange(blocks.size)
        found = jnp.where(found <= last[:, :, None, None, None], found, NO_SLOT)
        return found.reshape(*found.shape[:3], -1)


def running_max(x: Float[Array, "*rows S"], width: int) -> Float[Array, "*rows S"]:
    """The maximum of each number and the ``width - 1`` after it."""
    done = 1
    while done < width:
        step = min(done, width - done)
        later = jnp.pad(x[..., step:], ((0, 0),) * (x.ndim - 1) + ((0, step),), constant_values=-jnp.inf)
        x, done = jnp.maximum(x, later), done + step
    return x


class IndexedGQA(GQA):
    """`GQA` whose queries attend to the blocks of keys that a `BlockIndexer` chooses for groups of heads. Equal to
    `GQA`, also in the last bit, where no more keys than these are there."""

    supports_context_parallel: ClassVar[bool] = False

    def __init__(self, heads: AttentionDims, *, indexer: BlockIndexer, **options: Any):
        super().__init__(heads, **options)
        self.indexer, self.topk = indexer, indexer.topk

    def _seen(
        self, x: Float[Array, "B T D"], k: Array, v: Array, context: Context, cache: Any
    ) -> tuple[Any, Array, Array, Mask, AttentionFn]:
        cache, (k, v, near), mask = context.append_to_cache(cache, (k, v, self.indexer.keys(x, context=context)), None)
        attention_fn = self.attention_fn
        if near.shape[1] > self.topk:
            chosen = self.indexer.choose(context.output_tokens(x), near, mask=mask, context=context)
            attention_fn = PerGroupAttention(SparseAttention(chosen, attention_fn), self.indexer.q.outs[0])
        return cache, k, v, mask, attention_fn

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> TokenCache:
        """A slot per token, for its keys and values, and the indexer's key."""
        cache, width = super().empty_cache(batch, capacity, dtype, lookahead), self.indexer.k.outs[0]
        return dataclasses.replace(cache, buffers=(*cache.buffers, jnp.zeros((batch, capacity, width), dtype)))


@dataclasses.dataclass(frozen=True)
class PerGroupAttention:
    """Computes ``attention_fn`` with each group of heads as a row of the batch, so that groups may attend to other
    keys.

    ``groups``: number of groups; it divides the number of key/value heads, or is a multiple of it.
    """

    attention_fn: AttentionFn
    groups: int

    def __call__(
        self, q: Float[Array, "B N T H"], k: Float[Array, "B K S H"], v: Float[Array, "B K S Hv"], scores: MaskedSoftmax
    ) -> Float[Array, "B N T Hv"]:
        (batch, heads), groups = k.shape[:2], self.groups
        assert scores.sinks is None, "sinks are per head"
        if groups > heads:
            k, v = (jnp.repeat(a, groups // heads, axis=1) for a in (k, v))

        def of_rows(a: Array) -> Array:
            return jnp.repeat(a, groups, axis=0) if a.ndim > 1 and a.shape[0] == batch else a

        q, k, v = (a.reshape(batch * groups, -1, *a.shape[2:]) for a in (q, k, v))
        out = self.attention_fn(q, k, v, dataclasses.replace(scores, mask=jax.tree.map(of_rows, scores.mask)))
        return out.reshape(batch, -1, *out.shape[2:])
