"""Per-layer embeddings (Gemma 3n, 2025; Gemma 4 E2B and E4B), and a fixed output scale for layers."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import ParamOptions, parameter
from nnxmoe.layers.embed import Embed, ScaledEmbed
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import RMSNorm


class PerLayerEmbed(ScaledEmbed):
    """`ScaledEmbed` with a second table that stores one embedding per token and layer.

    Args:
        vocab: Size of the vocabulary, V.
        dim: Width of the token embeddings, D.
        per_layer_vocab: Number of rows of the second table.
        layers: Number of layers, L.
        width: Width of the per-layer embeddings, P.
        eps: Epsilon for the norm.
        **options: Arguments of `Embed`, including dtype and rngs.
    """

    def __init__(
        self, vocab: int, dim: int, *, per_layer_vocab: int, layers: int, width: int, eps: float, **options: Any
    ):
        super().__init__(vocab, dim, **options)
        kw = {"dtype": options["dtype"], "rngs": options["rngs"]}
        self.per_layer = Embed(per_layer_vocab, layers * width, **options)
        self.project = Linear((dim,), (layers, width), ("embed", None, "latent"), **kw)
        self.norm = RMSNorm(width, eps, **kw)

    def inputs(self, x: Float[Array, "B T D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T L P"]:
        """Compute the per-layer inputs ``(norm(project(x) / sqrt(D)) + sqrt(P) * table[token]) / sqrt(2)``.

        Args:
            x: Token embeddings.
            tokens: Token ids.
        """
        projection = self.norm(self.project(x) * x.shape[-1] ** -0.5)
        table_rows = self.per_layer(tokens, x.dtype).reshape(projection.shape) * projection.shape[-1] ** 0.5
        return (projection + table_rows) * 2**-0.5


class PerLayerInput(nnx.Module):
    """Residual branch for a layer's `PerLayerEmbed` input: ``norm(project(gelu(gate(x)) * layer_input))``."""

    def __init__(self, dim: int, width: int, eps: float, **kw: Unpack[ParamOptions]):
        self.gate = Linear((dim,), (width,), ("embed", "latent"), **kw)
        self.project = Linear((width,), (dim,), ("latent", "embed"), **kw)
        self.norm = RMSNorm(dim, eps, **kw)

    def __call__(
        self, x: Float[Array, "B T_out D"], layer_input: Float[Array, "B T_out P"]
    ) -> Float[Array, "B T_out D"]:
        return self.norm(self.project(jax.nn.gelu(self.gate(x), approximate=True) * layer_input))


class Factor(nnx.Variable):
    """Untrained scale ``[1]``."""


class OutputScale(nnx.Module):
    """Fixed scale of a layer's output, ``x * factor`` in ``x``'s dtype (Gemma 4, 2026)."""

    def __init__(self, **kw: Unpack[ParamOptions]):
        self.factor = parameter((1,), (None,), nnx.initializers.ones, param_type=Factor, **kw)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return x * jnp.broadcast_to(self.factor[...].astype(x.dtype), x.shape)
