"""Frequencies of rotary position embeddings (Su et al. 2021) and long-context variants, from config fields.

Supports the fields of transformers 4 and 5. Sources: llama3 (Meta's Llama 3.1 reference), dynamic NTK (transformers),
YaRN (Peng et al. 2023, with DeepSeek's mscale), LongRoPE (Ding et al. 2024). `nnxmoe.layers.rope` applies the
frequencies.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nnxmoe.config.bounds import ConfigError, Number
from nnxmoe.config.printable import short


@dataclasses.dataclass(frozen=True)
class Rope:
    """Plain rotary embedding: frequency ``theta ** (-2i / dim)`` for i < dim / 2. Angles are in radians."""

    dim: int
    theta: float
    attention_factor = 1.0  # Multiplies the cosines and sines. `YarnRope` and `LongRope` have a field of this name.

    def frequencies(self, length: Int[Array, ""] | int) -> Float[Array, "half"]:
        """Return the frequency of each pair in radians per position.

        Args:
            length: Number of positions in use. Only a `LengthDependentRope` reads the length.
        """
        return jnp.asarray(self._plain(), jnp.float32)

    def length_with_cache(self, length: Int[Array, ""], capacity: int) -> Int[Array, ""] | int:
        """Return the length that selects the frequencies of a pass with a cache of ``capacity`` tokens per row."""
        return length

    def _plain(self) -> np.ndarray:
        return self.theta ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)


@dataclasses.dataclass(frozen=True)
class LinearRope(Rope):
    """Position interpolation: positions divided by ``scale`` (Chen et al. 2023)."""

    scale: float

    def frequencies(self, length: Int[Array, ""] | int) -> Float[Array, "half"]:
        return jnp.asarray(self._plain() / self.scale, jnp.float32)


@dataclasses.dataclass(frozen=True)
class ProportionalRope(Rope):
    """Rotary embedding of the first ``rotated`` pairs only, with the frequencies of the full width (Gemma 4, 2026).

    Frequencies are divided by ``scale``.
    """

    rotated: int
    scale: float = 1.0

    def frequencies(self, length: Int[Array, ""] | int) -> Float[Array, "half"]:
        frequencies = np.where(np.arange(self.dim // 2) < self.rotated, self._plain() / self.scale, 0.0)
        return jnp.asarray(frequencies, jnp.float32)


@dataclasses.dataclass(frozen=True)
class LengthDependentRope(Rope):
    """Rotary embedding whose frequencies change if the length exceeds ``max_positions``."""

    max_positions: int


@dataclasses.dataclass(frozen=True)
class DynamicRope(LengthDependentRope):
    """Dynamic NTK scaling: theta increases with the length if the length exceeds ``max_positions``.

    Cached keys are not rotated again when the length increases.
    """

    scale: float

    def frequencies(self, length: Int[Array, ""] | int) -> Float[Array, "half"]:
        used = jnp.maximum(length, self.max_positions).astype(jnp.float32)
        growth = self.scale * used / self.max_positions - (self.scale - 1)
        theta = self.theta * growth ** (self.dim / (self.dim - 2))
        return theta ** (-jnp.arange(0, self.dim, 2, dtype=jnp.float32) / self.dim)


@dataclasses.dataclass(frozen=True)
class LongRope(LengthDependentRope):
    """LongRoPE: a divisor per frequency, with different divisors beyond ``max_positions`` (Ding et al. 2024).

    With a cache, the cache's capacity selects the divisors, as in vLLM, because cached keys are not rotated again.
    transformers selects them by the length instead, and computes all keys again when the length exceeds the limit.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    attention_factor: float = dataclasses.field()  # Without `field`, the value of `Rope` would be the default.

    def length_with_cache(self, length: Int[Array, ""], capacity: int) -> int:
        return capacity

    def frequencies(self, length: Int[Array, ""] | int) -> Float[Array, "half"]:
        short, long = (
            jnp.asarray(self._plain() / factor, jnp.float32) for factor in (self.short_factor, self.long_factor)
        )
        return jnp.where(length > self.max_positions, long, short)


@dataclasses.dataclass(frozen=True)
class Llama3Rope(Rope):
    """Llama 3 scaling: low frequencies divided by ``scale``, high frequencies unchanged, a linear ramp in between."""

    scale: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def frequencies(self, length: Int[Array, ""] | int) -> Float[Array, "half"]:
        unscaled = self._plain()
        turns = self.original_positions * unscaled / (2 * np.pi)
        ramp = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return jnp.asarray((1 - ramp) * unscaled / self.scale + ramp * unscaled, jnp.float32)


@dataclasses.dataclass(frozen=True)
class YarnRope(Rope):
    """YaRN scaling, based on the number of rotations of each frequency over the original context.

    Frequencies with fewer than ``beta_slow`` rotations are divided by ``scale``. Frequencies with more than
    ``beta_fast`` rotations are unchanged. A linear ramp over the pair index connects the two ranges.
    """

    scale: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float = dataclasses.field()  # Without `field`, the value of `Rope` would be the default.

    def frequencies(self, length: Int[Array, ""] | int) -> Float[Array, "half"]:
        low, high = self._dimension(self.beta_fast), self._dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(self.dim // 2) - low) / (high - low), 0, 1)
        unscaled = self._plain()
        return jnp.asarray(unscaled / self.scale * ramp + unscaled * (1 - ramp), jnp.float32)

    def _dimension(self, rotations: float) -> float:
        """Return the (fractional) index of the pair that rotates ``rotations`` times over the original context."""
        return self.dim * math.log(self.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))


def yarn_mscale(scale: float, mscale: float) -> float:
    """Return YaRN's attention temperature for a context extended by ``scale``."""
    return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0


NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
           "attention_factor", "mscale", "mscale_all_dim")  # fmt: skip
_RANGES = {"rope_theta": Number(1.0, 1e15), "factor": Number(1e-3, 1e6)}
# Fields of a rope object that describe the three dimensions of image and video positions.
MROPE_FIELDS = " ".join(f"rope_{x}.mrope_{y}" for x in ("scaling", "parameters") for y in ("section", "interleaved"))
FIELDS = frozenset(
    {
        *NUMBERS,
        "rope_type",
        "type",
        "truncate",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "short_factor",
        "long_factor",
    }
)


def rope_type(fields: Mapping[str, Any]) -> Any:
    """Return the type of a rope object. ``rope_type`` takes precedence over the older name ``type``."""
    for name in ("rope_type", "type"):
        if fields.get(name) is not None:
            return fields[name]
    return "default"


def theta_in(rope: Any, *names: str) -> Any:
    """Return ``rope_theta`` of a rope object, or of the object at ``names`` in it. None if absent."""
    for name in (*names, "rope_theta"):
        rope = rope.get(name) if isinstance(rope, Mapping) else None
    return rope


def rope_from_fields(
    fields: Mapping[str, Any], dim: int, theta: float, positions: int, original: int | None, width: str
) -> Rope:
    """Build a `Rope` from a rope object and top-level fields of the config.

    Args:
        fields: Rope object of the config.
        dim: Number of rotated dimensions.
        theta: Default of ``rope_theta``.
        positions: The config's ``max_position_embeddings``.
        original: The top-level ``original_max_position_embeddings``. Overrides the value in the rope object.
        width: Name of the field that determines ``dim``, for error messages.

    Raises:
        ConfigError: If a field is missing, invalid or not supported.
    """
    scaling_type = rope_type(fields)
    _check_rope_fields(fields)
    if dim % 2:
        raise ConfigError(f"{width}: rotary embedding needs an even width, got {dim}")
    theta = _number(fields, "rope_theta", theta)
    if scaling_type == "default":
        return Rope(dim, theta)
    if scaling_type == "linear":
        return LinearRope(dim, theta, _number(fields, "factor"))
    if scaling_type == "dynamic" and dim < 4:
        raise ConfigError(f"{width}: dynamic rope needs a width of at least 4, got {dim}")
    if scaling_type == "dynamic":
        return DynamicRope(dim, theta, positions, _number(fields, "factor"))
    original_positions: int = original or fields.get("original_max_position_embeddings") or positions
    if scaling_type == "llama3":
        low, high = _number(fields, "low_freq_factor"), _number(fields, "high_freq_factor")
        if not low < high:
            raise ConfigError(f"rope: low_freq_factor {low} must be below high_freq_factor {high}")
        return Llama3Rope(dim, theta, _number(fields, "factor"), low, high, original_positions)
    if scaling_type == "yarn":
        if "factor" not in fields:
            raise ConfigError(
                "rope: yarn needs factor. Set it to null to use the ratio of the maximum to the original context length"
            )
        scale = _number(fields, "factor", positions / original_positions)
        betas = _number(fields, "beta_fast", 32.0), _number(fields, "beta_slow", 1.0)
        truncate = fields.get("truncate", True)
        return YarnRope(dim, theta, scale, original_positions, *betas, truncate, _yarn_attention(fields, scale))
    if scaling_type == "longrope":
        return _long_rope(fields, dim, theta, original_positions, positions / original_positions)
    raise ConfigError(
        f"rope type {short(scaling_type)} is not supported; supported: default, linear, dynamic, llama3, yarn, longrope"
    )


def _long_rope(fields: Mapping[str, Any], dim: int, theta: float, original: int, default_scale: float) -> LongRope:
    """Build a `LongRope`. The attention factor defaults to ``sqrt(1 + log(scale) / log(original))``."""
    short_factor, long_factor = (_divisors(fields, name, dim // 2) for name in ("short_factor", "long_factor"))
    scale = _number(fields, "factor", default_scale)
    default_factor = math.sqrt(1 + math.log(max(scale, 1.0)) / math.log(max(original, 2)))
    attention_factor = _number(fields, "attention_factor", default_factor)
    return LongRope(dim, theta, original, short_factor, long_factor, attention_factor)


def _divisors(fields: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    values = fields.get(name)
    if not isinstance(values, list | tuple) or len(values) != count:
        raise ConfigError(f"rope: {name} must list {count} numbers, one per frequency, got {short(values)}")
    return tuple(_check(name, value) for value in values)


def _check_rope_fields(fields: Mapping[str, Any]) -> None:
    """Check all fields of a rope object, including fields that the rope type does not use."""
    for name in NUMBERS:
        value = fields.get(name)
        if value is not None and not (name.startswith("mscale") and type(value) in (int, float) and value == 0):
            _check(name, value)
    for name, value in fields.items():
        if isinstance(value, Mapping):
            raise ConfigError(f"rope: {short(name)}: rotary embeddings that differ between layers are not supported")
    if rope_type(fields) == "default" and fields.get("factor", 1) not in (None, 1):
        raise ConfigError(f"rope: factor {short(fields['factor'])} has no effect without a rope_type: set rope_type")
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
