"""Model families, and the registry of their ``model_type`` and presets."""

if __name__ != "nnxmoe.models":
    raise ImportError(f"import nnxmoe.models, not {__name__}: otherwise every class here would exist twice")

import logging
import os
from collections.abc import Mapping
from typing import Any

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError
from nnxmoe.config.nested import text_fields
from nnxmoe.config.printable import did_you_mean, short
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family_checks import refuse_unnamed_parameters, refuse_unread_fields
from nnxmoe.models.afmoe import Afmoe, AfmoeConfig
from nnxmoe.models.bailing_hybrid import BailingHybrid, BailingHybridConfig
from nnxmoe.models.deepseek_v2 import DeepSeekV2, DeepSeekV2Config
from nnxmoe.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
from nnxmoe.models.deepseek_v4 import DeepSeekV4, DeepSeekV4Config
from nnxmoe.models.deepseek_v32 import DeepSeekV32, DeepSeekV32Config
from nnxmoe.models.dots1 import Dots1, Dots1Config
from nnxmoe.models.ernie4_5_moe import Ernie45Moe, Ernie45MoeConfig
from nnxmoe.models.exaone_moe import ExaoneMoe, ExaoneMoeConfig
from nnxmoe.models.gemma4 import Gemma4Text, Gemma4TextConfig
from nnxmoe.models.glm4_moe import Glm4Moe, Glm4MoeConfig
from nnxmoe.models.glm4_moe_lite import Glm4MoeLite, Glm4MoeLiteConfig
from nnxmoe.models.glm5_next import Glm5NextText, Glm5NextTextConfig
from nnxmoe.models.glm_moe_dsa import GlmMoeDsa, GlmMoeDsaConfig
from nnxmoe.models.gpt_oss import GptOss, GptOssConfig
from nnxmoe.models.hy_v3 import HyV3, HyV3Config
from nnxmoe.models.kimi_k2 import KimiK2, KimiK2Config
from nnxmoe.models.kimi_linear import KimiLinear, KimiLinearConfig
from nnxmoe.models.laguna import Laguna, LagunaConfig
from nnxmoe.models.llama import Llama, LlamaConfig, MistralConfig
from nnxmoe.models.mellum import Mellum, MellumConfig
from nnxmoe.models.mimo_v2_flash import MiMoV2Flash, MiMoV2FlashConfig
from nnxmoe.models.minimax_m2 import MiniMaxM2, MiniMaxM2Config
from nnxmoe.models.minimax_m3 import MiniMaxM3VLText, MiniMaxM3VLTextConfig
from nnxmoe.models.ministral3 import Ministral3, Ministral3Config
from nnxmoe.models.mistral4 import Mistral4, Mistral4Config
from nnxmoe.models.mixtral import Mixtral, MixtralConfig
from nnxmoe.models.nemotron_h import NemotronH, NemotronHConfig
from nnxmoe.models.olmoe import Olmoe, OlmoeConfig
from nnxmoe.models.qwen import Qwen2, Qwen2Config, Qwen3, Qwen3Config
from nnxmoe.models.qwen2_moe import Qwen2Moe, Qwen2MoeConfig
from nnxmoe.models.qwen3_5 import Qwen3_5MoeText, Qwen3_5MoeTextConfig, Qwen3_5Text, Qwen3_5TextConfig
from nnxmoe.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
from nnxmoe.models.qwen3_next import Qwen3Next, Qwen3NextConfig
from nnxmoe.models.qwen3_vl import Qwen3VLMoeText, Qwen3VLMoeTextConfig, Qwen3VLText, Qwen3VLTextConfig
from nnxmoe.models.sarvam_mla import SarvamMLA, SarvamMLAConfig
from nnxmoe.models.sarvam_moe import SarvamMoE, SarvamMoEConfig
from nnxmoe.models.solar_open import SolarOpen, SolarOpenConfig
from nnxmoe.models.step3p5 import Step3p5, Step3p5Config

logger = logging.getLogger(__name__)
MODELS: dict[str, tuple[type[DecoderConfig], type[CausalLM]]] = {}
PRESETS: dict[str, DecoderConfig] = {}
HUB_IDS: dict[str, str] = {}  # preset -> the published checkpoint
HUB_NOTES: dict[str, str] = {}  # preset -> how its files differ from what is loaded
TEXT_OF = {"step3p7": "step3p5"}  # multimodal model_type -> that of its text model, where it is not `…_text`
# Supported model_type -> families that are not supported and differ least from it.
RELATIVES = {
    "deepseek_v3": "longcat_flash",
    "glm4_moe": "glm4v_moe",
    "mixtral": "minimax phimoe granitemoe jamba",
    "qwen3_moe": "hunyuan_v1_moe",
    "olmoe": "flex_olmo",
    "qwen3": "olmo2 olmo3 gemma3",
    "qwen2": "qwen2_vl qwen2_5_vl",
    "mistral": "ministral",
    "llama": "gemma gemma2 granite internlm2 llama4 phi3 smollm3 stablelm",
}


def register(family: type[CausalLM]) -> None:
    """Register a model family under the ``model_type`` of each of its configs, and its presets by name.

    Required before loading, saving or planning models of a custom class. Raises ConfigError if a config declares a
    field that the family does not read, or if a parameter has no row in the table of tensor names.
    """
    if not (isinstance(family, type) and issubclass(family, CausalLM)):
        raise ValueError(f"register({short(family)}): pass a subclass of nnxmoe.CausalLM")
    refuse_unread_fields(family)
    refuse_unnamed_parameters(family)
    _add(family)


def _add(family: type[CausalLM]) -> None:
    MODELS.update({config.model_type: (config, family) for config in family.configs})
    PRESETS.update(family.presets)
    HUB_IDS.update(family.hub_ids)
    HUB_NOTES.update(family.hub_notes)


for _family in (
    *(Llama, Mixtral, DeepSeekV3, DeepSeekV2, KimiK2, Glm4MoeLite, Glm4Moe, Dots1, SolarOpen, MiniMaxM2),
    *(Qwen2, Qwen3, Qwen2Moe, Qwen3Moe, Olmoe, GptOss, HyV3),
    *(DeepSeekV32, GlmMoeDsa, DeepSeekV4, Qwen3VLText, Qwen3VLMoeText, SarvamMLA, SarvamMoE),
    *(Ministral3, Mistral4, ExaoneMoe, Mellum, Afmoe, Ernie45Moe, Gemma4Text, MiMoV2Flash, Laguna, Step3p5),
    *(MiniMaxM3VLText, NemotronH),
    *(Qwen3Next, Qwen3_5Text, Qwen3_5MoeText, KimiLinear, BailingHybrid, Glm5NextText),
):
    _add(_family)  # skips the checks of `register`, which are too slow for an import and run in tests

__all__ = [
    "HUB_IDS", "HUB_NOTES", "MODELS", "PRESETS", "Afmoe", "AfmoeConfig", "BailingHybrid", "BailingHybridConfig",
    "DeepSeekV2", "DeepSeekV2Config", "DeepSeekV3", "DeepSeekV3Config", "DeepSeekV4", "DeepSeekV4Config", "DeepSeekV32",
    "DeepSeekV32Config", "Dots1", "Dots1Config", "Ernie45Moe", "Ernie45MoeConfig", "ExaoneMoe", "ExaoneMoeConfig",
    "Gemma4Text", "Gemma4TextConfig", "Glm4Moe", "Glm4MoeConfig", "Glm4MoeLite", "Glm4MoeLiteConfig", "Glm5NextText",
    "Glm5NextTextConfig", "GlmMoeDsa", "GlmMoeDsaConfig", "GptOss", "GptOssConfig", "HyV3", "HyV3Config", "KimiK2",
    "KimiK2Config", "KimiLinear", "KimiLinearConfig", "Laguna", "LagunaConfig", "Llama", "LlamaConfig", "Mellum",
    "MellumConfig", "MiMoV2Flash", "MiMoV2FlashConfig", "MiniMaxM2", "MiniMaxM2Config", "MiniMaxM3VLText",
    "MiniMaxM3VLTextConfig", "Ministral3", "Ministral3Config", "Mistral4", "Mistral4Config", "MistralConfig", "Mixtral",
    "MixtralConfig", "NemotronH", "NemotronHConfig", "Olmoe", "OlmoeConfig", "Qwen2", "Qwen2Config", "Qwen2Moe",
    "Qwen2MoeConfig", "Qwen3", "Qwen3Config", "Qwen3Moe", "Qwen3MoeConfig", "Qwen3Next", "Qwen3NextConfig",
    "Qwen3VLMoeText", "Qwen3VLMoeTextConfig", "Qwen3VLText", "Qwen3VLTextConfig", "Qwen3_5MoeText",
    "Qwen3_5MoeTextConfig", "Qwen3_5Text", "Qwen3_5TextConfig", "SarvamMLA", "SarvamMLAConfig", "SarvamMoE",
    "SarvamMoEConfig", "SolarOpen", "SolarOpenConfig", "Step3p5", "Step3p5Config", "config_class", "config_from_hf",
    "is_registered", "model_class", "near_presets", "parse_config", "preset", "refuse_preset", "register",
]  # fmt: skip


def config_from_hf(fields: Mapping[str, Any]) -> DecoderConfig:
    """The config of a parsed config.json, or of the text model in it. Raises ConfigError for unsupported models and
    values (see `DecoderConfig.from_hf`), and warns of fields that are dropped."""
    fields = text_fields(fields)
    kind = config_class(fields)
    config = kind.from_hf(fields)
    for note in kind.notes(fields):
        logger.warning("%s", note)
    return config


def parse_config(fields: Mapping[str, Any], where: str) -> tuple[DecoderConfig, tuple[str, ...]]:
    """The config of a parsed config.json, and what to report of it; errors name the file ``where``."""
    try:
        kind = config_class(fields)
        return kind.from_hf(fields), kind.notes(fields)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def config_class(fields: Mapping[str, Any]) -> type[DecoderConfig]:
    """The class for the ``model_type`` of a parsed config.json. Raises ConfigError if there is none."""
    if not isinstance(fields, Mapping):
        raise ConfigError(f"config.json must hold an object, got {type(fields).__name__}")
    kind = fields.get("model_type")
    if isinstance(kind, str):  # the text model of a multimodal one, without its own type
        kind = TEXT_OF.get(kind, f"{kind}_text" if f"{kind}_text" in MODELS else kind)
    if not isinstance(kind, str) or kind not in MODELS:
        raise ConfigError(f"model_type {short(kind)} is not supported{_relative(kind)}; supported: {', '.join(MODELS)}")
    return MODELS[kind][0]


def _relative(kind: Any) -> str:
    """Describe how an unsupported model_type differs from the closest supported one, if one is known."""
    for name, relatives in RELATIVES.items():
        if str(kind).removesuffix("_text") in relatives.split():
            module = MODELS[name][1].__module__.rpartition(".")[2]
            return (
                f", since its layers are not those of {name}, its closest relative: with another model_type it would "
                f"compute something else. A family can be added, see models/README.md and models/{module}.py"
            )
    return ""


def preset(name: str | os.PathLike[str]) -> DecoderConfig | None:
    """The preset of that name; None if there is none, or if a folder of that name exists."""
    is_path = isinstance(name, str | os.PathLike)
    return PRESETS.get(str(name).lower()) if is_path and not os.path.isdir(name) else None


def near_presets(name: str | os.PathLike[str]) -> str:
    """Hint for an unknown model: the presets with the nearest names, or the command that lists all presets."""
    near = did_you_mean(str(name), PRESETS, 3)
    return near or "; nnxmoe inspect --help lists the presets, which need no files"


def refuse_preset(name: str | os.PathLike[str]) -> None:
    """Raise ConfigError if weights are asked of a preset, which has none, with the hub id that has them."""
    if preset(name) is not None:
        where = HUB_IDS.get(str(name).lower(), "its name on the hub, such as 'org/name'")
        raise ConfigError(f"{name} is a preset, a config without weights: give {where}, or a folder")


def is_registered(model: CausalLM) -> bool:
    """Whether loading the config of a model builds a model of its class."""
    return MODELS.get(model.config.model_type) == (type(model.config), type(model))


def model_class(config: DecoderConfig) -> type[CausalLM]:
    """The model class of a config."""
    return MODELS[config.model_type][1]
