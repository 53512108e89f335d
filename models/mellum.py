"""Mellum 2 (JetBrains, 2026): Qwen3's layers with experts.

Some layers attend to a sliding window and have a different rotary embedding.
"""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import count, per_layer
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.layer_types import FULL, SLIDING, LayerRopesConfig
from nnxmoe.layers.context import Attention
from nnxmoe.model.family import Family
from nnxmoe.models.shared.normed_heads import NormedHeads
from nnxmoe.models.shared.qwen_moe import QwenMoe
from nnxmoe.models.shared.tables import HF_DECODER, HF_MOE


@dataclasses.dataclass(frozen=True, kw_only=True)
class MellumConfig(LayerRopesConfig):
    """Config of Mellum 2. If ``layer_types`` is null, all layers are full attention.

    Attributes:
        attention_bias: Whether q, k, v and o have biases.
        mlp_layer_types: ``dense`` or ``sparse`` per layer. If null, all layers have experts.
        rope_parameters: One rope object per layer type.
        norm_topk_prob: Whether to normalize the weights of the selected experts to sum to 1.
    """

    model_type = "mellum"
    architecture = "MellumForCausalLM"
    experts_field = "num_experts"
    shared_expert_intermediate_size = 0
    default_ropes = FrozenDict({FULL: {"rope_type": "default", "rope_theta": 5e5}, SLIDING: {"rope_theta": 1e4}})
    aliases = {"num_local_experts": "num_experts"}
    ignored = """use_sliding_window max_window_layers output_router_logits router_aux_loss_coef num_mtp_layers
        num_nextn_predict_layers mtp_layer_types mtp_mlp_layer_types"""

    vocab_size: int = 98304
    hidden_size: int = 2304
    intermediate_size: int = 7168
    num_hidden_layers: int = 28
    num_key_value_heads: int | None = 4
    head_dim: int | None = count(128, most=2**16)
    max_position_embeddings: int = 131072
    rope_theta: float = 500000.0
    attention_bias: bool = False
    sliding_window: int | None = count(1024)
    mlp_layer_types: Sequence[str] | None = per_layer("dense", "sparse")
    moe_intermediate_size: int = count(896, most=2**24)
    num_experts: int = count(64, most=4096)
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True

    @property
    def attention_types(self) -> Sequence[str]:
        return self.layer_types or [FULL] * self.num_hidden_layers


class Mellum(NormedHeads, QwenMoe):
    """Mellum 2 language model."""

    configs = (MellumConfig,)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        rope = self.config.rope_of(self.config.attention_types[index])
        return super().attention(index, rotary=rope, **kw)


FAMILY = Family(model=Mellum, hf=HF_DECODER | HF_MOE)
