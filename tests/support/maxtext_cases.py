"""Reference checkpoints of ``tests/data/maxtext``: parameters, logits, losses and gradients from MaxText."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

import nnxmoe
from tests.support.arrays import Flat

CASES = Path(__file__).parents[1] / "data" / "maxtext"
NAMES = sorted(path.name for path in CASES.iterdir() if (path / "params.safetensors").is_file())


def config_of(name: str) -> Any:
    return nnxmoe.config_from_hf(json.loads((CASES / name / "hf_config.json").read_text()))


def params_of(name: str) -> Flat:
    return load_file(CASES / name / "params.safetensors")


LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biased and tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama 3.1": ("llama", {"rope_scaling": LLAMA_3}),
    "mixtral": ("mixtral", {}),
    "deepseek, biased": ("deepseek_v3", {"attention_bias": True}),
}

# Families that MaxText has since 0.2.5: its preset with the fields that make it tiny, and the same in Hugging Face's
# names. The parameters are random numbers (`newer_weights`); stored are names, shapes and logits.
_GDN = {"base_emb_dim": 16, "base_num_decoder_layers": 8, "base_num_query_heads": 4, "base_num_kv_heads": 2,
        "head_dim": 8, "vocab_size": 48, "base_mlp_dim": 12, "base_moe_mlp_dim": 12, "num_experts": 6,
        "num_experts_per_tok": 2, "gdn_key_head_dim": 6, "gdn_value_head_dim": 4, "gdn_num_key_heads": 2,
        "gdn_num_value_heads": 4, "gdn_chunk_size": 8}  # fmt: skip
_QWEN = {"hidden_size": 16, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "vocab_size": 48, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "num_experts": 6,
         "num_experts_per_tok": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 4, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "partial_rotary_factor": 0.25, "rope_theta": 1e7}  # fmt: skip
_GEMMA = {"use_multimodal": False, "base_num_decoder_layers": 12, "base_emb_dim": 16, "base_num_query_heads": 4,
          "base_num_kv_heads": 2, "base_mlp_dim": 20, "head_dim": 4, "global_head_dim": 8, "global_num_kv_heads": 1,
          "vocab_size": 48, "sliding_window_size": 4}  # fmt: skip
_GEMMA_OURS = {"model_type": "gemma4_text", "num_hidden_layers": 12, "hidden_size": 16, "num_attention_heads": 4,
               "num_key_value_heads": 2, "num_global_key_value_heads": 1, "intermediate_size": 20, "head_dim": 4,
               "global_head_dim": 8, "vocab_size": 48, "sliding_window": 4, "attention_k_eq_v": True,
               "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0}  # fmt: skip
_V3 = {"base_emb_dim": 16, "base_num_query_heads": 4, "base_num_kv_heads": 4, "base_mlp_dim": 20, "vocab_size": 48,
       "base_moe_mlp_dim": 12, "base_num_decoder_layers": 4, "first_num_dense_layers": 1, "num_experts": 6,
       "num_experts_per_tok": 2, "q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
       "v_head_dim": 5, "indexer_n_heads": 4, "indexer_head_dim": 8, "indexer_topk": 6}  # fmt: skip
_V3_OURS = {"model_type": "deepseek_v32", "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4,
            "intermediate_size": 20, "vocab_size": 48, "moe_intermediate_size": 12, "num_hidden_layers": 4,
            "first_k_dense_replace": 1, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
            "index_n_heads": 4, "index_head_dim": 8, "index_topk": 6, "routed_scaling_factor": 2.5,
            "rope_scaling": {"rope_type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}}  # fmt: skip
_V4 = {"model_name": "deepseek4-tiny", "base_num_decoder_layers": 7, "compress_ratios": [0, 0, 4, 128, 4, 128, 4],
       "vocab_size": 48, "base_emb_dim": 16, "base_mlp_dim": 12, "base_moe_mlp_dim": 12, "head_dim": 8,
       "qk_rope_head_dim": 4, "num_experts": 6, "num_experts_per_tok": 2, "mhc_expansion_rate": 3, "q_lora_rank": 8,
       "indexer_head_dim": 8, "indexer_topk": 4, "sliding_window_size": 6, "o_groups": 2, "o_lora_rank": 6,
       "max_target_length": 140}  # fmt: skip
_V4_OURS = {"model_type": "deepseek_v4", "vocab_size": 48, "hidden_size": 16, "moe_intermediate_size": 12,
            "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8,
            "qk_rope_head_dim": 4, "q_lora_rank": 8, "o_lora_rank": 6, "o_groups": 2, "sliding_window": 6,
            "compress_ratios": [0, 0, 4, 128, 4, 128, 4], "num_hash_layers": 3, "index_n_heads": 4,
            "index_head_dim": 8, "index_topk": 4, "hc_mult": 3, "n_routed_experts": 6, "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.0, "max_position_embeddings": 4096}  # fmt: skip
NEWER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_next": (_GDN | {"model_name": "qwen3-next-80b-a3b"}, _QWEN | {"model_type": "qwen3_next"}),
    "qwen3_5_moe": (
        _GDN | {"model_name": "qwen3.5-35b-a3b", "use_multimodal": False, "mrope_section": [1, 0, 0]},
        _QWEN | {"model_type": "qwen3_5_moe_text"},
    ),
    "gemma4": (_GEMMA | {"model_name": "gemma4-31b"}, _GEMMA_OURS),
    "gemma4_moe": (
        _GEMMA | {"model_name": "gemma4-26b", "base_moe_mlp_dim": 12, "num_experts": 6, "num_experts_per_tok": 2},
        _GEMMA_OURS | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 12},
    ),
    "deepseek_v4": (_V4, _V4_OURS),
    "deepseek_v32": (_V3 | {"model_name": "deepseek3.2-671b"}, _V3_OURS),
}


def newer_weights(shapes: dict[str, list[int]]) -> Flat:
    """Random parameters of these names; norms and factors around 1, and embeddings that bfloat16 holds, since MaxText
    rounds tied ones."""
    rng, made = np.random.default_rng(0), {}
    for name in sorted(shapes):
        if name.endswith("tid2eid"):  # two experts per token id
            made[name] = np.stack([rng.choice(6, 2, replace=False) for _ in range(48)]).astype(np.int32)
            continue
        noise = rng.standard_normal(shapes[name]).astype(np.float32)
        around_one = any(word in name for word in ("scale", "scalar", "A_log", "dt_bias"))
        made[name] = 1 + noise / 5 if around_one else noise / 10 if name.endswith("bias") else noise / 3
        if name.endswith("embedding"):
            made[name] = made[name].astype(ml_dtypes.bfloat16).astype(np.float32)
    return made


def newer_tokens(case: str) -> np.ndarray:
    """Two rows of ids."""
    length = NEWER[case][0].get("max_target_length", 20)
    return np.random.default_rng(1).integers(0, 48, (2, length)).astype(np.int32)
