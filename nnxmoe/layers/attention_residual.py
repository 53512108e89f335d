"""Attention residuals (Kimi team 2026): a module's input is a weighted sum over blocks of earlier layers.

The weights are computed per token by attention over the blocks. Each module has one query vector for all tokens.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions
from nnxmoe.layers.context import Context
from nnxmoe.layers.hyper import collapse_streams
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import RMSNorm


class BlockSums(NamedTuple):
    """Hidden states of a decoder with attention residuals.

    Attributes:
        finished: The embedding, then the sum of the module outputs of each finished block. Empty at first.
        current: Sum of the module outputs of the current block so far. Before the first layer, the embedding.
    """

    finished: Float[Array, "B T blocks D"]
    current: Float[Array, "B T D"]

    def stack(self) -> Float[Array, "B T sums D"]:
        """Return all sums. The current block is last."""
        return jnp.concatenate([self.finished, self.current[:, :, None]], axis=2)

    def start_block(self) -> "BlockSums":
        """Add the current block to the finished blocks, and start an empty block."""
        return BlockSums(self.stack(), jnp.zeros_like(self.current))

    def add(self, y: Float[Array, "B T D"]) -> "BlockSums":
        """Add the output of a module to the current block."""
        return self._replace(current=self.current + y)

    def output_tokens(self, context: Context) -> "BlockSums":
        """Select the tokens whose output is requested."""
        return BlockSums(*map(context.output_tokens, self))


class AttentionResidual(nnx.Module):
    """Weighted sum of the `BlockSums`.

    The weights ``softmax(query @ norm(sums))`` are computed in float32 per token.
    Source: Kimi K3 technical report (arXiv 2607.24653), equations 8 to 10.

    Args:
        dim: Width of the activations, D.
        eps: Epsilon for the norm.
        **kw: Parameter dtype and rngs.
    """

    def __init__(self, dim: int, eps: float, **kw: Unpack[ParamOptions]):
        self.norm = RMSNorm(dim, eps, **kw)
        self.query = Linear((dim,), (1,), ("embed", "router"), **kw)

    def __call__(self, sums: Float[Array, "B T sums D"]) -> Float[Array, "B T D"]:
        keys = self.norm(sums.astype(jnp.float32))
        scores = self.query.weight().matmul_f32(keys, jax.lax.Precision.HIGHEST)[..., 0]
        return collapse_streams(sums, jax.nn.softmax(scores, axis=-1))


class ResidualNorm(RMSNorm):
    """Final norm of a model, applied to an `AttentionResidual` of all blocks."""

    def __init__(self, dim: int, eps: float, **kw: Unpack[ParamOptions]):
        super().__init__(dim, eps, **kw)
        self.residual = AttentionResidual(dim, eps, **kw)

    def __call__(self, x: Float[Array, "B T sums D"]) -> Float[Array, "B T D"]:
        return super().__call__(self.residual(x))
