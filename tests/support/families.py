"""Tiny models of the families: one row each, with a frozen configuration and a draw of random ones.

A further family adds a row to `FAMILIES`. The frozen cases are stored in ``tests/data/families``: config.json in the
hub's style, the names and shapes of the tensors that transformers saves, and its outputs in float32. The weights are
computed from the names, so they are not stored. Made with transformers 5.23 and torch 2.13 on a CPU by

    python -m tests.support.freeze

which refuses cases whose routing or greedy tokens are too close to call.
"""

import dataclasses
import json
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny import Fields, Weights

V4_SPARSE, V4_HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
FOLDER = Path(__file__).parents[1] / "data" / "families"
PROMPT, NEW = 9, 6  # tokens of the greedy continuations


@dataclasses.dataclass(frozen=True)
class Family:
    """``frozen``: config.json as on the hub. ``draw``: random fields for the config class of transformers, which calls
    the family ``theirs``. ``required``: fields without a default."""

    frozen: Fields
    draw: Callable[[random.Random], Fields]
    theirs: str
    required: Fields = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen case: config.json, the tensors, and the outputs of transformers."""

    fields: Fields
    weights: Weights
    arrays: Mapping[str, np.ndarray]


def weights_of(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> Weights:
    """Random tensors, each from its name and the seed: norms far from 1 and of both signs, biases not zero, and
    matrices that give logits of a few units."""
    made = {}
    for name, shape in shapes.items():
        rng = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode()))  # a stream that NumPy does not change
        value = rng.standard_normal(tuple(shape))
        if name.endswith("tid2eid"):  # experts of token ids, of at least five
            made[name] = (rng.randint(0, 5, (shape[0], 1)) + np.arange(shape[1])) % 5
            continue
        if "norm" in name or name.endswith(("router.scale", "per_expert_scale", "layer_scalar")):
            value = (0.4 + 1.2 * rng.random_sample(tuple(shape))) * np.sign(value)
        elif name.endswith("bias"):
            value *= 0.3 if "correction" in name else 0.6
        elif "embed" not in name:
            value *= 1.3 * shape[-1] ** -0.5
        made[name] = value.astype(np.float32)
    return made


def load(kind: str) -> Frozen:
    """The frozen case of a family."""
    from safetensors.numpy import load_file

    stored = json.loads((FOLDER / f"{kind}.json").read_text())
    return Frozen(stored["config"], weights_of(stored["shapes"]), load_file(FOLDER / f"{kind}.safetensors"))


def tokens_of(vocab: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two rows of 17 tokens, and a mask that pads the first row on the left and the second on the right."""
    tokens = np.random.RandomState(seed).randint(0, vocab, (2, 17)).astype(np.int32)
    mask = np.ones_like(tokens)
    mask[0, :5], mask[1, -3:] = 0, 0
    return tokens, mask


def positions_of(mask: np.ndarray) -> np.ndarray:
    """The positions of tokens with a cache and in generation, which do not count padding on the left."""
    return np.maximum(np.arange(mask.shape[1]) - np.argmax(mask, axis=1)[:, None], 0)


_OLD = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def fused(weights: Weights) -> Weights:
    """The same tensors with the names of transformers 5 in memory: all experts of a layer in two tensors."""
    found: Weights = {}
    experts = dict[str, dict[tuple[int, str], np.ndarray]]()
    for name, array in weights.items():
        head, _, tail = name.replace("block_sparse_moe", "mlp").partition(".experts.")
        if "." in tail:
            head, (number, kind, _) = head.replace("ffn", "mlp"), tail.split(".")
            experts.setdefault(head + ".experts.", {})[int(number), _OLD.get(kind, kind)] = array
        else:
            found[f"{head}.experts.{tail}" if tail else head] = array
    for head, parts in experts.items():
        count = 1 + max(number for number, _ in parts)
        into = [kind for kind in ("gate_proj", "up_proj") if (0, kind) in parts]
        both = [np.concatenate([parts[e, kind] for kind in into]) for e in range(count)]
        found[head + ("gate_up_proj" if len(into) > 1 else "up_proj")] = np.stack(both)
        found[head + "down_proj"] = np.stack([parts[e, "down_proj"] for e in range(count)])
    return found


# Random configurations, for the config classes of transformers


def _common(rng: random.Random, layers: int) -> Fields:
    return {
        "vocab_size": rng.choice([48, 64, 97]),
        "hidden_size": rng.choice([32, 48]),
        "intermediate_size": rng.choice([24, 56]),
        "num_hidden_layers": layers,
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-2]),
        "tie_word_embeddings": rng.random() < 0.4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 64,
        "rope_parameters": rng.choice(
            [
                {"rope_type": "default", "rope_theta": rng.choice([37.5, 500.0, 1e6])},
                {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
                {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0},
            ]
        ),
    }


def _grouped(rng: random.Random, layers: int) -> Fields:
    """Grouped-query attention; the width of a head is hidden_size / heads, or given."""
    heads, kv_heads = rng.choice([(4, 1), (4, 2), (8, 8), (2, 1)])
    fields = _common(rng, layers) | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    width = fields["hidden_size"] // heads
    return fields | {"head_dim": rng.choice([width + width % 2, 6, 10, 16])}


def _windows(rng: random.Random, layers: int) -> Fields:
    if rng.random() < 0.3:
        return {"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 0}
    fields = {"use_sliding_window": True, "sliding_window": rng.choice([2, 3, 5, 8])}
    if rng.random() < 0.5:
        return fields | {"max_window_layers": rng.randrange(layers)}
    kinds = ["full_attention", "sliding_attention"]
    return fields | {"layer_types": [rng.choice(kinds) for _ in range(layers)]}


def _qwen2(rng: random.Random) -> Fields:
    layers = rng.choice([2, 3])
    fields = _grouped(rng, layers) | _windows(rng, layers)
    del fields["head_dim"]
    return fields


def _qwen3(rng: random.Random) -> Fields:
    layers = rng.choice([2, 3])
    return _grouped(rng, layers) | _windows(rng, layers) | {"attention_bias": rng.random() < 0.5}


def _qwen3_moe(rng: random.Random) -> Fields:
    layers, experts = rng.choice([2, 3, 4]), rng.choice([4, 6, 8])
    return _grouped(rng, layers) | {
        "attention_bias": rng.random() < 0.5,
        "use_sliding_window": rng.random() < 0.4,
        "sliding_window": rng.choice([2, 5]),
        "decoder_sparse_step": rng.choice([1, 1, 2]),
        "mlp_only_layers": rng.choice([None, [], [0], [1]]),
        "moe_intermediate_size": rng.choice([12, 20]),
        "num_experts": experts,
        "num_experts_per_tok": rng.choice([1, 2, 3, experts]),
        "norm_topk_prob": rng.random() < 0.5,
        "output_router_logits": False,
    }


def _qwen2_moe(rng: random.Random) -> Fields:
    fields = _qwen3_moe(rng) | {
        "qkv_bias": rng.random() < 0.7,
        "use_sliding_window": False,
        "shared_expert_intermediate_size": rng.choice([16, 28]),
    }
    for name in ("head_dim", "attention_bias"):
        del fields[name]
    return fields


def _hybrid(rng: random.Random) -> Fields:
    """Recurrent layers beside attention; each kind of layer at least once."""
    layers, (keys, values) = rng.choice([2, 3, 4]), rng.choice([(1, 1), (1, 3), (2, 4), (4, 4)])
    kinds = ["linear_attention", "full_attention", *rng.choices(["linear_attention", "full_attention"], k=layers - 2)]
    rng.shuffle(kinds)
    fields = _grouped(rng, layers) | {
        "head_dim": rng.choice([8, 16]),
        "layer_types": rng.choice([kinds, kinds, None if layers == 4 else kinds]),
        "tie_word_embeddings": False,  # else logits are so large that rounding moves them by 6e-4
        "linear_conv_kernel_dim": rng.choice([2, 3, 4, 7]),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": rng.choice([4, 7, 10]),
        "linear_value_head_dim": rng.choice([5, 8]),
    }
    factor = rng.choice([None, 0.25, 0.5, 1.0])
    fields["rope_parameters"] |= {} if factor is None else {"partial_rotary_factor": factor}
    return fields


def _hybrid_moe(rng: random.Random) -> Fields:
    experts = rng.choice([4, 6, 8])
    fields = _hybrid(rng) | {
        "moe_intermediate_size": rng.choice([12, 20]),
        "shared_expert_intermediate_size": rng.choice([16, 28]),
        "num_experts": experts,
        "num_experts_per_tok": rng.choice([1, 2, 3, experts]),
    }
    del fields["intermediate_size"]
    return fields


def _qwen3_next(rng: random.Random) -> Fields:
    return _hybrid_moe(rng) | {
        "intermediate_size": rng.choice([24, 56]),
        "decoder_sparse_step": rng.choice([1, 1, 2]),
        "mlp_only_layers": rng.choice([None, [], [0], [1]]),
        "norm_topk_prob": rng.random() < 0.7,
    }


def _two_ropes(rng: random.Random, layers: int, *factors: float) -> Fields:
    """Layers of both types, and a rope object for each."""
    kinds = ["full_attention", "sliding_attention"]
    thetas = {kind: {"rope_type": "default", "rope_theta": rng.choice([37.5, 500.0, 1e4])} for kind in kinds}
    for rope in thetas.values():
        rope["partial_rotary_factor"] = rng.choice(factors)
    if rng.random() < 0.3:
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        thetas["full_attention"] |= yarn
    return {
        "layer_types": [*kinds, *(rng.choice(kinds) for _ in range(layers - 2))],
        "sliding_window": rng.choice([3, 5]),
        "rope_parameters": thetas,
    }


def _mimo_v2_flash(rng: random.Random) -> Fields:
    layers = rng.choice([2, 3, 4])
    experts, groups, kept = rng.choice([(8, 1, 1), (8, 4, 2), (6, 3, 2)])
    return (
        _grouped(rng, layers)
        | _two_ropes(rng, layers, 0.334, 0.5, 1.0)
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": rng.choice([1, 2]),
            "head_dim": rng.choice([12, 24]),
            "v_head_dim": rng.choice([6, 20]),
            "attention_bias": rng.random() < 0.5,
            "attention_value_scale": rng.choice([0.707, None, 1.5]),
            "moe_intermediate_size": rng.choice([12, 20]),
            "n_routed_experts": experts,
            "n_group": groups,
            "topk_group": kept,
            "num_experts_per_tok": rng.choice([1, 2, 3]),
            "norm_topk_prob": rng.random() < 0.7,
            "routed_scaling_factor": rng.choice([1.0, 2.5]),
            "mlp_layer_types": rng.choice([None, [rng.choice(["dense", "sparse"]) for _ in range(layers)]]),
        }
    )


def _laguna(rng: random.Random) -> Fields:
    layers, experts = rng.choice([2, 3, 4]), rng.choice([5, 8])
    return (
        _grouped(rng, layers)
        | _two_ropes(rng, layers, 0.5, 1.0)
        | {
            "num_key_value_heads": 2,
            "num_attention_heads_per_layer": rng.choice([None, [rng.choice([2, 4, 6]) for _ in range(layers)]]),
            "num_attention_heads": 4,
            "head_dim": rng.choice([8, 12]),
            "attention_bias": rng.random() < 0.5,
            "gating": rng.choice([True, "per-head", "per-element"]),
            "moe_intermediate_size": rng.choice([12, 20]),
            "shared_expert_intermediate_size": rng.choice([12, 20]),
            "num_experts": experts,
            "num_experts_per_tok": rng.choice([1, 2, 3, experts]),
            "moe_routed_scaling_factor": rng.choice([1.0, 2.5]),
            "moe_router_logit_softcapping": rng.choice([0.0, 1.5]),
            "mlp_layer_types": rng.choice([None, [rng.choice(["dense", "sparse"]) for _ in range(layers)]]),
        }
    )


def _step3p5(rng: random.Random) -> Fields:
    layers, experts = rng.choice([2, 3, 4]), rng.choice([5, 8])
    limits = [rng.choice([None, 0.0, 0.3, 1.5]) for _ in range(layers)]
    fields = (
        _grouped(rng, layers)
        | _two_ropes(rng, layers, 0.5, 1.0)
        | {
            "num_key_value_heads": 2,
            "num_attention_heads": 4,
            "num_sliding_attention_heads": rng.choice([None, 2, 6]),
            "head_dim": rng.choice([8, 12]),
            "attention_bias": rng.random() < 0.5,
            "mlp_bias": rng.random() < 0.5,
            "query_pre_attn_scalar": rng.choice([None, 5.0]),
            "moe_intermediate_size": rng.choice([12, 20]),
            "share_expert_dim": rng.choice([12, 20]),
            "n_routed_experts": experts,
            "num_local_experts": experts,
            "num_experts_per_tok": rng.choice([1, 2, 3, experts]),
            "moe_router_scaling_factor": rng.choice([1.0, 2.5]),
            "mlp_layer_types": rng.choice([None, [rng.choice(["dense", "sparse"]) for _ in range(layers)]]),
            "swiglu_limits": rng.choice([None, limits]),
            "swiglu_limits_shared": rng.choice([None, limits[::-1]]),
        }
    )
    del fields["tie_word_embeddings"]
    return fields


def _minimax_m3(rng: random.Random) -> Fields:
    layers, experts, kv_heads = rng.choice([2, 3, 4]), rng.choice([5, 8]), rng.choice([1, 2, 4])
    kinds, chosen = ["minimax_m3_sparse", "full_attention"], rng.choice([1, 2, 3])
    rope = {"rope_type": "default", "rope_theta": rng.choice([37.5, 500.0])}
    fields = _grouped(rng, layers) | {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": 4,
        "head_dim": 8,
        "dense_intermediate_size": rng.choice([20, 28]),
        "shared_intermediate_size": rng.choice([12, 20]),
        "num_local_experts": experts,
        "num_experts_per_tok": rng.choice([1, 2, 3, experts]),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "swiglu_alpha": rng.choice([1.0, 1.702]),
        "swiglu_limit": rng.choice([0.5, 7.0]),
        "layer_types": [kinds[0], *(rng.choice(kinds) for _ in range(layers - 1))],
        "mlp_layer_types": rng.choice([None, [rng.choice(["dense", "sparse"]) for _ in range(layers)]]),
        "index_n_heads": rng.choice([1, 2, 4]),
        "index_head_dim": rng.choice([8, 12]),
        "index_block_size": rng.choice([1, 2, 3, 4]),
        "index_topk_blocks": chosen,
        "index_local_blocks": rng.choice([0, 1, chosen]),
        "rope_parameters": rope | {"partial_rotary_factor": rng.choice([0.5, 1.0])},
    }
    del fields["tie_word_embeddings"]
    return fields


def _kimi_hybrid(rng: random.Random) -> Fields:
    fields = _latent(rng) | {"first_k_dense_replace": rng.choice([0, 1]), "rms_norm_eps": rng.choice([1e-5, 1e-2])}
    for name in ("rope_interleave", "rope_parameters", "rope_theta", "layer_types", "tie_word_embeddings"):
        fields.pop(name, None)
    fields["num_local_experts"] = fields.pop("n_routed_experts")
    return fields | {"num_mtp_layers": 0, "pad_token_id": 0}


def _kimi_linear(rng: random.Random) -> Fields:
    fields = _kimi_hybrid(rng)
    del fields["num_mtp_layers"]
    kinds = [rng.choice(["full_attention", "linear_attention"]) for _ in range(fields["num_hidden_layers"])]
    kinds[rng.randrange(len(kinds))] = "full_attention"  # without any transformers has no generation
    return fields | {
        "linear_head_dim": rng.choice([4, 6]),
        "linear_num_heads": rng.choice([1, 2, 3]),
        "linear_conv_kernel_dim": rng.choice([2, 4]),
        "layer_types": kinds,
    }


def _glm5_next_text(rng: random.Random) -> Fields:
    fields = _kimi_hybrid(rng) | {"n_routed_experts": rng.choice([8, 12]), "n_group": 1, "topk_group": 1}
    for name in ("num_local_experts", "first_k_dense_replace"):
        del fields[name]
    layers, pool = rng.choice([2, 3, 4]), rng.choice([2, 3, 4])
    kinds = [rng.choice(["indexed_attention", "linear_attention"]) for _ in range(layers)]
    kinds[rng.randrange(layers)] = "indexed_attention"
    return fields | {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "mlp_layer_types": [rng.choice(["dense", "sparse"]) for _ in range(layers)],
        "q_lora_rank": 12,
        "qk_rope_head_dim": 0,
        "index_n_heads": rng.choice([24, 32]),
        "index_head_dim": rng.choice([6, 8]),
        "index_topk": pool * rng.choice([1, 2, 3]),
        "index_kpool": pool,
        "linear_head_dim": rng.choice([4, 6]),
        "linear_num_heads": rng.choice([1, 2, 3]),
        "linear_conv_kernel_dim": rng.choice([2, 4]),
        "linear_lower_bound": rng.choice([-5.0, -1.0]),
        "hc_mult": rng.choice([2, 3]),
        "hc_sinkhorn_iters": rng.choice([2, 5]),
        "swiglu_limit": rng.choice([0.5, 10.0]),
    }


def _nemotron_h(rng: random.Random) -> Fields:
    """Each kind of part at least once, in any order, mostly with experts."""
    fields = {k: v for k, v in _grouped(rng, 2).items() if k not in ("rope_parameters", "num_hidden_layers")}
    fields["layer_norm_epsilon"] = fields.pop("rms_norm_eps")
    kinds = ["linear_attention", "full_attention", "mlp", *(["moe"] if rng.random() < 0.8 else [])]
    kinds += rng.choices(kinds, k=rng.choice([0, 1, 2, 3]))
    rng.shuffle(kinds)
    groups, size = rng.choice([(1, 8), (2, 4), (4, 3)])
    experts = groups * size
    heads, per = rng.choice([(1, 3), (2, 2), (4, 1)])
    top = rng.randint(1, groups)
    return fields | {
        "tie_word_embeddings": False,
        "layers_block_type": kinds,
        "mlp_bias": rng.random() < 0.5,
        "use_bias": rng.random() < 0.5,
        "use_conv_bias": rng.random() < 0.7,
        "ssm_state_size": rng.choice([4, 7, 10]),
        "mamba_num_heads": heads * per,
        "mamba_head_dim": rng.choice([4, 6]),
        "n_groups": heads,
        "conv_kernel": rng.choice([2, 3, 4, 6]),
        "n_routed_experts": experts,
        "num_experts_per_tok": rng.randint(1, min(4, top * size)),
        "n_group": groups,
        "topk_group": top,
        "moe_intermediate_size": rng.choice([12, 20]),
        "moe_shared_expert_intermediate_size": rng.choice([12, 28]),
        "moe_latent_size": rng.choice([None, 16, 24]),
        "norm_topk_prob": rng.random() < 0.7,
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
    }


def _bailing_hybrid(rng: random.Random) -> Fields:
    return _kimi_hybrid(rng) | {
        "head_dim": rng.choice([4, 6]),
        "short_conv_kernel_size": rng.choice([2, 4]),
        "layer_group_size": rng.choice([1, 2, 2]),  # without attention transformers has no generation
        "kda_safe_gate": rng.random() < 0.6,
        "kda_lower_bound": rng.choice([-5.0, -1.0]),
        "rope_theta": rng.choice([50.0, 1e4]),
    }


def _olmoe(rng: random.Random) -> Fields:
    experts = rng.choice([4, 6, 8])
    fields = _grouped(rng, rng.choice([2, 3])) | {
        "attention_bias": rng.random() < 0.5,
        "num_experts": experts,
        "num_experts_per_tok": rng.choice([1, 2, 3, experts]),
        "norm_topk_prob": rng.random() < 0.5,
    }
    del fields["head_dim"]
    return fields


def _latent(rng: random.Random) -> Fields:
    layers, heads = rng.choice([2, 3]), rng.choice([2, 4, 5])
    experts, groups, kept = rng.choice([(8, 1, 1), (8, 4, 2), (6, 3, 2)])
    fields = _common(rng, layers) | {
        "moe_intermediate_size": rng.choice([12, 20]),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": rng.choice([None, 12, 24]),
        "kv_lora_rank": rng.choice([8, 17]),
        "qk_nope_head_dim": rng.choice([6, 10]),
        "qk_rope_head_dim": rng.choice([4, 8]),
        "v_head_dim": rng.choice([6, 12]),
        "rope_interleave": True,
        "attention_bias": rng.random() < 0.5,
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": rng.choice([1, 2, 3]),
        "n_shared_experts": rng.choice([1, 2]),
        "norm_topk_prob": rng.random() < 0.7,
        "routed_scaling_factor": rng.choice([1.0, 1.8, 2.827]),
    }
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"] |= rng.choice([{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale_all_dim": 0.7}])
    return fields


def _kimi(rng: random.Random) -> Fields:
    return _latent(rng) | {"first_k_dense_replace": rng.choice([0, 1, 1, 2])}


def _glm_lite(rng: random.Random) -> Fields:
    fields = _latent(rng)
    kinds = [rng.choice(["dense", "sparse", "sparse"]) for _ in range(fields["num_hidden_layers"])]
    return fields | {"mlp_layer_types": rng.choice([None, kinds])}


def _deepseek_v32(rng: random.Random) -> Fields:
    """Fewer keys per query than tokens, and enough heads in the indexer that few scores are zero."""
    fields = _glm_lite(rng) | {
        "q_lora_rank": rng.choice([12, 24]),
        "first_k_dense_replace": rng.choice([0, 1, 2]),
        "index_topk": rng.choice([1, 3, 6, 11, 40]),
        "index_head_dim": rng.choice([8, 13]),
        # So many that no key has a score of exactly 0, where any choice between several is right.
        "index_n_heads": rng.choice([24, 27]),
    }
    del fields["rope_interleave"]
    return fields


def _deepseek_v4(rng: random.Random) -> Fields:
    """Windows, entries and chosen entries that are fewer than the tokens, and all kinds of layers."""
    layers = rng.choice([3, 4, 5])
    fields = _common(rng, layers) | {
        "num_attention_heads": (heads := rng.choice([4, 8])),
        "head_dim": rng.choice([16, 24]),
        "partial_rotary_factor": rng.choice([0.25, 0.5]),
        "q_lora_rank": rng.choice([12, 20]),
        "o_groups": rng.choice([1, 2, heads]),
        "o_lora_rank": rng.choice([6, 10]),
        "index_n_heads": rng.choice([24, 28]),
        "index_head_dim": rng.choice([16, 20]),
        "index_topk": rng.choice([1, 2, 3, 40]),
        "sliding_window": rng.choice([2, 4, 7, 30]),  # of 1, transformers keeps all
        "compress_rates": {V4_SPARSE: rng.choice([1, 2, 3, 4]), V4_HEAVY: rng.choice([2, 5, 7, 40])},
        "layer_types": [rng.choice(["sliding_attention", V4_SPARSE, V4_SPARSE, V4_HEAVY]) for _ in range(layers)],
        "mlp_layer_types": [rng.choice(["hash_moe", "moe"]) for _ in range(layers)],
        "hc_mult": rng.choice([1, 2, 3, 4]),
        "hc_sinkhorn_iters": rng.choice([1, 2, 20]),
        "hc_eps": rng.choice([1e-6, 1e-2]),
        "moe_intermediate_size": rng.choice([16, 24]),
        "n_routed_experts": rng.choice([5, 8]),
        "num_experts_per_tok": rng.choice([1, 2, 3]),
        "routed_scaling_factor": rng.choice([1.0, 1.5]),
        "swiglu_limit": rng.choice([0.5, 10.0]),
    }
    del fields["intermediate_size"]
    return fields


def _glm_moe_dsa(rng: random.Random) -> Fields:
    fields = _deepseek_v32(rng) | {"num_hidden_layers": (layers := rng.choice([3, 4])), "mlp_layer_types": None}
    kinds = ["full", *(rng.choice(["full", "shared", "shared"]) for _ in range(layers - 1))]
    pattern = "".join(kind[0].upper() for kind in kinds)
    shared = [{}, {"indexer_types": kinds}, {"index_topk_pattern": pattern}]
    return fields | rng.choice([*shared, {"index_topk_freq": 2, "index_skip_topk_offset": rng.choice([1, 2, 3])}])


def _deepseek_v2(rng: random.Random) -> Fields:
    fields = _latent(rng) | {
        "num_attention_heads": (heads := rng.choice([2, 4])),
        "num_key_value_heads": heads,
        "kv_lora_rank": rng.choice([8, 18]),  # transformers 5.23 raises for odd ranks: it views pairs at this stride
        "first_k_dense_replace": rng.choice([0, 1, 1]),
        "topk_method": rng.choice(["greedy", "group_limited_greedy", "group_limited_greedy"]),
        "norm_topk_prob": False,
    }
    if fields["topk_method"] == "greedy":
        fields |= rng.choice([{}, {"n_group": None, "topk_group": None}])
    del fields["rope_interleave"]
    return fields


def _rotated(rng: random.Random) -> Fields:
    """Heads of which all or an even part is rotated; the fraction is rounded down."""
    width, factor = rng.choice([(16, 0.25), (16, 0.5), (10, 0.45), (12, 0.7), (6, 0.4), (8, 1.0), (20, 0.3)])
    return {"head_dim": width, "partial_rotary_factor": factor}


def _routed(rng: random.Random) -> Fields:
    experts, groups, kept = rng.choice([(8, 1, 1), (8, 4, 2), (6, 3, 2)])
    return {
        "moe_intermediate_size": rng.choice([12, 20]),
        "attention_bias": rng.random() < 0.7,
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": rng.choice([1, 2, 3]),
        "n_shared_experts": rng.choice([1, 2]),
        "norm_topk_prob": rng.random() < 0.7,
        "routed_scaling_factor": rng.choice([1.0, 1.8, 2.5]),
    }


def _glm4_moe(rng: random.Random) -> Fields:
    fields = _grouped(rng, rng.choice([2, 3])) | _routed(rng) | _rotated(rng)
    return fields | {"use_qk_norm": rng.random() < 0.5, "first_k_dense_replace": rng.choice([0, 1, 1, 2])}


def _dots1(rng: random.Random) -> Fields:
    layers = rng.choice([2, 3])
    kinds = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    windows = [
        {"sliding_window": None},
        {"sliding_window": rng.choice([2, 5]), "max_window_layers": rng.randrange(layers + 1)},
        {"sliding_window": rng.choice([3, 8]), "layer_types": kinds},
    ]
    fields = _grouped(rng, layers) | _routed(rng) | rng.choice(windows)
    return fields | {"first_k_dense_replace": rng.choice([0, 1, 2])}


def _solar_open(rng: random.Random) -> Fields:
    return _grouped(rng, rng.choice([2, 3])) | _routed(rng)


def _minimax_m2(rng: random.Random) -> Fields:
    fields = _grouped(rng, rng.choice([2, 3])) | _rotated(rng)
    if rng.random() < 0.5:
        fields["rotary_dim"] = int(fields["head_dim"] * fields.pop("partial_rotary_factor"))
    experts = rng.choice([4, 6, 8])
    return fields | {"num_local_experts": experts, "num_experts_per_tok": rng.choice([1, 2, 3, experts])}


def _hy_v3(rng: random.Random) -> Fields:
    layers = rng.choice([2, 3])
    kinds = [rng.choice(["dense", "sparse", "sparse"]) for _ in range(layers)]
    experts = rng.choice([4, 6, 8])
    return _grouped(rng, layers) | {
        "attention_bias": rng.random() < 0.7,
        "mlp_layer_types": rng.choice([None, kinds]),
        "moe_intermediate_size": rng.choice([12, 20]),
        "num_experts": experts,
        "num_experts_per_tok": rng.choice([1, 2, 3, experts]),
        "num_shared_experts": rng.choice([1, 2]),
        "router_scaling_factor": rng.choice([1.0, 1.8, 2.826]),
        "enable_moe_fp32_combine": rng.random() < 0.5,
    }


def _sarvam_moe(rng: random.Random) -> Fields:
    return _glm4_moe(rng) | rng.choice([{}, {"partial_rotary_factor": 1.0}])


def _ministral3(rng: random.Random) -> Fields:
    fields = _grouped(rng, rng.choice([2, 3]))
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "original_max_position_embeddings": 16}
    rope = rng.choice([rope, rope | {"mscale": 1.0, "mscale_all_dim": 1.0}, rope | {"rope_type": "linear"}])
    fields["rope_parameters"] = rope | {"llama_4_scaling_beta": rng.choice([0.1, 0.5, 0.0])}
    fields["rope_parameters"]["original_max_position_embeddings"] = rng.choice([3, 5, 8])
    return fields | {"sliding_window": rng.choice([None, None, 5])}


def _gemma4_text(rng: random.Random) -> Fields:
    layers, experts = rng.choice([2, 3, 4]), rng.choice([5, 8])
    fields = _grouped(rng, layers) | {
        "num_attention_heads": 4,
        "num_key_value_heads": rng.choice([1, 2, 4]),
        "head_dim": rng.choice([6, 8]),
        "global_head_dim": rng.choice([8, 12]),
        "attention_k_eq_v": rng.random() < 0.6,
        "num_global_key_value_heads": rng.choice([None, 1, 2]),
        "attention_bias": rng.random() < 0.3,
        "sliding_window": rng.choice([2, 5, 8]),
        "layer_types": [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers - 1)],
        "final_logit_softcapping": rng.choice([None, 3.0, 30.0]),
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]),
                "rope_theta": 500.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": rng.choice([37.5, 1e4])},
        },
    }
    fields["layer_types"].append("full_attention")
    fields["vocab_size_per_layer_input"] = fields["vocab_size"] + rng.choice([0, 3])
    if rng.random() < 0.6:
        before = fields["layer_types"][: layers - 1]
        shared = [n for n in range(1, layers) if {*fields["layer_types"][-n:]} <= {*before[: layers - n]}]
        fields |= {
            "hidden_size_per_layer_input": (width := rng.choice([0, 12, 16])),
            # Transformers fails with shared keys and without inputs per layer.
            "num_kv_shared_layers": rng.choice([0, *shared, *shared]) if width else 0,
            "use_double_wide_mlp": rng.random() < 0.5,
        }
    routed = {"enable_moe_block": True, "num_experts": experts, "top_k_experts": rng.choice([1, 2, 3])}
    routed["moe_intermediate_size"] = rng.choice([12, 20])
    return fields | rng.choice([{}, routed, routed])


def _mistral4(rng: random.Random) -> Fields:
    fields = _latent(rng) | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": rng.choice([0, 0, 1])}
    rope = {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "llama_4_scaling_beta": 0.5}
    scaled = rng.choice([{}, {"mscale": 1.0, "mscale_all_dim": 1.0}])
    fields["rope_parameters"] = rope | scaled | {"original_max_position_embeddings": rng.choice([3, 5, 8])}
    return fields


def _ernie4_5_moe(rng: random.Random) -> Fields:
    layers, experts = rng.choice([2, 3, 4]), rng.choice([5, 8])
    fields = _grouped(rng, layers) | {
        "moe_intermediate_size": rng.choice([12, 20]),
        "moe_num_experts": experts,
        "moe_k": rng.choice([1, 2, 3, experts]),
        "moe_num_shared_experts": rng.choice([0, 1, 2]),
        "moe_layer_start_index": rng.choice([0, 1]),
        "moe_layer_end_index": rng.choice([-1, layers - 1]),
        "moe_layer_interval": rng.choice([1, 1, 2]),
        "moe_norm_min": rng.choice([1e-12, 0.3]),
    }
    del fields["head_dim"]
    return fields


def _exaone_moe(rng: random.Random) -> Fields:
    layers = rng.choice([2, 3, 4])
    fields = _grouped(rng, layers) | {k: v for k, v in _routed(rng).items() if k != "attention_bias"}
    for name in ("n_routed_experts", "n_shared_experts"):
        fields[name.replace("n_routed", "num").replace("n_shared", "num_shared")] = fields.pop(name)
    kinds = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    mlps = [rng.choice(["dense", "sparse", "sparse"]) for _ in range(layers)]
    windows = [
        {"sliding_window": rng.choice([2, 5]), "layer_types": kinds},
        {"sliding_window": rng.choice([3, 8]), "sliding_window_pattern": rng.choice([1, 2, 3])},
    ]
    fields |= rng.choice(windows) | {"mlp_layer_types": rng.choice([None, mlps])}
    return fields | {"first_k_dense_replace": rng.choice([0, 1, 2])}


def _mellum(rng: random.Random) -> Fields:
    layers = rng.choice([2, 3, 4])
    fields = {k: v for k, v in _qwen3_moe(rng).items() if k not in ("decoder_sparse_step", "mlp_only_layers")}
    kinds = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    mlps = [rng.choice(["dense", "sparse", "sparse"]) for _ in range(layers)]
    other = {"rope_type": "default", "rope_theta": rng.choice([37.5, 1e4])}
    del fields["use_sliding_window"]
    return fields | {
        "num_hidden_layers": layers,
        "layer_types": rng.choice([None, kinds, kinds]),
        "mlp_layer_types": rng.choice([None, mlps]),
        "rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": other},
    }


def _afmoe(rng: random.Random) -> Fields:
    layers, experts = rng.choice([2, 3, 4]), rng.choice([4, 6, 8])
    kinds = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    windows = [{"layer_types": kinds}, {"global_attn_every_n_layers": rng.choice([1, 2, 3])}]
    return (
        _grouped(rng, layers)
        | rng.choice(windows)
        | {
            "sliding_window": rng.choice([2, 5, 8]),
            "attention_bias": rng.random() < 0.5,
            "mup_enabled": rng.random() < 0.5,
            "num_dense_layers": rng.choice([0, 1, 1, 2]),
            "moe_intermediate_size": rng.choice([12, 20]),
            "num_experts": experts,
            "num_experts_per_tok": rng.choice([1, 2, 3, experts]),
            "num_shared_experts": rng.choice([1, 2]),
            "route_scale": rng.choice([1.0, 1.8, 2.826]),
        }
    )


# The frozen configurations, as the hub writes them

_HUB: Fields = {
    "vocab_size": 56,
    "hidden_size": 24,
    "intermediate_size": 28,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
    "transformers_version": "4.51.0",
}
_MLA: Fields = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
_ROUTED: Fields = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_HYBRID: Fields = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "full_attention_interval": 3,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 8,
}
_EXPERTS: Fields = {
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
_GQA: Fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 500.0}

FAMILIES: dict[str, Family] = {
    "kimi_k2": Family(
        _HUB
        | _MLA
        | {
            "model_type": "kimi_k2",
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.827,
            "rope_theta": 500.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 8,
            },
        },
        _kimi,
        "deepseek_v3",
    ),
    "glm4_moe_lite": Family(
        _HUB
        | _MLA
        | {
            "model_type": "glm4_moe_lite",
            "num_hidden_layers": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "partial_rotary_factor": 1.0,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.8,
            "rope_theta": 500.0,
            "rope_scaling": None,
        },
        _glm_lite,
        "glm4_moe_lite",
    ),
    "deepseek_v32": Family(
        _HUB
        | _MLA
        | {
            "model_type": "deepseek_v32",
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "rope_theta": 500.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 8,
            },
            "index_topk": 5,
            "index_head_dim": 10,
            "index_n_heads": 8,
        },
        _deepseek_v32,
        "deepseek_v32",
    ),
    "deepseek_v4": Family(
        {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "vocab_size": 48,
            "hidden_size": 24,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "qk_rope_head_dim": 6,
            "q_lora_rank": 12,
            "o_lora_rank": 8,
            "o_groups": 2,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 256,
            "sliding_window": 5,
            "rope_theta": 500.0,
            "compress_rope_theta": 2000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "compress_ratios": [0, 4, 128, 4, 0],
            "compress_rate_csa": 3,
            "compress_rate_hca": 4,
            "num_hash_layers": 2,
            "index_n_heads": 8,
            "index_head_dim": 10,
            "index_topk": 2,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            "hc_eps": 1e-6,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "swiglu_limit": 1.0,
            "hidden_act": "silu",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
        },
        _deepseek_v4,
        "deepseek_v4",
    ),
    "glm_moe_dsa": Family(
        _HUB
        | _MLA
        | {
            "model_type": "glm_moe_dsa",
            "num_hidden_layers": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "indexer_types": ["full", "shared", "full", "shared"],
            "attention_bias": True,
            "head_dim": 10,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
            "index_topk": 5,
            "index_topk_freq": 4,
            "index_head_dim": 9,
            "index_n_heads": 7,
            "indexer_rope_interleave": True,
        },
        _glm_moe_dsa,
        "glm_moe_dsa",
    ),
    "qwen2": Family(
        _HUB
        | _GQA
        | {
            "model_type": "qwen2",
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "use_mrope": False,
        },
        _qwen2,
        "qwen2",
    ),
    "qwen3": Family(
        _HUB
        | _GQA
        | {
            "model_type": "qwen3",
            "num_hidden_layers": 3,
            "head_dim": 10,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        _qwen3,
        "qwen3",
    ),
    "qwen3_moe": Family(
        _HUB
        | _GQA
        | {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 4,
            "head_dim": 8,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 4,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "moe_intermediate_size": 12,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "output_router_logits": False,
            "use_qk_norm": True,
        },
        _qwen3_moe,
        "qwen3_moe",
    ),
    "olmoe": Family(
        _HUB
        | _GQA
        | {
            "model_type": "olmoe",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "clip_qkv": None,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "output_router_logits": False,
            "pad_token_id": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
        },
        _olmoe,
        "olmoe",
    ),
    "deepseek_v2": Family(
        _HUB
        | _MLA
        | {
            "model_type": "deepseek_v2",
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "routed_scaling_factor": 4.0,
            "rope_theta": 500.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 8,
            },
        },
        _deepseek_v2,
        "deepseek_v2",
        {"num_experts_per_tok": 6},
    ),
    "qwen2_moe": Family(
        _HUB
        | _GQA
        | {
            "model_type": "qwen2_moe",
            "num_hidden_layers": 3,
            "use_sliding_window": False,
            "sliding_window": 32768,
            "max_window_layers": 21,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "output_router_logits": False,
        },
        _qwen2_moe,
        "qwen2_moe",
    ),
    "glm4_moe": Family(
        _HUB
        | _GQA
        | _ROUTED
        | {
            "model_type": "glm4_moe",
            "num_hidden_layers": 3,
            "head_dim": 10,
            "partial_rotary_factor": 0.45,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
            "rope_scaling": None,
        },
        _glm4_moe,
        "glm4_moe",
        {"head_dim": 128},
    ),
    "dots1": Family(
        _HUB
        | _GQA
        | _ROUTED
        | {
            "model_type": "dots1",
            "num_hidden_layers": 3,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "scoring_func": "noaux_tc",
            "moe_layer_freq": 1,
            "use_sliding_window": False,
            "sliding_window": 4,
            "max_window_layers": 2,
            "rope_scaling": None,
        },
        _dots1,
        "dots1",
        {"n_routed_experts": 8, "num_experts_per_tok": 2},
    ),
    "solar_open": Family(
        _HUB
        | _GQA
        | _ROUTED
        | {
            "model_type": "solar_open",
            "num_hidden_layers": 2,
            "head_dim": 8,
            "partial_rotary_factor": 1.0,
            "attention_bias": False,
            "first_k_dense_replace": 0,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        },
        _solar_open,
        "solar_open",
    ),
    "minimax_m2": Family(
        _HUB
        | _GQA
        | {
            "model_type": "minimax_m2",
            "num_hidden_layers": 2,
            "head_dim": 10,
            "rotary_dim": 6,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "attn_type_list": [1, 1],
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
        },
        _minimax_m2,
        "minimax_m2",
    ),
    "hy_v3": Family(
        _HUB
        | _GQA
        | {
            "model_type": "hy_v3",
            "num_hidden_layers": 3,
            "head_dim": 8,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "expert_hidden_dim": 12,
            "moe_intermediate_size": 12,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "router_scaling_factor": 2.826,
            "qk_norm": True,
            "route_norm": True,
            "num_nextn_predict_layers": 0,
        },
        _hy_v3,
        "hy_v3",
    ),
    "sarvam_mla": Family(
        _HUB
        | {k: v for k, v in _MLA.items() if k not in ("q_lora_rank", "n_routed_experts", "num_key_value_heads")}
        | {
            "model_type": "sarvam_mla",
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "head_dim": 14,
            "q_head_dim": 10,
            "num_experts": 8,
            "num_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "moe_router_enable_expert_bias": True,
            "rope_theta": 500.0,
            "rope_scaling": {
                "type": "deepseek_yarn",
                "factor": 4.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.8,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 8,
            },
        },
        _kimi,
        "sarvam_mla",
    ),
    "sarvam_moe": Family(
        _HUB
        | _GQA
        | {
            "model_type": "sarvam_moe",
            "num_hidden_layers": 3,
            "head_dim": 10,
            "use_qkv_bias": True,
            "use_qk_norm": True,
            "moe_intermediate_size": 12,
            "num_experts": 8,
            "num_shared_experts": 2,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
            "score_function": "sigmoid",
            "rope_scaling": None,
        },
        _sarvam_moe,
        "sarvam_moe",
    ),
    "ministral3": Family(
        _HUB
        | {k: v for k, v in _GQA.items() if k != "rope_theta"}
        | {
            "model_type": "ministral3",
            "num_hidden_layers": 2,
            "head_dim": 8,
            "rope_parameters": {
                "type": "yarn",
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 5,
                "max_position_embeddings": 20,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
            "sliding_window": None,
        },
        _ministral3,
        "ministral3",
    ),
    "gemma4_text": Family(
        _HUB
        | {
            "model_type": "gemma4_text",
            "hidden_size": 24,
            "intermediate_size": 28,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "final_logit_softcapping": 5.0,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 60,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "use_bidirectional_attention": None,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        _gemma4_text,
        "gemma4_text",
    ),
    "mistral4": Family(
        _HUB
        | {
            "model_type": "mistral4",
            "hidden_size": 24,
            "intermediate_size": 28,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "rope_interleave": True,
            "rope_parameters": {
                "type": "yarn",
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 5,
                "max_position_embeddings": 20,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
                "partial_rotary_factor": 4 / 12,
            },
        },
        _mistral4,
        "mistral4",
    ),
    "ernie4_5_moe": Family(
        _HUB
        | {
            "model_type": "ernie4_5_moe",
            "hidden_size": 24,
            "intermediate_size": 28,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_theta": 700.0,
            "use_bias": False,
            "moe_intermediate_size": 16,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 1,
            "moe_norm_min": 0.7,
            "tie_word_embeddings": True,
        },
        _ernie4_5_moe,
        "ernie4_5_moe",
    ),
    "exaone_moe": Family(
        _HUB
        | _GQA
        | {
            "model_type": "exaone_moe",
            "num_hidden_layers": 4,
            "head_dim": 8,
            "first_k_dense_replace": 1,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 4,
            "sliding_window_pattern": "LGLL",
            "moe_intermediate_size": 12,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "rope_scaling": None,
        },
        _exaone_moe,
        "exaone_moe",
    ),
    "mellum": Family(
        _HUB
        | {k: v for k, v in _GQA.items() if k != "rope_theta"}
        | {
            "model_type": "mellum",
            "num_hidden_layers": 3,
            "head_dim": 8,
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "max_window_layers": 0,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "output_router_logits": False,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 8,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "attention_factor": 1.1,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "sliding_window": 5,
            "use_sliding_window": True,
        },
        _mellum,
        "mellum",
    ),
    "afmoe": Family(
        _HUB
        | _GQA
        | {
            "model_type": "afmoe",
            "num_hidden_layers": 4,
            "head_dim": 8,
            "attention_bias": True,
            "global_attn_every_n_layers": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "moe_intermediate_size": 12,
            "mup_enabled": True,
            "n_group": 1,
            "num_dense_layers": 1,
            "num_expert_groups": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_limited_groups": 1,
            "num_shared_experts": 2,
            "rope_scaling": None,
            "route_norm": True,
            "route_scale": 2.826,
            "score_func": "sigmoid",
            "sliding_window": 4,
            "topk_group": 1,
            "use_grouped_mm": True,
        },
        _afmoe,
        "afmoe",
    ),
}

FAMILIES |= {
    "qwen3_next": Family(
        _HUB
        | _GQA
        | _HYBRID
        | _EXPERTS
        | {
            "model_type": "qwen3_next",
            "partial_rotary_factor": 0.25,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [2],
            "norm_topk_prob": True,
        },
        _qwen3_next,
        "qwen3_next",
    ),
    "mimo_v2_flash": Family(
        _HUB
        | {
            "model_type": "mimo_v2_flash",
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "v_head_dim": 10,
            "attention_bias": False,
            "attention_value_scale": 0.707,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "sliding_window": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": None,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
            },
        },
        _mimo_v2_flash,
        "mimo_v2_flash",
    ),
    "laguna": Family(
        _HUB
        | {
            "model_type": "laguna",
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_attention_heads_per_layer": [4, 6, 4],
            "num_key_value_heads": 2,
            "head_dim": 8,
            "attention_bias": False,
            "gating": "per-head",
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "sliding_window": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 20,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_routed_scaling_factor": 2.5,
            "moe_apply_router_weight_on_input": False,
            "moe_router_logit_softcapping": 1.5,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 900.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 1.0},
            },
        },
        _laguna,
        "laguna",
    ),
    "step3p5": Family(
        {k: v for k, v in _HUB.items() if k != "torch_dtype"}
        | {
            "model_type": "step3p5",
            "num_hidden_layers": 3,
            "num_nextn_predict_layers": 1,
            "num_attention_heads": 4,
            "num_attention_groups": 2,
            "head_dim": 8,
            "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6},
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "moe_layers_enum": "1,2",
            "sliding_window": 4,
            "moe_intermediate_size": 16,
            "share_expert_dim": 20,
            "moe_num_experts": 6,
            "moe_top_k": 2,
            "moe_router_scaling_factor": 2.5,
            "moe_router_activation": "sigmoid",
            "norm_expert_weight": True,
            "use_qk_norm": True,
            "use_rope_layers": [],
            "yarn_only_types": ["full_attention"],
            "rope_theta": [900.0, 50.0, 50.0, 900.0],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 2.0,
                "original_max_position_embeddings": 16,
                "low_freq_factor": 1.0,
                "high_freq_factor": 32.0,
            },
            "swiglu_limits": [0.0, 0.0, 0.4, 0.0],
            "swiglu_limits_shared": [0.5, 0.0, 0.6, 0.0],
            "dtype": "float32",
        },
        _step3p5,
        "step3p5",
    ),
    "minimax_m3_vl_text": Family(
        _HUB
        | {
            "model_type": "minimax_m3_vl_text",
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "hidden_act": "swigluoai",
            "intermediate_size": 16,
            "dense_intermediate_size": 32,
            "shared_intermediate_size": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 2.5,
            "swiglu_limit": 1.5,
            "moe_layer_freq": [0, 1, 1],
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "rotary_dim": 4,
            "use_qk_norm": True,
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 6,
                "sparse_block_size": 3,
                "sparse_topk_blocks": 2,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1, 1],
            },
        },
        _minimax_m3,
        "minimax_m3_vl_text",
    ),
    "kimi_linear": Family(
        {k: v for k, v in _HUB.items() if k != "max_position_embeddings"}
        | {
            "model_type": "kimi_linear",
            "pad_token_id": 0,
            "hidden_size": 24,
            "intermediate_size": 28,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "mla_use_nope": True,
            "linear_attn_config": {
                "full_attn_layers": [2],
                "head_dim": 6,
                "kda_layers": [1, 3, 4],
                "num_heads": 4,
                "short_conv_kernel_size": 3,
            },
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "moe_intermediate_size": 16,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_expert_group": 1,
            "num_experts": 6,
            "num_experts_per_token": 2,
            "num_nextn_predict_layers": 0,
            "num_shared_experts": 1,
            "routed_scaling_factor": 2.446,
            "topk_group": 1,
            "use_grouped_topk": True,
            "model_max_length": 64,
            "rope_theta": 10000.0,
            "rope_scaling": None,
        },
        _kimi_linear,
        "kimi_linear",
    ),
    "glm5_next_text": Family(
        {k: v for k, v in _HUB.items() if k != "max_position_embeddings"}
        | {
            "model_type": "glm5_next_text",
            "pad_token_id": 0,
            "hidden_size": 24,
            "intermediate_size": 28,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 0,
            "v_head_dim": 10,
            "index_n_heads": 24,
            "index_head_dim": 8,
            "index_topk": 6,
            "index_kpool": 3,
            "index_kpool_always_select_tail": True,
            "linear_attn_config": {
                "head_dim": 6,
                "num_heads": 4,
                "short_conv_kernel_size": 3,
                "gate_lower_bound": -5.0,
            },
            "hc_mult": 3,
            "hc_sinkhorn_iters": 5,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "swiglu_limit": 0.5,
            "rms_norm_eps": 1e-5,
        },
        _glm5_next_text,
        "glm5_next_text",
    ),
    "nemotron_h": Family(
        {k: v for k, v in _HUB.items() if k not in ("rms_norm_eps", "tie_word_embeddings")}
        | {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "MEM*E-M",
            "num_hidden_layers": 7,
            "layer_norm_epsilon": 1e-5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "attention_bias": False,
            "mlp_bias": False,
            "use_bias": False,
            "use_conv_bias": True,
            "ssm_state_size": 5,
            "mamba_num_heads": 6,
            "mamba_head_dim": 4,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 8,
            "expand": 2,
            "time_step_limit": [0.0, float("inf")],
            "time_step_min": 0.001,
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "moe_intermediate_size": 12,
            "moe_shared_expert_intermediate_size": 20,
            "moe_latent_size": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "norm_eps": 1e-5,
            "rope_theta": 10000,
            "partial_rotary_factor": 1.0,
            "residual_in_fp32": False,
            "sliding_window": None,
        },
        _nemotron_h,
        "nemotron_h",
    ),
    "bailing_hybrid": Family(
        _HUB
        | {
            "model_type": "bailing_hybrid",
            "pad_token_id": 0,
            "hidden_size": 24,
            "intermediate_size": 28,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 6,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "short_conv_kernel_size": 3,
            "layer_group_size": 2,
            "kda_safe_gate": True,
            "kda_lower_bound": -5.0,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "num_nextn_predict_layers": 0,
            "routed_scaling_factor": 2.5,
            "rope_theta": 700.0,
        },
        _bailing_hybrid,
        "bailing_hybrid",
    ),
    "qwen3_5_text": Family(
        _HUB | _GQA | _HYBRID | {"model_type": "qwen3_5_text", "partial_rotary_factor": 0.5},
        _hybrid,
        "qwen3_5_text",
    ),
    "qwen3_5_moe_text": Family(
        {k: v for k, v in _HUB.items() if k != "intermediate_size"}
        | _GQA
        | _HYBRID
        | _EXPERTS
        | {"model_type": "qwen3_5_moe_text"},
        _hybrid_moe,
        "qwen3_5_moe_text",
    ),
}


def write_config(folder: Path, fields: Mapping[str, Any]) -> None:
    """Writes config.json."""
    (folder / "config.json").write_text(json.dumps(fields))
