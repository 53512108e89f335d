"""Root mean square normalization (Zhang & Sennrich 2019) and layer normalization (Ba et al. 2016)."""

from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions, parameter


def rms_normalize(x: Float[Array, "*rows D"], eps: float) -> Float[Array, "*rows D"]:
    """Compute ``x / sqrt(mean(x^2) + eps)`` over the last dimension in float32, and cast back to ``x``'s dtype."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """RMS normalization as in Llama: `rms_normalize`, followed by multiplication by the scale in ``x``'s dtype."""

    def __init__(self, dim: int, eps: float, **kw: Unpack[ParamOptions]):
        self.eps = eps
        self.scale = parameter((dim,), ("norm",), nnx.initializers.ones, **kw)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return rms_normalize(x, self.eps) * jnp.broadcast_to(self.scale[...].astype(x.dtype), x.shape)


class OffsetNorm(RMSNorm):
    """RMS normalization with scale ``1 + scale``, computed in float32 and cast back (Gemma, Qwen3-Next)."""

    def __init__(self, dim: int, eps: float, **kw: Unpack[ParamOptions]):
        self.eps = eps
        self.scale = parameter((dim,), ("norm",), nnx.initializers.zeros, **kw)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        scale = jnp.broadcast_to(self.scale[...].astype(jnp.float32), x.shape)
        return (rms_normalize(x.astype(jnp.float32), self.eps) * (1 + scale)).astype(x.dtype)


class GatedNorm(nnx.Module):
    """`RMSNorm` multiplied by ``activation(gate)`` in float32 and cast back (Mamba-2; Dao & Gu 2024)."""

    def __init__(
        self, dim: int, eps: float, *, activation: Callable[[Array], Array] = jax.nn.silu, **kw: Unpack[ParamOptions]
    ):
        self.eps, self.activation = eps, activation
        self.scale = parameter((dim,), ("norm",), nnx.initializers.ones, **kw)

    def __call__(self, x: Float[Array, "*rows D"], gate: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        scaled_x = rms_normalize(x, self.eps) * jnp.broadcast_to(self.scale[...].astype(x.dtype), x.shape)
        return (scaled_x.astype(jnp.float32) * self.activation(gate.astype(jnp.float32))).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer normalization ``(x - mean(x)) / sqrt(var(x) + eps) * scale + bias``, computed in float32 and cast back."""

    def __init__(self, dim: int, eps: float, **kw: Unpack[ParamOptions]):
        self.eps = eps
        self.scale = parameter((dim,), ("norm",), nnx.initializers.ones, **kw)
        self.bias = parameter((dim,), ("norm",), nnx.initializers.zeros, **kw)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        x32 = x.astype(jnp.float32)
        unit_x = rms_normalize(x32 - jnp.mean(x32, axis=-1, keepdims=True), self.eps)
        scale, bias = (jnp.broadcast_to(a[...].astype(jnp.float32), x.shape) for a in (self.scale, self.bias))
        return (unit_x * scale + bias).astype(x.dtype)
