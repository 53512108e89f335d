"""An indexer that chooses groups of neighbouring keys (GLM-5.3, 2026)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import parameter
from nnxmoe.layers.attention.indexer import (
    NO_SLOT,
    Indexer,
    SelectedSlots,
    gather_or_none,
    select_keys,
    sort_padding_last,
)
from nnxmoe.layers.cache import SlotMetadata, gather_tokens
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.rope import rotate_halves


class PooledIndexer(Indexer):
    """Chooses pools of ``pool`` consecutive keys. Each segment is divided into pools from its first token on.

    The key of a pool is the weighted mean of its keys, with a softmax over the pool of ``gate(x) + place`` as weights
    per component. A query in an incomplete pool also attends to the tokens of that pool up to itself. Keys are not
    rotated. Source: ``Glm5NextTextIndexer`` in transformers 5.24.
    """

    def __init__(self, dim: int, q_rank: int, heads: int, head_dim: int, *, pool: int, **kw: Any):
        super().__init__(dim, q_rank, heads, head_dim, rotary=None, rotate=rotate_halves, **kw)
        self.pool = pool
        self.gate = Linear((dim,), (head_dim,), ("embed", "latent"), **kw)
        self.place = parameter((pool, head_dim), (None, None), nnx.initializers.zeros, **kw)

    @property
    def key_width(self) -> int:
        return 2 * super().key_width

    def keys(self, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T both"]:
        return jnp.concatenate([super().keys(x, context=context), self.gate(x)], axis=-1)

    def choose(
        self,
        x: Float[Array, "B asked D"],
        latent: Float[Array, "B asked q_rank"],
        keys: Float[Array, "B S both"],
        mask: Mask,
        topk: int,
        context: Context,
    ) -> SelectedSlots:
        """The slots of the keys in the chosen pools, then those of the query's own pool; in no particular order.

        ``topk``: keys per query: ``pool`` times the number of pools to choose, plus ``pool - 1``.
        """
        batch, size = keys.shape[:2]
        order, tokens, offset = sort_padding_last(mask.keys, (batch, size))
        segment, count = tokens.segment, jnp.sum(tokens.index >= 0, axis=1, keepdims=True)
        last = (offset % self.pool == self.pool - 1) & (jnp.arange(size) < count)
        ends = jax.vmap(lambda row: jnp.nonzero(row, size=size // self.pool, fill_value=NO_SLOT)[0])(last)
        found = ends != NO_SLOT
        places = jnp.where(found, ends, self.pool - 1)[..., None] - jnp.arange(self.pool - 1, -1, -1)
        slots = gather_tokens(order, places)
        given = self.q(latent), self.weights(x), self._pooled(gather_tokens(keys, slots))
        last = places[..., -1]
        of_pools = SlotMetadata(
            jnp.where(found, last, -1), None, None if segment is None else gather_tokens(segment, last)
        )
        pools = Mask(mask.query_index, mask.query_segment, of_pools, None)
        best = select_keys(*jax.lax.stop_gradient(given), pools, (topk - self.pool + 1) // self.pool)
        chosen = gather_or_none(slots, best)
        own = self._own(jnp.broadcast_to(mask.query_index, best.shape[:2]), offset, order)
        return jnp.concatenate([chosen.reshape(*best.shape[:2], -1), own], axis=-1).astype(jnp.int32)

    def _pooled(self, keys: Float[Array, "B P pool both"]) -> Float[Array, "B P H"]:
        keys, gates = jnp.split(keys, 2, axis=-1)
        weights = jax.nn.softmax(gates.astype(jnp.float32) + self.place[...].astype(jnp.float32), axis=2)
        return jnp.sum(weights.astype(keys.dtype) * keys, axis=2)

    def _own(self, index: Int[Array, "B T"], offset: Int[Array, "B S"], order: Int[Array, "B S"]) -> SelectedSlots:
        """The slots of the tokens of each query's pool up to itself; none if it completes the pool."""
        back = jnp.arange(self.pool - 1)
        count = (gather_tokens(offset, jnp.maximum(index, 0)) + 1) % self.pool
        slots = gather_tokens(order, jnp.maximum(index[..., None] - back, 0))
        return jnp.where((back < count[..., None]) & (index >= 0)[..., None], slots, NO_SLOT)
