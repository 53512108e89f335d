"""DeepSeek-V2 and V2-Lite (DeepSeek-V2, 2024), based on the implementation in transformers.

The layers are as in DeepSeek-V3, except for the router. It applies a softmax over all experts, without a correction
bias. The weights of the selected experts are their scores. V2-Lite selects among all experts. V2 selects within groups,
and the score of a group is the score of its best expert.
"""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, check_at_most, count, one_of
from nnxmoe.model.family import Family
from nnxmoe.models.deepseek_v3 import FAMILY as DEEPSEEK_V3
from nnxmoe.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import SoftmaxGroupTopK, SoftmaxTopK

GREEDY, IN_GROUPS = "greedy", "group_limited_greedy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV2Config(DeepSeekV3Config):
    """Config of DeepSeek-V2. ``num_experts_per_tok`` is required.

    Attributes:
        topk_method: ``greedy`` selects among all experts. ``group_limited_greedy`` selects within ``topk_group`` of
            ``n_group`` groups.
        norm_topk_prob: Must be False, because transformers ignores the field and the published code does not.
    """

    model_type = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
    min_group_size = 1  # a group's score is the score of its best expert
    aliases = {"num_experts": "n_routed_experts"}
    fixed = {"scoring_func": ("softmax",), "mlp_bias": (None, False)}

    vocab_size: int = 102400
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 2048
    rope_interleave: bool = one_of(True)
    moe_intermediate_size: int = 1407
    n_routed_experts: int = 64
    n_shared_experts: int | None = 2
    # Unlike in DeepSeek-V3, the next three fields may be null, so their types are wider than in the base class.
    num_experts_per_tok: int | None = count(None)  # pyright: ignore[reportIncompatibleVariableOverride]
    n_group: int | None = count(None)  # pyright: ignore[reportIncompatibleVariableOverride]
    topk_group: int | None = count(None)  # pyright: ignore[reportIncompatibleVariableOverride]
    topk_method: str = one_of(GREEDY, IN_GROUPS)
    norm_topk_prob: bool = one_of(False)
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    num_nextn_predict_layers: int = 0
    bos_token_id: int | None = 1
    eos_token_id: int | Sequence[int] | None = 2

    def _check_experts(self) -> None:
        if self.num_experts_per_tok is None:
            raise ConfigError("num_experts_per_tok is null or missing: set it to the number of experts per token")
        if self.topk_method == GREEDY:
            check_at_most(self, "num_experts_per_tok", "n_routed_experts")
        elif self.n_group is None or self.topk_group is None:
            raise ConfigError(
                f"topk_method {IN_GROUPS!r} requires n_group and topk_group, got {self.n_group} and {self.topk_group}"
            )
        else:
            super()._check_experts()


class DeepSeekV2(DeepSeekV3):
    """DeepSeek-V2, V2-Lite and their Coder models."""

    configs = (DeepSeekV2Config,)

    def router(self, **kw: Unpack[ParamOptions]) -> Router:
        c, k, scale = self.config, self.config.num_experts_per_tok, self.config.routed_scaling_factor
        assert k is not None
        if c.n_group is None or c.topk_group is None or c.topk_method == GREEDY:
            select = SoftmaxTopK(k, normalize=False, scale=scale)
        else:
            select = SoftmaxGroupTopK(k, c.n_group, c.topk_group, scale)
        return Router(c.hidden_size, c.n_routed_experts, select, bias=False, **kw)


FAMILY = Family(model=DeepSeekV2, hf=DEEPSEEK_V3.hf, maxtext=DEEPSEEK_V3.maxtext)
