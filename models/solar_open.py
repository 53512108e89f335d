"""Solar Open (Upstage, 2026): GLM-4.5's layers with experts in every layer, fully rotated heads and no QK norm."""

import dataclasses

from nnxmoe.config.bounds import count
from nnxmoe.model.family import Family
from nnxmoe.models.glm4_moe import FAMILY as GLM4_MOE
from nnxmoe.models.glm4_moe import Glm4Moe
from nnxmoe.models.shared.grouped_experts import GroupedExpertsConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolarOpenConfig(GroupedExpertsConfig):
    """Config of Solar Open. All layers have experts, so ``intermediate_size`` is not used.

    Attributes:
        attention_bias: Whether q, k and v have biases.
    """

    model_type = "solar_open"
    architecture = "SolarOpenForCausalLM"
    use_qk_norm = False
    fixed = {"first_k_dense_replace": (0,), "use_qk_norm": (False,)}

    vocab_size: int = 196608
    num_hidden_layers: int = 48
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = count(128, most=2**16)
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    attention_bias: bool = False
    moe_intermediate_size: int = 1280


class SolarOpen(Glm4Moe):
    """Solar Open language model."""

    configs = (SolarOpenConfig,)


FAMILY = Family(model=SolarOpen, hf=GLM4_MOE.hf)
