"""Attention to the keys and values of an earlier layer (Gemma 3n, 2025; Gemma 4 E2B and E4B), and normalised values."""

from typing import Any, ClassVar, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.attention.gqa import GQA, AttentionDims
from nnxmoe.layers.attention.softmax_attention import AttentionFn, MaskedSoftmax
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.norm import RMSNorm, rms_normalize
from nnxmoe.layers.rope import rotate_halves

LayerKV = tuple[Float[Array, "B K S H"], Float[Array, "B K S W"], Mask]


class ValueNormGQA(GQA):
    """`GQA` whose values are normalised per head, without a scale (Gemma 4, 2026); other arguments are those of `GQA`.

    ``keys_as_values``: the values are the keys before their norm and rotation, without a kernel of their own.
    """

    def __init__(self, heads: AttentionDims, *, keys_as_values: bool, eps: float, **options: Any):
        super().__init__(heads, **options)
        self.keys_as_values, self.eps = keys_as_values, eps
        if keys_as_values:
            del self.v

    def keys_and_values(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K W"]]:
        k = self.k(x)
        return k, rms_normalize(k if self.keys_as_values else self.v(x), self.eps)

    def attend_sharing_kv(
        self, x: Float[Array, "B T D"], context: Context, cache: Any = None
    ) -> tuple[Float[Array, "B asked D"], Any, LayerKV]:
        """Output, cache, and what `CrossLayerAttention` of later layers attend to."""
        return self._attended(x, context=context, cache=cache)


class CrossLayerAttention(nnx.Module):
    """Queries alone, which attend to what an earlier layer of the same kind attended to; it has no cache.

    Other arguments are those of `GQA`.
    """

    supports_context_parallel: ClassVar[bool] = True  # as in `GQA`

    def __init__(
        self,
        heads: AttentionDims,
        *,
        rotary: Rope,
        window: int | None,
        attention_fn: AttentionFn,
        eps: float,
        **kw: Unpack[ParamOptions],
    ):
        self.rotary, self.window, self.attention_fn = rotary, window, attention_fn
        self.scale = heads.head_dim**-0.5 if heads.scale is None else heads.scale
        size, axes = (heads.heads, heads.head_dim), ("heads", "head")
        self.q = Linear((heads.dim,), size, ("embed", *axes), bias=heads.bias, **kw)
        self.q_norm = RMSNorm(heads.head_dim, eps, **kw)
        self.o = Linear(size, (heads.dim,), (*axes, "embed"), bias=heads.bias, **kw)

    def __call__(self, x: Float[Array, "B T D"], kept: LayerKV, context: Context) -> Float[Array, "B asked D"]:
        k, v, mask = kept
        mask = mask.part(slice(-1, None), slice(None)) if context.last else mask
        q = context.rotated(self.q_norm(self.q(context.output_tokens(x))), self.rotary, rotate_halves)
        return self.o(
            jnp.swapaxes(self.attention_fn(jnp.swapaxes(q, 1, 2), k, v, MaskedSoftmax(mask, self.scale)), 1, 2)
        )

    def score_ops(self, seen: float) -> list[tuple[int, float]]:
        """Multiplications per query and key, and the keys of a query."""
        heads, width = self.q.outs
        return [(2 * heads * width, min(self.window or seen, seen))]

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> tuple[()]:
        return ()
