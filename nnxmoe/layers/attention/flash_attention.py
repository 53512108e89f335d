"""Memory-efficient attention: forward and backward memory is linear in the number of queries and keys.

A running maximum and a running sum per query replace the softmax over all keys (Rabe and Staats 2021). The forward pass
saves the output and the log-sum-exp of each query. The backward pass recomputes the scores of each block
(FlashAttention, Dao et al. 2022; FlashAttention-2, Dao 2023).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.config.arguments import CheckedFields
from nnxmoe.config.validate import set_positive
from nnxmoe.layers.attention.softmax_attention import HeadOutputs, Keys, MaskedSoftmax, Queries, Values
from nnxmoe.layers.cache import SlotMetadata
from nnxmoe.layers.linear.matmul import dot_f32
from nnxmoe.layers.linear.xla_cpu import as_bits, from_bits
from nnxmoe.layers.mask import Mask

LOWEST = float(jnp.finfo(jnp.float32).min)
BlockShape = tuple[int, int]  # Numbers of queries and keys per block.
Static = tuple[BlockShape, Any]  # The block shape, and the tree structure of `MaskedSoftmax`.
Grouped = Float[Array, "B K G T _"]
Sinks = Float[Array, "N"] | None


class Blocks(NamedTuple):
    """Attention operands, padded to whole blocks. ``leaves`` are the leaves of `MaskedSoftmax` without sinks."""

    static: Static
    q: Grouped
    k: Keys
    v: Values
    leaves: list[Array]


@dataclasses.dataclass(frozen=True)
class FlashAttention(CheckedFields):
    """Exact attention in blocks of up to ``block_q`` by ``block_k`` scores, accumulated in float32.

    Key blocks whose indices or segments are outside the range that a query block attends to are skipped. The outputs
    and gradients of queries without allowed keys (padding) are zero. Only first-order reverse-mode derivatives are
    supported. Use ``ReferenceAttention()`` for forward mode and higher-order derivatives.

    Args:
        block_q: Maximum number of queries per block. Defaults to 512 if each key head has one query head, otherwise to
            256. With fewer scores per key head, XLA:CPU runs at half the speed (jax 0.10.2).
        block_k: Maximum number of keys per block.
    """

    block_q: int | None = None
    block_k: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        set_positive(self, "block_q", "block_k")

    def __call__(self, q: Queries, k: Keys, v: Values, softmax: MaskedSoftmax) -> HeadOutputs:
        blocks = self._split(q, k, v, softmax)
        outputs: Array = _attend(blocks.static, blocks.q, blocks.k, blocks.v, softmax.sinks, blocks.leaves)
        return outputs[..., : q.shape[2], :].reshape(*q.shape[:3], v.shape[3])

    def _split(self, q: Array, k: Array, v: Array, softmax: MaskedSoftmax) -> Blocks:
        """Group the queries by key head, and pad the queries, keys, values and mask to whole blocks."""
        (batch, heads, length, width), kv_heads, keys = q.shape, k.shape[1], k.shape[2]
        grouped_q = q.reshape(batch, kv_heads, heads // kv_heads, length, width)
        max_q = self.block_q or (512 if heads == kv_heads else 256)
        block_q, block_k = _even_block(length, max_q), _even_block(keys, self.block_k)
        q_padding, k_padding = -length % block_q, -keys % block_k
        q, k, v = _pad(grouped_q, q_padding), _pad(k, k_padding), _pad(v, k_padding)
        mask = _pad_mask(softmax.mask, q_padding, k_padding)
        leaves, tree = jax.tree.flatten(dataclasses.replace(softmax, mask=mask, sinks=None))
        return Blocks(((block_q, block_k), tree), q, k, v, leaves)

    def partial_forward(
        self, q: Queries, k: Keys, v: Values, softmax: MaskedSoftmax
    ) -> tuple[HeadOutputs, Float[Array, "B N T"]]:
        """Attend to a subset of the keys, without sinks. Use `partial_backward` to compute gradients.

        Returns:
            The outputs in float32, and the log-sum-exp of each query's scores, which is inf for queries without allowed
            keys.
        """
        blocks = self._split(q, k, v, softmax)
        outputs, logsumexp = _forward(blocks.static, blocks.q, blocks.k, blocks.v, None, blocks.leaves, jnp.float32)
        outputs = outputs[..., : q.shape[2], :].reshape(*q.shape[:3], -1)
        return outputs, logsumexp[..., : q.shape[2]].reshape(q.shape[:3])

    def partial_backward(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        softmax: MaskedSoftmax,
        outputs: HeadOutputs,
        logsumexp: Float[Array, "B N T"],
        d_outputs: HeadOutputs,
    ) -> tuple[Queries, Keys, Values]:
        """Compute the gradients of q, k and v for a subset of the keys.

        ``outputs`` and ``logsumexp`` are the results for all keys.
        """
        blocks = self._split(q, k, v, softmax)
        lead, padding = blocks.q.shape[:4], blocks.q.shape[3] - q.shape[2]
        outputs, d_outputs, logsumexp = (
            _pad(x, padding).reshape(*lead, -1) for x in (outputs, d_outputs, logsumexp[..., None])
        )
        residuals = blocks.q, blocks.k, blocks.v, None, blocks.leaves, outputs, logsumexp[..., 0]
        d_q, d_k, d_v, *_ = _backward(blocks.static, residuals, d_outputs)
        d_q = d_q[..., : q.shape[2], :].reshape(q.shape)
        return d_q, d_k[..., : k.shape[2], :], d_v[..., : k.shape[2], :]


def _even_block(count: int, max_block: int) -> int:
    """Return the block size that splits ``count`` elements evenly into the fewest blocks of up to ``max_block``."""
    return -(-count // -(-count // max_block))


def _pad(x: Array, padding: int, axis: int = -2, value: int = 0) -> Array:
    if not padding:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, padding)
    return jnp.pad(x, widths, constant_values=value)


def _pad_mask(mask: Mask, queries: int, keys: int) -> Mask:
    """Pad the mask with queries and keys of index -1, and set the index of invalid keys to -1."""
    slots = mask.keys
    index = slots.index if slots.valid is None else jnp.where(slots.valid, slots.index, -1)
    mask = dataclasses.replace(mask, keys=SlotMetadata(index, None, slots.segment))
    return mask.map(lambda x: _pad(x, queries, -1, -1), lambda x: _pad(x, keys, -1, -1))


def _read_block(x: Array, i: Int[Array, ""], size: int, axis: int = -2) -> Array:
    return from_bits(jax.lax.dynamic_slice_in_dim(as_bits(x), i * size, size, axis), x.dtype)


def _write_block(x: Array, block: Array, i: Int[Array, ""], axis: int = -2) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, block, i * block.shape[axis], axis)


def _add_block(x: Keys, block: Float[Array, "B K R H"], i: Int[Array, ""]) -> Array:
    return _write_block(x, _read_block(x, i, block.shape[2]) + block, i)


def _block_allowed(mask: Mask, i: Int[Array, ""], j: Int[Array, ""], shape: BlockShape) -> Bool[Array, "_ _ _"]:
    block = mask.map(lambda x: _read_block(x, i, shape[0], -1), lambda x: _read_block(x, j, shape[1], -1))
    return block.allowed()


def _key_ranges(mask: Mask, shape: BlockShape) -> tuple[Int[Array, "_"], Int[Array, "_"]]:
    """Return the range of key blocks that each query block attends to, as arrays of starts and exclusive ends.

    The range is computed from the minimum and maximum index and segment of each block, so the range may contain blocks
    without allowed pairs.
    """
    query_min, query_max = _block_min_max(mask.query_index, mask.query_index, shape[0])
    key_min, key_max = _block_min_max(mask.keys.index, mask.keys.index, shape[1])
    is_needed = key_min[:, None] <= query_max[:, :, None]
    if mask.window is not None:
        is_needed &= key_max[:, None] > query_min[:, :, None] - mask.window
    if mask.query_segment is not None and mask.keys.segment is not None:
        query_min, query_max = _block_min_max(mask.query_segment, mask.query_index, shape[0])
        key_min, key_max = _block_min_max(mask.keys.segment, mask.keys.index, shape[1])
        is_needed &= key_min[:, None] <= query_max[:, :, None]
        is_needed &= key_max[:, None] >= query_min[:, :, None]
    is_needed = is_needed.any(axis=0)
    ends = jnp.where(is_needed.any(axis=1), is_needed.shape[1] - jnp.argmax(is_needed[:, ::-1], axis=1), 0)
    return jnp.argmax(is_needed, axis=1).astype(jnp.int32), ends.astype(jnp.int32)


def _block_min_max(x: Array, index: Array, size: int) -> tuple[Int[Array, "_ _"], Int[Array, "_ _"]]:
    """Return the minimum and the maximum of each block, over tokens with a nonnegative index."""
    info = jnp.iinfo(x.dtype)
    lower, upper = (jnp.atleast_2d(jnp.where(index >= 0, x, value)) for value in (info.max, info.min))
    return lower.reshape(len(lower), -1, size).min(axis=2), upper.reshape(len(upper), -1, size).max(axis=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, q: Grouped, k: Array, v: Array, sinks: Sinks, leaves: list[Array]) -> Grouped:
    return _forward(static, q, k, v, sinks, leaves, q.dtype)[0]


def _products(q: Float[Array, "B K G R H"], k: Keys) -> Float[Array, "B K G R S"]:
    flat_q = q.reshape(*q.shape[:2], -1, q.shape[4])
    return dot_f32(flat_q, k, -1, -1).reshape(*q.shape[:4], k.shape[2])


def _weighted_sums(weights: Float[Array, "B K G R S"], v: Keys) -> Float[Array, "B K G R H"]:
    flat_weights = weights.reshape(*weights.shape[:2], -1, weights.shape[4])
    return dot_f32(flat_weights, v, -1, -2).reshape(*weights.shape[:4], v.shape[3])


def _transposed_sums(weights: Float[Array, "B K G R S"], y: Float[Array, "B K G R H"]) -> Keys:
    weights, y = (x.reshape(*x.shape[:2], -1, x.shape[4]) for x in (weights, y))
    return dot_f32(weights, y, -2, -2)


def _initial_maximum(sinks: Sinks, shape: tuple[int, ...]) -> Float[Array, "B K G R"]:
    """Return the sink score of each query, or the lowest float32 value if there are no sinks."""
    if sinks is None:
        return jnp.full(shape, LOWEST)
    sink_scores = sinks.astype(jnp.float32).reshape(1, *shape[1:3], 1)
    return jnp.broadcast_to(jnp.maximum(sink_scores, LOWEST), shape)


def _forward(
    static: Static, q: Grouped, k: Array, v: Array, sinks: Sinks, leaves: list[Array], dtype: Any
) -> tuple[Array, Float[Array, "B K G T"]]:
    """Return the outputs and the log-sum-exp of each query's scores (inf for queries without allowed keys)."""
    shape, softmax = static[0], static[1].unflatten(leaves)
    first_blocks, end_blocks = _key_ranges(softmax.mask, shape)

    def add_keys(i: Array, q_block: Array, j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        maximum, exp_sum, outputs = state
        scores = softmax.scores(_products(q_block, _read_block(k, j, shape[1]).astype(q.dtype)))
        allowed = _block_allowed(softmax.mask, i, j, shape)[:, None, None]
        scores = jnp.where(allowed, scores, LOWEST)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
        exponentials, rescale = jnp.exp(scores - new_maximum[..., None]), jnp.exp(maximum - new_maximum)
        sums = _weighted_sums(exponentials.astype(v.dtype), _read_block(v, j, shape[1]))
        exp_sum = exp_sum * rescale + jnp.sum(exponentials, axis=-1)
        return new_maximum, exp_sum, outputs * rescale[..., None] + sums

    def add_queries(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        all_outputs, all_logsumexp = state
        q_block = _read_block(q, i, shape[0])
        maximum = _initial_maximum(sinks, q_block.shape[:4])
        exp_sum = jnp.zeros_like(maximum) if sinks is None else jnp.ones_like(maximum)
        init = maximum, exp_sum, jnp.zeros((*maximum.shape, v.shape[3]), jnp.float32)
        add_block = functools.partial(add_keys, i, q_block)
        maximum, exp_sum, outputs = jax.lax.fori_loop(first_blocks[i], end_blocks[i], add_block, init)
        has_no_keys = maximum == LOWEST
        outputs = jnp.where(has_no_keys[..., None], 0, outputs / exp_sum[..., None]).astype(dtype)
        logsumexp = jnp.where(has_no_keys, jnp.inf, maximum + jnp.log(exp_sum))
        return _write_block(all_outputs, as_bits(outputs), i), _write_block(all_logsumexp, logsumexp, i, -1)

    init = as_bits(jnp.zeros((*q.shape[:4], v.shape[3]), dtype)), jnp.zeros(q.shape[:4], jnp.float32)
    outputs, logsumexp = jax.lax.fori_loop(0, q.shape[3] // shape[0], add_queries, init)
    return from_bits(outputs, dtype), logsumexp


def _attend_fwd(static: Static, q: Grouped, k: Array, v: Array, sinks: Sinks, leaves: list[Array]) -> tuple[Array, Any]:
    outputs, logsumexp = _forward(static, q, k, v, sinks, leaves, q.dtype)
    return outputs, (q, k, v, sinks, leaves, outputs, logsumexp)


def _backward(static: Static, residuals: Any, d_outputs: Grouped) -> tuple[Array, Array, Array, Sinks, None]:
    """Compute the gradients of q, k, v and the sinks.

    The operands of all products are cast to float32, as in the backward pass of `batched_matmul_f32`.
    """
    q, k, v, sinks, leaves, outputs, logsumexp = residuals
    shape, softmax = static[0], static[1].unflatten(leaves)
    first_blocks, end_blocks = _key_ranges(softmax.mask, shape)
    output_products = jnp.sum(d_outputs.astype(jnp.float32) * outputs.astype(jnp.float32), axis=-1)

    def add_keys(i: Array, rows: tuple[Array, ...], j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        d_q, d_k, d_v = state
        q, d_outputs, logsumexp, output_products = rows
        keys, values = (_read_block(y, j, shape[1]).astype(jnp.float32) for y in (k, v))
        scores, scores_vjp = jax.vjp(softmax.scores, _products(q, keys))
        allowed = _block_allowed(softmax.mask, i, j, shape)[:, None, None]
        weights = jnp.where(allowed, jnp.exp(scores - logsumexp[..., None]), 0)
        (d_products,) = scores_vjp(weights * (_products(d_outputs, values) - output_products[..., None]))
        d_k = _add_block(d_k, _transposed_sums(d_products, q), j)
        d_v = _add_block(d_v, _transposed_sums(weights, d_outputs), j)
        return d_q + _weighted_sums(d_products, keys), d_k, d_v

    def add_queries(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        all_d_q, d_k, d_v = state
        blocks = (_read_block(x, i, shape[0]).astype(jnp.float32) for x in (q, d_outputs))
        rows = *blocks, *(_read_block(x, i, shape[0], -1) for x in (logsumexp, output_products))
        init = jnp.zeros(rows[0].shape, jnp.float32), d_k, d_v
        d_q, d_k, d_v = jax.lax.fori_loop(first_blocks[i], end_blocks[i], functools.partial(add_keys, i, rows), init)
        return _write_block(all_d_q, as_bits(d_q.astype(q.dtype)), i), d_k, d_v

    init = as_bits(jnp.zeros_like(q)), *(jnp.zeros(y.shape, jnp.float32) for y in (k, v))
    d_q, d_k, d_v = jax.lax.fori_loop(0, q.shape[3] // shape[0], add_queries, init)
    sink_operands = (a.reshape(len(a), -1, a.shape[3]) for a in (logsumexp, output_products))
    d_sinks = None if sinks is None else sinks_gradient(sinks, *sink_operands)
    return from_bits(d_q, q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_sinks, None


def sinks_gradient(
    sinks: Float[Array, "N"], logsumexp: Float[Array, "B N T"], output_products: Float[Array, "B N T"]
) -> Float[Array, "N"]:
    """Compute the gradient of the sinks.

    ``output_products`` is the dot product of each query's output with the output's gradient.
    """
    weights = jnp.exp(sinks.astype(jnp.float32)[:, None] - logsumexp)
    return -jnp.sum(weights * output_products, axis=(0, 2)).astype(sinks.dtype)


_attend.defvjp(_attend_fwd, _backward)
