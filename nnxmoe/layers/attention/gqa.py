"""Grouped-query attention (Ainslie et al. 2023) with optional sliding window, query-key norm, sinks and gate."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, Self, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions, parameter
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.attention.softmax_attention import AttentionFn, MaskedSoftmax
from nnxmoe.layers.cache import TokenCache
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.rope import RotateFn, rotate_halves

Heads = Float[Array, "B T_out N _"]
KeysValuesMask = tuple[Float[Array, "B K S H"], Float[Array, "B K S W"], Mask]


class AllHeadsNorm(RMSNorm):
    """`RMSNorm` over all heads of a token, with a scale ``[N * H]``.

    The mean is over the global array. If the heads are sharded, the partitioner sums the squares over all shards.
    """

    def __call__(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        return super().__call__(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


class QKNorm(nnx.Module):
    """Norms of queries ``[B T N H]`` and keys ``[B T K H]``, applied before the rotation (Henry et al. 2020)."""

    def __init__(self, q: RMSNorm, k: RMSNorm):
        self.q, self.k = q, k

    @classmethod
    def per_head(cls, head_dim: int, eps: float, *, norm: type[RMSNorm] = RMSNorm, **kw: Unpack[ParamOptions]) -> Self:
        """Create norms per head. All heads share a scale ``[H]`` (Qwen3 technical report, 2025)."""
        return cls(*(norm(head_dim, eps, **kw) for _ in "qk"))

    @classmethod
    def all_heads(cls, heads: int, kv_heads: int, head_dim: int, eps: float, **kw: Unpack[ParamOptions]) -> Self:
        """Create norms over all heads, with scales ``[N * H]`` and ``[K * H]`` (OLMoE; Muennighoff et al. 2024)."""
        return cls(*(AllHeadsNorm(count * head_dim, eps, **kw) for count in (heads, kv_heads)))

    def __call__(
        self, q: Float[Array, "B T_out N H"], k: Float[Array, "B T K H"]
    ) -> tuple[Float[Array, "B T_out N H"], Float[Array, "B T K H"]]:
        return self.q(q), self.k(k)


class Sinks(nnx.Module):
    """Attention sinks: one trained score ``[N]`` per query head (gpt-oss, 2025; Xiao et al. 2023).

    Every query attends to an extra key with this score and no value. The score is not multiplied by the scale of the
    attention scores; see `MaskedSoftmax`.
    """

    def __init__(self, heads: int, **kw: Unpack[ParamOptions]):
        self.scores = parameter((heads,), ("heads",), nnx.initializers.zeros, **kw)

    def __call__(self) -> Float[Array, "N"]:
        return self.scores[...]


class Gate(Protocol):
    """Protocol for gates. A gate scales the head outputs before the output projection.

    ``x`` is the layer's input. ``gate_inputs`` are the extra outputs of the query projection.

    Attributes:
        q_width: Number of extra outputs per head of the query projection, after the query itself.
    """

    @property
    def q_width(self) -> int: ...

    def __call__(self, x: Float[Array, "B T_out D"], gate_inputs: Heads, heads: Heads) -> Heads: ...


@dataclasses.dataclass(frozen=True)
class QueryGate:
    """Gate ``heads * sigmoid(gate_inputs)``. The query projection has H extra outputs per head (Qwen3-Next)."""

    q_width: int

    def __call__(self, x: Float[Array, "B T_out D"], gate_inputs: Heads, heads: Heads) -> Heads:
        return heads * jax.nn.sigmoid(gate_inputs)


class OutputGate(nnx.Module):
    """Gate ``heads * activation(g(x))`` with a projection ``g`` (Qiu et al. 2025).

    Args:
        dim: Width of the layer's input, D.
        heads: Number of query heads, N.
        width: Number of outputs of ``g`` per head: the head width, or 1 for a single factor per head.
        activation: Activation of the gate.
        **kw: Parameter dtype and rngs.
    """

    q_width = 0

    def __init__(
        self,
        dim: int,
        heads: int,
        width: int,
        *,
        activation: Callable[[Array], Array] = jax.nn.sigmoid,
        **kw: Unpack[ParamOptions],
    ):
        self.activation = activation
        self.g = Linear((dim,), (heads, width), ("embed", "heads", "head"), **kw)

    def __call__(self, x: Float[Array, "B T_out D"], gate_inputs: Heads, heads: Heads) -> Heads:
        return heads * self.activation(self.g(x).astype(jnp.float32)).astype(heads.dtype)


@dataclasses.dataclass(frozen=True)
class ConstantGate:
    """Gate ``heads * factor``, equivalent to scaling the values by ``factor``."""

    factor: float
    q_width: int = 0

    def __call__(self, x: Float[Array, "B T_out D"], gate_inputs: Heads, heads: Heads) -> Heads:
        return heads * self.factor


@dataclasses.dataclass(frozen=True)
class AttentionDims:
    """Sizes of the projections of `GQA`.

    Attributes:
        dim: Width of the activations, D.
        heads: Number of query heads, N.
        kv_heads: Number of key/value heads, K.
        head_dim: Width of a query or key head, H.
        bias: Whether ``q``, ``k`` and ``v`` have a bias.
        out_bias: Whether ``o`` has a bias. Defaults to ``bias``.
        scale: Scale factor for the scores. Defaults to ``H ** -0.5``. For any other value, the initialization of the
            query kernel is rescaled to keep the variance of the scores the same. MaxText uses scale 1 and folds the
            default scale into the query kernel.
        value_dim: Width of a value head. Defaults to H.
    """

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    out_bias: bool | None = None
    scale: float | None = None
    value_dim: int | None = None


class GQA(nnx.Module):
    """Grouped-query attention with the linear maps ``q [D N H+q_width]``, ``k [D K H]``, ``v [D K W]``, ``o [N W D]``.

    Args:
        dims: Sizes of the projections.
        rotary: Rotary position embedding of queries and keys. ``None`` disables position embeddings.
        window: Sliding window size: the number of most recent keys that a query attends to, including the key of the
            query's token. ``None`` disables the window.
        attention_fn: Implementation of softmax attention.
        rotate: Function that applies the rotary embedding. Determines how the components of a head are paired.
        qk_norm: Optional `QKNorm`, applied to queries and keys before the rotation.
        sinks: Optional `Sinks`.
        gate: Optional gate of the head outputs.
        **kw: Parameter dtype and rngs.
    """

    supports_context_parallel: ClassVar[bool] = True  # whether mesh axis ``context`` may shard the tokens

    def __init__(
        self,
        dims: AttentionDims,
        *,
        rotary: Rope | None,
        window: int | None,
        attention_fn: AttentionFn,
        rotate: RotateFn = rotate_halves,
        qk_norm: Callable[[Array, Array], tuple[Array, Array]] | None = None,
        sinks: Callable[[], Array] | None = None,
        gate: Gate | None = None,
        **kw: Unpack[ParamOptions],
    ):
        self.window, self.attention_fn = window, attention_fn
        self.rotary, self.rotate = rotary, rotate
        self.qk_norm, self.sinks, self.gate = qk_norm, sinks, gate
        default_scale = dims.head_dim**-0.5
        self.scale = default_scale if dims.scale is None else dims.scale
        q_width = dims.head_dim + (0 if gate is None else gate.q_width)
        value_dim = dims.value_dim or dims.head_dim
        options: dict[str, Any] = {"bias": dims.bias, **kw}
        self.q = Linear(
            (dims.dim,), (dims.heads, q_width), ("embed", "heads", "head"), gain=default_scale / self.scale, **options
        )
        self.k = Linear((dims.dim,), (dims.kv_heads, dims.head_dim), ("embed", "kv_heads", "head"), **options)
        self.v = Linear((dims.dim,), (dims.kv_heads, value_dim), ("embed", "kv_heads", "head"), **options)
        out_bias = dims.bias if dims.out_bias is None else dims.out_bias
        self.o = Linear((dims.heads, value_dim), (dims.dim,), ("heads", "head", "embed"), bias=out_bias, **kw)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: TokenCache | None = None
    ) -> tuple[Float[Array, "B T_out D"], TokenCache | None]:
        y, cache, _ = self._attend(x, context=context, cache=cache)
        return y, cache

    def _attend(
        self, x: Float[Array, "B T D"], context: Context, cache: TokenCache | None
    ) -> tuple[Float[Array, "B T_out D"], TokenCache | None, KeysValuesMask]:
        """Return the output, the cache, and the keys, values and mask that the queries attend to."""
        q, gate_inputs = jnp.split(self.q(context.output_tokens(x)), (self.k.outs[1],), axis=-1)
        k, v = self.project_kv(x)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        q = jnp.swapaxes(self.encode_positions(q, context=context), 1, 2)
        k = jnp.swapaxes(context.rotate(k, self.rotary, self.rotate), 1, 2)
        v = jnp.swapaxes(v, 1, 2)
        cache, k, v, mask, attention_fn = self._append_to_cache(x, k, v, context=context, cache=cache)
        q, k, v = checkpoint_name(q, "queries"), checkpoint_name(k, "keys"), checkpoint_name(v, "values")
        softmax = MaskedSoftmax(mask, self.scale, sinks=None if self.sinks is None else self.sinks())
        heads = jnp.swapaxes(attention_fn(q, k, v, softmax), 1, 2)
        heads = checkpoint_name(heads, "head_outputs")
        if self.gate is not None:
            heads = self.gate(context.output_tokens(x), gate_inputs, heads)
        return self.o(heads), cache, (k, v, mask)

    def project_kv(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K W"]]:
        """Project keys and values. Keys are not yet normalized or rotated."""
        return self.k(x), self.v(x)

    def encode_positions(self, q: Float[Array, "B T_out N H"], context: Context) -> Float[Array, "B T_out N H"]:
        """Rotate the queries."""
        return context.rotate(q, self.rotary, self.rotate)

    def _append_to_cache(
        self,
        x: Float[Array, "B T D"],
        k: Float[Array, "B K T H"],
        v: Float[Array, "B K T W"],
        context: Context,
        cache: TokenCache | None,
    ) -> tuple[TokenCache | None, Array, Array, Mask, AttentionFn]:
        """Append keys and values to the cache.

        Returns:
            The cache, all keys and values that queries may attend to, the mask, and the attention function.
        """
        cache, (k, v), mask = context.append_to_cache(cache, (k, v), self.window)
        return cache, k, v, mask, self.attention_fn

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> TokenCache:
        """Create a cache with one slot per token, or with a window, a ring of ``window + lookahead`` slots."""
        kv_heads, widths = self.k.outs[0], (self.k.outs[1], self.o.ins[1])
        slots = capacity if self.window is None else min(self.window + lookahead, capacity)
        k, v = (jnp.zeros((batch, kv_heads, slots, width), dtype) for width in widths)
        return TokenCache((k, v), ring=self.window is not None, lookahead=lookahead)


class PositionScaledGQA(GQA):
    """`GQA` with `scale_by_position` applied to the queries (Ministral 3, 2025)."""

    def __init__(self, dims: AttentionDims, *, beta: float, original: int, **options: Any):
        super().__init__(dims, **options)
        self.beta, self.original = beta, original

    def encode_positions(self, q: Float[Array, "B T_out N H"], context: Context) -> Float[Array, "B T_out N H"]:
        return scale_by_position(super().encode_positions(q, context=context), context, self.beta, self.original)


def scale_by_position(
    q: Float[Array, "B T_out N H"], context: Context, beta: float, original: int
) -> Float[Array, "B T_out N H"]:
    """Scale queries at position p by ``1 + beta * log(1 + floor(p / original))`` (Llama 4, 2025).

    The factor increases the differences between scores to compensate for contexts longer than the training length
    ``original``. Unlike a rotation, the factor depends on the absolute position, so left-padded rows without a cache
    require ``positions``.
    """
    assert context.positions is not None
    positions = context.positions[:, -q.shape[1] :, None, None]
    return q * (1 + beta * jnp.log1p((positions // original).astype(jnp.float32))).astype(q.dtype)
