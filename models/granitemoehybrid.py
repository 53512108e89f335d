"""Granite 4 hybrid (IBM, 2025): Granite's layers with Mamba-2 instead of attention in most layers.

Every layer has a shared feed-forward, and routed experts unless ``num_local_experts`` is 0. Most checkpoints have no
rotary embedding.
"""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, check_multiple, count, one_of, per_layer
from nnxmoe.layers.context import Attention, FeedForward
from nnxmoe.layers.mlp import FusedMLP
from nnxmoe.layers.recurrent.delta import DeltaDims
from nnxmoe.layers.recurrent.mamba2 import Mamba2
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W
from nnxmoe.models.granite import HF_GRANITE, GraniteMoe, GraniteMoeSharedConfig
from nnxmoe.models.shared.tables import Hf, hf_mamba2

MAMBA, FULL = "linear_attention", "full_attention"
_OLD_LAYER_TYPES = {"mamba": MAMBA, "attention": FULL}
_NO_LIMIT = 0.0, math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(GraniteMoeSharedConfig):
    """Config of Granite 4 hybrid models.

    Attributes:
        shared_intermediate_size: Width of the shared feed-forward.
        num_local_experts: Number of experts, or 0 for dense models.
        position_embedding_type: ``rope``, or ``nope`` or null for no rotary embedding.
        layer_types: ``linear_attention`` (Mamba-2) or ``full_attention`` per layer. Files from 2025 use the names
            ``mamba`` and ``attention``. By default, all layers are Mamba-2 layers.
        mamba_n_heads: Number of heads of the recurrence.
        mamba_n_groups: Number of groups of heads that share keys.
        mamba_d_state: Width of the keys of the recurrence.
        mamba_d_head: Width of a head of the recurrence. ``auto`` and null mean
            ``mamba_expand * hidden_size // mamba_n_heads``.
        mamba_d_conv: Number of taps of the convolution.
        mamba_expand: Ratio of the total width of the heads of the recurrence to ``hidden_size``.
        mamba_conv_bias: Whether the convolution has a bias.
        mamba_proj_bias: Whether the projections of the recurrence have biases.
    """

    model_type = "granitemoehybrid"
    architecture = "GraniteMoeHybridForCausalLM"
    aliases = {"layers_block_type": "layer_types"}
    fixed = {"time_step_limit": (None, [*_NO_LIMIT], _NO_LIMIT, [0.0, {"__float__": "Infinity"}])}
    ignored = "mamba_chunk_size"

    shared_intermediate_size: int = count(1024, most=2**24)
    num_local_experts: int = count(8, least=0, most=4096)
    num_experts_per_tok: int = count(2, least=0, most=4096)
    position_embedding_type: str | None = one_of(None, "rope", "nope")
    layer_types: Sequence[str] | None = per_layer(MAMBA, FULL)
    mamba_n_heads: int = count(128, most=2**14)
    mamba_n_groups: int = count(1, most=2**14)
    mamba_d_state: int = count(256, most=2**16)
    mamba_d_head: int | None = count(None, most=2**16)
    mamba_d_conv: int = count(4, least=2, most=256)
    mamba_expand: int = count(2, most=2**10)
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    def _check(self) -> None:
        super()._check()
        check_multiple(self, "mamba_n_heads", "mamba_n_groups")
        if self.mamba_n_heads * self.mamba_head_width != self.mamba_expand * self.hidden_size:
            raise ConfigError(
                f"mamba_n_heads {self.mamba_n_heads} times mamba_d_head {self.mamba_head_width} must equal "
                f"mamba_expand {self.mamba_expand} times hidden_size {self.hidden_size}"
            )

    def _check_experts(self) -> None:
        super()._check_experts()
        if not self.num_experts_per_tok:
            raise ConfigError("num_experts_per_tok must be a positive integer unless num_local_experts is 0, got 0")

    @classmethod
    def _standard_fields(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        values = super()._standard_fields(fields)
        if isinstance(layer_types := values.get("layer_types"), list | tuple):
            values["layer_types"] = [_OLD_LAYER_TYPES.get(x, x) if isinstance(x, str) else x for x in layer_types]
        return values | ({"mamba_d_head": None} if values.get("mamba_d_head") == "auto" else {})

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"mamba_d_head": self.mamba_d_head or "auto"}

    @property
    def mixers(self) -> Sequence[str]:
        """``layer_types``, or the default."""
        return self.layer_types or (MAMBA,) * self.num_hidden_layers

    @property
    def mamba_head_width(self) -> int:
        """``mamba_d_head``, or the default."""
        return self.mamba_d_head or self.mamba_expand * self.hidden_size // self.mamba_n_heads


class GraniteMoeHybrid(GraniteMoe):
    """Granite 4 hybrid language model."""

    configs = (GraniteMoeHybridConfig,)

    def layer_type(self, index: int) -> Hashable:
        return self.config.mixers[index]

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        c = self.config
        if c.mixers[index] == FULL:
            rotary = c.rope if c.position_embedding_type == "rope" else None
            return self.gqa(index, bias=c.attention_bias, rotary=rotary, **kw)
        dims = DeltaDims(c.hidden_size, c.mamba_n_groups, c.mamba_n_heads, c.mamba_d_state, c.mamba_head_width)
        biases = {"bias": c.mamba_proj_bias, "conv_bias": c.mamba_conv_bias}
        options = {"taps": c.mamba_d_conv, "eps": c.rms_norm_eps, "min_step": 0.0, **biases, **kw}
        return Mamba2(dims, mesh=self.strategy.mesh, **options)

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> FeedForward:
        c = self.config
        if c.experts:
            return super().feed_forward(index, **kw)
        return FusedMLP(c.hidden_size, c.shared_intermediate_size, bias=False, **kw)


_HF: Hf = {
    **HF_GRANITE,
    **hf_mamba2("mamba"),
    "layer.mlp.gate_up.kernel": W("shared_mlp.input_linear.weight"),
    "layer.mlp.down.kernel": W("shared_mlp.output_linear.weight"),
}

FAMILY = Family(model=GraniteMoeHybrid, hf=_HF)
