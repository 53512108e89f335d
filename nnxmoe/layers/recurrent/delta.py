"""GatedDeltaNet (Yang et al. 2024), as in Qwen3-Next and Qwen3.5: attention whose memory has a fixed size."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Shaped

from nnxmoe.axes import CONTEXT, AnyMesh, ParamOptions, parameter
from nnxmoe.layers.attention.context_parallel import all_gather_context
from nnxmoe.layers.cache import RecurrentState, gather_tokens
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import GatedNorm
from nnxmoe.layers.recurrent.conv import ShortConv
from nnxmoe.layers.recurrent.delta_rule import (
    Chunked,
    DeltaInputs,
    Recurrence,
    chunk_delta_rule,
    product,
    recurrent_delta_rule,
)
from nnxmoe.layers.recurrent.recurrence import OrderedTokens
from nnxmoe.sharding import context_shard_axes, shard_map

DeltaProjections = tuple[Array, Array, Array, Array]
"""Queries, keys and values ``[B T channels]``, gates ``z [B T N W]``, and ``b``, ``a [B T N]``."""

DeltaProjection = Callable[[Array], DeltaProjections]  # of ``x [B T D]``


@dataclasses.dataclass(frozen=True)
class DeltaDims:
    """``keys`` heads of queries and keys of width ``key_dim``, and ``values`` heads of width ``value_dim``, a multiple,
    for activations of width ``dim``."""

    dim: int
    keys: int
    values: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Width of queries, keys and values together."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim

    def split(self, qkvz: Shaped[Array, "*B keys _"], ba: Shaped[Array, "*B keys _"]) -> DeltaProjections:
        """`DeltaProjections` from outputs sorted by heads of keys: q, k, v and z of each, and b and a."""
        lead, groups = qkvz.shape[:-2], self.values // self.keys
        ends = self.key_dim, 2 * self.key_dim, 2 * self.key_dim + groups * self.value_dim
        q, k, v, z = jnp.split(qkvz, ends, axis=-1)
        b, a = (part.reshape(*lead, self.values) for part in jnp.split(ba, 2, axis=-1))
        mixed = jnp.concatenate([part.reshape(*lead, -1) for part in (q, k, v)], axis=-1)
        return mixed, z.reshape(*lead, self.values, self.value_dim), b, a


class SeparateProjection(nnx.Module):
    """A kernel each for queries, keys and values together, for z, b and a (Qwen3.5)."""

    def __init__(self, heads: DeltaDims, **kw: Unpack[ParamOptions]):
        dim, count = (heads.dim,), heads.values
        self.qkv = Linear(dim, (heads.channels,), ("embed", "mlp"), **kw)
        self.z = Linear(dim, (count, heads.value_dim), ("embed", "heads", "head"), **kw)
        self.b = Linear(dim, (count,), ("embed", "heads"), **kw)
        self.a = Linear(dim, (count,), ("embed", "heads"), **kw)

    def __call__(self, x: Float[Array, "B T D"]) -> DeltaProjections:
        return self.qkv(x), self.z(x), self.b(x), self.a(x)


class FusedProjection(nnx.Module):
    """Two kernels, whose outputs are sorted by heads of the keys: q, k, v and z of each, and b and a (Qwen3-Next)."""

    def __init__(self, heads: DeltaDims, **kw: Unpack[ParamOptions]):
        self.heads, (groups, axes) = heads, (heads.values // heads.keys, ("embed", "heads", "head"))
        width = 2 * heads.key_dim + 2 * groups * heads.value_dim
        self.qkvz = Linear((heads.dim,), (heads.keys, width), axes, **kw)
        self.ba = Linear((heads.dim,), (heads.keys, 2 * groups), axes, **kw)

    def __call__(self, x: Float[Array, "B T D"]) -> DeltaProjections:
        return self.heads.split(self.qkvz(x), self.ba(x))


class GatedDeltaNet(nnx.Module):
    """``out(norm(delta(conv(q, k, v))) * silu(z))``, with decays ``exp(-exp(a_log) softplus(a + dt_bias))`` and
    strengths ``sigmoid(b)``, after transformers' Qwen3NextGatedDeltaNet.

    The state of a row is a matrix ``[key_dim value_dim]`` per head in float32, and the last inputs of the convolution.
    Passes are computed in chunks, up to ``1 + lookahead`` tokens, and the ``lookahead`` newest of a longer pass, in
    steps. ``mesh``: on its axis ``context`` devices pass on the state. ``recurrence``: computes the chunks elsewhere.
    """

    has_correction: ClassVar[bool] = True  # as in `recurrent_delta_rule`
    supports_context_parallel: ClassVar[bool] = True  # as in `GQA`

    def __init__(
        self,
        heads: DeltaDims,
        project: DeltaProjection,
        *,
        taps: int,
        eps: float,
        mesh: AnyMesh | None = None,
        recurrence: Recurrence | None = None,
        **kw: Unpack[ParamOptions],
    ):
        self.heads, self.project, self.mesh, self.recurrence = heads, project, mesh, recurrence
        self.conv = ShortConv(heads.channels, taps, **kw)
        self.a_log = parameter((heads.values,), ("heads",), log_rates, **kw)
        self.dt_bias = parameter((heads.values,), ("heads",), nnx.initializers.ones, **kw)
        self.norm = GatedNorm(heads.value_dim, eps, **kw)
        self.out = Linear((heads.values, heads.value_dim), (heads.dim,), ("heads", "head", "embed"), **kw)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: RecurrentState | None = None
    ) -> tuple[Float[Array, "B asked D"], RecurrentState | None]:
        tokens = OrderedTokens.of(context, (x.shape[0], x.shape[1]), cached=cache is not None)
        mixed, z, b, a = self.project(tokens.ordered(x))
        if cache is None or context.past is None:
            state, window = self._zero(x.shape[0], x.dtype)
        else:
            state, window = cache.before(context.past)
        mixed, seen = self.conv(mixed, window, tokens.run)
        inputs = self._inputs(tokens, mixed, b, a)
        inputs = inputs if tokens.real is None else _only(inputs, tokens.real)
        lookahead = 0 if cache is None else cache.lookahead
        out, at, states = self._delta(inputs, state, tokens, lookahead)
        if cache is not None:
            cache = cache.written((states, self.conv.windows(seen, at, tokens.run)), tokens.index_of(at))
        out, z = (context.output_tokens(tokens.given(a)) for a in (out.astype(x.dtype), z))
        return self.out(self.norm(out, z)), cache

    def _inputs(self, tokens: OrderedTokens, mixed: Array, b: Array, a: Array) -> DeltaInputs:
        c, lead = self.heads, mixed.shape[:2]
        width = c.keys * c.key_dim
        q, k, v = jnp.split(mixed.astype(jnp.float32), (width, 2 * width), axis=-1)
        q, k = (_unit(part.reshape(*lead, c.keys, c.key_dim)) for part in (q, k))
        g, beta = self.log_decays(a), jax.nn.sigmoid(b.astype(jnp.float32))
        v = v.reshape(*lead, c.values, c.value_dim)
        return DeltaInputs(q * c.key_dim**-0.5, k, v, g, beta, tokens.run)

    def log_decays(self, a: Float[Array, "B T N"]) -> Array:
        """Logarithms of the decays, at most 0, from the projection's last output."""
        return -jnp.exp(self.a_log[...].astype(jnp.float32)) * self.steps(a)

    def steps(self, a: Float[Array, "B T N"]) -> Array:
        """Positive step sizes, which multiply the rates of the decays."""
        return jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32))

    def _chunked(self, inputs: DeltaInputs, state: Array) -> tuple[Array, Array]:
        return chunk_delta_rule(inputs, state, has_correction=self.has_correction)

    def _delta(
        self, inputs: DeltaInputs, state: Array, tokens: OrderedTokens, lookahead: int
    ) -> tuple[Array, Array, Array]:
        """Outputs ``[B T N W]``, and the places ``[B n]`` of the newest tokens (negative: none) with the state after
        each."""
        batch, length = inputs.beta.shape[:2]
        places = jnp.broadcast_to(jnp.arange(length), (batch, length))
        if length <= 1 + lookahead:
            out, states = recurrent_delta_rule(inputs, state, has_correction=self.has_correction)
            return out, places, states
        end = tokens.count - lookahead
        early, most = places < end[:, None], None
        masked = _only(inputs, early)
        if inputs.run is not None:  # segments of the newest tokens begin after those of the others
            most = jnp.max(jnp.where(early, inputs.run, 0), axis=1)
            masked = masked._replace(run=jnp.minimum(inputs.run, most[:, None]))
        masked = masked if lookahead else inputs
        if self.mesh is not None and context_shard_axes(length, self.mesh):
            out, state = context_parallel_delta_rule(self._chunked, masked, state, self.mesh)
        elif self.recurrence is not None:
            out, state = self.recurrence(masked, state, self._chunked)
        else:
            out, state = self._chunked(masked, state)
        at, states = (end - 1)[:, None], state[:, None]
        if lookahead:
            late = end[:, None] + jnp.arange(lookahead)
            newest = _only(jax.tree.map(lambda a: gather_tokens(a, jnp.maximum(late, 0)), inputs), late >= 0)
            if newest.run is not None:
                newest = newest._replace(run=jnp.where(late >= 0, newest.run, 0))
            more, later = recurrent_delta_rule(newest, state, most, has_correction=self.has_correction)
            put = jnp.where(late < 0, length, late)
            out = jax.vmap(lambda row, new, i: row.at[i].set(new, mode="drop"))(out, more, put)
            at, states = jnp.concatenate([at, late], axis=1), jnp.concatenate([states, later], axis=1)
        return out, at, states

    def _zero(self, batch: int, dtype: Any) -> tuple[Array, Array]:
        c = self.heads
        window = jnp.zeros((batch, self.conv.taps - 1, c.channels), dtype)
        return jnp.zeros((batch, c.values, c.key_dim, c.value_dim), jnp.float32), window

    def score_ops(self, seen: float) -> list[tuple[int, float]]:
        """Multiplications of the products of a token with the state, which do not depend on ``seen``."""
        c = self.heads
        return [((2 + self.has_correction) * c.values * c.key_dim * c.value_dim, 1.0)]

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> RecurrentState:
        """``1 + lookahead`` states, whatever the capacity."""
        return RecurrentState.empty(self._zero(batch, dtype), lookahead)


def _only(inputs: DeltaInputs, kept: Bool[Array, "B T"]) -> DeltaInputs:
    """Mask the inputs so that tokens outside of ``kept`` leave the state unchanged."""
    g, beta = (jnp.where(kept.reshape(*kept.shape, *(1,) * (a.ndim - 2)), a, 0) for a in (inputs.g, inputs.beta))
    return inputs._replace(g=g, beta=beta)


def _unit(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def log_rates(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Initial logarithms of rates."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16.0)).astype(dtype)


def context_parallel_delta_rule(
    chunked: Chunked, inputs: DeltaInputs, state: Float[Array, "B N H W"], mesh: AnyMesh
) -> tuple[Float[Array, "B T N W"], Float[Array, "B N H W"]]:
    """``chunked(inputs, state) -> outputs, state``, with the tokens of each device along ``context`` computed there.

    The state after them is linear in the one before, ``A S + B``. Each device first computes its A and B, as columns of
    one state, gathers those of all, and then starts from the state after the devices before it (sequence parallelism
    of linear attention, LASP-2; Sun et al. 2025).
    """
    (heads, key_dim, width), count = state.shape[1:], mesh.shape[CONTEXT]
    runs = None if inputs.run is None else inputs.run.reshape(len(state), count, -1)[:, :, -1]

    def local(inputs: DeltaInputs, state: Array, runs: Any) -> tuple[Array, Array]:
        me = jax.lax.axis_index(CONTEXT)
        if inputs.run is not None:  # counted from the state that the device starts from
            inputs = inputs._replace(run=inputs.run - jnp.pad(runs, ((0, 0), (1, 0)))[:, me, None])
        more = jnp.zeros((*inputs.v.shape[:3], key_dim), inputs.v.dtype)
        one = jnp.broadcast_to(jnp.eye(key_dim), (len(state), heads, key_dim, key_dim))
        start = jnp.concatenate([jnp.zeros_like(state), one], axis=3)
        _, own = chunked(inputs._replace(v=jnp.concatenate([inputs.v, more], axis=3)), start)

        def after(state: Array, given: Array) -> tuple[Array, Array]:
            state = product("bnhi,bniw->bnhw", given[..., width:], state) + given[..., :width]
            return state, state

        last, states = jax.lax.scan(after, state, all_gather_context(own[None], 0))
        out, _ = chunked(inputs, jnp.concatenate([state[None], states])[me])
        return out, last

    tokens, whole = PartitionSpec(None, CONTEXT), PartitionSpec()
    return shard_map(local, mesh, (tokens, whole, whole), (tokens, whole), (CONTEXT,))(inputs, state, runs)
