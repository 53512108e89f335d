"""Kimi Delta Attention (Kimi Linear; Kimi team 2025): a `GatedDeltaNet` with one decay per key channel."""

import dataclasses
from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import AnyMesh, ParamOptions, parameter
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import GatedNorm
from nnxmoe.layers.recurrent.conv import SeparateConvs
from nnxmoe.layers.recurrent.delta import DeltaDims, GatedDeltaNet, ProjectedTokens, init_log_rates
from nnxmoe.layers.recurrent.delta_rule import DeltaInputs, Recurrence, chunk_channelwise_delta_rule


class LowRank(nnx.Module):
    """Low-rank projection ``b(a(x))``: ``[B T D] -> [B T rank] -> [B T N H]``."""

    def __init__(self, dims: DeltaDims, rank: int, **kw: Unpack[ParamOptions]):
        self.a = Linear((dims.dim,), (rank,), ("embed", "latent"), **kw)
        self.b = Linear((rank,), (dims.key_heads, dims.key_dim), ("q_rank", "heads", "head"), **kw)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        return self.b(self.a(x))


class KimiProjection(nnx.Module):
    """Input projection of `KimiDelta`: ``q``, ``k``, ``v``, update strengths ``b``, decays ``f`` and gates ``g``.

    Args:
        dims: Sizes of the layer.
        ranks: Ranks of ``f`` and ``g``. ``None`` for full rank.
        **kw: Parameter dtype and rngs.
    """

    def __init__(self, dims: DeltaDims, ranks: tuple[int | None, int | None], **kw: Unpack[ParamOptions]):
        def full_rank() -> Linear:
            return Linear((dims.dim,), (dims.key_heads, dims.key_dim), ("embed", "heads", "head"), **kw)

        self.q, self.k, self.v = (full_rank() for _ in "qkv")
        self.f, self.g = (full_rank() if rank is None else LowRank(dims, rank, **kw) for rank in ranks)
        self.b = Linear((dims.dim,), (dims.key_heads,), ("embed", "heads"), **kw)

    def __call__(self, x: Float[Array, "B T D"]) -> ProjectedTokens:
        qkv = jnp.concatenate([project(x).reshape(*x.shape[:2], -1) for project in (self.q, self.k, self.v)], axis=-1)
        return qkv, self.g(x), self.b(x), self.f(x)


DecayFn = Callable[[Array, Array], Array]
"""Function ``(x [B T N H], log rates [N 1]) -> log decays [B T N H]``. Log decays are at most 0."""


def unbounded_decays(x: Float[Array, "B T N H"], rates: Float[Array, "N 1"]) -> Float[Array, "B T N H"]:
    """Return the log decays ``-exp(rate) softplus(x)``."""
    return -jnp.exp(rates) * jax.nn.softplus(x)


@dataclasses.dataclass(frozen=True)
class BoundedDecays:
    """Log decays ``min_log_decay * sigmoid(exp(rate) x)``, between ``min_log_decay < 0`` and 0."""

    min_log_decay: float

    def __call__(self, x: Float[Array, "B T N H"], rates: Float[Array, "N 1"]) -> Float[Array, "B T N H"]:
        return self.min_log_decay * jax.nn.sigmoid(jnp.exp(rates) * x)


class KimiDelta(GatedDeltaNet):
    """`GatedDeltaNet` with one decay per head and key channel, and sigmoid output gates.

    The numbers of key heads and value heads are equal. Source: ``KimiLinearDeltaAttention`` in transformers 5.24.

    Args:
        dims: Sizes of the layer.
        project: Input projection.
        decays: Computes the log decays from the projection and the log rates.
        rate_shape: Shape of the log rates in checkpoints, with one element per head.
        taps, eps, mesh, recurrence: See `GatedDeltaNet`.
        **kw: Parameter dtype and rngs.
    """

    def __init__(
        self,
        dims: DeltaDims,
        project: KimiProjection,
        decays: DecayFn,
        *,
        rate_shape: tuple[int, ...],
        taps: int,
        eps: float,
        mesh: AnyMesh | None = None,
        recurrence: Recurrence | None = None,
        **kw: Unpack[ParamOptions],
    ):
        self.dims, self.project, self.decays = dims, project, decays
        self.mesh, self.recurrence = mesh, recurrence
        width = dims.key_heads * dims.key_dim
        self.conv = SeparateConvs(width, taps, **kw)
        axes = ["heads" if size == dims.key_heads and size > 1 else None for size in rate_shape]
        self.a_log = parameter(rate_shape, axes, init_log_rates, **kw)
        self.dt_bias = parameter((width,), ("heads",), nnx.initializers.ones, **kw)
        self.norm = GatedNorm(dims.value_dim, eps, activation=jax.nn.sigmoid, **kw)
        self.out = Linear((dims.value_heads, dims.value_dim), (dims.dim,), ("heads", "head", "embed"), **kw)

    def log_decays(self, a: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        rates, bias = (p[...].astype(jnp.float32) for p in (self.a_log, self.dt_bias))
        return self.decays(a.astype(jnp.float32) + bias.reshape(a.shape[2:]), rates.reshape(-1, 1))

    def _chunk_rule(self, inputs: DeltaInputs, state: Array) -> tuple[Array, Array]:
        return chunk_channelwise_delta_rule(inputs, state)
