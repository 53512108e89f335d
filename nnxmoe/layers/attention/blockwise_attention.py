"""Attention of causal passes in blocks of queries, which skips the scores above the diagonal."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxmoe.config.validate import check_object, set_positive
from nnxmoe.layers.attention.flash_attention import FlashAttention
from nnxmoe.layers.attention.softmax_attention import AttentionFn, MaskedSoftmax, ReferenceAttention
from nnxmoe.sharding import is_static

FEWEST_QUERIES = 64  # per block
FEWEST_TOKENS = 192  # per pass; blocks of a shorter one save too little
MOST_PAIRS = 512 * 512  # of a query and a key per row, in a pass that is not streamed


@dataclasses.dataclass(frozen=True)
class BlockwiseAttention:
    """Splits a causal pass into up to ``blocks`` blocks of at least 64 consecutive queries and runs ``inner`` on each,
    with the keys that the block can attend to; ``long_context`` computes passes of more than 512 x 512 queries and
    keys.

    Blocks above the diagonal are skipped, as in FlashAttention (Dao et al. 2022): of 8 x 8 blocks 36 are computed, and
    the scores of a block stay in the CPU's cache. Short passes with a cache go to ``inner`` unsplit, and so do steps of
    one token. Raises ValueError for arguments of the wrong type.
    """

    inner: AttentionFn = ReferenceAttention()
    blocks: int = 8
    long_context: AttentionFn = FlashAttention()

    def __post_init__(self) -> None:
        set_positive(self, "blocks")
        check_object("BlockwiseAttention", "inner", self.inner, "ReferenceAttention()")
        check_object("BlockwiseAttention", "long_context", self.long_context, "FlashAttention()")

    def __call__(
        self, q: Float[Array, "B N T H"], k: Float[Array, "B K S H"], v: Float[Array, "B K S Hv"], scores: MaskedSoftmax
    ) -> Float[Array, "B N T Hv"]:
        length, mask = q.shape[2], scores.mask
        if not is_static(length, k.shape[2]):
            return self.inner(q, k, v, scores)
        if length > 1 and length * k.shape[2] > MOST_PAIRS:
            return self.long_context(q, k, v, scores)
        if not mask.causal or self.blocks == 1 or length < FEWEST_TOKENS:
            return self.inner(q, k, v, scores)
        blocks, outs = min(self.blocks, length // FEWEST_QUERIES), []
        for i in range(blocks):
            queries = slice(i * length // blocks, (i + 1) * length // blocks)
            # A window counts real tokens, so with padding it may reach further back than its size.
            window = None if mask.keys.valid is not None else mask.window
            first = 0 if window is None else max(queries.start - window + 1, 0)
            keys = slice(first, queries.stop)
            part = scores.part(queries, keys)
            outs.append(self.inner(q[:, :, queries], k[:, :, keys], v[:, :, keys], part))
        return jnp.concatenate(outs, axis=2)
