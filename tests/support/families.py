"""Tiny models of the families: for each a frozen config, and a function that draws random configs.

The frozen cases are stored in ``tests/data/families``: config.json in the hub's style, the names and shapes of the
tensors that transformers saves, and its outputs in float32. The weights are computed from the names, so they are not
stored. For a further family, store ``{"config": …}`` as ``FAMILY.json``, and add its draw function to `_DRAWS`. If
transformers uses a different model_type, add it to `_HF_MODEL_TYPES`. Then run

    python -m tests.support.freeze FAMILY

which adds the shapes, the outputs and the version of transformers. It refuses cases whose routing or greedy tokens are
too close to call.
"""

import dataclasses
import functools
import json
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nnxmoe.models import config_from_hf, family_of
from tests.support.tiny import Fields, Weights

V4_SPARSE, V4_HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
FOLDER = Path(__file__).parents[1] / "data" / "families"
PROMPT, NEW = 9, 6  # tokens of the greedy continuations


@dataclasses.dataclass(frozen=True)
class Family:
    """Tiny configs of a family.

    Attributes:
        kind: Our model_type.
        draw: Draws random fields of the config.
        theirs: The model_type of transformers.
        required: Fields for which our config class has no default.
    """

    kind: str
    draw: Callable[[random.Random], Fields]
    theirs: str
    required: Fields

    @functools.cached_property
    def frozen(self) -> Fields:
        """config.json as on the hub."""
        return _stored(self.kind)["config"]


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


def _stored(kind: str) -> Fields:
    return json.loads((FOLDER / f"{kind}.json").read_text())


def constants_of(fields: Fields) -> Weights:
    """The tensors of a checkpoint that config.json determines."""
    constants = family_of(config := config_from_hf(fields)).constants(config)
    return {name: np.array(values, np.int64) for name, values in constants.items()}


def load(kind: str) -> Frozen:
    """The frozen case of a family."""
    from safetensors.numpy import load_file

    stored = _stored(kind)
    weights = weights_of(stored["shapes"]) | constants_of(stored["config"])
    return Frozen(stored["config"], weights, load_file(FOLDER / f"{kind}.safetensors"))


def tokens_of(vocab: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two rows of 17 tokens, and a mask that pads the first row on the left and the second on the right."""
    tokens = np.random.RandomState(seed).randint(0, vocab, (2, 17)).astype(np.int32)
    mask = np.ones_like(tokens)
    mask[0, :5], mask[1, -3:] = 0, 0
    return tokens, mask


def positions_of(mask: np.ndarray) -> np.ndarray:
    """The positions of tokens with a cache and in generation, which do not count padding on the left."""
    return np.maximum(np.arange(mask.shape[1]) - np.argmax(mask, axis=1)[:, None], 0)


_MIXTRAL_KERNELS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_GRANITE = {"input_linear.weight": "experts.gate_up_proj", "output_linear.weight": "experts.down_proj"}
_GRANITE |= {"router.layer.weight": "router.weight"}


def fused(weights: Weights) -> Weights:
    """The same tensors with the names of transformers 5 in memory: all experts of a layer in two tensors."""
    found: Weights = {}
    experts = dict[str, dict[tuple[int, str], np.ndarray]]()
    for name, array in weights.items():
        layer, _, part = name.partition("block_sparse_moe.")
        if part in _GRANITE:
            found[f"{layer}block_sparse_moe.{_GRANITE[part]}"] = array
            continue
        head, _, tail = name.replace("block_sparse_moe", "mlp").partition(".experts.")
        if "." in tail:
            head, (number, kind, _) = head.replace("ffn", "mlp"), tail.split(".")
            experts.setdefault(head + ".experts.", {})[int(number), _MIXTRAL_KERNELS.get(kind, kind)] = array
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


_WINDOWED = "full_attention", "sliding_attention"
_MLPS = "dense", "sparse", "sparse"


def _kinds(rng: random.Random, layers: int, *kinds: str) -> list[str]:
    return [rng.choice(kinds) for _ in range(layers)]


def _experts(rng: random.Random, experts: int, name: str = "num_experts") -> Fields:
    return {name: experts, "num_experts_per_tok": rng.choice([1, 2, 3, experts])}


def _groups(rng: random.Random) -> Fields:
    experts, groups, kept = rng.choice([(8, 1, 1), (8, 4, 2), (6, 3, 2)])
    return {"n_routed_experts": experts, "n_group": groups, "topk_group": kept}


def _without(fields: Fields, *names: str) -> Fields:
    assert fields.keys() >= set(names)
    return {name: value for name, value in fields.items() if name not in names}


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
    return fields | {"layer_types": _kinds(rng, layers, *_WINDOWED)}


def _qwen2(rng: random.Random) -> Fields:
    layers = rng.choice([2, 3])
    return _without(_grouped(rng, layers) | _windows(rng, layers), "head_dim")


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
        **_experts(rng, experts),
        "norm_topk_prob": rng.random() < 0.5,
        "output_router_logits": False,
    }


def _qwen2_moe(rng: random.Random) -> Fields:
    return _without(_qwen3_moe(rng), "head_dim", "attention_bias") | {
        "qkv_bias": rng.random() < 0.7,
        "use_sliding_window": False,
        "shared_expert_intermediate_size": rng.choice([16, 28]),
    }


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
    return _without(_hybrid(rng), "intermediate_size") | {
        "moe_intermediate_size": rng.choice([12, 20]),
        "shared_expert_intermediate_size": rng.choice([16, 28]),
        **_experts(rng, experts),
    }


def _qwen4_exp_text(rng: random.Random) -> Fields:
    """Attention over pools of keys, streams, and n-grams in some recurrent layers, with and without the end token."""
    fields, pool = _hybrid_moe(rng), rng.choice([1, 2, 3, 4])
    width, orders, heads = fields["head_dim"], rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    kinds = fields["layer_types"] or ["linear_attention"] * 3 + ["full_attention"]
    kinds = [rng.choice(["full_attention", "indexed_attention"]) if "full" in kind else kind for kind in kinds]
    linear = [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"]
    return fields | {
        "vocab_size": rng.choice([16, 24, 64]),
        "eos_token_id": rng.choice([2, 5, [7, 2]]),
        "layer_types": kinds,
        "norm_topk_prob": rng.random() < 0.7,
        "output_gate_type": rng.choice([None, "silu", "sigmoid", "sigmoid"]),
        "hc_count": rng.choice([2, 3, 4]),
        "hc_lowrank": rng.choice([5, 8]),
        "indexer_n_heads": rng.choice([24, 32]),
        "indexer_kv_heads": 1,
        "indexer_head_dim": width + rng.choice([0, 3]),
        "indexer_compress_ratio": pool,
        "indexer_budget": pool * rng.choice([1, 2, 3]),
        "ple_layer_ids": rng.choice([None, linear, linear[:1], linear[-1:] * 2]),
        "ple_embed_dim": orders * heads * rng.choice([3, 8]),
        "ple_conv_kernel_size": rng.choice([2, 3, 4]),
        "ngram_size": orders + 1,
        "heads_per_ngram": heads,
        "ngram_vocab_size_base": rng.choice([2, 20, 97, 500]),
        "make_ngram_vocab_size_divisible_by": rng.choice([1, 8, 128]),
        "seed": rng.choice([1234, 0, 7]),
        "split_ngram_parts": rng.choice([1, 2, 3, 7]),
    }


def _qwen3_next(rng: random.Random) -> Fields:
    return _hybrid_moe(rng) | {
        "intermediate_size": rng.choice([24, 56]),
        "decoder_sparse_step": rng.choice([1, 1, 2]),
        "mlp_only_layers": rng.choice([None, [], [0], [1]]),
        "norm_topk_prob": rng.random() < 0.7,
    }


def _two_ropes(rng: random.Random, layers: int, *factors: float) -> Fields:
    """Layers of both types, and a rope object for each."""
    thetas = {kind: {"rope_type": "default", "rope_theta": rng.choice([37.5, 500.0, 1e4])} for kind in _WINDOWED}
    for rope in thetas.values():
        rope["partial_rotary_factor"] = rng.choice(factors)
    if rng.random() < 0.3:
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        thetas["full_attention"] |= yarn
    return {
        "layer_types": [*_WINDOWED, *_kinds(rng, layers - 2, *_WINDOWED)],
        "sliding_window": rng.choice([3, 5]),
        "rope_parameters": thetas,
    }


def _mimo_v2_flash(rng: random.Random) -> Fields:
    layers, groups = rng.choice([2, 3, 4]), _groups(rng)
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
            **groups,
            "num_experts_per_tok": rng.choice([1, 2, 3]),
            "norm_topk_prob": rng.random() < 0.7,
            "routed_scaling_factor": rng.choice([1.0, 2.5]),
            "mlp_layer_types": rng.choice([None, _kinds(rng, layers, "dense", "sparse")]),
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
            **_experts(rng, experts),
            "moe_routed_scaling_factor": rng.choice([1.0, 2.5]),
            "moe_router_logit_softcapping": rng.choice([0.0, 1.5]),
            "mlp_layer_types": rng.choice([None, _kinds(rng, layers, "dense", "sparse")]),
        }
    )


def _step3p5(rng: random.Random) -> Fields:
    layers, experts = rng.choice([2, 3, 4]), rng.choice([5, 8])
    limits = [rng.choice([None, 0.0, 0.3, 1.5]) for _ in range(layers)]
    return (
        _without(_grouped(rng, layers), "tie_word_embeddings")
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
            **_experts(rng, experts, "num_local_experts"),
            "moe_router_scaling_factor": rng.choice([1.0, 2.5]),
            "mlp_layer_types": rng.choice([None, _kinds(rng, layers, "dense", "sparse")]),
            "swiglu_limits": rng.choice([None, limits]),
            "swiglu_limits_shared": rng.choice([None, limits[::-1]]),
        }
    )


def _minimax_m3(rng: random.Random) -> Fields:
    layers, experts, kv_heads = rng.choice([2, 3, 4]), rng.choice([5, 8]), rng.choice([1, 2, 4])
    kinds, chosen = ["minimax_m3_sparse", "full_attention"], rng.choice([1, 2, 3])
    rope = {"rope_type": "default", "rope_theta": rng.choice([37.5, 500.0])}
    return _without(_grouped(rng, layers), "tie_word_embeddings") | {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": 4,
        "head_dim": 8,
        "dense_intermediate_size": rng.choice([20, 28]),
        "shared_intermediate_size": rng.choice([12, 20]),
        **_experts(rng, experts, "num_local_experts"),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "swiglu_alpha": rng.choice([1.0, 1.702]),
        "swiglu_limit": rng.choice([0.5, 7.0]),
        "layer_types": [kinds[0], *_kinds(rng, layers - 1, *kinds)],
        "mlp_layer_types": rng.choice([None, _kinds(rng, layers, "dense", "sparse")]),
        "index_n_heads": rng.choice([1, 2, 4]),
        "index_head_dim": rng.choice([8, 12]),
        "index_block_size": rng.choice([1, 2, 3, 4]),
        "index_topk_blocks": chosen,
        "index_local_blocks": rng.choice([0, 1, chosen]),
        "rope_parameters": rope | {"partial_rotary_factor": rng.choice([0.5, 1.0])},
    }


def _kimi_hybrid(rng: random.Random) -> Fields:
    fields = _without(_latent(rng), "rope_interleave", "rope_parameters", "tie_word_embeddings")
    fields["num_local_experts"] = fields.pop("n_routed_experts")
    fields |= {"first_k_dense_replace": rng.choice([0, 1]), "rms_norm_eps": rng.choice([1e-5, 1e-2])}
    return fields | {"num_mtp_layers": 0, "pad_token_id": 0}


def _kimi_linear(rng: random.Random) -> Fields:
    fields = _without(_kimi_hybrid(rng), "num_mtp_layers")
    kinds = _kinds(rng, fields["num_hidden_layers"], "full_attention", "linear_attention")
    kinds[rng.randrange(len(kinds))] = "full_attention"  # without any transformers has no generation
    return fields | {
        "linear_head_dim": rng.choice([4, 6]),
        "linear_num_heads": rng.choice([1, 2, 3]),
        "linear_conv_kernel_dim": rng.choice([2, 4]),
        "layer_types": kinds,
    }


def _kimi_k3(rng: random.Random) -> Fields:
    fields, layers = _without(_kimi_linear(rng), "attention_bias", "q_lora_rank"), rng.choice([3, 4])
    kinds = _kinds(rng, layers, "full_attention", "linear_attention", "linear_attention")
    kinds[rng.randrange(layers)] = "full_attention"
    return fields | {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "q_lora_rank": rng.choice([None, 12]),
        "activation_situ_beta": rng.choice([None, 0.7, 4.0]),
        "activation_situ_linear_beta": rng.choice([None, 0.5, 25.0]),
        "attn_res_block_size": rng.choice([1, 2, 2, 3, 8]),
        "rms_norm_eps": rng.choice([1e-3, 1e-2]),  # else rounding moves logits by 1e-4 in torch too
        "routed_expert_hidden_size": rng.choice([None, 12, 20]),
        "latent_moe_use_norm": rng.random() < 0.7,
        "mla_use_output_gate": rng.random() < 0.7,
        "linear_lower_bound": rng.choice([None, -5.0, -1.0]),
        "linear_full_rank_gate": rng.random() < 0.7,
    }


def _glm5_next_text(rng: random.Random) -> Fields:
    fields = _without(_kimi_hybrid(rng), "num_local_experts", "first_k_dense_replace")
    fields |= {"n_routed_experts": rng.choice([8, 12]), "n_group": 1, "topk_group": 1}
    layers, pool = rng.choice([2, 3, 4]), rng.choice([2, 3, 4])
    kinds = _kinds(rng, layers, "indexed_attention", "linear_attention")
    kinds[rng.randrange(layers)] = "indexed_attention"
    return fields | {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "mlp_layer_types": _kinds(rng, layers, "dense", "sparse"),
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
    fields = _without(_grouped(rng, 2), "rope_parameters", "num_hidden_layers")
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
    return _without(_grouped(rng, rng.choice([2, 3])), "head_dim") | {
        "attention_bias": rng.random() < 0.5,
        **_experts(rng, experts),
        "norm_topk_prob": rng.random() < 0.5,
    }


def _latent(rng: random.Random) -> Fields:
    layers, heads, groups = rng.choice([2, 3]), rng.choice([2, 4, 5]), _groups(rng)
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
        **groups,
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
    return fields | {"mlp_layer_types": rng.choice([None, _kinds(rng, fields["num_hidden_layers"], *_MLPS)])}


def _deepseek_v32(rng: random.Random) -> Fields:
    """Fewer keys per query than tokens, and enough heads in the indexer that few scores are zero."""
    return _without(_glm_lite(rng), "rope_interleave") | {
        "q_lora_rank": rng.choice([12, 24]),
        "first_k_dense_replace": rng.choice([0, 1, 2]),
        "index_topk": rng.choice([1, 3, 6, 11, 40]),
        "index_head_dim": rng.choice([8, 13]),
        # So many that no key has a score of exactly 0, where any choice between several is right.
        "index_n_heads": rng.choice([24, 27]),
    }


def _deepseek_v4(rng: random.Random) -> Fields:
    """Windows, entries and chosen entries that are fewer than the tokens, and all kinds of layers."""
    layers = rng.choice([3, 4, 5])
    return _without(_common(rng, layers), "intermediate_size") | {
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
        "layer_types": _kinds(rng, layers, "sliding_attention", V4_SPARSE, V4_SPARSE, V4_HEAVY),
        "mlp_layer_types": _kinds(rng, layers, "hash_moe", "moe"),
        "hc_mult": rng.choice([1, 2, 3, 4]),
        "hc_sinkhorn_iters": rng.choice([1, 2, 20]),
        "hc_eps": rng.choice([1e-6, 1e-2]),
        "moe_intermediate_size": rng.choice([16, 24]),
        "n_routed_experts": rng.choice([5, 8]),
        "num_experts_per_tok": rng.choice([1, 2, 3]),
        "routed_scaling_factor": rng.choice([1.0, 1.5]),
        "swiglu_limit": rng.choice([0.5, 10.0]),
    }


def _deepseek_v41(rng: random.Random) -> Fields:
    """Layers in runs of equal ratios. Some compute entries and some select; at most one selects candidates."""
    removed = "compress_rates", "layer_types", "mlp_layer_types"
    ratios = rng.choice([[0, 2, 2, 1, 1, 1], [3, 3, 0, 1, 1], [1, 1, 1, 1], [2, 2, 2, 0, 2], [0, 1, 3, 3, 3]])
    earlier = [next((r for r in ratios[:i][::-1] if r), 0) for i in range(len(ratios))]
    keys = [i for i, ratio in enumerate(ratios) if ratio and (ratio != earlier[i] or rng.random() < 0.2)]
    more = [i for i, ratio in enumerate(ratios) if ratio and i not in keys and rng.random() < 0.6]
    indexers = sorted({*keys, *more})
    size = rng.choice([1, 2, 3])
    topk = rng.choice([1, 2, 3, 40])
    return _without(_deepseek_v4(rng), *removed) | {
        "num_hidden_layers": len(ratios),
        "compress_ratios": ratios + rng.choice([[], [0, 0]]),
        "kv_source_layer_ids": keys,
        "index_source_layer_ids": indexers,
        "candidate_source_layer_id": rng.choice([-1, keys[-1], *(i for i in indexers if i >= keys[-1])]),
        "candidate_topk_blocks": -(-(topk - 1) // size) + 1 + rng.choice([0, 1]),
        "candidate_block_size": size,
        "index_topk": topk,
        "gate_temp": rng.choice([1.0, 0.5, 2.0]),
        "rms_norm_eps": rng.choice([1e-20, 1e-6]),
    }


def _glm_moe_dsa(rng: random.Random) -> Fields:
    fields = _deepseek_v32(rng) | {"num_hidden_layers": (layers := rng.choice([3, 4])), "mlp_layer_types": None}
    kinds = ["full", *_kinds(rng, layers - 1, "full", "shared", "shared")]
    pattern = "".join(kind[0].upper() for kind in kinds)
    shared = [{}, {"indexer_types": kinds}, {"index_topk_pattern": pattern}]
    return fields | rng.choice([*shared, {"index_topk_freq": 2, "index_skip_topk_offset": rng.choice([1, 2, 3])}])


def _hy_v4(rng: random.Random) -> Fields:
    """Fewer keys per query than tokens, layers that share keys, and few streams."""
    fields = _without(_deepseek_v32(rng), "first_k_dense_replace", "mlp_layer_types", "tie_word_embeddings")
    layers = rng.choice([3, 4])
    kinds = ["full", *_kinds(rng, layers - 1, "full", "shared", "shared")]
    return fields | {
        "num_hidden_layers": layers,
        "pad_token_id": 0,
        "mlp_layer_types": rng.choice([None, _kinds(rng, layers, *_MLPS)]),
        "indexer_types": rng.choice([None, kinds]),
        "hc_mult": rng.choice([1, 2, 3, 4]),
        "hc_magnitude": rng.choice([0.5, 2.0]),
        "hc_eps": rng.choice([1e-6, 1e-2]),
        "swiglu_limit": rng.choice([0.5, 10.0]),
    }


def _deepseek_v2(rng: random.Random) -> Fields:
    fields = _without(_latent(rng), "rope_interleave") | {
        "num_attention_heads": (heads := rng.choice([2, 4])),
        "num_key_value_heads": heads,
        "kv_lora_rank": rng.choice([8, 18]),  # transformers 5.23 raises for odd ranks: it views pairs at this stride
        "first_k_dense_replace": rng.choice([0, 1, 1]),
        "topk_method": rng.choice(["greedy", "group_limited_greedy", "group_limited_greedy"]),
        "norm_topk_prob": False,
    }
    if fields["topk_method"] == "greedy":
        fields |= rng.choice([{}, {"n_group": None, "topk_group": None}])
    return fields


def _rotated(rng: random.Random) -> Fields:
    """Heads of which all or an even part is rotated; the fraction is rounded down."""
    width, factor = rng.choice([(16, 0.25), (16, 0.5), (10, 0.45), (12, 0.7), (6, 0.4), (8, 1.0), (20, 0.3)])
    return {"head_dim": width, "partial_rotary_factor": factor}


def _routed(rng: random.Random) -> Fields:
    return _groups(rng) | {
        "moe_intermediate_size": rng.choice([12, 20]),
        "attention_bias": rng.random() < 0.7,
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
    kinds = _kinds(rng, layers, *_WINDOWED)
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
    return fields | _experts(rng, experts, "num_local_experts")


def _hy_v3(rng: random.Random) -> Fields:
    layers = rng.choice([2, 3])
    kinds, experts = _kinds(rng, layers, *_MLPS), rng.choice([4, 6, 8])
    return _grouped(rng, layers) | {
        "attention_bias": rng.random() < 0.7,
        "mlp_layer_types": rng.choice([None, kinds]),
        "moe_intermediate_size": rng.choice([12, 20]),
        **_experts(rng, experts),
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
        "layer_types": _kinds(rng, layers - 1, *_WINDOWED),
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
    return _without(_grouped(rng, layers), "head_dim") | {
        "moe_intermediate_size": rng.choice([12, 20]),
        "moe_num_experts": experts,
        "moe_k": rng.choice([1, 2, 3, experts]),
        "moe_num_shared_experts": rng.choice([0, 1, 2]),
        "moe_layer_start_index": rng.choice([0, 1]),
        "moe_layer_end_index": rng.choice([-1, layers - 1]),
        "moe_layer_interval": rng.choice([1, 1, 2]),
        "moe_norm_min": rng.choice([1e-12, 0.3]),
    }


def _exaone_moe(rng: random.Random) -> Fields:
    layers = rng.choice([2, 3, 4])
    fields = _grouped(rng, layers) | _without(_routed(rng), "attention_bias")
    for name in ("n_routed_experts", "n_shared_experts"):
        fields[name.replace("n_routed", "num").replace("n_shared", "num_shared")] = fields.pop(name)
    kinds = _kinds(rng, layers, *_WINDOWED)
    mlps = _kinds(rng, layers, *_MLPS)
    windows = [
        {"sliding_window": rng.choice([2, 5]), "layer_types": kinds},
        {"sliding_window": rng.choice([3, 8]), "sliding_window_pattern": rng.choice([1, 2, 3])},
    ]
    fields |= rng.choice(windows) | {"mlp_layer_types": rng.choice([None, mlps])}
    return fields | {"first_k_dense_replace": rng.choice([0, 1, 2])}


def _mellum(rng: random.Random) -> Fields:
    layers = rng.choice([2, 3, 4])
    fields = _without(_qwen3_moe(rng), "decoder_sparse_step", "mlp_only_layers", "use_sliding_window")
    kinds = _kinds(rng, layers, *_WINDOWED)
    mlps = _kinds(rng, layers, *_MLPS)
    other = {"rope_type": "default", "rope_theta": rng.choice([37.5, 1e4])}
    return fields | {
        "num_hidden_layers": layers,
        "layer_types": rng.choice([None, kinds, kinds]),
        "mlp_layer_types": rng.choice([None, mlps]),
        "rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": other},
    }


def _afmoe(rng: random.Random) -> Fields:
    layers, experts = rng.choice([2, 3, 4]), rng.choice([4, 6, 8])
    kinds = _kinds(rng, layers, *_WINDOWED)
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
            **_experts(rng, experts),
            "num_shared_experts": rng.choice([1, 2]),
            "route_scale": rng.choice([1.0, 1.8, 2.826]),
        }
    )


def _granite(rng: random.Random) -> Fields:
    return _grouped(rng, rng.choice([2, 3])) | {
        "attention_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "embedding_multiplier": rng.choice([1.0, 3, 12.0]),
        "attention_multiplier": rng.choice([0.1, 0.25, 0.5]),
        "residual_multiplier": rng.choice([1.0, 0.22, 0.6]),
        "logits_scaling": rng.choice([1, 0.25, 0.5]),
    }


def _granitemoe(rng: random.Random) -> Fields:
    return _without(_granite(rng), "mlp_bias", "head_dim") | _experts(rng, rng.choice([4, 5, 8]), "num_local_experts")


def _granitemoeshared(rng: random.Random) -> Fields:
    return _granitemoe(rng) | {"shared_intermediate_size": rng.choice([0, 12, 20, 20])}


def _granitemoehybrid(rng: random.Random) -> Fields:
    """Recurrent layers and attention; each at least once."""
    fields, layers = _granitemoeshared(rng), rng.choice([2, 3, 4])
    kinds = ["mamba", "attention", *rng.choices(["mamba", "linear_attention", "full_attention"], k=layers - 2)]
    rng.shuffle(kinds)
    groups, per = rng.choice([(1, 4), (2, 2), (4, 1), (1, 8)])
    return fields | {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "shared_intermediate_size": rng.choice([12, 20]),
        **({"num_local_experts": 0, "num_experts_per_tok": 0} if rng.random() < 0.3 else {}),
        "position_embedding_type": rng.choice([None, "nope", "rope", "rope"]),
        "mamba_n_heads": groups * per,
        "mamba_n_groups": groups,
        "mamba_d_state": rng.choice([4, 7, 10]),
        "mamba_expand": (expand := rng.choice([1, 2])),
        "mamba_d_head": rng.choice(["auto", expand * fields["hidden_size"] // (groups * per)]),
        "mamba_d_conv": rng.choice([2, 3, 4, 6]),
        "mamba_conv_bias": rng.random() < 0.7,
        "mamba_proj_bias": rng.random() < 0.4,
    }


def _lfm2(rng: random.Random) -> Fields:
    """Convolutions and attention; each at least once."""
    layers = rng.choice([2, 3, 4])
    fields = _without(_grouped(rng, layers), "head_dim", "rms_norm_eps")
    kinds = ["conv", "full_attention", *rng.choices(["conv", "full_attention"], k=layers - 2)]
    rng.shuffle(kinds)
    return fields | {
        "layer_types": kinds,
        "norm_eps": rng.choice([1e-6, 1e-5, 1e-2]),
        "tie_word_embeddings": rng.random() < 0.5,
        "conv_bias": rng.random() < 0.4,
        "conv_L_cache": rng.choice([2, 3, 3, 5]),
        "block_auto_adjust_ff_dim": rng.random() < 0.7,
        "block_ffn_dim_multiplier": rng.choice([0.7, 1.0, 1.5]),
        "block_multiple_of": rng.choice([1, 4, 6]),
    }


def _lfm2_moe(rng: random.Random) -> Fields:
    fields = _lfm2(rng)
    return {name: value for name, value in fields.items() if "block" not in name} | {
        "moe_intermediate_size": rng.choice([12, 20]),
        "num_dense_layers": rng.choice([0, 1, 1]),
        **_experts(rng, rng.choice([4, 5, 8])),
        "use_expert_bias": rng.random() < 0.8,
        "norm_topk_prob": rng.random() < 0.7,
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
    }


def _smollm3(rng: random.Random) -> Fields:
    layers = rng.choice([2, 3, 4])
    fields = _grouped(rng, layers) | {
        "pad_token_id": 0,
        "attention_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "no_rope_layers": rng.choice([None, [rng.choice([0, 1]) for _ in range(layers + 1)]]),
        "no_rope_layer_interval": rng.choice([2, 3]),
    }
    windows = {"use_sliding_window": True, "sliding_window": rng.choice([2, 5])}
    kinds = {"layer_types": _kinds(rng, layers, *_WINDOWED)}
    return fields | rng.choice([{}, windows, windows, windows | kinds])


def _scaled_full_rope(rng: random.Random, fields: Fields, theta: float) -> Fields:
    """Windows, and a rope object per kind of layers, of which those without a window may scale theirs."""
    layers = fields["num_hidden_layers"]
    other = {"rope_type": "default", "rope_theta": rng.choice([37.5, theta])}
    return fields | {
        "pad_token_id": 0,
        "attention_bias": rng.random() < 0.5,
        "sliding_window": rng.choice([2, 5]),
        "layer_types": rng.choice([None, _kinds(rng, layers, *_WINDOWED), [*reversed(_WINDOWED), *_WINDOWED][:layers]]),
        "rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": other},
    }


def _olmo3(rng: random.Random) -> Fields:
    fields = _scaled_full_rope(rng, _grouped(rng, rng.choice([2, 3, 4])), 500000.0)
    return fields | {"head_dim": 2 * rng.choice([3, 4, 5])}


def _gemma3_text(rng: random.Random) -> Fields:
    fields = _scaled_full_rope(rng, _grouped(rng, rng.choice([2, 3, 4])), 1e4)
    return fields | {
        "query_pre_attn_scalar": rng.choice([5, 256]),
        "final_logit_softcapping": rng.choice([None, 3.0, 30.0]),
        "sliding_window_pattern": rng.choice([1, 2, 6]),
    }


def _exaone4(rng: random.Random) -> Fields:
    layers = rng.choice([2, 3, 4])
    kinds = _kinds(rng, layers, *_WINDOWED)
    windows = [
        {"sliding_window": rng.choice([2, 5]), "sliding_window_pattern": "LLLG", "layer_types": kinds},
        {"sliding_window": rng.choice([3, 8]), "sliding_window_pattern": rng.choice([1, 2, 3])},
        {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * layers},
    ]
    return _grouped(rng, layers) | rng.choice(windows)


def _phi3(rng: random.Random) -> Fields:
    """Rows of 17 tokens and prompts of nine are both longer than the original context, or both shorter."""
    fields = _without(_grouped(rng, rng.choice([2, 3])), "head_dim", "rope_parameters")
    width = fields["hidden_size"] // fields["num_attention_heads"]
    factor = rng.choice([factor for factor in (1.0, 0.75, 0.5) if int(width * factor) % 2 == 0])
    rope: Fields = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": factor}
    original = rng.choice([8, 32])
    if rng.random() < 0.8:
        divisors = [[rng.choice([1.0, 1.3, 4.0]) for _ in range(int(width * factor) // 2)] for _ in range(2)]
        rope |= {"rope_type": "longrope", "short_factor": divisors[0], "long_factor": divisors[1]}
        rope |= {"original_max_position_embeddings": original}
        rope |= rng.choice([{}, {"factor": 4.0}, {"attention_factor": 1.3}])
    return fields | {
        "pad_token_id": 0,
        "sliding_window": rng.choice([None, 5]),
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
    }


_DRAWS: dict[str, Callable[[random.Random], Fields]] = {
    "kimi_k2": _kimi,
    "glm4_moe_lite": _glm_lite,
    "deepseek_v32": _deepseek_v32,
    "deepseek_v4": _deepseek_v4,
    "deepseek_v41_text": _deepseek_v41,
    "glm_moe_dsa": _glm_moe_dsa,
    "hy_v4": _hy_v4,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "deepseek_v2": _deepseek_v2,
    "qwen2_moe": _qwen2_moe,
    "glm4_moe": _glm4_moe,
    "dots1": _dots1,
    "solar_open": _solar_open,
    "minimax_m2": _minimax_m2,
    "hy_v3": _hy_v3,
    "sarvam_mla": _kimi,
    "sarvam_moe": _sarvam_moe,
    "ministral3": _ministral3,
    "gemma4_text": _gemma4_text,
    "mistral4": _mistral4,
    "ernie4_5_moe": _ernie4_5_moe,
    "exaone_moe": _exaone_moe,
    "mellum": _mellum,
    "afmoe": _afmoe,
    "qwen3_next": _qwen3_next,
    "mimo_v2_flash": _mimo_v2_flash,
    "laguna": _laguna,
    "step3p5": _step3p5,
    "minimax_m3_vl_text": _minimax_m3,
    "kimi_linear": _kimi_linear,
    "kimi_k3": _kimi_k3,
    "glm5_next_text": _glm5_next_text,
    "nemotron_h": _nemotron_h,
    "bailing_hybrid": _bailing_hybrid,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoeshared,
    "granitemoehybrid": _granitemoehybrid,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "smollm3": _smollm3,
    "olmo3": _olmo3,
    "phi3": _phi3,
    "gemma3_text": _gemma3_text,
    "exaone4": _exaone4,
    "qwen3_5_text": _hybrid,
    "qwen3_5_moe_text": _hybrid_moe,
    "qwen4_exp_text": _qwen4_exp_text,
}
_HF_MODEL_TYPES = {"kimi_k2": "deepseek_v3"}
_REQUIRED: dict[str, Fields] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
    },
}
FAMILIES = {
    kind: Family(kind, draw, _HF_MODEL_TYPES.get(kind, kind), _REQUIRED.get(kind, {})) for kind, draw in _DRAWS.items()
}


def write_config(folder: Path, fields: Mapping[str, Any]) -> None:
    """Writes config.json."""
    (folder / "config.json").write_text(json.dumps(fields))
