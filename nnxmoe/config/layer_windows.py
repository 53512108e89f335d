"""Config of decoders in which some layers attend to a sliding window."""

import dataclasses
from collections.abc import Sequence

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, count, per_layer

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerWindowsConfig(DecoderConfig):
    """Layers of the type ``sliding_attention`` attend to the last ``sliding_window`` keys, the query's own included;
    ``layer_types`` null: all from number ``max_window_layers`` on, a field of the families that have it."""

    max_window_layers = 0

    sliding_window: int | None = count(4096)
    layer_types: Sequence[str] | None = per_layer(FULL, SLIDING)

    def _check(self) -> None:
        super()._check()
        if self.layer_window is None and SLIDING in self.layer_kinds:
            raise ConfigError(f"layer_types has {SLIDING!r} layers, which need {self.needed_for_windows}")

    @property
    def needed_for_windows(self) -> str:
        """Error text: the fields that layers with a window need, and their values."""
        return f"a sliding_window: got {self.sliding_window}"

    @property
    def layer_window(self) -> int | None:
        """The window of layers that have one; None: they attend to all tokens."""
        return self.sliding_window

    @property
    def layer_kinds(self) -> Sequence[str]:
        """``layer_types``, or the family's default."""
        first = self.num_hidden_layers if self.layer_window is None else self.max_window_layers
        return self.layer_types or [SLIDING if i >= first else FULL for i in range(self.num_hidden_layers)]

    @property
    def windows(self) -> Sequence[int | None]:
        return tuple(self.layer_window if kind == SLIDING else None for kind in self.layer_kinds)
