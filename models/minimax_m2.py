"""MiniMax-M2 and M2.5 (MiniMax, 2025 and 2026).

Grouped-query attention normalizes all heads of a token together and rotates half of each head. All layers have experts.
The router selects experts by sigmoid scores plus a correction bias and weights them by the scores without the bias.
There are no shared experts and no other biases.
"""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, count
from nnxmoe.config.partial_rotary import PartialRotaryConfig
from nnxmoe.config.printable import short
from nnxmoe.layers.attention.gqa import GQA, QKNorm
from nnxmoe.layers.rope import PartialRotary
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W
from nnxmoe.models.mixtral import FAMILY as MIXTRAL
from nnxmoe.models.shared.grouped_experts import corrected_router
from nnxmoe.models.shared.tables import Hf
from nnxmoe.moe.block import MoE


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config(PartialRotaryConfig):
    """Config of MiniMax-M2.

    Attributes:
        intermediate_size: Width of an expert.
        rotary_dim: Rotated width. Alternative to ``partial_rotary_factor``. If both are null, the full head rotates.
    """

    model_type = "minimax_m2"
    architecture = "MiniMaxM2ForCausalLM"
    experts_field = "num_local_experts"
    scale_in_queries = False
    rope_field = "rotary_dim"
    aliases = {"num_experts": "num_local_experts"}
    fixed = {
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (True,),
        "scoring_func": ("sigmoid",),
        "routed_scaling_factor": (1.0,),
        "shared_intermediate_size": (None, 0),
        "router_jitter_noise": (None, 0),  # not supported, because the jitter also scales the experts' inputs
        "attn_window_size": (None, -1),
        "swa_rope_theta": (None, -1),
        "layernorm_full_attention_beta": (1.0,),
        "layernorm_linear_attention_beta": (1.0,),
        "layernorm_mlp_beta": (1.0,),
        "use_grouped_topk": (None, False),
    }
    # Fields of dense layers, shared experts and multi-token prediction, which these models do not have.
    ignored = """mlp_intermediate_size shared_moe_mode use_mtp num_mtp_modules mtp_transformer_layers
        max_model_len output_router_logits router_aux_loss_coef"""

    vocab_size: int = 200064
    hidden_size: int = 3072
    intermediate_size: int = 1536
    num_hidden_layers: int = 62
    num_attention_heads: int = 48
    num_key_value_heads: int | None = 8
    head_dim: int | None = count(128, most=2**16)
    rotary_dim: int | None = count(None, most=2**16)
    max_position_embeddings: int = 196608
    rope_theta: float = 5e6
    num_local_experts: int = count(256, most=4096)
    num_experts_per_tok: int = 8
    attn_type_list: Sequence[int] | None = None
    bos_token_id: int | None = 200034
    eos_token_id: int | Sequence[int] | None = 200020

    def _check(self) -> None:
        super()._check()
        factor, width = self.rotary_factor, self.head_width
        if self.rotary_dim is not None and self.rotary_dim > width:
            raise ConfigError(f"rotary_dim {self.rotary_dim} is more than head_dim {width}")
        if self.rotary_dim is not None and factor is not None and int(width * factor) != self.rotary_dim:
            raise ConfigError(f"rotary_dim {self.rotary_dim} and partial_rotary_factor {factor} differ: remove one")
        if self.attn_type_list not in (None, (1,) * self.num_hidden_layers):
            raise ConfigError(
                f"attn_type_list {short(self.attn_type_list)} is not supported; supported: null, or 1 (softmax "
                f"attention) for each of the {self.num_hidden_layers} layers"
            )

    def _check_experts(self) -> None:
        if self.num_local_experts < 2:
            raise ConfigError(f"num_local_experts {self.num_local_experts} must be at least 2")
        super()._check_experts()

    @property
    def rope_dim(self) -> int:
        return self.rotary_dim or super().rope_dim


class MiniMaxM2(CausalLM):
    """MiniMax-M2 and M2.5 language models."""

    configs = (MiniMaxM2Config,)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> GQA:
        c = self.config
        norm = QKNorm.all_heads(c.num_attention_heads, c.kv_heads, c.head_width, c.rms_norm_eps, **kw)
        return self.gqa(index, bias=False, qk_norm=norm, rotate=PartialRotary(c.rope_dim), **kw)

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> MoE:
        c = self.config
        return self.moe(corrected_router(c, scale=1.0, **kw), c.intermediate_size, **kw)


_BIAS = "e_score_correction_bias"
_HF: Hf = {
    **MIXTRAL.hf,
    "layer.moe.router.bias": (W(f"block_sparse_moe.{_BIAS}"), W(f"mlp.{_BIAS}")),
}  # fmt: skip

FAMILY = Family(model=MiniMaxM2, hf=_HF)
