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


_A2_7B = Qwen2MoeConfig(
    max_position_embeddings=8192, rope_theta=1e6, bos_token_id=151643, eos_token_id=151643, dtype="bfloat16"
)
_A14B = dataclasses.replace(
    _A2_7B, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, max_position_embeddings=131072, moe_intermediate_size=2560,
    shared_expert_intermediate_size=20480, num_experts=64, num_experts_per_tok=8,
)  # fmt: skip

FAMILY = Family(
    model=Qwen2Moe,
    hf=HF_DECODER | HF_SHARED,
    presets={"qwen1.5-moe-a2.7b": _A2_7B, "qwen2-57b-a14b": _A14B},
    hub_ids={"qwen1.5-moe-a2.7b": "Qwen/Qwen1.5-MoE-A2.7B", "qwen2-57b-a14b": "Qwen/Qwen2-57B-A14B"},
)
