"""Activations of gated (Shazeer 2020) and ungated feed-forward networks.

An activation returns the input of the down projection.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

GatedActivation = Callable[[Array, Array], Array]
"""Elementwise function ``(gate, up) -> hidden``. Must be hashable, and must map zeros to zero."""


def swiglu(gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
    """Return ``silu(gate) * up``."""
    return jax.nn.silu(gate) * up


def geglu(gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
    """Return ``gelu(gate) * up`` with the tanh approximation of GELU (Shazeer 2020; Gemma)."""
    return jax.nn.gelu(gate, approximate=True) * up


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """Activation ``(up + 1) * gate * sigmoid(alpha * gate)`` (gpt-oss, 2025).

    ``gate`` is clipped to at most ``limit``. ``up`` is clipped to ``±limit``. Source: ``swiglu`` in
    ``gpt_oss/torch/model.py``.
    """

    alpha: float
    limit: float

    def __call__(self, gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


@dataclasses.dataclass(frozen=True)
class LimitedSwiGLU:
    """SwiGLU with ``gate`` clipped to at most ``limit``, and ``up`` to ``±limit`` (DeepSeek-V4, 2026)."""

    limit: float

    def __call__(self, gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
        return jax.nn.silu(jnp.minimum(gate, self.limit)) * jnp.clip(up, -self.limit, self.limit)


@dataclasses.dataclass(frozen=True)
class SiTU:
    """Activation ``bound * tanh(gate / bound) * sigmoid(gate) * up``, a SiLU with a bounded factor (Kimi K3, 2026).

    If ``up_bound`` is set, ``up`` is replaced by ``up_bound * tanh(up / up_bound)``. Computed in float32 and cast back.
    """

    bound: float
    up_bound: float | None = None

    def __call__(self, gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
        dtype, gate, up = up.dtype, gate.astype(jnp.float32), up.astype(jnp.float32)
        up = up if self.up_bound is None else _soft_bound(up, self.up_bound)
        return (_soft_bound(gate, self.bound) * jax.nn.sigmoid(gate) * up).astype(dtype)


def _soft_bound(x: Float[Array, "*rows F"], bound: float) -> Float[Array, "*rows F"]:
    return bound * jnp.tanh(x / bound)


def relu2(up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
    """Return ``max(up, 0)^2`` (Primer, So et al. 2021)."""
    return jnp.square(jax.nn.relu(up))
