"""Config and decoder shared by the mixture-of-experts models of Qwen2 and Qwen3.

The router applies a softmax over all experts, selects the top experts, and optionally rescales their weights. Some
layers may be dense.
"""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, count
from nnxmoe.config.printable import short
from nnxmoe.layers.mlp import GatedSharedExpert
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.grouped_experts import DenseOrMoE
from nnxmoe.models.shared.tables import HF_MOE, Hf, hf_mlp
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import SoftmaxTopK


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenMoeConfig(DecoderConfig):
    """Config of Qwen's mixture-of-experts models.

    Attributes:
        intermediate_size: Width of the dense layers.
        decoder_sparse_step: Every ``decoder_sparse_step``-th layer has experts. Other layers are dense.
        mlp_only_layers: Indices of additional dense layers.
        moe_intermediate_size: Width of an expert.
        norm_topk_prob: Whether to normalize the weights of the selected experts to sum to 1.
    """

    experts_field = "num_experts"
    scale_in_queries = False
    aliases = {"num_local_experts": "num_experts"}
    ignored = "output_router_logits router_aux_loss_coef"
    shared_expert_intermediate_size = 0  # a config field in families with a shared expert

    vocab_size: int = 151936
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    max_position_embeddings: int = 32768
    decoder_sparse_step: int = 1
    mlp_only_layers: Sequence[int] | None = None
    moe_intermediate_size: int = count(768, most=2**24)
    num_experts: int = count(128, most=4096)
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False

    def _check(self) -> None:
        super()._check()
        dense_layers, layers = self.mlp_only_layers, range(self.num_hidden_layers)
        if dense_layers is not None and not (
            isinstance(dense_layers, tuple) and all(type(i) is int and i in layers for i in dense_layers)
        ):
            raise ConfigError(
                f"mlp_only_layers must list layer indices from 0 to {layers[-1]}, got {short(dense_layers)}"
            )

    @property
    def sparse_layers(self) -> Sequence[bool]:
        step, dense_layers = self.decoder_sparse_step, self.mlp_only_layers or ()
        return tuple((i + 1) % step == 0 and i not in dense_layers for i in range(self.num_hidden_layers))


HF_SHARED: Hf = {
    **HF_MOE,
    **hf_mlp("mlp.shared_expert"),
    "layer.moe.shared.output_gate.kernel": W("mlp.shared_expert_gate.weight"),
}


class QwenMoe(DenseOrMoE):
    """A decoder with Qwen's routers and shared experts. Subclasses define the attention."""

    def router(self, **kw: Unpack[ParamOptions]) -> Router:
        c = self.config
        select = SoftmaxTopK(c.num_experts_per_tok, c.norm_topk_prob)
        return Router(c.hidden_size, c.num_experts, select, bias=False, **kw)

    def shared(self, **kw: Unpack[ParamOptions]) -> GatedSharedExpert | None:
        width = self.config.shared_expert_intermediate_size
        return GatedSharedExpert(self.config.hidden_size, width, **kw) if width else None
