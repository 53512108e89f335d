"""Small random checkpoints loaded by both nnxmoe and transformers must give equal results.

Both read the same folder, so the interpretation of config.json is compared as well as the numerics.
"""

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe.convert.conversion import convert
from nnxmoe.generation import sampling
from nnxmoe.tokenizer.tokenizer import TextStream

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.oracle

TOLERANCE = 2e-4  # for whole models in float32
CLOSE = 1e-4  # experts with scores this close may swap due to rounding
MARGIN = 1e-3  # tokens with logits this close may swap due to rounding
NEW_TOKENS = 6
DATA = Path(__file__).parents[1] / "data" / "hf"
FAMILIES = ("llama", "mistral", "mixtral", "deepseek_v3", "gpt_oss")
PER_FAMILY = 18


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint: fields of its config class, how it is stored, and how nnxmoe is to compute it."""

    family: str
    name: str
    fields: dict[str, Any]
    style: str  # of config.json: "v5", or "v4" as transformers 4 wrote it
    twist: str  # a key of TWISTS
    layout: str  # of the weights: "one" file, "shards", "fused" experts as in memory
    stored: str  # dtype on disk
    strategy: str  # a key of STRATEGIES
    length: int
    penalty: float
    correction: float  # mean of DeepSeek's correction bias
    seed: int

    @property
    def id(self) -> str:
        """pytest id of the case."""
        extra = [x for x in (self.twist, self.layout, self.stored, self.strategy) if x not in DULL]
        return "-".join([self.family, self.name, self.style, *extra, f"T{self.length}"])


DULL = ("none", "one", "float32", "auto")

STRATEGIES: dict[str, Callable[[], nnxmoe.Strategy | None]] = {
    "auto": lambda: None,
    "scan": lambda: nnxmoe.Strategy(stacking=nnxmoe.Scanned()),
    "dense": lambda: nnxmoe.Strategy(dispatch=nnxmoe.Dense()),
    "naive": lambda: nnxmoe.Strategy(mla=nnxmoe.NaiveMLA()),
    "absorbed": lambda: nnxmoe.Strategy(mla=nnxmoe.AbsorbedMLA()),
    "ragged": lambda: nnxmoe.Strategy(matmul=nnxmoe.RaggedDotMatmul()),
    "masked": lambda: nnxmoe.Strategy(matmul=nnxmoe.MaskedMatmul()),
    "capacity": lambda: nnxmoe.Strategy(dispatch=nnxmoe.Capacity(12.0)),  # room for all
    "fused": lambda: nnxmoe.Strategy(attention_fn=nnxmoe.FusedAttention()),
    "streaming": lambda: nnxmoe.Strategy(attention_fn=nnxmoe.FlashAttention(8, 8)),
    "scan.dense.absorbed": lambda: nnxmoe.Strategy(
        dispatch=nnxmoe.Dense(), mla=nnxmoe.AbsorbedMLA(), stacking=nnxmoe.Scanned()
    ),
}

# Rope: max_position_embeddings, and rope_parameters without theta. Sequences have up to 23 tokens.
LLAMA3 = {"rope_type": "llama3", "original_max_position_embeddings": 24}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (64, {"rope_type": "default"}),
    "linear": (64, {"rope_type": "linear", "factor": 3.0}),
    "dynamic.below": (64, {"rope_type": "dynamic", "factor": 4.0}),
    "dynamic.beyond": (9, {"rope_type": "dynamic", "factor": 2.5}),
    "dynamic.crossed": (15, {"rope_type": "dynamic", "factor": 4.0}),
    "llama3": (64, LLAMA3 | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    "llama3.wide": (256, LLAMA3 | {"factor": 2.0, "low_freq_factor": 0.3, "high_freq_factor": 9.0}),
    "yarn": (64, YARN),
    "yarn.mscale": (64, YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}),
    "yarn.equal": (64, YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "yarn.all_dim": (64, YARN | {"mscale_all_dim": 0.8}),
    "yarn.only_mscale": (64, YARN | {"mscale": 0.5}),
    "yarn.attention": (64, YARN | {"attention_factor": 1.4, "mscale": 0.7, "mscale_all_dim": 1.3}),
    "yarn.zeros": (64, YARN | {"mscale": 1.0, "mscale_all_dim": 0}),
    "yarn.betas": (64, YARN | {"beta_fast": 3.0, "beta_slow": 0.4}),
    "yarn.untruncated": (64, YARN | {"truncate": False, "beta_fast": 2.0, "beta_slow": 0.7}),
    "yarn.nofactor": (96, YARN | {"factor": None}),
    "yarn.tiny": (64, YARN | {"factor": 16.0, "original_max_position_embeddings": 4}),
}


class Decks:
    """Draws options without replacement, so that each occurs equally often, in random order."""

    def __init__(self, seed: str):
        self.rng = random.Random(seed)
        self.decks: dict[str, list[Any]] = {}

    def deal(self, name: str, *options: Any) -> Any:
        """Next option of a deck; ``options`` refill the deck when it is empty."""
        deck = self.decks.setdefault(name, [])
        if not deck:
            deck += self.rng.sample(options, len(options))
        return deck.pop()


def rope_of(decks: Decks) -> tuple[str, dict[str, Any]]:
    name = decks.deal("rope", *ROPES)
    positions, parameters = ROPES[name]
    theta = {"rope_theta": decks.deal("theta", 10000.0, 37.5, 1e6, 500.0)}
    return name, {"max_position_embeddings": positions, "rope_parameters": {**parameters, **theta}}


def grouped_query_fields(decks: Decks, family: str) -> tuple[str, dict[str, Any]]:
    shapes = [(32, 4, 1, None), (48, 4, 2, 16), (64, 8, 8, None), (40, 5, 1, 6), (36, 6, 3, 10), (32, 2, 1, 40)]
    if family != "llama":  # llama requires hidden_size % heads == 0 even if head_dim is given
        shapes += [(44, 3, 1, 12), (64, 16, 8, None), (32, 8, 8, 6)]
    hidden, heads, kv_heads, head_dim = decks.deal("shape", *shapes)
    fields = {
        "hidden_size": hidden,
        "intermediate_size": decks.deal("width", 24, 56, 80),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    name = f"h{heads}k{kv_heads}" + (f"d{head_dim}" if head_dim else "")
    if family == "llama":
        fields["attention_bias"], fields["mlp_bias"] = decks.deal(
            "bias", (False, False), (True, False), (False, True), (True, True)
        )
        name += "-bias" * (fields["attention_bias"] or fields["mlp_bias"])
    else:
        fields["sliding_window"] = decks.deal("window", None, 1, 2, 3, 5, 8, 13, 64, 4096)
        name += f"-w{fields['sliding_window']}"
    if family in ("mixtral", "gpt_oss"):
        experts, chosen = decks.deal("experts", (2, 1), (3, 2), (4, 4), (5, 3), (8, 1), (8, 2), (8, 8), (6, 5), (2, 2))
        fields |= {"num_local_experts": experts, "num_experts_per_tok": chosen}
        name += f"-e{experts}x{chosen}"
    if family == "gpt_oss":
        window, bias = fields["sliding_window"] or 4, decks.deal("bias", True, True, False)
        limit, alpha = decks.deal("limit", 0.5, 1.0, 2.5, 7.0), decks.deal("alpha", 1.702, 1.0, 0.3)
        fields |= {"sliding_window": window, "attention_bias": bias, "swiglu_limit": limit, "swiglu_alpha": alpha}
        fields["head_dim"] = head_dim or hidden // heads
        name += "-bias" * bias
    return name, fields


def latent_fields(decks: Decks) -> tuple[str, dict[str, Any]]:
    heads, nope, rope, values = decks.deal(
        "heads", (4, 8, 4, 8), (2, 4, 8, 20), (1, 16, 6, 5), (3, 6, 12, 6), (8, 2, 4, 3), (5, 10, 16, 16)
    )
    experts, groups, kept, chosen = decks.deal(
        "experts", (8, 1, 1, 2), (8, 2, 1, 4), (8, 4, 2, 3), (8, 4, 4, 8), (4, 2, 2, 1), (4, 1, 1, 4),
        (6, 3, 2, 4), (8, 2, 2, 1), (2, 1, 1, 1), (6, 3, 1, 2), (8, 4, 1, 2), (12, 4, 3, 5),
    )  # fmt: skip
    layers = decks.deal("layers", 2, 2, 3)
    fields = {
        "hidden_size": decks.deal("hidden", 32, 40, 64),
        "intermediate_size": decks.deal("width", 24, 56, 80),
        "moe_intermediate_size": decks.deal("expert width", 12, 20, 32),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": decks.deal("q rank", None, 6, 12, 24),  # rank 1 makes the norm ill-conditioned in both
        "kv_lora_rank": decks.deal("kv rank", 8, 17, 24),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": values,
        "rope_interleave": decks.deal("interleave", True, False, True),
        "attention_bias": decks.deal("bias", True, False),
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": chosen,
        "n_shared_experts": decks.deal("shared", 1, 2, 3),
        "norm_topk_prob": decks.deal("norm", True, False),
        "routed_scaling_factor": decks.deal("scale", 1.0, 2.5, 0.37),
        "first_k_dense_replace": decks.deal("dense", 0, 1, 0, layers, 7),
    }
    name = f"h{heads}n{nope}r{rope}v{values}-q{fields['q_lora_rank']}-e{experts}g{groups}.{kept}x{chosen}"
    return f"{name}-k{fields['first_k_dense_replace']}", fields


def make_case(decks: Decks, family: str, number: int) -> Case:
    shape, fields = latent_fields(decks) if family == "deepseek_v3" else grouped_query_fields(decks, family)
    rope, rope_fields = rope_of(decks)
    fields = {"num_hidden_layers": decks.deal("layers", 2, 2, 3), **fields, **rope_fields}
    if family == "mixtral" and rope.startswith(("yarn", "dynamic")):  # transformers requires head_dim here
        fields["head_dim"] = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]
    fields |= {
        "vocab_size": decks.deal("vocab", 64, 97, 128),
        "rms_norm_eps": decks.deal("eps", 1e-6, 1e-5, 1e-3, 0.1),
        "tie_word_embeddings": decks.deal("tied", False, True),
        "bos_token_id": 1,
        "eos_token_id": decks.deal("eos", 2, [2, 5], None),
    }
    plain = ("auto", "scan", "auto", "streaming" if family == "gpt_oss" else "fused")
    latent = ("auto", "scan", "dense", "naive", "absorbed", "ragged", "masked", "capacity", "scan.dense.absorbed")
    if family in ("mixtral", "deepseek_v3", "gpt_oss"):
        strategy = decks.deal(
            "strategy", *(latent if family == "deepseek_v3" else (*plain, "dense", "masked", "capacity"))
        )
    else:
        strategy = decks.deal("strategy", *plain)
    layouts = ("one", "shards", "fused") if family in ("mixtral", "deepseek_v3") else ("one", "shards")
    return Case(
        family=family,
        name=f"{number:02}-{shape}-{rope}" + "-tied" * fields["tie_word_embeddings"],
        fields=fields,
        style=decks.deal("style", "v5", "v4"),
        twist=decks.deal("twist", "none", "none", *(twist for twist in TWISTS if twist != "none")),
        layout=decks.deal("layout", *layouts),
        stored=decks.deal("stored", "float32", "float32", "bfloat16", "float16"),
        strategy=strategy,
        length=decks.deal("length", 7, 11, 13, 17, 23),
        penalty=decks.deal("penalty", 1.0, 1.0, 1.0, 1.0, 1.4, 0.8),
        correction=decks.deal("correction", 0.0, -3.0, 0.5),
        seed=decks.rng.randrange(1 << 30),
    )


def spoil_theta(config: dict[str, Any], rope: dict[str, Any]) -> None:
    config["rope_theta"] = 7.0 * rope.setdefault("rope_theta", 1234.0)


def lift_theta(config: dict[str, Any], rope: dict[str, Any]) -> None:
    config["rope_theta"] = rope.pop("rope_theta", config.get("rope_theta", 4321.0))


def lift_original(config: dict[str, Any], rope: dict[str, Any]) -> None:
    config["original_max_position_embeddings"] = 20


def drop_original(config: dict[str, Any], rope: dict[str, Any]) -> None:
    rope.pop("original_max_position_embeddings", None)


def spoil_type(config: dict[str, Any], rope: dict[str, Any]) -> None:
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    rope["type"] = "linear"


def old_type(config: dict[str, Any], rope: dict[str, Any]) -> None:
    rope["type"] = rope.pop("rope_type", rope.get("type", "default"))


def integers(config: dict[str, Any], rope: dict[str, Any]) -> None:
    rope |= {k: int(v) for k, v in rope.items() if isinstance(v, float) and v == int(v)}
    if "rope_theta" in config:
        config["rope_theta"] = int(config["rope_theta"])


def nulls(config: dict[str, Any], rope: dict[str, Any]) -> None:
    if config["model_type"] == "llama" and config.get("num_key_value_heads") == config.get("num_attention_heads"):
        config["num_key_value_heads"] = None
    config |= {"pad_token_id": None, "quantization_config": None}
    config.setdefault("rope_scaling", {})


def two_ropes(config: dict[str, Any], rope: dict[str, Any]) -> None:
    config["rope_scaling"] = dict(rope)
    config["rope_parameters"] = {"rope_type": "linear", "factor": 5.0, "rope_theta": 77.0}


# Variants of config.json in the wild: duplicate fields, other locations, or omitted defaults.
TWISTS: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "none": lambda config, rope: None,
    "theta.twice": spoil_theta,
    "theta.on.top": lift_theta,
    "original.on.top": lift_original,
    "original.absent": drop_original,
    "type.twice": spoil_type,
    "type.old": old_type,
    "rope.twice": two_ropes,
    "integers": integers,
    "nulls": nulls,
}


def all_cases() -> list[Case]:
    found = []
    for family in FAMILIES:
        decks = Decks(family)
        found += [make_case(decks, family, number) for number in range(PER_FAMILY)]
    return found


CASES = all_cases()


# Creating checkpoints


def randomise(model: Any, case: Case) -> None:
    """Randomise every parameter: non-zero biases, norms far from 1, logits of a few units."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(like: Any, scale: float) -> Any:
        return torch.randn(like.shape, generator=generator) * scale

    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.copy_((0.4 + 1.2 * torch.rand(value.shape, generator=generator)) * normal(value, 1).sign())
            elif name.endswith("bias"):
                value.copy_(normal(value, 0.6))
            elif name.endswith("sinks"):
                value.copy_(normal(value, 2.0))
            else:
                value.copy_(normal(value, 1.0 if "embed" in name else 1.3 * max(1, value.shape[-1]) ** -0.5))
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(normal(value, 0.3) + case.correction)


def rewrite_as_v4(config: dict[str, Any], defaults: dict[str, Any], drop_head_dim: bool) -> dict[str, Any]:
    """config.json as written by transformers 4: old field names, and defaults omitted."""
    config = {k: v for k, v in config.items() if k in ("model_type", "architectures") or v != defaults.get(k, ...)}
    config.pop("transformers_version", None)
    config["torch_dtype"] = config.pop("dtype")
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    key = "rope_type" if kind == "llama3" else "type"
    config["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    if config["model_type"] == "deepseek_v3":
        for name in ("head_dim", "qk_head_dim", "rope_interleave"):
            if config.get(name) is not False:
                config.pop(name, None)
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1, "moe_layer_freq": 1}
    elif config["model_type"] not in ("mixtral", "gpt_oss") and config["head_dim"] == config[
        "hidden_size"
    ] / config.get("num_attention_heads", 32):
        config["head_dim"] = None
        if drop_head_dim:
            del config["head_dim"]
    return config


def write_checkpoint(case: Case, folder: Path) -> None:
    kind = transformers.CONFIG_MAPPING[case.family]
    config = kind(**json.loads(json.dumps(case.fields)))
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model, case)
    model.to(getattr(torch, case.stored))
    model.save_pretrained(
        folder,
        max_shard_size="20KB" if case.layout == "shards" else "1GB",
        save_original_format=case.layout != "fused",
    )
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    if case.style == "v4":
        fields = rewrite_as_v4(fields, kind().to_dict(), drop_head_dim=case.seed % 2 == 0)
    rope = fields.get("rope_scaling") or fields.get("rope_parameters")
    if rope is not None:
        TWISTS[case.twist](fields, rope)
    path.write_text(json.dumps(fields))
    assert (folder / "model.safetensors.index.json").exists() == (case.layout == "shards")


def load_reference(folder: Path) -> Any:
    """Load a folder with transformers in float32; asserts no missing or unexpected tensors."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


# Running both models


@dataclasses.dataclass(frozen=True)
class Seen:
    """Outputs of a forward pass; routing per layer as dense weights and sets of experts."""

    logits: np.ndarray
    hidden: list[np.ndarray]
    weights: dict[int, np.ndarray]
    experts: dict[int, np.ndarray]
    settled: np.ndarray  # [B, T]: False from the first near-tie between experts onwards


@dataclasses.dataclass(frozen=True)
class Batch:
    """Token ids, mask and optional positions, all ``[B, T]``."""

    tokens: np.ndarray
    mask: np.ndarray
    positions: np.ndarray | None = None


def batches(case: Case) -> dict[str, Batch]:
    """Two rows: unpadded, left-padded, right-padded, and for some seeds with gaps in the positions."""
    rng = np.random.default_rng(case.seed)
    tokens = rng.integers(0, case.fields["vocab_size"], (2, case.length))
    full = np.ones((2, case.length), np.int64)
    left, right = full.copy(), full.copy()
    left[0, : case.length // 2] = 0
    right[1, case.length - 4 :] = 0
    found = {"unpadded": Batch(tokens, full), "left": Batch(tokens, left), "right": Batch(tokens, right)}
    if case.seed % 3:
        return found
    plain = np.broadcast_to(np.arange(case.length), tokens.shape)
    gaps = Batch(tokens, full, np.cumsum(rng.integers(1, 4, tokens.shape), axis=1))
    return {name: dataclasses.replace(batch, positions=plain) for name, batch in found.items()} | {"gaps": gaps}


def reset_rope(model: Any) -> None:
    """Undo that transformers' dynamic rope caches the longest sequence seen."""
    rope = model.model.rotary_emb
    rope.max_seq_len_cached = rope.original_max_seq_len
    rope.inv_freq = rope.original_inv_freq.clone()


def routing_gaps(gate: Any, logits: Any, config: Any) -> np.ndarray:
    """Score margin by which each token's choice of experts was made."""
    if config.model_type in ("mixtral", "gpt_oss"):
        return gap_after(logits, gate.top_k)
    choice = logits.sigmoid() + gate.e_score_correction_bias
    groups = choice.view(len(choice), gate.num_group, -1)
    scores = groups.topk(2, dim=-1)[0].sum(-1)
    best = scores.topk(gate.topk_group, dim=-1)[1]
    kept = torch.zeros_like(scores).scatter_(1, best, 1)[:, :, None].expand_as(groups).reshape(choice.shape)
    inside = gap_after(choice.masked_fill(kept == 0, -1e9), gate.top_k)
    return np.minimum(gap_after(scores, gate.topk_group), inside)


def gap_after(scores: Any, count: int) -> np.ndarray:
    ordered = scores.sort(dim=-1, descending=True)[0].numpy()
    if count == ordered.shape[-1]:
        return np.full(len(ordered), np.inf)
    return ordered[:, count - 1] - ordered[:, count]


def run_reference(model: Any, batch: Batch) -> Seen:
    reset_rope(model)
    shape = batch.tokens.shape
    routed: dict[int, tuple[Any, ...]] = {}

    def listen(layer: int) -> Any:
        return lambda gate, inputs, output: routed.__setitem__(layer, (gate, *output))

    routers = [getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None)) for layer in model.model.layers]
    hooks = [router.register_forward_hook(listen(i)) for i, router in enumerate(routers) if router is not None]
    positions = None if batch.positions is None else torch.tensor(batch.positions)
    with torch.no_grad():
        out = model(
            torch.tensor(batch.tokens),
            attention_mask=torch.tensor(batch.mask),
            position_ids=positions,
            output_hidden_states=True,
        )
    for hook in hooks:
        hook.remove()
    weights, experts, unclear = {}, {}, np.zeros(shape, bool)
    for layer, (gate, logits, values, indices) in routed.items():
        experts[layer] = np.sort(indices.numpy(), axis=-1).reshape(*shape, -1)
        weights[layer] = torch.zeros_like(logits).scatter_(1, indices, values).numpy().reshape(*shape, -1)
        close = routing_gaps(gate, logits, model.config) < CLOSE
        unclear |= close.reshape(shape) & (batch.mask != 0)
    settled = ~np.logical_or.accumulate(unclear, axis=1)
    hidden = [state.numpy() for state in out.hidden_states]
    return Seen(out.logits.numpy(), hidden, weights, experts, settled)


def compiled(model: nnxmoe.CausalLM) -> Callable[[Batch], Seen]:
    """Jitted forward pass of our model."""
    graph, state = nnx.split(model)

    @jax.jit
    def forward(state: Any, tokens: Any, mask: Any, positions: Any) -> nnxmoe.Output:
        return nnx.merge(graph, state)(tokens, mask, positions, return_routing=True, return_hidden=True)

    def run(batch: Batch) -> Seen:
        out = forward(state, batch.tokens, batch.mask, batch.positions)
        assert out.logits.dtype == jnp.float32 and out.hidden is not None and out.routing is not None
        weights, experts = {}, {}
        for layer, routing in out.routing.items():
            chosen = np.asarray(routing.experts)
            experts[layer] = np.sort(chosen, axis=-1)
            dense = np.zeros(routing.scores.shape, np.float32)
            np.put_along_axis(dense, chosen, np.asarray(routing.weights), axis=-1)
            weights[layer] = dense
        *states, last, normed = (np.asarray(h) for h in out.hidden)
        assert len(states) == model.config.num_hidden_layers and last.shape == normed.shape
        return Seen(np.asarray(out.logits), [*states, normed], weights, experts, np.ones(batch.mask.shape, bool))

    return run


def compare(ours: Seen, theirs: Seen, batch: Batch, where: str) -> float:
    """Assert equal outputs at real tokens and return the largest error of the logits."""
    real = (batch.mask != 0) & theirs.settled
    assert real.sum() >= 0.5 * batch.mask.sum(), f"{where}: experts are too close to call, choose another seed"
    assert ours.experts.keys() == theirs.experts.keys(), where
    assert len(ours.hidden) == len(theirs.hidden), where
    for layer, experts in theirs.experts.items():
        np.testing.assert_array_equal(ours.experts[layer][real], experts[real], err_msg=f"{where}: experts {layer}")
        error = np.abs(ours.weights[layer] - theirs.weights[layer])[real].max()
        assert error < 5e-5, f"{where}: weights of layer {layer} differ by {error}"
    for i, (a, b) in enumerate(zip(ours.hidden, theirs.hidden, strict=True)):
        error = np.abs(a - b)[real].max()
        assert error < TOLERANCE, f"{where}: hidden state {i} differs by {error}"
    error = np.abs(ours.logits - theirs.logits)[real].max()
    assert error < TOLERANCE, f"{where}: logits differ by {error}"
    return float(error)


def compare_written(before: Any, after: Any, batch: Batch) -> None:
    """Assert that two transformers models have equal tensors and logits within TOLERANCE / 4."""
    old, new = before.state_dict(), after.state_dict()
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        assert torch.equal(tensor, new[name]), name
    one, other = run_reference(before, batch), run_reference(after, batch)
    assert np.abs(one.logits - other.logits)[one.settled].max() < TOLERANCE / 4


# Generation


def reference_tokens(model: Any, batch: Batch, penalty: float, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens of transformers, and the logit margin of each new token."""
    reset_rope(model)
    if getattr(model.config, "sliding_window", None) == 1:
        options["use_cache"] = False  # its cache keeps keys[-window + 1 :], which is all of them for a window of 1
    with torch.no_grad():
        out = model.generate(
            torch.tensor(batch.tokens),
            attention_mask=torch.tensor(batch.mask),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            repetition_penalty=penalty,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    best = torch.stack(out.scores, dim=1).topk(2, dim=-1)[0].numpy()
    return out.sequences.numpy(), best[..., 0] - best[..., 1]


def compare_generation(model: nnxmoe.CausalLM, reference: Any, case: Case) -> None:
    found = batches(case)
    knobs = None if case.penalty == 1 else nnxmoe.Sampling(temperature=0.0, repetition_penalty=case.penalty)
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = 3
    for name in ("unpadded", "left"):
        batch = found[name]
        theirs, margins = reference_tokens(reference, batch, case.penalty)
        ours = nnxmoe.generate(model, batch.tokens, batch.mask, NEW_TOKENS, knobs, eos_token_id=None)
        assert ours.shape == theirs.shape
        clear = np.logical_and.accumulate(margins > MARGIN, axis=1)
        assert clear[:, 0].any(), f"{name}: too close to call, choose another seed"
        new, expected = ours[:, case.length :], theirs[:, case.length :]
        np.testing.assert_array_equal(ours[:, : case.length], batch.tokens)
        np.testing.assert_array_equal(new[clear], expected[clear], err_msg=f"{name}: {new} {expected}")
        if clear.all() and name == "left":
            compare_ends(model, reference, case, batch, theirs, knobs)


def compare_ends(
    model: nnxmoe.CausalLM, reference: Any, case: Case, batch: Batch, tokens: np.ndarray, knobs: Any
) -> None:
    """Assert that finished rows are padded, and that right padding gives the same tokens as left padding."""
    ends = [int(tokens[0, case.length + 2]), int(tokens[1, case.length + 3])]
    pad = model.generation_config.get("pad_token_id", model.config.pad_token_id)
    reference.generation_config.eos_token_id = ends
    reference.generation_config.pad_token_id = ends[0] if pad is None else pad
    theirs, _ = reference_tokens(reference, batch, case.penalty)
    ours = nnxmoe.generate(model, batch.tokens, batch.mask, NEW_TOKENS, knobs, eos_token_id=ends)
    np.testing.assert_array_equal(ours, theirs, err_msg="ends of sequences")
    reference.generation_config.eos_token_id = None
    order = np.argsort(-batch.mask, axis=1, kind="stable")
    flipped = [np.take_along_axis(a, order, axis=1) for a in (batch.tokens, batch.mask)]
    ours = nnxmoe.generate(model, *flipped, NEW_TOKENS, knobs, eos_token_id=None)
    np.testing.assert_array_equal(ours[:, case.length :], tokens[:, case.length :], err_msg="padded on the right")


# Tests


@pytest.fixture(autouse=True)
def quiet() -> None:
    """One thread, no progress bars, no warnings about odd configs."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.filterwarnings("ignore")
def test_checkpoints_match_transformers(
    case: Case, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Compares logits, hidden states, routing and greedy tokens, and the logits after saving."""
    folder = tmp_path / "model"
    write_checkpoint(case, folder)
    reference = load_reference(folder)
    model = nnxmoe.from_pretrained(folder, dtype=jnp.float32, strategy=STRATEGIES[case.strategy]())
    assert not model.load_report.missing and not model.load_report.unexpected
    forward = compiled(model)
    for name, batch in batches(case).items():
        error = compare(forward(batch), run_reference(reference, batch), batch, f"{case.id} {name}")
        record_property(f"logits error, {name}", error)
    nnxmoe.save_pretrained(model, tmp_path / "again", max_shard_size="30KB" if case.seed % 3 == 0 else "5GB")
    compare_written(reference, load_reference(tmp_path / "again"), batches(case)["left"])
    compare_generation(model, reference, case)


@pytest.mark.parametrize("family", FAMILIES)
def test_cases_cover_every_option(family: str) -> None:
    """Every rope, twist, style, layout, dtype and enough strategies occur per family."""
    cases = [case for case in CASES if case.family == family]
    ropes = {name for case in cases for name in ROPES if f"-{name}-" in f"{case.name}-"}
    assert ropes == set(ROPES)
    assert {case.twist for case in cases} == set(TWISTS)
    assert {case.style for case in cases} == {"v4", "v5"}
    assert {case.stored for case in cases} == {"float32", "bfloat16", "float16"}
    assert {case.fields["tie_word_embeddings"] for case in cases} == {False, True}
    moe = family in ("mixtral", "deepseek_v3")
    assert {case.layout for case in cases} == {"one", "shards", "fused"} - (set() if moe else {"fused"})
    assert len({case.strategy for case in cases}) >= (6 if moe else 3)


# Duplicate and unexpected tensors, and dtypes


def plain_case(family: str, **changes: Any) -> Case:
    """A case without twists."""
    found = next(case for case in CASES if case.family == family and case.seed % 2)
    fields = found.fields | {"tie_word_embeddings": False} | changes
    plain = {"style": "v5", "twist": "none", "layout": "one", "stored": "float32", "strategy": "auto"}
    return dataclasses.replace(found, fields=fields, **plain)


def edit_tensors(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    edit(tensors)
    safetensors_torch.save_file(
        {k: v.contiguous().clone() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def compare_folder(folder: Path, case: Case, reference: Any = None) -> nnxmoe.CausalLM:
    reference = reference or load_reference(folder)
    model = nnxmoe.from_pretrained(folder, dtype="float32")
    batch = batches(case)["left"]
    compare(compiled(model)(batch), run_reference(reference, batch), batch, f"{case.id} {folder.name}")
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", ["equal", "different", "only"])
@pytest.mark.filterwarnings("ignore")
def test_tied_head_stored_in_the_checkpoint(family: str, head: str, tmp_path: Path) -> None:
    """A stored head that differs from the embedding overrides tie_word_embeddings."""
    case = plain_case(family, tie_word_embeddings=True)
    write_checkpoint(case, tmp_path)

    def edit(tensors: dict[str, Any]) -> None:
        table = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = table.flip(0) if head == "different" else table
        if head == "only":
            del tensors["model.embed_tokens.weight"]

    edit_tensors(tmp_path, edit)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    model = compare_folder(tmp_path, case, reference)
    assert model.config.tie_word_embeddings == (head != "different")


@pytest.mark.filterwarnings("ignore")
def test_shared_expert_of_width_0(tmp_path: Path) -> None:
    """transformers writes empty tensors for it, which are reported as unexpected."""
    case = plain_case("deepseek_v3", n_shared_experts=0, first_k_dense_replace=0)
    write_checkpoint(case, tmp_path)
    model = compare_folder(tmp_path, case)
    assert all("shared_experts" in name for name in model.load_report.unexpected)


@pytest.mark.filterwarnings("ignore")
def test_multi_token_prediction_layers_are_skipped(tmp_path: Path) -> None:
    """They are stored after the last decoder layer and do not affect the logits."""
    case = plain_case("deepseek_v3", first_k_dense_replace=1, num_nextn_predict_layers=1)
    write_checkpoint(case, tmp_path)
    reference = load_reference(tmp_path)
    depth = case.fields["num_hidden_layers"]

    def edit(tensors: dict[str, Any]) -> None:
        last = {k: v for k, v in tensors.items() if f".layers.{depth - 1}." in k}
        tensors |= {k.replace(f".{depth - 1}.", f".{depth}.", 1): -v for k, v in last.items()}
        tensors[f"model.layers.{depth}.enorm.weight"] = tensors["model.norm.weight"]

    edit_tensors(tmp_path, edit)
    model = compare_folder(tmp_path, case, reference)
    assert not model.load_report.unexpected
    assert any(model.load_report.skipped.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_stored_dtype_is_kept(family: str, tmp_path: Path) -> None:
    """Without ``dtype`` parameters keep the stored dtype and are saved bitwise equal."""
    case = dataclasses.replace(plain_case(family), stored="bfloat16")
    write_checkpoint(case, tmp_path / "model")
    model = nnxmoe.from_pretrained(tmp_path / "model")
    nnxmoe.save_pretrained(model, tmp_path / "again")
    ours, theirs = (safetensors_torch.load_file(tmp_path / x / "model.safetensors") for x in ("again", "model"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        expected = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert ours[name].dtype == expected, name
        assert torch.equal(ours[name].float(), tensor.float()), name


ROUND_TRIPS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama tied": {"tie_word_embeddings": True},
    "mistral": {},
    "mixtral": {},
    "deepseek_v3": {"attention_bias": True},
}


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ROUND_TRIPS)
@pytest.mark.filterwarnings("ignore")
def test_round_trip_through_maxtext_and_native_format(kind: str, stored: str, tmp_path: Path) -> None:
    """transformers loads the result with equal logits, and the tokenizer files are kept."""
    case = dataclasses.replace(plain_case(kind.split()[0], **ROUND_TRIPS[kind]), stored=stored)
    write_checkpoint(case, tmp_path / "hf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "mixtral_basic" / "model" / name, tmp_path / "hf")
    steps = [
        ("hf", "maxtext", "maxtext", "float32"),
        ("maxtext", "orbax", "orbax", None),
        ("orbax", "back", "hf", stored),
    ]
    for i, (source, target, to, dtype) in enumerate(steps):
        convert(str(tmp_path / source), str(tmp_path / target), to, scan=i == 0, dtype=dtype, verify=True)
    theirs, back = (safetensors_torch.load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert back.keys() == theirs.keys()
    for name, tensor in theirs.items():
        expected = torch.float32 if name.endswith("e_score_correction_bias") else getattr(torch, stored)
        assert back[name].dtype == expected, name
        bound = 2**-22 if stored == "float32" and "q_proj" in name else 0.0  # divided and multiplied by sqrt(head_dim)
        torch.testing.assert_close(back[name], tensor.to(expected), rtol=bound, atol=0.0)
    batch = batches(case)["left"]
    before, after = (run_reference(load_reference(tmp_path / name), batch) for name in ("hf", "back"))
    assert np.abs(before.logits - after.logits)[before.settled].max() < TOLERANCE / 4
    compare_folder(tmp_path / "back", case)
    tokenizers = [transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("hf", "back")]
    assert tokenizers[0]("The quick")["input_ids"] == tokenizers[1]("The quick")["input_ids"]


@pytest.mark.parametrize("strategy", ["auto", "scan"])
@pytest.mark.parametrize("family", ["mistral", "deepseek_v3"])
@pytest.mark.filterwarnings("ignore")
def test_chunked_decoding_equals_one_pass(family: str, strategy: str, tmp_path: Path) -> None:
    """Chunks are longer and shorter than the sliding window."""
    rope = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    window = {"sliding_window": 4} if family == "mistral" else {}
    case = dataclasses.replace(plain_case(family, num_hidden_layers=2, **rope, **window), length=20)
    write_checkpoint(case, tmp_path)
    model = nnxmoe.from_pretrained(tmp_path, dtype="float32", strategy=STRATEGIES[strategy]())
    batch = batches(dataclasses.replace(case, seed=1))["left"]
    expected = run_reference(load_reference(tmp_path), batch)
    step = nnx.jit(lambda model, tokens, mask, cache: model(tokens, mask, cache=cache))
    cache, start, found = model.empty_cache(2, case.length), 0, []
    for count in (7, 1, 1, 7, 4):
        part = slice(start, start + count)
        out = step(model, batch.tokens[:, part], batch.mask[:, part], cache)
        cache, start = out.cache, part.stop
        found.append(np.asarray(out.logits))
    real = (batch.mask != 0) & expected.settled
    assert start == case.length and real.sum() > 20
    assert np.abs(np.concatenate(found, axis=1) - expected.logits)[real].max() < TOLERANCE


# Sampling

KNOBS = {
    "temperature": (1.0, 0.3, 0.7, 1.9),
    "top_k": (None, 0, 1, 2, 7, 40, 500),
    "top_p": (1.0, 0.05, 0.5, 0.9, 0.999),
    "min_p": (0.0, 0.02, 0.3, 1.0),
    "repetition_penalty": (1.0, 1.0, 0.7, 1.3, 2.5),
}


def random_knobs(seed: int) -> nnxmoe.Sampling:
    rng = random.Random(seed)
    return nnxmoe.Sampling(**{name: rng.choice(options) for name, options in KNOBS.items()})  # pyright: ignore


def random_logits(seed: int, ties: bool) -> tuple[np.ndarray, np.ndarray]:
    """Logits ``[B, V]`` from flat to sharp, rounded to 0.5 if ``ties``, and a prompt ``[B, T]``."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, np.array([[0.2], [2.0], [9.0]]), (3, 60)).astype(np.float32)
    return np.round(logits * 2) / 2 if ties else logits, rng.integers(0, 60, (3, 9))


def their_logits(knobs: nnxmoe.Sampling, logits: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """Logits after transformers' processors in the order of ``generate``; -inf for removed tokens."""
    found = [transformers.RepetitionPenaltyLogitsProcessor(knobs.repetition_penalty)]
    found.append(transformers.TemperatureLogitsWarper(knobs.temperature))
    if knobs.top_k:
        found.append(transformers.TopKLogitsWarper(knobs.top_k))
    if knobs.top_p < 1:
        found.append(transformers.TopPLogitsWarper(knobs.top_p))
    found.append(transformers.MinPLogitsWarper(knobs.min_p))
    processors = transformers.LogitsProcessorList(found)
    return processors(torch.tensor(prompt), torch.tensor(logits)).numpy()


def our_logits(knobs: nnxmoe.Sampling, logits: np.ndarray, prompt: np.ndarray) -> np.ndarray:
    """Logits that `sample_ids` draws from."""
    steps, values, _ = of_rows(*sampling.split_sampling(knobs, logits.shape[-1]), len(logits))
    seen = np.zeros(logits.shape, bool)
    np.put_along_axis(seen, prompt, True, axis=1)
    punished = sampling._apply_penalties(jnp.asarray(logits), jnp.asarray(seen), None, steps, values)
    return np.asarray(sampling._scale_and_filter(punished, steps, values))


def of_rows(steps: Any, knobs: Any, rows: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """The same options for every row, and a key for each."""
    each = jax.tree.map(lambda knob: jnp.full(rows, knob), knobs)
    return steps, each, jax.random.split(jax.random.key(seed), rows)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def test_sampling_distribution() -> None:
    """Allowed tokens and their probabilities are equal for random sampling arguments."""
    for seed in range(300):
        knobs, (logits, prompt) = random_knobs(seed), random_logits(seed, ties=False)
        theirs = their_logits(knobs, logits, prompt)
        ours = our_logits(knobs, logits, prompt)
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs), err_msg=f"{knobs}, seed {seed}")
        np.testing.assert_allclose(softmax(ours), softmax(theirs), rtol=1e-4, err_msg=f"{knobs}, seed {seed}")


def test_sampling_with_ties() -> None:
    """Tied tokens are kept or removed together, except that transformers' top-p may cut among ties by sort order."""
    for seed in range(150):
        knobs, (logits, prompt) = random_knobs(seed), random_logits(seed, ties=True)
        theirs = their_logits(knobs, logits, prompt)
        ours = our_logits(knobs, logits, prompt)
        for row in range(len(logits)):
            allowed = [np.unique(np.round(x[row][np.isfinite(x[row])], 3)) for x in (ours, theirs)]
            np.testing.assert_array_equal(*allowed, err_msg=f"{knobs}, seed {seed}, row {row}")
        if knobs.top_p == 1:
            np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs), err_msg=f"{knobs}, seed {seed}")


def test_sampling_frequencies() -> None:
    """Frequencies of drawn tokens match the expected probabilities."""
    rows = 20000
    draw = jax.jit(sampling.sample_ids, static_argnums=2)
    for seed in range(0, 40, 4):
        knobs, (logits, prompt) = random_knobs(seed), random_logits(seed, ties=False)
        expected = softmax(their_logits(knobs, logits, prompt)[1])
        steps, values = sampling.split_sampling(knobs, logits.shape[-1])
        seen = np.zeros(logits.shape, bool)
        np.put_along_axis(seen, prompt, True, axis=1)
        many = [jnp.broadcast_to(jnp.asarray(a[1]), (rows, logits.shape[1])) for a in (logits, seen)]
        often = np.bincount(np.asarray(draw(*many, *of_rows(steps, values, rows, seed))), minlength=60) / rows
        assert (np.abs(often - expected) <= 6 * np.sqrt(expected / rows)).all(), f"{knobs}, seed {seed}"


# Text

TEXTS = (
    "",
    " ",
    "Hello world",
    "a\n\n b\t<|end|>",
    "naïve — 你好 🦊🏽",
    "<|bos|><|user|>hi<|unknown|>",
    "1234567 x=y+2;",
    "\x00\u200d",
)
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": " Hi there \n"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
    [{"role": "user", "content": "<|end|>"}, {"role": "assistant", "content": "é\n"}, {"role": "user", "content": ""}],
)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in DATA.glob("*/case.json")))
def test_tokenizer_equals_auto_tokenizer(name: str) -> None:
    """Compares ids, decoded texts and rendered chats."""
    folder = DATA / name / "model"
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = nnxmoe.Tokenizer.from_pretrained(folder)
    for field in ("bos_token", "eos_token", "pad_token", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours, field) == getattr(theirs, field), field
    rng = random.Random(name)
    alphabet = "abc de\n\t é你🦊<|>12.,'\"\\" + "".join(map(chr, range(0x300, 0x310)))
    for text in (*TEXTS, *("".join(rng.choices(alphabet, k=30)) for _ in range(100))):
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, add_special_tokens=special) == ids, text
        assert ours.decode(ids) == theirs.decode(ids), text
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True), text
    for _ in range(100):
        ids = rng.choices(range(len(theirs)), k=12)
        assert ours.decode(ids) == theirs.decode(ids), ids
    for chat in CHATS:
        for prompt in (False, True):
            rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            assert ours.apply_chat_template(chat, add_generation_prompt=prompt) == rendered
            ids = theirs.apply_chat_template(chat, add_generation_prompt=prompt)["input_ids"]
            assert ours.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=True) == ids
        rendered = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
        assert ours.apply_chat_template(chat, continue_final_message=True) == rendered


def test_streaming_accepts_their_tokenizers() -> None:
    """The pieces equal those of our tokenizer."""
    for folder in (path.parent / "model" for path in sorted(DATA.glob("*/case.json"))):
        tokenizers = nnxmoe.Tokenizer.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)
        ids = random.Random(folder.parent.name).choices(range(len(tokenizers[1])), k=200)
        for skip in (True, False):
            streams = [TextStream(tokenizer, skip, context=ids[:20]) for tokenizer in tokenizers]
            pieces = [[stream.put(i) for i in ids[20:]] + [stream.end()] for stream in streams]
            assert pieces[0] == pieces[1]
    model = nnxmoe.from_pretrained(folder)
    ours, theirs = (list(nnxmoe.stream(model, t, "naïve — 你好 🦊🏽", max_new_tokens=9)) for t in tokenizers)
    assert ours == theirs and ours
