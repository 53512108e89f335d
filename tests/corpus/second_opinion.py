"""What is sound, by rules written a second time and in another way: what the fuzz tests hold our acceptance against."""

import json
import os
from math import inf, prod
from typing import Any

WIDTHS = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


def sound_container(data: bytes) -> bool:
    """A safetensors file whose tensors cover every byte of its data exactly once."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        return False
    names: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names.extend(name for name, value in pairs if isinstance(value, dict))
        return dict(pairs)

    try:
        header = json.loads(data[8 : 8 + length].decode(), object_pairs_hook=collect)
    except (ValueError, RecursionError):
        return False
    if not isinstance(header, dict) or len(names) != len(set(names)):
        return False
    painted = bytearray(len(data) - 8 - length)
    for name, one in header.items():
        if name == "__metadata__":
            pairs = {} if one is None else one
            if not isinstance(pairs, dict) or any(type(value) is not str for value in pairs.values()):
                return False
            continue
        if not isinstance(one, dict) or not isinstance(one.get("dtype"), str) or one["dtype"] not in WIDTHS:
            return False
        shape, offsets = one.get("shape"), one.get("data_offsets")
        lists = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
        if not lists or any(type(number) is not int or number < 0 for number in [*shape, *offsets]):
            return False
        begin, end = offsets
        if end > len(painted) or end - begin != prod(shape) * WIDTHS[one["dtype"]]:
            return False
        for position in range(begin, end):
            painted[position] += 1
            if painted[position] > 1:
                return False
    return all(painted)


def sound_index(folder: str, index: Any, holds: dict[str, set[str]]) -> bool:
    """An index that names safetensors files in the folder or below it. A tensor that a listed file holds must be in the
    one that is named for it."""
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        return False
    places = {}
    for tensor, file in weight_map.items():
        if type(file) is not str or not file.endswith(".safetensors") or file[0] == "/" or ".." in file.split("/"):
            return False
        if "\0" in file or not os.path.isfile(os.path.join(folder, file)):
            return False
        places[tensor] = os.path.normpath(file)
    held = set().union(*(holds[file] for file in places.values()))
    return all(tensor in holds[file] for tensor, file in places.items() if tensor in held)


def sound_config(fields: dict[str, Any]) -> bool:
    """A config.json whose every number makes sense, alone and with the others."""
    c = {k: v for k, v in fields.items()}

    def whole(name: str, most: float, least: int = 1) -> bool:
        return type(c[name]) is int and least <= c[name] <= most

    def real(value: Any, most: float) -> bool:
        return type(value) in (int, float) and 0 < value <= most < inf

    kind, heads = c["model_type"], c["num_attention_heads"]
    limits = {
        "vocab_size": 2**24, "hidden_size": 2**20, "intermediate_size": 2**24, "num_hidden_layers": 1024,
        "num_attention_heads": 2**14, "max_position_embeddings": 2**31 - 1,
    }  # fmt: skip
    kinds = ("llama", "mistral", "mixtral", "deepseek_v3", "gpt_oss")
    if kind not in kinds or not all(whole(k, v) for k, v in limits.items()):
        return False
    if c["num_key_value_heads"] is not None and (
        not whole("num_key_value_heads", heads) or heads % c["num_key_value_heads"]
    ):
        return False
    if c["head_dim"] is None:
        even = kind != "gpt_oss" and c["hidden_size"] % heads == 0 and c["hidden_size"] // heads % 2 == 0
    else:
        even = whole("head_dim", 2**16) and c["head_dim"] % 2 == 0
    if kind != "deepseek_v3" and not even:
        return False
    if not real(c["rms_norm_eps"], 1) or not real(c["rope_theta"], 1e15) or c["rope_theta"] <= 1:
        return False
    ends = c["eos_token_id"] if type(c["eos_token_id"]) is list else [c["eos_token_id"]]
    as_token_ids = all(type(i) is int and abs(i) <= 2**31 for i in ends if i is not None or len(ends) > 1)
    if not ends or not as_token_ids or not (c["bos_token_id"] is None or type(c["bos_token_id"]) is int):
        return False
    pad = c["pad_token_id"]
    if pad is not None and not (type(pad) is int and -c["vocab_size"] <= pad < c["vocab_size"]):
        return False
    if any(
        type(c[flag]) is not bool
        for flag in ("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob")
        if flag in c and (flag, kind) not in IGNORED
    ):
        return False
    if c.get("hidden_act", "silu") not in ("silu", "swish"):
        return False
    if kind in ("mistral", "mixtral") and c["sliding_window"] is not None and not whole("sliding_window", 2**31 - 1):
        return False
    if kind == "gpt_oss" and not (real(c["swiglu_alpha"], 1e6) and real(c["swiglu_limit"], 1e6) and _sound_layers(c)):
        return False
    if kind in ("mixtral", "gpt_oss"):
        return whole("num_local_experts", 4096) and whole("num_experts_per_tok", c["num_local_experts"])
    return kind != "deepseek_v3" or _sound_deepseek(c, whole, real)


def _sound_layers(c: dict[str, Any]) -> bool:
    kinds = ["sliding_attention"] if c["layer_types"] is None else c["layer_types"]
    if type(kinds) is not list or (c["layer_types"] is not None and len(kinds) != c["num_hidden_layers"]):
        return False
    if any(kind not in ("sliding_attention", "full_attention") for kind in kinds):
        return False
    if c["sliding_window"] is None:
        return "sliding_attention" not in kinds
    return type(c["sliding_window"]) is int and 1 <= c["sliding_window"] < 2**31


IGNORED = {(flag, kind) for flag in ("attention_bias", "mlp_bias") for kind in ("mistral", "mixtral")}
IGNORED |= {
    ("mlp_bias", "deepseek_v3"),
    ("norm_topk_prob", "llama"),
    ("norm_topk_prob", "mixtral"),
    ("norm_topk_prob", "mistral"),
}


def _sound_deepseek(c: dict[str, Any], whole: Any, real: Any) -> bool:
    widths = {"kv_lora_rank": 2**20, "qk_nope_head_dim": 2**16, "qk_rope_head_dim": 2**16, "v_head_dim": 2**16}
    if not all(whole(k, v) for k, v in widths.items()) or c["qk_rope_head_dim"] % 2:
        return False
    if c["q_lora_rank"] is not None and not whole("q_lora_rank", 2**20):
        return False
    if c["num_key_value_heads"] not in (None, c["num_attention_heads"]):
        return False
    if c["head_dim"] is not None and not whole("head_dim", 2**16):
        return False
    if not whole("moe_intermediate_size", 2**24) or not whole("n_routed_experts", 4096):
        return False
    if c["n_routed_experts"] * c["num_hidden_layers"] > 2**18 or not real(c["routed_scaling_factor"], 1e6):
        return False
    if not whole("n_group", c["n_routed_experts"] // 2) or c["n_routed_experts"] % c["n_group"]:
        return False
    if c["n_shared_experts"] is not None and not whole("n_shared_experts", 4096, 0):
        return False
    if not whole("first_k_dense_replace", 2**31 - 1, 0) or not whole("num_nextn_predict_layers", 1024, 0):
        return False
    reach = c["n_routed_experts"] // c["n_group"]
    return whole("topk_group", c["n_group"]) and whole("num_experts_per_tok", c["topk_group"] * reach)
