"""Softmax attention over keys and values that are already projected and rotated.

``ReferenceAttention`` is the oracle of every other implementation; which one runs is the strategy's choice.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from nnxmoe.layers.linear.matmul import batched_matmul_f32
from nnxmoe.layers.mask import ConcatenatedMask, Mask


def _hide(mask: Mask | ConcatenatedMask, scores: Float[Array, "B K G T S"], after: Array) -> Float[Array, "B K G T S"]:
    """Scores with the lowest float32 where a query may not attend. ``after``: an input of the scores.

    JAX and XLA would hoist the comparison of indices out of the layers and keep its T x S result in memory for all of
    them. The barrier makes the comparison depend on ``after``, which differs between layers, so each layer computes its
    own.
    """
    least = jnp.float32(jnp.finfo(jnp.float32).min)
    mask, least, _ = jax.lax.optimization_barrier((mask, least, jax.lax.stop_gradient(after)))
    return _hidden(scores, mask.allowed()[:, None, None], least)


@jax.custom_jvp
def _hidden(scores: Float[Array, "B K G T S"], allowed: Bool[Array, "#B 1 1 T S"], least: Float[Array, ""]) -> Array:
    """Masked scores with a derivative of 1 everywhere, so that ``allowed`` is not saved for the backward pass: the
    softmax that follows has derivative 0 at masked scores."""
    return jnp.where(allowed, scores, least)


@_hidden.defjvp
def _hidden_slope(given: tuple[Array, ...], slopes: tuple[Any, ...]) -> tuple[Array, Array]:
    return _hidden(*given), slopes[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedSoftmax:
    """How products of queries and keys become weights: scaled, capped, masked, and a softmax in float32.

    ``softcap`` c: a score s becomes ``c * tanh(s / c)`` (Gemma 2, 2024). ``sinks``: per query head one more score, of a
    key that has no value and that every query sees (gpt-oss, 2025).
    """

    mask: Any  # a Mask; for `ReferenceAttention` also a JoinedMask
    scale: float = dataclasses.field(metadata={"static": True})
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})
    sinks: Float[Array, "N"] | None = None

    @property
    def plain(self) -> bool:
        """Whether there are neither sinks nor a soft cap."""
        return self.sinks is None and self.softcap is None

    def part(self, queries: slice, keys: slice) -> "MaskedSoftmax":
        return dataclasses.replace(self, mask=self.mask.part(queries, keys))

    def capped(self, products: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
        """Products of queries and keys, scaled and capped."""
        scores = products * self.scale
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def weights(self, products: Float[Array, "B K G T S"], after: Array) -> Float[Array, "B K G T S"]:
        """The weights of all values, from products of ``after`` (see `_hide`) with the keys."""
        scores = _hide(self.mask, self.capped(products), after)
        if self.sinks is None:
            return jax.nn.softmax(scores, axis=-1)
        sinks = self.sinks.astype(scores.dtype).reshape(scores.shape[1], scores.shape[2], 1, 1)
        peak = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks))
        shares = jnp.exp(scores - peak)
        return shares / (jnp.sum(shares, axis=-1, keepdims=True) + jnp.exp(sinks - peak))


class AttentionFn(Protocol):
    """``(q, k, v, scores) -> o``; N is a multiple of K: query head n uses key head ``n // (N / K)``."""

    def __call__(
        self, q: Float[Array, "B N T H"], k: Float[Array, "B K S H"], v: Float[Array, "B K S Hv"], scores: MaskedSoftmax
    ) -> Float[Array, "B N T Hv"]: ...


@dataclasses.dataclass(frozen=True)
class ReferenceAttention:
    """Scores, softmax in float32, weighted sum; keys and values are not repeated for the query heads that share them.

    The output of a query without any key (padding) is the mean of all values instead of NaN.
    """

    def __call__(
        self, q: Float[Array, "B N T H"], k: Float[Array, "B K S H"], v: Float[Array, "B K S Hv"], scores: MaskedSoftmax
    ) -> Float[Array, "B N T Hv"]:
        batch, heads, count, _ = q.shape
        kv_heads = k.shape[1]
        grouped = q.reshape(batch, kv_heads, heads // kv_heads * count, q.shape[3])
        products = batched_matmul_f32(grouped, k.astype(q.dtype), -1)
        products = products.reshape(batch, kv_heads, heads // kv_heads, count, k.shape[2])
        weights = scores.weights(products, q).astype(v.dtype).reshape(batch, kv_heads, -1, k.shape[2])
        out = batched_matmul_f32(weights, v, -2).astype(q.dtype)
        return out.reshape(batch, heads, count, v.shape[3])
