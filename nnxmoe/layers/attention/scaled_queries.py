"""Attention whose queries grow with the logarithm of their position (Llama 4, 2025; Ministral 3; Mistral Small 4).

Queries at position p are multiplied by ``1 + beta * log(1 + floor(p / original))``, so that scores stay as far apart
over more keys than the ``original`` ones of the training. Unlike a rotation this depends on the absolute position:
without a cache, rows that are padded on the left need ``positions``.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxmoe.layers.attention.gqa import GQA, AttentionDims
from nnxmoe.layers.attention.mla import MLA, MLADims
from nnxmoe.layers.attention.softmax_attention import AttentionFn
from nnxmoe.layers.context import Context
from nnxmoe.layers.mask import Mask


class PositionScaledGQA(GQA):
    """`GQA` with such queries; other arguments are those of `GQA`."""

    def __init__(self, heads: AttentionDims, *, beta: float, original: int, **options: Any):
        super().__init__(heads, **options)
        self.beta, self.original = beta, original

    def encode_positions(self, q: Float[Array, "B asked N H"], context: Context) -> Float[Array, "B asked N H"]:
        return _scaled(super().encode_positions(q, context=context), context, self.beta, self.original)


class PositionScaledMLA(MLA):
    """`MLA` with such queries; other arguments are those of `MLA`."""

    def __init__(self, widths: MLADims, *, beta: float, original: int, **options: Any):
        super().__init__(widths, **options)
        self.beta, self.original = beta, original

    def _attended(
        self, q: Float[Array, "B asked N H"], seen: Array, mask: Mask, context: Context, attention_fn: AttentionFn
    ) -> Float[Array, "B asked N v"]:
        return super()._attended(_scaled(q, context, self.beta, self.original), seen, mask, context, attention_fn)


def _scaled(
    q: Float[Array, "B asked N H"], context: Context, beta: float, original: int
) -> Float[Array, "B asked N H"]:
    assert context.positions is not None
    positions = context.positions[:, -q.shape[1] :, None, None]
    return q * (1 + beta * jnp.log1p((positions // original).astype(jnp.float32))).astype(q.dtype)
