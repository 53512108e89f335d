"""Sarvam 105B (Sarvam AI, 2026): the layers of DeepSeek-V3 with a single query projection and one group of experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nnxmoe.config.bounds import count
from nnxmoe.model.family import Family
from nnxmoe.models.deepseek_v3 import FAMILY as DEEPSEEK_V3
from nnxmoe.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class SarvamMLAConfig(DeepSeekV3Config):
    """Config of Sarvam 105B, with the fields of `DeepSeekV3Config`. Some fields have different names in files."""

    model_type = "sarvam_mla"
    architecture = "SarvamMLAForCausalLM"
    aliases = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
    fixed = {"moe_router_enable_expert_bias": (None, True), "use_qk_norm": (None, True)}
    ignored = "q_head_dim embedding_dropout output_dropout moe_shared_expert_intermediate_size"

    vocab_size: int = 262144
    hidden_size: int = 4096
    intermediate_size: int = 16384
    num_hidden_layers: int = 32
    num_attention_heads: int = 64
    num_key_value_heads: int | None = None
    q_lora_rank: int | None = count(None, most=2**20)
    n_routed_experts: int = count(128, most=4096)
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = count(1, least=0)
    num_nextn_predict_layers: int = count(0, least=0, most=1024)

    @property
    def rope_fields(self) -> Mapping[str, Any]:
        """The rope object, with "yarn" instead of "deepseek_yarn", which is vLLM's name in published files."""
        fields = super().rope_fields
        return {name: "yarn" if value == "deepseek_yarn" else value for name, value in fields.items()}


class SarvamMLA(DeepSeekV3):
    """Sarvam 105B language model."""

    configs = (SarvamMLAConfig,)


FAMILY = Family(model=SarvamMLA, hf=DEEPSEEK_V3.hf)
