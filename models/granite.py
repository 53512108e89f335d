"""Granite 3 and 4 (IBM, 2024 and 2025): Llama's layers with four multipliers, optionally with experts.

The multipliers scale the embeddings, the attention scores, the outputs of attention and feed-forward, and the logits.
Granite MoE has Mixtral's router and experts in every layer. Granite MoE Shared adds a shared expert.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import count
from nnxmoe.layers.context import FeedForward
from nnxmoe.layers.embed import Embed, ScaledEmbed
from nnxmoe.layers.linear.head_kernel import ScaledKernel
from nnxmoe.layers.linear.kernel import Kernel
from nnxmoe.layers.mlp import FusedMLP
from nnxmoe.model.family import Family
from nnxmoe.model.layer import Layer
from nnxmoe.model.weight_names import W
from nnxmoe.models.llama import LlamaLike
from nnxmoe.models.shared.tables import HF_DECODER, Hf
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import SoftmaxTopK


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteLikeConfig(DecoderConfig):
    """Config fields of all Granite models.

    Attributes:
        attention_bias: Whether q, k, v and o have biases.
        embedding_multiplier: Factor of the embeddings.
        attention_multiplier: Factor of the attention scores.
        residual_multiplier: Factor of the outputs of attention and feed-forward.
        logits_scaling: Divisor of the logits.
    """

    scale_in_queries = False

    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    bos_token_id: int | None = 1
    eos_token_id: int | Sequence[int] | None = 2

    @property
    def query_scale(self) -> float:
        return self.attention_multiplier


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteConfig(GraniteLikeConfig):
    """Config of dense Granite models. If ``mlp_bias``, gate, up and down have biases."""

    model_type = "granite"
    architecture = "GraniteForCausalLM"

    mlp_bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(GraniteLikeConfig):
    """Config of Granite MoE. ``intermediate_size`` is the width of an expert."""

    model_type = "granitemoe"
    architecture = "GraniteMoeForCausalLM"
    experts_field = "num_local_experts"
    aliases = {"num_experts": "num_local_experts"}
    ignored = "output_router_logits router_aux_loss_coef"
    shared_intermediate_size = 0

    num_local_experts: int = count(8, most=4096)
    num_experts_per_tok: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteMoeSharedConfig(GraniteMoeConfig):
    """Config of Granite MoE Shared.

    ``shared_intermediate_size`` is the width of the shared expert. If it is 0, there is no shared expert.
    """

    model_type = "granitemoeshared"
    architecture = "GraniteMoeSharedForCausalLM"

    shared_intermediate_size: int = count(0, least=0, most=2**24)


class Granite(LlamaLike):
    """Dense Granite language model."""

    configs = (GraniteConfig,)

    def __init__(self, config: GraniteLikeConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        self.logits_scaling = config.logits_scaling

    def embedding(self, form: Callable[..., Embed] = ScaledEmbed, **options: Any) -> Embed:
        return super().embedding(form, factor=self.config.embedding_multiplier, **options)

    def layer(self, index: int, form: type[Layer] = Layer, **options: Any) -> Layer:
        return super().layer(index, form, scale=self.config.residual_multiplier, **options)

    def head_weight(self) -> Kernel:
        return ScaledKernel(super().head_weight(), self.logits_scaling)


class GraniteMoe(Granite):
    """Granite language model with experts."""

    configs = (GraniteMoeConfig, GraniteMoeSharedConfig)

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> FeedForward:
        c, shared_width = self.config, self.config.shared_intermediate_size
        router = Router(c.hidden_size, c.num_local_experts, SoftmaxTopK(c.num_experts_per_tok), bias=False, **kw)
        shared = FusedMLP(c.hidden_size, shared_width, bias=False, **kw) if shared_width else None
        return self.moe(router, c.intermediate_size, shared, **kw)


_MOE = "block_sparse_moe"
# The first of two alternatives is the name in checkpoints. The second is the name in transformers' model.
_INPUT = W(f"{_MOE}.input_linear.weight"), W(f"{_MOE}.experts.gate_up_proj")
HF_GRANITE: Hf = {
    **HF_DECODER,
    "layer.moe_norm.scale": W("post_attention_layernorm.weight"),
    "layer.moe.router.kernel": (W(f"{_MOE}.router.layer.weight"), W(f"{_MOE}.router.weight")),
    "layer.moe.experts.gate": tuple(name.rows(0, 2) for name in _INPUT),
    "layer.moe.experts.up": tuple(name.rows(1, 2) for name in _INPUT),
    "layer.moe.experts.down": (W(f"{_MOE}.output_linear.weight"), W(f"{_MOE}.experts.down_proj")),
    "layer.moe.shared.gate_up.kernel": W("shared_mlp.input_linear.weight"),
    "layer.moe.shared.down.kernel": W("shared_mlp.output_linear.weight"),
}


GRANITE = Family(model=Granite, hf=HF_DECODER)
GRANITE_MOE = Family(model=GraniteMoe, hf=HF_GRANITE)
FAMILIES = (GRANITE, GRANITE_MOE)
