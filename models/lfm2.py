"""LFM2 and LFM2-MoE (Liquid AI, 2025): short gated convolutions, and attention in some layers.

Queries and keys are normalized per head. In LFM2-MoE, the first layers are dense. The other layers have experts and a
sigmoid router with a correction bias, as in DeepSeek-V3 with a single group.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, count, number, per_layer
from nnxmoe.layers.context import Attention
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.recurrent.gated_conv import GatedShortConv
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.grouped_experts import DenseOrMoE
from nnxmoe.models.shared.normed_heads import NormedHeads
from nnxmoe.models.shared.tables import HF_DECODER, Hf
from nnxmoe.moe.block import MoE
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import SigmoidGroupTopK

CONV, FULL = "conv", "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2LikeConfig(DecoderConfig):
    """Config fields that LFM2 and LFM2-MoE share.

    Attributes:
        conv_bias: Whether the convolutions and their projections have biases.
        conv_L_cache: Number of taps of a convolution.
        layer_types: ``conv`` or ``full_attention`` per layer.
    """

    scale_in_queries = False
    aliases = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
    ignored = (  # in published files, but not read by transformers
        "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init "
        "conv_dim conv_dim_out conv_use_xavier_init num_heads use_pos_enc output_router_logits"
    )
    attention_bias = False
    n_shared_experts = 0

    vocab_size: int = 65536
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 128000
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    rope_theta: float = 1e6
    bos_token_id: int | None = 1
    eos_token_id: int | Sequence[int] | None = 2
    pad_token_id: int | None = 0
    conv_bias: bool = False
    conv_L_cache: int = count(3, least=2, most=256)
    layer_types: Sequence[str] | None = per_layer(CONV, FULL)

    def to_hf(self) -> dict[str, Any]:
        fields = super().to_hf()
        return fields | {"norm_eps": fields.pop("rms_norm_eps")}

    @property
    def mixers(self) -> Sequence[str]:
        """Type of each layer: ``layer_types``, or attention in all layers."""
        return self.layer_types or (FULL,) * self.num_hidden_layers

    @property
    def dense_width(self) -> int:
        """Width of a dense feed-forward."""
        return self.intermediate_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2Config(Lfm2LikeConfig):
    """Config of LFM2.

    Attributes:
        block_auto_adjust_ff_dim: Whether the width of a feed-forward is two thirds of ``intermediate_size``, multiplied
            by ``block_ffn_dim_multiplier`` and rounded up to a multiple of ``block_multiple_of``.
        full_attn_idxs: Indices of the layers with attention. Used if ``layer_types`` is null. Null means all layers.
    """

    model_type = "lfm2"
    architecture = "Lfm2ForCausalLM"
    aliases = {"block_ff_dim": "intermediate_size"}

    hidden_size: int = 2560
    intermediate_size: int = 12288
    block_multiple_of: int = count(256, most=2**16)
    block_ffn_dim_multiplier: float = number(1.0, above=0.0, most=1e3)
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: Sequence[int] | None = None

    def _check(self) -> None:
        super()._check()
        if self.dense_width < 1:
            raise ConfigError(f"intermediate_size {self.intermediate_size}: block_auto_adjust_ff_dim reduces it to 0")

    @property
    def mixers(self) -> Sequence[str]:
        indices = range(self.num_hidden_layers) if self.full_attn_idxs is None else self.full_attn_idxs
        return self.layer_types or [FULL if i in indices else CONV for i in range(self.num_hidden_layers)]

    @property
    def dense_width(self) -> int:
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        width = int(self.block_ffn_dim_multiplier * int(2 * self.intermediate_size / 3))
        return -(-width // self.block_multiple_of) * self.block_multiple_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(Lfm2LikeConfig):
    """Config of LFM2-MoE.

    Attributes:
        moe_intermediate_size: Width of an expert.
        num_dense_layers: Number of dense layers before the layers with experts.
        use_expert_bias: Whether the router has a correction bias.
        norm_topk_prob: Whether to normalize the weights of the selected experts to sum to 1.
        routed_scaling_factor: Factor of the weights of the selected experts.
    """

    model_type = "lfm2_moe"
    architecture = "Lfm2MoeForCausalLM"
    experts_field = "num_experts"
    aliases = {"num_local_experts": "num_experts"}
    first_k_dense_replace = property(lambda self: self.num_dense_layers)  # DeepSeek-V3's name, used by shared code

    hidden_size: int = 2048
    intermediate_size: int = 7168
    moe_intermediate_size: int = count(1792, most=2**24)
    num_dense_layers: int = count(2, least=0)
    num_experts: int = count(32, least=2, most=4096)
    num_experts_per_tok: int = 4
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


class Lfm2(NormedHeads, DenseOrMoE):
    """LFM2 and LFM2-MoE language models."""

    configs = (Lfm2Config, Lfm2MoeConfig)

    def layer_type(self, index: int) -> Hashable:
        return self.config.mixers[index], self.config.sparse_layers[index]

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        c = self.config
        if c.mixers[index] == CONV:
            return GatedShortConv(c.hidden_size, taps=c.conv_L_cache, bias=c.conv_bias, **kw)
        return super().attention(index, **kw)

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> MLP | MoE:
        c = self.config
        if c.sparse_layers[index]:
            return super().feed_forward(index, **kw)
        return MLP(c.hidden_size, c.dense_width, bias=False, **kw)

    def router(self, **kw: Unpack[ParamOptions]) -> Router:
        c = self.config
        weights = {"normalize": c.norm_topk_prob, "scale": c.routed_scaling_factor, "epsilon": 1e-6}
        select = SigmoidGroupTopK(c.num_experts_per_tok, groups=1, top_groups=1, **weights)
        return Router(c.hidden_size, c.num_experts, select, bias=c.use_expert_bias, **kw)


_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
_EXPERTS, _GATE_UP = W("feed_forward.experts"), W("feed_forward.experts.gate_up_proj")
_HF: Hf = {
    **HF_DECODER,
    "norm.scale": W("model.embedding_norm.weight"),
    "layer.attention_norm.scale": W("operator_norm.weight"),
    **{f"layer.{x}_norm.scale": W("ffn_norm.weight") for x in ("mlp", "moe")},
    **{f"layer.attention.qk_norm.{x}.scale": W(f"self_attn.{x}_layernorm.weight") for x in "qk"},
    "layer.attention.o.kernel": W("self_attn.out_proj.weight"),
    **{
        f"layer.attention.{key}.{end}": W(f"conv.{name}.{suffix}")
        for key, name, weight in (
            ("project", "in_proj", "kernel"), ("conv", "conv", "weight"), ("out", "out_proj", "kernel")
        )
        for end, suffix in ((weight, "weight"), ("bias", "bias"))
    },
    **{f"layer.mlp.{x}.kernel": W(f"feed_forward.{name}.weight") for x, name in _PARTS.items()},
    "layer.moe.router.kernel": W("feed_forward.gate.weight"),
    "layer.moe.router.bias": W("feed_forward.expert_bias"),
    "layer.moe.experts.gate": (_EXPERTS.each("w1.weight"), _GATE_UP.rows(0, 2)),
    "layer.moe.experts.up": (_EXPERTS.each("w3.weight"), _GATE_UP.rows(1, 2)),
    "layer.moe.experts.down": (_EXPERTS.each("w2.weight"), W("feed_forward.experts.down_proj")),
}  # fmt: skip

FAMILY = Family(model=Lfm2, hf=_HF)
