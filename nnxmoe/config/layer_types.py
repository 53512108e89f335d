"""Configs of decoders that mix sliding-window and full-attention layers, optionally with different rope settings."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, Number, count, per_layer
from nnxmoe.config.partial_rotary import FACTOR
from nnxmoe.config.printable import short
from nnxmoe.config.rope_parameters import Rope, rope_from_fields, theta_in

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerWindowsConfig(DecoderConfig):
    """Config of decoders in which some layers use sliding-window attention.

    Layers of type ``sliding_attention`` attend to the last ``sliding_window`` keys, including the query's position. If
    ``layer_types`` is null, layers with an index of at least ``max_window_layers`` have this type. Only some families
    have the field ``max_window_layers``.
    """

    max_window_layers = 0

    sliding_window: int | None = count(4096)
    layer_types: Sequence[str] | None = per_layer(FULL, SLIDING)

    def _check(self) -> None:
        super()._check()
        if self.layer_window is None and SLIDING in self.attention_types:
            raise ConfigError(f"layer_types has {SLIDING!r} layers, which need {self.needed_for_windows}")

    @property
    def needed_for_windows(self) -> str:
        """Fields that sliding-window layers require and their values, as text for an error message."""
        return f"a sliding_window: got {self.sliding_window}"

    @property
    def layer_window(self) -> int | None:
        """Window of the sliding-window layers in tokens, or None if all layers attend to all tokens."""
        return self.sliding_window

    @property
    def attention_types(self) -> Sequence[str]:
        """``layer_types``, or the family's default."""
        first_sliding = self.num_hidden_layers if self.layer_window is None else self.max_window_layers
        return self.layer_types or [SLIDING if i >= first_sliding else FULL for i in range(self.num_hidden_layers)]

    @property
    def windows(self) -> Sequence[int | None]:
        return tuple(
            self.layer_window if attention_type == SLIDING else None for attention_type in self.attention_types
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionalWindowsConfig(LayerWindowsConfig):
    """Config with the field ``use_sliding_window``. If it is False, no layer has a sliding window."""

    use_sliding_window: bool = False

    @property
    def needed_for_windows(self) -> str:
        used, window = self.use_sliding_window, self.sliding_window
        return f"use_sliding_window true and a sliding_window; got {used} and {window}"

    @property
    def layer_window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatternWindowsConfig(LayerWindowsConfig):
    """Config with ``sliding_window_pattern``, the interval between full-attention layers.

    The field is used if ``layer_types`` is null. If ``sliding_window`` is null, all layers have full attention.
    """

    sliding_window_pattern: int | str | None = 4

    def _check(self) -> None:
        interval = self.sliding_window_pattern
        is_used = self.layer_types is None and self.layer_window is not None
        if is_used and (type(interval) is not int or interval < 1):
            raise ConfigError(f"sliding_window_pattern {interval!r} must be an integer >= 1 if layer_types is null")
        super()._check()

    @property
    def attention_types(self) -> Sequence[str]:
        interval: Any = self.sliding_window_pattern  # an integer if used
        return self.layer_types or interleaved_types(self.num_hidden_layers, self.layer_window and interval)


def interleaved_types(num_layers: int, interval: int | None) -> list[str]:
    """Return the layer types if every ``interval``-th layer has full attention. None stands for all layers."""
    return [SLIDING if interval and (i + 1) % interval else FULL for i in range(num_layers)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRopesConfig(LayerWindowsConfig):
    """Config with one rotary embedding per layer type.

    ``rope_parameters`` maps each layer type to a rope object. It defaults to ``default_ropes``.
    """

    scale_in_queries = False

    @classmethod
    def rope_overrides(cls, scaling: Any, parameters: Any) -> dict[str, Any]:
        return {"rope_theta": theta_in(parameters, FULL)}

    @classmethod
    def default_ropes_with(cls, theta: Any) -> Mapping[str, Any]:
        return {**cls.default_ropes, FULL: {**cls.default_ropes[FULL], "rope_theta": theta}}

    def _check(self) -> None:
        super()._check()
        for attention_type in {*self.attention_types}:
            self.rope_of(attention_type)

    def rope_fields_of(self, attention_type: str) -> Mapping[str, Any]:
        """Return the rope object of a layer type. Raises ConfigError if the object or ``rope_theta`` is missing."""
        if self.rope_scaling is not None:
            raise ConfigError(
                f"rope_scaling {short(self.rope_scaling)} is not supported: set rope_parameters per layer type"
            )
        fields = (self.rope_parameters or self.default_ropes).get(attention_type)
        if not isinstance(fields, Mapping):
            raise ConfigError(f"rope_parameters has no object for {attention_type!r} layers, got {short(fields)}")
        if fields.get("rope_theta") is None:
            raise ConfigError(f"rope_parameters: {attention_type}: rope_theta is missing and has no default. Set it")
        return fields

    def rope_of(self, attention_type: str) -> Rope:
        """Return the rotary embedding of a layer type."""
        fields, length = self.rope_fields_of(attention_type), self.max_position_embeddings
        return rope_from_fields(fields, self.rope_dim, self.rope_theta, length, None, self.rope_field)

    @property
    def rope(self) -> Rope:
        return self.rope_of(FULL if FULL in self.attention_types else SLIDING)

    @classmethod
    def unknown_fields(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        unknown = super().unknown_fields(fields)
        for name in {f"rope_parameters.{attention_type}" for attention_type in (FULL, SLIDING)} & unknown.keys():
            if isinstance(rope := unknown[name], Mapping):
                del unknown[name]
                unknown |= {f"{name}.{key}": rope[key] for key in rope.keys() - cls.rope_keys}
        return unknown


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledFullRopeConfig(LayerRopesConfig):
    """Config whose full-attention layers may scale their rotary embedding.

    Files have either ``rope_parameters`` per layer type, or ``rope_theta`` and ``rope_scaling`` of the full-attention
    layers. Sliding-window layers without a rope object use an unscaled embedding with `sliding_theta`.
    """

    @classmethod
    def rope_overrides(cls, scaling: Any, parameters: Any) -> dict[str, Any]:
        theta = theta_in(scaling)
        return {"rope_theta": theta_in(parameters, FULL) if theta is None else theta}

    @property
    def sliding_theta(self) -> float:
        """``rope_theta`` of sliding-window layers without a rope object."""
        raise NotImplementedError

    def _check(self) -> None:
        if unknown := {*(self.rope_parameters or ())} - {FULL, SLIDING}:
            raise ConfigError(f"rope_parameters has the field {short(min(unknown))}: set one object per layer type")
        super()._check()

    def rope_fields_of(self, attention_type: str) -> Mapping[str, Any]:
        is_full, given = attention_type == FULL, (self.rope_parameters or {}).get(attention_type) or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"rope_parameters: {attention_type} must be an object or null, got {short(given)}")
        fields = {"rope_type": "default", "rope_theta": self.rope_theta if is_full else self.sliding_theta}
        return {**fields, **given, **(self.rope_scaling or {} if is_full else {})}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialRopesConfig(LayerRopesConfig):
    """Config with one rotary embedding per layer type. Each embedding may rotate only a fraction of the head width.

    ``partial_rotary_factor`` of a rope object is the rotated fraction of the head width. The rotated width is rounded
    down to an integer. The factor defaults to ``default_rotary_factor``.
    """

    default_rotary_factor: ClassVar[float] = 1.0

    def rope_of(self, attention_type: str) -> Rope:
        fields, length = dict(self.rope_fields_of(attention_type)), self.max_position_embeddings
        factor = Number(0.0, 1.0)(f"rope: {FACTOR}", fields.pop(FACTOR, self.default_rotary_factor))
        return rope_from_fields(fields, int(self.head_width * factor), self.rope_theta, length, None, f"rope: {FACTOR}")
