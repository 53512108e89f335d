"""Tiny checkpoints with layers for multi-token prediction, and the logits of every depth.

``tests/data/mtp`` holds the outputs of transformers' ``MtpModel`` for `CASES`, as `tests.support.families` does for
models: configs, names and shapes, and logits. ``python -m tests.support.freeze_mtp`` writes it.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

import nnxmoe
from nnxmoe.models import model_class
from tests.support.families import FAMILIES, Frozen, constants_of, weights_of
from tests.support.tiny import TINY, Fields, Weights, tiny_weights

FOLDER = Path(__file__).parents[1] / "data" / "mtp"
# Family -> number of depths.
CASES = {"kimi_k2": 1, "glm4_moe": 2, "qwen3_next": 1, "glm_moe_dsa": 1, "deepseek_v4": 1, "qwen4_exp_text": 1}
# Families whose published files have these tensors apart from the layers -> the names of those of no layer.
APART = {
    "qwen3_next": {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "shared_head.norm": "norm",
    }
}
STREAMED = "deepseek_v4", "qwen4_exp_text"  # stored under names of their own, without copies
OWN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")  # the tensors that other layers do not have


def fields_of(kind: str, depths: int) -> Fields:
    """The frozen config of a family, with prediction layers. Kimi K2 is DeepSeek-V3 under another name."""
    more = {"full_attention_interval": 2} if kind == "qwen3_next" else {}  # the last layer has attention
    name = "mtp_num_hidden_layers" if kind == "qwen4_exp_text" else "num_nextn_predict_layers"
    return FAMILIES[kind].frozen | {name: depths} | more


def shapes_of(fields: Fields, main: dict[str, list[int]]) -> dict[str, list[int]]:
    """Names and shapes of the prediction layers, for those of the model without them."""
    last, dim, found = fields["num_hidden_layers"] - 1, fields["hidden_size"], dict[str, list[int]]()
    like = max((i for i, kind in enumerate(fields.get("indexer_types", ())) if kind == "full"), default=last)
    for k in range(fields["num_nextn_predict_layers"]):
        layer = f"model.layers.{last + 1 + k}."
        found |= {n.replace(f"model.layers.{like}.", layer): s for n, s in main.items() if f".layers.{like}." in n}
        found |= {f"{layer}{name}.weight": [dim, 2 * dim] if name == "eh_proj" else [dim] for name in OWN}
    return found


def published(fields: Fields, weights: Weights) -> Weights:
    """The tensors, under the names of published files and with the copies of embedding and head that most have."""
    if (apart := APART.get(fields["model_type"])) is not None:
        first = f"model.layers.{fields['num_hidden_layers']}."
        own = {f"{first}{old}.weight": f"mtp.{new}.weight" for old, new in apart.items()}
        return {own.get(name, name.replace(first, "mtp.layers.0.")): array for name, array in weights.items()}
    found = dict(weights)
    if fields["model_type"] in STREAMED:
        return found
    for k in range(fields["num_nextn_predict_layers"]):
        layer = f"model.layers.{fields['num_hidden_layers'] + k}."
        found[layer + "embed_tokens.weight"] = weights["model.embed_tokens.weight"]
        found[layer + "shared_head.head.weight"] = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return found


def tiny_mtp(depths: int, seed: int = 0, **changes: Any) -> tuple[Fields, Weights]:
    """DeepSeek's tiny config and tensors, with prediction layers."""
    fields = TINY["deepseek_v3"] | {"num_nextn_predict_layers": depths} | changes
    layers = fields["num_hidden_layers"]
    weights = tiny_weights(fields | {"num_hidden_layers": layers + depths}, seed)
    rng, dim = np.random.default_rng(seed + 1), fields["hidden_size"]
    for k in range(depths):
        for name in OWN:
            wide = name == "eh_proj"
            value = rng.standard_normal((dim, 2 * dim)) / 7 if wide else 1 + 0.3 * rng.standard_normal(dim)
            weights[f"model.layers.{layers + k}.{name}.weight"] = value.astype(np.float32)
    return fields, weights


@functools.cache
def with_mtp() -> nnxmoe.CausalLM:
    """A small DeepSeek-V3 with a layer for multi-token prediction."""
    fields = TINY["deepseek_v3"] | {"num_nextn_predict_layers": 1, "num_hidden_layers": 2}
    config = nnxmoe.config_from_hf(fields)
    return model_class(config)(config, nnxmoe.Strategy(), rngs=nnx.Rngs(0), mtp=True)


def load_mtp(kind: str) -> Frozen:
    """A frozen case, with the logits of depth k = 0, 1, … as ``logits.{k}``."""
    stored = json.loads((FOLDER / f"{kind}.json").read_text())
    fields, weights = stored["config"], weights_of(stored["shapes"]) | constants_of(stored["config"])
    return Frozen(fields, published(fields, weights), load_file(FOLDER / f"{kind}.safetensors"))


def ahead(model: nnxmoe.CausalLM, tokens: jax.Array) -> list[jax.Array]:
    """Logits ``[B, T - k, V]`` of depth k = 0, 1, … of a model; depth 0 is the model itself."""
    body = model.body(tokens)
    found = [model.logits(body.x)]
    for k, depth in enumerate(model.mtp, 1):
        body = depth(model, body.mtp_hidden[:, :-1], tokens[:, k:])
        found.append(model.logits(body.x))
    return found


_ahead = nnx.jit(ahead)


def logits_ahead(model: nnxmoe.CausalLM, tokens: np.ndarray) -> list[np.ndarray]:
    """The result of `ahead`, compiled."""
    return [np.asarray(one) for one in _ahead(model, jnp.asarray(tokens))]
