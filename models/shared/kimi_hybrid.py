"""Decoders with recurrent `KimiDelta` layers and attention layers (Kimi Linear; Moonshot AI, 2025).

Kimi Linear, Ling 3 and GLM-5.3 Flash share the config fields of the recurrent layers, their names in checkpoints, and
the selection of the layer type.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, count, per_layer
from nnxmoe.config.printable import short
from nnxmoe.layers.context import Attention
from nnxmoe.layers.recurrent.delta import DeltaDims
from nnxmoe.layers.recurrent.kimi_delta import DecayFn, KimiDelta, KimiProjection
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.tables import Hf

LINEAR, FULL = "linear_attention", "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiHybridConfig(DecoderConfig):
    """Config of decoders with recurrent `KimiDelta` layers and attention layers.

    In a class with several bases, this class must be the last base. Otherwise, the defaults of `DecoderConfig` override
    the defaults of the other bases.

    Attributes:
        linear_head_dim: Width of a head in recurrent layers.
        linear_num_heads: Number of heads in recurrent layers.
        linear_conv_kernel_dim: Number of taps of the convolutions in recurrent layers.
        layer_types: Type of each layer. Defaults to `recurrent_by_default`.
    """

    linear_head_dim: int | None = count(128, most=2**16)
    linear_num_heads: int | None = count(32, most=2**14)
    linear_conv_kernel_dim: int = count(4, least=2, most=256)
    layer_types: Sequence[str] | None = per_layer(LINEAR, FULL)

    def recurrent_by_default(self, index: int) -> bool:
        """Return whether a layer is recurrent if ``layer_types`` is null: three of four layers, by default."""
        return index % 4 != 3

    @property
    def recurrent_layers(self) -> Sequence[bool]:
        """Whether each layer is recurrent."""
        if self.layer_types:
            return tuple(layer_type == LINEAR for layer_type in self.layer_types)
        return tuple(map(self.recurrent_by_default, range(self.num_hidden_layers)))

    @property
    def delta_heads(self) -> DeltaDims:
        """Numbers and widths of the heads in recurrent layers."""
        heads, width = self.linear_num_heads, self.linear_head_dim
        assert heads is not None and width is not None
        return DeltaDims(self.hidden_size, heads, heads, width, width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NestedDeltaConfig(KimiHybridConfig):
    """Config that also reads the fields of recurrent layers from the object ``linear_attn_config``.

    The class variable ``nested`` maps the object's names to fields. The object's values override the fields. The
    config stores the fields only.
    """

    nested: ClassVar[Mapping[str, str]] = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }

    linear_attn_config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        delta_fields = self.linear_attn_config
        if delta_fields is not None:
            if not isinstance(delta_fields, Mapping):
                raise ConfigError(f"linear_attn_config must be an object or null, got {short(delta_fields)}")
            for name, value in self.unnested(delta_fields).items():
                object.__setattr__(self, name, value)
            object.__setattr__(self, "linear_attn_config", None)
        super().__post_init__()

    def unnested(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config fields that ``linear_attn_config`` sets."""
        return {field: given[name] for name, field in self.nested.items() if name in given}

    def to_hf(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_hf().items() if name != "linear_attn_config"}


HF_KIMI_DELTA: Hf = {
    **{f"layer.attention.project.{x}.kernel": W(f"self_attn.{x}_proj.weight") for x in "qkvgb"},
    **{f"layer.attention.project.g.{x}.kernel": W(f"self_attn.g_{x}_proj.weight") for x in "ab"},
    **{f"layer.attention.conv.{x}.weight": W(f"self_attn.{x}_conv1d.weight") for x in "qkv"},
    "layer.attention.norm.scale": W("self_attn.o_norm.weight"),
    "layer.attention.out.kernel": W("self_attn.o_proj.weight"),
}
_FORGET = {"a_log": "A_log", "dt_bias": "dt_bias", "project.f.kernel": "f_proj.weight"}
_FORGET |= {f"project.f.{x}.kernel": f"f_{x}_proj.weight" for x in "ab"}
HF_KIMI_DELTA |= {  # the second alternatives are the names of transformers' model in memory
    f"layer.attention.{key}": (W(f"self_attn.{name}"), W(f"self_attn.forget_gate.{name}"))
    for key, name in _FORGET.items()
}


class KimiHybrid(CausalLM):
    """A decoder with recurrent `KimiDelta` layers and attention layers.

    `recurrent` builds the recurrent layers. The next base class of the model class, such as `DeepSeekV3`, builds the
    attention layers.
    """

    supports_mtp = False

    def layer_type(self, index: int) -> Hashable:
        return self.config.recurrent_layers[index], self.config.sparse_layers[index]

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        return self.recurrent(**kw) if self.config.recurrent_layers[index] else super().attention(index, **kw)

    def recurrent(self, **kw: Unpack[ParamOptions]) -> KimiDelta:
        """Build the recurrence of a recurrent layer."""
        raise TypeError("a model class must define recurrent(**kw)")

    def delta(
        self,
        decays: DecayFn,
        ranks: tuple[int | None, int | None],
        rates: tuple[int, ...],
        **kw: Unpack[ParamOptions],
    ) -> KimiDelta:
        """Build a `KimiDelta` with the config's sizes.

        Args:
            decays: Function that computes the decays.
            ranks: Ranks of the projections ``f`` and ``g`` of `KimiProjection`.
            rates: Argument ``rate_shape`` of `KimiDelta`.
        """
        c, heads = self.config, self.config.delta_heads
        project = KimiProjection(heads, ranks, **kw)
        options = {"taps": c.linear_conv_kernel_dim, "eps": c.rms_norm_eps, "mesh": self.strategy.mesh}
        options["recurrence"] = self.strategy.recurrence
        return KimiDelta(heads, project, decays, rate_shape=rates, **options, **kw)
