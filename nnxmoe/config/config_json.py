"""Checks of a complete config.json: nested text models, unknown fields and unsupported model types.

transformers selects the config class by ``model_type``. The class reads the fields that it declares. Code shared by
all classes reads additional fields. `tests/support/declared.py` lists both sets. Unknown fields that the shared code
reads raise ConfigError unless their value has no effect. All other unknown fields are only reported.
"""

import re
from collections.abc import Mapping, Set
from typing import Any

from nnxmoe.config.bounds import ConfigError, is_one_of
from nnxmoe.config.printable import short, some

# Fields that the shared code of transformers 5.24 reads -> the values without effect.
SHARED: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, True),  # if false, every token attends to all tokens
    "is_encoder_decoder": (None, False),
    "sliding_window": (None,),  # Caches drop keys outside the window.
    "attention_chunk_size": (None,),  # Caches drop keys outside the chunk.
    "layer_types": (None,),
    "mtp_layer_types": (None,),
    "kv_sharing_modes": (None, []),
    "per_layer_config": (None, {}),
    "attribute_map": (None, {}),
    "text_config": (None,),
    "decoder": (None,),
    "generator": (None,),
    "cache_implementation": (None, "dynamic", "static", "offloaded", "offloaded_static"),
    "vision_feature_select_strategy": (None, "default", "full"),
    "transformers_weights": (None,),  # the name of the weight file
}
# Fields that the shared code reads only for multi-token prediction (PREDICTION) or only for FP8 experts (FP8_EXPERTS).
# Null is their only value without effect.
PREDICTION = (
    "mtp_hidden_states_first chain_hidden_post_norm logits_mup_width_multiplier unpadded_vocab_size "
    "mtp_mlp_layer_types mtp_per_layer_config"
).split()
FP8_EXPERTS = (
    "swiglu_alpha swiglu_limit mlp_gate_softcap mlp_up_softcap hidden_activation moe_intermediate_size num_experts"
).split()
# Fields that never affect the forward pass, in any family.
IGNORED = frozenset(
    """architectures model_type transformers_version torch_dtype _name_or_path _commit_hash
    use_cache pretraining_tp initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop auto_map
    attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    _flash_attn_2_enabled use_flash_attn use_flash_attention_2 trust_remote_code output_attentions
    output_hidden_states return_dict use_return_dict task_specific_params is_decoder
    tie_encoder_decoder chunk_size_feed_forward unsloth_version unsloth_fixed quantization_config
    add_cross_attention cross_attention_hidden_size id2label label2id problem_type torchscript pruned_heads
    finetuning_task prefix sep_token_id decoder_start_token_id tokenizer_class model_max_length
    base_model_tp_plan base_model_pp_plan base_model_ep_plan base_model_fsdp_plan gradient_checkpointing
    experts_implementation _experts_implementation num_labels name_or_path _model_name_or_path unk_token_id
    max_sequence_length is_llama_config transformers.js_config use_bfloat16 tf_legacy_loss
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens""".split()
)
_DRAFT = re.compile("draft|eagle|medusa|speculator|hydra|mtp|nextn|dflash|dflare|dspark|domino", re.IGNORECASE)
_DRAFT_FIELDS = ("draft_vocab_size", "dflash_config", "eagle_config", "speculators_config", "speculators_model_type")
# Top-level fields of a multimodal config that apply to the text model if ``text_config`` does not set them.
_TEXT_MODEL_FIELDS = "dtype torch_dtype quantization_config quantization bos_token_id eos_token_id pad_token_id".split()


def text_fields(fields: Any) -> Any:
    """Return the fields of the text model from a multimodal config.json.

    The text model is nested in ``text_config``, and in Qwen3-Omni in ``text_config`` of ``thinker_config``. Returns the
    fields unchanged if there is no nested text model. ``tie_word_embeddings`` is true if any of the
    nested configs sets it, as in transformers.
    """
    if not isinstance(fields, Mapping) or "num_hidden_layers" in fields:
        return fields
    nested = fields.get("text_config") or fields.get("thinker_config")
    if not isinstance(nested, Mapping):
        return fields
    nested = text_fields(nested)
    text = {name: fields[name] for name in _TEXT_MODEL_FIELDS if fields.get(name) is not None}
    text |= {name: value for name, value in nested.items() if value is not None or name not in text}
    text.setdefault("model_type", fields.get("model_type"))
    names = fields.get("architectures")
    if names and not (isinstance(names, list) and all(str(n).endswith("ForConditionalGeneration") for n in names)):
        text["architectures"] = names  # so that `check_architecture` rejects classifiers and similar classes
    if fields.get("tie_word_embeddings"):
        text["tie_word_embeddings"] = True
    return text


def check_architecture(fields: Mapping[str, Any], architectures: Set[str]) -> None:
    """Raise ConfigError unless a config.json describes a supported causal language model with an output head.

    Rejects draft models, classifiers, models without an output head and models quantized by MLX.

    Args:
        fields: The parsed config.json. ``model_type`` selects the family, so ``architectures`` may name a class of a
            different family.
        architectures: Supported class names, ``…ForCausalLM``.
    """
    names = fields.get("architectures")
    if names is not None and not (isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"architectures must be a list of names or null, got {short(names)}")
    supported = {name.lower() for name in architectures}  # files from 2023 name the class LLaMAForCausalLM
    supported_names = [name for name in names or () if name.lower() in supported]
    headless_names = [name for name in names or () if name.lower().removesuffix("model") + "forcausallm" in supported]
    draft_fields = [name for name in _DRAFT_FIELDS if fields.get(name) is not None]
    if draft_fields or (names and not supported_names and any(map(_DRAFT.search, names))):
        evidence = (
            f"{draft_fields[0]} {short(fields[draft_fields[0]])}" if draft_fields else f"architectures {short(names)}"
        )
        raise ConfigError(f"{evidence}: draft models for speculative decoding are not supported")
    if headless_names and not supported_names and not fields.get("tie_word_embeddings"):
        raise ConfigError(f"architectures {short(names)}: models without an output head are not supported")
    if names and not supported_names and not headless_names:
        is_causal = any(name.endswith("ForCausalLM") for name in names)
        reason = "this language model is not supported" if is_causal else "only causal language models are supported"
        raise ConfigError(f"architectures {short(names)}: {reason}")
    for name in ("quantization", "quantization_config"):
        settings = fields.get(name)
        if isinstance(settings, Mapping) and {"group_size", "bits"} <= {*settings} and "quant_method" not in settings:
            raise ConfigError(
                f"{name} {short(settings)}: checkpoints quantized by MLX (mlx-lm) are not supported. Load the original "
                "checkpoint, or a version quantized by a different tool"
            )


def check_unknown_fields(config: Any, unknown_fields: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Raise ConfigError if one of the ``unknown_fields`` of a config.json may change what the model computes.

    Args:
        config: The model's config.
        unknown_fields: Fields that the config class does not declare.
        fields: All fields of the file.
    """
    neutral_values = dict(SHARED)
    if getattr(config, "num_nextn_predict_layers", 0):
        neutral_values |= dict.fromkeys(PREDICTION, (None,))
    settings = fields.get("quantization_config")
    if config.experts and isinstance(settings, Mapping) and settings.get("quant_method") == "fp8":
        neutral_values |= dict.fromkeys(FP8_EXPERTS, (None,))
    neutral_values["layer_types"] += (["full_attention"] * config.num_hidden_layers,)
    for name in neutral_values.keys() & unknown_fields.keys():
        if not is_one_of(unknown_fields[name], neutral_values[name]):
            allowed = ", ".join(short(value) for value in neutral_values[name])
            raise ConfigError(
                f"{name} {short(unknown_fields[name])} is not supported for {config.model_type} models, because "
                f"transformers reads this field. Supported: {allowed}"
            )
    unknown_texts = describe_fields(unknown_fields)
    if unknown_texts and fields.get("auto_map"):
        raise ConfigError(
            f"{some(unknown_texts, 20)}: unknown to {config.model_type} models, but the repository's custom code "
            "(auto_map) may read these fields. Remove the fields if the code does not need them"
        )


def describe_fields(fields: Mapping[str, Any]) -> list[str]:
    """Format field names and values for a message. Omits null, false and empty fields."""
    empty = {name for name, value in fields.items() if value is None or value is False or value in ("", [], {})}
    return [f"{name} {short(value)}" for name, value in sorted(fields.items()) if name not in empty]
