"""Attention to selected keys in query blocks. No array of size queries x keys is materialized."""

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

NO_SLOT = np.iinfo(np.int32).max  # Slot id that marks padding, out of range for every buffer.
MAX_PARTS, MIN_QUERIES = 8, 64  # Limits for parts of a causal pass. A part's keys end at its last query.
GATHER_COST = 80  # On two cores, gathering a key and value takes as long as the products for 80 heads.
BLOCK_SCORES = 2**23  # Maximum number of scores, or gathered values, per query block.
SelectedSlots = Int[Array, "_ _ X"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectedMask(Mask):
    """`Mask` that allows only the selected slots. All other fields are ignored, except the number of keys.

    Attributes:
        slots: Selected slots of each query.
    """

    slots: SelectedSlots | None = None

    def allowed(self) -> Bool[Array, "B T S"]:
        assert self.slots is not None
        return selection_mask(self.slots, self.keys.index.shape[-1])


def selection_mask(selected: SelectedSlots, count: int) -> Bool[Array, "B T count"]:
    """Return whether each of ``count`` slots is selected. Ignores `NO_SLOT`."""
    no_slots = jnp.zeros(count, bool)
    return jax.vmap(jax.vmap(lambda slots: no_slots.at[slots].set(True, mode="drop")))(selected)


@dataclasses.dataclass(frozen=True)
class SparseAttention:
    """Attention of each query to selected keys, computed by `ReferenceAttention` in query blocks.

    If all heads share keys and values (`nnxmoe.AbsorbedMLA`) and gathering is faster, the selected keys are gathered.
    Decoding, for example, then reads only the selected keys. Otherwise, the scores of all keys are masked.

    Attributes:
        selected: Slots of the selected keys per query.
        dense: Attention function for the first ``topk`` queries of a causal pass.
    """

    selected: SelectedSlots
    dense: AttentionFn

    def __call__(self, q: Queries, k: Keys, v: Values, softmax: MaskedSoftmax) -> HeadOutputs:
        mask, topk, outputs = softmax.mask, self.selected.shape[2], []
        if mask.causal:
            prefix = slice(0, topk)
            outputs.append(
                self.dense(q[:, :, prefix], k[:, :, prefix], v[:, :, prefix], softmax.select(prefix, prefix))
            )
        for queries, keys in query_parts(mask, q.shape[2], topk):
            operands = (q[:, :, queries], k[:, :, keys], v[:, :, keys], softmax.select(queries, keys))
            attend = _attend_gathered if _gather_is_faster(*operands[:2], topk) else _attend_masked
            outputs.append(attend(*operands, self.selected[:, queries]))
        return jnp.concatenate(outputs, axis=2)


def _gather_is_faster(q: Queries, k: Keys, topk: int) -> bool:
    """Return whether gathering the selected keys is faster than masking the scores of all keys.

    With 16 heads and 2048 selected keys on two cores, a pass with 4096 queries and keys takes 11.7 s with gathering and
    3.8 s with masking. A pass with 8192 queries and keys takes 21 s with gathering and 14 s with masking.
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
        """Treat each query as a separate batch row, because each query attends to different keys."""
        batch, length, heads, width = q.shape
        slot_indices = jnp.minimum(selected, size - 1).reshape(batch, length * topk)
        k_rows, v_rows = (gather_tokens(x[:, 0], slot_indices).reshape(batch * length, 1, topk, -1) for x in (k, v))
        slots = SlotMetadata(jnp.where(selected == NO_SLOT, -1, 0).reshape(batch * length, topk), None, None)
        mask = Mask(jnp.zeros((1,), jnp.int32), None, slots, None)
        rows = q.reshape(batch * length, heads, 1, width)
        outputs = ReferenceAttention()(rows, k_rows, v_rows, dataclasses.replace(softmax, mask=mask))
        return outputs.reshape(batch, length, heads, -1)

    block = BLOCK_SCORES // (k.shape[0] * topk * k.shape[3])
    return jnp.swapaxes(map_blocks(attend_block, block, jnp.swapaxes(q, 1, 2), selected), 1, 2)


def query_parts(mask: Mask, length: int, topk: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of queries, each with the slice of keys that the queries may attend to.

    The first ``topk`` queries of a causal pass are omitted, because these queries attend to all earlier keys.
    """
    start = topk if mask.causal else 0
    num_parts = min(MAX_PARTS, max(1, (length - start) // MIN_QUERIES)) if mask.causal else 1
    for i in range(num_parts):
        queries = slice(start + i * (length - start) // num_parts, start + (i + 1) * (length - start) // num_parts)
        yield queries, slice(0, queries.stop if mask.causal else mask.keys.index.shape[-1])


def map_blocks(run: Callable[..., Array], block: int, *arrays: Array) -> Array:
    """Apply ``run`` to the arrays ``[B, T, …]`` in blocks of up to ``block`` queries."""
    length = arrays[0].shape[1]
    if length <= block:
        return run(*arrays)
    return map_chunks(lambda *block_arrays: (run(*block_arrays), ()), -(-length // max(block, 1)), *arrays)[0]
