"""Laguna (Poolside, 2026), based on the implementation in transformers.

Grouped-query attention has normalized heads and softplus output gates. The number of heads differs between layers.
Sliding-window layers have a different rotary embedding. The experts are as in DeepSeek-V3, with a single group and a
shared expert. Router logits may be soft-capped.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, count, number, one_of, per_layer
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.layer_types import FULL, SLIDING, PartialRopesConfig
from nnxmoe.config.printable import short
from nnxmoe.layers.attention.gqa import GQA, OutputGate, QKNorm
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.rope import PartialRotary
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.grouped_experts import HF_GROUPED_EXPERTS
from nnxmoe.models.shared.tables import HF_DECODER, Hf
from nnxmoe.moe.block import MoE
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import Routing, SigmoidGroupTopK


@dataclasses.dataclass(frozen=True, kw_only=True)
class LagunaConfig(PartialRopesConfig):
    """Config of Laguna. If ``layer_types`` is null, all layers are full attention.

    Attributes:
        num_attention_heads_per_layer: Query heads per layer. Defaults to ``num_attention_heads``.
        gating: Whether the output gate has one factor per head (True, ``per-head``) or per component (``per-element``).
        mlp_layer_types: ``dense`` or ``sparse`` per layer. If null, all layers except the first are sparse.
        moe_routed_scaling_factor: Factor that multiplies the normalized weights of the selected experts.
        moe_router_logit_softcapping: Soft cap of the router's logits. 0 disables the cap.
    """

    model_type = "laguna"
    architecture = "LagunaForCausalLM"
    experts_field = "num_experts"
    aliases = {"num_local_experts": "num_experts"}
    fixed = {"moe_apply_router_weight_on_input": (False,)}
    ignored = "output_router_logits router_aux_loss_coef"
    default_ropes = FrozenDict(
        {FULL: {"rope_theta": 5e5, "partial_rotary_factor": 0.5}, SLIDING: {"rope_theta": 1e4}}
    )  # fmt: skip
    first_k_dense_replace = 1

    vocab_size: int = 100352
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 40
    num_attention_heads: int = 48
    num_key_value_heads: int | None = 8
    num_attention_heads_per_layer: Sequence[int] | None = None
    head_dim: int | None = count(128, most=2**16)
    max_position_embeddings: int = 131072
    attention_bias: bool = False
    rope_theta: float = 5e5
    gating: bool | str = one_of(True, "per-head", "per-element")
    sliding_window: int | None = count(512)
    mlp_layer_types: Sequence[str] | None = per_layer("dense", "sparse")
    moe_intermediate_size: int = count(512, most=2**24)
    shared_expert_intermediate_size: int = count(512, most=2**24)
    num_experts: int = count(256, most=4096)
    num_experts_per_tok: int = 8
    moe_routed_scaling_factor: float = 1.0
    moe_router_logit_softcapping: float = number(0.0, above=-1e-9, most=1e6)

    def _check(self) -> None:
        super()._check()
        counts, max_heads = self.heads_per_layer, 2**14
        if len(counts) != self.num_hidden_layers or any(
            type(n) is not int or not 0 < n <= max_heads or n % self.kv_heads for n in counts
        ):
            raise ConfigError(
                f"num_attention_heads_per_layer {short(self.num_attention_heads_per_layer)} must list a multiple of "
                f"num_key_value_heads {self.kv_heads} for each of the {self.num_hidden_layers} layers"
            )

    @property
    def heads_per_layer(self) -> Sequence[int]:
        """Number of query heads of each layer."""
        per_layer = self.num_attention_heads_per_layer
        return (self.num_attention_heads,) * self.num_hidden_layers if per_layer is None else per_layer

    @property
    def attention_types(self) -> Sequence[str]:
        return self.layer_types or [FULL] * self.num_hidden_layers


@dataclasses.dataclass(frozen=True)
class CappedTopK(SigmoidGroupTopK):
    """`SigmoidGroupTopK` with soft-capped logits ``cap * tanh(logits / cap)``."""

    cap: float

    def __call__(
        self,
        logits: Float[Array, "*rows E"],
        bias: Float[Array, "E"] | None,
        experts: Int[Array, "*rows X"] | None = None,
    ) -> Routing:
        return super().__call__(self.cap * jnp.tanh(logits / self.cap), bias, experts)


class Laguna(CausalLM):
    """Laguna language model."""

    configs = (LagunaConfig,)

    def layer_type(self, index: int) -> Hashable:
        c = self.config
        return c.attention_types[index], c.sparse_layers[index], c.heads_per_layer[index]

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> GQA:
        c, count = self.config, self.config.heads_per_layer[index]
        rope, width = c.rope_of(c.attention_types[index]), c.head_width if c.gating == "per-element" else 1
        return self.gqa(
            index,
            heads=count,
            bias=c.attention_bias,
            rotary=rope,
            rotate=PartialRotary(rope.dim),
            qk_norm=QKNorm.per_head(c.head_width, c.rms_norm_eps, **kw),
            gate=OutputGate(c.hidden_size, count, width, activation=jax.nn.softplus, **kw),
            **kw,
        )

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> MLP | MoE:
        c, dim, cap = self.config, self.config.hidden_size, self.config.moe_router_logit_softcapping
        if not c.sparse_layers[index]:
            return MLP(dim, c.intermediate_size, bias=False, **kw)
        arguments = c.num_experts_per_tok, 1, 1, True, c.moe_routed_scaling_factor
        select = CappedTopK(*arguments, cap=cap) if cap else SigmoidGroupTopK(*arguments)
        shared = MLP(dim, c.shared_expert_intermediate_size, bias=False, **kw)
        return self.moe(Router(dim, c.num_experts, select, bias=True, **kw), c.moe_intermediate_size, shared, **kw)


_BIAS, _SHARED = "e_score_correction_bias", ("shared_expert", "shared_experts")
_HF: Hf = {
    **HF_DECODER, **HF_GROUPED_EXPERTS,
    "layer.attention.gate.g.kernel": W("self_attn.g_proj.weight"),
    "layer.moe.router.bias": (W(f"mlp.experts.{_BIAS}"), W(f"mlp.gate.{_BIAS}")),
    **{
        f"layer.moe.shared.{x}.kernel": tuple(W(f"mlp.{name}.{x}_proj.weight") for name in _SHARED)
        for x in ("gate", "up", "down")
    },
}  # fmt: skip

FAMILY = Family(model=Laguna, hf=_HF)
