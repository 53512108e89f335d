"""Grouped-query attention whose queries grow with the logarithm of their position (Llama 4, 2025; Ministral 3)."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxmoe.layers.context import Context
from nnxmoe.layers.gqa import GQA, Heads


class ScaledQueries(GQA):
    """`GQA` whose queries at position p are multiplied by ``1 + beta * log(1 + floor(p / original))``, so that scores
    stay as far apart over more keys than the ``original`` ones of the training. Other arguments are those of `GQA`.

    Unlike a rotation this depends on the absolute position: without a cache, rows that are padded on the left need
    ``positions``."""

    def __init__(self, heads: Heads, *, beta: float, original: int, **options: Any):
        super().__init__(heads, **options)
        self.beta, self.original = beta, original

    def placed(self, q: Float[Array, "B asked N H"], context: Context) -> Float[Array, "B asked N H"]:
        assert context.positions is not None
        positions = context.positions[:, -q.shape[1] :, None, None]
        factor = 1 + self.beta * jnp.log1p((positions // self.original).astype(jnp.float32))
        return super().placed(q, context=context) * factor.astype(q.dtype)
