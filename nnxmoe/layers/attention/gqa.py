"""Grouped-query attention (Ainslie et al. 2023), with an optional sliding window (Mistral) and normalised heads."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, Unpack

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
from nnxmoe.layers.rope import RotateFn, rotate_halves


class Gate(Protocol):
    """Factors of the heads' outputs y, from the layer's input x, or from ``beside``: the ``extra`` outputs that the
    kernel of the queries has per head for it, after those of the query."""

    @property
    def extra(self) -> int: ...

    def __call__(
        self, x: Float[Array, "B asked D"], beside: Float[Array, "B asked N _"], y: Float[Array, "B asked N H"]
    ) -> Float[Array, "B asked N H"]: ...


@dataclasses.dataclass(frozen=True)
class QueryGate:
    """``y * sigmoid(g)`` with g from the kernel of the queries, H more outputs per head (Qwen3-Next, 2025)."""

    extra: int

    def __call__(
        self, x: Float[Array, "B asked D"], beside: Float[Array, "B asked N H"], y: Float[Array, "B asked N H"]
    ) -> Float[Array, "B asked N H"]:
        return y * jax.nn.sigmoid(beside)


class OutputGate(nnx.Module):
    """``y * activation(g(x))``, with g's own kernel (Qiu et al. 2025); ``width`` 1: a factor per head, else H."""

    extra = 0

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

    def __call__(
        self, x: Float[Array, "B asked D"], beside: Float[Array, "B asked N _"], y: Float[Array, "B asked N H"]
    ) -> Float[Array, "B asked N H"]:
        return y * self.activation(self.g(x).astype(jnp.float32)).astype(y.dtype)


@dataclasses.dataclass(frozen=True)
class ConstantGate:
    """``y * factor``: equal to values scaled by ``factor``."""

    factor: float
    extra: int = 0

    def __call__(
        self, x: Float[Array, "B asked D"], beside: Float[Array, "B asked N _"], y: Float[Array, "B asked N H"]
    ) -> Float[Array, "B asked N H"]:
        return y * self.factor


class Sinks(nnx.Module):
    """One trained score ``[N]`` per query head, of a key without a value that every query sees: it takes a share of the
    softmax and is not scaled (gpt-oss 2025; Xiao et al. 2023; see `MaskedSoftmax`)."""

    def __init__(self, heads: int, **kw: Unpack[ParamOptions]):
        self.scores = parameter((heads,), ("heads",), nnx.initializers.zeros, **kw)

    def __call__(self) -> Float[Array, "N"]:
        return self.scores[...]


@dataclasses.dataclass(frozen=True)
class AttentionDims:
    """N query heads over K key/value heads of width H, for activations of width D: the projections of `GQA`.

    Args:
        bias: whether q, k and v have one.
        out_bias: whether o has one; None: as ``bias``.
        scale: factor of the scores; None: ``H ** -0.5``. With another scale the query kernel is initialised so that the
            scores have the same variance (MaxText folds the scale into that kernel and uses 1).
        value_dim: width of the values; None: H.
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
    """Grouped-query attention; kernels ``q [D N H+extra]``, ``k [D K H]``, ``v [D K W]``, ``o [N W D]``.

    Args:
        rotary: rotary position embedding of queries and keys; None: they carry no position.
        window: number of keys that a query attends to, its own included; None: all.
        rotate: how the rotation pairs the components of a head.
        qk_norm: norm of queries and keys before the rotation, a `QKNorm`.
        sinks: a score per head of a key without value, a `Sinks`; None: a softmax over the keys alone.
        gate: factors of the output of each head, with ``extra`` outputs of q for them; None: no factors.
    """

    supports_context_parallel: ClassVar[bool] = True  # whether the mesh axis ``context`` may shard its tokens

    def __init__(
        self,
        heads: AttentionDims,
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
        self.window = window
        self.attention_fn = attention_fn
        self.rotary, self.rotate = rotary, rotate
        self.qk_norm, self.sinks, self.gate = qk_norm, sinks, gate
        dim, width = (heads.dim,), heads.value_dim or heads.head_dim
        extra = 0 if gate is None else gate.extra
        plain = heads.head_dim**-0.5
        self.scale = plain if heads.scale is None else heads.scale
        biased: dict[str, Any] = {"bias": heads.bias, **kw}
        self.q = Linear(
            dim, (heads.heads, heads.head_dim + extra), ("embed", "heads", "head"), gain=plain / self.scale, **biased
        )
        self.k = Linear(dim, (heads.kv_heads, heads.head_dim), ("embed", "kv_heads", "head"), **biased)
        self.v = Linear(dim, (heads.kv_heads, width), ("embed", "kv_heads", "head"), **biased)
        out_bias = heads.bias if heads.out_bias is None else heads.out_bias
        self.o = Linear((heads.heads, width), dim, ("heads", "head", "embed"), bias=out_bias, **kw)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: TokenCache | None = None
    ) -> tuple[Float[Array, "B asked D"], TokenCache | None]:
        y, cache, _ = self._attended(x, context=context, cache=cache)
        return y, cache

    def _attended(
        self, x: Float[Array, "B T D"], context: Context, cache: Any
    ) -> tuple[Float[Array, "B asked D"], Any, tuple[Array, Array, Any]]:
        """Output, cache, and the keys, values and mask of the tokens that were attended to."""
        q, beside = jnp.split(self.q(context.output_tokens(x)), (self.k.outs[1],), axis=-1)
        k, v = self.keys_and_values(x)
        q, k = (q, k) if self.qk_norm is None else self.qk_norm(q, k)
        q = jnp.swapaxes(self.encode_positions(q, context=context), 1, 2)
        k = jnp.swapaxes(context.rotated(k, self.rotary, self.rotate), 1, 2)
        cache, k, v, mask, attention_fn = self._seen(x, k, jnp.swapaxes(v, 1, 2), context=context, cache=cache)
        q, k, v = checkpoint_name(q, "queries"), checkpoint_name(k, "keys"), checkpoint_name(v, "values")
        y = attention_fn(q, k, v, MaskedSoftmax(mask, self.scale, sinks=None if self.sinks is None else self.sinks()))
        y = checkpoint_name(jnp.swapaxes(y, 1, 2), "head_outputs")
        return self.o(y if self.gate is None else self.gate(context.output_tokens(x), beside, y)), cache, (k, v, mask)

    def keys_and_values(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K W"]]:
        """Keys before their norm and rotation, and values."""
        return self.k(x), self.v(x)

    def _seen(
        self,
        x: Float[Array, "B T D"],
        k: Float[Array, "B K T H"],
        v: Float[Array, "B K T W"],
        context: Context,
        cache: Any,
    ) -> tuple[Any, Array, Array, Mask, AttentionFn]:
        """The cache, the keys and values that the tokens may attend to, the mask over them, and how they attend."""
        cache, (k, v), mask = context.append_to_cache(cache, (k, v), self.window)
        return cache, k, v, mask, self.attention_fn

    def encode_positions(self, q: Float[Array, "B asked N H"], context: Context) -> Float[Array, "B asked N H"]:
        """Queries with their positions."""
        return context.rotated(q, self.rotary, self.rotate)

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> TokenCache:
        """A ring of the window's size and ``lookahead`` slots more if there is a window, else one slot per token."""
        kv_heads, widths = self.k.outs[0], (self.k.outs[1], self.o.ins[1])
        slots = capacity if self.window is None else min(self.window + lookahead, capacity)
        k, v = (jnp.zeros((batch, kv_heads, slots, width), dtype) for width in widths)
        return TokenCache((k, v), ring=self.window is not None, lookahead=lookahead)
