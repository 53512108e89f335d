"""Types and ranges of the fields of a config.json: a config must not make us loop or allocate beyond reason."""

import math
from collections.abc import Mapping
from typing import Any

from nnxmoe.storage.files import short


class ConfigError(ValueError):
    """A field of a model's configuration that cannot be right, or that asks for what is not computed here."""


# The largest counts, far beyond known models; a count that is not listed may reach 2**31 - 1.
LARGEST = {
    "num_hidden_layers": 1024,
    "num_local_experts": 4096,
    "n_routed_experts": 4096,
    "n_shared_experts": 4096,
    "num_nextn_predict_layers": 1024,
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "moe_intermediate_size": 2**24,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**16,
    "q_lora_rank": 2**20,
    "kv_lora_rank": 2**20,
    "qk_nope_head_dim": 2**16,
    "qk_rope_head_dim": 2**16,
    "v_head_dim": 2**16,
}
MOST_EXPERTS = 2**18  # in all layers together

# Numbers lie above the first and reach at most the second.
RANGES = {"rms_norm_eps": (1e-20, 1.0), "rope_theta": (1.0, 1e15), "factor": (1e-3, 1e6)}
_RANGE = (1e-6, 1e6)  # of other numbers
DTYPES = ("float32", "bfloat16", "float16", "float64")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuses what is no integer between ``least`` and the largest count of that name."""
    largest = LARGEST.get(name, 2**31 - 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        kind = "positive" if least else "non-negative"
        raise ConfigError(f"{name} must be a {kind} integer, got {short(value)}")
    if value > largest:
        raise ConfigError(f"{name} {short(value)} is beyond what is supported: at most {largest}")


def check_number(name: str, value: object, where: str = "") -> float:
    """A number within its range, as a float; ConfigError otherwise."""
    above, most = RANGES.get(name, _RANGE)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or value == math.inf:
        raise ConfigError(f"{where}{name} must be a positive number, got {short(value)}")
    if not above < value <= most:
        raise ConfigError(f"{where}{name} {short(value)} is out of range: above {above:g}, at most {most:g}")
    return float(value)


def check_token_ids(fields: Mapping[str, Any], vocab: int) -> None:
    """The ids of special tokens in config.json or generation_config.json lie in the vocabulary.

    null: there is none; so, in older files, is a pad id of -1. Several eos ids may be given.
    """
    for name in TOKEN_IDS:
        value = fields.get(name)
        if value is None or (name == "pad_token_id" and type(value) is int and value == -1):
            continue
        several = isinstance(value, list | tuple) and name == "eos_token_id" and len(value) > 0
        for one in value if several else (value,):  # pyright: ignore[reportGeneralTypeIssues]
            if type(one) is not int or not 0 <= one < vocab:
                raise ConfigError(f"{name} {short(value)} must lie in the vocabulary, 0 to {vocab - 1}, or be null")
