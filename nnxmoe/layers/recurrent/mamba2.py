"""Mamba-2 (Dao & Gu 2024), as in Nemotron-H: a recurrence that decays a matrix per head and adds to it."""

from typing import ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import AnyMesh, ParamOptions, parameter
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import rms_normalize
from nnxmoe.layers.recurrent.conv import ShortConv
from nnxmoe.layers.recurrent.delta import DeltaDims, DeltaProjections, GatedDeltaNet, log_rates
from nnxmoe.layers.recurrent.delta_rule import DeltaInputs
from nnxmoe.layers.recurrent.recurrence import OrderedTokens


class MambaProjection(Linear):
    """One kernel for gates, the input of the convolution, and step sizes."""

    def __init__(self, heads: DeltaDims, *, bias: bool, **kw: Unpack[ParamOptions]):
        width = heads.values * heads.value_dim + heads.channels + heads.values
        super().__init__((heads.dim,), (width,), ("embed", "mlp"), bias=bias, **kw)
        self.heads = heads

    def __call__(self, x: Float[Array, "B T D"]) -> DeltaProjections:
        c = self.heads
        gates = c.values * c.value_dim
        z, mixed, steps = jnp.split(super().__call__(x), (gates, gates + c.channels), axis=-1)
        return mixed, z.reshape(*x.shape[:2], c.values, c.value_dim), steps, steps


class GroupedGatedNorm(nnx.Module):
    """``x * silu(gate)``, normalised within ``groups`` of consecutive heads in float32, cast to ``x``'s dtype, times
    the scale."""

    def __init__(self, heads: DeltaDims, groups: int, eps: float, **kw: Unpack[ParamOptions]):
        self.groups, self.eps = groups, eps
        width = heads.values * heads.value_dim
        self.scale = parameter((width,), ("heads",), nnx.initializers.ones, **kw)

    def __call__(self, x: Float[Array, "B T N W"], gate: Float[Array, "B T N W"]) -> Float[Array, "B T N W"]:
        gated = x.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        unit = rms_normalize(gated.reshape(*x.shape[:2], self.groups, -1), self.eps).reshape(x.shape).astype(x.dtype)
        return unit * jnp.broadcast_to(self.scale[...].astype(x.dtype).reshape(x.shape[2:]), x.shape)


class Mamba2(GatedDeltaNet):
    """``out(norm(y, z))`` with ``y = S^T C + d x`` and ``S <- exp(-exp(a_log) step) S + B (step x)^T``, for x, B and C
    from the convolution and ``step = max(softplus(projected + dt_bias), min_step)``.

    ``heads``: as many values as x has, as many keys as there are groups of B and C. Source: ``NemotronHMamba2Mixer``
    in transformers 5.24, which bounds the steps in passes only, not in those of one token with a cache; here all are.
    """

    has_correction: ClassVar[bool] = False

    def __init__(
        self,
        heads: DeltaDims,
        *,
        taps: int,
        bias: bool,
        conv_bias: bool,
        eps: float,
        min_step: float,
        mesh: AnyMesh | None = None,
        **kw: Unpack[ParamOptions],
    ):
        self.heads, self.min_step, self.mesh, self.recurrence = heads, min_step, mesh, None
        self.project = MambaProjection(heads, bias=bias, **kw)
        self.conv = ShortConv(heads.channels, taps, bias=conv_bias, **kw)
        self.a_log = parameter((heads.values,), ("heads",), log_rates, **kw)
        self.dt_bias, self.d = (parameter((heads.values,), ("heads",), nnx.initializers.ones, **kw) for _ in range(2))
        self.norm = GroupedGatedNorm(heads, heads.keys, eps, **kw)
        axes = ("heads", "head", "embed")
        self.out = Linear((heads.values, heads.value_dim), (heads.dim,), axes, bias=bias, **kw)

    def _inputs(self, tokens: OrderedTokens, mixed: Array, b: Array, a: Array) -> DeltaInputs:
        c, lead, mixed = self.heads, mixed.shape[:2], mixed.astype(jnp.float32)
        width = c.values * c.value_dim
        x, into, out = jnp.split(mixed, (width, width + c.keys * c.key_dim), axis=-1)
        into, out = (part.reshape(*lead, c.keys, c.key_dim) for part in (into, out))
        x = x.reshape(*lead, c.values, c.value_dim)
        return DeltaInputs(out, into, x, self.log_decays(a), self.steps(a), tokens.run)

    def steps(self, a: Float[Array, "B T N"]) -> Array:
        return jnp.maximum(super().steps(a), self.min_step)

    def _delta(
        self, inputs: DeltaInputs, state: Array, tokens: OrderedTokens, lookahead: int
    ) -> tuple[Array, Array, Array]:
        out, at, states = super()._delta(inputs, state, tokens, lookahead)
        return out + self.d[...].astype(jnp.float32)[:, None] * inputs.v, at, states
