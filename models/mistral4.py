"""Mistral Small 4 (Mistral AI, 2026), the text model of ``mistral3`` checkpoints.

The layers are as in DeepSeek-V3, with a softmax router and queries scaled by position.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, check_at_most, count, one_of
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.printable import short
from nnxmoe.layers.attention.mla import PositionScaledMLA
from nnxmoe.layers.context import Attention
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import options
from nnxmoe.models.deepseek_v3 import FAMILY as DEEPSEEK_V3
from nnxmoe.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
from nnxmoe.models.ministral3 import BETA, ORIGINAL, position_scale
from nnxmoe.models.shared.tables import Hf
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import SoftmaxTopK

FACTOR = "partial_rotary_factor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistral4Config(DeepSeekV3Config):
    """Config of Mistral Small 4.

    The field ``llama_4_scaling_beta`` of the rope object determines how fast the scale of queries grows with their
    position. The optional field ``partial_rotary_factor`` is the rotated fraction of a query's width.
    """

    model_type = "mistral4"
    architecture = "Mistral4ForCausalLM"
    fixed = {"scoring_func": ("softmax",), "topk_method": ("greedy",)}
    ignored = """pretraining_tp rope_parameters.max_position_embeddings rope_scaling.max_position_embeddings"""
    default_ropes = FrozenDict(
        {
            "type": "yarn", "rope_theta": 10000.0, "factor": 128.0, ORIGINAL: 8192, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1,
        }
    )  # fmt: skip
    rope_keys = DeepSeekV3Config.rope_keys | {BETA}

    vocab_size: int = 131072
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 1048576
    q_lora_rank: int | None = count(1024, most=2**20)
    kv_lora_rank: int = count(256, most=2**20)
    qk_nope_head_dim: int = count(64, most=2**16)
    n_routed_experts: int = count(128, most=4096)
    num_experts_per_tok: int = 4
    n_group: int = one_of(1)
    topk_group: int = one_of(1)
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = count(0, least=0)
    num_nextn_predict_layers: int = count(0, least=0, most=1024)
    bos_token_id: int | None = 1
    eos_token_id: int | Sequence[int] | None = 2
    pad_token_id: int | None = 11

    def _check(self) -> None:
        super()._check()
        position_scale(self.rope_fields)
        factor, width = super().rope_fields.get(FACTOR), self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.head_dim not in (None, width):
            raise ConfigError(f"head_dim {self.head_dim} must be the width of a query, {width}: remove it")
        if factor is not None and factor != self.qk_rope_head_dim / width:
            expected_fraction = f"qk_rope_head_dim {self.qk_rope_head_dim} of {width}"
            raise ConfigError(f"rope: {FACTOR} {short(factor)} must be {expected_fraction}. Remove it")

    def _check_experts(self) -> None:
        check_at_most(self, "num_experts_per_tok", "n_routed_experts")

    @property
    def rope_fields(self) -> Mapping[str, Any]:
        return {name: value for name, value in super().rope_fields.items() if name != FACTOR}


class Mistral4(DeepSeekV3):
    """Mistral Small 4 language model."""

    configs = (Mistral4Config,)

    def router(self, **kw: Unpack[ParamOptions]) -> Router:
        c = self.config
        select = SoftmaxTopK(c.num_experts_per_tok, c.norm_topk_prob, c.routed_scaling_factor)
        return Router(c.hidden_size, c.n_routed_experts, select, bias=False, **kw)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        return self.mla(PositionScaledMLA, **position_scale(self.config.rope_fields), **kw)


_EXPERTS = tuple(f"layer.moe.experts.{x}" for x in ("gate", "up", "down"))
_HF: Hf = {
    **DEEPSEEK_V3.hf,
    **{
        key: tuple(reversed(options(DEEPSEEK_V3.hf, key))) for key in _EXPERTS
    },  # one tensor for all experts comes first
}

FAMILY = Family(model=Mistral4, hf=_HF)
