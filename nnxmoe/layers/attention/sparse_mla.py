"""Latent attention to the keys that an indexer chooses (DeepSeek-V3.2, 2025; GLM-5, 2026)."""

from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxmoe.layers.attention.indexer import Indexer, SelectedSlots, SparseAttention
from nnxmoe.layers.attention.mla import MLA, LowRankQuery, MLADims
from nnxmoe.layers.cache import TokenCache
from nnxmoe.layers.context import Context


class SparseMLA(MLA):
    """`MLA` whose queries attend to ``topk`` keys each, chosen by ``indexer``, or by that of an earlier layer if it is
    None. Equal to `MLA`, also in the last bit, where no more than ``topk`` keys are there."""

    supports_context_parallel: ClassVar[bool] = False

    def __init__(self, widths: MLADims, *, indexer: Indexer | None, topk: int, **options: Any):
        super().__init__(widths, **options)
        self.indexer, self.topk = indexer, topk

    def __call__(self, x: Float[Array, "B T D"], context: Context, cache: Any = None) -> tuple[Any, Any]:
        y, _, cache = self.attend_sparse(x, None, context=context, cache=cache)
        return y, cache

    def attend_sparse(
        self, x: Float[Array, "B T D"], chosen: SelectedSlots | None, context: Context, cache: Any
    ) -> tuple[Float[Array, "B asked D"], SelectedSlots | None, Any]:
        """Output, the keys that it attends to, and the cache. ``chosen``: those of the layer before, which are returned
        unchanged where all keys are attended to. Raises ValueError if neither layer has an indexer."""
        assert isinstance(self.q, LowRankQuery)
        latent, new, keys = self.q.latent(context.output_tokens(x)), self._latents(x, context), None
        if self.indexer is None:
            cache, seen, mask = context.append_to_cache(cache, new, window=None)
        else:
            new = new, self.indexer.keys(x, context=context)
            cache, (seen, keys), mask = context.append_to_cache(cache, new, window=None)
        asked, attention_fn, chosen = (
            context.output_tokens(x),
            self.attention_fn,
            None if chosen is None else context.output_tokens(chosen),
        )
        if seen.shape[1] > self.topk:
            if self.indexer is not None and keys is not None:
                chosen = self.indexer.choose(asked, latent, keys, mask=mask, topk=self.topk, context=context)
            if chosen is None:
                raise ValueError("a layer without an indexer needs the keys that an earlier layer has chosen")
            attention_fn = SparseAttention(chosen, self.attention_fn)
        return self._out(asked, self._attended(self.q.b(latent), seen, mask, context, attention_fn)), chosen, cache

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> TokenCache:
        cache = super().empty_cache(batch, capacity, dtype, lookahead)
        if self.indexer is None:
            return cache
        return TokenCache((cache.buffers, jnp.zeros((batch, capacity, self.indexer.key_width), dtype)))
