"""A decoder in plain NumPy and float64, the oracle for configurations beyond the stored reference cases.

It takes config.json fields and tensors under Hugging Face's names and does not use the package. test_cases.py compares
it with the stored logits of transformers. It covers windows, biases, tied heads, negative correction biases and every
rope type.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.support.tiny import Fields, Weights


def reference_logits(
    fields: Fields, weights: Weights, tokens: np.ndarray, mask: np.ndarray | None = None
) -> np.ndarray:
    """Logits ``[B, T, V]``, one head and one expert at a time."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    return _head(fields, w, _states(fields, w, tokens, mask))


def reference_ahead(fields: Fields, weights: Weights, tokens: np.ndarray) -> list[np.ndarray]:
    """Logits ``[B, T - k, V]`` of depth k = 0, 1, … of multi-token prediction; depth 0 is the model itself."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    eps, x = fields["rms_norm_eps"], _states(fields, w, tokens, None)
    found = [_head(fields, w, x)]
    for k in range(1, fields["num_nextn_predict_layers"] + 1):
        number = fields["num_hidden_layers"] + k - 1
        layer = f"model.layers.{number}."
        embedded = w["model.embed_tokens.weight"][tokens[:, k:]]
        pair = _norm(embedded, w[layer + "enorm.weight"], eps), _norm(x[:, :-1], w[layer + "hnorm.weight"], eps)
        x = np.concatenate(pair, axis=-1) @ w[layer + "eh_proj.weight"].T
        x = _layer(fields, w, number, x, np.ones(x.shape[:2], bool))
        x = _norm(x, w[layer + "shared_head.norm.weight"], eps)
        found.append(_head(fields, w, x))
    return found


def _states(fields: Fields, w: Weights, tokens: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """The states ``[B, T, D]`` after the final norm."""
    mask = np.ones(tokens.shape, bool) if mask is None else mask.astype(bool)
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(fields["num_hidden_layers"]):
        kinds = fields.get("layer_types")
        of_layer = fields | {"sliding_window": None} if kinds and kinds[i] == "full_attention" else fields
        x = _layer(of_layer, w, i, x, mask)
    return _norm(x, w["model.norm.weight"], fields["rms_norm_eps"])


def _head(fields: Fields, w: Weights, x: np.ndarray) -> np.ndarray:
    return x @ w["model.embed_tokens.weight" if fields.get("tie_word_embeddings") else "lm_head.weight"].T


def _layer(fields: Fields, w: Weights, i: int, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    layer = f"model.layers.{i}."
    normed = _norm(x, w[layer + "input_layernorm.weight"], fields["rms_norm_eps"])
    attention = _latent_attention if fields["model_type"] == "deepseek_v3" else _grouped_attention
    x = x + attention(fields, w, layer + "self_attn.", normed, mask)
    normed = _norm(x, w[layer + "post_attention_layernorm.weight"], fields["rms_norm_eps"])
    return x + _feed_forward(fields, w, layer, i, normed)


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


def _attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray, scale: float, sink: float | None = None
) -> np.ndarray:
    """One head: ``q [T H], k [S H], v [S Hv], allowed [T S]``; ``sink``: score of one more key, whose value is 0."""
    scores = np.where(allowed, q @ k.T * scale, -1e30)
    if sink is None:
        return _softmax(scores) @ v
    return _softmax(np.concatenate([scores, np.full((len(q), 1), sink)], axis=1))[:, :-1] @ v


def _allowed(fields: Fields, mask: np.ndarray) -> np.ndarray:
    """Causal mask ``[B, T, S]`` without padding keys; with a window W, only the last W keys."""
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
    """Rotates ``x [T, dim]`` in the planes ``(2i, 2i + 1)`` or ``(i, i + dim / 2)``."""
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
    if name + "q_norm.weight" in w:
        q, k = (_norm(a, w[f"{name}{n}_norm.weight"], c["rms_norm_eps"]) for n, a in (("q", q), ("k", k)))
    (cos, sin), allowed, out = _rotation(c, width, length), _allowed(c, mask), np.empty_like(q)
    for b in range(batch):
        for n in range(heads):
            m = n // (heads // kv_heads)
            turned = [_rotate(one, cos, sin, pairs=False) for one in (q[b, :, n], k[b, :, m])]
            sink = w[name + "sinks"][n] if name + "sinks" in w else None
            out[b, :, n] = _attend(*turned, v[b, :, m], allowed[b], width**-0.5, sink)
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
    if c["model_type"] == "gpt_oss":
        weights = softmax_weights(_linear(w, name + "router", x), c["num_experts_per_tok"])
        outs = [_clamped_expert(c, w, name + "experts.", e, x) for e in range(weights.shape[-1])]
        return sum(weights[..., e, None] * out for e, out in enumerate(outs))
    if c["model_type"] == "deepseek_v3" and index >= c["first_k_dense_replace"]:
        scores = 1 / (1 + np.exp(-_linear(w, name + "gate", x)))
        weights = sigmoid_weights(
            scores,
            w[name + "gate.e_score_correction_bias"],
            k=c["num_experts_per_tok"],
            groups=c["n_group"],
            top_groups=c["topk_group"],
            normalize=c["norm_topk_prob"],
            scale=c["routed_scaling_factor"],
        )
        y = _mixture(w, name, x, weights, names)
        return y + _swiglu(w, name + "shared_experts.", x, names) if c["n_shared_experts"] else y
    return _swiglu(w, name, x, names)


def _clamped_expert(c: Fields, w: Weights, name: str, e: int, x: np.ndarray) -> np.ndarray:
    """gpt-oss's expert: kernels with inputs first, of which the even outputs are the gate."""
    both = x @ w[name + "gate_up_proj"][e] + w[name + "gate_up_proj_bias"][e]
    gate = np.minimum(both[..., 0::2], c["swiglu_limit"])
    up = np.minimum(np.maximum(both[..., 1::2], -c["swiglu_limit"]), c["swiglu_limit"])
    hidden = (up + 1) * gate / (1 + np.exp(-c["swiglu_alpha"] * gate))
    return hidden @ w[name + "down_proj"][e] + w[name + "down_proj_bias"][e]


def _mixture(w: Weights, name: str, x: np.ndarray, weights: np.ndarray, names: tuple[str, str, str]) -> np.ndarray:
    outs = [_swiglu(w, f"{name}experts.{e}.", x, names) for e in range(weights.shape[-1])]
    return sum(weights[..., e, None] * out for e, out in enumerate(outs))


def _best(scores: Sequence[float], k: int) -> list[int]:
    """Indices of the k largest scores; ties go to the lower index."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def softmax_weights(logits: np.ndarray, k: int) -> np.ndarray:
    """Mixtral's routing as weights ``[…, E]``, zero for experts that were not chosen."""
    out = np.zeros(logits.shape)
    for row in np.ndindex(logits.shape[:-1]):
        scores = _softmax(logits[row].astype(np.float64))
        chosen = _best(list(scores), k)
        out[row][chosen] = scores[chosen] / scores[chosen].sum()
    return out


def sigmoid_weights(
    scores: np.ndarray, bias: np.ndarray, *, k: int, groups: int, top_groups: int, normalize: bool, scale: float
) -> np.ndarray:
    """DeepSeek-V3's routing as weights ``[…, E]``, zero for experts that were not chosen."""
    out, size = np.zeros(scores.shape), scores.shape[-1] // groups
    for row in np.ndindex(scores.shape[:-1]):
        choice = scores[row] + bias
        group_scores = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        kept = _best(group_scores, top_groups)
        inside = [choice[e] if e // size in kept else -math.inf for e in range(len(choice))]
        chosen = _best(inside, k)
        weights = scores[row][chosen]
        out[row][chosen] = (weights / (weights.sum() + 1e-20) if normalize else weights) * scale
    return out


def as_weights(experts: Any, weights: Any, count: int) -> np.ndarray:
    """Routing (indices and weights) as weights ``[…, E]``; raises if a token chose an expert twice."""
    experts, weights = np.asarray(experts), np.asarray(weights)
    out = np.zeros((*experts.shape[:-1], count))
    for row in np.ndindex(experts.shape[:-1]):
        if len(set(experts[row].tolist())) != experts.shape[-1]:
            raise ValueError(f"token {row} was sent twice to an expert: {experts[row]}")
        out[row][experts[row]] = weights[row]
    return out
