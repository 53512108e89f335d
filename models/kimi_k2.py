"""Kimi K2 (Moonshot AI, 2025) and Moonlight (2025): the layers of DeepSeek-V3 with one group of experts.

Moonlight's config.json has the model_type ``deepseek_v3``. transformers does not support the model_type of K2's
config.json. Saving writes ``deepseek_v3`` so that transformers can load the files. Text functions do not work with K2
and Moonlight, because their checkpoints have no tokenizer.json. K2-Thinking, K2.5, K2.6 and K2.7 have experts in packed
int4. Only the text models of K2.5, K2.6 and K2.7 are loaded.
"""

import dataclasses

from nnxmoe.model.family import Family
from nnxmoe.models.deepseek_v3 import FAMILY as DEEPSEEK_V3
from nnxmoe.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiK2Config(DeepSeekV3Config):
    """Config of Kimi K2, with the fields of `DeepSeekV3Config`."""

    model_type = "kimi_k2"
    saved_type = "deepseek_v3"


class KimiK2(DeepSeekV3):
    """Kimi K2 and Moonlight language models."""

    configs = (KimiK2Config,)


_KIMI_K2 = KimiK2Config(
    vocab_size=163840, num_attention_heads=64, num_key_value_heads=64, max_position_embeddings=131072,
    n_routed_experts=384, n_group=1, topk_group=1, routed_scaling_factor=2.827, first_k_dense_replace=1,
    num_nextn_predict_layers=0, rope_theta=50000.0,
    rope_scaling={
        "type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    bos_token_id=163584, eos_token_id=163585, dtype="bfloat16",
)  # fmt: skip
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_KIMI_K2_5 = dataclasses.replace(
    _KIMI_K2, max_position_embeddings=262144, rms_norm_eps=1e-5,
    rope_scaling={"type": "yarn", "original_max_position_embeddings": 4096, **_YARN}, pad_token_id=163839,
)  # fmt: skip
_PRESETS = {
    "kimi-k2": _KIMI_K2,
    "kimi-k2.5": _KIMI_K2_5,
    "kimi-k2.7-code": dataclasses.replace(_KIMI_K2_5, eos_token_id=163586),
    "moonlight-16b-a3b": DeepSeekV3Config(
        vocab_size=163840, hidden_size=2048, intermediate_size=11264, num_hidden_layers=27, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=50000.0,
        q_lora_rank=None, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, n_group=1, topk_group=1, routed_scaling_factor=2.446, first_k_dense_replace=1,
        num_nextn_predict_layers=0, bos_token_id=163584, eos_token_id=163585, dtype="bfloat16",
    ),
}  # fmt: skip

FAMILY = Family(
    model=KimiK2,
    hf=DEEPSEEK_V3.hf,
    maxtext=DEEPSEEK_V3.maxtext,
    presets=_PRESETS,
    hub_ids={
        "kimi-k2": "moonshotai/Kimi-K2-Instruct",
        "kimi-k2.5": "moonshotai/Kimi-K2.5",
        "kimi-k2.7-code": "moonshotai/Kimi-K2.7-Code",
        "moonlight-16b-a3b": "moonshotai/Moonlight-16B-A3B",
    },
    checkpoint_notes={
        "kimi-k2": "FP8 blocks (1.03 TB), dequantized to bfloat16 unless keep_quantized=True. The tokenizer (tiktoken "
        "with remote code) is not supported.",
        **dict.fromkeys(
            ("kimi-k2.5", "kimi-k2.7-code"),
            "packed int4 experts (0.55 TB), dequantized to bfloat16 unless keep_quantized=True. The vision tower and "
            "projector are not loaded. The tokenizer (tiktoken with remote code) is not supported.",
        ),
        "moonlight-16b-a3b": "the tokenizer (tiktoken with remote code) is not supported",
    },
)
