"""Qwen3-Next (Qwen team 2025).

Every fourth layer is attention. The other layers are recurrent. There are many small routed experts and a gated shared
expert. Checkpoints store the projections of a recurrent layer in two tensors. The multi-token prediction layer is
loaded only with ``mtp=True``.
"""

import dataclasses
from typing import Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import count
from nnxmoe.layers.recurrent.delta import DeltaDims, FusedProjection
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.qwen_hybrid import (
    HF_HYBRID,
    MAXTEXT_HYBRID,
    MTP_PREFIXES,
    QwenHybrid,
    QwenHybridConfig,
    QwenHybridMaxText,
)
from nnxmoe.models.shared.qwen_moe import HF_SHARED, QwenMoe, QwenMoeConfig
from nnxmoe.models.shared.tables import Hf, Linen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(QwenHybridConfig, QwenMoeConfig):
    """Config of Qwen3-Next. The base classes describe the other fields.

    Attributes:
        shared_expert_intermediate_size: Width of the shared expert.
        num_nextn_predict_layers: Number of multi-token prediction layers. Defaults to 1, because published files do
            not have this field.
    """

    model_type = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"

    vocab_size: int = 151936
    hidden_size: int = 2048
    num_hidden_layers: int = 48
    intermediate_size: int = 5632
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 2
    moe_intermediate_size: int = count(512, most=2**24)
    shared_expert_intermediate_size: int = count(512, most=2**24)
    num_experts: int = count(512, most=4096)
    num_experts_per_tok: int = 10
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = count(1, least=0, most=1)


class Qwen3Next(QwenHybrid, QwenMoe):
    """Qwen3-Next-80B-A3B language model."""

    configs = (Qwen3NextConfig,)

    def project(self, heads: DeltaDims, **kw: Unpack[ParamOptions]) -> FusedProjection:
        return FusedProjection(heads, **kw)


_HF: Hf = {
    **HF_HYBRID,
    **HF_SHARED,
    "layer.attention.project.qkvz.kernel": W("linear_attn.in_proj_qkvz.weight"),
    "layer.attention.project.ba.kernel": W("linear_attn.in_proj_ba.weight"),
}
_MAXTEXT: Linen = {
    **MAXTEXT_HYBRID,
    "layer.attention.project.qkvz.kernel": ("attention/in_proj_qkvz/kernel", ("embed", "gdn_head")),
    "layer.attention.project.ba.kernel": ("attention/in_proj_ba/kernel", ("embed", "gdn_head")),
}

FAMILY = Family(model=Qwen3Next, hf=_HF, maxtext=QwenHybridMaxText(_MAXTEXT), mtp_prefixes=MTP_PREFIXES)
