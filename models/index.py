"""Index of the model modules. `nnxmoe.models` imports each module on first use.

``tests/models/test_registry.py`` compares the index with the modules.
"""

from typing import NamedTuple


class ModuleEntry(NamedTuple):
    """Contents of a module. Each attribute is a list of names separated by spaces.

    Attributes:
        model_types: The ``model_type`` of each config.
        classes: Model classes and config classes.
        architectures: Accepted class names in config.json, from transformers or from published files.
    """

    model_types: str
    classes: str
    architectures: str


MODULES: dict[str, ModuleEntry] = {
    "llama": ModuleEntry("llama mistral", "Llama LlamaConfig MistralConfig", "LlamaForCausalLM MistralForCausalLM"),
    "mixtral": ModuleEntry("mixtral", "Mixtral MixtralConfig", "MixtralForCausalLM"),
    "deepseek_v3": ModuleEntry("deepseek_v3", "DeepSeekV3 DeepSeekV3Config", "DeepseekV3ForCausalLM"),
    "deepseek_v2": ModuleEntry("deepseek_v2", "DeepSeekV2 DeepSeekV2Config", "DeepseekV2ForCausalLM"),
    "kimi_k2": ModuleEntry("kimi_k2", "KimiK2 KimiK2Config", "DeepseekV3ForCausalLM"),
    "glm4_moe_lite": ModuleEntry("glm4_moe_lite", "Glm4MoeLite Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"),
    "glm4_moe": ModuleEntry(
        "glm4_moe glm4v_moe_text", "Glm4Moe Glm4MoeConfig Glm4vMoeTextConfig", "Glm4MoeForCausalLM"
    ),
    "dots1": ModuleEntry("dots1", "Dots1 Dots1Config", "Dots1ForCausalLM"),
    "solar_open": ModuleEntry("solar_open", "SolarOpen SolarOpenConfig", "SolarOpenForCausalLM"),
    "minimax_m2": ModuleEntry("minimax_m2", "MiniMaxM2 MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
    "qwen": ModuleEntry("qwen2 qwen3", "Qwen2 Qwen2Config Qwen3 Qwen3Config", "Qwen2ForCausalLM Qwen3ForCausalLM"),
    "qwen2_moe": ModuleEntry("qwen2_moe", "Qwen2Moe Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ModuleEntry("qwen3_moe", "Qwen3Moe Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "olmoe": ModuleEntry("olmoe", "Olmoe OlmoeConfig", "OlmoeForCausalLM"),
    "gpt_oss": ModuleEntry("gpt_oss", "GptOss GptOssConfig", "GptOssForCausalLM"),
    "hy_v3": ModuleEntry("hy_v3", "HyV3 HyV3Config", "HYV3ForCausalLM"),
    "deepseek_v32": ModuleEntry("deepseek_v32", "DeepSeekV32 DeepSeekV32Config", "DeepseekV32ForCausalLM"),
    "glm_moe_dsa": ModuleEntry("glm_moe_dsa", "GlmMoeDsa GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"),
    "hy_v4": ModuleEntry("hy_v4 hy_v4_vl_text", "HyV4 HyV4Config HyV4VLTextConfig", "HYV4ForCausalLM"),
    "deepseek_v4": ModuleEntry("deepseek_v4", "DeepSeekV4 DeepSeekV4Config", "DeepseekV4ForCausalLM"),
    "deepseek_v41": ModuleEntry("deepseek_v41_text", "DeepSeekV41 DeepSeekV41TextConfig", "DeepseekV41ForCausalLM"),
    "qwen3_vl": ModuleEntry(
        "qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text",
        "Qwen3VLText Qwen3VLTextConfig Qwen3VLMoeText Qwen3VLMoeTextConfig Qwen3OmniMoeTextConfig",
        "Qwen3ForCausalLM Qwen3MoeForCausalLM",
    ),
    "sarvam_mla": ModuleEntry("sarvam_mla", "SarvamMLA SarvamMLAConfig", "SarvamMLAForCausalLM"),
    "sarvam_moe": ModuleEntry("sarvam_moe", "SarvamMoE SarvamMoEConfig", "SarvamMoEForCausalLM"),
    "ministral3": ModuleEntry("ministral3", "Ministral3 Ministral3Config", "Ministral3ForCausalLM"),
    "mistral4": ModuleEntry("mistral4", "Mistral4 Mistral4Config", "Mistral4ForCausalLM"),
    "exaone_moe": ModuleEntry("exaone_moe", "ExaoneMoe ExaoneMoeConfig", "ExaoneMoeForCausalLM"),
    "mellum": ModuleEntry("mellum", "Mellum MellumConfig", "MellumForCausalLM"),
    "afmoe": ModuleEntry("afmoe", "Afmoe AfmoeConfig", "AfmoeForCausalLM"),
    "ernie4_5_moe": ModuleEntry(
        "ernie4_5_moe ernie4_5_vl_moe_text",
        "Ernie45Moe Ernie45MoeConfig Ernie45VLMoeTextConfig",
        "Ernie4_5_MoeForCausalLM",
    ),
    "gemma4": ModuleEntry("gemma4_text", "Gemma4Text Gemma4TextConfig", "Gemma4ForCausalLM"),
    "mimo_v2_flash": ModuleEntry("mimo_v2_flash", "MiMoV2Flash MiMoV2FlashConfig", "MiMoV2FlashForCausalLM"),
    "laguna": ModuleEntry("laguna", "Laguna LagunaConfig", "LagunaForCausalLM"),
    "step3p5": ModuleEntry("step3p5", "Step3p5 Step3p5Config", "Step3p5ForCausalLM"),
    "minimax_m3": ModuleEntry(
        "minimax_m3_vl_text",
        "MiniMaxM3VLText MiniMaxM3VLTextConfig",
        "MiniMaxM3VLForCausalLM MiniMaxM3SparseForCausalLM",
    ),
    "nemotron_h": ModuleEntry("nemotron_h", "NemotronH NemotronHConfig", "NemotronHForCausalLM"),
    "qwen3_next": ModuleEntry("qwen3_next", "Qwen3Next Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5": ModuleEntry(
        "qwen3_5_text qwen3_5_moe_text",
        "Qwen3_5Text Qwen3_5TextConfig Qwen3_5MoeText Qwen3_5MoeTextConfig",
        "Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM",
    ),
    "qwen4_exp": ModuleEntry("qwen4_exp_text", "Qwen4ExpText Qwen4ExpTextConfig", "Qwen4ExpForCausalLM"),
    "kimi_linear": ModuleEntry("kimi_linear", "KimiLinear KimiLinearConfig", "KimiLinearForCausalLM"),
    "kimi_k3": ModuleEntry("kimi_k3", "KimiK3 KimiK3Config", "KimiLinearForCausalLM"),
    "bailing_hybrid": ModuleEntry(
        "bailing_hybrid", "BailingHybrid BailingHybridConfig", "BailingHybridForCausalLM BailingMoeV3ForCausalLM"
    ),
    "glm5_next": ModuleEntry("glm5_next_text", "Glm5NextText Glm5NextTextConfig", "Glm5NextForCausalLM"),
    "granite": ModuleEntry(
        "granite granitemoe granitemoeshared",
        "Granite GraniteConfig GraniteMoe GraniteMoeConfig GraniteMoeSharedConfig",
        "GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM",
    ),
    "granitemoehybrid": ModuleEntry(
        "granitemoehybrid", "GraniteMoeHybrid GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"
    ),
    "lfm2": ModuleEntry("lfm2 lfm2_moe", "Lfm2 Lfm2Config Lfm2MoeConfig", "Lfm2ForCausalLM Lfm2MoeForCausalLM"),
    "smollm3": ModuleEntry("smollm3", "SmolLM3 SmolLM3Config", "SmolLM3ForCausalLM"),
    "olmo3": ModuleEntry("olmo3", "Olmo3 Olmo3Config", "Olmo3ForCausalLM"),
    "phi3": ModuleEntry("phi3", "Phi3 Phi3Config", "Phi3ForCausalLM"),
    "gemma3": ModuleEntry("gemma3_text", "Gemma3Text Gemma3TextConfig", "Gemma3ForCausalLM"),
    "exaone4": ModuleEntry("exaone4", "Exaone4 Exaone4Config", "Exaone4ForCausalLM"),
}
MODULE_OF_TYPE = {name: module for module, entry in MODULES.items() for name in entry.model_types.split()}
MODULE_OF_CLASS = {name: module for module, entry in MODULES.items() for name in entry.classes.split()}
ARCHITECTURES = frozenset(name for entry in MODULES.values() for name in entry.architectures.split())
