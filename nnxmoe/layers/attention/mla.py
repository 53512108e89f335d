"""Multi-head latent attention (DeepSeek-V2, 2024; DeepSeek-V3 technical report, 2024).

Keys and values are expanded from one small latent per token. ``NaiveMLA`` expands them and attends as usual: fewer
FLOPs for many queries. ``AbsorbedMLA`` applies the expansion to the queries and outputs instead and attends in latent
space, which reads nothing but the cache: faster decoding. Both compute the same function and share the latent cache.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Unpack

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.attention.context_parallel import ContextParallelAttention
from nnxmoe.layers.attention.gqa import Gate
from nnxmoe.layers.attention.softmax_attention import AttentionFn, MaskedSoftmax
from nnxmoe.layers.cache import TokenCache
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.kernel import Kernel
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.rope import RotateFn
from nnxmoe.sharding import is_static

LATENT_NORM_EPS = 1e-6  # not the config's rms_norm_eps, as in the published implementation


@dataclasses.dataclass(frozen=True)
class MLAInputs:
    """Inputs of latent attention: queries in two parts, the latents (each followed by its rotated key), and the kernel
    ``[kv_rank, N * (nope + v)]`` that expands them to keys and values."""

    q_nope: Float[Array, "B T N nope"]
    q_rope: Float[Array, "B T N rope"]
    seen: Float[Array, "B S latent_and_rope"]
    kv_b: Kernel


MLAFn = Callable[[MLAInputs, MaskedSoftmax, AttentionFn], Array]
"""``(inputs, scores, attention_fn) -> o [B T N v]``: attention of queries over latents."""


@dataclasses.dataclass(frozen=True)
class LatentExpansion:
    """``(seen, kv_b) -> k, v``: latents expanded to the keys and values of all heads, in the dtype of the queries."""

    heads: int
    nope: int
    dtype: Any

    def __call__(
        self, seen: Float[Array, "B S latent_and_rope"], kv_b: Kernel
    ) -> tuple[Float[Array, "B N S H"], Float[Array, "B N S v"]]:
        kv_rank = kv_b.shape[0]
        latent, k_rope = seen[..., :kv_rank].astype(self.dtype), seen[..., kv_rank:].astype(self.dtype)
        kv = kv_b(latent).reshape(*latent.shape[:2], self.heads, -1)
        k_nope, v = jnp.split(jnp.swapaxes(kv, 1, 2), [self.nope], axis=-1)
        k_rope = jnp.broadcast_to(k_rope[:, None], (k_rope.shape[0], self.heads, *k_rope.shape[1:]))
        return jnp.concatenate([k_nope, k_rope], axis=-1), v


@dataclasses.dataclass(frozen=True)
class NaiveMLA:
    """Expands every latent to the keys and values of all heads."""

    def __call__(self, x: MLAInputs, scores: MaskedSoftmax, attention_fn: AttentionFn) -> Float[Array, "B T N v"]:
        q = jnp.swapaxes(jnp.concatenate([x.q_nope, x.q_rope], axis=-1), 1, 2)
        return jnp.swapaxes(attention_fn(q, *self.expansion(x)(x.seen, x.kv_b), scores), 1, 2)

    def expansion(self, x: MLAInputs) -> LatentExpansion:
        """How latents become keys and values."""
        return LatentExpansion(x.q_nope.shape[2], x.q_nope.shape[3], x.q_nope.dtype)


@dataclasses.dataclass(frozen=True)
class AbsorbedMLA:
    """Projects queries into the latent space and outputs out of it; all heads share the latents as keys and values."""

    def __call__(self, x: MLAInputs, scores: MaskedSoftmax, attention_fn: AttentionFn) -> Float[Array, "B T N v"]:
        kv_rank, nope, dtype = x.kv_b.shape[0], x.q_nope.shape[-1], x.q_nope.dtype
        values = x.kv_b.shape[1] // x.q_nope.shape[2] - nope
        q_latent = _each_head(
            jnp.swapaxes(x.q_nope, 1, 2), lambda q: x.kv_b.matmul_per_head(q, 0, nope, transpose=True)
        )
        q = jnp.concatenate([q_latent, jnp.swapaxes(x.q_rope, 1, 2)], axis=-1)
        shared = x.seen[:, None].astype(dtype)
        out = attention_fn(q, shared, shared, scores)[..., :kv_rank]  # the rope part of the values is dropped
        return jnp.swapaxes(_each_head(out, lambda o: x.kv_b.matmul_per_head(o, nope, values)), 1, 2)


def _each_head(x: Float[Array, "B N T I"], product: Callable[[Array], Array]) -> Float[Array, "B N T O"]:
    """A product of the rows of all heads ``[N, B * T, I]``."""
    batch, heads, count, width = x.shape
    rows = jnp.swapaxes(x, 0, 1).reshape(heads, batch * count, width)
    return jnp.swapaxes(product(rows).reshape(heads, batch, count, -1), 0, 1)


@dataclasses.dataclass(frozen=True)
class AdaptiveMLA:
    """`AbsorbedMLA` for up to ``max_queries`` tokens per pass (decoding), `NaiveMLA` for more (prefill, training)."""

    max_queries: int = 8

    def __call__(self, x: MLAInputs, scores: MaskedSoftmax, attention_fn: AttentionFn) -> Float[Array, "B T N v"]:
        form = AbsorbedMLA() if self._is_short(x) else NaiveMLA()
        return form(x, scores, attention_fn)

    def expansion(self, x: MLAInputs) -> LatentExpansion | None:
        """As of `NaiveMLA`, if it is used."""
        return None if self._is_short(x) else NaiveMLA().expansion(x)

    def _is_short(self, x: MLAInputs) -> bool:
        return is_static(x.q_nope.shape[1]) and x.q_nope.shape[1] <= self.max_queries


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
        """The normalised latents that the queries are expanded from."""
        return self.norm(self.a(x))


@dataclasses.dataclass(frozen=True)
class MLADims:
    """Sizes of `MLA`: ranks of the latents, and widths of a head's parts without and with rotation and of its values.

    ``q_rank`` None: queries are one full-rank projection. ``eps``: of the norms of the latents.
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
    """Latent attention; kernels ``kv_a [kv_rank + rope, D]``, ``kv_b [N, nope + v, kv_rank]``, ``o [D, N, v]``.

    ``rotary``, ``rotate``, ``gate``: as in `GQA`, but the query kernel has no outputs for the gate. ``bias``: on the
    down-projections and the output only.
    """

    supports_context_parallel: ClassVar[bool] = True  # as in `GQA`

    def __init__(
        self,
        widths: MLADims,
        *,
        scale: float,
        bias: bool,
        rotary: Rope | None,
        rotate: RotateFn,
        mla: MLAFn,
        attention_fn: AttentionFn,
        gate: Gate | None = None,
        **kw: Unpack[ParamOptions],
    ):
        w, dim, heads = widths, widths.dim, widths.heads
        self.nope, self.kv_rank, self.scale = w.nope, w.kv_rank, scale
        self.rotary, self.rotate, self.mla, self.attention_fn, self.gate = rotary, rotate, mla, attention_fn, gate
        if w.q_rank is None:
            self.q = Linear((dim,), (heads, w.nope + w.rope), ("embed", "heads", "head"), **kw)
        else:
            self.q = LowRankQuery(dim, w.q_rank, heads, w.nope + w.rope, bias=bias, eps=w.eps, **kw)
        self.kv_a = Linear((dim,), (w.kv_rank + w.rope,), ("embed", "latent"), bias=bias, **kw)
        self.kv_norm = RMSNorm(w.kv_rank, w.eps, **kw)
        self.kv_b = Linear((w.kv_rank,), (heads, w.nope + w.v_dim), ("kv_rank", "heads", "head"), **kw)
        self.o = Linear((heads, w.v_dim), (dim,), ("heads", "head", "embed"), bias=bias, **kw)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: TokenCache | None = None
    ) -> tuple[Float[Array, "B asked D"], TokenCache | None]:
        cache, seen, mask = context.append_to_cache(cache, self._latents(x, context), window=None)
        asked = context.output_tokens(x)
        return self._out(asked, self._attended(self.q(asked), seen, mask, context, self.attention_fn)), cache

    def _latents(self, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T latent_and_rope"]:
        """Compute what the cache stores per token: its normalised latent and its rotated key."""
        latent, k_rope = jnp.split(self.kv_a(x), [self.kv_rank], axis=-1)
        k_rope = context.rotated(k_rope[:, :, None, :], self.rotary, self.rotate)[:, :, 0, :]
        return checkpoint_name(jnp.concatenate([self.kv_norm(latent), k_rope], axis=-1), "latents")

    def _attended(
        self,
        q: Float[Array, "B asked N H"],
        seen: Float[Array, "B S latent_and_rope"],
        mask: Mask,
        context: Context,
        attention_fn: AttentionFn,
    ) -> Float[Array, "B asked N v"]:
        q_nope, q_rope = jnp.split(checkpoint_name(q, "queries"), [self.nope], axis=-1)
        q_rope = context.rotated(q_rope, self.rotary, self.rotate)
        given = MLAInputs(q_nope, q_rope, seen, self.kv_b.weight()), MaskedSoftmax(mask, self.scale)
        return (
            attention_fn.latents(self.mla, *given)
            if isinstance(attention_fn, ContextParallelAttention)
            else self.mla(*given, attention_fn)
        )

    def _out(self, x: Float[Array, "B asked D"], heads: Float[Array, "B asked N v"]) -> Float[Array, "B asked D"]:
        heads = checkpoint_name(heads, "head_outputs")
        return self.o(heads if self.gate is None else self.gate(x, heads[..., :0], heads))

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> TokenCache:
        """A slot per token, for its latent and its rotated key."""
        return TokenCache(jnp.zeros((batch, capacity, self.kv_a.outs[0]), dtype))
