"""Text models of Qwen3-VL (Bai et al. 2025) and Qwen3-Omni (Xu et al. 2025): Qwen3 with a longer context.

A position has three components. They are equal for text, so the rotary embedding equals Qwen3's. Saved models have the
model_type ``qwen3`` or ``qwen3_moe``. Qwen3-Omni's text model is part of its thinker. The talker generates speech and
is not loaded.
"""

import dataclasses

from nnxmoe.config.bounds import count, one_of
from nnxmoe.config.rope_parameters import MROPE_FIELDS
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W
from nnxmoe.models.qwen import QWEN3, Qwen3, Qwen3Config
from nnxmoe.models.qwen3_moe import FAMILY as QWEN3_MOE
from nnxmoe.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
from nnxmoe.models.shared.tables import Hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3VLTextConfig(Qwen3Config):
    """Text config of dense Qwen3-VL models.

    Attributes:
        attention_bias: Whether q, k, v and o have biases.
    """

    model_type = "qwen3_vl_text"
    saved_type = "qwen3"
    ignored = MROPE_FIELDS

    hidden_size: int = 4096
    max_position_embeddings: int = 128000
    rope_theta: float = 500000.0
    use_sliding_window: bool = one_of(False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3VLMoeTextConfig(Qwen3MoeConfig):
    """Text config of Qwen3-VL-MoE. The weights of the selected experts are always normalized to sum to 1.

    Attributes:
        attention_bias: Whether q, k, v and o have biases.
    """

    model_type = "qwen3_vl_moe_text"
    saved_type = "qwen3_moe"
    ignored = MROPE_FIELDS

    intermediate_size: int = 5632
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    max_position_embeddings: int = 128000
    rope_theta: float = 500000.0
    use_sliding_window: bool = one_of(False)
    sliding_window: int | None = None
    moe_intermediate_size: int = count(1408, most=2**24)
    num_experts: int = count(60, most=4096)
    num_experts_per_tok: int = 4
    norm_topk_prob: bool = one_of(True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3OmniMoeTextConfig(Qwen3MoeConfig):
    """Text config of Qwen3-Omni's thinker.

    Attributes:
        attention_bias: Whether q, k, v and o have biases.
    """

    model_type = "qwen3_omni_moe_text"
    saved_type = "qwen3_moe"
    ignored = f"{MROPE_FIELDS} rope_scaling.interleaved rope_parameters.interleaved"

    vocab_size: int = 3584
    intermediate_size: int = 18944
    num_hidden_layers: int = 28
    num_attention_heads: int = 28
    rope_theta: float = 1e6
    use_sliding_window: bool = one_of(False)
    sliding_window: int | None = one_of(None)
    norm_topk_prob: bool = True


class Qwen3VLText(Qwen3):
    """Text model of dense Qwen3-VL."""

    configs = (Qwen3VLTextConfig,)


class Qwen3VLMoeText(Qwen3Moe):
    """Text model of Qwen3-VL-MoE and Qwen3-Omni."""

    configs = (Qwen3VLMoeTextConfig, Qwen3OmniMoeTextConfig)


_EXPERTS, _GATE_UP, _DOWN = (W(f"mlp.experts{end}") for end in ("", ".gate_up_proj", ".down_proj"))

QWEN3_VL_TEXT = Family(model=Qwen3VLText, hf=QWEN3.hf, maxtext=QWEN3.maxtext)
# Published tensors store inputs before outputs. transformers uses the opposite order in memory and when saving.
_QWEN3_VL_MOE_TEXT_HF: Hf = {
    **QWEN3_MOE.hf,
    "layer.moe.experts.gate": (_EXPERTS.each("gate_proj.weight"), _GATE_UP.rows(0, 2), _GATE_UP.T.rows(0, 2)),
    "layer.moe.experts.up": (_EXPERTS.each("up_proj.weight"), _GATE_UP.rows(1, 2), _GATE_UP.T.rows(1, 2)),
    "layer.moe.experts.down": (_EXPERTS.each("down_proj.weight"), _DOWN, _DOWN.T),
}

QWEN3_VL_MOE_TEXT = Family(model=Qwen3VLMoeText, hf=_QWEN3_VL_MOE_TEXT_HF, maxtext=QWEN3_MOE.maxtext)
FAMILIES = (QWEN3_VL_TEXT, QWEN3_VL_MOE_TEXT)
