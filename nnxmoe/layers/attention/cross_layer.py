"""Attention to the keys and values of an earlier layer (Gemma 3n, 2025; Gemma 4 E2B, E4B), and value normalization."""

from typing import Any, ClassVar, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.attention.gqa import GQA, AttentionDims, KeysValuesMask
from nnxmoe.layers.attention.softmax_attention import AttentionFn, MaskedSoftmax
from nnxmoe.layers.cache import TokenCache
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import RMSNorm, rms_normalize
from nnxmoe.layers.rope import rotate_halves


class ValueNormGQA(GQA):
    """`GQA` with values normalized per head, without a scale (Gemma 4, 2026).

    Args:
        dims: Sizes of the projections.
        keys_as_values: Whether to use the keys, before norm and rotation, as values instead of a separate projection
            ``v``.
        eps: Epsilon for the value norm.
        **options: Arguments of `GQA`.
    """

    def __init__(self, dims: AttentionDims, *, keys_as_values: bool, eps: float, **options: Any):
        super().__init__(dims, **options)
        self.keys_as_values, self.eps = keys_as_values, eps
        if keys_as_values:
            del self.v

    def project_kv(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K W"]]:
        k = self.k(x)
        return k, rms_normalize(k if self.keys_as_values else self.v(x), self.eps)

    def attend_and_share(
        self, x: Float[Array, "B T D"], context: Context, cache: TokenCache | None
    ) -> tuple[Float[Array, "B T_out D"], TokenCache | None, KeysValuesMask]:
        """Return the output, the cache, and the keys, values and mask that later `CrossLayerAttention` layers use."""
        return self._attend(x, context=context, cache=cache)


class CrossLayerAttention(nnx.Module):
    """Attention to the keys and values of an earlier layer, with query and output projections but no cache.

    Args:
        dims: Sizes of the projections.
        rotary: Rotary position embedding of the queries.
        window: Sliding window size of the earlier layer, if any. Only `score_ops` uses the window.
        attention_fn: Implementation of softmax attention.
        eps: Epsilon for the query norm.
        **kw: Parameter dtype and rngs.
    """

    supports_context_parallel: ClassVar[bool] = True  # whether mesh axis ``context`` may shard the tokens

    def __init__(
        self,
        dims: AttentionDims,
        *,
        rotary: Rope,
        window: int | None,
        attention_fn: AttentionFn,
        eps: float,
        **kw: Unpack[ParamOptions],
    ):
        self.rotary, self.window, self.attention_fn = rotary, window, attention_fn
        self.scale = dims.head_dim**-0.5 if dims.scale is None else dims.scale
        head_shape, axes = (dims.heads, dims.head_dim), ("heads", "head")
        self.q = Linear((dims.dim,), head_shape, ("embed", *axes), bias=dims.bias, **kw)
        self.q_norm = RMSNorm(dims.head_dim, eps, **kw)
        self.o = Linear(head_shape, (dims.dim,), (*axes, "embed"), bias=dims.bias, **kw)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KeysValuesMask | None = None
    ) -> tuple[Float[Array, "B T_out D"], KeysValuesMask]:
        """Attend to ``cache``: the keys, values and mask of the earlier layer."""
        assert cache is not None
        k, v, mask = cache
        mask = context.output_queries(mask)
        q = context.rotate(self.q_norm(self.q(context.output_tokens(x))), self.rotary, rotate_halves)
        heads = self.attention_fn(jnp.swapaxes(q, 1, 2), k, v, MaskedSoftmax(mask, self.scale))
        return self.o(jnp.swapaxes(heads, 1, 2)), cache

    def score_ops(self, num_keys: float) -> list[tuple[int, float]]:
        """Return (multiplications per query-key pair, keys per query) for queries that follow ``num_keys`` tokens."""
        heads, width = self.q.outs
        return [(2 * heads * width, min(self.window or num_keys, num_keys))]

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> tuple[()]:
        return ()
