"""Tiny checkpoints run by transformers, for the tests of the families and for freezing their cases."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm5_next import modeling_glm5_next as glm5_next
from transformers.models.step3p7 import modeling_step3p7 as step3p7

from tests.support import deepseek_v41 as deepseek_v41  # registers a model that transformers lacks
from tests.support import kimi_k3 as kimi_k3  # registers Kimi K3 in transformers
from tests.support.families import NEW, PROMPT, positions_of, weights_of, write_config
from tests.support.tiny import Fields, Weights

CLOSE = 1e-4  # experts with scores this close may swap due to rounding
MARGIN = 1e-3  # tokens with logits this close may swap due to rounding
_MISTRAL4 = transformers.Mistral4Config, transformers.Mistral4ForCausalLM
transformers.AutoModelForCausalLM.register(*_MISTRAL4, exist_ok=True)  # which it only has inside of mistral3


def _with_head(module: Any, name: str, config_type: Any, body: Any, base: Any) -> None:
    """Registers the text model ``body`` with a head, which transformers only has beside a vision tower."""

    def __init__(self: Any, config: Any) -> None:
        base.__init__(self, config)
        self.model = body(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self: Any, input_ids: Any = None, **given: Any) -> Any:
        out = self.model(input_ids, **{k: v for k, v in given.items() if k not in ("return_dict", "logits_to_keep")})
        return CausalLMOutputWithPast(logits=self.lm_head(out.last_hidden_state), past_key_values=out.cache)

    more = {"config_class": config_type, "__init__": __init__, "forward": forward}
    more["__module__"] = module.__name__  # whose code the list of fields looks at
    made = type(name, (base, transformers.GenerationMixin), more)
    transformers.AutoModelForCausalLM.register(config_type, made, exist_ok=True)


_with_head(
    glm5_next, "Glm5NextForCausalLM", glm5_next.Glm5NextTextConfig, glm5_next.Glm5NextTextModel,
    glm5_next.Glm5NextPreTrainedModel,
)  # fmt: skip
_with_head(
    step3p7, "Step3p5ForCausalLM", step3p7.Step3p7TextConfig, step3p7.Step3p7TextModel, step3p7.Step3p7PreTrainedModel
)  # fmt: skip
_RULES = get_checkpoint_conversion_mapping("step3p7")  # without those for names in the multimodal model
register_checkpoint_conversion_mapping(
    "step3p5", [rule for rule in _RULES if "mlp." in str(rule.target_patterns)], overwrite=True
)
AFTER = {  # what multiplies the sum of the experts in transformers, and their weights here
    "laguna": "moe_routed_scaling_factor",
    "step3p5": "moe_router_scaling_factor",
    "minimax_m3_vl_text": "routed_scaling_factor",
}
# transformers 5.24 saves Hy4 with names that differ from the published files.
_HY4 = (
    (re.compile(r"hc_pre\.hc_(attn|mlp)_layer\.hc_"), r"hc_\1_layer.hc_pre.hc_"),
    (re.compile(r"hc_pre\.hc_head\."), "hc_head."),
    (re.compile(r"mlp\.(shared_experts\.)?linear_gate"), r"mlp.\1gate_proj"),
)
_DENSE = re.compile("block_sparse_moe(?=.(gate|up|down)_proj)")  # its name of a dense layer, which the hub calls mlp
ALONE = "deepseek_v4", "deepseek_v41_text", "minimax_m3_vl_text"  # which divide padding too in transformers


def _alone(model: Any) -> bool:
    """Whether padding changes other tokens in transformers, so that rows are run without it; also in a `Mamba2` or
    `GatedShortConv` with a bias, whose convolution reads the bias of padding."""
    biases = "use_bias", "conv_bias", "mamba_proj_bias"
    return model.config.model_type in ALONE or any(getattr(model.config, name, False) for name in biases)


@dataclasses.dataclass(frozen=True)
class Seen:
    """Logits, and the experts and their weights by layer: ``[B, T, X]``, experts in ascending order."""

    logits: np.ndarray
    experts: dict[int, np.ndarray]
    weights: dict[int, np.ndarray]


def _published(name: str) -> str:
    """The name in published files of a tensor that transformers saves with another name."""
    for pattern, published in _HY4:
        name = pattern.sub(published, name)
    return _DENSE.sub("mlp", name)


def write_theirs(folder: Path, theirs: str, fields: Fields, seed: int) -> Weights:
    """Writes the checkpoint that transformers saves for these fields, with `weights_of` its names and shapes, and
    returns the tensors."""
    config = transformers.CONFIG_MAPPING[theirs](**json.loads(json.dumps(fields)))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    path = folder / "model.safetensors"
    stored = load_file(path)
    shapes = {_published(name): array.shape for name, array in stored.items()}
    constants = {name: array for name, array in stored.items() if ".ple_embedding." in name and array.dtype == np.int64}
    made = weights_of(shapes, seed) | constants
    save_file(made, path, {"format": "pt"})
    return made


def load_theirs(folder: Path, theirs: str) -> Any:
    """The model of transformers in float32; asserts that it knows every tensor. ``theirs`` replaces the model_type."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    write_config(folder, fields | {"model_type": theirs})
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    write_config(folder, fields)
    assert not any(info.values()), info
    return model.eval()


def run_theirs(model: Any, tokens: np.ndarray, mask: np.ndarray) -> Seen:
    """One pass, with the routing of every layer that has a router."""
    if _alone(model) and not mask.all():
        return _row_by_row(model, tokens, mask)
    routed: dict[int, tuple[Any, ...]] = {}

    def listen(layer: int) -> Any:
        return lambda gate, inputs, output: routed.__setitem__(layer, output)

    names = "mlp", "mixer", "block_sparse_moe", "feed_forward"
    layers = [
        (i, x, next((getattr(x, name) for name in names if hasattr(x, name)), None))
        for i, x in enumerate(model.model.layers)
    ]
    gates = [(i, getattr(mlp, "gate", getattr(mlp, "router", getattr(x, "router", None)))) for i, x, mlp in layers]
    hooks = [gate.register_forward_hook(listen(i)) for i, gate in gates if gate is not None]
    with torch.no_grad():
        given = {"attention_mask": torch.tensor(mask), "position_ids": torch.tensor(positions_of(mask))}
        logits = model(torch.tensor(tokens).long(), **given).logits.numpy()
    for hook in hooks:
        hook.remove()
    experts, weights = {}, {}
    scale = getattr(model.config, AFTER.get(model.config.model_type, ""), 1.0)
    for layer, (_, values, indices) in routed.items():
        order = np.argsort(indices.numpy(), axis=-1)
        experts[layer] = np.take_along_axis(indices.numpy(), order, -1).reshape(*tokens.shape, -1)
        weights[layer] = scale * np.take_along_axis(values.numpy(), order, -1).reshape(*tokens.shape, -1)
    return Seen(logits, experts, weights)


def _row_by_row(model: Any, tokens: np.ndarray, mask: np.ndarray) -> Seen:
    """The pass of each row without its padding, where everything is 0."""
    rows = [
        run_theirs(model, row[used > 0][None], np.ones((1, int(used.sum())), int))
        for row, used in zip(tokens, mask, strict=True)
    ]

    def spread(values: list[np.ndarray]) -> np.ndarray:
        out = np.zeros((*mask.shape, values[0].shape[-1]), values[0].dtype)
        out[mask > 0] = np.concatenate([row[0] for row in values])
        return out

    parts = (
        {layer: spread([getattr(row, part)[layer] for row in rows]) for layer in rows[0].experts}
        for part in ("experts", "weights")
    )
    return Seen(spread([row.logits for row in rows]), *parts)


def greedy_theirs(model: Any, tokens: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The new tokens after the first `PROMPT` ones, and the margin of each over the second best."""
    if _alone(model) and len(tokens) > 1:
        rows = [greedy_theirs(model, row[None], used[None]) for row, used in zip(tokens, mask, strict=True)]
        return np.concatenate([ids for ids, _ in rows]), np.concatenate([margins for _, margins in rows])
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    given = torch.tensor(tokens[:, :PROMPT]).long(), torch.tensor(mask[:, :PROMPT])
    if _alone(model):
        given = tuple(a[:, given[1][0] > 0] for a in given)
    with torch.no_grad():
        out = model.generate(
            given[0], attention_mask=given[1], max_new_tokens=NEW, do_sample=False,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    best = torch.stack(out.scores, dim=1).topk(2, dim=-1)[0].numpy()
    return out.sequences.numpy()[:, given[0].shape[1] :], best[..., 0] - best[..., 1]
