"""Convert the metadata of a GGUF file to the fields of a config.json.

Sources: llama.cpp's conversion script and model loader. Fields that GGUF files lack are derived from the tensors.
"""

from collections.abc import Mapping
from typing import Any

from nnxmoe.config.printable import short, some
from nnxmoe.convert.gguf.gguf_file import GGUF
from nnxmoe.convert.gguf.gguf_rope import rope_fields, shortest
from nnxmoe.convert.gguf.gguf_tokenizer import end_ids, special_ids

_COMMON = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_EXPERTS |= {"expert_weights_norm": "norm_topk_prob"}
_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
_GROUPS = _EXPERTS | _WIDTH | {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "nextn_predict_layers": "num_nextn_predict_layers",
}  # fmt: skip
_NO_GROUPS = {"routed_scaling_factor": 1.0, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}
_NO_GROUPS |= {"num_nextn_predict_layers": 0, "first_k_dense_replace": 0, "n_shared_experts": 0}
_NEEDED = {"expert_count", "expert_used_count", "attention.kv_lora_rank", "attention.sliding_window", *_WIDTH}
_LATENT = {"attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank"}

# llama.cpp's architecture name -> (model_type, keys in addition to _COMMON, llama.cpp's defaults for missing keys).
_READ: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen3moe": ("qwen3_moe", _EXPERTS | _WIDTH, {"norm_topk_prob": True}),
    "olmoe": ("olmoe", _EXPERTS, {"norm_topk_prob": False}),
    "gpt-oss": (
        "gpt_oss",
        {
            **{"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
            **{"expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "sliding_window"},
        },
        {},
    ),
    "glm4moe": ("glm4_moe", _GROUPS, _NO_GROUPS),
    "deepseek2": ("deepseek_v3", _LATENT | _GROUPS, _NO_GROUPS | {"q_lora_rank": None, "n_shared_experts": None}),
}  # fmt: skip
_MIXTRAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_SAMPLING = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
_SAMPLING |= {name: name for name in ("top_k", "top_p", "min_p")}
# Keys that other keys or the tensors imply, and keys that do not affect the computation.
_IMPLIED = {
    *("vocab_size", "tensor_data_layout", "rope.dimension_count", "expert_gating_func", "attention.causal"),
    *("attention.key_length", "attention.value_length", "attention.key_length_mla", "attention.value_length_mla"),
    *(
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
        "rope.scale_linear",
    ),
    *(f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "yarn_log_multiplier")),
    *(f"rope.scaling.{name}" for name in ("attn_factor", "yarn_beta_fast", "yarn_beta_slow", "finetuned", "alpha")),
    *(f"rope.scaling.{name}" for name in ("yarn_attn_factor", "yarn_ext_factor")),
}
# Keys of features that no architecture above supports. The value 0 disables the feature and is accepted.
_REFUSED = {
    *("attention.clamp_kqv", "attention.scale", "attention.max_alibi_bias", "attention.sliding_window"),
    *("attention.key_length_swa", "attention.value_length_swa", "attention.sliding_window_pattern"),
    *("attention.shared_kv_layers", "attention.indexer.top_k", "attention.relative_buckets_count"),
    *("attention.temperature_scale", "attention.temperature_length", "rope.dimension_count_swa", "rope.freq_base_swa"),
    *("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "use_parallel_residual"),
    *("experts_per_group", "moe_latent_size", "swiglu_clamp_exp", "swiglu_clamp_shexp", "full_attention_interval"),
    *("embedding_length_per_layer_input", "activation_sparsity_scale", "expert_chunk_feed_forward_length"),
    *("n_deepstack_layers", "ssm.conv_kernel"),
}
# Keys of features that no architecture above supports. The values 0 and 1 disable the feature and are accepted.
_REFUSED_FACTORS = {
    *("logit_scale", "residual_scale", "embedding_scale", "attention.output_scale", "expert_weights_scale"),
    *("expert_group_scale", "moe_every_n_layers", "interleave_moe_layer_step"),
}
# Model type -> llama.cpp's enum value of the router's scoring function. Files may also store 0 (not set).
_GATES = {"mixtral": 1, "qwen3_moe": 1, "olmoe": 1, "gpt_oss": 3, "glm4_moe": 2}


def config_fields(model: GGUF) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (fields of config.json, notes on unused metadata).

    Raises CheckpointError if the architecture or a metadata value is not supported, or if a key is missing.
    """
    name = model.text("general.architecture")
    if name not in _READ:
        raise model.error(
            f"the architecture {short(name)} is not supported in GGUF files (supported: {', '.join(_READ)}): "
            "load the model's safetensors files"
        )
    family, extra_keys, defaults = _READ[name]
    metadata = {
        key.removeprefix(f"{name}."): value for key, value in model.fields.items() if key.startswith(f"{name}.")
    }
    if family == "llama" and metadata.get("expert_count"):
        family, extra_keys = "mixtral", extra_keys | _MIXTRAL
    keys = _COMMON | extra_keys
    required_keys = [key for key in _COMMON if key not in ("attention.head_count_kv", "rope.freq_base")]
    required_keys += [key for key in keys if key in _NEEDED and not (key in _WIDTH and name == "qwen3moe")]
    if name in ("qwen3moe", "gpt-oss") and metadata.keys() >= _WIDTH.keys():
        required_keys.remove("feed_forward_length")  # width of dense layers, which these models lack
    if missing_keys := [key for key in required_keys if key not in metadata]:
        raise model.error(f"{name}.{missing_keys[0]} is missing: the file is incomplete")
    fields = dict(defaults) | {
        field: _one(model, f"{name}.{key}", metadata[key]) for key, field in keys.items() if key in metadata
    }
    _refuse(model, name, family, {key: value for key, value in metadata.items() if key not in keys})
    _add_defaults(family, fields)
    ids = special_ids(model)
    fields |= {
        "bos_token_id": ids.get("bos"),
        "pad_token_id": ids.get("padding"),
        "eos_token_id": end_ids(model) or None,
    }
    fields |= {"model_type": family, **rope_fields(model, name, metadata, fields["rope_theta"])}
    _add_shapes(model, metadata, fields)
    unused = sorted(metadata.keys() - keys.keys() - _IMPLIED)
    return fields, (f"metadata without effect: {some(unused)}",) if unused else ()


def _refuse(model: GGUF, name: str, family: str, metadata: Mapping[str, Any]) -> None:
    """Raise CheckpointError if metadata affects the model's outputs but has no equivalent in config.json."""
    for key, value in sorted(metadata.items()):
        values = set(value) if isinstance(value, tuple) else {value}
        is_neutral = (
            key not in _REFUSED | _REFUSED_FACTORS | {"attention.causal", "expert_gating_func"}
            or (key in _REFUSED and not any(values))
            or (key in _REFUSED_FACTORS and values <= {0, 1})
            or (key == "attention.causal" and value is True)
            or (key == "expert_gating_func" and value in (0, _GATES.get(family, value)))
            or (key == "rope.freq_base_swa" and value == model.fields.get(f"{name}.rope.freq_base", 10_000.0))
            or (key == "attention.sliding_window_pattern" and family == "gpt_oss" and _alternates(value))
        )
        if not is_neutral:
            raise model.error(f"{name}.{key} is {short(value)}, which is not supported for {name}")


def _alternates(pattern: Any) -> bool:
    """Return whether every second layer, starting with the first, has a sliding window."""
    return pattern == 2 or (
        isinstance(pattern, tuple) and all(has_window == (i % 2 == 0) for i, has_window in enumerate(pattern))
    )


def _add_defaults(family: str, fields: dict[str, Any]) -> None:
    """Add llama.cpp's defaults for missing keys, and replace zeros that mean "disabled" with neutral values."""
    fields.setdefault("rope_theta", 10_000.0)
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    for field, neutral_value in {
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
    }.items():
        if field in fields and not fields[field]:
            fields[field] = neutral_value
    if fields.get("n_group") == 1:
        fields["topk_group"] = 1
    if family == "qwen3_moe" and "moe_intermediate_size" not in fields:
        fields["moe_intermediate_size"] = fields["intermediate_size"] // (fields["num_experts_per_tok"] or 1)


def generation_fields(model: GGUF) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (fields of generation_config.json, notes on unused metadata).

    The fields are the ids of special tokens and the recommended sampling parameters.
    """
    ids, prefix = special_ids(model), "general.sampling."
    names = {"bos": "bos_token_id", "padding": "pad_token_id"}
    fields: dict[str, Any] = {field: ids[key] for key, field in names.items() if key in ids}
    if ends := end_ids(model):
        fields["eos_token_id"] = ends
    metadata = {key.removeprefix(prefix): value for key, value in model.fields.items() if key.startswith(prefix)}
    sampling = {field: _one(model, prefix + key, metadata[key]) for key, field in _SAMPLING.items() if key in metadata}
    if sampling:
        fields |= {"do_sample": sampling.get("temperature", 1) != 0, **sampling}
    unused = sorted(prefix + key for key in metadata.keys() - _SAMPLING.keys())
    return fields, (f"metadata without effect: {some(unused)}",) if unused else ()


def _one(model: GGUF, key: str, value: Any) -> Any:
    """Return the value of a key as a scalar. A value per layer is reduced to its common value.

    Floats are converted with `shortest`. Raises CheckpointError if the values differ between layers.
    """
    if isinstance(value, tuple):
        if len(set(value)) != 1:
            raise model.error(f"{key} differs between layers, which is not supported: {short(value)}")
        value = value[0]
    return shortest(value)


def _add_shapes(model: GGUF, metadata: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """Add the fields that are derived from the tensors, and the head sizes."""
    embed = model.tensors.get("token_embd.weight")
    if embed is None or len(embed.values) != 2:
        raise model.error("tensor token_embd.weight is missing or not a matrix: the file contains no language model")
    fields |= {"vocab_size": embed.values[0], "tie_word_embeddings": "output.weight" not in model.tensors}
    family, heads = fields["model_type"], fields.get("num_attention_heads")
    if family in ("llama", "qwen3", "qwen3_moe", "glm4_moe"):
        fields["attention_bias"] = "blk.0.attn_q.bias" in model.tensors
    if family == "glm4_moe":
        fields["use_qk_norm"] = "blk.0.attn_q_norm.weight" in model.tensors
    if family != "deepseek_v3":
        _add_width(model, metadata, fields)
    if fields.get("num_nextn_predict_layers") and type(fields.get("num_hidden_layers")) is int:
        fields["num_hidden_layers"] -= fields["num_nextn_predict_layers"]  # block_count includes prediction layers
    if family == "deepseek_v3":
        _add_latent(model, metadata, fields, heads)


def _add_width(model: GGUF, metadata: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """Add the head size. Only GLM-4 may apply rotary embeddings to a part of the head."""
    family, hidden, heads = fields["model_type"], fields["hidden_size"], fields["num_attention_heads"]
    if not all(type(size) is int and size > 0 for size in (hidden, heads)):
        return  # the config's validation rejects these sizes
    width = metadata.get("attention.key_length", hidden // heads)
    rotated_width, value_width = (
        metadata.get("rope.dimension_count", width),
        metadata.get("attention.value_length", width),
    )
    is_supported = width * heads == hidden or family not in ("qwen2", "olmoe")
    if value_width != width or not is_supported or (rotated_width != width and family != "glm4_moe"):
        sizes = (
            f"key_length {short(width)}, value_length {short(value_width)}, rope.dimension_count {short(rotated_width)}"
        )
        raise model.error(
            f"heads with {sizes} are not supported for {family} of hidden size {hidden} with {heads} heads"
        )
    if family not in ("qwen2", "olmoe"):
        fields["head_dim"] = width
    if family == "glm4_moe" and width:
        fields["partial_rotary_factor"] = rotated_width / width


def _add_latent(model: GGUF, metadata: Mapping[str, Any], fields: dict[str, Any], heads: Any) -> None:
    rotated_width = metadata.get("rope.dimension_count")
    width, value_width = (
        metadata.get(f"attention.{name}_length_mla", metadata.get(f"attention.{name}_length"))
        for name in ("key", "value")
    )
    if not all(type(size) is int for size in (rotated_width, width, value_width)):
        raise model.error("deepseek2 requires rope.dimension_count, attention.key_length and attention.value_length")
    fields |= {"qk_nope_head_dim": width - rotated_width, "qk_rope_head_dim": rotated_width, "v_head_dim": value_width}
    fields |= {"num_key_value_heads": heads}  # the file stores 1, because llama.cpp attends in the latent space
    has_correction = any(name.endswith("exp_probs_b.bias") for name in model.tensors)
    # Older files of GLM-4.7-Flash lack the key, although the model has sigmoid routers. Like llama.cpp, recognize the
    # model by its number of layers and its vocabulary size.
    is_glm_flash = (fields["num_hidden_layers"], fields["vocab_size"]) == (47, 154_880)
    scoring_function = metadata.get("expert_gating_func") or (2 if is_glm_flash else 1)
    if scoring_function not in (1, 2) or (scoring_function == 1 and has_correction):
        remark = " with exp_probs_b.bias" if has_correction else ""
        raise model.error(
            f"deepseek2.expert_gating_func {short(scoring_function)}{remark} is not supported; "
            "supported: 1 (softmax) and 2 (sigmoid)"
        )
    if scoring_function == 1:
        # Groups are scored by their best expert, as in transformers. llama.cpp sums the scores of the two best experts
        # per group.
        has_groups = fields["n_group"] and fields["n_group"] > 1
        fields |= {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy" if has_groups else "greedy"}
