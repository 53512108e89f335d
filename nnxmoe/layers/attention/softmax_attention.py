"""Softmax attention over projected and rotated keys and values.

``Strategy`` selects the implementation. `ReferenceAttention` is the reference for all other implementations.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from nnxmoe.layers.linear.matmul import batched_matmul_f32
from nnxmoe.layers.mask import ConcatenatedMask, Mask

Queries = Float[Array, "B N T H"]
Keys = Float[Array, "B K S H"]
Values = Float[Array, "B K S Hv"]
HeadOutputs = Float[Array, "B N T Hv"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedSoftmax:
    """Scale, soft cap, mask and softmax: all steps from the products ``q @ k.T`` to the attention weights.

    Attributes:
        mask: A `Mask`. `ReferenceAttention` also accepts a `ConcatenatedMask`.
        scale: Scale factor for the products.
        softcap: Maps a scaled product s to ``softcap * tanh(s / softcap)`` (Gemma 2, 2024). ``None`` disables the cap.
        sinks: Attention sinks: the score of an extra key without a value, per query head (gpt-oss, 2025). Every query
            attends to the extra key. ``None`` disables sinks.
    """

    mask: Any
    scale: float = dataclasses.field(metadata={"static": True})
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})
    sinks: Float[Array, "N"] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the softmax has neither sinks nor a soft cap."""
        return self.sinks is None and self.softcap is None

    def select(self, queries: slice, keys: slice) -> "MaskedSoftmax":
        """Restrict the mask to a slice of queries and a slice of keys."""
        return dataclasses.replace(self, mask=self.mask.select(queries, keys))

    def scores(self, products: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
        """Apply the scale and the soft cap to products of queries and keys."""
        scores = products * self.scale
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def weights(self, products: Float[Array, "B K G T S"], q: Array) -> Float[Array, "B K G T S"]:
        """Compute the float32 attention weights from the products of the queries ``q`` with all keys."""
        scores = _mask_scores(self.mask, self.scores(products), q)
        if self.sinks is None:
            return jax.nn.softmax(scores, axis=-1)
        sinks = self.sinks.astype(scores.dtype).reshape(scores.shape[1], scores.shape[2], 1, 1)
        maximum = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks))
        exponentials = jnp.exp(scores - maximum)
        return exponentials / (jnp.sum(exponentials, axis=-1, keepdims=True) + jnp.exp(sinks - maximum))


def _mask_scores(
    mask: Mask | ConcatenatedMask, scores: Float[Array, "B K G T S"], q: Array
) -> Float[Array, "B K G T S"]:
    """Set masked scores to the lowest float32 value.

    Without the barrier, JAX and XLA hoist the comparison of indices out of the layers, and the T x S result remains in
    memory for all layers. With the barrier, the comparison depends on ``q``, so each layer repeats the comparison.
    """
    lowest = jnp.float32(jnp.finfo(jnp.float32).min)
    mask, lowest, _ = jax.lax.optimization_barrier((mask, lowest, jax.lax.stop_gradient(q)))
    return _where_allowed(scores, mask.allowed()[:, None, None], lowest)


@jax.custom_jvp
def _where_allowed(scores: Float[Array, "B K G T S"], allowed: Bool[Array, "#B 1 1 T S"], lowest: Array) -> Array:
    """Mask scores. The derivative is 1 everywhere, so ``allowed`` is not saved for the backward pass.

    The gradient is correct, because the derivative of the subsequent softmax is 0 at masked scores.
    """
    return jnp.where(allowed, scores, lowest)


@_where_allowed.defjvp
def _where_allowed_jvp(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    return _where_allowed(*primals), tangents[0]


class AttentionFn(Protocol):
    """Protocol for softmax attention functions. N is a multiple of K. Query head n uses key head ``n // (N / K)``."""

    def __call__(self, q: Queries, k: Keys, v: Values, softmax: MaskedSoftmax, /) -> HeadOutputs: ...


@dataclasses.dataclass(frozen=True)
class ReferenceAttention:
    """Unfused attention: one product for the scores, a float32 softmax, and one product with the values.

    Query heads that share a key head are grouped, so keys and values are not repeated. The output of queries without
    allowed keys (padding) is the mean of all values instead of NaN.
    """

    def __call__(self, q: Queries, k: Keys, v: Values, softmax: MaskedSoftmax) -> HeadOutputs:
        batch, heads, length, _ = q.shape
        kv_heads, keys = k.shape[1], k.shape[2]
        grouped_q = q.reshape(batch, kv_heads, heads // kv_heads * length, q.shape[3])
        products = batched_matmul_f32(grouped_q, k.astype(q.dtype), -1)
        products = products.reshape(batch, kv_heads, heads // kv_heads, length, keys)
        weights = softmax.weights(products, q).astype(v.dtype).reshape(batch, kv_heads, -1, keys)
        outputs = batched_matmul_f32(weights, v, -2).astype(q.dtype)
        return outputs.reshape(batch, heads, length, v.shape[3])
