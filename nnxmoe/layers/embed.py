"""Token embedding, which is also the output head of models with tied embeddings."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import parameter
from nnxmoe.layers.kernel import DenseKernel


class Embed(nnx.Module):
    """Table ``[V, D]``: looks up the embeddings of tokens; ``weight`` returns the tied output head."""

    ins_first = False  # whether products with the head are those of Flax, as in the Linen bridge

    def __init__(self, vocab: int, dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        init = nnx.initializers.normal(dim**-0.5)
        self.table = parameter((vocab, dim), ("vocab", "embed"), init, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return jnp.take(self.table[...], tokens, axis=0)

    def weight(self) -> DenseKernel:
        """The table as the kernel ``[D, V]`` of a tied output head."""
        table = self.table[...]
        return DenseKernel(table.T, ins_first=True) if self.ins_first else DenseKernel(table)
