"""A factor of a layer's output (Gemma 4, 2026)."""

from typing import Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions, parameter


class Factor(nnx.Variable):
    """A number ``[1]`` that nothing trains."""


class OutputScale(nnx.Module):
    """``x * factor``, in ``x``'s dtype."""

    def __init__(self, **kw: Unpack[ParamOptions]):
        self.factor = parameter((1,), (None,), nnx.initializers.ones, kind=Factor, **kw)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return x * jnp.broadcast_to(self.factor[...].astype(x.dtype), x.shape)
