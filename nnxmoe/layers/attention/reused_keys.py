"""Attention to the keys and values of an earlier layer (Gemma 3n, 2025; Gemma 4 E2B and E4B), and normalised values."""

from typing import Any, ClassVar, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.attention.attend import Attend, Scores
from nnxmoe.layers.attention.gqa import GQA, Heads
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.norm import RMSNorm, unit_rms
from nnxmoe.layers.rope import rotate_halves

Kept = tuple[Float[Array, "B K S H"], Float[Array, "B K S W"], Mask]


class NormedValues(GQA):
    """`GQA` whose values are normalised per head, without a scale (Gemma 4, 2026); other arguments are those of `GQA`.

    ``keys_as_values``: the values are the keys before their norm and rotation, without a kernel of their own.
    """

    def __init__(self, heads: Heads, *, keys_as_values: bool, eps: float, **options: Any):
        super().__init__(heads, **options)
        self.keys_as_values, self.eps = keys_as_values, eps
        if keys_as_values:
            del self.v

    def keys_and_values(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K W"]]:
        k = self.k(x)
        return k, unit_rms(k if self.keys_as_values else self.v(x), self.eps)

    def keeping(
        self, x: Float[Array, "B T D"], context: Context, cache: Any = None
    ) -> tuple[Float[Array, "B asked D"], Any, Kept]:
        """Output, cache, and what `ReusedKeys` of later layers attend to."""
        return self._attended(x, context=context, cache=cache)


class ReusedKeys(nnx.Module):
    """Queries alone, which attend to what an earlier layer of the same kind attended to; it has no cache.

    Other arguments are those of `GQA`.
    """

    over_context: ClassVar[bool] = True  # as in `GQA`

    def __init__(
        self, heads: Heads, *, rotary: Rope, window: int | None, attend: Attend, eps: float, **kw: Unpack[ParamOptions]
    ):
        self.rotary, self.window, self.attend = rotary, window, attend
        self.scale = heads.head_dim**-0.5 if heads.scale is None else heads.scale
        size, axes = (heads.heads, heads.head_dim), ("heads", "head")
        self.q = Linear((heads.dim,), size, ("embed", *axes), bias=heads.bias, **kw)
        self.q_norm = RMSNorm(heads.head_dim, eps, **kw)
        self.o = Linear(size, (heads.dim,), (*axes, "embed"), bias=heads.bias, **kw)

    def __call__(self, x: Float[Array, "B T D"], kept: Kept, context: Context) -> Float[Array, "B asked D"]:
        k, v, mask = kept
        mask = mask.part(slice(-1, None), slice(None)) if context.last else mask
        q = context.rotated(self.q_norm(self.q(context.asked(x))), self.rotary, rotate_halves)
        return self.o(jnp.swapaxes(self.attend(jnp.swapaxes(q, 1, 2), k, v, Scores(mask, self.scale)), 1, 2))

    def scored(self, seen: float) -> list[tuple[int, float]]:
        """Multiplications per query and key, and the keys of a query."""
        heads, width = self.q.outs
        return [(2 * heads * width, min(self.window or seen, seen))]

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, spare: int = 0) -> tuple[()]:
        return ()
