"""GLM-4.5, 4.6 and 4.7, and the text model of GLM-4.5V (GLM-4.5 technical report, 2025).

Grouped-query attention rotates half of each head and has biases for queries, keys and values. The large models
normalize the heads of queries and keys. The first layers are dense. The other layers have DeepSeek-V3's experts with a
single group. The multi-token prediction layer is loaded only with ``mtp=True``.

A position in GLM-4.5V has three components. They are equal for text, so the rotary embedding equals GLM-4.5's. Saved
models of GLM-4.5V have the model_type ``glm4_moe``.
"""

import dataclasses
from typing import Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import count, one_of
from nnxmoe.config.partial_rotary import PartialRotaryConfig
from nnxmoe.config.rope_parameters import MROPE_FIELDS
from nnxmoe.layers.attention.gqa import QKNorm
from nnxmoe.layers.context import Attention
from nnxmoe.layers.rope import PartialRotary
from nnxmoe.model.family import Family
from nnxmoe.models.shared.grouped_experts import HF_GROUPED_EXPERTS, DenseOrMoE, GroupedExpertsConfig
from nnxmoe.models.shared.tables import HF_DECODER, HF_MTP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(GroupedExpertsConfig, PartialRotaryConfig):
    """Config of GLM-4.5, 4.6 and 4.7.

    Attributes:
        attention_bias: Whether q, k and v have biases.
        use_qk_norm: Whether to normalize the heads of queries and keys.
        first_k_dense_replace: Number of dense layers at the start.
    """

    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    default_rotary_factor = 0.5

    vocab_size: int = 151552
    hidden_size: int = 4096
    intermediate_size: int = 10944
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False
    first_k_dense_replace: int = count(1, least=0)
    num_nextn_predict_layers: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4vMoeTextConfig(Glm4MoeConfig):
    """Text config of GLM-4.5V."""

    model_type = "glm4v_moe_text"
    saved_type = "glm4_moe"
    ignored = MROPE_FIELDS

    vocab_size: int = 151424
    max_position_embeddings: int = 65536
    attention_bias: bool = True
    use_qk_norm: bool = one_of(False)
    num_nextn_predict_layers: int = count(0, least=0, most=1024)


class Glm4Moe(DenseOrMoE):
    """GLM-4.5, 4.6 and 4.7 language models, and the text model of GLM-4.5V."""

    configs = (Glm4MoeConfig, Glm4vMoeTextConfig)
    supports_mtp = True

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        c = self.config
        norm = QKNorm.per_head(c.head_width, c.rms_norm_eps, **kw) if c.use_qk_norm else None
        options = {"qk_norm": norm, "rotate": PartialRotary(c.rope_dim), **kw}
        return self.gqa(index, bias=c.attention_bias, out_bias=False, **options)


FAMILY = Family(model=Glm4Moe, hf=HF_DECODER | HF_GROUPED_EXPERTS | HF_MTP)
