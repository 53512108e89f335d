"""Writes ``tests/data/mtp`` with a live transformers: ``python -m tests.support.freeze_mtp [FAMILY…]``."""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.support.families import FAMILIES, constants_of, tokens_of, weights_of, write_config
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


def written(theirs: str, fields: Fields, folder: Path) -> dict[str, list[int]]:
    """Names and shapes of an untrained model of transformers, which is written into the folder."""
    config = transformers.CONFIG_MAPPING[theirs](**{k: v for k, v in fields.items() if k != "model_type"})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return {name: list(array.shape) for name, array in load_file(folder / "model.safetensors").items()}


@dataclasses.dataclass(frozen=True)
class Streams:
    """Names of a prediction layer with residual streams, which is the last layer of a model with one more.

    Attributes:
        layer: Prefix of the tensors that other layers have too.
        last: Names of the last norm, in a model of transformers -> of the prediction layer.
        token: Prefixes of the norm and the projection of the token.
        state: Prefixes of the norm and the projection of the streams.
        offset: What is added to the scales of norms.
        wide: The fields of the model with one more layer.
    """

    layer: str
    last: dict[str, str]
    token: tuple[str, str]
    state: tuple[str, str]
    offset: float
    wide: Callable[[Fields], Fields]

    def name(self, number: int, name: str) -> str | None:
        """The name of a tensor of the prediction layer, from that in a model of which it is the last layer."""
        layer = f"model.layers.{number}."
        return name.replace(layer, self.layer) if name.startswith(layer) else self.last.get(name)


_V4_LAST = {f"model.hc_head.hc_{end}": f"mtp.0.hc_head_{end}" for end in ("fn", "base", "scale")}
_MIXER = [f"hyper_connection_mixer.{x}.weight" for x in ("hc_norm", "input_mix_weight_down", "input_mix_weight_up")]
STREAMS = {
    "deepseek_v4": Streams(  # ``MTPBlock``
        "mtp.0.", _V4_LAST | {"model.norm.weight": "mtp.0.norm.weight"}, ("mtp.0.enorm", "mtp.0.e_proj"),
        ("mtp.0.hnorm", "mtp.0.h_proj"), 0.0, lambda fields: {"num_hidden_layers": fields["num_hidden_layers"] + 1},
    ),
    "qwen4_exp_text": Streams(  # ``Qwen4ExpMultiTokenPredictor`` in vLLM
        "mtp.layers.0.", {f"model.{name}": f"mtp.{name}" for name in _MIXER},
        ("mtp.pre_fc_norm_embedding", "mtp.fc_embedding"), ("mtp.pre_fc_norm_hidden", "mtp.fc_hidden"), 1.0,
        lambda fields: {
            "num_hidden_layers": fields["num_hidden_layers"] + 1,
            "layer_types": [*fields["layer_types"], "full_attention"],
        },
    ),
}  # fmt: skip


def write_streamed(folder: Path, theirs: str, fields: Fields, seed: int) -> Weights:
    """`write_theirs` of a model with streams."""
    last, dim, names = fields["num_hidden_layers"], fields["hidden_size"], STREAMS[theirs]
    with tempfile.TemporaryDirectory() as name:
        wide = written(theirs, fields | names.wide(fields), Path(name))
    shapes = {name: shape for name, shape in wide.items() if f".layers.{last}." not in name}
    shapes |= {new: shape for name, shape in wide.items() if (new := names.name(last, name))}
    shapes |= {f"{project}.weight": [dim, dim] for _, project in (names.token, names.state)}
    width = dim * fields["hc_count"] if names.offset else dim
    shapes |= {f"{names.token[0]}.weight": [dim], f"{names.state[0]}.weight": [width]}
    made = weights_of(shapes, seed) | constants_of(fields)
    write_config(folder, fields)
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    return made


def run_streamed(folder: Path, theirs: str, tokens: np.ndarray) -> list[np.ndarray]:
    """`run_theirs` of a model with streams; those before the last layer are replaced by its input."""
    fields, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    last, kind, ids = fields["num_hidden_layers"], transformers.AutoModelForCausalLM, torch.tensor(tokens).long()
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    main, names = kind.from_pretrained(folder, **options).eval(), STREAMS[theirs]
    with tempfile.TemporaryDirectory() as name:
        wide = written(theirs, fields | names.wide(fields), Path(name))
        save_file(
            {each: stored[names.name(last, each) or each] for each in wide},
            Path(name) / "model.safetensors",
            {"format": "pt"},
        )
        ahead, info = kind.from_pretrained(name, output_loading_info=True, **options)
        assert not any(info.values()), info

    def projected(x: torch.Tensor, parts: tuple[str, str]) -> torch.Tensor:
        """The projection of the normalized token or streams, ``[B, T, streams, D]``."""
        scale, kernel = (torch.tensor(stored[f"{part}.weight"]) for part in parts)
        x = torch.nn.functional.rms_norm(x, scale.shape, names.offset + scale, fields["rms_norm_eps"])
        return x.reshape(*tokens.shape, -1, fields["hidden_size"]) @ kernel.T

    def joined(_: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        token = projected(ahead.model.embed_tokens(ids.roll(-1, 1)), names.token)  # the last position's is cut off
        return ((token + projected(given[0], names.state)).reshape(given[0].shape), *given[1:])

    ahead.model.layers[last].register_forward_pre_hook(joined)
    with torch.no_grad():
        return [main(ids).logits.numpy(), ahead.eval()(ids).logits[:, :-1].contiguous().numpy()]


def write_theirs(folder: Path, theirs: str, fields: Fields, seed: int) -> Weights:
    """Writes a checkpoint with prediction layers, and returns its tensors without their copies."""
    if theirs in STREAMS:
        return write_streamed(folder, theirs, fields, seed)
    shapes = written(theirs, fields, folder)
    made = weights_of(shapes | shapes_of(fields, shapes), seed)
    stored = made if theirs in APART else published(fields, made)  # transformers reads the numbers of layers only
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return made


def run_theirs(folder: Path, theirs: str, tokens: np.ndarray) -> list[np.ndarray]:
    """Logits ``[B, T - k, V]`` of the model and of each depth of ``MtpModel``, both loaded from the folder."""
    if theirs in STREAMS:
        return run_streamed(folder, theirs, tokens)
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
    for each in sys.argv[1:] or CASES:
        freeze(each)
