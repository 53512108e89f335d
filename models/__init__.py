"""Model families, and the registry of their ``model_type`` and presets."""

if __name__ != "nnxmoe.models":
    raise ImportError(f"import nnxmoe.models, not {__name__}: otherwise every class here would exist twice")

import os
from collections.abc import Mapping
from typing import Any

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError
from nnxmoe.config.printable import short
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
from nnxmoe.models.llama import Llama, LlamaConfig, MistralConfig
from nnxmoe.models.mixtral import Mixtral, MixtralConfig

MODELS: dict[str, tuple[type[DecoderConfig], type[CausalLM]]] = {}
PRESETS: dict[str, DecoderConfig] = {}
HUB_IDS: dict[str, str] = {}  # preset -> the published checkpoint


def register(family: type[CausalLM]) -> None:
    """Register a model family under the ``model_type`` of each of its configs, and its presets by name."""
    MODELS.update({config.model_type: (config, family) for config in family.configs})
    PRESETS.update(family.presets)
    HUB_IDS.update(family.hub_ids)


for _family in (Llama, Mixtral, DeepSeekV3):
    register(_family)

__all__ = [
    "HUB_IDS",
    "MODELS",
    "PRESETS",
    "DeepSeekV3",
    "DeepSeekV3Config",
    "Llama",
    "LlamaConfig",
    "MistralConfig",
    "Mixtral",
    "MixtralConfig",
    "config_from_hf",
    "model_class",
    "preset",
    "refuse_preset",
    "register",
]


def config_from_hf(fields: Mapping[str, Any]) -> DecoderConfig:
    """The config of a parsed config.json. Raises ConfigError for unsupported models and values."""
    if not isinstance(fields, Mapping):
        raise ConfigError(f"config.json must hold an object, got {type(fields).__name__}")
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in MODELS:
        raise ConfigError(f"model_type {short(kind)} is not supported; supported: {', '.join(MODELS)}")
    return MODELS[kind][0].from_hf(fields)


def preset(name: str | os.PathLike[str]) -> DecoderConfig | None:
    """The preset of that name; None if there is none, or if a folder of that name exists."""
    return None if os.path.isdir(name) else PRESETS.get(str(name).lower())


def refuse_preset(name: str | os.PathLike[str]) -> None:
    """Raises ConfigError if weights are asked of a preset, which has none, with the hub id that has them."""
    if preset(name) is not None:
        where = HUB_IDS.get(str(name).lower(), "its name on the hub, such as 'org/name'")
        raise ConfigError(f"{name} is a preset, a config without weights: give {where}, or a folder")


def model_class(config: DecoderConfig) -> type[CausalLM]:
    """The model class of a config."""
    return MODELS[config.model_type][1]
