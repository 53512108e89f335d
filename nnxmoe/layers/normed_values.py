"""Grouped-query attention with normalised values, which may be its keys (Gemma 4, 2026)."""

from typing import Any

from jaxtyping import Array, Float

from nnxmoe.layers.context import Context
from nnxmoe.layers.gqa import GQA, Heads
from nnxmoe.layers.norm import unit_rms
from nnxmoe.layers.reused_keys import Kept


class NormedValues(GQA):
    """`GQA` whose values are normalised per head, without a scale; other arguments are those of `GQA`.

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
