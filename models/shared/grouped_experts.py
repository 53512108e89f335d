"""Routed experts in groups, with shared experts (DeepSeek-V3 technical report, 2024): config, decoder and names.

GLM-4.5, dots.llm1 and Solar Open also use this design, mostly with a single group.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, check_at_most, count
from nnxmoe.layers.activations import GatedActivation, swiglu
from nnxmoe.layers.mlp import MLP
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.tables import HF_MOE, Hf, hf_mlp
from nnxmoe.moe.block import MoE
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import SigmoidGroupTopK


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedExpertsConfig(DecoderConfig):
    """Config of decoders with routed experts in groups and shared experts.

    Families with dense layers also have the field ``first_k_dense_replace``, the number of dense layers at the start.

    Attributes:
        intermediate_size: Width of the dense layers.
        moe_intermediate_size: Width of an expert.
        n_group: Number of groups of experts.
        topk_group: Number of groups with the highest scores, from which a token's experts are selected.
        norm_topk_prob: Whether to normalize the weights of the selected experts to sum to 1.
        routed_scaling_factor: Factor by which the weights of the selected experts are multiplied.
    """

    experts_field = "n_routed_experts"
    scale_in_queries = False
    aliases = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
    fixed = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
    ignored = "aux_loss_alpha seq_aux ep_size output_router_logits router_aux_loss_coef"
    min_group_size: ClassVar[int] = 2  # minimum group size, because a group's score is the sum of its two best experts

    moe_intermediate_size: int = count(1408, most=2**24)
    n_routed_experts: int = count(128, most=4096)
    n_shared_experts: int | None = count(1, least=0, most=4096)
    num_experts_per_tok: int = 8
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = count(0, least=0, most=1024)

    def _check_experts(self) -> None:
        check_groups(self)

    @property
    def empty_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the tensors of width 0 that transformers stores if ``n_shared_experts`` is 0."""
        shapes = {"gate": (0, self.hidden_size), "up": (0, self.hidden_size), "down": (self.hidden_size, 0)}
        names = {f"mlp.shared_experts.{x}_proj.weight": shape for x, shape in shapes.items()}
        return names if self.n_shared_experts == 0 else {}


def check_groups(config: Any) -> None:
    """Raise ConfigError if the groups have unequal sizes, or the best groups have too few experts for a token."""
    c, (group_size, remainder) = config, divmod(config.experts, config.n_group)
    if remainder or group_size < c.min_group_size:
        raise ConfigError(
            f"n_group {c.n_group} must divide {c.experts_field} {c.experts} into groups of at least {c.min_group_size}"
        )
    check_at_most(c, "topk_group", "n_group")
    if c.num_experts_per_tok > c.topk_group * group_size:
        raise ConfigError(
            f"num_experts_per_tok {c.num_experts_per_tok} is more than the {c.topk_group * group_size} experts in "
            f"topk_group {c.topk_group} groups"
        )


def corrected_router(
    config: DecoderConfig,
    *,
    scale: float,
    groups: int = 1,
    top_groups: int = 1,
    normalize: bool = True,
    **kw: Unpack[ParamOptions],
) -> Router:
    """Build the router of DeepSeek-V3: sigmoid scores with a correction bias (see `SigmoidGroupTopK`).

    ``kw`` contains ``dtype`` and ``rngs``.
    """
    select = SigmoidGroupTopK(config.experts_per_token, groups, top_groups, normalize, scale)
    return Router(config.hidden_size, config.experts, select, bias=True, **kw)


class DenseOrMoE(CausalLM):
    """A decoder in which `DecoderConfig.sparse_layers` determines the layers with experts. Other layers are dense.

    By default, the router and the shared expert are DeepSeek-V3's, built from the fields of `GroupedExpertsConfig`.
    ``kw`` contains ``dtype`` and ``rngs``.
    """

    @property
    def activation(self) -> GatedActivation:
        """The activation of dense feed-forwards and of shared experts."""
        return swiglu

    @property
    def expert_activation(self) -> GatedActivation:
        """The activation of routed experts. Defaults to ``activation``."""
        return self.activation

    def router(self, **kw: Unpack[ParamOptions]) -> Router:
        """Build the router of a layer with experts."""
        c = self.config
        groups = {"groups": c.n_group, "top_groups": c.topk_group, "normalize": c.norm_topk_prob}
        return corrected_router(c, scale=c.routed_scaling_factor, **groups, **kw)

    def shared(self, **kw: Unpack[ParamOptions]) -> MLP | None:
        """Build the shared expert of a layer with experts. Returns None if the family has no shared expert."""
        c = self.config
        width = c.moe_intermediate_size * (c.n_shared_experts or 0)
        return MLP(c.hidden_size, width, bias=False, activation=self.activation, **kw) if width else None

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> MLP | MoE:
        c = self.config
        if not c.sparse_layers[index]:
            return MLP(c.hidden_size, c.intermediate_size, bias=False, activation=self.activation, **kw)
        options = {"activation": self.expert_activation, **kw}
        return self.moe(self.router(**kw), c.moe_intermediate_size, self.shared(**kw), **options)


HF_GROUPED_EXPERTS: Hf = {
    **HF_MOE,
    **hf_mlp("mlp.shared_experts"),
    "layer.moe.router.bias": W("mlp.gate.e_score_correction_bias"),
}
