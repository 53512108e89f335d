"""Tiny Hugging Face checkpoints made from a config and a seed, and models built from them."""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import nnxmoe

Fields = dict[str, Any]
Weights = dict[str, np.ndarray]

ORACLE = nnxmoe.Strategy(  # no default that asks for the backend: the corpus forks after importing this
    dispatch=nnxmoe.Dense(),
    matmul=nnxmoe.MaskedMatmul(),
    attention_fn=nnxmoe.ReferenceAttention(),
    mla=nnxmoe.NaiveMLA(),
    quantized=nnxmoe.AutoProduct(),
)


_SMALL: Fields = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TINY: dict[str, Fields] = {
    "llama": _SMALL | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": _SMALL | {"model_type": "mistral", "sliding_window": 5},
    "mixtral": _SMALL
    | {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "deepseek_v3": _SMALL
    | {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "attention_bias": True,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "moe_intermediate_size": 14,
        "n_routed_experts": 9,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": _SMALL
    | {
        "model_type": "gpt_oss",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "attention_bias": True,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "swiglu_alpha": 1.5,
        "swiglu_limit": 0.9,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 0.9,
            "beta_slow": 0.2,
            "truncate": False,
            "original_max_position_embeddings": 8,
        },
    },
}


def tiny_weights(fields: Fields, seed: int = 0) -> Weights:
    """Random tensors for a config by Hugging Face name; norms are not 1 and biases not 0."""
    rng, c, out = np.random.default_rng(seed), fields, {}
    dim, heads = c["hidden_size"], c["num_attention_heads"]
    width = c.get("head_dim") or dim // heads

    def linear(name: str, outs: int, ins: int, bias: bool = False) -> None:
        out[name + ".weight"] = rng.standard_normal((outs, ins)) / math.sqrt(ins)
        if bias:
            out[name + ".bias"] = 0.3 * rng.standard_normal(outs)

    def norm(name: str, size: int) -> None:
        out[name + ".weight"] = 1 + 0.3 * rng.standard_normal(size)

    def mlp(name: str, hidden: int, names: tuple[str, str, str], bias: bool = False) -> None:
        linear(name + names[0], hidden, dim, bias)
        linear(name + names[1], hidden, dim, bias)
        linear(name + names[2], dim, hidden, bias)

    def latent_attention(name: str) -> None:
        nope, rope, value, bias = (
            c["qk_nope_head_dim"],
            c["qk_rope_head_dim"],
            c["v_head_dim"],
            c.get("attention_bias", False),
        )
        if c["q_lora_rank"] is None:
            linear(name + "q_proj", heads * (nope + rope), dim)
        else:
            linear(name + "q_a_proj", c["q_lora_rank"], dim, bias)
            norm(name + "q_a_layernorm", c["q_lora_rank"])
            linear(name + "q_b_proj", heads * (nope + rope), c["q_lora_rank"])
        linear(name + "kv_a_proj_with_mqa", c["kv_lora_rank"] + rope, dim, bias)
        norm(name + "kv_a_layernorm", c["kv_lora_rank"])
        linear(name + "kv_b_proj", heads * (nope + value), c["kv_lora_rank"])
        linear(name + "o_proj", dim, heads * value, bias)

    names = ("gate_proj", "up_proj", "down_proj")
    out["model.embed_tokens.weight"] = rng.standard_normal((c["vocab_size"], dim))
    norm("model.norm", dim)
    if not c.get("tie_word_embeddings"):
        linear("lm_head", c["vocab_size"], dim)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        norm(layer + "input_layernorm", dim)
        norm(layer + "post_attention_layernorm", dim)
        if c["model_type"] == "deepseek_v3":
            latent_attention(layer + "self_attn.")
        else:
            kv_heads, bias = c.get("num_key_value_heads") or heads, c.get("attention_bias", False)
            linear(layer + "self_attn.q_proj", heads * width, dim, bias)
            linear(layer + "self_attn.k_proj", kv_heads * width, dim, bias)
            linear(layer + "self_attn.v_proj", kv_heads * width, dim, bias)
            linear(layer + "self_attn.o_proj", dim, heads * width, bias)
        if c["model_type"] == "mixtral":
            linear(layer + "block_sparse_moe.gate", c["num_local_experts"], dim)
            for e in range(c["num_local_experts"]):
                mlp(f"{layer}block_sparse_moe.experts.{e}.", c["intermediate_size"], ("w1", "w3", "w2"))
        elif c["model_type"] == "gpt_oss":
            experts, hidden = c["num_local_experts"], c["intermediate_size"]
            out[layer + "self_attn.sinks"] = 1.5 * rng.standard_normal(heads)
            linear(layer + "mlp.router", experts, dim, bias=True)
            for name, shape in (("gate_up", (dim, 2 * hidden)), ("down", (hidden, dim))):
                stacked = rng.standard_normal((experts, *shape)) / math.sqrt(shape[0])
                out[f"{layer}mlp.experts.{name}_proj"] = stacked
                out[f"{layer}mlp.experts.{name}_proj_bias"] = 0.3 * rng.standard_normal((experts, shape[1]))
        elif c["model_type"] == "deepseek_v3" and i >= c["first_k_dense_replace"]:
            linear(layer + "mlp.gate", c["n_routed_experts"], dim)
            out[layer + "mlp.gate.e_score_correction_bias"] = 0.3 * rng.standard_normal(c["n_routed_experts"])
            for e in range(c["n_routed_experts"]):
                mlp(f"{layer}mlp.experts.{e}.", c["moe_intermediate_size"], names)
            if c["n_shared_experts"]:
                mlp(layer + "mlp.shared_experts.", c["moe_intermediate_size"] * c["n_shared_experts"], names)
        else:
            mlp(layer + "mlp.", c["intermediate_size"], names, c.get("mlp_bias", False))
    return {name: np.asarray(value, np.float32) for name, value in out.items()}


def write_checkpoint(folder: Path, fields: Fields, weights: Weights) -> Path:
    """Writes a checkpoint with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(weights, folder / "model.safetensors")
    return folder


def stacking_of(scan: bool) -> nnxmoe.Scanned | nnxmoe.Unrolled:
    """Both kinds of stacks, for parametrised tests."""
    return nnxmoe.Scanned() if scan else nnxmoe.Unrolled()


def build(fields: Fields, weights: Weights, strategy: nnxmoe.Strategy = ORACLE, **options: Any) -> nnxmoe.CausalLM:
    """Builds the model of a config and tensors with `from_pretrained`."""
    with tempfile.TemporaryDirectory() as folder:
        return nnxmoe.from_pretrained(write_checkpoint(Path(folder), fields, weights), strategy=strategy, **options)


def build_tiny(kind: str, strategy: nnxmoe.Strategy = ORACLE, seed: int = 0, **changes: Any) -> nnxmoe.CausalLM:
    """A tiny model of one of the ``model_type``s; the same seed gives the same weights under any strategy."""
    fields = TINY[kind] | changes
    return build(fields, tiny_weights(fields, seed), strategy)


def random_tokens(batch: int, length: int, vocab: int = 53, seed: int = 0) -> np.ndarray:
    """Random token ids ``[batch, length]``."""
    return np.random.default_rng(seed).integers(0, vocab, (batch, length)).astype(np.int32)
