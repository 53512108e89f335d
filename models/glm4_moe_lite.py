"""GLM-4.7-Flash (Zhipu AI, 2026): the layers of DeepSeek-V3. The config lists the dense layers."""

import dataclasses
from collections.abc import Sequence

from nnxmoe.config.bounds import count, one_of, per_layer
from nnxmoe.model.family import Family
from nnxmoe.models.deepseek_v3 import FAMILY as DEEPSEEK_V3
from nnxmoe.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4MoeLiteConfig(DeepSeekV3Config):
    """Config of GLM-4.7-Flash.

    ``mlp_layer_types`` is ``dense`` or ``sparse`` per layer. If null, all layers except the first are sparse.
    """

    model_type = "glm4_moe_lite"
    architecture = "Glm4MoeLiteForCausalLM"
    aliases = {"head_dim": "qk_rope_head_dim"}

    vocab_size: int = 154880
    hidden_size: int = 2048
    intermediate_size: int = 10240
    num_hidden_layers: int = 47
    num_attention_heads: int = 20
    num_key_value_heads: int | None = 20
    max_position_embeddings: int = 202752
    rms_norm_eps: float = 1e-5
    q_lora_rank: int | None = count(768, most=2**20)
    qk_nope_head_dim: int = count(192, most=2**16)
    v_head_dim: int = count(256, most=2**16)
    moe_intermediate_size: int = count(1536, most=2**24)
    n_routed_experts: int = count(64, most=4096)
    num_experts_per_tok: int = 4
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.8
    first_k_dense_replace: int = one_of(1)  # published files also have mlp_layer_types, which takes precedence
    mlp_layer_types: Sequence[str] | None = per_layer("dense", "sparse")


class Glm4MoeLite(DeepSeekV3):
    """GLM-4.7-Flash language model."""

    configs = (Glm4MoeLiteConfig,)


FAMILY = Family(model=Glm4MoeLite, hf=DEEPSEEK_V3.hf)
