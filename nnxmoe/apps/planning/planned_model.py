"""Resolve the model of a plan to a config."""

import dataclasses
import os

from nnxmoe.config.base import DecoderConfig
from nnxmoe.convert.files.hub import local_folder, snapshot
from nnxmoe.convert.hf.auxiliary_files import read_config
from nnxmoe.models import PRESETS, near_presets, preset


def first_layers(config: DecoderConfig, count: int) -> DecoderConfig:
    """Return the config of a model with only the first ``count`` layers.

    Raises ValueError if the model has fewer layers, or if the first layers do not form a valid model.
    """
    if count > config.num_hidden_layers:
        raise ValueError(
            f"plan(layers={count}): the model has {config.num_hidden_layers} layers: use at most that many layers"
        )
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    per_layer = {
        name: value[:count]
        for name, value in fields.items()
        if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers
    }
    return dataclasses.replace(config, num_hidden_layers=count, **per_layer)


def read_model(model: DecoderConfig | str | os.PathLike[str]) -> tuple[str, DecoderConfig]:
    """Resolve the ``model`` argument of `plan` to a name and a config."""
    if isinstance(model, DecoderConfig):
        return next((name for name, config in PRESETS.items() if config == model), model.model_type), model
    if (preset_config := preset(model)) is not None:
        return str(model).lower(), preset_config
    if (folder := local_folder(model, ValueError)) is None:
        if "/" not in str(model):
            raise ValueError(f"{model} is neither a folder nor a preset{near_presets(model)}")
        folder = snapshot(str(model), None, False, ["config.json"], (), ValueError)
    return str(model), read_config(folder)
