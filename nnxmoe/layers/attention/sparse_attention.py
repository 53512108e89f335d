"""Attention to selected keys in blocks of queries. No array of size queries x keys is materialized."""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from nnxmoe.layers.attention.softmax_attention import (
    AttentionFn,
    HeadOutputs,
    Keys,
    MaskedSoftmax,
    Queries,
    ReferenceAttention,
    Values,
)
from nnxmoe.layers.cache import SlotMetadata
from nnxmoe.layers.cache_buffer import gather_tokens
from nnxmoe.layers.chunks import map_chunks
from nnxmoe.layers.mask import Mask

NO_SLOT = np.iinfo(np.int32).max  # slot of a missing key, out of range of every buffer
MAX_PARTS, MIN_QUERIES = 8, 64  # parts of a causal pass, and queries per part; a part has the keys up to its last query
GATHER_COST = 80  # gathering a key and its value takes as long as their products with 80 heads, on two cores
BLOCK_SCORES = 2**23  # maximum number of scores, or gathered values, of a block of queries
SelectedSlots = Int[Array, "_ _ X"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectedMask(Mask):
    """`Mask` that allows the selected slots only. The values of all other fields are ignored.

    Attributes:
        slots: Selected slots of each query.
    """

    slots: SelectedSlots | None = None

    def allowed(self) -> Bool[Array, "B T S"]:
        none = jnp.zeros(self.keys.index.shape[-1], bool)
        return jax.vmap(jax.vmap(lambda slots: none.at[slots].set(True, mode="drop")))(self.slots)


@dataclasses.dataclass(frozen=True)
class SparseAttention:
    """Attention of each query to its selected keys, by `ReferenceAttention` in blocks of queries.

    If all heads share their keys and values (`nnxmoe.AbsorbedMLA`) and gathering is faster, the selected keys are
    gathered. For example, decoding then reads the selected keys only. Otherwise the scores of all keys are masked.

    Attributes:
        selected: Slots of the selected keys.
        dense: Computes the first ``topk`` queries of a causal pass.
    """

    selected: SelectedSlots
    dense: AttentionFn

    def __call__(self, q: Queries, k: Keys, v: Values, softmax: MaskedSoftmax) -> HeadOutputs:
        mask, topk, outputs = softmax.mask, self.selected.shape[2], []
        if mask.causal:
            first = slice(0, topk)
            outputs.append(self.dense(q[:, :, first], k[:, :, first], v[:, :, first], softmax.select(first, first)))
        for queries, keys in query_parts(mask, q.shape[2], topk):
            part = (q[:, :, queries], k[:, :, keys], v[:, :, keys], softmax.select(queries, keys))
            attend = _attend_gathered if _gather_is_faster(*part[:2], topk) else _attend_masked
            outputs.append(attend(*part, self.selected[:, queries]))
        return jnp.concatenate(outputs, axis=2)


def _gather_is_faster(q: Queries, k: Keys, topk: int) -> bool:
    """Return whether gathering the selected keys is faster than masking the scores of all keys.

    Measured with 16 heads and 2048 selected keys on two cores: 4096 queries and keys take 11.7 s gathered and 3.8 s
    masked. 8192 queries and keys take 21 s gathered and 14 s masked.
    """
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    return k.shape[1] == 1 and (queries * topk <= keys or topk * (heads + GATHER_COST) < heads * keys)


def _attend_masked(q: Array, k: Array, v: Array, softmax: MaskedSoftmax, selected: SelectedSlots) -> HeadOutputs:
    def attend_block(q: Array, selected: SelectedSlots) -> Array:
        mask = SelectedMask(softmax.mask.query_index, None, softmax.mask.keys, None, slots=selected)
        outputs = ReferenceAttention()(jnp.swapaxes(q, 1, 2), k, v, dataclasses.replace(softmax, mask=mask))
        return jnp.swapaxes(outputs, 1, 2)

    block = max(MIN_QUERIES, BLOCK_SCORES // (k.shape[0] * q.shape[1] * k.shape[2]))
    return jnp.swapaxes(map_blocks(attend_block, block, jnp.swapaxes(q, 1, 2), selected), 1, 2)


def _attend_gathered(q: Array, k: Array, v: Array, softmax: MaskedSoftmax, selected: SelectedSlots) -> HeadOutputs:
    size, topk = k.shape[2], selected.shape[2]

    def attend_block(q: Array, selected: SelectedSlots) -> Array:
        """Attend with each query as a separate row of the batch, because each query has different keys."""
        batch, length, heads, width = q.shape
        places = jnp.minimum(selected, size - 1).reshape(batch, length * topk)
        k_near, v_near = (gather_tokens(x[:, 0], places).reshape(batch * length, 1, topk, -1) for x in (k, v))
        slots = SlotMetadata(jnp.where(selected == NO_SLOT, -1, 0).reshape(batch * length, topk), None, None)
        mask = Mask(jnp.zeros((1,), jnp.int32), None, slots, None)
        rows = q.reshape(batch * length, heads, 1, width)
        outputs = ReferenceAttention()(rows, k_near, v_near, dataclasses.replace(softmax, mask=mask))
        return outputs.reshape(batch, length, heads, -1)

    block = BLOCK_SCORES // (k.shape[0] * topk * k.shape[3])
    return jnp.swapaxes(map_blocks(attend_block, block, jnp.swapaxes(q, 1, 2), selected), 1, 2)


def query_parts(mask: Mask, length: int, topk: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the queries, with the slice of keys that these queries may attend to.

    The first ``topk`` queries of a causal pass are omitted, because they attend to all earlier keys.
    """
    first = topk if mask.causal else 0
    count = min(MAX_PARTS, max(1, (length - first) // MIN_QUERIES)) if mask.causal else 1
    for i in range(count):
        queries = slice(first + i * (length - first) // count, first + (i + 1) * (length - first) // count)
        yield queries, slice(0, queries.stop if mask.causal else mask.keys.index.shape[-1])


def map_blocks(run: Callable[..., Array], block: int, *arrays: Array) -> Array:
    """Apply ``run`` to the arrays ``[B, T, …]`` in blocks of up to ``block`` queries."""
    length = arrays[0].shape[1]
    if length <= block:
        return run(*arrays)
    return map_chunks(lambda *part: (run(*part), ()), -(-length // max(block, 1)), *arrays)[0]
