"""Token embedding, which is also the output head of models with tied embeddings."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import parameter
from nnxmoe.layers.linear import matmul_f32


class Embed(nnx.Module):
    """Table ``[V, D]``: a gather on the way in, ``attend`` for tied logits on the way out."""

    def __init__(self, vocab: int, dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        init = nnx.initializers.normal(dim**-0.5)
        self.table = parameter((vocab, dim), ("vocab", "embed"), init, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return jnp.take(self.table[...], tokens, axis=0)

    def attend(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in float32 with the table as the head's weights."""
        return matmul_f32(x, self.table[...].astype(x.dtype), transpose=True)
