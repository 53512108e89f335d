"""Gated DeltaNet (Yang et al. 2024), as in Qwen3-Next and Qwen3.5: linear attention with a fixed-size state."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from nnxmoe.axes import CONTEXT, AnyMesh, ParamOptions, parameter
from nnxmoe.layers.attention.context_parallel import all_gather_context
from nnxmoe.layers.cache import RecurrentState
from nnxmoe.layers.cache_buffer import gather_tokens
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import GatedNorm
from nnxmoe.layers.recurrent.conv import ShortConv
from nnxmoe.layers.recurrent.delta_rule import (
    ChunkedRule,
    DeltaInputs,
    Recurrence,
    chunk_delta_rule,
    einsum_highest,
    recurrent_delta_rule,
)
from nnxmoe.layers.recurrent.recurrence import OrderedTokens
from nnxmoe.sharding import context_shard_axes, shard_map

ProjectedTokens = tuple[Array, Array, Array, Array]
"""Queries, keys and values ``[B T channels]``, gates ``z [B T N W]``, and ``b`` and ``a`` ``[B T N]``."""

DeltaProjection = Callable[[Array], ProjectedTokens]
"""Projection of the layer's input ``x [B T D]``."""


@dataclasses.dataclass(frozen=True)
class DeltaDims:
    """Sizes of `GatedDeltaNet`.

    Attributes:
        dim: Width of the activations.
        key_heads: Number of query and key heads.
        value_heads: Number of value heads, a multiple of ``key_heads``.
        key_dim: Width of a query or key head.
        value_dim: Width of a value head.
    """

    dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Total width of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def split(self, qkvz: Shaped[Array, "*B key_heads _"], ba: Shaped[Array, "*B key_heads _"]) -> ProjectedTokens:
        """Split projections that are grouped by key head: q, k, v and z from ``qkvz``, and b and a from ``ba``."""
        lead, groups = qkvz.shape[:-2], self.value_heads // self.key_heads
        ends = self.key_dim, 2 * self.key_dim, 2 * self.key_dim + groups * self.value_dim
        q, k, v, z = jnp.split(qkvz, ends, axis=-1)
        b, a = (x.reshape(*lead, self.value_heads) for x in jnp.split(ba, 2, axis=-1))
        qkv = jnp.concatenate([x.reshape(*lead, -1) for x in (q, k, v)], axis=-1)
        return qkv, z.reshape(*lead, self.value_heads, self.value_dim), b, a


class SeparateProjection(nnx.Module):
    """Input projection with a fused kernel for q, k and v, and separate kernels for z, b and a (Qwen3.5)."""

    def __init__(self, dims: DeltaDims, **kw: Unpack[ParamOptions]):
        dim, heads = (dims.dim,), dims.value_heads
        self.qkv = Linear(dim, (dims.channels,), ("embed", "mlp"), **kw)
        self.z = Linear(dim, (heads, dims.value_dim), ("embed", "heads", "head"), **kw)
        self.b = Linear(dim, (heads,), ("embed", "heads"), **kw)
        self.a = Linear(dim, (heads,), ("embed", "heads"), **kw)

    def __call__(self, x: Float[Array, "B T D"]) -> ProjectedTokens:
        return self.qkv(x), self.z(x), self.b(x), self.a(x)


class FusedProjection(nnx.Module):
    """Input projection with a fused kernel for q, k, v and z, and a fused kernel for b and a (Qwen3-Next).

    The outputs of both kernels are grouped by key head.
    """

    def __init__(self, dims: DeltaDims, **kw: Unpack[ParamOptions]):
        self.dims, groups, axes = dims, dims.value_heads // dims.key_heads, ("embed", "heads", "head")
        width = 2 * dims.key_dim + 2 * groups * dims.value_dim
        self.qkvz = Linear((dims.dim,), (dims.key_heads, width), axes, **kw)
        self.ba = Linear((dims.dim,), (dims.key_heads, 2 * groups), axes, **kw)

    def __call__(self, x: Float[Array, "B T D"]) -> ProjectedTokens:
        return self.dims.split(self.qkvz(x), self.ba(x))


class GatedDeltaNet(nnx.Module):
    """Linear attention with the gated delta rule: ``out(norm(delta(conv(q, k, v))) * activation(z))``.

    Decays are ``exp(-exp(a_log) softplus(a + dt_bias))``. Update strengths are ``sigmoid(b)``. The state of a row
    consists of a float32 matrix ``[key_dim value_dim]`` per head and the most recent inputs of the convolution. Passes
    are computed in chunks. Passes of up to ``1 + lookahead`` tokens, and the last ``lookahead`` tokens of longer
    passes, are computed token by token. Source: ``Qwen3NextGatedDeltaNet`` in transformers.

    Args:
        dims: Sizes of the layer.
        project: Input projection.
        taps: Filter width of the convolution.
        eps: Epsilon for the norm.
        mesh: Device mesh of the layer. If axis ``context`` shards the tokens, the devices exchange states.
        recurrence: Computes the chunks, for example with a Pallas kernel. Defaults to the layer's chunked rule.
        activation: Activation of the gates ``z``.
        **kw: Parameter dtype and rngs.
    """

    has_correction: ClassVar[bool] = True  # Whether the rule includes the correction ``- S^T k``.
    supports_context_parallel: ClassVar[bool] = True  # Whether mesh axis ``context`` may shard the tokens.

    def __init__(
        self,
        dims: DeltaDims,
        project: DeltaProjection,
        *,
        taps: int,
        eps: float,
        mesh: AnyMesh | None = None,
        recurrence: Recurrence | None = None,
        activation: Callable[[Array], Array] = jax.nn.silu,
        **kw: Unpack[ParamOptions],
    ):
        self.dims, self.project, self.mesh, self.recurrence = dims, project, mesh, recurrence
        self.conv = ShortConv(dims.channels, taps, **kw)
        self.a_log = parameter((dims.value_heads,), ("heads",), init_log_rates, **kw)
        self.dt_bias = parameter((dims.value_heads,), ("heads",), nnx.initializers.ones, **kw)
        self.norm = GatedNorm(dims.value_dim, eps, activation=activation, **kw)
        self.out = Linear((dims.value_heads, dims.value_dim), (dims.dim,), ("heads", "head", "embed"), **kw)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: RecurrentState | None = None
    ) -> tuple[Float[Array, "B T_out D"], RecurrentState | None]:
        tokens = OrderedTokens.from_context(context, x.shape[0], x.shape[1], cached=cache is not None)
        qkv, z, b, a = self._project_tokens(tokens.sort(x))
        if cache is None or context.past is None:
            state, window = self._empty_state(x.shape[0], x.dtype)
        else:
            state, window = cache.state_before(context.past)
        qkv, conv_inputs = self.conv(qkv, window, tokens.segment)
        inputs = self._delta_inputs(tokens, qkv, b, a)
        if tokens.real is not None:
            inputs = _mask_inputs(inputs, tokens.real)
        lookahead = 0 if cache is None else cache.lookahead
        heads, token_index, states = self._apply_rule(inputs, state, tokens, lookahead)
        if cache is not None:
            windows = self.conv.windows(conv_inputs, token_index, tokens.segment)
            cache = cache.write((states, windows), tokens.token_indices(token_index))
        heads, z = (context.output_tokens(tokens.unsort(a)) for a in (heads.astype(x.dtype), z))
        return self.out(self.norm(heads, z)), cache

    def _project_tokens(self, x: Float[Array, "B T D"]) -> ProjectedTokens:
        return self.project(x)

    def _delta_inputs(self, tokens: OrderedTokens, qkv: Array, b: Array, a: Array) -> DeltaInputs:
        dims, lead = self.dims, qkv.shape[:2]
        width = dims.key_heads * dims.key_dim
        q, k, v = jnp.split(qkv.astype(jnp.float32), (width, 2 * width), axis=-1)
        q, k = (_normalize(x.reshape(*lead, dims.key_heads, dims.key_dim)) for x in (q, k))
        g, beta = self.log_decays(a), jax.nn.sigmoid(b.astype(jnp.float32))
        v = v.reshape(*lead, dims.value_heads, dims.value_dim)
        return DeltaInputs(q * dims.key_dim**-0.5, k, v, g, beta, tokens.segment)

    def log_decays(self, a: Float[Array, "B T N"]) -> Array:
        """Compute the log decays, at most 0, from the output ``a`` of the projection."""
        return -jnp.exp(self.a_log[...].astype(jnp.float32)) * self.step_sizes(a)

    def step_sizes(self, a: Float[Array, "B T N"]) -> Array:
        """Compute the positive step sizes. Log decays are proportional to the step sizes."""
        return jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32))

    def _apply_rule(
        self, inputs: DeltaInputs, state: Array, tokens: OrderedTokens, lookahead: int
    ) -> tuple[Float[Array, "B T N W"], Int[Array, "B n"], Float[Array, "B n N H W"]]:
        """Return the outputs, the indices of the most recent tokens, and the state after each of these tokens.

        States with negative indices are unused.
        """
        batch, length = inputs.beta.shape[:2]
        token_index = jnp.broadcast_to(jnp.arange(length), (batch, length))
        if length <= 1 + lookahead:
            outputs, states = recurrent_delta_rule(inputs, state, has_correction=self.has_correction)
            return outputs, token_index, states
        end = tokens.count - lookahead
        if not lookahead:
            outputs, state = self._apply_in_chunks(inputs, state)
            return outputs, (end - 1)[:, None], state[:, None]
        is_early, state_segment = token_index < end[:, None], None
        early = _mask_inputs(inputs, is_early)
        if inputs.segment is not None:  # segments that start later must not reset the early state
            state_segment = jnp.max(jnp.where(is_early, inputs.segment, 0), axis=1)
            early = early._replace(segment=jnp.minimum(inputs.segment, state_segment[:, None]))
        outputs, state = self._apply_in_chunks(early, state)
        late_index = end[:, None] + jnp.arange(lookahead)
        is_late = late_index >= 0
        late = jax.tree.map(lambda a: gather_tokens(a, jnp.maximum(late_index, 0)), inputs)
        late = _mask_inputs(late, is_late)
        if late.segment is not None:
            late = late._replace(segment=jnp.where(is_late, late.segment, 0))
        late_outputs, late_states = recurrent_delta_rule(late, state, state_segment, has_correction=self.has_correction)
        targets = jnp.where(late_index < 0, length, late_index)
        outputs = jax.vmap(lambda row, new, i: row.at[i].set(new, mode="drop"))(outputs, late_outputs, targets)
        token_index = jnp.concatenate([(end - 1)[:, None], late_index], axis=1)
        return outputs, token_index, jnp.concatenate([state[:, None], late_states], axis=1)

    def _apply_in_chunks(self, inputs: DeltaInputs, state: Array) -> tuple[Array, Array]:
        """Return the outputs and the final state of a pass. Use context parallelism or ``recurrence`` if set."""
        if self.mesh is not None and context_shard_axes(inputs.beta.shape[1], self.mesh):
            return context_parallel_delta_rule(self._chunk_rule, inputs, state, self.mesh)
        if self.recurrence is not None:
            return self.recurrence(inputs, state, self._chunk_rule)
        return self._chunk_rule(inputs, state)

    def _chunk_rule(self, inputs: DeltaInputs, state: Array) -> tuple[Array, Array]:
        return chunk_delta_rule(inputs, state, has_correction=self.has_correction)

    def _empty_state(self, batch: int, dtype: Any) -> tuple[Array, Array]:
        dims = self.dims
        window = jnp.zeros((batch, self.conv.window_size, dims.channels), dtype)
        return jnp.zeros((batch, dims.value_heads, dims.key_dim, dims.value_dim), jnp.float32), window

    def score_ops(self, num_keys: float) -> list[tuple[int, float]]:
        """Return [(multiplications per token, 1)], independent of the number of earlier tokens, ``num_keys``."""
        dims = self.dims
        return [((2 + self.has_correction) * dims.value_heads * dims.key_dim * dims.value_dim, 1.0)]

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> RecurrentState:
        """Create ``1 + lookahead`` states. ``capacity`` has no effect."""
        return RecurrentState.empty(self._empty_state(batch, dtype), lookahead)


def _mask_inputs(inputs: DeltaInputs, mask: Bool[Array, "B T"]) -> DeltaInputs:
    """Mask the inputs, so that tokens with ``mask`` False do not change the state."""
    g, beta = (jnp.where(mask.reshape(*mask.shape, *(1,) * (a.ndim - 2)), a, 0) for a in (inputs.g, inputs.beta))
    return inputs._replace(g=g, beta=beta)


def _normalize(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def init_log_rates(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Initialize log rates, with rates uniform in [0.01, 16)."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16.0)).astype(dtype)


def context_parallel_delta_rule(
    chunk_rule: ChunkedRule, inputs: DeltaInputs, state: Float[Array, "B N H W"], mesh: AnyMesh
) -> tuple[Float[Array, "B T N W"], Float[Array, "B N H W"]]:
    """Compute ``chunk_rule(inputs, state)`` with tokens sharded over ``context`` (LASP-2; Sun et al. 2025).

    The state after a device's tokens is a linear function ``A S + B`` of the state S before these tokens. First, each
    device computes A and B for the local tokens, as columns of a single state. Then the devices all-gather A and B, and
    each device computes the outputs from the state after the tokens of all previous devices.
    """
    (heads, key_dim, width), count = state.shape[1:], mesh.shape[CONTEXT]
    last_segments = None if inputs.segment is None else inputs.segment.reshape(len(state), count, -1)[:, :, -1]

    def run(inputs: DeltaInputs, state: Array, last_segments: Any) -> tuple[Array, Array]:
        device = jax.lax.axis_index(CONTEXT)
        if inputs.segment is not None:  # the device's initial state is in segment 0
            state_segment = jnp.pad(last_segments, ((0, 0), (1, 0)))[:, device, None]
            inputs = inputs._replace(segment=inputs.segment - state_segment)
        zeros = jnp.zeros((*inputs.v.shape[:3], key_dim), inputs.v.dtype)
        identity = jnp.broadcast_to(jnp.eye(key_dim), (len(state), heads, key_dim, key_dim))
        init_state = jnp.concatenate([jnp.zeros_like(state), identity], axis=3)
        _, transition = chunk_rule(inputs._replace(v=jnp.concatenate([inputs.v, zeros], axis=3)), init_state)

        def apply(state: Array, transition: Array) -> tuple[Array, Array]:
            state = einsum_highest("bnhi,bniw->bnhw", transition[..., width:], state) + transition[..., :width]
            return state, state

        final_state, states = jax.lax.scan(apply, state, all_gather_context(transition[None], 0))
        outputs, _ = chunk_rule(inputs, jnp.concatenate([state[None], states])[device])
        return outputs, final_state

    token_spec, replicated_spec = PartitionSpec(None, CONTEXT), PartitionSpec()
    in_specs = token_spec, replicated_spec, replicated_spec
    return shard_map(run, mesh, in_specs, (token_spec, replicated_spec), (CONTEXT,))(inputs, state, last_segments)
