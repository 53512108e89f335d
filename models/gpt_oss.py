"""gpt-oss (OpenAI 2025, arXiv 2508.10925).

Grouped-query attention uses YaRN and a trained sink per head. Every other layer attends to a sliding window. All layers
have experts with biases and a clamped SwiGLU. The router selects the experts with the largest logits, and weights them
by a softmax over these logits. Published checkpoints store the experts' kernels in MXFP4.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import count, number
from nnxmoe.config.layer_types import FULL, SLIDING, LayerWindowsConfig
from nnxmoe.layers.activations import ClampedSwiGLU
from nnxmoe.layers.attention.gqa import GQA, Sinks
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family, LayerBlocks, MaxTextNames
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.tables import HF_DECODER, MAXTEXT_DECODER, Hf, Linen, maxtext_experts, maxtext_gqa
from nnxmoe.moe.block import MoE
from nnxmoe.moe.expert_biases import ExpertBiases
from nnxmoe.moe.router import LogitBias, Router
from nnxmoe.moe.selection import SoftmaxTopK

YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 4096}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(LayerWindowsConfig):
    """Config of gpt-oss. If rope fields are missing, YaRN extends 4096 positions by a factor of 32.

    Attributes:
        intermediate_size: Width of an expert.
        layer_types: Type of each layer. If null, layers alternate, starting with a sliding-window layer.
    """

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    experts_field = "num_local_experts"
    scale_in_queries = False
    aliases = {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
    ignored = "output_router_logits router_aux_loss_coef initial_context_length"

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    attention_bias: bool = True
    sliding_window: int | None = count(128)
    num_local_experts: int = count(128, most=4096)
    num_experts_per_tok: int = 4
    swiglu_alpha: float = number(1.702, above=0.0, most=1e6)
    swiglu_limit: float = number(7.0, above=0.0, most=1e6)

    @property
    def attention_types(self) -> Sequence[str]:
        return self.layer_types or [(SLIDING, FULL)[i % 2] for i in range(self.num_hidden_layers)]

    @property
    def rope_fields(self) -> Mapping[str, Any]:
        return super().rope_fields or YARN


class GptOss(CausalLM):
    """gpt-oss language model."""

    configs = (GptOssConfig,)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> GQA:
        c = self.config
        sinks = Sinks(c.num_attention_heads, **kw)
        return self.gqa(index, bias=c.attention_bias, sinks=sinks, **kw)

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> MoE:
        c = self.config
        dim, width, count = c.hidden_size, c.intermediate_size, c.num_local_experts
        select, logit_bias = SoftmaxTopK(c.num_experts_per_tok), LogitBias(count, **kw)
        router = Router(dim, count, select, bias=False, logit_bias=logit_bias, **kw)
        activation, biases = ClampedSwiGLU(c.swiglu_alpha, c.swiglu_limit), ExpertBiases(dim, width, count, **kw)
        return self.moe(router, width, activation=activation, biases=biases, **kw)


_GATE_UP, _DOWN = W("mlp.experts.gate_up_proj").T, W("mlp.experts.down_proj").T
_GATE_UP_BLOCKS, _GATE_UP_BIAS = W("mlp.experts.gate_up_proj_blocks").files_only, W("mlp.experts.gate_up_proj_bias")


def _others(projection: str, suffix: str) -> tuple[W, W]:
    """Return the tensor names of experts quantized with AutoRound or Unsloth. Unsloth interleaves gate and up."""
    autoround_name = W("mlp.experts").each(f"{projection}_proj.{suffix}")
    if projection == "down":
        return autoround_name, W("mlp.experts.down_projs").each(suffix)
    return autoround_name, W("mlp.experts.gate_up_projs").each(suffix).every(int(projection == "up"), 2)


_HF: Hf = {
    **HF_DECODER,
    "layer.attention.sinks.scores": W("self_attn.sinks"),
    "layer.moe_norm.scale": W("post_attention_layernorm.weight"),
    "layer.moe.router.kernel": (W("mlp.router.weight"), W("mlp.router.linear.weight").files_only),
    "layer.moe.router.logit_bias.values": (W("mlp.router.bias"), W("mlp.router.linear.bias").files_only),
    "layer.moe.experts.gate": (_GATE_UP.every(0, 2), _GATE_UP_BLOCKS.every(0, 2), *_others("gate", "weight")),
    "layer.moe.experts.up": (_GATE_UP.every(1, 2), _GATE_UP_BLOCKS.every(1, 2), *_others("up", "weight")),
    "layer.moe.experts.down": (_DOWN, W("mlp.experts.down_proj_blocks").files_only, *_others("down", "weight")),
    "layer.moe.experts.biases.gate": (_GATE_UP_BIAS.every(0, 2), *_others("gate", "bias")),
    "layer.moe.experts.biases.up": (_GATE_UP_BIAS.every(1, 2), *_others("up", "bias")),
    "layer.moe.experts.biases.down": (W("mlp.experts.down_proj_bias"), *_others("down", "bias")),
}  # fmt: skip
_MAXTEXT: Linen = {
    **MAXTEXT_DECODER, **maxtext_gqa("GptOssAttention"), **maxtext_experts("GptOssMlp"),
    "layer.attention.sinks.scores": ("GptOssAttention/sinks", (None,)),
    "layer.moe.router.kernel": ("GptOssMlp/gate/kernel", ("embed", None)),
    "layer.moe.router.logit_bias.values": ("GptOssMlp/gate/bias", (None,)),
    "layer.moe.experts.biases.gate": ("GptOssMlp/wi_0_bias", ("exp", "activation_mlp")),
    "layer.moe.experts.biases.up": ("GptOssMlp/wi_1_bias", ("exp", "activation_mlp")),
    "layer.moe.experts.biases.down": ("GptOssMlp/wo_bias", ("exp", "activation_embed")),
}  # fmt: skip

FAMILY = Family(model=GptOss, hf=_HF, maxtext=MaxTextNames(_MAXTEXT, LayerBlocks(("local", "global"))))
