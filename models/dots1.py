"""dots.llm1 (Huo et al. 2025): GLM-4.5's layers with fully rotated, normalized heads and optional sliding windows."""

import dataclasses

from nnxmoe.config.bounds import count
from nnxmoe.config.layer_types import LayerWindowsConfig
from nnxmoe.model.family import Family
from nnxmoe.models.glm4_moe import FAMILY as GLM4_MOE
from nnxmoe.models.glm4_moe import Glm4Moe
from nnxmoe.models.shared.grouped_experts import GroupedExpertsConfig
from nnxmoe.models.shared.normed_heads import NormedHeads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dots1Config(LayerWindowsConfig, GroupedExpertsConfig):
    """Config of dots.llm1. The numbers of experts are required.

    Attributes:
        attention_bias: Whether q, k, v and o have biases.
        first_k_dense_replace: Number of dense layers at the start.
    """

    model_type = "dots1"
    architecture = "Dots1ForCausalLM"
    fixed = {"scoring_func": ("noaux_tc", "sigmoid")}  # published files have the top-k method in this field

    vocab_size: int = 152064
    hidden_size: int = 4608
    intermediate_size: int = 10944
    num_hidden_layers: int = 62
    num_key_value_heads: int | None = 32
    attention_bias: bool = False
    first_k_dense_replace: int = count(0, least=0)
    n_routed_experts: int = count(None, most=4096)
    n_shared_experts: int | None = count(None, least=0, most=4096)
    num_experts_per_tok: int = count(None)
    norm_topk_prob: bool = False
    max_window_layers: int = count(62, least=0)


class Dots1(NormedHeads, Glm4Moe):
    """dots.llm1 language model."""

    configs = (Dots1Config,)


FAMILY = Family(model=Dots1, hf=GLM4_MOE.hf)
