"""Attention with memory linear in the number of queries and keys, forward and backward.

A running maximum and a running sum per query replace the softmax over all keys (Rabe and Staats 2021). The backward
pass saves the output and the log-sum-exp of each query and computes the scores of each block again (FlashAttention, Dao
et al. 2022; FlashAttention-2, Dao 2023).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.config.validate import set_positive
from nnxmoe.layers.attention.softmax_attention import MaskedSoftmax
from nnxmoe.layers.cache import SlotMetadata
from nnxmoe.layers.linear.matmul import dot_f32
from nnxmoe.layers.linear.xla_cpu import as_bits, from_bits
from nnxmoe.layers.mask import Mask

LOWEST = float(jnp.finfo(jnp.float32).min)
Sizes = tuple[int, int]  # queries and keys per block
Form = tuple[Sizes, Any]  # and the structure of `MaskedSoftmax`
Grouped = Float[Array, "B K G T _"]
Sinks = Float[Array, "N"] | None


@dataclasses.dataclass(frozen=True)
class FlashAttention:
    """Exact attention in blocks of up to ``block_q`` by ``block_k`` scores; blocks without an allowed pair are skipped.

    ``block_q`` None: 256, or 512 where each key head has one query head: XLA:CPU computes fewer scores per key head at
    half the speed (jax 0.10.2). Accumulates in float32. The output of a query without any key (padding) is zero, also
    in the gradients. First derivatives in reverse mode only: use ``ReferenceAttention()`` for forward mode and higher
    derivatives.
    """

    block_q: int | None = None
    block_k: int = 256

    def __post_init__(self) -> None:
        set_positive(self, "block_q", "block_k")

    def __call__(
        self, q: Float[Array, "B N T H"], k: Float[Array, "B K S H"], v: Float[Array, "B K S Hv"], scores: MaskedSoftmax
    ) -> Float[Array, "B N T Hv"]:
        form, *given, leaves = self._in_blocks(q, k, v, scores)
        out: Array = _attend(form, *given, scores.sinks, leaves)
        return out[..., : q.shape[2], :].reshape(*q.shape[:3], v.shape[3])

    def _in_blocks(
        self, q: Array, k: Array, v: Array, scores: MaskedSoftmax
    ) -> tuple[Form, Array, Array, Array, list[Array]]:
        """Grouped queries, keys and values of whole blocks, and the leaves of `MaskedSoftmax` without sinks."""
        (batch, heads, count, width), kv_heads = q.shape, k.shape[1]
        grouped = q.reshape(batch, kv_heads, heads // kv_heads, count, width)
        most = self.block_q or (512 if heads == kv_heads else 256)
        rows, columns = _even(count, most), _even(k.shape[2], self.block_k)
        given = _padded(grouped, -count % rows), _padded(k, -k.shape[2] % columns), _padded(v, -k.shape[2] % columns)
        mask = _padded_mask(scores.mask, -count % rows, -k.shape[2] % columns)
        leaves, tree = jax.tree.flatten(dataclasses.replace(scores, mask=mask, sinks=None))
        return ((rows, columns), tree), *given, leaves

    def partial(
        self, q: Float[Array, "B N T H"], k: Float[Array, "B K S H"], v: Float[Array, "B K S Hv"], scores: MaskedSoftmax
    ) -> tuple[Float[Array, "B N T Hv"], Float[Array, "B N T"]]:
        """The output for some of the keys, in float32 and without sinks, and the log-sum-exp of each query's scores;
        infinite for a query without keys. Not differentiable: see `slopes`."""
        form, grouped, keys, values, leaves = self._in_blocks(q, k, v, scores)
        out, logs = _forward(form, grouped, keys, values, None, leaves, jnp.float32)
        count = q.shape[2]
        return out[..., :count, :].reshape(*q.shape[:3], -1), logs[..., :count].reshape(q.shape[:3])

    def slopes(
        self,
        q: Float[Array, "B N T H"],
        k: Float[Array, "B K S H"],
        v: Float[Array, "B K S Hv"],
        scores: MaskedSoftmax,
        out: Float[Array, "B N T Hv"],
        logs: Float[Array, "B N T"],
        d_out: Float[Array, "B N T Hv"],
    ) -> tuple[Float[Array, "B N T H"], Float[Array, "B K S H"], Float[Array, "B K S Hv"]]:
        """The gradients of q, k and v for some of the keys, given the output and log-sum-exps for all of them."""
        form, grouped, keys, values, leaves = self._in_blocks(q, k, v, scores)
        extra = grouped.shape[3] - q.shape[2]
        out, logs, d_out = (_padded(x, extra).reshape(*grouped.shape[:4], -1) for x in (out, logs[..., None], d_out))
        saved = grouped, keys, values, None, leaves, out, logs[..., 0]
        d_q, d_k, d_v, *_ = _backward(form, saved, d_out)
        d_q = d_q[..., : q.shape[2], :].reshape(q.shape)
        return d_q, d_k[..., : k.shape[2], :], d_v[..., : k.shape[2], :]


def _even(count: int, most: int) -> int:
    """Size of blocks for ``count`` elements: as few blocks of at most ``most`` as possible, equally large."""
    return -(-count // -(-count // most))


def _padded(x: Array, extra: int, axis: int = -2, value: int = 0) -> Array:
    if not extra:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, extra)
    return jnp.pad(x, widths, constant_values=value)


def _padded_mask(mask: Mask, queries: int, keys: int) -> Mask:
    """Pad the mask with queries and keys that nothing may attend to; padding keys have index -1."""
    slots = mask.keys
    index = slots.index if slots.valid is None else jnp.where(slots.valid, slots.index, -1)
    mask = dataclasses.replace(mask, keys=SlotMetadata(index, None, slots.segment))
    return mask.map(lambda x: _padded(x, queries, -1, -1), lambda x: _padded(x, keys, -1, -1))


def _block(x: Array, at: Int[Array, ""], size: int, axis: int = -2) -> Array:
    return from_bits(jax.lax.dynamic_slice_in_dim(as_bits(x), at * size, size, axis), x.dtype)


def _put(x: Array, block: Array, at: Int[Array, ""], axis: int = -2) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, block, at * block.shape[axis], axis)


def _block_of_mask(mask: Mask, i: Int[Array, ""], j: Int[Array, ""], sizes: Sizes) -> Bool[Array, "_ _ _"]:
    return mask.map(lambda x: _block(x, i, sizes[0], -1), lambda x: _block(x, j, sizes[1], -1)).allowed()


def _bounds(mask: Mask, sizes: Sizes) -> tuple[Int[Array, "_"], Int[Array, "_"]]:
    """The first block of keys that each block of queries attends to, and the end of the last one.

    They follow from the range of indices and of segments in each block, so blocks without an allowed pair may be among
    them.
    """
    queries, keys = (
        _ranges(mask.query_index, mask.query_index, sizes[0]),
        _ranges(mask.keys.index, mask.keys.index, sizes[1]),
    )
    needed = keys[0][:, None] <= queries[1][:, :, None]
    if mask.window is not None:
        needed &= keys[1][:, None] > queries[0][:, :, None] - mask.window
    if mask.query_segment is not None and mask.keys.segment is not None:
        query_segments = _ranges(mask.query_segment, mask.query_index, sizes[0])
        key_segments = _ranges(mask.keys.segment, mask.keys.index, sizes[1])
        needed &= key_segments[0][:, None] <= query_segments[1][:, :, None]
        needed &= key_segments[1][:, None] >= query_segments[0][:, :, None]
    needed = needed.any(axis=0)
    end = jnp.where(needed.any(axis=1), needed.shape[1] - jnp.argmax(needed[:, ::-1], axis=1), 0)
    return jnp.argmax(needed, axis=1).astype(jnp.int32), end.astype(jnp.int32)


def _ranges(x: Array, index: Array, size: int) -> tuple[Int[Array, "_ _"], Int[Array, "_ _"]]:
    """The least and the greatest value in each block of tokens, of those with an index from 0."""
    info = jnp.iinfo(x.dtype)
    least, most = (jnp.atleast_2d(jnp.where(index >= 0, x, value)) for value in (info.max, info.min))
    return least.reshape(len(least), -1, size).min(axis=2), most.reshape(len(most), -1, size).max(axis=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: Form, q: Grouped, k: Array, v: Array, sinks: Sinks, leaves: list[Array]) -> Grouped:
    """``leaves``: of `MaskedSoftmax` without sinks; their slopes are zero."""
    return _forward(form, q, k, v, sinks, leaves, q.dtype)[0]


def _products(rows: Float[Array, "B K G R H"], y: Float[Array, "B K S H"]) -> Float[Array, "B K G R S"]:
    flat = rows.reshape(*rows.shape[:2], -1, rows.shape[4])
    return dot_f32(flat, y, -1, -1).reshape(*rows.shape[:4], y.shape[2])


def _sums(weights: Float[Array, "B K G R S"], y: Float[Array, "B K S H"]) -> Float[Array, "B K G R H"]:
    flat = weights.reshape(*weights.shape[:2], -1, weights.shape[4])
    return dot_f32(flat, y, -1, -2).reshape(*weights.shape[:4], y.shape[3])


def _of_queries(sinks: Sinks, shape: tuple[int, ...]) -> Float[Array, "B K G R"]:
    """The score of each query's sink, the lowest float32 without sinks."""
    if sinks is None:
        return jnp.full(shape, LOWEST)
    wide = sinks.astype(jnp.float32).reshape(1, *shape[1:3], 1)
    return jnp.broadcast_to(jnp.maximum(wide, LOWEST), shape)


def _forward(
    form: Form, q: Grouped, k: Array, v: Array, sinks: Sinks, leaves: list[Array], dtype: Any
) -> tuple[Array, Float[Array, "B K G T"]]:
    """The output, and the log of the sum of each query's exponentiated scores; infinite for a query without keys."""
    sizes, scores = form[0], form[1].unflatten(leaves)
    first, end = _bounds(scores.mask, sizes)

    def add_keys(i: Array, rows: Array, j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        peak, total, out = state
        products = scores.capped(_products(rows, _block(k, j, sizes[1]).astype(q.dtype)))
        allowed = _block_of_mask(scores.mask, i, j, sizes)[:, None, None]
        products = jnp.where(allowed, products, LOWEST)
        higher = jnp.maximum(peak, jnp.max(products, axis=-1))
        shares, kept = jnp.exp(products - higher[..., None]), jnp.exp(peak - higher)
        new = _sums(shares.astype(v.dtype), _block(v, j, sizes[1]))
        total = total * kept + jnp.sum(shares, axis=-1)
        return higher, total, out * kept[..., None] + new

    def add_queries(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        outs, logs = state
        rows = _block(q, i, sizes[0])
        peak = _of_queries(sinks, rows.shape[:4])
        total = jnp.zeros_like(peak) if sinks is None else jnp.ones_like(peak)
        start = peak, total, jnp.zeros((*peak.shape, v.shape[3]), jnp.float32)
        peak, total, out = jax.lax.fori_loop(first[i], end[i], functools.partial(add_keys, i, rows), start)
        none = peak == LOWEST
        out = jnp.where(none[..., None], 0, out / total[..., None]).astype(dtype)
        log = jnp.where(none, jnp.inf, peak + jnp.log(total))
        return _put(outs, as_bits(out), i), _put(logs, log, i, -1)

    outs = as_bits(jnp.zeros((*q.shape[:4], v.shape[3]), dtype))
    start = outs, jnp.zeros(q.shape[:4], jnp.float32)
    outs, logs = jax.lax.fori_loop(0, q.shape[3] // sizes[0], add_queries, start)
    return from_bits(outs, dtype), logs


def _save(form: Form, q: Grouped, k: Array, v: Array, sinks: Sinks, leaves: list[Array]) -> tuple[Array, Any]:
    out, logs = _forward(form, q, k, v, sinks, leaves, q.dtype)
    return out, (q, k, v, sinks, leaves, out, logs)


def _backward(form: Form, saved: Any, d_out: Grouped) -> tuple[Array, Array, Array, Sinks, None]:
    """The slopes of q, k, v and the sinks; products are of float32 operands, as for `batched_matmul_f32`."""
    q, k, v, sinks, leaves, out, logs = saved
    sizes, scores = form[0], form[1].unflatten(leaves)
    first, end = _bounds(scores.mask, sizes)
    shared = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def add_keys(i: Array, rows: tuple[Array, ...], j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        d_q, d_k, d_v = state
        q, d_out, logs, shared = rows
        keys, values = (_block(y, j, sizes[1]).astype(jnp.float32) for y in (k, v))
        products, d_capped = jax.vjp(scores.capped, _products(q, keys))
        allowed = _block_of_mask(scores.mask, i, j, sizes)[:, None, None]
        weights = jnp.where(allowed, jnp.exp(products - logs[..., None]), 0)
        (d_products,) = d_capped(weights * (_products(d_out, values) - shared[..., None]))
        d_k = _add(d_k, _transposed_sums(d_products, q), j)
        d_v = _add(d_v, _transposed_sums(weights, d_out), j)
        return d_q + _sums(d_products, keys), d_k, d_v

    def add_queries(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        d_qs, d_k, d_v = state
        wide = (_block(x, i, sizes[0]).astype(jnp.float32) for x in (q, d_out))
        rows = *wide, *(_block(x, i, sizes[0], -1) for x in (logs, shared))
        start = jnp.zeros(rows[0].shape, jnp.float32), d_k, d_v
        d_q, d_k, d_v = jax.lax.fori_loop(first[i], end[i], functools.partial(add_keys, i, rows), start)
        return _put(d_qs, as_bits(d_q.astype(q.dtype)), i), d_k, d_v

    start = as_bits(jnp.zeros_like(q)), *(jnp.zeros(y.shape, jnp.float32) for y in (k, v))
    d_q, d_k, d_v = jax.lax.fori_loop(0, q.shape[3] // sizes[0], add_queries, start)
    d_sinks = None
    if sinks is not None:
        d_sinks = slope_of_sinks(sinks, *(a.reshape(len(a), -1, a.shape[3]) for a in (logs, shared)))
    return from_bits(d_q, q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_sinks, None


def slope_of_sinks(
    sinks: Float[Array, "N"], logs: Float[Array, "B N T"], shared: Float[Array, "B N T"]
) -> Float[Array, "N"]:
    """The gradient of the sinks, from the log-sum-exps and the products of each query's output with its gradient."""
    return -jnp.sum(jnp.exp(sinks.astype(jnp.float32)[:, None] - logs) * shared, axis=(0, 2)).astype(sinks.dtype)


def _add(x: Float[Array, "B K S H"], block: Float[Array, "B K R H"], at: Int[Array, ""]) -> Float[Array, "B K S H"]:
    return _put(x, _block(x, at, block.shape[2]) + block, at)


def _transposed_sums(weights: Float[Array, "B K G R S"], y: Float[Array, "B K G R H"]) -> Float[Array, "B K S H"]:
    """``weights.T @ y`` over the queries of all heads of a group, in float32."""
    rows, y = (x.reshape(*x.shape[:2], -1, x.shape[4]) for x in (weights, y))
    return dot_f32(rows, y, -2, -2)


_attend.defvjp(_save, _backward)
