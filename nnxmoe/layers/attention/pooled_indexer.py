"""Indexers that select pools of consecutive keys (GLM-5.3, 2026; Qwen3.8-Flash-Next, 2026)."""

from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import ParamOptions, parameter
from nnxmoe.layers.attention.block_indexer import BlockIndexer
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
    tokens of the pool, separately for each component. If the query is not the last token of its pool, it also attends
    to the tokens of this pool up to itself. Keys are not rotated. Source: ``Glm5NextTextIndexer`` in transformers 5.24.

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
        q, weights, count = self.q(q_latent), self.weights(x), (topk - self.pool + 1) // self.pool

        def pool_keys(slots: Int[Array, "B P pool"]) -> Float[Array, "B P H"]:
            return self._pool_keys(gather_tokens(keys, slots))

        return select_pools(q, weights, pool_keys, mask, keys.shape[1], pool=self.pool, count=count)

    def _pool_keys(self, keys: Float[Array, "B P pool both"]) -> Float[Array, "B P H"]:
        keys, gates = jnp.split(keys, 2, axis=-1)
        weights = jax.nn.softmax(gates.astype(jnp.float32) + self.place[...].astype(jnp.float32), axis=2)
        return jnp.sum(weights.astype(keys.dtype) * keys, axis=2)


class MeanPoolIndexer(BlockIndexer):
    """`BlockIndexer` that selects the same blocks for all heads, by mean keys (Qwen3.8-Flash-Next, 2026).

    The key of a block is the mean of its token keys. The mean is normalized, and rotated by the position of the block's
    first token. The score of a block is the sum of ``relu(q · key)`` over the queries of a token. Only complete blocks
    are selected. If the query is not the last token of its block, it also attends to the tokens of this block up to
    itself. `select_pools` treats the blocks as pools. Source: ``Qwen4ExpTextQSAIndexer`` in transformers 5.24.
    """

    @property
    def groups(self) -> int:
        return 1

    @property
    def topk(self) -> int:
        return super().topk + self.blocks.size - 1

    def keys(self, x: Float[Array, "B T D"], context: Context) -> tuple[Float[Array, "B T H"], Int[Array, "B T 1"]]:
        """Compute the key of each token before norm and rotation, and the position of each token."""
        assert context.positions is not None
        return self.k(x), jnp.broadcast_to(context.positions, x.shape[:2])[..., None]

    def empty_keys(self, batch: int, capacity: int, dtype: jnp.dtype) -> tuple[Array, Array]:
        return super().empty_keys(batch, capacity, dtype), jnp.zeros((batch, capacity, 1), jnp.int32)

    def select(
        self,
        x: Float[Array, "B T_out D"],
        keys: tuple[Float[Array, "B S H"], Int[Array, "B S 1"]],
        mask: Mask,
        context: Context,
    ) -> SelectedSlots:
        """Return the slots of the keys in the selected blocks, then the slots of the query's incomplete block."""
        q = context.rotate(self.q_norm(self.q(x)), self.rotary, self.rotate)
        token_keys, positions = keys

        def pool_keys(slots: Int[Array, "B P pool"]) -> Float[Array, "B P H"]:
            means = jnp.mean(gather_tokens(token_keys, slots).astype(jnp.float32), axis=2).astype(token_keys.dtype)
            rotation = context.rotation_at(self.rotary, gather_tokens(positions[..., 0], slots[..., 0]))
            return self.rotate(self.k_norm(means)[:, :, None], rotation)[:, :, 0]

        weights = jnp.ones(q.shape[:3], q.dtype)
        pool, count = self.blocks.size, self.blocks.count
        return select_pools(q, weights, pool_keys, mask, token_keys.shape[1], pool=pool, count=count)


def select_pools(
    q: Float[Array, "B T N H"],
    weights: Float[Array, "B T N"],
    pool_keys: Callable[[Int[Array, "B P pool"]], Float[Array, "B P H"]],
    mask: Mask,
    size: int,
    *,
    pool: int,
    count: int,
) -> SelectedSlots:
    """Select the ``count`` pools with the highest scores of `select_keys`, and each query's own incomplete pool.

    Args:
        q: Queries.
        weights: Weight of each query.
        pool_keys: Function that computes the key of each pool from the slots of its tokens.
        mask: Mask of the queries and all slots.
        size: Number of slots.
        pool: Number of tokens per pool.
        count: Number of pools to select.

    Returns:
        The slots of the selected pools, followed by the slots of the query's incomplete pool. The slots are not sorted.
    """
    order, tokens, offset = sort_padding_last(mask.keys, (len(q), size))
    token_count = jnp.sum(tokens.index >= 0, axis=1, keepdims=True)
    is_last = (offset % pool == pool - 1) & (jnp.arange(size) < token_count)
    ends = jax.vmap(lambda row: jnp.nonzero(row, size=size // pool, fill_value=NO_SLOT)[0])(is_last)
    is_pool = ends != NO_SLOT
    token_index = jnp.where(is_pool, ends, pool - 1)[..., None] - jnp.arange(pool - 1, -1, -1)
    slots = gather_tokens(order, token_index)
    ends = token_index[..., -1]
    segment = None if tokens.segment is None else gather_tokens(tokens.segment, ends)
    pools = SlotMetadata(jnp.where(is_pool, ends, -1), None, segment)
    inputs = jax.lax.stop_gradient((q, weights, pool_keys(slots)))
    selected = select_keys(*inputs, Mask(mask.query_index, mask.query_segment, pools, None), count)
    selected_slots = gather_slots(slots, selected).reshape(*selected.shape[:2], -1)
    local_slots = _local_slots(jnp.broadcast_to(mask.query_index, selected.shape[:2]), offset, order, pool)
    return jnp.concatenate([selected_slots, local_slots], axis=-1).astype(jnp.int32)


def _local_slots(
    index: Int[Array, "B T"], offset: Int[Array, "B S"], order: Int[Array, "B S"], pool: int
) -> SelectedSlots:
    """Return the slots of each query's pool up to the query, or `NO_SLOT` if the query is the pool's last token."""
    distance = jnp.arange(pool - 1)
    count = (gather_tokens(offset, jnp.maximum(index, 0)) + 1) % pool
    slots = gather_tokens(order, jnp.maximum(index[..., None] - distance, 0))
    return jnp.where((distance < count[..., None]) & (index >= 0)[..., None], slots, NO_SLOT)
