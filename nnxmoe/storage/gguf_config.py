"""The metadata of a GGUF file as the fields of a config.json.

Sources: the converter and the readers of llama.cpp. What it derives from tensors or does not store is derived here too.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from nnxmoe.config.printable import short, some
from nnxmoe.config.rope import Llama3Rope
from nnxmoe.storage.gguf import GGUF
from nnxmoe.storage.gguf_tokenizer import end_ids, special_ids

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
_HEADS = {"attention.key_length": "head_dim"}
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
_NO_GROUPS |= {"num_nextn_predict_layers": 0}
_LATENT = {"attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank"}

# Architecture of llama.cpp -> model_type, fields beside the common ones, and what llama.cpp does without a field.
_READ: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "llama": ("llama", {"rope.dimension_count": "head_dim"}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", _HEADS, {}),
    "qwen3moe": ("qwen3_moe", _HEADS | _EXPERTS | _WIDTH, {"norm_topk_prob": True}),
    "olmoe": ("olmoe", _EXPERTS, {"norm_topk_prob": False}),
    "gpt-oss": (
        "gpt_oss",
        _HEADS | {
            **{"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
            **{"expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "sliding_window"},
        },
        {},
    ),
    "glm4moe": ("glm4_moe", _HEADS | _GROUPS, _NO_GROUPS),
    "deepseek2": ("deepseek_v3", _LATENT | _GROUPS, _NO_GROUPS | {"q_lora_rank": None, "n_shared_experts": None}),
}  # fmt: skip
_MIXTRAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_SAMPLING = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
_SAMPLING |= {name: name for name in ("top_k", "top_p", "min_p")}
# Keys that say nothing more than other keys and the tensors do, or what no computation reads.
_IMPLIED = {
    *("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.dimension_count", "expert_gating_func"),
    *("attention.key_length", "attention.value_length", "attention.key_length_mla", "attention.value_length_mla"),
    *("attention.causal", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
    *(f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "yarn_log_multiplier")),
    *(f"rope.scaling.{name}" for name in ("attn_factor", "yarn_beta_fast", "yarn_beta_slow")),
}
# Keys that change the numbers of the layers in ways that no config above has.
_REFUSED = {
    *("attention.clamp_kqv", "attention.scale", "attention.max_alibi_bias", "attention.sliding_window"),
    *("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "residual_scale", "embedding_scale"),
    *("use_parallel_residual", "attention.temperature_scale"),
}


def config_fields(model: GGUF) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields, and notes on metadata without effect. Raises CheckpointError for what cannot be read."""
    name = model.text("general.architecture")
    if name not in _READ:
        raise model.error(
            f"models of the architecture {short(name)} are not read from GGUF files, those of {', '.join(_READ)} are: "
            "load the model's safetensors files"
        )
    kind, more, missing = _READ[name]
    given = {key.removeprefix(f"{name}."): value for key, value in model.fields.items() if key.startswith(f"{name}.")}
    if kind == "llama" and given.get("expert_count"):
        kind, more = "mixtral", more | _MIXTRAL
    known = _COMMON | more
    lacking = [key for key in _COMMON if key not in given and key not in ("attention.head_count_kv", "rope.freq_base")]
    if lacking:
        raise model.error(f"{name}.{lacking[0]} is missing: the file is incomplete")
    refused = sorted(key for key in _REFUSED & given.keys() - known.keys() if given[key])
    if refused:
        raise model.error(f"{name}.{refused[0]} is {short(given[refused[0]])}, which is not supported for {name}")
    fields = dict(missing) | {
        field: _one(model, f"{name}.{key}", given[key]) for key, field in known.items() if key in given
    }
    ids = special_ids(model)
    fields |= {
        "bos_token_id": ids.get("bos"),
        "pad_token_id": ids.get("padding"),
        "eos_token_id": end_ids(model) or None,
    }
    fields |= {"model_type": kind, **_rope(model, name, given, fields)}
    _add_shapes(model, given, fields)
    unused = sorted(given.keys() - known.keys() - _IMPLIED)
    return fields, (f"metadata without effect: {some(unused)}",) if unused else ()


def generation_fields(model: GGUF) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of a generation_config.json: special tokens and recommended sampling; notes on what has no effect."""
    ids, prefix = special_ids(model), "general.sampling."
    names = {"bos": "bos_token_id", "padding": "pad_token_id"}
    fields: dict[str, Any] = {field: ids[key] for key, field in names.items() if key in ids}
    if ends := end_ids(model):
        fields["eos_token_id"] = ends
    given = {key.removeprefix(prefix): value for key, value in model.fields.items() if key.startswith(prefix)}
    sampling = {field: _one(model, prefix + key, given[key]) for key, field in _SAMPLING.items() if key in given}
    if sampling:
        fields |= {"do_sample": sampling.get("temperature", 1) != 0, **sampling}
    unused = sorted(prefix + key for key in given.keys() - _SAMPLING.keys())
    return fields, (f"metadata without effect: {some(unused)}",) if unused else ()


def _one(model: GGUF, key: str, value: Any) -> Any:
    """A number; one per layer if all are equal; float32 as the shortest decimal."""
    if isinstance(value, tuple):
        if len(set(value)) != 1:
            raise model.error(f"{key} differs between layers, which is not supported: {short(value)}")
        value = value[0]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _add_shapes(model: GGUF, given: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """Add what the tensors say, and the widths that llama.cpp stores as sums."""
    embed = model.tensors.get("token_embd.weight")
    if embed is None or len(embed.values) != 2:
        raise model.error("tensor token_embd.weight is missing or not a matrix: the file holds no language model")
    fields |= {"vocab_size": embed.values[0], "tie_word_embeddings": "output.weight" not in model.tensors}
    kind, heads = fields["model_type"], fields.get("num_attention_heads")
    if kind in ("llama", "qwen3", "qwen3_moe", "glm4_moe"):
        fields["attention_bias"] = "blk.0.attn_q.bias" in model.tensors
    if kind == "glm4_moe":
        fields["use_qk_norm"] = "blk.0.attn_q_norm.weight" in model.tensors
        rotated = given.get("rope.dimension_count")
        if rotated is not None and fields.get("head_dim"):
            fields["partial_rotary_factor"] = rotated / fields["head_dim"]
    if fields.get("num_nextn_predict_layers") and type(fields.get("num_hidden_layers")) is int:
        fields["num_hidden_layers"] -= fields["num_nextn_predict_layers"]  # which block_count includes
    if kind == "deepseek_v3":
        _add_latent(model, given, fields, heads)


def _add_latent(model: GGUF, given: Mapping[str, Any], fields: dict[str, Any], heads: Any) -> None:
    rotated = given.get("rope.dimension_count")
    width, values = (
        given.get(f"attention.{name}_length_mla", given.get(f"attention.{name}_length")) for name in ("key", "value")
    )
    if not all(type(size) is int for size in (rotated, width, values)):
        raise model.error("deepseek2 needs rope.dimension_count, attention.key_length and attention.value_length")
    fields |= {"qk_nope_head_dim": width - rotated, "qk_rope_head_dim": rotated, "v_head_dim": values}
    fields |= {"num_key_value_heads": heads}  # the file has 1: llama.cpp computes in the latent space
    gate, corrected = given.get("expert_gating_func"), any(name.endswith("exp_probs_b.bias") for name in model.tensors)
    if gate not in (None, 1, 2):
        raise model.error(f"deepseek2.expert_gating_func {short(gate)} is not supported; softmax 1 and sigmoid 2 are")
    if gate != 2 and not corrected:
        grouped = fields["n_group"] and fields["n_group"] > 1
        fields |= {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy" if grouped else "greedy"}


def _rope(model: GGUF, name: str, given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rope fields. llama.cpp stores Llama 3's scaling as one factor per frequency."""
    scaling = {key.removeprefix("rope.scaling."): value for key, value in given.items() if "rope.scaling." in key}
    kind, factor = scaling.get("type", "none"), scaling.get("factor")
    factors = model.tensors.get("rope_freqs.weight")
    if factors is not None and kind in ("none", "linear") and not (factor or 1) > 1:
        return _llama3(model, factors, float(fields.get("rope_theta", 10_000.0)))
    if kind == "none" or not factor:
        return {}
    if factors is not None or kind not in ("linear", "yarn"):
        more = " with rope_freqs.weight" if factors is not None else ""
        raise model.error(f"{name}.rope.scaling.type {short(kind)}{more} is not supported; linear and yarn are")
    found = {"rope_type": kind, "factor": _one(model, name, factor)}
    if kind == "linear":
        return {"rope_scaling": found}
    renamed = {"original_context_length": "original_max_position_embeddings", "attn_factor": "attention_factor"}
    renamed |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    found |= {field: _one(model, name, scaling[key]) for key, field in renamed.items() if key in scaling}
    if name == "gpt-oss":
        found["truncate"] = False
    if (log := scaling.get("yarn_log_multiplier")) is not None and name == "deepseek2":
        scale = round(10 * _one(model, name, log), 6)  # the converter of deepseek2 writes a tenth of mscale_all_dim
        found |= {"mscale": scale, "mscale_all_dim": scale}
    elif log:
        raise model.error(f"{name}.rope.scaling.yarn_log_multiplier {short(log)} is not supported")
    return {"rope_scaling": found}


def _llama3(model: GGUF, info: Any, theta: float) -> dict[str, Any]:
    if info.kind != "F32" or len(info.values) != 1 or not 1 <= info.values[0] <= 1 << 15:
        raise model.error(f"rope_freqs.weight is {info.kind} {list(info.values)}: it must be a vector of F32")
    with open(info.file, "rb") as file:
        file.seek(info.begin)
        found = np.frombuffer(file.read(info.nbytes), "<f4")
    if (found == 1).all():
        return {}
    low, high, most = 1.0, 4.0, float(found.max())
    plain, ramp = theta ** (-np.arange(len(found)) / len(found)), (found > 1.001) & (found < 0.999 * most)
    kept = (1 / found[ramp] - 1 / most) / (1 - 1 / most)
    turns = (low + kept * (high - low)) * 2 * np.pi / plain[ramp]  # the positions before scaling, from each factor
    positions = round(float(np.median(turns))) if ramp.any() else 8192
    wanted = Llama3Rope(2 * len(found), theta, most, low, high, positions)
    if not np.allclose(plain / np.asarray(wanted.frequencies(jnp.int32(0))), found, rtol=1e-4):
        raise model.error(
            f"rope_freqs.weight has factors that are not Llama 3's: not supported: {short(found.tolist())}"
        )
    rope = {"factor": most, "low_freq_factor": low, "high_freq_factor": high}
    return {"rope_scaling": {"rope_type": "llama3", **rope, "original_max_position_embeddings": positions}}
