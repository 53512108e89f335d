"""Config of decoders with one rotary embedding for windowed layers and another for the others."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from nnxmoe.config.bounds import ConfigError, Number
from nnxmoe.config.layer_windows import FULL, SLIDING, LayerWindowsConfig
from nnxmoe.config.partial_rotary import FACTOR
from nnxmoe.config.printable import short
from nnxmoe.config.rope import Rope
from nnxmoe.config.rope_fields import rope_from_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRopesConfig(LayerWindowsConfig):
    """``rope_parameters``: one rope object per layer type in ``layer_types``; null: `default_ropes`."""

    default_ropes: ClassVar[Mapping[str, Mapping[str, Any]]]
    scale_in_queries = False

    def __post_init__(self) -> None:
        ropes = self.rope_parameters or self.default_ropes
        whole = ropes.get(FULL) if isinstance(ropes, Mapping) else None
        if isinstance(whole, Mapping) and whole.get("rope_theta") is not None:
            object.__setattr__(self, "rope_theta", whole["rope_theta"])
        super().__post_init__()

    def _check(self) -> None:
        if self.rope_scaling is not None:
            raise ConfigError(
                f"rope_scaling {short(self.rope_scaling)} is not supported: give rope_parameters per type"
            )
        super()._check()
        for kind in {*self.layer_kinds}:
            self.rope_of(kind)

    def rope_fields_of(self, kind: str) -> Mapping[str, Any]:
        """Return the rope object of a layer type. Raises ConfigError if it is missing."""
        fields = (self.rope_parameters or self.default_ropes).get(kind)
        if not isinstance(fields, Mapping):
            raise ConfigError(f"rope_parameters has no object for {kind!r} layers, got {short(fields)}")
        return fields

    def rope_of(self, kind: str) -> Rope:
        """Return the rotary embedding of a layer type."""
        fields, length = self.rope_fields_of(kind), self.max_position_embeddings
        return rope_from_fields(fields, self.rope_dim, self.rope_theta, length, None, self.rope_field)

    @property
    def rope(self) -> Rope:
        return self.rope_of(FULL if FULL in self.layer_kinds else SLIDING)

    @classmethod
    def undeclared(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        found = super().undeclared(fields)
        for name in {f"rope_parameters.{kind}" for kind in (FULL, SLIDING)} & found.keys():
            if isinstance(inner := found[name], Mapping):
                del found[name]
                found |= {f"{name}.{key}": inner[key] for key in inner.keys() - cls.rope_keys}
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialRopesConfig(LayerRopesConfig):
    """``partial_rotary_factor`` of a rope object: rotated fraction of the head width, rounded down to an integer width.
    Defaults to `default_rotary_factor`."""

    default_rotary_factor: ClassVar[float] = 1.0

    def rope_of(self, kind: str) -> Rope:
        fields, length = dict(self.rope_fields_of(kind)), self.max_position_embeddings
        factor = Number(0.0, 1.0)(f"rope: {FACTOR}", fields.pop(FACTOR, self.default_rotary_factor))
        return rope_from_fields(fields, int(self.head_width * factor), self.rope_theta, length, None, f"rope: {FACTOR}")
