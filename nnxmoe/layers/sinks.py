"""Attention sinks (gpt-oss 2025; Xiao et al. 2023)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import parameter


class Sinks(nnx.Module):
    """One trained score ``[N]`` per query head, of a key without a value that every query sees: it takes a share of the
    softmax and is not scaled (see `Scores`)."""

    def __init__(self, heads: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        self.scores = parameter((heads,), ("heads",), nnx.initializers.zeros, dtype=dtype, rngs=rngs)

    def __call__(self) -> Float[Array, "N"]:
        return self.scores[...]
