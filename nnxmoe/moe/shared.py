"""A shared expert whose output is weighted per token."""

from typing import Unpack

import jax
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions
from nnxmoe.layers.linear import Linear
from nnxmoe.layers.mlp import MLP


class GatedShared(MLP):
    """``sigmoid(x @ w) * mlp(x)`` with one gate per token; ``output_gate`` kernel ``[1, D]``, without bias.

    The shared expert of Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024), after transformers' Qwen2MoeSparseMoeBlock.
    """

    def __init__(self, dim: int, width: int, **kw: Unpack[ParamOptions]):
        super().__init__(dim, width, bias=False, **kw)
        self.output_gate = Linear((dim,), (1,), ("embed", "router"), **kw)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return jax.nn.sigmoid(self.output_gate(x)) * super().__call__(x)
