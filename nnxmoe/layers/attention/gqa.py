"""Grouped-query attention (Ainslie et al. 2023), with sliding window, query-key norm, sinks and gate."""

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

Heads = Float[Array, "B asked N _"]
KeysValuesMask = tuple[Float[Array, "B K S H"], Float[Array, "B K S W"], Mask]


class AllHeadsNorm(RMSNorm):
    """`RMSNorm` over all heads of a token, with a scale ``[N * H]``.

    If heads are sharded, the partitioner sums the squares of all shards, because the mean is over the global array.
    """

    def __call__(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        return super().__call__(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


class QKNorm(nnx.Module):
    """Norms of queries ``[B T N H]`` and keys ``[B T K H]`` before the rotation (Henry et al. 2020)."""

    def __init__(self, q: RMSNorm, k: RMSNorm):
        self.q, self.k = q, k

    @classmethod
    def per_head(cls, head_dim: int, eps: float, *, norm: type[RMSNorm] = RMSNorm, **kw: Unpack[ParamOptions]) -> Self:
        """Create norms of each head. All heads share a scale ``[H]`` (Qwen3 technical report, 2025)."""
        return cls(*(norm(head_dim, eps, **kw) for _ in "qk"))

    @classmethod
    def all_heads(cls, heads: int, kv_heads: int, head_dim: int, eps: float, **kw: Unpack[ParamOptions]) -> Self:
        """Create norms over all heads, with scales ``[N * H]`` and ``[K * H]`` (OLMoE; Muennighoff et al. 2024)."""
        return cls(*(AllHeadsNorm(count * head_dim, eps, **kw) for count in (heads, kv_heads)))

    def __call__(
        self, q: Float[Array, "B asked N H"], k: Float[Array, "B T K H"]
    ) -> tuple[Float[Array, "B asked N H"], Float[Array, "B T K H"]]:
        return self.q(q), self.k(k)


class Sinks(nnx.Module):
    """Trained score ``[N]``, per query head, of an extra key without a value (gpt-oss 2025; Xiao et al. 2023).

    Every query attends to the extra key. The score is not multiplied by the scale; see `MaskedSoftmax`.
    """

    def __init__(self, heads: int, **kw: Unpack[ParamOptions]):
        self.scores = parameter((heads,), ("heads",), nnx.initializers.zeros, **kw)

    def __call__(self) -> Float[Array, "N"]:
        return self.scores[...]


class Gate(Protocol):
    """Protocol of gates. A gate scales the outputs of the heads before the output projection.

    ``x`` is the layer's input. ``gate_inputs`` are the outputs of the query projection for the gate.

    Attributes:
        q_width: Number of outputs per head that the query projection computes for the gate, after the query's outputs.
    """

    @property
    def q_width(self) -> int: ...

    def __call__(self, x: Float[Array, "B asked D"], gate_inputs: Heads, heads: Heads) -> Heads: ...


@dataclasses.dataclass(frozen=True)
class QueryGate:
    """Gate ``heads * sigmoid(gate_inputs)``. The query projection has H more outputs per head (Qwen3-Next)."""

    q_width: int

    def __call__(self, x: Float[Array, "B asked D"], gate_inputs: Heads, heads: Heads) -> Heads:
        return heads * jax.nn.sigmoid(gate_inputs)


class OutputGate(nnx.Module):
    """Gate ``heads * activation(g(x))`` with a projection ``g`` (Qiu et al. 2025).

    Args:
        dim: Width of the layer's input, D.
        heads: Number of query heads, N.
        width: Outputs of g per head: the width of a head, or 1 for one factor per head.
        activation: Activation of the gate.
        **kw: The dtype and rngs of the parameters.
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

    def __call__(self, x: Float[Array, "B asked D"], gate_inputs: Heads, heads: Heads) -> Heads:
        return heads * self.activation(self.g(x).astype(jnp.float32)).astype(heads.dtype)


@dataclasses.dataclass(frozen=True)
class ConstantGate:
    """Gate ``heads * factor``. Equivalent to scaling the values by ``factor``."""

    factor: float
    q_width: int = 0

    def __call__(self, x: Float[Array, "B asked D"], gate_inputs: Heads, heads: Heads) -> Heads:
        return heads * self.factor


@dataclasses.dataclass(frozen=True)
class AttentionDims:
    """Sizes of the projections of `GQA`: N query heads and K key/value heads of width H, activations of width D.

    Attributes:
        dim: D.
        heads: N.
        kv_heads: K.
        head_dim: H.
        bias: Whether q, k and v have a bias.
        out_bias: Whether o has a bias. If None, the same as ``bias``.
        scale: Factor of the scores. If None, ``H ** -0.5``. With a different scale, the query kernel is initialized
            such that the scores have the same variance. MaxText uses scale 1 and folds the scale into that kernel.
        value_dim: Width of a value head. If None, H.
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
        rotary: Rotary position embedding of queries and keys. None for no position embedding.
        window: Number of latest keys that a query attends to, including the key of the query's token. None for all.
        attention_fn: Implementation of softmax attention.
        rotate: Rotates queries and keys. It determines how the components of a head are paired.
        qk_norm: Norm of queries and keys before the rotation, a `QKNorm`. None for no norm.
        sinks: Score of an extra key per head, a `Sinks`. None for no extra key.
        gate: Scales the outputs of the heads. None for no gate.
        **kw: The dtype and rngs of the parameters.
    """

    supports_context_parallel: ClassVar[bool] = True  # whether the mesh axis ``context`` may shard the layer's tokens

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
        biased: dict[str, Any] = {"bias": dims.bias, **kw}
        self.q = Linear(
            (dims.dim,), (dims.heads, q_width), ("embed", "heads", "head"), gain=default_scale / self.scale, **biased
        )
        self.k = Linear((dims.dim,), (dims.kv_heads, dims.head_dim), ("embed", "kv_heads", "head"), **biased)
        self.v = Linear((dims.dim,), (dims.kv_heads, value_dim), ("embed", "kv_heads", "head"), **biased)
        out_bias = dims.bias if dims.out_bias is None else dims.out_bias
        self.o = Linear((dims.heads, value_dim), (dims.dim,), ("heads", "head", "embed"), bias=out_bias, **kw)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: TokenCache | None = None
    ) -> tuple[Float[Array, "B asked D"], TokenCache | None]:
        y, cache, _ = self._attend(x, context=context, cache=cache)
        return y, cache

    def _attend(
        self, x: Float[Array, "B T D"], context: Context, cache: Any
    ) -> tuple[Float[Array, "B asked D"], Any, KeysValuesMask]:
        """Return the output, the cache, and the keys, values and mask of the attention."""
        q, gate_inputs = jnp.split(self.q(context.output_tokens(x)), (self.k.outs[1],), axis=-1)
        k, v = self.project_kv(x)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        q = jnp.swapaxes(self.encode_positions(q, context=context), 1, 2)
        k = jnp.swapaxes(context.rotated(k, self.rotary, self.rotate), 1, 2)
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
        """Project keys and values. The norm and the rotation of the keys come later."""
        return self.k(x), self.v(x)

    def encode_positions(self, q: Float[Array, "B asked N H"], context: Context) -> Float[Array, "B asked N H"]:
        """Rotate the queries."""
        return context.rotated(q, self.rotary, self.rotate)

    def _append_to_cache(
        self,
        x: Float[Array, "B T D"],
        k: Float[Array, "B K T H"],
        v: Float[Array, "B K T W"],
        context: Context,
        cache: Any,
    ) -> tuple[Any, Array, Array, Mask, AttentionFn]:
        """Append keys and values to the cache.

        Returns:
            The cache, all keys and values that queries may attend to, their mask, and the attention function.
        """
        cache, (k, v), mask = context.append_to_cache(cache, (k, v), self.window)
        return cache, k, v, mask, self.attention_fn

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> TokenCache:
        """Create a cache with one slot per token. With a window, create a ring of ``window + lookahead`` slots."""
        kv_heads, widths = self.k.outs[0], (self.k.outs[1], self.o.ins[1])
        slots = capacity if self.window is None else min(self.window + lookahead, capacity)
        k, v = (jnp.zeros((batch, kv_heads, slots, width), dtype) for width in widths)
        return TokenCache((k, v), ring=self.window is not None, lookahead=lookahead)


class PositionScaledGQA(GQA):
    """`GQA` with `scale_by_position` applied to the queries (Ministral 3, 2025)."""

    def __init__(self, dims: AttentionDims, *, beta: float, original: int, **options: Any):
        super().__init__(dims, **options)
        self.beta, self.original = beta, original

    def encode_positions(self, q: Float[Array, "B asked N H"], context: Context) -> Float[Array, "B asked N H"]:
        return scale_by_position(super().encode_positions(q, context=context), context, self.beta, self.original)


def scale_by_position(
    q: Float[Array, "B asked N H"], context: Context, beta: float, original: int
) -> Float[Array, "B asked N H"]:
    """Scale queries at position p by ``1 + beta * log(1 + floor(p / original))`` (Llama 4, 2025).

    The factor compensates for more keys than the training length ``original``: the differences between scores grow
    with the position. Unlike a rotation, the factor depends on the absolute position, so left-padded rows without a
    cache need ``positions``.
    """
    assert context.positions is not None
    positions = context.positions[:, -q.shape[1] :, None, None]
    return q * (1 + beta * jnp.log1p((positions // original).astype(jnp.float32))).astype(q.dtype)
