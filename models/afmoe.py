"""Trinity (Arcee AI, 2025).

Grouped-query attention has gated outputs. Only sliding-window layers rotate queries and keys. Norms follow attention
and feed-forward. The experts are as in DeepSeek-V3, with a single group.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import count
from nnxmoe.config.layer_types import FULL, SLIDING, LayerWindowsConfig
from nnxmoe.layers.attention.gqa import GQA, OutputGate, QKNorm
from nnxmoe.layers.embed import Embed, ScaledEmbed
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.model.family import Family
from nnxmoe.model.layer import Layer
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.grouped_experts import HF_GROUPED_EXPERTS, DenseOrMoE, corrected_router
from nnxmoe.models.shared.tables import HF_DECODER, Hf
from nnxmoe.moe.router import Router


@dataclasses.dataclass(frozen=True, kw_only=True)
class AfmoeConfig(LayerWindowsConfig):
    """Config of Trinity.

    Attributes:
        global_attn_every_n_layers: Interval between full-attention layers. Used if ``layer_types`` is null.
        num_dense_layers: Number of dense layers at the start.
        attention_bias: Whether q, k, v and o have biases.
        route_scale: Factor that multiplies the normalized weights of the selected experts.
        mup_enabled: Whether to multiply embeddings by the square root of ``hidden_size``.
    """

    model_type = "afmoe"
    architecture = "AfmoeForCausalLM"
    experts_field = "num_experts"
    scale_in_queries = False
    fixed = {
        "n_group": (1,),
        "topk_group": (1,),
        "num_expert_groups": (1,),
        "num_limited_groups": (1,),
        "route_norm": (True,),
        "score_func": ("sigmoid",),
    }
    ignored = "use_grouped_mm load_balance_coeff output_router_logits"
    # DeepSeek-V3's names for these fields, used by shared code.
    n_shared_experts = property(lambda self: self.num_shared_experts)
    first_k_dense_replace = property(lambda self: self.num_dense_layers)

    vocab_size: int = 200192
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_attention_heads: int = 16
    head_dim: int | None = count(128, most=2**16)
    max_position_embeddings: int = 16384
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    sliding_window: int | None = count(1024)
    global_attn_every_n_layers: int = count(4)
    num_dense_layers: int = count(1, least=0)
    moe_intermediate_size: int = count(1408, most=2**24)
    num_experts: int = count(64, most=4096)
    num_experts_per_tok: int = 6
    num_shared_experts: int = count(2, most=4096)
    route_scale: float = 1.0
    mup_enabled: bool = False

    @property
    def attention_types(self) -> Sequence[str]:
        interval = self.global_attn_every_n_layers
        return self.layer_types or [SLIDING if (i + 1) % interval else FULL for i in range(self.num_hidden_layers)]


class Afmoe(DenseOrMoE):
    """Trinity language model."""

    configs = (AfmoeConfig,)

    def embedding(self, form: Callable[..., Embed] = ScaledEmbed, **options: Any) -> Embed:
        return super().embedding(form if self.config.mup_enabled else Embed, **options)

    def layer(self, index: int, form: type[Layer] = Layer, **options: Any) -> Layer:
        norm1, norm2 = (RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, **options) for _ in range(2))
        return super().layer(index, form, post_norms=(norm1, norm2), **options)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> GQA:
        c = self.config
        norm = QKNorm.per_head(c.head_width, c.rms_norm_eps, **kw)
        gate = OutputGate(c.hidden_size, c.num_attention_heads, c.head_width, **kw)
        rotary = c.rope if c.windows[index] else None
        return self.gqa(index, rotary=rotary, bias=c.attention_bias, qk_norm=norm, gate=gate, **kw)

    def router(self, **kw: Unpack[ParamOptions]) -> Router:
        return corrected_router(self.config, scale=self.config.route_scale, **kw)


_HF: Hf = {
    **HF_DECODER,
    **HF_GROUPED_EXPERTS,
    "layer.attention.gate.g.kernel": W("self_attn.gate_proj.weight"),
    "layer.attention_post_norm.scale": W("post_attention_layernorm.weight"),
    "layer.moe.router.kernel": W("mlp.router.gate.weight"),
    "layer.moe.router.bias": W("mlp.expert_bias"),
    **{f"layer.{x}_norm.scale": W("pre_mlp_layernorm.weight") for x in ("mlp", "moe")},
    **{f"layer.{x}_post_norm.scale": W("post_mlp_layernorm.weight") for x in ("mlp", "moe")},
}

FAMILY = Family(model=Afmoe, hf=_HF)
