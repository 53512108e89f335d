"""Hy3 (Tencent Hunyuan, 2026), based on the implementation in transformers.

Grouped-query attention normalizes each head. The experts are as in DeepSeek-V3, with a single group and different
names. The config lists the dense layers. transformers does not load the multi-token prediction layer. The final norm of
this layer has a different name than in DeepSeek-V3.
"""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import count, per_layer
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.grouped_experts import DenseOrMoE, corrected_router
from nnxmoe.models.shared.normed_heads import NormedHeads
from nnxmoe.models.shared.tables import HF_DECODER, HF_MOE, HF_MTP, Hf
from nnxmoe.moe.router import Router


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyV3Config(DecoderConfig):
    """Config of Hy3.

    Attributes:
        attention_bias: Whether q, k, v and o have biases.
        mlp_layer_types: ``dense`` or ``sparse`` per layer. If null, all layers except the first are sparse.
        router_scaling_factor: Factor that multiplies the normalized weights of the selected experts.
        num_nextn_predict_layers: Number of prediction layers. Some published files do not have this field.
    """

    model_type = "hy_v3"
    architecture = "HYV3ForCausalLM"
    experts_field = "num_experts"
    scale_in_queries = False
    aliases = {"num_local_experts": "num_experts", "expert_hidden_dim": "moe_intermediate_size"}
    fixed = {
        "first_k_dense_replace": (1,),  # published files have this field instead of mlp_layer_types
        "mlp_bias": (None, False),
        "moe_router_enable_expert_bias": (None, True),
        "moe_router_use_sigmoid": (None, True),
        "qk_norm": (None, True),
        "route_norm": (None, True),
    }
    # The first three fields select which results are rounded to 16 bits.
    ignored = """enable_attention_fp32_softmax enable_lm_head_fp32 enable_moe_fp32_combine eod_token_id use_grouped_mm
        output_router_logits"""
    n_shared_experts = property(lambda self: self.num_shared_experts)  # DeepSeek-V3's name, used by shared code
    first_k_dense_replace = 1

    vocab_size: int = 120832
    hidden_size: int = 4096
    intermediate_size: int = 13312
    num_hidden_layers: int = 80
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = count(128, most=2**16)
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 11158840.0
    attention_bias: bool = False
    mlp_layer_types: Sequence[str] | None = per_layer("dense", "sparse")
    moe_intermediate_size: int = count(1536, most=2**24)
    num_experts: int = count(192, most=4096)
    num_shared_experts: int = count(1, most=4096)
    num_experts_per_tok: int = 8
    router_scaling_factor: float = 2.826
    num_nextn_predict_layers: int = count(1, least=0, most=1024)


class HyV3(NormedHeads, DenseOrMoE):
    """Hy3 language model."""

    configs = (HyV3Config,)
    supports_mtp = True

    def router(self, **kw: Unpack[ParamOptions]) -> Router:
        return corrected_router(self.config, scale=self.config.router_scaling_factor, **kw)


# The second alternatives are the names of transformers' model in memory.
_SHARED = {
    f"layer.moe.shared.{x}.kernel": (W(f"mlp.shared_mlp.{x}_proj.weight"), W(f"mlp.shared_experts.{x}_proj.weight"))
    for x in ("gate", "up", "down")
}
# The rows for copies of the embedding and the output head are excluded.
_MTP = {key: row for key, row in HF_MTP.items() if key.endswith((".scale", "project.kernel"))}
_HF: Hf = {
    **HF_DECODER, **HF_MOE, **_SHARED, **_MTP,
    "layer.moe.router.kernel": (W("mlp.router.gate.weight"), W("mlp.gate.weight")),
    "layer.moe.router.bias": (W("mlp.expert_bias"), W("mlp.e_score_correction_bias")),
    "layer.mtp.norm.scale": W("final_layernorm.weight"),
}  # fmt: skip

FAMILY = Family(model=HyV3, hf=_HF)
