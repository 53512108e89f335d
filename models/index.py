"""Index of the model modules, from which `nnxmoe.models` imports each module on first use.

``tests/models/test_registry.py`` compares the index with the modules.
"""

from typing import NamedTuple


class ModuleEntry(NamedTuple):
    """Contents of a module. Each attribute is a list of names separated by spaces.

    Attributes:
        model_types: The ``model_type`` of each config.
        classes: Model classes and config classes.
        architectures: Class names in transformers.
        presets: Names of presets.
    """

    model_types: str
    classes: str
    architectures: str
    presets: str = ""


MODULES: dict[str, ModuleEntry] = {
    "llama": ModuleEntry(
        "llama mistral",
        "Llama LlamaConfig MistralConfig",
        "LlamaForCausalLM MistralForCausalLM",
        "llama-3.1-8b llama-3.1-70b llama-3.1-405b llama-3.2-1b mistral-7b-v0.1 mistral-7b-v0.3 mistral-small-3.1-24b",
    ),
    "mixtral": ModuleEntry("mixtral", "Mixtral MixtralConfig", "MixtralForCausalLM", "mixtral-8x7b mixtral-8x22b"),
    "deepseek_v3": ModuleEntry(
        "deepseek_v3", "DeepSeekV3 DeepSeekV3Config", "DeepseekV3ForCausalLM", "deepseek-v3 deepseek-r1"
    ),
    "deepseek_v2": ModuleEntry(
        "deepseek_v2", "DeepSeekV2 DeepSeekV2Config", "DeepseekV2ForCausalLM", "deepseek-v2 deepseek-v2-lite"
    ),
    "kimi_k2": ModuleEntry(
        "kimi_k2", "KimiK2 KimiK2Config", "DeepseekV3ForCausalLM", "kimi-k2 kimi-k2.5 kimi-k2.7-code moonlight-16b-a3b"
    ),
    "glm4_moe_lite": ModuleEntry(
        "glm4_moe_lite", "Glm4MoeLite Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", "glm-4.7-flash"
    ),
    "glm4_moe": ModuleEntry(
        "glm4_moe glm4v_moe_text",
        "Glm4Moe Glm4MoeConfig Glm4vMoeTextConfig",
        "Glm4MoeForCausalLM",
        "glm-4.5-air glm-4.5 glm-4.6 glm-4.7 glm-4.5v",
    ),
    "dots1": ModuleEntry("dots1", "Dots1 Dots1Config", "Dots1ForCausalLM", "dots.llm1"),
    "solar_open": ModuleEntry("solar_open", "SolarOpen SolarOpenConfig", "SolarOpenForCausalLM", "solar-open-100b"),
    "minimax_m2": ModuleEntry("minimax_m2", "MiniMaxM2 MiniMaxM2Config", "MiniMaxM2ForCausalLM", "minimax-m2"),
    "qwen": ModuleEntry(
        "qwen2 qwen3",
        "Qwen2 Qwen2Config Qwen3 Qwen3Config",
        "Qwen2ForCausalLM Qwen3ForCausalLM",
        "qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b qwen2.5-72b qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b "
        "qwen3-14b qwen3-32b",
    ),
    "qwen2_moe": ModuleEntry(
        "qwen2_moe", "Qwen2Moe Qwen2MoeConfig", "Qwen2MoeForCausalLM", "qwen1.5-moe-a2.7b qwen2-57b-a14b"
    ),
    "qwen3_moe": ModuleEntry(
        "qwen3_moe",
        "Qwen3Moe Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        "qwen3-30b-a3b qwen3-235b-a22b qwen3-coder-30b-a3b qwen3-coder-480b-a35b",
    ),
    "olmoe": ModuleEntry("olmoe", "Olmoe OlmoeConfig", "OlmoeForCausalLM", "olmoe-1b-7b"),
    "gpt_oss": ModuleEntry("gpt_oss", "GptOss GptOssConfig", "GptOssForCausalLM", "gpt-oss-120b gpt-oss-20b"),
    "hy_v3": ModuleEntry("hy_v3", "HyV3 HyV3Config", "HYV3ForCausalLM", "hy3"),
    "deepseek_v32": ModuleEntry(
        "deepseek_v32", "DeepSeekV32 DeepSeekV32Config", "DeepseekV32ForCausalLM", "deepseek-v3.2-exp deepseek-v3.2"
    ),
    "glm_moe_dsa": ModuleEntry(
        "glm_moe_dsa", "GlmMoeDsa GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", "glm-5 glm-5.2 glm-5.3"
    ),
    "hy_v4": ModuleEntry("hy_v4 hy_v4_vl_text", "HyV4 HyV4Config HyV4VLTextConfig", "HYV4ForCausalLM", "hy4-preview"),
    "deepseek_v4": ModuleEntry(
        "deepseek_v4",
        "DeepSeekV4 DeepSeekV4Config",
        "DeepseekV4ForCausalLM",
        "deepseek-v4-flash deepseek-v4-flash-0731 deepseek-v4-pro deepseek-v4-pro-0813",
    ),
    "qwen3_vl": ModuleEntry(
        "qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text",
        "Qwen3VLText Qwen3VLTextConfig Qwen3VLMoeText Qwen3VLMoeTextConfig Qwen3OmniMoeTextConfig",
        "Qwen3ForCausalLM Qwen3MoeForCausalLM",
        "qwen3-vl-2b qwen3-vl-4b qwen3-vl-8b qwen3-vl-30b-a3b qwen3-omni-30b-a3b",
    ),
    "sarvam_mla": ModuleEntry("sarvam_mla", "SarvamMLA SarvamMLAConfig", "SarvamMLAForCausalLM", "sarvam-105b"),
    "sarvam_moe": ModuleEntry("sarvam_moe", "SarvamMoE SarvamMoEConfig", "SarvamMoEForCausalLM", "sarvam-30b"),
    "ministral3": ModuleEntry("ministral3", "Ministral3 Ministral3Config", "Ministral3ForCausalLM", "ministral-3-8b"),
    "mistral4": ModuleEntry("mistral4", "Mistral4 Mistral4Config", "Mistral4ForCausalLM", "mistral-small-4"),
    "exaone_moe": ModuleEntry("exaone_moe", "ExaoneMoe ExaoneMoeConfig", "ExaoneMoeForCausalLM", "k-exaone-236b-a23b"),
    "mellum": ModuleEntry("mellum", "Mellum MellumConfig", "MellumForCausalLM", "mellum2-12b-a2.5b"),
    "afmoe": ModuleEntry("afmoe", "Afmoe AfmoeConfig", "AfmoeForCausalLM", "trinity-nano trinity-mini"),
    "ernie4_5_moe": ModuleEntry(
        "ernie4_5_moe ernie4_5_vl_moe_text",
        "Ernie45Moe Ernie45MoeConfig Ernie45VLMoeTextConfig",
        "Ernie4_5_MoeForCausalLM",
        "ernie-4.5-21b-a3b ernie-4.5-vl-28b-a3b",
    ),
    "gemma4": ModuleEntry(
        "gemma4_text", "Gemma4Text Gemma4TextConfig", "Gemma4ForCausalLM", "gemma-4-26b-a4b gemma-4-31b"
    ),
    "mimo_v2_flash": ModuleEntry(
        "mimo_v2_flash", "MiMoV2Flash MiMoV2FlashConfig", "MiMoV2FlashForCausalLM", "mimo-v2-flash"
    ),
    "laguna": ModuleEntry("laguna", "Laguna LagunaConfig", "LagunaForCausalLM"),
    "step3p5": ModuleEntry("step3p5", "Step3p5 Step3p5Config", "Step3p5ForCausalLM", "step-3.5-flash"),
    "minimax_m3": ModuleEntry(
        "minimax_m3_vl_text",
        "MiniMaxM3VLText MiniMaxM3VLTextConfig",
        "MiniMaxM3VLForCausalLM MiniMaxM3SparseForCausalLM",
        "minimax-m3",
    ),
    "nemotron_h": ModuleEntry(
        "nemotron_h",
        "NemotronH NemotronHConfig",
        "NemotronHForCausalLM",
        "nemotron-3-nano-30b-a3b nemotron-3.5-lightning-30b-a3b",
    ),
    "qwen3_next": ModuleEntry("qwen3_next", "Qwen3Next Qwen3NextConfig", "Qwen3NextForCausalLM", "qwen3-next-80b-a3b"),
    "qwen3_5": ModuleEntry(
        "qwen3_5_text qwen3_5_moe_text",
        "Qwen3_5Text Qwen3_5TextConfig Qwen3_5MoeText Qwen3_5MoeTextConfig",
        "Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM",
        "qwen3.8-27b qwen3.5-35b-a3b qwen3.5-397b-a17b qwen3.8-2.4t-a95b",
    ),
    "qwen4_exp": ModuleEntry(
        "qwen4_exp_text", "Qwen4ExpText Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", "qwen3.8-flash-next"
    ),
    "kimi_linear": ModuleEntry(
        "kimi_linear", "KimiLinear KimiLinearConfig", "KimiLinearForCausalLM", "kimi-linear-48b-a3b"
    ),
    "kimi_k3": ModuleEntry("kimi_k3", "KimiK3 KimiK3Config", "KimiLinearForCausalLM", "kimi-k3"),
    "bailing_hybrid": ModuleEntry(
        "bailing_hybrid",
        "BailingHybrid BailingHybridConfig",
        "BailingHybridForCausalLM BailingMoeV3ForCausalLM",
        "ling-3.0-flash ling-3.0-tiny",
    ),
    "glm5_next": ModuleEntry(
        "glm5_next_text", "Glm5NextText Glm5NextTextConfig", "Glm5NextForCausalLM", "glm-5.3-flash"
    ),
    "granite": ModuleEntry(
        "granite granitemoe granitemoeshared",
        "Granite GraniteConfig GraniteMoe GraniteMoeConfig GraniteMoeSharedConfig",
        "GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM",
        "granite-3.3-8b granite-3.1-1b-a400m",
    ),
    "granitemoehybrid": ModuleEntry(
        "granitemoehybrid",
        "GraniteMoeHybrid GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        "granite-4.0-h-350m",
    ),
    "lfm2": ModuleEntry(
        "lfm2 lfm2_moe",
        "Lfm2 Lfm2Config Lfm2MoeConfig",
        "Lfm2ForCausalLM Lfm2MoeForCausalLM",
        "lfm2-1.2b lfm2.5-2.6b lfm2-8b-a1b",
    ),
    "smollm3": ModuleEntry("smollm3", "SmolLM3 SmolLM3Config", "SmolLM3ForCausalLM", "smollm3-3b"),
    "olmo3": ModuleEntry("olmo3", "Olmo3 Olmo3Config", "Olmo3ForCausalLM", "olmo-3-7b olmo-3-32b"),
    "phi3": ModuleEntry("phi3", "Phi3 Phi3Config", "Phi3ForCausalLM", "phi-4 phi-4-mini"),
    "gemma3": ModuleEntry(
        "gemma3_text",
        "Gemma3Text Gemma3TextConfig",
        "Gemma3ForCausalLM",
        "gemma-3-270m gemma-3-1b gemma-3-4b gemma-3-12b gemma-3-27b",
    ),
    "exaone4": ModuleEntry("exaone4", "Exaone4 Exaone4Config", "Exaone4ForCausalLM", "exaone-4.0-1.2b exaone-4.0-32b"),
}
MODULE_OF_TYPE = {name: module for module, entry in MODULES.items() for name in entry.model_types.split()}
MODULE_OF_CLASS = {name: module for module, entry in MODULES.items() for name in entry.classes.split()}
MODULE_OF_PRESET = {name: module for module, entry in MODULES.items() for name in entry.presets.split()}
ARCHITECTURES = frozenset(name for entry in MODULES.values() for name in entry.architectures.split())
