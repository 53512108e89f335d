"""Root mean square normalisation (Zhang & Sennrich 2019)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import parameter


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps)`` in float32, cast back to ``x``'s dtype, then times the scale, as in Llama."""

    def __init__(self, dim: int, eps: float, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        self.eps = eps
        self.scale = parameter((dim,), ("norm",), nnx.initializers.ones, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        x32 = x.astype(jnp.float32)
        unit = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return unit.astype(x.dtype) * jnp.broadcast_to(self.scale[...].astype(x.dtype), x.shape)
