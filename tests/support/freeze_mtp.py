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
from tests.support.mtp import APART, CASES, FOLDER, STREAMED, fields_of, published, shapes_of
from tests.support.tiny import Fields, Weights

for _config, _kind in (
    (transformers.Qwen3NextConfig, "full_attention"),
    (transformers.GlmMoeDsaConfig, "indexed_attention"),
):
    # Fields that these configs of transformers lack, and that its MtpModel needs.
    _missing = {"num_mtp_layers": 1, "mtp_layer_types": [_kind], "mtp_mlp_layer_types": ["sparse"]}
    for _name, _value in _missing.items():
        setattr(_config, _name, _value)


def written(theirs: str, fields: Fields, folder: Path) -> dict[str, list[int]]:
    """Names and shapes of an untrained model of transformers, which is written into the folder."""
    config = transformers.CONFIG_MAPPING[theirs](**{k: v for k, v in fields.items() if k != "model_type"})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return {name: list(array.shape) for name, array in load_file(folder / "model.safetensors").items()}


# DeepSeek-V4's names of the last norm, in a model of transformers -> of a prediction layer.
LAST = {f"model.hc_head.hc_{end}": f"mtp.0.hc_head_{end}" for end in ("fn", "base", "scale")}
LAST["model.norm.weight"] = "mtp.0.norm.weight"


def of_streams(number: int, name: str) -> str | None:
    """DeepSeek-V4's name of a tensor of a prediction layer, from that in a model of which it is the last layer."""
    layer = f"model.layers.{number}."
    return name.replace(layer, "mtp.0.") if name.startswith(layer) else LAST.get(name)


def write_streamed(folder: Path, fields: Fields, seed: int) -> Weights:
    """`write_theirs` of DeepSeek-V4. In transformers its prediction layer is the last of a model with one more."""
    last, dim = fields["num_hidden_layers"], fields["hidden_size"]
    with tempfile.TemporaryDirectory() as name:
        wide = written(STREAMED, fields | {"num_hidden_layers": last + 1}, Path(name))
    shapes = {name: shape for name, shape in wide.items() if f".layers.{last}." not in name}
    shapes |= {new: shape for name, shape in wide.items() if (new := of_streams(last, name))}
    shapes |= {f"mtp.0.{name}_proj.weight": [dim, dim] for name in "eh"}
    made = weights_of(shapes | {f"mtp.0.{name}norm.weight": [dim] for name in "eh"}, seed)
    write_config(folder, fields)
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    return made


def run_streamed(folder: Path, tokens: np.ndarray) -> list[np.ndarray]:
    """`run_theirs` of DeepSeek-V4; the streams before the last layer are replaced by what its ``MTPBlock`` makes."""
    fields, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    last, kind, ids = fields["num_hidden_layers"], transformers.AutoModelForCausalLM, torch.tensor(tokens).long()
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    main = kind.from_pretrained(folder, **options).eval()
    with tempfile.TemporaryDirectory() as name:
        names = written(STREAMED, fields | {"num_hidden_layers": last + 1}, Path(name))
        save_file(
            {each: stored[of_streams(last, each) or each] for each in names},
            Path(name) / "model.safetensors",
            {"format": "pt"},
        )
        ahead, info = kind.from_pretrained(name, output_loading_info=True, **options)
        assert not any(info.values()), info

    def unit(x: torch.Tensor, part: str) -> torch.Tensor:
        scale = torch.tensor(stored[f"mtp.0.{part}norm.weight"])
        return torch.nn.functional.rms_norm(x, scale.shape, scale, fields["rms_norm_eps"])

    def joined(_: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        e, h = (torch.tensor(stored[f"mtp.0.{part}_proj.weight"]).T for part in "eh")
        token = unit(ahead.model.embed_tokens(ids.roll(-1, 1)), "e") @ e  # the last position's is cut off
        return (token[:, :, None] + unit(given[0], "h") @ h,)

    ahead.model.layers[last].register_forward_pre_hook(joined)
    with torch.no_grad():
        return [main(ids).logits.numpy(), ahead.eval()(ids).logits[:, :-1].contiguous().numpy()]


def write_theirs(folder: Path, theirs: str, fields: Fields, seed: int) -> Weights:
    """Writes a checkpoint with prediction layers, and returns its tensors without their copies."""
    if theirs == STREAMED:
        return write_streamed(folder, fields, seed)
    shapes = written(theirs, fields, folder)
    made = weights_of(shapes | shapes_of(fields, shapes), seed)
    stored = made if theirs in APART else published(fields, made)  # transformers reads the numbers of layers only
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return made


def run_theirs(folder: Path, theirs: str, tokens: np.ndarray) -> list[np.ndarray]:
    """Logits ``[B, T - k, V]`` of the model and of each depth of ``MtpModel``, both loaded from the folder."""
    if theirs == STREAMED:
        return run_streamed(folder, tokens)
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
