"""Writes ``tests/data/mtp`` with a live transformers: ``python -m tests.support.freeze_mtp``."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.support.families import FAMILIES, tokens_of, weights_of, write_config
from tests.support.mtp import APART, CASES, FOLDER, fields_of, published, shapes_of
from tests.support.tiny import Fields, Weights

for _config, _kind in (
    (transformers.Qwen3NextConfig, "full_attention"),
    (transformers.GlmMoeDsaConfig, "indexed_attention"),
):
    # Fields that these configs of transformers lack, and that its MtpModel needs.
    _missing = {"num_mtp_layers": 1, "mtp_layer_types": [_kind], "mtp_mlp_layer_types": ["sparse"]}
    for _name, _value in _missing.items():
        setattr(_config, _name, _value)


def write_theirs(folder: Path, theirs: str, fields: Fields, seed: int) -> Weights:
    """Writes a checkpoint with prediction layers, and returns its tensors without their copies."""
    config = transformers.CONFIG_MAPPING[theirs](**{k: v for k, v in fields.items() if k != "model_type"})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    shapes = {name: list(array.shape) for name, array in load_file(folder / "model.safetensors").items()}
    made = weights_of(shapes | shapes_of(fields, shapes), seed)
    stored = made if theirs in APART else published(fields, made)  # transformers reads the numbers of layers only
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return made


def run_theirs(folder: Path, theirs: str, tokens: np.ndarray) -> list[np.ndarray]:
    """Logits ``[B, T - k, V]`` of the model and of each depth of ``MtpModel``, both loaded from the folder."""
    main, ahead = _load(folder, theirs)
    ids = torch.tensor(tokens).long()
    with torch.no_grad():
        out = main(ids, output_hidden_states=True)
        found, x = [out.logits.numpy()], out.hidden_states[-1]
        cache = MtpCache(config=main.config.get_mtp_config())
        for k in range(ahead.num_mtp_layers):
            positions = torch.arange(k + 1, ids.shape[1])[None]
            x = ahead.forward_layer(k, x[:, :-1], positions, cache, input_ids=ids[:, k + 1 :])
            found.append(ahead._project_to_logits(x).numpy())
    return found


def _load(folder: Path, theirs: str) -> tuple[Any, Any]:
    config = json.loads((folder / "config.json").read_text())
    write_config(folder, config | {"model_type": theirs})
    kind: Any = transformers.AutoModelForCausalLM._model_mapping[transformers.CONFIG_MAPPING[theirs]]
    published = kind._keys_to_ignore_on_load_unexpected  # names the layers by their numbers in the published models
    last = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    numbers = "|".join(map(str, range(config["num_hidden_layers"], last)))
    kind._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.({numbers})\."]
    try:
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        main, info = kind.from_pretrained(folder, output_loading_info=True, **options)
        assert not any(info.values()), info
        ahead = MtpModel.from_pretrained(main).eval()
        ahead.config.layer_types = None  # it has no mask for indexed attention, whose mask is the usual one
        layers: Any = ahead.layers
        for layer in layers:  # those of GLM-5 hand on the chosen keys too
            layer.mtp_block.register_forward_hook(lambda _, __, out: out[0] if isinstance(out, tuple) else out)
        return main.eval(), ahead
    finally:
        kind._keys_to_ignore_on_load_unexpected = published
        write_config(folder, config)


def freeze(kind: str) -> None:
    """Writes the case of a family: its config, names and shapes as JSON, and the logits as safetensors."""
    fields = fields_of(kind, CASES[kind])
    tokens = tokens_of(fields["vocab_size"])[0]
    with tempfile.TemporaryDirectory() as name:
        weights = write_theirs(Path(name), FAMILIES[kind].theirs, fields, seed=0)
        found = run_theirs(Path(name), FAMILIES[kind].theirs, tokens)
    FOLDER.mkdir(exist_ok=True)
    arrays = {f"logits.{k}": logits for k, logits in enumerate(found)}
    assert all(np.isfinite(logits).all() and logits.std() > 0.3 for logits in found), kind
    save_file({"tokens": tokens, **arrays}, FOLDER / f"{kind}.safetensors")
    stored = {
        "transformers": transformers.__version__,
        "config": fields,
        "shapes": {name: list(array.shape) for name, array in weights.items()},
    }
    (FOLDER / f"{kind}.json").write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    for each in CASES:
        freeze(each)
