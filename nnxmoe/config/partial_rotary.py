"""Config of decoders that rotate only the first components of each head."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, Number, number
from nnxmoe.config.printable import short

FACTOR = "partial_rotary_factor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialRotaryConfig(DecoderConfig):
    """Config with ``partial_rotary_factor``, the rotated fraction of the head width.

    The rotated width is rounded down to an integer. In transformers 5, the factor is in the rope object. If both fields
    are null, the factor is ``default_rotary_factor``.
    """

    default_rotary_factor: ClassVar[float] = 1.0
    rope_field = FACTOR

    partial_rotary_factor: float | None = number(None, above=0.0, most=1.0)

    def _check(self) -> None:
        rope_factor, top_level_factor = super().rope_fields.get(FACTOR), self.partial_rotary_factor
        if rope_factor is not None:
            Number(0.0, 1.0)(f"rope: {FACTOR}", rope_factor)
        if rope_factor is not None and top_level_factor is not None and rope_factor != top_level_factor:
            raise ConfigError(
                f"{FACTOR} {short(top_level_factor)} and the rope object's {short(rope_factor)} differ: remove one"
            )
        super()._check()
        if self.rope_dim < 2:
            raise ConfigError(
                f"{FACTOR} {self.rotary_factor} of the head width {self.head_width} rotates no dimensions: increase it"
            )

    @property
    def rotary_factor(self) -> float | None:
        """``partial_rotary_factor`` of the rope object, else of the top level. None if both are null."""
        rope_factor = super().rope_fields.get(FACTOR)
        return self.partial_rotary_factor if rope_factor is None else rope_factor

    @property
    def rope_dim(self) -> int:
        return int(self.head_width * (self.rotary_factor or self.default_rotary_factor))

    @property
    def rope_fields(self) -> Mapping[str, Any]:
        """Rope object without ``partial_rotary_factor``, because `rope_dim` already includes the factor."""
        return {name: value for name, value in super().rope_fields.items() if name != FACTOR}
