"""What the tests share: reference cases, tiny checkpoints, compiled forwards, and a decoder in plain NumPy.

The NumPy decoder reads config.json fields and tensors under Hugging Face's names, uses nothing of the package, and is
itself held against the stored logits of transformers (test_cases.py). It covers what those cases leave out: windows,
biases, tied heads, negative correction biases, every rope type.
"""

import dataclasses
import functools
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

import nnxmoe

HF_CASES = Path(__file__).parent / "data" / "hf"
NAMES = tuple(sorted(folder.name for folder in HF_CASES.iterdir()))
LLAMA_NAMES = tuple(name for name in NAMES if name.startswith(("llama", "mistral")))
DEEPSEEK_NAMES = tuple(name for name in NAMES if name.startswith("deepseek"))
MODEL_TOLERANCE = 2e-4
PART_TOLERANCE = 1e-5

ORACLE = nnxmoe.Strategy(
    dispatch=nnxmoe.Dense(), matmul=nnxmoe.Masked(), attend=nnxmoe.Reference(), latent=nnxmoe.Naive()
)

Fields = dict[str, Any]
Weights = dict[str, np.ndarray]


# Reference cases


@dataclasses.dataclass(frozen=True)
class Case:
    """A checkpoint with known answers: config fields, tensors by their names, and what transformers computed."""

    name: str
    folder: Path
    fields: Fields
    weights: Weights
    arrays: Mapping[str, np.ndarray]


@functools.cache
def load_case(name: str) -> Case:
    """A case of ``tests/data/hf``."""
    folder = HF_CASES / name
    weights: Weights = {}
    for file in sorted((folder / "model").glob("*.safetensors")):
        weights |= load_file(file)
    fields = json.loads((folder / "model" / "config.json").read_text())
    return Case(name, folder, fields, weights, load_file(folder / "reference.safetensors"))


@functools.cache
def load_case_model(name: str, strategy: nnxmoe.Strategy = ORACLE) -> nnxmoe.CausalLM:
    """The model of a case; shared, so not to be changed."""
    return nnxmoe.from_pretrained(HF_CASES / name / "model", strategy=strategy)


# Running models


def forward(model: nnxmoe.CausalLM, tokens: Any, **arrays: Any) -> nnxmoe.Output:
    """The model as users call it, compiled once a shape; everything is returned."""
    return model(tokens, **arrays, return_routing=True, return_hidden=True)


def eager_logits(model: nnxmoe.CausalLM, tokens: Any, mask: Any = None) -> jax.Array:
    """Logits without compiling: quick where a model is used once, and blind to what was compiled before."""
    return model.logits(model.body(tokens, mask).x)


def feed(
    model: nnxmoe.CausalLM, tokens: np.ndarray, chunks: Sequence[int], *, mask: np.ndarray | None, capacity: int
) -> tuple[np.ndarray, Any]:
    """Logits of tokens given to an empty cache a chunk at a time, and the cache at the end."""
    assert sum(chunks) == tokens.shape[1], (chunks, tokens.shape)
    cache, start, logits = model.empty_cache(tokens.shape[0], capacity), 0, []
    mask = np.ones(tokens.shape, np.int32) if mask is None else mask
    for count in chunks:
        part = slice(start, start + count)
        out = model(tokens[:, part], attention_mask=mask[:, part], cache=cache)
        cache, start = out.cache, start + count
        logits.append(np.asarray(out.logits))
    return np.concatenate(logits, axis=1), cache


def variables(model: nnx.Module) -> Iterator[tuple[str, nnx.Variable]]:
    """Every variable of a model with its dotted path."""
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        yield ".".join(map(str, path)), variable


def randomise(model: Any, seed: int = 0) -> Any:
    """New values for every variable: kernels that keep their input's scale, norms around 1, and biases that matter."""
    rng, state = np.random.default_rng(seed), []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        axes, inputs = variable.get_metadata()["axes"], variable.get_metadata()["inputs"]
        value = rng.standard_normal(variable.shape)
        if path[-1] == "scale":
            value = 1 + 0.3 * value
        elif path[-1] == "bias":
            value = 0.3 * value
        elif inputs is not None:
            first = sum(axis in ("layers", "expert") for axis in axes)
            value = value / math.sqrt(math.prod(variable.shape[first : first + inputs]))
        state.append((path, variable.replace(jnp.asarray(value, variable.dtype))))
    nnx.update(model, nnx.from_flat_state(state))
    return model


def max_error(a: Any, b: Any, where: Any = None) -> float:
    """Largest absolute difference (where a mask says so); a difference of shapes or a NaN is infinite."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        return math.inf
    error = np.abs(a - b)
    if where is not None:
        error = error[np.asarray(where, bool)]
    worst = float(error.max(initial=0.0))
    return math.inf if math.isnan(worst) else worst


# Tiny checkpoints in Hugging Face's format

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
}


def tiny_weights(fields: Fields, seed: int = 0) -> Weights:
    """Random tensors for a config, under the names and shapes of the hub; norms and biases are not trivial."""
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
    """A checkpoint of one file, as the hub has them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(weights, folder / "model.safetensors")
    return folder


def build(fields: Fields, weights: Weights, strategy: nnxmoe.Strategy = ORACLE, **options: Any) -> nnxmoe.CausalLM:
    """The model of a config and tensors, through the front door."""
    with tempfile.TemporaryDirectory() as folder:
        return nnxmoe.from_pretrained(write_checkpoint(Path(folder), fields, weights), strategy=strategy, **options)


def build_tiny(kind: str, strategy: nnxmoe.Strategy = ORACLE, seed: int = 0, **changes: Any) -> nnxmoe.CausalLM:
    """A tiny model of one of the four ``model_type``s; the same seed gives the same weights under any strategy."""
    fields = TINY[kind] | changes
    return build(fields, tiny_weights(fields, seed), strategy)


def random_tokens(batch: int, length: int, vocab: int = 53, seed: int = 0) -> np.ndarray:
    """Ids ``[batch, length]``."""
    return np.random.default_rng(seed).integers(0, vocab, (batch, length)).astype(np.int32)


# The decoder in NumPy, float64


def reference_logits(
    fields: Fields, weights: Weights, tokens: np.ndarray, mask: np.ndarray | None = None
) -> np.ndarray:
    """Logits ``[B, T, V]`` by the plainest reading of the rules."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    mask = np.ones(tokens.shape, bool) if mask is None else mask.astype(bool)
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(fields["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        normed = _norm(x, w[layer + "input_layernorm.weight"], fields["rms_norm_eps"])
        attention = _latent_attention if fields["model_type"] == "deepseek_v3" else _grouped_attention
        x = x + attention(fields, w, layer + "self_attn.", normed, mask)
        normed = _norm(x, w[layer + "post_attention_layernorm.weight"], fields["rms_norm_eps"])
        x = x + _feed_forward(fields, w, layer, i, normed)
    x = _norm(x, w["model.norm.weight"], fields["rms_norm_eps"])
    return x @ w["model.embed_tokens.weight" if fields.get("tie_word_embeddings") else "lm_head.weight"].T


def _norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def _linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _swiglu(w: Weights, name: str, x: np.ndarray, names: tuple[str, str, str]) -> np.ndarray:
    gate = _linear(w, name + names[0], x)
    return _linear(w, name + names[2], gate / (1 + np.exp(-gate)) * _linear(w, name + names[1], x))


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray, scale: float) -> np.ndarray:
    """One head: ``q [T H], k [S H], v [S Hv], allowed [T S]``."""
    return _softmax(np.where(allowed, q @ k.T * scale, -1e30)) @ v


def _allowed(fields: Fields, mask: np.ndarray) -> np.ndarray:
    """``[B, T, S]``: real keys that are not later and, with a window W, among the last W."""
    length = mask.shape[1]
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    near = distance >= 0
    if fields.get("sliding_window") is not None:
        near &= distance < fields["sliding_window"]
    return near[None] & mask[:, None, :]


def _rope(fields: Fields) -> Mapping[str, Any]:
    return fields.get("rope_scaling") or fields.get("rope_parameters") or {}


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def _rotation(fields: Fields, dim: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines ``[T, dim / 2]`` of positions 0 … T-1."""
    rope, longest = _rope(fields), fields["max_position_embeddings"]
    theta = rope.get("rope_theta", fields.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    original = fields.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or longest
    factor, attention, inverse = rope.get("factor"), 1.0, []
    if kind == "dynamic" and length > longest:
        theta *= (factor * length / longest - (factor - 1)) ** (dim / (dim - 2))
    for i in range(dim // 2):
        plain = theta ** (-2 * i / dim)
        if kind in ("default", "dynamic"):
            inverse.append(plain)
        elif kind == "linear":
            inverse.append(plain / factor)
        elif kind == "llama3":
            wave, low, high = 2 * math.pi / plain, rope["low_freq_factor"], rope["high_freq_factor"]
            smooth = (original / wave - low) / (high - low)
            between = (1 - smooth) * plain / factor + smooth * plain
            inverse.append(plain / factor if wave > original / low else plain if wave < original / high else between)
        else:
            assert kind == "yarn", kind
            stretch = factor or longest / original
            ends = [
                dim * math.log(original / (rope.get(name, turns) * 2 * math.pi)) / (2 * math.log(theta))
                for name, turns in (("beta_fast", 32), ("beta_slow", 1))
            ]
            if rope.get("truncate", True):
                ends = [math.floor(ends[0]), math.ceil(ends[1])]
            low, high = max(ends[0], 0), min(ends[1], dim - 1)
            ramp = min(max((i - low) / ((high - low) or 0.001), 0), 1)
            inverse.append(plain / stretch * ramp + plain * (1 - ramp))
            one, other = rope.get("mscale"), rope.get("mscale_all_dim")
            both = _temperature(stretch, one) / _temperature(stretch, other) if one and other else None
            attention = rope.get("attention_factor") or both or _temperature(stretch, 1)
    angles = np.arange(length)[:, None] * np.asarray(inverse)[None, :]
    return np.cos(angles) * attention, np.sin(angles) * attention


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, pairs: bool) -> np.ndarray:
    """``x [T, dim]`` turned in the planes ``(2i, 2i + 1)`` or ``(i, i + dim / 2)``."""
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if pairs else (i, i + half)
        out[:, a] = x[:, a] * cos[:, i] - x[:, b] * sin[:, i]
        out[:, b] = x[:, b] * cos[:, i] + x[:, a] * sin[:, i]
    return out


def _grouped_attention(c: Fields, w: Weights, name: str, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    batch, length, dim = x.shape
    heads = c["num_attention_heads"]
    kv_heads, width = c.get("num_key_value_heads") or heads, c.get("head_dim") or dim // heads
    q = _linear(w, name + "q_proj", x).reshape(batch, length, heads, width)
    k = _linear(w, name + "k_proj", x).reshape(batch, length, kv_heads, width)
    v = _linear(w, name + "v_proj", x).reshape(batch, length, kv_heads, width)
    (cos, sin), allowed, out = _rotation(c, width, length), _allowed(c, mask), np.empty_like(q)
    for b in range(batch):
        for n in range(heads):
            m = n // (heads // kv_heads)
            turned = [_rotate(one, cos, sin, pairs=False) for one in (q[b, :, n], k[b, :, m])]
            out[b, :, n] = _attend(*turned, v[b, :, m], allowed[b], width**-0.5)
    return _linear(w, name + "o_proj", out.reshape(batch, length, -1))


def _latent_attention(c: Fields, w: Weights, name: str, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    batch, length, _ = x.shape
    heads, nope, rope, rank = (
        c[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
    )
    if c["q_lora_rank"] is None:
        q = _linear(w, name + "q_proj", x)
    else:
        low = _norm(_linear(w, name + "q_a_proj", x), w[name + "q_a_layernorm.weight"], 1e-6)
        q = _linear(w, name + "q_b_proj", low)
    q = q.reshape(batch, length, heads, nope + rope)
    down = _linear(w, name + "kv_a_proj_with_mqa", x)
    latent = _norm(down[..., :rank], w[name + "kv_a_layernorm.weight"], 1e-6)
    kv = _linear(w, name + "kv_b_proj", latent).reshape(batch, length, heads, nope + c["v_head_dim"])
    scale, fields = (nope + rope) ** -0.5, _rope(c)
    if fields.get("rope_type", fields.get("type", "default")) != "default" and fields.get("mscale_all_dim"):
        scale *= _temperature(fields["factor"], fields["mscale_all_dim"]) ** 2
    (cos, sin), allowed, pairs = _rotation(c, rope, length), _allowed(c, mask), c.get("rope_interleave", True)
    out = np.empty((batch, length, heads, c["v_head_dim"]))
    for b in range(batch):
        shared = _rotate(down[b, :, rank:], cos, sin, pairs)
        for n in range(heads):
            query = np.concatenate([q[b, :, n, :nope], _rotate(q[b, :, n, nope:], cos, sin, pairs)], axis=-1)
            key = np.concatenate([kv[b, :, n, :nope], shared], axis=-1)
            out[b, :, n] = _attend(query, key, kv[b, :, n, nope:], allowed[b], scale)
    return _linear(w, name + "o_proj", out.reshape(batch, length, -1))


def _feed_forward(c: Fields, w: Weights, layer: str, index: int, x: np.ndarray) -> np.ndarray:
    names = ("gate_proj", "up_proj", "down_proj")
    if c["model_type"] == "mixtral":
        name = layer + "block_sparse_moe."
        weights = softmax_weights(_linear(w, name + "gate", x), c["num_experts_per_tok"])
        return _mixture(w, name, x, weights, ("w1", "w3", "w2"))
    name = layer + "mlp."
    if c["model_type"] == "deepseek_v3" and index >= c["first_k_dense_replace"]:
        scores = 1 / (1 + np.exp(-_linear(w, name + "gate", x)))
        weights = sigmoid_weights(
            scores,
            w[name + "gate.e_score_correction_bias"],
            k=c["num_experts_per_tok"],
            groups=c["n_group"],
            top_groups=c["topk_group"],
            normalise=c["norm_topk_prob"],
            scale=c["routed_scaling_factor"],
        )
        y = _mixture(w, name, x, weights, names)
        return y + _swiglu(w, name + "shared_experts.", x, names) if c["n_shared_experts"] else y
    return _swiglu(w, name, x, names)


def _mixture(w: Weights, name: str, x: np.ndarray, weights: np.ndarray, names: tuple[str, str, str]) -> np.ndarray:
    outs = [_swiglu(w, f"{name}experts.{e}.", x, names) for e in range(weights.shape[-1])]
    return sum(weights[..., e, None] * out for e, out in enumerate(outs))


def _best(scores: Sequence[float], k: int) -> list[int]:
    """Indices of the k largest; among equals the lower index."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def softmax_weights(logits: np.ndarray, k: int) -> np.ndarray:
    """Mixtral's routing as a weight for every expert ``[…, E]``, zero where it was not chosen."""
    out = np.zeros(logits.shape)
    for row in np.ndindex(logits.shape[:-1]):
        scores = _softmax(logits[row].astype(np.float64))
        chosen = _best(list(scores), k)
        out[row][chosen] = scores[chosen] / scores[chosen].sum()
    return out


def sigmoid_weights(
    scores: np.ndarray, bias: np.ndarray, *, k: int, groups: int, top_groups: int, normalise: bool, scale: float
) -> np.ndarray:
    """DeepSeek-V3's routing as a weight for every expert ``[…, E]``, zero where it was not chosen."""
    out, size = np.zeros(scores.shape), scores.shape[-1] // groups
    for row in np.ndindex(scores.shape[:-1]):
        choice = scores[row] + bias
        group_scores = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        kept = _best(group_scores, top_groups)
        inside = [choice[e] if e // size in kept else -math.inf for e in range(len(choice))]
        chosen = _best(inside, k)
        weights = scores[row][chosen]
        out[row][chosen] = (weights / (weights.sum() + 1e-20) if normalise else weights) * scale
    return out


def as_weights(experts: Any, weights: Any, count: int) -> np.ndarray:
    """A package's routing (indices and weights) as a weight for every expert; raises where one is chosen twice."""
    experts, weights = np.asarray(experts), np.asarray(weights)
    out = np.zeros((*experts.shape[:-1], count))
    for row in np.ndindex(experts.shape[:-1]):
        if len(set(experts[row].tolist())) != experts.shape[-1]:
            raise ValueError(f"token {row} was sent twice to an expert: {experts[row]}")
        out[row][experts[row]] = weights[row]
    return out
