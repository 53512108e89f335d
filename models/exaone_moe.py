"""K-EXAONE (LG AI Research, 2026): DeepSeek-V3's experts, and attention with normalized heads and sliding windows.

Only sliding-window layers rotate queries and keys. Multi-token prediction layers are not loaded.
"""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import count, per_layer
from nnxmoe.config.layer_types import PatternWindowsConfig
from nnxmoe.layers.context import Attention
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W
from nnxmoe.models.qwen import NormedHeads
from nnxmoe.models.shared.grouped_experts import HF_GROUPED_EXPERTS, DenseOrMoE, check_groups
from nnxmoe.models.shared.tables import HF_DECODER, Hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExaoneMoeConfig(PatternWindowsConfig):
    """Config of K-EXAONE.

    Attributes:
        mlp_layer_types: ``dense`` or ``sparse`` per layer. If null, the first ``first_k_dense_replace`` layers are
            dense.
    """

    model_type = "exaone_moe"
    architecture = "ExaoneMoeForCausalLM"
    experts_field = "num_experts"
    scale_in_queries = False
    aliases = {"num_local_experts": "num_experts"}
    fixed = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
    ignored = "output_router_logits"
    min_group_size = 2
    attention_bias = False
    n_shared_experts = property(lambda self: self.num_shared_experts)  # DeepSeek-V3's name, used by shared code

    vocab_size: int = 102400
    intermediate_size: int = 16384
    num_key_value_heads: int | None = 32
    rms_norm_eps: float = 1e-5
    sliding_window: int = count(4096)
    mlp_layer_types: Sequence[str] | None = per_layer("dense", "sparse")
    first_k_dense_replace: int = count(1, least=0)
    moe_intermediate_size: int = count(1024, most=2**24)
    num_experts: int = count(64, most=4096)
    num_experts_per_tok: int = 8
    num_shared_experts: int = count(1, most=4096)
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    n_group: int = 1
    topk_group: int = 1
    bos_token_id: int | None = 1
    eos_token_id: int | Sequence[int] | None = 53
    pad_token_id: int | None = 0

    def _check_experts(self) -> None:
        check_groups(self)


class ExaoneMoe(NormedHeads, DenseOrMoE):
    """K-EXAONE language model."""

    configs = (ExaoneMoeConfig,)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        rotary = self.config.rope if self.config.windows[index] else None
        return super().attention(index, rotary=rotary, **kw)


_HF: Hf = {
    **HF_DECODER, **HF_GROUPED_EXPERTS,
    "layer.moe.router.bias": (W("mlp.e_score_correction_bias"), W("mlp.gate.e_score_correction_bias")),
}  # fmt: skip

FAMILY = Family(model=ExaoneMoe, hf=_HF)
