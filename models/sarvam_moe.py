"""Sarvam 30B (Sarvam AI, 2026): GLM-4.5's layers with normalized, fully rotated heads and different names.

Checkpoints store the kernels of queries, keys and values in one tensor.
"""

import dataclasses
from collections.abc import Sequence

from nnxmoe.config.bounds import count
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W, options
from nnxmoe.models.glm4_moe import Glm4Moe, Glm4MoeConfig
from nnxmoe.models.shared.grouped_experts import HF_GROUPED_EXPERTS
from nnxmoe.models.shared.tables import HF_DECODER, Hf, hf_fused_qkv


@dataclasses.dataclass(frozen=True, kw_only=True)
class SarvamMoEConfig(Glm4MoeConfig):
    """Config of Sarvam 30B, with the fields of `Glm4MoeConfig`. Some fields have different names in files."""

    model_type = "sarvam_moe"
    architecture = "SarvamMoEForCausalLM"
    default_rotary_factor = 1.0
    aliases = {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    }
    fixed = {
        "moe_router_enable_expert_bias": (None, True),
        "score_function": (None, "sigmoid"),
        "use_bias": (None, False),
    }
    ignored = "embedding_dropout output_dropout max_window_layers"

    vocab_size: int = 262144
    intermediate_size: int = 8192
    num_hidden_layers: int = 19
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 4
    head_dim: int | None = count(64, most=2**16)
    rms_norm_eps: float = 1e-6
    rope_theta: float = 8e6
    use_qk_norm: bool = True
    moe_intermediate_size: int = count(1024, most=2**24)
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 2.5
    num_nextn_predict_layers: int = count(0, least=0, most=1024)
    eos_token_id: int | Sequence[int] | None = 1
    pad_token_id: int | None = 0


# Loading also accepts the names of transformers' model in memory.
_RENAMED = {
    "embed.table": W("model.word_embeddings.weight"),
    "layer.attention.o.kernel": W("attention.dense.weight"),
    "layer.attention.qk_norm.q.scale": W("attention.query_layernorm.weight"),
    "layer.attention.qk_norm.k.scale": W("attention.key_layernorm.weight"),
    "layer.moe.router.bias": W("mlp.gate.expert_bias"),
}


class SarvamMoE(Glm4Moe):
    """Sarvam 30B language model."""

    configs = (SarvamMoEConfig,)
    supports_mtp = False


_HF: Hf = HF_DECODER | HF_GROUPED_EXPERTS


def _published_rows(config: SarvamMoEConfig) -> Hf:
    """Return rows with the published names. The spans of the fused queries, keys and values depend on the config."""
    rows = _RENAMED | hf_fused_qkv(config, "attention.query_key_value")
    return {key: (published, *options(_HF, key)) for key, published in rows.items()}


FAMILY = Family(model=SarvamMoE, hf=_HF, hf_of_config=_published_rows)
