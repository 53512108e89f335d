"""Qwen1.5-MoE and Qwen2's mixture-of-experts model (Yang et al. 2024), based on the implementation in transformers.

Attention is as in Qwen2, with biases for queries, keys and values. A sigmoid gate per token weights the shared expert.
Published checkpoints do not rescale the weights of the selected experts.
"""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import count, per_layer
from nnxmoe.layers.attention.gqa import GQA
from nnxmoe.model.family import Family
from nnxmoe.models.shared.qwen_moe import HF_SHARED, QwenMoe, QwenMoeConfig
from nnxmoe.models.shared.tables import HF_DECODER


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(QwenMoeConfig):
    """Config of Qwen2-MoE. Sliding windows, which no preset uses, raise ConfigError.

    Attributes:
        shared_expert_intermediate_size: Width of the shared expert.
        qkv_bias: Whether q, k and v have biases.
    """

    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    fixed = {"use_sliding_window": (None, False)}
    ignored = "sliding_window max_window_layers"  # ignored, because use_sliding_window must be false

    intermediate_size: int = 5632
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    qkv_bias: bool = True
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = count(5632, most=2**24)
    num_experts: int = 60
    num_experts_per_tok: int = 4
    layer_types: Sequence[str] | None = per_layer("full_attention")


class Qwen2Moe(QwenMoe):
    """Qwen1.5-MoE and Qwen2's mixture-of-experts model."""

    configs = (Qwen2MoeConfig,)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> GQA:
        return self.gqa(index, bias=self.config.qkv_bias, out_bias=False, **kw)


FAMILY = Family(model=Qwen2Moe, hf=HF_DECODER | HF_SHARED)
