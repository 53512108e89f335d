"""Faults of config.json and generation_config.json."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from tests.corpus.case import CONFIG, FAMILIES, Case, Draft, Verdict, rotate

GENERATION = "generation_config.json"
_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def cases() -> Iterator[Case]:
    """All of them; a field's faults for one family in turn, or for the families that have it."""
    family = rotate()
    for fault, data, names in TEXTS:
        yield Case(next(family), f"config, {fault}", "refuse", _raw(data), (CONFIG, *names))
    for field, values in FIELDS.items():
        for value in values:
            yield Case(
                next(family), f"config, {field} {_shown(value)}", "refuse", _with({field: value}), (CONFIG, field)
            )
    for kind, values in OWN.items():
        for field, value in values:
            yield Case(kind, f"config, {field} {_shown(value)}", "refuse", _with({field: value}), (CONFIG, field))
    for fault, rope, names in ROPES:
        yield Case(
            next(family), f"config, rope with {fault}", "refuse", _with({"rope_scaling": rope}), (CONFIG, *names)
        )
    for fault, verdict, changes, names in WHOLE:
        yield Case(next(family), f"config, {fault}", verdict, _with(changes), names)
    for kind in FAMILIES:
        yield Case(kind, "config, no model_type", "refuse", _without("model_type"), (CONFIG, "model_type", "mixtral"))
        yield Case(
            kind, "config, a vocabulary of one more", "refuse", _with({"vocab_size": 54}), ("[53, 24]", "[54, 24]")
        )
        yield Case(
            kind, "config, a hidden size of two more", "refuse", _with({"hidden_size": 26}), (CONFIG, "[53, 24]")
        )
        yield Case(kind, "config, 40 layers more", "refuse", _with({"num_hidden_layers": 40}), (CONFIG, "layers"))
    for fault, verdict, data, names in GENERATIONS:
        yield Case(next(family), f"generation_config, {fault}", verdict, _generation(data), names)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:20]}..."


def _raw(data: bytes) -> Callable[[Draft], None]:
    def make(draft: Draft) -> None:
        draft.write()
        (draft.folder / CONFIG).write_bytes(data)

    return make


def _with(changes: dict[str, Any]) -> Callable[[Draft], None]:
    def make(draft: Draft) -> None:
        draft.fields |= changes
        draft.write()

    return make


def _without(name: str) -> Callable[[Draft], None]:
    def make(draft: Draft) -> None:
        del draft.fields[name]
        draft.write()

    return make


def _generation(data: Any) -> Callable[[Draft], None]:
    def make(draft: Draft) -> None:
        draft.write()
        (draft.folder / GENERATION).write_text(data if isinstance(data, str) else json.dumps(data))

    return make


TEXTS: list[tuple[str, bytes, tuple[str, ...]]] = [
    ("empty", b"", ("JSON",)),
    ("no JSON", b"model_type: llama", ("JSON",)),
    ("cut", b'{"model_type": "llama", "hidden_size": 2', ("JSON",)),
    ("a comma too many", b'{"model_type": "llama",}', ("JSON",)),
    ("a list", b"[1]", ("object",)),
    ("null", b"null", ("object",)),
    ("in UTF-16", '{"model_type": "llama"}'.encode("utf-16"), ("JSON",)),
    ("nested 100,000 deep", b'{"model_type":' * 100_000, ("JSON",)),
    ("a field twice", b'{"model_type": "llama", "model_type": "mixtral"}', ("model_type", "twice")),
    ("NaN", b'{"model_type": "llama", "rms_norm_eps": NaN}', ("rms_norm_eps", "nan")),
    ("a number of 5000 digits", b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}", ("JSON",)),
    ("a Git LFS pointer", b"version https://git-lfs.github.com/spec/v1\n", ("git lfs pull",)),
]

_NO_COUNT = (0, -1, 2.0, "24", True, None, [24], 10**12, 10**400)
FIELDS: dict[str, tuple[Any, ...]] = {
    "hidden_size": _NO_COUNT,
    "num_hidden_layers": (*_NO_COUNT, 10**8, 2**31),
    "vocab_size": (0, -5, 1e3, "53", False, {}, 10**12),
    "intermediate_size": (0, -28, None, 10**12),
    "num_attention_heads": (0, -4, 2.5, "4", 10**9),
    "num_key_value_heads": (0, -2, 3, "2", 10**9),
    "head_dim": (-8, 0.5, "8"),
    "max_position_embeddings": (0, -64, "64", 10**12),
    "rms_norm_eps": (0, -1e-5, "1e-5", None, True, 7.0, [1e-5]),
    "rope_theta": (0, -1, 0.5, "1e4", True, 1e300, 10**400),
    "tie_word_embeddings": (1, "true", None),
    "hidden_act": ("gelu", "relu", None, 3, ["silu"]),
    "eos_token_id": (2.0, "2", [], [[1]], {"a": 1}, True, 10**12),
    "bos_token_id": ("1", [1]),
    "pad_token_id": (53, -54, "0", [0]),
    "dtype": ("int8", "float12", 32, ["float32"]),
    "rope_scaling": ("yarn", 3, [1]),
}
OWN: dict[str, list[tuple[str, Any]]] = {
    "llama": [("attention_bias", "false"), ("attention_bias", None), ("mlp_bias", 1)],
    "mixtral": [
        ("num_local_experts", 0), ("num_local_experts", "8"), ("num_local_experts", 10**7), ("num_local_experts", None),
        ("num_experts_per_tok", 0), ("num_experts_per_tok", 7), ("num_experts_per_tok", 2.0), ("num_experts", 5),
        ("sliding_window", 0), ("sliding_window", -1), ("sliding_window", "64"), ("sliding_window", 10**12),
    ],
    "deepseek_v3": [
        ("q_lora_rank", 0), ("kv_lora_rank", None), ("kv_lora_rank", -1), ("qk_rope_head_dim", 7),
        ("qk_nope_head_dim", 0), ("v_head_dim", "12"), ("moe_intermediate_size", 0), ("n_routed_experts", 10),
        ("n_routed_experts", 10**9), ("n_routed_experts", 0), ("n_shared_experts", -1), ("n_shared_experts", 10**9),
        ("n_group", 0), ("n_group", 2), ("n_group", 9), ("topk_group", 4), ("topk_group", 0),
        ("num_experts_per_tok", 7), ("num_experts_per_tok", 10), ("num_key_value_heads", 2), ("norm_topk_prob", "true"),
        ("norm_topk_prob", None), ("routed_scaling_factor", 0), ("routed_scaling_factor", -1.0),
        ("routed_scaling_factor", "2.5"), ("routed_scaling_factor", 1e30), ("first_k_dense_replace", -1),
        ("first_k_dense_replace", 1.5), ("num_nextn_predict_layers", -1), ("num_nextn_predict_layers", 10**12),
        ("rope_interleave", "yes"), ("scoring_func", "softmax"), ("scoring_func", ["sigmoid"]),
        ("topk_method", "greedy"), ("moe_layer_freq", 2), ("num_local_experts", 4),
    ],
}  # fmt: skip

ROPES: list[tuple[str, Any, tuple[str, ...]]] = [
    ("an unknown type", {"type": "magic"}, ("magic",)),
    ("a type that is not computed", {"rope_type": "proportional", "factor": 2.0}, ("proportional",)),
    ("a type that is a list", {"rope_type": ["yarn"]}, ("yarn",)),
    ("no factor", {"type": "linear"}, ("factor",)),
    ("a factor of 0", {"type": "linear", "factor": 0}, ("factor",)),
    ("a negative factor", {"type": "dynamic", "factor": -2.0}, ("factor",)),
    ("a factor that is a text", {"type": "linear", "factor": "2"}, ("factor",)),
    ("a factor of 10**300", {"type": "linear", "factor": 1e300}, ("factor",)),
    ("an integer factor of 400 digits", {"type": "linear", "factor": 10**400}, ("factor",)),
    ("a theta of -1", {"rope_type": "default", "rope_theta": -1}, ("rope_theta",)),
    ("bounds the wrong way", _ROPE | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}, ("low_freq_factor",)),
    ("no bounds", {"rope_type": "llama3", "factor": 8.0}, ("low_freq_factor",)),
    ("half a position", _YARN | {"original_max_position_embeddings": 0.5}, ("original_max_position_embeddings",)),
    ("10**12 positions", _YARN | {"original_max_position_embeddings": 10**12}, ("original_max_position_embeddings",)),
    ("a beta of 0", _YARN | {"beta_fast": 0}, ("beta_fast",)),
    ("an mscale that is a text", _YARN | {"mscale_all_dim": "1"}, ("mscale_all_dim",)),
    ("truncate that is a text", _YARN | {"truncate": "false"}, ("truncate",)),
    ("a factor of 1e-300", {"type": "linear", "factor": 1e-300}, ("factor",)),
    ("a factor but no type", {"factor": 8.0}, ("rope_type",)),
    ("a rope for each kind of layer", {"full_attention": {"rope_type": "linear", "factor": 2.0}}, ("full_attention",)),
    ("a part of the width only", _YARN | {"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
    ("a negative attention_factor", _YARN | {"attention_factor": -1.0}, ("attention_factor",)),
]

WHOLE: list[tuple[str, Verdict, dict[str, Any], tuple[str, ...]]] = [
    ("an unknown model_type", "refuse", {"model_type": "gpt_bigcode"}, (CONFIG, "gpt_bigcode", "deepseek_v3")),
    ("a model_type that is a list", "refuse", {"model_type": ["llama"]}, (CONFIG, "model_type")),
    ("unknown, with code of its own", "refuse", {"model_type": "x", "auto_map": {"AutoModel": "modeling_x.X"}}, ("'x'", "mixtral")),
    ("known, with code of its own", "accept", {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, ()),
    ("transformers' internal hook", "accept", {"_attn_implementation_internal": "os.system"}, ()),
    ("unknown fields", "report", {"quantum": 3, "nested": {"a": [1] * 1000}}, (CONFIG, "quantum", "nested")),
    ("infinities in fields that nothing reads", "report", {"quantum": [0.0, float("inf")]}, (CONFIG, "quantum")),
    ("an unknown field of a million letters", "report", {"quantum": "x" * 10**6}, (CONFIG, "quantum")),
    ("unknown fields that the repository's code may read", "refuse", {"quantum": 3, "auto_map": {"AutoModel": "a.B"}}, (CONFIG, "quantum", "auto_map")),
    ("no causal mask", "refuse", {"is_causal": False}, (CONFIG, "is_causal")),
    ("a classifier", "refuse", {"architectures": ["LlamaForSequenceClassification"]}, (CONFIG, "LlamaForSequenceClassification", "only causal")),
    ("a draft model", "refuse", {"architectures": ["LlamaForCausalLMEagle3"]}, (CONFIG, "draft model")),
    ("MLX", "refuse", {"quantization": {"group_size": 64, "bits": 4}}, (CONFIG, "MLX")),
    ("unknown fields that are null, false or empty", "accept", {"a": None, "b": False, "c": {}, "d": []}, ()),
    ("windows for some layers, which nothing reads", "report", {"max_window_layers": 2}, (CONFIG, "max_window_layers")),
    ("partial rotation without scaling", "refuse", {"partial_rotary_factor": 0.5}, (CONFIG, "partial_rotary_factor")),
    ("full rotation", "accept", {"partial_rotary_factor": 1.0}, ()),
    ("gptq", "refuse", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, (CONFIG, "quantization_config", "gptq")),
    ("bitsandbytes", "refuse", {"quantization_config": {"load_in_8bit": True}}, (CONFIG, "quantization_config")),
    ("quantization that is a text", "refuse", {"quantization_config": "fp8"}, (CONFIG, "quantization_config")),
    ("a quantization method that is a list", "refuse", {"quantization_config": {"quant_method": ["fp8"]}}, (CONFIG, "quantization_config")),
    ("FP8 without a block size", "refuse", {"quantization_config": {"quant_method": "fp8"}}, (CONFIG, "weight_block_size")),
    ("FP8 with blocks of 0", "refuse", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}, (CONFIG, "weight_block_size")),
    ("FP8 with blocks that are texts", "refuse", {"quantization_config": {"quant_method": "fp8", "weight_block_size": ["1", "1"]}}, (CONFIG, "weight_block_size")),
    ("FP8 of another format", "refuse", {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [8, 8]}}, (CONFIG, "fmt")),
    ("quantization without its method", "refuse", {"quantization_config": {"bits": 8}}, (CONFIG, "lacks quant_method")),
    ("quantization by ModelOpt, weights without", "refuse", {"quantization_config": {"quant_algo": "FP8"}}, (CONFIG, "modelopt", "no tensor contains quantized weights")),
    ("a quantization method of a million letters", "refuse", {"quantization_config": {"quant_method": "x" * 10**6}}, (CONFIG, "quant")),
    ("a null rope_type beside a type", "accept", {"rope_scaling": {"rope_type": None, "type": "default"}}, ()),
    ("an eos id of no token", "report", {"eos_token_id": [1, 53]}, (CONFIG, "eos_token_id 53")),
    ("a negative bos id", "report", {"bos_token_id": -1}, (CONFIG, "bos_token_id -1")),
    ("dtype with torch's name", "accept", {"torch_dtype": "torch.float32"}, ()),
    ("null quantization", "accept", {"quantization_config": None}, ()),
    ("partial rotation", "refuse", {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}}, (CONFIG, "partial_rotary_factor")),
    ("two aliases at odds", "refuse", {"model_type": "mixtral", "num_local_experts": 6, "num_experts": 8}, (CONFIG, "num_experts")),
]  # fmt: skip

GENERATIONS: list[tuple[str, Verdict, Any, tuple[str, ...]]] = [
    ("no JSON", "report", "{", ("generation_config.json is not valid JSON",)),
    ("a list", "report", "[]", ("generation_config.json must contain a JSON object",)),
    ("a number that is infinite", "report", '{"temperature": 1e400}', ("1e400",)),
    ("an eos id beyond the vocabulary", "report", {"eos_token_id": 53}, ("eos_token_id 53 is not in the vocabulary",)),
    ("eos ids of which one is negative", "report", {"eos_token_id": [1, -1]}, ("eos_token_id -1",)),
    ("a pad id beyond the vocabulary", "report", {"pad_token_id": 10**9}, ("pad_token_id 1000000000",)),
    ("an eos id that is a text", "refuse", {"eos_token_id": "</s>"}, (GENERATION, "eos_token_id")),
    ("no eos id in a list", "refuse", {"eos_token_id": []}, (GENERATION, "eos_token_id")),
    ("an eos id that is a fraction", "refuse", {"eos_token_id": 1.5}, (GENERATION, "eos_token_id")),
    ("ids as transformers takes them", "accept", {"eos_token_id": [2.0, 1], "bos_token_id": [1]}, ()),
]
