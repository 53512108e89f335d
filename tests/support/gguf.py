"""Writes Hugging Face checkpoints as GGUF files, as llama.cpp's converter does, with the writer and the names of the
``gguf`` library."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.tiny import Fields, Weights

ARCHITECTURES = {
    **{"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"},
    **{"qwen3_moe": "qwen3moe", "olmoe": "olmoe", "gpt_oss": "gpt-oss", "glm4_moe": "glm4moe"},
    **{"deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "kimi_k2": "deepseek2"},
}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
Kind = Callable[[str, np.ndarray], Any]  # name in the file, values -> type of GGML


def floats(_: str, values: np.ndarray) -> Any:
    """Every tensor in float32."""
    return gguf.GGMLQuantizationType.F32


def quantised(name: str) -> Kind:
    """Matrices in this type, as `llama-quantize --pure`; norms, biases and routers stay floats."""

    def kind(tensor: str, values: np.ndarray) -> Any:
        matrix = values.ndim > 1 and "ffn_gate_inp" not in tensor and tensor.endswith(".weight")
        return gguf.GGMLQuantizationType[name if matrix else "F32"]

    return kind


def write(
    file: Path,
    fields: Fields,
    weights: Weights,
    kind: Kind = floats,
    *,
    metadata: Mapping[str, Any] | None = None,
    fused: bool = False,
) -> Path:
    """Write a model. ``metadata``: further fields of the file, as text, numbers or lists. ``fused``: gate and up of all
    experts in one tensor, an option of the converter."""
    arch = ARCHITECTURES[fields["model_type"]]
    writer = gguf.GGUFWriter(file, arch)
    for key, value in (_parameters(fields) | dict(metadata or {})).items():
        key = key if key.startswith(("tokenizer.", "general.")) else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    tensors = _tensors(fields, weights, arch)
    for name in [name for name in tensors if fused and "ffn_gate_exps" in name]:
        both = tensors.pop(name), tensors.pop(name.replace("ffn_gate_exps", "ffn_up_exps"))
        tensors[name.replace("ffn_gate_exps", "ffn_gate_up_exps")] = np.concatenate(both, axis=1)
    for name, values in tensors.items():
        of = kind(name, values)
        values = np.ascontiguousarray(values, np.float32)
        data = values if of == gguf.GGMLQuantizationType.F32 else gguf.quantize(values, of)
        writer.add_tensor(name, data, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _parameters(fields: Fields) -> dict[str, Any]:
    """The metadata of a config.json."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind, heads = fields["model_type"], fields["num_attention_heads"]
    found: dict[str, Any] = {
        "block_count": fields["num_hidden_layers"],
        "context_length": fields["max_position_embeddings"],
        "embedding_length": fields["hidden_size"],
        "feed_forward_length": fields["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": fields.get("num_key_value_heads", heads),
        "attention.layer_norm_rms_epsilon": float(fields.get("rms_norm_eps", 1e-6)),
        "rope.freq_base": float(fields.get("rope_theta") or rope.get("rope_theta") or 10000.0),
    }
    renamed = {
        **{"num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"},
        **{"n_group": "expert_group_count", "topk_group": "expert_group_used_count"},
        **{"num_local_experts": "expert_count", "num_experts": "expert_count", "n_routed_experts": "expert_count"},
        **{"n_shared_experts": "expert_shared_count", "first_k_dense_replace": "leading_dense_block_count"},
        **{"routed_scaling_factor": "expert_weights_scale", "norm_topk_prob": "expert_weights_norm"},
        **{"q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank"},
        **{"vocab_size": "vocab_size", "num_nextn_predict_layers": "nextn_predict_layers"},
    }
    if kind == "gpt_oss":
        renamed |= {"intermediate_size": "expert_feed_forward_length", "sliding_window": "attention.sliding_window"}
    found |= {key: fields[name] for name, key in renamed.items() if fields.get(name) is not None}
    if "expert_weights_scale" in found:
        found["expert_weights_scale"] = float(found["expert_weights_scale"])
    scoring = fields.get("scoring_func", "sigmoid" if kind in ("deepseek_v3", "kimi_k2", "glm4_moe") else None)
    if scoring:
        found["expert_gating_func"] = {"softmax": 1, "sigmoid": 2}[scoring]
    width = fields.get("head_dim") or fields["hidden_size"] // heads
    if "kv_lora_rank" in fields:
        rotated = fields["qk_rope_head_dim"]
        found |= {
            **{"attention.head_count_kv": 1, "rope.dimension_count": rotated},
            **{
                "attention.key_length": fields["kv_lora_rank"] + rotated,
                "attention.value_length": fields["kv_lora_rank"],
            },
            "attention.key_length_mla": fields["qk_nope_head_dim"] + rotated,
            "attention.value_length_mla": fields["v_head_dim"],
        }
    else:
        part = fields.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
        found |= {"attention.key_length": width, "attention.value_length": width}
        found["rope.dimension_count"] = int(width * part)
    if kind == "glm4_moe":
        found["block_count"] += fields.get("num_nextn_predict_layers", 0)
    scaling = rope.get("rope_type") or rope.get("type")
    if scaling in ("yarn", "linear"):
        found |= {"rope.scaling.type": scaling, "rope.scaling.factor": float(rope["factor"])}
        if "original_max_position_embeddings" in rope:
            found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for name in ("beta_fast", "beta_slow"):
            if name in rope:
                found[f"rope.scaling.yarn_{name}"] = float(rope[name])
        if rope.get("mscale_all_dim"):
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found


def _tensors(fields: Fields, weights: Weights, arch: str) -> dict[str, np.ndarray]:
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    blocks = fields["num_hidden_layers"] + fields.get("num_nextn_predict_layers", 0)
    names, merged, plain = gguf.get_tensor_name_map(number, blocks), dict[str, dict[int, np.ndarray]](), dict(weights)
    for name in weights:
        if match := _EXPERT.fullmatch(name):
            merged.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = plain.pop(name)
    for name, kernels in merged.items():
        name = re.sub(r"model\.(layers\.\d+)\.block_sparse_moe", r"\1.feed_forward", name)
        plain[name] = np.stack([kernels[e] for e in range(len(kernels))])
    found: dict[str, np.ndarray] = {}
    for name, values in plain.items():
        if name == "lm_head.weight" and fields.get("tie_word_embeddings"):
            continue
        for theirs, each in _changed(fields, arch, name, np.asarray(values, np.float32)):
            mapped = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
            assert mapped is not None, theirs
            found[mapped] = each
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) == "llama3":
        found["rope_freqs.weight"] = _llama3(rope, fields)
    return found


def _changed(fields: Fields, arch: str, name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """The tensors that the converter makes of one."""
    heads = {"q": fields["num_attention_heads"], "k": fields.get("num_key_value_heads", fields["num_attention_heads"])}
    if arch == "llama" and (match := re.search(r"\.([qk])_proj\.(weight|bias)$", name)):
        n = heads[match[1]]
        halves = values.reshape(n, 2, len(values) // n // 2, *values.shape[1:])
        return [(name, halves.swapaxes(1, 2).reshape(values.shape))]
    if arch == "deepseek2" and name.endswith("kv_b_proj.weight"):
        each = values.reshape(heads["q"], -1, values.shape[-1])
        k, v = np.split(each, [fields["qk_nope_head_dim"]], axis=1)
        return [(name.replace("kv_b_proj", "k_b_proj"), k.swapaxes(1, 2)), (name.replace("kv_b_proj", "v_b_proj"), v)]
    if arch == "gpt-oss" and "mlp.experts." in name:
        stem, bias = name.removesuffix("_bias"), name.endswith("_bias")
        kernels = values if bias else values.swapaxes(1, 2)
        ending = "bias" if bias else "weight"
        if stem.endswith("gate_up_proj"):
            return [
                (f"{stem.replace('gate_up', part)}.{ending}", kernels[:, i::2]) for i, part in enumerate(("gate", "up"))
            ]
        return [(f"{stem}.{ending}", kernels)]
    if name.endswith("sinks"):
        return [(f"{name}.weight", values)]
    if name.endswith("e_score_correction_bias"):
        return [(name.replace("e_score_correction_bias", "e_score_correction.bias"), values)]
    return [(name, values)]


def _llama3(rope: Mapping[str, Any], fields: Fields) -> np.ndarray:
    """How much slower each pair turns."""
    width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    theta = fields.get("rope_theta") or rope["rope_theta"]
    found, context = [], rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    for pair in range(width // 2):
        wave = 2 * np.pi * theta ** (2 * pair / width)
        smooth = min(1.0, max(0.0, (context / wave - low) / (high - low)))
        found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)
