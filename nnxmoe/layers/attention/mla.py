"""Multi-head latent attention (DeepSeek-V2, 2024; DeepSeek-V3 technical report, 2024).

Keys and values are expanded from a small latent per token. `NaiveMLA` expands the latents and attends to the expanded
keys. For many queries, `NaiveMLA` costs fewer FLOPs. `AbsorbedMLA` applies the expansion to queries and outputs and
attends to the latents. `AbsorbedMLA` reads only the cache, so decoding is faster. Both compute the same function from
the same cache.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, Unpack

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions
from nnxmoe.config.arguments import CheckedFields
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.config.validate import set_positive
from nnxmoe.layers.attention.context_parallel import ContextParallelAttention
from nnxmoe.layers.attention.gqa import Gate, scale_by_position
from nnxmoe.layers.attention.softmax_attention import AttentionFn, MaskedSoftmax
from nnxmoe.layers.cache import TokenCache
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.kernel import Kernel
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.rope import RotateFn
from nnxmoe.sharding import is_static

LATENT_NORM_EPS = 1e-6  # as in the published implementation, which ignores the config's rms_norm_eps


@dataclasses.dataclass(frozen=True)
class MLAInputs:
    """Queries, latents, and the kernel that expands the latents.

    Attributes:
        q_nope: Query components without position embedding.
        q_rope: Rotated query components.
        latents: Latent of each token, followed by the token's rotated key.
        kv_b: Kernel ``[kv_rank, N * (nope + v)]`` that expands latents to keys and values.
    """

    q_nope: Float[Array, "B T N nope"]
    q_rope: Float[Array, "B T N rope"]
    latents: Float[Array, "B S latent_and_rope"]
    kv_b: Kernel


@dataclasses.dataclass(frozen=True)
class LatentExpansion:
    """Function ``(latents, kv_b) -> k, v`` that expands latents to the keys and values of all heads.

    Attributes:
        heads: Number of heads, N.
        nope: Number of key components without rotation.
        dtype: Dtype of queries, keys and values.
    """

    heads: int
    nope: int
    dtype: jnp.dtype

    def __call__(
        self, latents: Float[Array, "B S latent_and_rope"], kv_b: Kernel
    ) -> tuple[Float[Array, "B N S H"], Float[Array, "B N S v"]]:
        kv_rank = kv_b.shape[0]
        latent, k_rope = latents[..., :kv_rank].astype(self.dtype), latents[..., kv_rank:].astype(self.dtype)
        kv = kv_b(latent).reshape(*latent.shape[:2], self.heads, -1)
        k_nope, v = jnp.split(jnp.swapaxes(kv, 1, 2), [self.nope], axis=-1)
        k_rope = jnp.broadcast_to(k_rope[:, None], (k_rope.shape[0], self.heads, *k_rope.shape[1:]))
        return jnp.concatenate([k_nope, k_rope], axis=-1), v


class MLAFn(Protocol):
    """Protocol for latent attention implementations, the type of ``Strategy.mla``."""

    def __call__(
        self, inputs: MLAInputs, softmax: MaskedSoftmax, attention_fn: AttentionFn
    ) -> Float[Array, "B T N v"]: ...

    def expansion(self, inputs: MLAInputs) -> LatentExpansion | None:
        """Return the expansion of latents to keys and values, or ``None`` if queries attend to the latents."""
        ...


@dataclasses.dataclass(frozen=True)
class NaiveMLA:
    """Latent attention that expands every latent to the keys and values of all heads."""

    def __call__(self, inputs: MLAInputs, softmax: MaskedSoftmax, attention_fn: AttentionFn) -> Float[Array, "B T N v"]:
        q = jnp.swapaxes(jnp.concatenate([inputs.q_nope, inputs.q_rope], axis=-1), 1, 2)
        k, v = self.expansion(inputs)(inputs.latents, inputs.kv_b)
        return jnp.swapaxes(attention_fn(q, k, v, softmax), 1, 2)

    def expansion(self, inputs: MLAInputs) -> LatentExpansion:
        return LatentExpansion(inputs.q_nope.shape[2], inputs.q_nope.shape[3], inputs.q_nope.dtype)


@dataclasses.dataclass(frozen=True)
class AbsorbedMLA:
    """Latent attention in the latent space. All heads share the latents as keys and values.

    Queries are projected into the latent space. Outputs are projected from the latent space to the value heads.
    """

    def __call__(self, inputs: MLAInputs, softmax: MaskedSoftmax, attention_fn: AttentionFn) -> Float[Array, "B T N v"]:
        kv_b, (heads, nope) = inputs.kv_b, inputs.q_nope.shape[2:]
        kv_rank, v_dim = kv_b.shape[0], kv_b.shape[1] // heads - nope
        q_nope = jnp.swapaxes(inputs.q_nope, 1, 2)
        q_latent = _project_heads(q_nope, lambda rows: kv_b.matmul_per_head(rows, 0, nope, transpose=True))
        q = jnp.concatenate([q_latent, jnp.swapaxes(inputs.q_rope, 1, 2)], axis=-1)
        latents = inputs.latents[:, None].astype(inputs.q_nope.dtype)
        outputs = attention_fn(q, latents, latents, softmax)[..., :kv_rank]  # drop the components of the rotated key
        return jnp.swapaxes(_project_heads(outputs, lambda rows: kv_b.matmul_per_head(rows, nope, v_dim)), 1, 2)

    def expansion(self, inputs: MLAInputs) -> None:
        return None


def _project_heads(x: Float[Array, "B N T I"], project: Callable[[Array], Array]) -> Float[Array, "B N T O"]:
    """Apply ``project`` to the rows ``[N, B * T, I]`` of all heads."""
    batch, heads, length, width = x.shape
    rows = jnp.swapaxes(x, 0, 1).reshape(heads, batch * length, width)
    return jnp.swapaxes(project(rows).reshape(heads, batch, length, -1), 0, 1)


@dataclasses.dataclass(frozen=True)
class AdaptiveMLA(CheckedFields):
    """`AbsorbedMLA` for up to ``max_queries`` tokens per pass (decoding), otherwise `NaiveMLA` (prefill, training)."""

    max_queries: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        set_positive(self, "max_queries")

    def __call__(self, inputs: MLAInputs, softmax: MaskedSoftmax, attention_fn: AttentionFn) -> Float[Array, "B T N v"]:
        mla = AbsorbedMLA() if self._is_short(inputs) else NaiveMLA()
        return mla(inputs, softmax, attention_fn)

    def expansion(self, inputs: MLAInputs) -> LatentExpansion | None:
        return None if self._is_short(inputs) else NaiveMLA().expansion(inputs)

    def _is_short(self, inputs: MLAInputs) -> bool:
        length = inputs.q_nope.shape[1]
        return is_static(length) and length <= self.max_queries


class LowRankQuery(nnx.Module):
    """Low-rank query projection: ``b(norm(a(x)))``."""

    def __init__(
        self,
        dim: int,
        rank: int,
        heads: int,
        head_dim: int,
        *,
        bias: bool,
        eps: float = LATENT_NORM_EPS,
        **kw: Unpack[ParamOptions],
    ):
        self.a = Linear((dim,), (rank,), ("embed", "latent"), bias=bias, **kw)
        self.norm = RMSNorm(rank, eps, **kw)
        self.b = Linear((rank,), (heads, head_dim), ("q_rank", "heads", "head"), **kw)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        return self.b(self.latent(x))

    def latent(self, x: Float[Array, "B T D"]) -> Float[Array, "B T q_rank"]:
        """Compute the normalized latents. ``b`` expands these latents to the queries."""
        return self.norm(self.a(x))


@dataclasses.dataclass(frozen=True)
class MLADims:
    """Sizes of the projections of `MLA`.

    Attributes:
        dim: Width of the activations, D.
        heads: Number of heads, N.
        q_rank: Rank of the query projection. ``None`` for full rank.
        kv_rank: Width of the key/value latents.
        nope: Number of query and key components without rotation.
        rope: Number of rotated query and key components.
        v_dim: Width of a value head.
        eps: Epsilon for the latent norms.
    """

    dim: int
    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    v_dim: int
    eps: float = LATENT_NORM_EPS


class MLA(nnx.Module):
    """Latent attention with kernels ``kv_a [kv_rank + rope, D]``, ``kv_b [N, nope + v, kv_rank]``, ``o [D, N, v]``.

    Args:
        dims: Sizes of the projections.
        scale: Scale factor for the scores.
        bias: Whether the down projections and the output projection have a bias.
        rotary, rotate: See `GQA`.
        mla: Implementation of latent attention.
        attention_fn: Implementation of softmax attention.
        gate, sinks: See `GQA`. The query projection has no extra outputs for the gate.
        **kw: Parameter dtype and rngs.
    """

    supports_context_parallel: ClassVar[bool] = True  # whether mesh axis ``context`` may shard the tokens

    def __init__(
        self,
        dims: MLADims,
        *,
        scale: float,
        bias: bool,
        rotary: Rope | None,
        rotate: RotateFn,
        mla: MLAFn,
        attention_fn: AttentionFn,
        gate: Gate | None = None,
        sinks: Callable[[], Array] | None = None,
        **kw: Unpack[ParamOptions],
    ):
        dim, heads = dims.dim, dims.heads
        self.nope, self.kv_rank, self.scale = dims.nope, dims.kv_rank, scale
        self.rotary, self.rotate, self.gate, self.sinks = rotary, rotate, gate, sinks
        self.mla, self.attention_fn = mla, attention_fn
        if dims.q_rank is None:
            self.q = Linear((dim,), (heads, dims.nope + dims.rope), ("embed", "heads", "head"), **kw)
        else:
            self.q = LowRankQuery(dim, dims.q_rank, heads, dims.nope + dims.rope, bias=bias, eps=dims.eps, **kw)
        self.kv_a = Linear((dim,), (dims.kv_rank + dims.rope,), ("embed", "latent"), bias=bias, **kw)
        self.kv_norm = RMSNorm(dims.kv_rank, dims.eps, **kw)
        self.kv_b = Linear((dims.kv_rank,), (heads, dims.nope + dims.v_dim), ("kv_rank", "heads", "head"), **kw)
        self.o = Linear((heads, dims.v_dim), (dim,), ("heads", "head", "embed"), bias=bias, **kw)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: TokenCache | None = None
    ) -> tuple[Float[Array, "B T_out D"], TokenCache | None]:
        cache, latents, mask = context.append_to_cache(cache, self.project_latents(x, context=context), window=None)
        x = context.output_tokens(x)
        heads = self._attend(self.q(x), latents, mask, context, self.attention_fn)
        return self.project_out(x, heads), cache

    def project_latents(self, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T latent_and_rope"]:
        """Compute each token's cache entry: the normalized latent and the rotated key."""
        latent, k_rope = jnp.split(self.kv_a(x), [self.kv_rank], axis=-1)
        k_rope = context.rotate(k_rope[:, :, None, :], self.rotary, self.rotate)[:, :, 0, :]
        return checkpoint_name(jnp.concatenate([self.kv_norm(latent), k_rope], axis=-1), "latents")

    def _attend(
        self,
        q: Float[Array, "B T_out N H"],
        latents: Float[Array, "B S latent_and_rope"],
        mask: Mask,
        context: Context,
        attention_fn: AttentionFn,
    ) -> Float[Array, "B T_out N v"]:
        """Rotate the queries and compute the head outputs."""
        q_nope, q_rope = jnp.split(checkpoint_name(q, "queries"), [self.nope], axis=-1)
        q_rope = context.rotate(q_rope, self.rotary, self.rotate)
        inputs = MLAInputs(q_nope, q_rope, latents, self.kv_b.weight())
        softmax = MaskedSoftmax(mask, self.scale, sinks=None if self.sinks is None else self.sinks())
        if isinstance(attention_fn, ContextParallelAttention):
            return attention_fn.attend_latents(self.mla, inputs, softmax)
        return self.mla(inputs, softmax, attention_fn)

    def project_out(
        self, x: Float[Array, "B T_out D"], heads: Float[Array, "B T_out N v"]
    ) -> Float[Array, "B T_out D"]:
        """Apply the gate and the output projection. ``x`` is the layer's input."""
        heads = checkpoint_name(heads, "head_outputs")
        if self.gate is not None:
            heads = self.gate(x, heads[..., :0], heads)
        return self.o(heads)

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> TokenCache:
        """Create a cache with one slot per token, for latents and rotated keys."""
        return TokenCache(jnp.zeros((batch, capacity, self.kv_a.outs[0]), dtype))


class PositionScaledMLA(MLA):
    """`MLA` with `scale_by_position` applied to the queries (Mistral Small 4)."""

    def __init__(self, dims: MLADims, *, beta: float, original: int, **options: Any):
        super().__init__(dims, **options)
        self.beta, self.original = beta, original

    def _attend(
        self, q: Float[Array, "B T_out N H"], latents: Array, mask: Mask, context: Context, attention_fn: AttentionFn
    ) -> Float[Array, "B T_out N v"]:
        q = scale_by_position(q, context, self.beta, self.original)
        return super()._attend(q, latents, mask, context, attention_fn)
