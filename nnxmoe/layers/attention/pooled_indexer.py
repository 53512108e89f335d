"""Indexer that selects pools of consecutive keys (GLM-5.3, 2026)."""

from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import ParamOptions, parameter
from nnxmoe.layers.attention.indexer import Indexer, gather_slots, select_keys, sort_padding_last
from nnxmoe.layers.attention.sparse_attention import NO_SLOT, SelectedSlots
from nnxmoe.layers.cache import SlotMetadata
from nnxmoe.layers.cache_buffer import gather_tokens
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.rope import rotate_halves


class PooledIndexer(Indexer):
    """`Indexer` that selects pools of ``pool`` consecutive keys, starting at the first token of each segment.

    A pool's key is the weighted mean of the keys in the pool. The weights are a softmax of ``gate(x) + place`` over the
    tokens of the pool, separately for each component. If the query's own pool is incomplete, the query also attends to
    the tokens of this pool up to the query. Keys are not rotated. Source: ``Glm5NextTextIndexer`` in transformers 5.24.

    Args:
        dim, q_rank, heads, head_dim: See `Indexer`.
        pool: Number of keys per pool.
        **kw: Parameter dtype and rngs.
    """

    def __init__(self, dim: int, q_rank: int, heads: int, head_dim: int, *, pool: int, **kw: Unpack[ParamOptions]):
        super().__init__(dim, q_rank, heads, head_dim, rotary=None, rotate=rotate_halves, **kw)
        self.pool = pool
        self.gate = Linear((dim,), (head_dim,), ("embed", "latent"), **kw)
        self.place = parameter((pool, head_dim), (None, None), nnx.initializers.zeros, **kw)

    @property
    def key_width(self) -> int:
        return 2 * super().key_width

    def keys(self, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T both"]:
        """Compute the key and the gate of each token."""
        return jnp.concatenate([super().keys(x, context=context), self.gate(x)], axis=-1)

    def select(
        self,
        x: Float[Array, "B T_out D"],
        q_latent: Float[Array, "B T_out q_rank"],
        keys: Float[Array, "B S both"],
        mask: Mask,
        topk: int,
        context: Context,
    ) -> SelectedSlots:
        """Return the slots of the keys in the selected pools, followed by the slots of the query's incomplete pool.

        The slots are not sorted. ``topk`` is ``pool`` times the number of pools to select, plus ``pool - 1``.
        """
        batch, size = keys.shape[:2]
        order, tokens, offset = sort_padding_last(mask.keys, (batch, size))
        token_count = jnp.sum(tokens.index >= 0, axis=1, keepdims=True)
        is_last = (offset % self.pool == self.pool - 1) & (jnp.arange(size) < token_count)
        ends = jax.vmap(lambda row: jnp.nonzero(row, size=size // self.pool, fill_value=NO_SLOT)[0])(is_last)
        is_pool = ends != NO_SLOT
        token_index = jnp.where(is_pool, ends, self.pool - 1)[..., None] - jnp.arange(self.pool - 1, -1, -1)
        slots = gather_tokens(order, token_index)
        inputs = self.q(q_latent), self.weights(x), self._pool_keys(gather_tokens(keys, slots))
        ends = token_index[..., -1]
        segment = None if tokens.segment is None else gather_tokens(tokens.segment, ends)
        pools = SlotMetadata(jnp.where(is_pool, ends, -1), None, segment)
        pool_mask = Mask(mask.query_index, mask.query_segment, pools, None)
        selected = select_keys(*jax.lax.stop_gradient(inputs), pool_mask, (topk - self.pool + 1) // self.pool)
        selected_slots = gather_slots(slots, selected).reshape(*selected.shape[:2], -1)
        local_slots = self._own_pool(jnp.broadcast_to(mask.query_index, selected.shape[:2]), offset, order)
        return jnp.concatenate([selected_slots, local_slots], axis=-1).astype(jnp.int32)

    def _pool_keys(self, keys: Float[Array, "B P pool both"]) -> Float[Array, "B P H"]:
        keys, gates = jnp.split(keys, 2, axis=-1)
        weights = jax.nn.softmax(gates.astype(jnp.float32) + self.place[...].astype(jnp.float32), axis=2)
        return jnp.sum(weights.astype(keys.dtype) * keys, axis=2)

    def _own_pool(self, index: Int[Array, "B T"], offset: Int[Array, "B S"], order: Int[Array, "B S"]) -> SelectedSlots:
        """Return the slots of each query's incomplete pool up to the query, or `NO_SLOT` if the pool is complete."""
        distance = jnp.arange(self.pool - 1)
        count = (gather_tokens(offset, jnp.maximum(index, 0)) + 1) % self.pool
        slots = gather_tokens(order, jnp.maximum(index[..., None] - distance, 0))
        return jnp.where((distance < count[..., None]) & (index >= 0)[..., None], slots, NO_SLOT)
