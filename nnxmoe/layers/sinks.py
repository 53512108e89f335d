"""Attention sinks (gpt-oss 2025; Xiao et al. 2023)."""

from typing import Unpack

from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions, parameter


class Sinks(nnx.Module):
    """One trained score ``[N]`` per query head, of a key without a value that every query sees: it takes a share of the
    softmax and is not scaled (see `Scores`)."""

    def __init__(self, heads: int, **kw: Unpack[ParamOptions]):
        self.scores = parameter((heads,), ("heads",), nnx.initializers.zeros, **kw)

    def __call__(self) -> Float[Array, "N"]:
        return self.scores[...]
