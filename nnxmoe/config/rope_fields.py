"""Reads the rotary embedding from a config's fields, in the styles of transformers 4 and 5."""

from collections.abc import Mapping
from typing import Any

from nnxmoe.config.bounds import ConfigError, Number
from nnxmoe.config.printable import short
from nnxmoe.config.rope import DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope, yarn_mscale

NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
           "attention_factor", "mscale", "mscale_all_dim")  # fmt: skip
_RANGES = {"rope_theta": Number(1.0, 1e15), "factor": Number(1e-3, 1e6)}
FIELDS = frozenset(
    {*NUMBERS, "rope_type", "type", "truncate", "original_max_position_embeddings", "partial_rotary_factor"}
)


def kind_of(fields: Mapping[str, Any]) -> Any:
    """The type of a rope object; ``rope_type`` wins over the older ``type``."""
    given = [fields[name] for name in ("rope_type", "type") if fields.get(name) is not None]
    return given[0] if given else "default"


def rope_from_fields(
    fields: Mapping[str, Any], dim: int, theta: float, positions: int, original: int | None, width: str
) -> Rope:
    """The Rope for a rope object and the top-level fields of the config.

    ``dim``: the rotated width, from the field named ``width``; ``theta``: the default of rope_theta; ``positions``:
    max_position_embeddings; ``original``: the top-level original_max_position_embeddings, which takes precedence.
    """
    kind = kind_of(fields)
    _check_rope_fields(fields)
    if dim % 2:
        raise ConfigError(f"{width}: rotary embedding needs an even width, got {dim}")
    theta = _number(fields, "rope_theta", theta)
    if kind == "default":
        return Rope(dim, theta)
    if kind == "linear":
        return LinearRope(dim, theta, _number(fields, "factor"))
    if kind == "dynamic" and dim < 4:
        raise ConfigError(f"{width}: dynamic rope needs a width of at least 4, got {dim}")
    if kind == "dynamic":
        return DynamicRope(dim, theta, _number(fields, "factor"), positions)
    trained: int = original or fields.get("original_max_position_embeddings") or positions
    if kind == "llama3":
        low, high = _number(fields, "low_freq_factor"), _number(fields, "high_freq_factor")
        if not low < high:
            raise ConfigError(f"rope: low_freq_factor {low} must be below high_freq_factor {high}")
        return Llama3Rope(dim, theta, _number(fields, "factor"), low, high, trained)
    if kind == "yarn":
        if "factor" not in fields:
            raise ConfigError("rope: yarn needs factor: give it, or null for the ratio of the two lengths")
        scale = _number(fields, "factor", positions / trained)
        betas = _number(fields, "beta_fast", 32.0), _number(fields, "beta_slow", 1.0)
        truncate = fields.get("truncate", True)
        return YarnRope(dim, theta, scale, trained, *betas, truncate, _yarn_attention(fields, scale))
    raise ConfigError(f"rope type {short(kind)} is not supported; supported: default, linear, dynamic, llama3, yarn")


def _check_rope_fields(fields: Mapping[str, Any]) -> None:
    """Check types and ranges of all fields of a rope object, also those that its type does not use."""
    for name in NUMBERS:
        value = fields.get(name)
        if value is not None and not (name.startswith("mscale") and type(value) in (int, float) and value == 0):
            _check(name, value)
    if nested := [name for name, value in fields.items() if isinstance(value, Mapping)]:
        raise ConfigError(f"rope: {short(nested[0])}: rotary embeddings that differ between layers are not supported")
    if kind_of(fields) == "default" and fields.get("factor", 1) not in (None, 1):
        raise ConfigError(
            f"rope: factor {short(fields['factor'])} without a rope_type that uses it: give the rope_type"
        )
    if fields.get("partial_rotary_factor", 1) not in (None, 1):
        raise ConfigError(f"rope: partial_rotary_factor {short(fields['partial_rotary_factor'])} is not supported")
    original = fields.get("original_max_position_embeddings")
    if original is not None and (type(original) is not int or not 0 < original < 2**31):
        raise ConfigError(f"rope: original_max_position_embeddings must be a positive integer, got {short(original)}")
    if not isinstance(fields.get("truncate", True), bool):
        raise ConfigError(f"rope: truncate must be true or false, got {short(fields['truncate'])}")


def _yarn_attention(fields: Mapping[str, Any], scale: float) -> float:
    if fields.get("attention_factor") is not None:
        return _number(fields, "attention_factor")
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return yarn_mscale(scale, _number(fields, "mscale")) / yarn_mscale(scale, _number(fields, "mscale_all_dim"))
    return yarn_mscale(scale, 1.0)


def _number(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = fields.get(name)
    return _check(name, default if value is None else value)


def _check(name: str, value: object) -> float:
    return _RANGES.get(name, Number())(f"rope: {name}", value)
