"""OLMoE (Muennighoff et al. 2024), based on the implementation in transformers.

The layers are as in Llama, with experts in every layer. Before the rotation, queries and keys are normalized over all
heads together. The router applies a softmax over all experts and selects the top experts. Published checkpoints do not
rescale the weights of the selected experts.
"""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import count
from nnxmoe.layers.attention.gqa import GQA, QKNorm
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family
from nnxmoe.models.shared.tables import HF_DECODER, HF_MOE
from nnxmoe.moe.block import MoE
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import SoftmaxTopK


@dataclasses.dataclass(frozen=True, kw_only=True)
class OlmoeConfig(DecoderConfig):
    """Config of OLMoE. ``clip_qkv`` must be null.

    Attributes:
        intermediate_size: Width of an expert.
        attention_bias: Whether q, k, v and o have biases.
        norm_topk_prob: Whether to normalize the weights of the selected experts to sum to 1.
    """

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"
    experts_field = "num_experts"
    scale_in_queries = False
    aliases = {"num_local_experts": "num_experts"}
    fixed = {"clip_qkv": (None,)}
    ignored = "output_router_logits router_aux_loss_coef"

    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    num_experts: int = count(64, most=4096)
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    eos_token_id: int | Sequence[int] | None = 50279
    pad_token_id: int | None = 1


class Olmoe(CausalLM):
    """OLMoE language model."""

    configs = (OlmoeConfig,)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> GQA:
        c = self.config
        norm = QKNorm.all_heads(c.num_attention_heads, c.kv_heads, c.head_width, c.rms_norm_eps, **kw)
        return self.gqa(index, bias=c.attention_bias, qk_norm=norm, **kw)

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> MoE:
        c = self.config
        select = SoftmaxTopK(c.num_experts_per_tok, c.norm_topk_prob)
        return self.moe(Router(c.hidden_size, c.num_experts, select, bias=False, **kw), c.intermediate_size, **kw)


FAMILY = Family(model=Olmoe, hf=HF_DECODER | HF_MOE)
