"""Config fields and layers shared by Qwen3-Next and Qwen3.5 (Qwen team 2025, 2026).

Most layers are `GatedDeltaNet`s. Every fourth layer has grouped-query attention with an output gate. The attention
normalizes each head and rotates a quarter of the head. Norms multiply by 1 plus their weight.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Unpack

import jax
from jaxtyping import Array

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import check_multiple, count, one_of, per_layer
from nnxmoe.config.partial_rotary import PartialRotaryConfig
from nnxmoe.layers.attention.gqa import QueryGate
from nnxmoe.layers.context import Attention
from nnxmoe.layers.norm import OffsetNorm
from nnxmoe.layers.recurrent.delta import DeltaDims, DeltaProjection, GatedDeltaNet
from nnxmoe.layers.rope import PartialRotary
from nnxmoe.model.family import LayerBlocks, MaxTextNames
from nnxmoe.model.mtp import last_matching_layer
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.grouped_experts import DenseOrMoE
from nnxmoe.models.shared.normed_heads import NormedHeads
from nnxmoe.models.shared.tables import (
    HF_DECODER,
    MAXTEXT_DECODER,
    Linen,
    maxtext_experts,
    maxtext_gqa,
    maxtext_mlp,
)

_LINEAR, _FULL = "linear_attention", "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenHybridConfig(PartialRotaryConfig):
    """Config of Qwen's decoders with recurrent layers.

    Attributes:
        linear_conv_kernel_dim: Number of taps of the convolution in recurrent layers.
        linear_key_head_dim: Width of a key head in recurrent layers.
        linear_value_head_dim: Width of a value head in recurrent layers.
        linear_num_key_heads: Number of key heads in recurrent layers.
        linear_num_value_heads: Number of value heads in recurrent layers.
        full_attention_interval: Interval between attention layers. Used if ``layer_types`` is null.
        layer_types: Type of each layer.
    """

    default_rotary_factor = 0.25
    scale_in_queries = False

    max_position_embeddings: int = 32768
    head_dim: int | None = count(256, most=2**16)
    attention_bias: bool = one_of(False)
    linear_conv_kernel_dim: int = count(4, least=2, most=256)
    linear_key_head_dim: int = count(128, most=2**16)
    linear_value_head_dim: int = count(128, most=2**16)
    linear_num_key_heads: int = count(16, most=2**14)
    linear_num_value_heads: int = count(32, most=2**14)
    full_attention_interval: int = count(4)
    layer_types: Sequence[str] | None = per_layer(_LINEAR, _FULL)

    def _check(self) -> None:
        super()._check()
        check_multiple(self, "linear_num_value_heads", "linear_num_key_heads")

    @property
    def recurrent_layers(self) -> Sequence[bool]:
        """Whether each layer is recurrent."""
        if self.layer_types:
            return tuple(layer_type == _LINEAR for layer_type in self.layer_types)
        return tuple((i + 1) % self.full_attention_interval > 0 for i in range(self.num_hidden_layers))

    @property
    def delta_heads(self) -> DeltaDims:
        """Numbers and widths of the heads in recurrent layers."""
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        return DeltaDims(self.hidden_size, keys, values, self.linear_key_head_dim, self.linear_value_head_dim)


HF_HYBRID = {
    **HF_DECODER,
    "layer.attention.conv.weight": W("linear_attn.conv1d.weight"),
    "layer.attention.a_log": W("linear_attn.A_log"),
    "layer.attention.dt_bias": W("linear_attn.dt_bias"),
    "layer.attention.norm.scale": W("linear_attn.norm.weight"),
    "layer.attention.out.kernel": W("linear_attn.out_proj.weight"),
    "layer.mtp.token_norm.scale": W("pre_fc_norm_embedding.weight"),
    "layer.mtp.hidden_norm.scale": W("pre_fc_norm_hidden.weight"),
    "layer.mtp.project.kernel": W("fc.weight"),
    "layer.mtp.norm.scale": W("norm.weight"),
}  # fmt: skip
_FULL_ATTENTION, _EXPERTS = "attention/attention", "mlp/routed_experts"
MAXTEXT_HYBRID: Linen = {
    **MAXTEXT_DECODER,
    **maxtext_gqa(_FULL_ATTENTION),
    **maxtext_experts(_EXPERTS),
    **maxtext_mlp("layer.moe.shared", "mlp/shared_expert"),
    "layer.attention_norm.scale": ("input_layernorm/scale", (None,)),
    "layer.moe_norm.scale": ("post_attention_layernorm/scale", (None,)),
    "layer.attention.qk_norm.q.scale": (f"{_FULL_ATTENTION}/query_norm/scale", (None,)),
    "layer.attention.qk_norm.k.scale": (f"{_FULL_ATTENTION}/key_norm/scale", (None,)),
    "layer.attention.o.kernel": (f"{_FULL_ATTENTION}/out/kernel", ("mlp", "embed")),
    "layer.attention.conv.weight": ("attention/conv1d/kernel", (None, None, None), (2, 1, 0)),
    "layer.attention.a_log": ("attention/A_log", (None,)),
    "layer.attention.dt_bias": ("attention/dt_bias", (None,)),
    "layer.attention.norm.scale": ("attention/norm/rms_norm/scale", (None,)),
    "layer.attention.out.kernel": ("attention/out_proj/kernel", ("gdn_head", "embed")),
    "layer.moe.router.kernel": (f"{_EXPERTS}/gate/kernel", ("embed", None)),
    "layer.moe.shared.output_gate.kernel": ("mlp/shared_expert_gate/kernel", ("embed", None)),
}


MTP_PREFIXES = ("mtp.", "mtp.layers.{}.")


class QwenHybridMaxText(MaxTextNames):
    """Names in MaxText, with layers in repeated blocks. Each block ends with an attention layer."""

    def layers(self, config: Any) -> LayerBlocks:
        types = ("recurrent",) * (config.full_attention_interval - 1) + ("global",)
        return LayerBlocks(types, "layers", nested=True)

    def layer_types(self, config: Any) -> Sequence[str]:
        return ["recurrent" if is_recurrent else "global" for is_recurrent in config.recurrent_layers]


class QwenHybrid(NormedHeads, DenseOrMoE):
    """A decoder with recurrent and attention layers. Subclasses define ``project`` and the feed-forwards."""

    norm_class = OffsetNorm
    supports_mtp = True

    @property
    def mtp_layer_index(self) -> int:
        c = self.config
        layers = zip(c.recurrent_layers, c.sparse_layers, strict=True)
        return last_matching_layer(
            not is_recurrent and is_sparse == (c.experts > 0) for is_recurrent, is_sparse in layers
        )

    def layer_type(self, index: int) -> Hashable:
        return self.config.recurrent_layers[index], self.config.sparse_layers[index]

    def project(self, heads: DeltaDims, **kw: Unpack[ParamOptions]) -> DeltaProjection:
        """Build the projection of a recurrent layer."""
        raise TypeError("a model class must define project(heads, **kw)")

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        c = self.config
        if c.recurrent_layers[index]:
            heads, taps = c.delta_heads, c.linear_conv_kernel_dim
            options = {"taps": taps, "eps": c.rms_norm_eps, "mesh": self.strategy.mesh}
            options |= {"recurrence": self.strategy.recurrence, "activation": self.gate_activation}
            return GatedDeltaNet(heads, self.project(heads, **kw), **options, **kw)
        return self.full_attention(index, **kw)

    @property
    def gate_activation(self) -> Callable[[Array], Array]:
        """Activation of the gates in recurrent layers."""
        return jax.nn.silu

    def full_attention(self, index: int, **options: Any) -> Attention:
        """Build the attention of a layer that is not recurrent. ``options`` are arguments of `CausalLM.gqa`."""
        c = self.config
        return super().attention(index, gate=QueryGate(c.head_width), rotate=PartialRotary(c.rope_dim), **options)
