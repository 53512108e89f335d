"""Model families. ``from nnxmoe.models import Mixtral`` imports only the module of this family."""

if __name__ != "nnxmoe.models":
    raise ImportError(f"import nnxmoe.models, not {__name__}: otherwise every model class would exist twice")

import importlib
from typing import TYPE_CHECKING, Any

from nnxmoe.model.family import Family
from nnxmoe.models.index import MODULE_OF_CLASS
from nnxmoe.models.registry import (
    CHECKPOINT_NOTES,
    FAMILIES,
    HUB_IDS,
    MODELS,
    PRESETS,
    config_class,
    config_from_hf,
    family_of,
    is_registered,
    model_class,
    near_presets,
    parse_config,
    preset,
    refuse_preset,
    register,
)

if TYPE_CHECKING:
    from nnxmoe.models.afmoe import Afmoe, AfmoeConfig
    from nnxmoe.models.bailing_hybrid import BailingHybrid, BailingHybridConfig
    from nnxmoe.models.deepseek_v2 import DeepSeekV2, DeepSeekV2Config
    from nnxmoe.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
    from nnxmoe.models.deepseek_v4 import DeepSeekV4, DeepSeekV4Config
    from nnxmoe.models.deepseek_v32 import DeepSeekV32, DeepSeekV32Config
    from nnxmoe.models.deepseek_v41 import DeepSeekV41, DeepSeekV41TextConfig
    from nnxmoe.models.dots1 import Dots1, Dots1Config
    from nnxmoe.models.ernie4_5_moe import Ernie45Moe, Ernie45MoeConfig, Ernie45VLMoeTextConfig
    from nnxmoe.models.exaone4 import Exaone4, Exaone4Config
    from nnxmoe.models.exaone_moe import ExaoneMoe, ExaoneMoeConfig
    from nnxmoe.models.gemma3 import Gemma3Text, Gemma3TextConfig
    from nnxmoe.models.gemma4 import Gemma4Text, Gemma4TextConfig
    from nnxmoe.models.glm4_moe import Glm4Moe, Glm4MoeConfig, Glm4vMoeTextConfig
    from nnxmoe.models.glm4_moe_lite import Glm4MoeLite, Glm4MoeLiteConfig
    from nnxmoe.models.glm5_next import Glm5NextText, Glm5NextTextConfig
    from nnxmoe.models.glm_moe_dsa import GlmMoeDsa, GlmMoeDsaConfig
    from nnxmoe.models.gpt_oss import GptOss, GptOssConfig
    from nnxmoe.models.granite import (
        Granite,
        GraniteConfig,
        GraniteMoe,
        GraniteMoeConfig,
        GraniteMoeSharedConfig,
    )
    from nnxmoe.models.granitemoehybrid import GraniteMoeHybrid, GraniteMoeHybridConfig
    from nnxmoe.models.hy_v3 import HyV3, HyV3Config
    from nnxmoe.models.hy_v4 import HyV4, HyV4Config, HyV4VLTextConfig
    from nnxmoe.models.kimi_k2 import KimiK2, KimiK2Config
    from nnxmoe.models.kimi_k3 import KimiK3, KimiK3Config
    from nnxmoe.models.kimi_linear import KimiLinear, KimiLinearConfig
    from nnxmoe.models.laguna import Laguna, LagunaConfig
    from nnxmoe.models.lfm2 import Lfm2, Lfm2Config, Lfm2MoeConfig
    from nnxmoe.models.llama import Llama, LlamaConfig, MistralConfig
    from nnxmoe.models.mellum import Mellum, MellumConfig
    from nnxmoe.models.mimo_v2_flash import MiMoV2Flash, MiMoV2FlashConfig
    from nnxmoe.models.minimax_m2 import MiniMaxM2, MiniMaxM2Config
    from nnxmoe.models.minimax_m3 import MiniMaxM3VLText, MiniMaxM3VLTextConfig
    from nnxmoe.models.ministral3 import Ministral3, Ministral3Config
    from nnxmoe.models.mistral4 import Mistral4, Mistral4Config
    from nnxmoe.models.mixtral import Mixtral, MixtralConfig
    from nnxmoe.models.nemotron_h import NemotronH, NemotronHConfig
    from nnxmoe.models.olmo3 import Olmo3, Olmo3Config
    from nnxmoe.models.olmoe import Olmoe, OlmoeConfig
    from nnxmoe.models.phi3 import Phi3, Phi3Config
    from nnxmoe.models.qwen import Qwen2, Qwen2Config, Qwen3, Qwen3Config
    from nnxmoe.models.qwen2_moe import Qwen2Moe, Qwen2MoeConfig
    from nnxmoe.models.qwen3_5 import Qwen3_5MoeText, Qwen3_5MoeTextConfig, Qwen3_5Text, Qwen3_5TextConfig
    from nnxmoe.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
    from nnxmoe.models.qwen3_next import Qwen3Next, Qwen3NextConfig
    from nnxmoe.models.qwen3_vl import (
        Qwen3OmniMoeTextConfig,
        Qwen3VLMoeText,
        Qwen3VLMoeTextConfig,
        Qwen3VLText,
        Qwen3VLTextConfig,
    )
    from nnxmoe.models.qwen4_exp import Qwen4ExpText, Qwen4ExpTextConfig
    from nnxmoe.models.sarvam_mla import SarvamMLA, SarvamMLAConfig
    from nnxmoe.models.sarvam_moe import SarvamMoE, SarvamMoEConfig
    from nnxmoe.models.smollm3 import SmolLM3, SmolLM3Config
    from nnxmoe.models.solar_open import SolarOpen, SolarOpenConfig
    from nnxmoe.models.step3p5 import Step3p5, Step3p5Config

__all__ = [
    "CHECKPOINT_NOTES", "FAMILIES", "HUB_IDS", "MODELS", "PRESETS", "Afmoe", "AfmoeConfig", "BailingHybrid",
    "BailingHybridConfig", "DeepSeekV2", "DeepSeekV2Config", "DeepSeekV3", "DeepSeekV3Config", "DeepSeekV4",
    "DeepSeekV4Config", "DeepSeekV32", "DeepSeekV32Config", "DeepSeekV41", "DeepSeekV41TextConfig", "Dots1",
    "Dots1Config", "Ernie45Moe", "Ernie45MoeConfig", "Ernie45VLMoeTextConfig", "Exaone4", "Exaone4Config",
    "ExaoneMoe", "ExaoneMoeConfig", "Family", "Gemma3Text", "Gemma3TextConfig", "Gemma4Text", "Gemma4TextConfig",
    "Glm4Moe", "Glm4MoeConfig", "Glm4MoeLite", "Glm4MoeLiteConfig", "Glm4vMoeTextConfig", "Glm5NextText",
    "Glm5NextTextConfig", "GlmMoeDsa", "GlmMoeDsaConfig", "GptOss", "GptOssConfig", "Granite", "GraniteConfig",
    "GraniteMoe", "GraniteMoeConfig", "GraniteMoeHybrid", "GraniteMoeHybridConfig", "GraniteMoeSharedConfig",
    "HyV3", "HyV3Config", "HyV4", "HyV4Config", "HyV4VLTextConfig", "KimiK2", "KimiK2Config", "KimiK3",
    "KimiK3Config", "KimiLinear", "KimiLinearConfig", "Laguna", "LagunaConfig", "Lfm2", "Lfm2Config",
    "Lfm2MoeConfig", "Llama", "LlamaConfig", "Mellum", "MellumConfig", "MiMoV2Flash", "MiMoV2FlashConfig",
    "MiniMaxM2", "MiniMaxM2Config", "MiniMaxM3VLText", "MiniMaxM3VLTextConfig", "Ministral3", "Ministral3Config",
    "Mistral4", "Mistral4Config", "MistralConfig", "Mixtral", "MixtralConfig", "NemotronH", "NemotronHConfig",
    "Olmo3", "Olmo3Config", "Olmoe", "OlmoeConfig", "Phi3", "Phi3Config", "Qwen2", "Qwen2Config", "Qwen2Moe",
    "Qwen2MoeConfig", "Qwen3", "Qwen3Config", "Qwen3Moe", "Qwen3MoeConfig", "Qwen3Next", "Qwen3NextConfig",
    "Qwen3OmniMoeTextConfig", "Qwen3VLMoeText", "Qwen3VLMoeTextConfig", "Qwen3VLText", "Qwen3VLTextConfig",
    "Qwen3_5MoeText", "Qwen3_5MoeTextConfig", "Qwen3_5Text", "Qwen3_5TextConfig", "Qwen4ExpText",
    "Qwen4ExpTextConfig", "SarvamMLA", "SarvamMLAConfig", "SarvamMoE", "SarvamMoEConfig", "SmolLM3",
    "SmolLM3Config", "SolarOpen", "SolarOpenConfig", "Step3p5", "Step3p5Config", "config_class", "config_from_hf",
    "family_of", "is_registered", "model_class", "near_presets", "parse_config", "preset", "refuse_preset",
    "register",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the module of a model class or config: ``from nnxmoe.models import Mixtral``."""
    if name not in MODULE_OF_CLASS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULE_OF_CLASS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULE_OF_CLASS})
