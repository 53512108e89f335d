"""Sparse attention: an indexer scores all keys, and each query attends to the best ones (DeepSeek-V3.2, 2025).

Nothing here has queries x keys values at once: scores and masks are computed for a block of queries at a time. What is
kept are the chosen keys, as slot numbers ``[B, T, X]``.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.axes import ParamOptions
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.attention.softmax_attention import AttentionFn, MaskedSoftmax, ReferenceAttention
from nnxmoe.layers.cache import SlotMetadata, gather_tokens
from nnxmoe.layers.chunks import map_chunks
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.linear.matmul import dot_f32
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.norm import LayerNorm
from nnxmoe.layers.rope import RotateFn

NO_SLOT = np.iinfo(np.int32).max  # slot number of no key, beyond every buffer
KEY_NORM_EPS = 1e-6
MOST_PARTS, FEWEST_QUERIES = 8, 64  # parts of a causal pass, each with the keys up to its last query
GATHERING = 80  # gathering a key and its value costs as much as their products with so many heads, on two cores
BLOCK = 2**23  # scores, or gathered values, of a block of queries
SelectedSlots = Int[Array, "_ _ X"]


class Indexer(nnx.Module):
    """Chooses for each query the keys with the highest ``sum_n weights(x)_n relu(q_n · key)``.

    ``q``: ``heads`` queries of width ``head_dim`` from the query latents of MLA. One key per token, normalised. The
    first components of both, as many as ``rotary`` has, are rotated by ``rotate``; None: nothing is. The reference also
    multiplies scores by positive constants, which change no choice. Of equal scores the earlier key is chosen, which
    torch leaves open. The choice has no gradient: a loss of the model's output does not train an indexer, as in
    transformers.
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
        return self._rotated(self.k_norm(self.k(x))[:, :, None], context)[:, :, 0]

    def choose(
        self,
        x: Float[Array, "B asked D"],
        latent: Float[Array, "B asked q_rank"],
        keys: Float[Array, "B S H"],
        mask: Mask,
        topk: int,
        context: Context,
    ) -> SelectedSlots:
        """The slots of the chosen keys of each query in ascending order, `NO_SLOT` in place of missing ones. Of a
        causal pass the first ``topk`` queries have none, since they attend to all keys before them."""
        given = self._rotated(self.q(latent), context), self.weights(x), keys
        return select_keys(*jax.lax.stop_gradient(given), mask, topk)

    def _rotated(self, x: Float[Array, "B T N H"], context: Context) -> Float[Array, "B T N H"]:
        if self.rotary is None:
            return x
        turned, plain = jnp.split(x, [self.rotary.dim], axis=-1)
        return jnp.concatenate([context.rotated(turned, self.rotary, self.rotate), plain], axis=-1)


def select_keys(
    q: Float[Array, "B T N H"], weights: Float[Array, "B T N"], keys: Float[Array, "B S H"], mask: Mask, topk: int
) -> SelectedSlots:
    def run(allowed: Bool[Array, "B T S"], seen: slice, q: Array, weights: Array) -> SelectedSlots:
        of_heads = jax.nn.relu(products(q, keys[:, seen]))
        scores = jnp.sum(of_heads * weights.astype(jnp.float32)[..., None], axis=2)
        return highest(scores, allowed, topk)

    return choose_in_blocks(run, mask, topk, topk, q.shape[2], q, weights)


def products(q: Float[Array, "B T N H"], keys: Float[Array, "B S H"]) -> Float[Array, "B T N S"]:
    """Products of the queries of all heads with the keys, in float32."""
    return dot_f32(q.reshape(q.shape[0], -1, q.shape[-1]), keys, -1, -1).reshape(*q.shape[:3], -1)


def choose_in_blocks(
    run: Callable[..., SelectedSlots],
    mask: Mask,
    topk: int,
    width: int,
    heads: int,
    *of_queries: Float[Array, "B T ..."],
) -> Int[Array, "B T width"]:
    """Calls ``run(allowed, seen, *of_queries) -> [B, t, width]`` for blocks of t queries. ``seen``: the slice of the
    keys that they may attend to; ``allowed [B, t, seen]``: to which. The first ``topk`` queries of a causal pass get
    `NO_SLOT`. ``heads``: scores that ``run`` computes per query and key, which sets t."""
    batch, length = of_queries[0].shape[:2]
    outs = [jnp.full((batch, _dense_queries(mask, topk), width), NO_SLOT, jnp.int32)]
    for queries, seen in _parts(mask, length, topk):
        part = mask.part(queries, seen)

        def some(index: Array, *given: Array, slots: SlotMetadata = part.keys, seen: slice = seen) -> SelectedSlots:
            segment, mine = (None, given) if mask.query_segment is None else (given[0], given[1:])
            return run(Mask(index, segment, slots, None).allowed(), seen, *mine)

        index = jnp.broadcast_to(part.query_index, (batch, part.query_index.shape[-1]))
        segments = () if part.query_segment is None else (part.query_segment,)
        block = BLOCK // (batch * heads * (seen.stop - seen.start))
        outs.append(_in_blocks(some, block, index, *segments, *(a[:, queries] for a in of_queries)))
    return jnp.concatenate(outs, axis=1)


def sort_padding_last(
    keys: SlotMetadata, shape: tuple[int, ...]
) -> tuple[Int[Array, "B S"], SlotMetadata, Int[Array, "B S"]]:
    """The slots in the order of their tokens, padding last; these tokens; and the number of tokens before each in its
    segment. The slots of a cache are in order already. ``shape``: ``B, S``."""
    index, segment = (None if a is None else jnp.broadcast_to(a, shape) for a in (keys.index, keys.segment))
    assert index is not None
    order = places = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    if keys.valid is not None:
        index = jnp.where(keys.valid, index, -1)
        order = jnp.argsort(index < 0, axis=1, stable=True)
        index, segment = gather_tokens(index, order), None if segment is None else gather_tokens(segment, order)
    if segment is None:
        return order, SlotMetadata(index, None, None), places
    first = jnp.concatenate([jnp.ones((shape[0], 1), bool), segment[:, 1:] != segment[:, :-1]], axis=1)
    return order, SlotMetadata(index, None, segment), places - jax.lax.cummax(jnp.where(first, places, 0), axis=1)


def gather_or_none(x: Int[Array, "B S ..."], at: Int[Array, "B ..."]) -> Int[Array, "B ..."]:
    """Gather the places ``at`` of each row, and `NO_SLOT` for places that are `NO_SLOT`."""
    none = at == NO_SLOT
    return jnp.where(none.reshape(*at.shape, *(1,) * (x.ndim - 2)), NO_SLOT, gather_tokens(x, jnp.where(none, 0, at)))


def highest(scores: Float[Array, "*rows S"], allowed: Bool[Array, "*#rows S"], count: int) -> Int[Array, "*rows X"]:
    """Indices of the ``count`` highest allowed scores, in ascending order; `NO_SLOT` where fewer are allowed.

    Among equal scores the lower index wins. The threshold is found bit by bit instead of by a sort: 8 ms instead of 20
    with ``jax.lax.top_k`` for 2048 of 4096 scores in 64 rows, on two cores (jax 0.10.2).
    """
    least = np.int32(np.iinfo(np.int32).min)
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)  # -0.0 as 0.0
    order = jnp.where(allowed, jnp.where(bits < 0, bits ^ np.int32(2**31 - 1), bits), least)

    def add_bit(i: Int[Array, ""], last: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        higher = last + jax.lax.shift_left(np.int32(1), 31 - i)
        enough = jnp.sum((order >= higher[..., None]).astype(jnp.int32), axis=-1) >= count
        return jnp.where(enough, higher, last)

    last = jax.lax.fori_loop(0, 32, add_bit, jnp.full(order.shape[:-1], least))[..., None]
    above, equal = order > last, (order == last) & (order > least)
    left = count - jnp.sum(above, axis=-1, keepdims=True)
    taken = above | (equal & (jnp.cumsum(equal, axis=-1) <= left))

    def places(row: Bool[Array, "S"]) -> Int[Array, "X"]:
        return jnp.nonzero(row, size=count, fill_value=NO_SLOT)[0].astype(jnp.int32)

    flat = jax.vmap(places)(taken.reshape(-1, taken.shape[-1]))
    return flat.reshape(*taken.shape[:-1], count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectedMask(Mask):
    """A mask that allows the chosen keys, whatever else it says."""

    slots: SelectedSlots | None = None

    def allowed(self) -> Bool[Array, "B T S"]:
        none = jnp.zeros(self.keys.index.shape[-1], bool)
        return jax.vmap(jax.vmap(lambda slots: none.at[slots].set(True, mode="drop")))(self.slots)


@dataclasses.dataclass(frozen=True)
class SparseAttention:
    """Attention of each query to its chosen keys, by `ReferenceAttention` in blocks of queries.

    Where all heads share their keys and values (`nnxmoe.AbsorbedMLA`), those of the chosen keys are gathered if that
    costs less, as in decoding, where no others are read then; else scores of all keys are masked. The first ``topk``
    queries of a causal pass are computed by ``dense``.
    """

    chosen: SelectedSlots
    dense: AttentionFn

    def __call__(
        self, q: Float[Array, "B N T H"], k: Float[Array, "B K S H"], v: Float[Array, "B K S Hv"], scores: MaskedSoftmax
    ) -> Float[Array, "B N T Hv"]:
        mask, topk, outs = scores.mask, self.chosen.shape[2], []
        if first := _dense_queries(mask, topk):
            near = slice(0, first)
            outs.append(self.dense(q[:, :, near], k[:, :, near], v[:, :, near], scores.part(near, near)))
        for queries, seen in _parts(mask, q.shape[2], topk):
            part = (q[:, :, queries], k[:, :, seen], v[:, :, seen], scores.part(queries, seen))
            outs.append((_gathered if _gathers(*part[:2], topk) else _masked)(*part, self.chosen[:, queries]))
        return jnp.concatenate(outs, axis=2)


def _gathers(q: Float[Array, "B N T H"], k: Float[Array, "B K S H"], topk: int) -> bool:
    """Whether to gather the chosen keys of each query. With 16 heads, 2048 of 4096 keys for 4096 queries take 11.7 s
    gathered and 3.8 s masked on two cores, of 8192 keys for 8192 queries 21 and 14 s."""
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    return k.shape[1] == 1 and (queries * topk <= keys or topk * (heads + GATHERING) < heads * keys)


def _masked(q: Array, k: Array, v: Array, scores: MaskedSoftmax, chosen: SelectedSlots) -> Float[Array, "B N T Hv"]:
    def run(q: Array, chosen: SelectedSlots) -> Array:
        mask = SelectedMask(scores.mask.query_index, None, scores.mask.keys, None, slots=chosen)
        out = ReferenceAttention()(jnp.swapaxes(q, 1, 2), k, v, dataclasses.replace(scores, mask=mask))
        return jnp.swapaxes(out, 1, 2)

    block = max(FEWEST_QUERIES, BLOCK // (k.shape[0] * q.shape[1] * k.shape[2]))
    return jnp.swapaxes(_in_blocks(run, block, jnp.swapaxes(q, 1, 2), chosen), 1, 2)


def _gathered(q: Array, k: Array, v: Array, scores: MaskedSoftmax, chosen: SelectedSlots) -> Float[Array, "B N T Hv"]:
    size, topk = k.shape[2], chosen.shape[2]

    def run(q: Array, chosen: SelectedSlots) -> Array:
        """Every query is a row of its own, with its own keys."""
        batch, count, heads, width = q.shape
        places = jnp.minimum(chosen, size - 1).reshape(batch, count * topk)
        k_near, v_near = (jax.vmap(lambda x, at: x[at])(x[:, 0], places) for x in (k, v))
        slots = SlotMetadata(jnp.where(chosen == NO_SLOT, -1, 0).reshape(batch * count, topk), None, None)
        mask = Mask(jnp.zeros((1,), jnp.int32), None, slots, None)
        rows = q.reshape(batch * count, heads, 1, width)
        k_near, v_near = (x.reshape(batch * count, 1, topk, -1) for x in (k_near, v_near))
        out = ReferenceAttention()(rows, k_near, v_near, dataclasses.replace(scores, mask=mask))
        return out.reshape(batch, count, heads, -1)

    block = BLOCK // (k.shape[0] * topk * k.shape[3])
    return jnp.swapaxes(_in_blocks(run, block, jnp.swapaxes(q, 1, 2), chosen), 1, 2)


def _dense_queries(mask: Mask, topk: int) -> int:
    """The number of first queries that attend to all keys before them."""
    return topk if mask.causal else 0


def _parts(mask: Mask, length: int, topk: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the other queries, and of the keys that they may attend to."""
    first = _dense_queries(mask, topk)
    count = min(MOST_PARTS, max(1, (length - first) // FEWEST_QUERIES)) if mask.causal else 1
    for i in range(count):
        queries = slice(first + i * (length - first) // count, first + (i + 1) * (length - first) // count)
        yield queries, slice(0, queries.stop if mask.causal else mask.keys.index.shape[-1])


def _in_blocks(run: Callable[..., Array], block: int, *arrays: Array) -> Array:
    """``run`` on up to ``block`` queries of the arrays ``[B, T, …]`` at a time."""
    length = arrays[0].shape[1]
    if length <= block:
        return run(*arrays)
    return map_chunks(lambda *part: (run(*part), ()), -(-length // max(block, 1)), *arrays)[0]
