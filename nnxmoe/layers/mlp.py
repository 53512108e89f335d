"""Gated feed-forward network (SwiGLU, Shazeer 2020)."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from nnxmoe.layers.context import Context
from nnxmoe.layers.linear import Linear


class MLP(nnx.Module):
    """``down(silu(gate(x)) * up(x))``."""

    name: ClassVar[str] = "mlp"

    def __init__(self, dim: int, width: int, *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        self.gate = Linear((dim,), (width,), ("embed", "mlp"), bias=bias, dtype=dtype, rngs=rngs)
        self.up = Linear((dim,), (width,), ("embed", "mlp"), bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear((width,), (dim,), ("mlp", "embed"), bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*rows D"], context: Context | None = None) -> Float[Array, "*rows D"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))

    def separates_tokens(self, key: Key[Array, ""] | None) -> bool:
        """Always True."""
        return True
