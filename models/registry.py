"""Registry of the model families by ``model_type`` and preset. Imports a family's module on first use."""

import functools
import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError
from nnxmoe.config.config_json import check_architecture, text_fields
from nnxmoe.config.printable import did_you_mean, short
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family
from nnxmoe.models.index import ARCHITECTURES, MODULE_OF_TYPE, MODULES

logger = logging.getLogger(__name__)
Value = TypeVar("Value")
# model_type -> family passed to `register`. Registered families override families of this folder.
REGISTERED: dict[str, Family] = {}
TEXT_OF = {"step3p7": "step3p5"}  # Multimodal model_type -> model_type of its text model, if not `…_text`.
# (model_type, hidden_act) -> model_type of the family, for files with the model_type of a different family.
TYPE_OF_ACTIVATION = {("kimi_linear", "situ"): "kimi_k3"}
# Supported model_type -> the most similar unsupported families.
RELATIVES = {
    "deepseek_v3": "longcat_flash",
    "mixtral": "minimax phimoe jamba",
    "qwen3_moe": "hunyuan_v1_moe",
    "olmoe": "flex_olmo",
    "qwen3": "olmo2",
    "qwen2": "qwen2_vl qwen2_5_vl",
    "mistral": "ministral",
    "llama": "gemma gemma2 internlm2 llama4 stablelm",
}


class LazyTable(Mapping[str, Value]):
    """A mapping that computes its values on access.

    Args:
        names: Function that returns the keys.
        value: Function that returns the value of a key.
    """

    def __init__(self, names: Callable[[], Sequence[str]], value: Callable[[str], Value]):
        self._names, self._value = names, value

    def __getitem__(self, name: str) -> Value:
        return self._value(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())


class PresetTable(Mapping[str, Value]):
    """A value per preset, from the families in `REGISTERED` or from presets.json. Names are found in any case.

    Args:
        attribute: Attribute of `Family` that maps presets to values.
        field: Field of presets.json. Presets without this field have no value.
        published: Function that returns the value of a preset in presets.json.
    """

    def __init__(self, attribute: str, field: str, published: Callable[[str], Value]):
        self._attribute, self._field, self._published = attribute, field, published

    def __getitem__(self, name: str) -> Value:
        for family in reversed(REGISTERED.values()):
            for preset, value in getattr(family, self._attribute).items():
                if preset.lower() == name.lower():
                    return value
        return self._published(name.lower())

    def __contains__(self, name: object) -> bool:
        return any(str(name).lower() == preset.lower() for preset in self)  # without the import of the preset's family

    def __iter__(self) -> Iterator[str]:
        published = (name for name, entry in _published().items() if self._field in entry)
        registered = (name for family in REGISTERED.values() for name in getattr(family, self._attribute))
        return iter(dict.fromkeys((*published, *registered)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _families_in(module: str) -> Sequence[Family]:
    """Import a module of this folder and return its families."""
    names = vars(importlib.import_module(f"nnxmoe.models.{module}"))
    return names["FAMILIES"] if "FAMILIES" in names else (names["FAMILY"],)


def _family_and_config(model_type: str, registered: Mapping[str, Family]) -> tuple[Family, type[DecoderConfig]]:
    """Return the family and the config class of a ``model_type``. Raises KeyError for unknown types.

    Args:
        registered: ``model_type`` -> family that overrides the family of this folder.
    """
    families = (registered[model_type],) if model_type in registered else _families_in(MODULE_OF_TYPE[model_type])
    return next((family, config) for family in families for config in family.configs if config.model_type == model_type)


def family_of(source: CausalLM | DecoderConfig) -> Family:
    """Return the family of a config by its ``model_type``, or of a model by its class or first known base class.

    Raises:
        ConfigError: Neither the model's class nor its base classes belong to a family.
        KeyError: The config's ``model_type`` is unknown.
    """
    if isinstance(source, DecoderConfig):
        return FAMILIES[source.model_type]
    for base in type(source).__mro__:
        module = base.__module__.removeprefix("nnxmoe.models.")
        for family in (*REGISTERED.values(), *(_families_in(module) if module in MODULES else ())):
            if family.model is base:
                return family
    name = type(source).__name__
    raise ConfigError(f"{name} is not registered: call nnxmoe.models.register(Family(model={name}, hf=…))")


def _types() -> list[str]:
    return list(dict.fromkeys((*MODULE_OF_TYPE, *REGISTERED)))


def _classes(model_type: str) -> tuple[type[DecoderConfig], type[CausalLM]]:
    family, config = _family_and_config(model_type, REGISTERED)
    return config, family.model


@functools.cache
def _published() -> dict[str, dict[str, Any]]:
    """Return presets.json: preset -> ``model_type``, ``config``, and optionally ``hub_id`` and ``note``."""
    return json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))


@functools.cache
def _published_config(name: str) -> DecoderConfig:
    entry = _published()[name]
    _, config = _family_and_config(entry["model_type"], {})
    return config(**entry["config"])


FAMILIES = LazyTable(_types, lambda model_type: _family_and_config(model_type, REGISTERED)[0])  # model_type -> family
MODELS = LazyTable(_types, _classes)  # model_type -> (config class, model class)
PRESETS = PresetTable("presets", "config", _published_config)
# Preset -> Hugging Face Hub id of the published checkpoint.
HUB_IDS: PresetTable[str] = PresetTable("hub_ids", "hub_id", lambda name: _published()[name]["hub_id"])
# Preset -> differences between its files and the loaded model.
CHECKPOINT_NOTES: PresetTable[str] = PresetTable("checkpoint_notes", "note", lambda name: _published()[name]["note"])


def register(family: Family) -> None:
    """Register a family under the ``model_type`` of each of its configs, and its presets by name.

    Call this function before you load, save or plan models of a custom class.

    Raises:
        ConfigError: A parameter has no row in the table of tensor names.
        ValueError: ``family`` is not a `Family`.
    """
    from nnxmoe.model.family_checks import refuse_unnamed_parameters

    if not isinstance(family, Family):
        raise ValueError(f"register({short(family)}): pass an nnxmoe.models.Family")
    refuse_unnamed_parameters(family)
    REGISTERED.update({config.model_type: family for config in family.configs})


def config_from_hf(fields: Mapping[str, Any]) -> DecoderConfig:
    """Create the config of a model, or of a multimodal model's text model. Logs a warning for dropped fields.

    Args:
        fields: A parsed config.json.

    Raises:
        ConfigError: The model or a value is not supported (see `DecoderConfig.from_hf`).
    """
    config, notes = _parsed(text_fields(fields))
    for note in notes:
        logger.warning("%s", note)
    return config


def _parsed(fields: Mapping[str, Any]) -> tuple[DecoderConfig, tuple[str, ...]]:
    """Return the config of a text model and the notes on its fields."""
    family_config = config_class(fields)
    registered = [config for family in REGISTERED.values() for config in family.configs]
    names = {name for c in registered for name in (c.architecture, *c.published_architectures.split())}
    check_architecture(fields, ARCHITECTURES | names)
    return family_config.from_hf(fields), family_config.notes(fields)


def parse_config(fields: Mapping[str, Any], file_name: str) -> tuple[DecoderConfig, tuple[str, ...]]:
    """Create a config from a parsed config.json.

    Args:
        file_name: Name of the file, for error messages.

    Returns:
        The config, and notes to report (see `DecoderConfig.notes`).

    Raises:
        ConfigError: The model or a value is not supported.
    """
    try:
        return _parsed(fields)
    except ConfigError as error:
        raise ConfigError(f"{file_name}: {error}") from None


def config_class(fields: Mapping[str, Any]) -> type[DecoderConfig]:
    """Return the config class for the ``model_type`` of a parsed config.json. Raises ConfigError if it is unknown."""
    if not isinstance(fields, Mapping):
        raise ConfigError(f"config.json must contain an object, got {type(fields).__name__}")
    model_type = fields.get("model_type")
    if isinstance(model_type, str):  # a text model with the model_type of its multimodal model
        text_type = f"{model_type}_text"
        model_type = TEXT_OF.get(model_type, text_type if text_type in MODELS else model_type)
        if isinstance(activation := fields.get("hidden_act"), str):
            model_type = TYPE_OF_ACTIVATION.get((model_type, activation), model_type)
    if not isinstance(model_type, str) or model_type not in MODELS:
        raise ConfigError(
            f"model_type {short(model_type)} is not supported{_relative(model_type)}; supported: {', '.join(MODELS)}"
        )
    return MODELS[model_type][0]


def _relative(model_type: Any) -> str:
    """Return an error text that names the most similar supported family, or "" if ``model_type`` is unknown."""
    for name, relatives in RELATIVES.items():
        if str(model_type).removesuffix("_text") in relatives.split():
            return (
                f". Its layers differ from the layers of {name}, the most similar supported family, so changing the "
                f"model_type would change the results. To add a family, see models/README.md and "
                f"models/{MODULE_OF_TYPE[name]}.py"
            )
    return ""


def preset(name: str | os.PathLike[str]) -> DecoderConfig | None:
    """Return the preset of this name. Returns None if the preset does not exist or a folder has this name."""
    is_path = isinstance(name, str | os.PathLike)
    return PRESETS.get(str(name)) if is_path and not os.path.isdir(name) else None


def near_presets(name: str | os.PathLike[str]) -> str:
    """Return a hint for an unknown model: presets with similar names, or the command that lists all presets."""
    suggestions = did_you_mean(str(name), PRESETS, 3)
    return suggestions or "; nnxmoe inspect --help lists the presets, which need no files"


def refuse_preset(name: str | os.PathLike[str]) -> None:
    """Raise ConfigError if ``name`` is a preset, because presets have no weights. The error names the Hub id."""
    if preset(name) is not None:
        hub_id = HUB_IDS.get(str(name), "its Hugging Face Hub id, such as 'org/name'")
        raise ConfigError(f"{name} is a preset, a config without weights: use {hub_id}, or a folder with weights")


def is_registered(model: CausalLM) -> bool:
    """Return whether loading the model's config builds a model of the same class."""
    model_type = model.config.model_type
    return model_type in MODELS and MODELS[model_type] == (type(model.config), type(model))


def model_class(config: DecoderConfig) -> type[CausalLM]:
    """Return the model class of a config."""
    return MODELS[config.model_type][1]
