"""Drop request fields without effect, and report errors with the field names that the client used."""

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

from nnxmoe.apps.serve.settings import Refused

# Maps fields of OpenAI, vLLM, SGLang, llama.cpp and other servers to the values that have no effect. Fields with these
# values are dropped, as are null and unsupported fields with empty values. Other values of unsupported fields raise
# Refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("allowed_token_ids", "audio", "bad_words", "custom_params", "documents", "ebnf", "extra_body"), ()
    ),
    **dict.fromkeys(("functions", "grammar", "logits_processors", "lora", "max_new_tokens", "mm_processor_kwargs"), ()),
    **dict.fromkeys(
        ("moderation", "n_predict", "plugins", "prediction", "prompt_logprobs", "random_seed", "regex"), ()
    ),
    **dict.fromkeys(("samplers", "stop_regex", "structured_outputs", "suffix", "transforms", "vllm_xargs"), ()),
    **dict.fromkeys(("truncate_prompt_tokens", "web_search_options"), ()),
    **dict.fromkeys(("guided_grammar", "guided_regex"), ("",)),
    "logit_bias": ([], {}),
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim", "return_token_ids"), (False,)),
    **dict.fromkeys(("return_hidden_states", "return_tokens_as_token_ids", "safe_prompt", "store"), (False,)),
    **dict.fromkeys(("timings_per_token", "use_audio_in_video", "use_beam_search", "watermark"), (False,)),
    **dict.fromkeys(("decoder_input_details", "details", "disable_tool_validation", "logits_all"), (False,)),
    **dict.fromkeys(("perf_metrics_in_response", "post_sampling_probs", "raw_output", "return_tokens"), (False,)),
    **dict.fromkeys(("return_cached_tokens_details", "return_completion_token_ids", "return_full_text"), (False,)),
    **dict.fromkeys(("return_progress", "return_prompt_token_ids", "thinking_forced_open"), (False,)),
    **dict.fromkeys(("detokenize", "include_reasoning", "parse_tool_calls", "separate_reasoning"), (True,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "stream_reasoning"), (True,)),
    **dict.fromkeys(("dry_multiplier", "dynatemp_range", "mirostat", "n_keep", "n_probs", "priority", "top_a"), (0,)),
    **dict.fromkeys(("min_new_tokens", "n_discard", "n_indent", "no_repeat_ngram_size", "top_n_tokens"), (0,)),
    "t_max_predict_ms": (0, -1),
    "xtc_probability": (0,),
    **dict.fromkeys(("adaptive_target", "thinking_token_budget", "top_n_sigma"), (-1,)),
    **dict.fromkeys(("num_beams", "repeat_penalty", "tfs_z", "typ_p", "typical_p"), (1,)),
    "do_sample": (True,),
    "function_call": ("none", "auto"),
    "guided_choice": ([],),
    "modalities": (["text"],),
    "reasoning_format": ("auto",),
    "response_format": ({"type": "text"}, {}),
    "service_tier": ("auto", "default"),
    "usage": ({"include": False},),
    "verbosity": ("medium",),
}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "echo": (False,),
    **dict.fromkeys(("enable_thinking", "prompt", "think", "thinking"), ()),
    "tool_choice": ({},),
}
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "chat_template_kwargs": (),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "messages": (),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "top_logprobs": (0,),
}
# Fields that never affect the answer. Some set the strength of a sampling method that is not supported.
LABELS = {"cache_prompt", "cache_salt", "keep_alive", "metadata", "prompt_cache_key", "prompt_cache_options"}
LABELS |= {"prompt_cache_retention", "request_id", "rid", "safety_identifier", "user"}
LABELS |= {"dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent"}
LABELS |= {"early_stopping", "length_penalty", "min_keep", "mirostat_eta", "mirostat_tau", "repeat_last_n"}
LABELS |= {"extra_key", "guided_decoding_backend", "id_slot", "session_id", "ttl", "xtc_threshold"}
CACHE = "cache_control"  # Anthropic's field in messages, parts and tools. Caching does not affect answers.
_INSTEAD: Mapping[str, str] = {
    "allowed_token_ids": "logit_bias",
    "bad_words": "logit_bias",
    "ebnf": "guided_grammar",
    "function_call": "tool_choice",
    "functions": "tools",
    "grammar": "guided_grammar",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "prompt": "messages",
    "random_seed": "seed",
    "regex": "guided_regex",
    "repeat_penalty": "repetition_penalty",
    "structured_outputs": "response_format",
    **dict.fromkeys(("enable_thinking", "think", "thinking"), "chat_template_kwargs"),
    **dict.fromkeys(("messages", "tools", "tool_choice"), "/v1/chat/completions"),
}
_TOOL = 'write {"type": "function", "function": {"name": …, "description": …, "parameters": …}}'
_REMEDIES: Mapping[str, str] = {  # remedy by path, also for nested fields
    "messages": 'send [{"role": …, "content": …}]',
    "messages[]": 'send {"role": …, "content": …}',
    "messages[].content": 'send a text, or text parts {"type": "text", "text": …}',
    "response_format": 'send {"type": "json_object"}, or "json_schema" with {"json_schema": {"schema": …}}',
    "stream_options": "send include_usage and continuous_usage_stats only",
    "tool_choice": 'send "none", "auto", "required" (any tool) or {"type": "function", "function": {"name": …}}',
    "tools": "send a list of tools",
    "tools[]": _TOOL,
    "tools[].function.name": 'use 1 to 64 letters, digits, "_", "." and "-"',
}
_TYPES: Mapping[str, str] = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a string",
}
_NESTED: Mapping[str, str] = {"response_format": "json_schema", "tools": "function", "tool_choice": "function"}


def effective(body: Mapping[str, Any], supported_fields: Collection[str], chat: bool) -> dict[str, Any]:
    """Return the fields of a body that have an effect. Also drops nested fields without effect.

    Args:
        body: The decoded request body.
        supported_fields: Names of the fields that the endpoint supports.
        chat: Whether the endpoint is ``/v1/chat/completions``.

    Raises:
        Refused: If an unsupported field has a value with an effect.
    """
    table = NEUTRAL | (CHAT_NEUTRAL if chat else COMPLETION_NEUTRAL)
    fields = {
        name: value
        for name, value in body.items()
        if value is not None and (name in supported_fields or value not in ("", [], {}))
    }
    for name in fields.keys() & table.keys():
        value = _without_null(fields[name]) if name in _NESTED else fields[name]
        if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in table[name]):
            del fields[name]
        elif name not in supported_fields:
            hint = f", or use {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise Refused(400, f"{name} is not supported: leave it out{hint}", name)
    for name in fields.keys() & {"stream_options", *_NESTED}:
        fields[name] = _without_null(fields[name], _NESTED.get(name))
    return fields


def _without_null(value: Any, child: str | None = None) -> Any:
    """Drop fields without effect from an object or a list of objects.

    Also drops them from the objects in the field ``child``.
    """
    if isinstance(value, list):
        return [_without_null(item, child) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {name: item for name, item in value.items() if item is not None and name != CACHE}
    return fields | ({child: _without_null(fields[child])} if child in fields else {})


def content_parts(content: Any) -> Any:
    """Drop fields without effect from the parts of a message's content."""
    return _without_null(content) if isinstance(content, list) else content


def refusal(message: str, supported_fields: Collection[str]) -> Refused:
    """Convert an error message of msgspec to Refused.

    The new message has the name that the client used for the field, and a remedy.
    """
    problem, _, location = message.partition(" - at ")
    path = location.rpartition("$")[2].rstrip("`").lstrip(".")
    if match := re.search(r"unknown field `(.*)`", problem):
        name = f"{path}.{match[1]}" if path else match[1]
        close_names = [] if path else difflib.get_close_matches(name, supported_fields, 1, cutoff=0.75)
        remedy = _remedy(path) or (f"did you mean {close_names[0]}?" if close_names else "leave it out")
        return Refused(400, f"{name} is not a field of this API: {remedy}", match[1])
    if match := re.search(r"required field `(\w+)`", problem):
        name = f"{path}.{match[1]}" if path else match[1]
        return Refused(400, _with(f"{name} is missing", _remedy(name)), match[1])
    is_key = location.startswith("`key`")
    name = f"a key of {path}" if is_key else path or "the body"
    param = re.match(r"\w+", path)
    if match := re.match(r"Invalid enum value (.*)", problem):
        text = f"{name} {match[1]} is not supported"
    elif match := re.match(r"Expected (.*?)(?:, got `(\w+)`)?$", problem):
        expected_types = re.sub(r"`([^`]*)`", lambda types: _listed(types[1]), match[1])
        is_fraction = match[2] == "float" and "int" in match[1]
        got_type = "a number with a fraction" if is_fraction else _listed(match[2] or "null")
        text = f"{name} must be {expected_types}" + (f", not {got_type}" if match[2] else "")
        if match[2] == "str" and not is_key and match[1].startswith(("`int", "`float", "`bool")):
            return Refused(400, text + ": write it without quotes", param[0] if param else None)
    else:
        text = f"{name}: {problem}"
    return Refused(400, _with(text, _remedy(path)), param[0] if param else None)


def _remedy(path: str) -> str:
    """Return the remedy for a path or for the innermost enclosing path that has a remedy, else ""."""
    path = re.sub(r"\[[^\]]*\]", "[]", path)
    while path and path not in _REMEDIES:
        path = path[: max(path.rfind("."), path.rfind("[]"), 0)]
    return _REMEDIES.get(path, "")


def _with(text: str, remedy: str) -> str:
    return f"{text}: {remedy}" if remedy else text


def _listed(types: str) -> str:
    """Describe JSON types in words."""
    names = [_TYPES.get(name.strip(), name.strip()) for name in types.split("|") if name.strip() != "null"]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names or ["null"])
