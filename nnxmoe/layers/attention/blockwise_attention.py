"""Causal attention in query blocks. Score blocks above the diagonal are skipped."""

import dataclasses

import jax.numpy as jnp

from nnxmoe.config.arguments import CheckedFields
from nnxmoe.config.validate import set_positive
from nnxmoe.layers.attention.flash_attention import FlashAttention
from nnxmoe.layers.attention.softmax_attention import (
    AttentionFn,
    HeadOutputs,
    Keys,
    MaskedSoftmax,
    Queries,
    ReferenceAttention,
    Values,
)
from nnxmoe.sharding import is_static

MIN_BLOCK = 64  # Minimum number of queries per block.
MIN_TOKENS = 192  # Minimum number of tokens in a split pass. Splitting shorter passes saves too little time.
MAX_PAIRS = 512 * 512  # Maximum number of query-key pairs per row. `long_context` computes larger passes.


@dataclasses.dataclass(frozen=True)
class BlockwiseAttention(CheckedFields):
    """Attention that splits a causal pass into query blocks and passes each block only the keys that it may attend to.

    Score blocks above the diagonal are skipped, as in FlashAttention (Dao et al. 2022). With 8 query blocks, 36 of the
    64 score blocks are computed. The scores of a block fit into the CPU cache. Single-token steps and short passes with
    a cache are not split.

    Args:
        inner: Attention function for a block, and for passes that are not split.
        blocks: Maximum number of blocks. Each block has at least 64 queries.
        long_context: Attention function for passes with more than 512 x 512 query-key pairs.

    Raises:
        ValueError: If ``blocks`` is not a positive integer, or if ``inner`` or ``long_context`` is not callable.
    """

    inner: AttentionFn = ReferenceAttention()
    blocks: int = 8
    long_context: AttentionFn = FlashAttention()

    def __post_init__(self) -> None:
        super().__post_init__()
        set_positive(self, "blocks")

    def __call__(self, q: Queries, k: Keys, v: Values, softmax: MaskedSoftmax) -> HeadOutputs:
        length, mask = q.shape[2], softmax.mask
        if not is_static(length, k.shape[2]):
            return self.inner(q, k, v, softmax)
        if length > 1 and length * k.shape[2] > MAX_PAIRS:
            return self.long_context(q, k, v, softmax)
        if not mask.causal or self.blocks == 1 or length < MIN_TOKENS:
            return self.inner(q, k, v, softmax)
        blocks, outputs = min(self.blocks, length // MIN_BLOCK), []
        for i in range(blocks):
            queries = slice(i * length // blocks, (i + 1) * length // blocks)
            # A window counts real tokens only, so it may span more slots than its size if there is padding.
            window = None if mask.keys.valid is not None else mask.window
            first_key = 0 if window is None else max(queries.start - window + 1, 0)
            keys = slice(first_key, queries.stop)
            block = softmax.select(queries, keys)
            outputs.append(self.inner(q[:, :, queries], k[:, :, keys], v[:, :, keys], block))
        return jnp.concatenate(outputs, axis=2)
