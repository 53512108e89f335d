"""Latent attention to keys selected by an indexer (DeepSeek-V3.2, 2025; GLM-5, 2026)."""

from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxmoe.layers.attention.indexer import Indexer
from nnxmoe.layers.attention.mla import MLA, LowRankQuery, MLADims
from nnxmoe.layers.attention.sparse_attention import SelectedSlots, SparseAttention
from nnxmoe.layers.cache import TokenCache
from nnxmoe.layers.context import Context


class SparseMLA(MLA):
    """`MLA` with up to ``topk`` selected keys per query.

    The outputs are bitwise equal to the outputs of `MLA` if there are at most ``topk`` keys.

    Args:
        dims: Sizes of the projections.
        indexer: Selects the keys. If ``None``, the layer reuses the selection of an earlier layer.
        topk: Number of keys per query.
        **options: Arguments of `MLA`.
    """

    supports_context_parallel: ClassVar[bool] = False

    def __init__(self, dims: MLADims, *, indexer: Indexer | None, topk: int, **options: Any):
        super().__init__(dims, **options)
        self.indexer, self.topk = indexer, topk

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: TokenCache | None = None
    ) -> tuple[Float[Array, "B T_out D"], TokenCache | None]:
        y, _, cache = self.attend_sparse(x, None, context=context, cache=cache)
        return y, cache

    def attend_sparse(
        self, x: Float[Array, "B T D"], selected: SelectedSlots | None, context: Context, cache: TokenCache | None
    ) -> tuple[Float[Array, "B T_out D"], SelectedSlots | None, TokenCache | None]:
        """Attend to selected keys.

        Args:
            x: Input of the layer.
            selected: Slots that an earlier layer selected, if any.
            context: Context of the layer.
            cache: Cache of the layer, if any.

        Returns:
            The output, the selected slots and the cache. If there are at most ``topk`` keys, queries attend to all
            keys, and ``selected`` is returned unchanged.

        Raises:
            ValueError: If there are more than ``topk`` keys, but neither an indexer nor ``selected``.
        """
        assert isinstance(self.q, LowRankQuery)
        q_latent = self.q.latent(context.output_tokens(x))
        latents = self.project_latents(x, context=context)
        index_keys = None
        if self.indexer is None:
            cache, latents, mask = context.append_to_cache(cache, latents, window=None)
        else:
            new_values = latents, self.indexer.keys(x, context=context)
            cache, (latents, index_keys), mask = context.append_to_cache(cache, new_values, window=None)
        x, attention_fn = context.output_tokens(x), self.attention_fn
        selected = None if selected is None else context.output_tokens(selected)
        if latents.shape[1] > self.topk:
            if self.indexer is not None and index_keys is not None:
                selected = self.indexer.select(x, q_latent, index_keys, mask=mask, topk=self.topk, context=context)
            if selected is None:
                raise ValueError("no keys are selected: this layer or an earlier layer must have an indexer")
            attention_fn = SparseAttention(selected, self.attention_fn)
        heads = self._attend(self.q.b(q_latent), latents, mask, context, attention_fn)
        return self.project_out(x, heads), selected, cache

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> TokenCache:
        """Create a cache with one slot per token, for latents, rotated keys and indexer keys."""
        cache = super().empty_cache(batch, capacity, dtype, lookahead)
        if self.indexer is None:
            return cache
        return TokenCache((cache.buffers, jnp.zeros((batch, capacity, self.indexer.key_width), dtype)))
