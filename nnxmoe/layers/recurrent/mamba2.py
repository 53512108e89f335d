"""Mamba-2 (Dao & Gu 2024), as in Nemotron-H: a recurrence whose state is one matrix per head."""

from typing import ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import AnyMesh, ParamOptions, parameter
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import rms_normalize
from nnxmoe.layers.recurrent.conv import ShortConv
from nnxmoe.layers.recurrent.delta import DeltaDims, GatedDeltaNet, ProjectedTokens, init_log_rates
from nnxmoe.layers.recurrent.delta_rule import DeltaInputs
from nnxmoe.layers.recurrent.recurrence import OrderedTokens


class GroupedGatedNorm(nnx.Module):
    """Float32 RMS normalization of ``x * silu(gate)`` per group of consecutive heads, followed by a scale.

    Args:
        dims: Sizes of the layer.
        groups: Number of groups of heads.
        eps: Epsilon for the norm.
        **kw: Parameter dtype and rngs.
    """

    def __init__(self, dims: DeltaDims, groups: int, eps: float, **kw: Unpack[ParamOptions]):
        self.groups, self.eps = groups, eps
        width = dims.value_heads * dims.value_dim
        self.scale = parameter((width,), ("heads",), nnx.initializers.ones, **kw)

    def __call__(self, x: Float[Array, "B T N W"], gate: Float[Array, "B T N W"]) -> Float[Array, "B T N W"]:
        gated_x = x.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        y = rms_normalize(gated_x.reshape(*x.shape[:2], self.groups, -1), self.eps).reshape(x.shape).astype(x.dtype)
        return y * jnp.broadcast_to(self.scale[...].astype(x.dtype).reshape(x.shape[2:]), x.shape)


class Mamba2(GatedDeltaNet):
    """Mamba-2 layer: ``out(norm(y, z))`` with ``y = S^T C + d x`` and ``S <- exp(-exp(a_log) step) S + B (step x)^T``.

    x, B and C are outputs of the convolution. The step size is ``step = max(softplus(projected + dt_bias), min_step)``.
    Source: ``NemotronHMamba2Mixer`` in transformers 5.24. When decoding single tokens with a cache, transformers does
    not apply ``min_step``. This class always applies ``min_step``.

    Args:
        dims: Sizes of the layer. ``values`` is the number of heads of x. ``keys`` is the number of groups of B and C.
        taps: Filter width of the convolution.
        bias: Whether the projections have a bias.
        conv_bias: Whether the convolution has a bias.
        eps: Epsilon for the norm.
        min_step: Lower bound on the step sizes.
        mesh: See `GatedDeltaNet`.
        **kw: Parameter dtype and rngs.
    """

    has_correction: ClassVar[bool] = False

    def __init__(
        self,
        dims: DeltaDims,
        *,
        taps: int,
        bias: bool,
        conv_bias: bool,
        eps: float,
        min_step: float,
        mesh: AnyMesh | None = None,
        **kw: Unpack[ParamOptions],
    ):
        self.dims, self.min_step, self.mesh, self.recurrence = dims, min_step, mesh, None
        width = dims.value_heads * dims.value_dim + dims.channels + dims.value_heads
        self.project = Linear((dims.dim,), (width,), ("embed", "mlp"), bias=bias, **kw)
        self.conv = ShortConv(dims.channels, taps, bias=conv_bias, **kw)
        self.a_log = parameter((dims.value_heads,), ("heads",), init_log_rates, **kw)
        self.dt_bias, self.d = (
            parameter((dims.value_heads,), ("heads",), nnx.initializers.ones, **kw) for _ in range(2)
        )
        self.norm = GroupedGatedNorm(dims, dims.key_heads, eps, **kw)
        axes = ("heads", "head", "embed")
        self.out = Linear((dims.value_heads, dims.value_dim), (dims.dim,), axes, bias=bias, **kw)

    def _project_tokens(self, x: Float[Array, "B T D"]) -> ProjectedTokens:
        """Split the outputs of the fused kernel: gates, convolution inputs and step sizes."""
        dims = self.dims
        gate_width = dims.value_heads * dims.value_dim
        z, conv_inputs, steps = jnp.split(self.project(x), (gate_width, gate_width + dims.channels), axis=-1)
        return conv_inputs, z.reshape(*x.shape[:2], dims.value_heads, dims.value_dim), steps, steps

    def _delta_inputs(self, tokens: OrderedTokens, qkv: Array, b: Array, a: Array) -> DeltaInputs:
        dims, lead, qkv = self.dims, qkv.shape[:2], qkv.astype(jnp.float32)
        width = dims.value_heads * dims.value_dim
        x, b, c = jnp.split(qkv, (width, width + dims.key_heads * dims.key_dim), axis=-1)
        b, c = (projection.reshape(*lead, dims.key_heads, dims.key_dim) for projection in (b, c))
        x = x.reshape(*lead, dims.value_heads, dims.value_dim)
        return DeltaInputs(c, b, x, self.log_decays(a), self.step_sizes(a), tokens.segment)

    def step_sizes(self, a: Float[Array, "B T N"]) -> Array:
        return jnp.maximum(super().step_sizes(a), self.min_step)

    def _apply_rule(
        self, inputs: DeltaInputs, state: Array, tokens: OrderedTokens, lookahead: int
    ) -> tuple[Array, Array, Array]:
        outputs, token_index, states = super()._apply_rule(inputs, state, tokens, lookahead)
        return outputs + self.d[...].astype(jnp.float32)[:, None] * inputs.v, token_index, states
