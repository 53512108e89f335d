"""The models that are measured: fields of config.json, in a size that means something and in one that takes no time."""

from typing import Any

Fields = dict[str, Any]

_COMMON = {"vocab_size": 32000, "hidden_size": 1024, "num_attention_heads": 16, "max_position_embeddings": 4096}
_INDEXER = {"model_type": "deepseek_v32", "index_n_heads": 16, "index_head_dim": 64, "index_topk": 512}
MIDSIZE: dict[str, Fields] = {  # of 156, 277, 241, 129 and 243 million parameters
    "llama": _COMMON | {
        "model_type": "llama", "num_hidden_layers": 8, "intermediate_size": 2816, "num_key_value_heads": 4,
    },
    "mixtral": _COMMON | {
        "model_type": "mixtral", "num_hidden_layers": 4, "intermediate_size": 2048, "num_key_value_heads": 4,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "deepseek": _COMMON | {
        "model_type": "deepseek_v3", "num_hidden_layers": 4, "first_k_dense_replace": 1, "intermediate_size": 2816,
        "num_key_value_heads": 16, "n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512,
        "n_shared_experts": 1, "q_lora_rank": 384, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0,
    },
    "qwen3_5": _COMMON | {
        "model_type": "qwen3_5_text", "num_hidden_layers": 4, "intermediate_size": 2816, "num_key_value_heads": 4,
        "head_dim": 64, "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}  # fmt: skip
MIDSIZE["deepseek_v32"] = MIDSIZE["deepseek"] | _INDEXER

_SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
          "num_hidden_layers": 2, "max_position_embeddings": 256}  # fmt: skip
TINY: dict[str, Fields] = {
    "llama": _SMALL | {"model_type": "llama", "num_key_value_heads": 4},
    "mixtral": _SMALL | {
        "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "deepseek": _SMALL | {
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6, "moe_intermediate_size": 24,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "num_nextn_predict_layers": 0,
    },
    "qwen3_5": _SMALL | {
        "model_type": "qwen3_5_text", "num_key_value_heads": 2, "num_hidden_layers": 4, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip
TINY["deepseek_v32"] = TINY["deepseek"] | _INDEXER | {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}


def trained(fields: Fields) -> Fields:
    """A narrow model of the same family with eight layers, or with two where the original is tiny."""
    if fields["hidden_size"] <= 64:
        return fields
    heads = {"num_attention_heads": 4, "num_key_value_heads": min(4, fields["num_key_value_heads"])}
    narrow = {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 8, **heads}
    widths = ("intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank")
    return fields | narrow | {name: fields[name] // 4 for name in widths if name in fields}
