"""Mixtral (Jiang et al. 2024): Llama's attention, and eight experts in every layer.

The router applies a softmax over all experts, selects the top two and rescales their weights to sum to 1. There are no
shared experts and no biases.
"""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, count
from nnxmoe.config.printable import short
from nnxmoe.layers.attention.gqa import GQA
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family, MaxTextNames
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.tables import HF_DECODER, MAXTEXT_DECODER, MAXTEXT_GQA, Hf, Linen, maxtext_experts
from nnxmoe.moe.block import MoE
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import SoftmaxTopK


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    """Config of Mixtral.

    Attributes:
        intermediate_size: Width of an expert.
        router_jitter_noise: Noise of the router's input. Only used if the model is called with a random key.
    """

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    experts_field = "num_local_experts"
    aliases = {"num_experts": "num_local_experts"}
    ignored = "output_router_logits router_aux_loss_coef"

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    sliding_window: int | None = count(None)
    num_local_experts: int = count(8, most=4096)
    num_experts_per_tok: int = 2
    router_jitter_noise: float | None = 0.0
    bos_token_id: int | None = 1
    eos_token_id: int | Sequence[int] | None = 2

    def _check(self) -> None:
        super()._check()
        noise = 0.0 if self.router_jitter_noise is None else self.router_jitter_noise
        if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise < 1:
            raise ConfigError(f"router_jitter_noise must be at least 0 and below 1, got {short(noise)}")

    @property
    def window(self) -> int | None:
        return self.sliding_window


class Mixtral(CausalLM):
    """Mixtral language model."""

    configs = (MixtralConfig,)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> GQA:
        return self.gqa(index, bias=False, **kw)

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> MoE:
        c, select = self.config, SoftmaxTopK(self.config.num_experts_per_tok)
        jitter = c.router_jitter_noise or 0.0
        router = Router(c.hidden_size, c.num_local_experts, select, bias=False, jitter=jitter, **kw)
        return self.moe(router, c.intermediate_size, **kw)


# The first alternatives are the names on the Hugging Face Hub. The other alternatives are names of transformers 5 in
# memory and of some saved checkpoints.
_HUB, _SAVED, _FUSED = W("block_sparse_moe.experts"), W("mlp.experts"), W("mlp.experts.gate_up_proj")
_HF: Hf = {
    **HF_DECODER,
    "layer.moe_norm.scale": W("post_attention_layernorm.weight"),
    "layer.moe.router.kernel": (W("block_sparse_moe.gate.weight"), W("mlp.gate.weight")),
    "layer.moe.experts.gate": (_HUB.each("w1.weight"), _SAVED.each("w1.weight"), _FUSED.rows(0, 2)),
    "layer.moe.experts.up": (_HUB.each("w3.weight"), _SAVED.each("w3.weight"), _FUSED.rows(1, 2)),
    "layer.moe.experts.down": (_HUB.each("w2.weight"), _SAVED.each("w2.weight"), W("mlp.experts.down_proj")),
}  # fmt: skip
_MAXTEXT: Linen = {
    **MAXTEXT_DECODER, **MAXTEXT_GQA,
    "layer.moe.router.kernel": ("MoeBlock_0/gate/kernel", ("embed", None)),
    **maxtext_experts("MoeBlock_0"),
}  # fmt: skip

FAMILY = Family(model=Mixtral, hf=_HF, maxtext=MaxTextNames(_MAXTEXT))
