"""Kimi K3 (Moonshot AI, 2026), from its technical report (arXiv 2607.24653). transformers 5.24 does not implement K3.

K3 adds to Kimi Linear: attention residuals over blocks of layers (`AttentionResidual`), bounded activations (`SiTU`),
routed experts of a smaller width (`LatentMoE`), and gates on the outputs of latent attention. The names of tensors and
fields, and details that the report omits, follow three sources: the published checkpoint (moonshotai/Kimi-K3),
``KimiLinearForCausalLM`` in its modeling_kimi_linear.py, and ``kimi_k3.py`` in mlx-lm 0.32.2.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Unpack

from jaxtyping import Array, Float, PyTree

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import count, number, one_of
from nnxmoe.layers.activations import SiTU
from nnxmoe.layers.attention.gqa import OutputGate
from nnxmoe.layers.attention_residual import AttentionResidual, BlockSums, ResidualNorm
from nnxmoe.layers.context import Attention, Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.recurrent.kimi_delta import BoundedDecays, KimiDelta, unbounded_decays
from nnxmoe.model.family import Family
from nnxmoe.model.layer import Layer, LayerOutput
from nnxmoe.model.output import Ids
from nnxmoe.model.weight_names import W, options
from nnxmoe.models.kimi_linear import FAMILY as KIMI_LINEAR
from nnxmoe.models.kimi_linear import KimiLinear, KimiLinearConfig
from nnxmoe.models.shared.kimi_hybrid import FULL, LINEAR
from nnxmoe.models.shared.tables import Hf
from nnxmoe.moe.block import LatentMoE, MoE
from nnxmoe.moe.experts import Experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiK3Config(KimiLinearConfig):
    """Config of Kimi K3's text model. In published files, it is nested and has the ``model_type`` of Kimi Linear.

    Fields that enable optional parts have the defaults of Moonshot's class. The defaults of other fields are K3's
    values.

    Attributes:
        layer_types: Type of each layer. Defaults to an attention layer after every three recurrent layers, and at the
            end.
        activation_situ_beta: Bound of the factor in `SiTU`. Null and 0 mean 1.
        activation_situ_linear_beta: Bound of ``up`` in `SiTU`. Null means no bound.
        attn_res_block_size: Number of layers in a block of the attention residuals.
        routed_expert_hidden_size: Width of the routed experts' inputs and outputs. Defaults to ``hidden_size``.
        latent_moe_use_norm: Whether the weighted sum of the experts' outputs is normalized. Used if
            ``routed_expert_hidden_size`` is set.
        mla_use_output_gate: Whether attention layers have one output gate per component.
        linear_lower_bound: Lower bound of the log decays in recurrent layers. Null means no bound.
        linear_full_rank_gate: Whether the output gates of recurrent layers have full rank.
    """

    model_type = "kimi_k3"
    fixed = {"mla_use_nope": (True, None), "moe_router_activation_func": ("sigmoid", None)}
    nested = {
        **KimiLinearConfig.nested,
        "gate_lower_bound": "linear_lower_bound",
        "use_full_rank_gate": "linear_full_rank_gate",
    }

    hidden_size: int = 7168
    intermediate_size: int = 33792
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    num_key_value_heads: int | None = 96
    hidden_act: str = one_of("situ")
    activation_situ_beta: float | None = number(None, above=-1e-9, most=1e9)
    activation_situ_linear_beta: float | None = number(None, above=0.0, most=1e9)
    attn_res_block_size: int = count(12)
    attention_bias: bool = one_of(False)
    q_lora_rank: int | None = count(1536, most=2**20)
    mla_use_output_gate: bool = False
    n_routed_experts: int = count(896, most=4096)
    num_experts_per_tok: int = 16
    moe_intermediate_size: int = count(3072, most=2**24)
    routed_expert_hidden_size: int | None = count(None, most=2**20)
    latent_moe_use_norm: bool = False
    routed_scaling_factor: float = 1.0
    mlp_layer_types: Sequence[str] | None = one_of(None)
    linear_num_heads: int | None = count(96, most=2**14)
    linear_lower_bound: float | None = number(None, above=-1e3, most=-1e-6)
    linear_full_rank_gate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_types == tuple(self._layer_type(i) for i in range(self.num_hidden_layers)):
            object.__setattr__(self, "layer_types", None)

    def recurrent_by_default(self, index: int) -> bool:
        return (index + 1) % 4 > 0 and index + 1 < self.num_hidden_layers

    def _layer_type(self, index: int) -> str:
        return LINEAR if self.recurrent_by_default(index) else FULL

    def to_hf(self) -> dict[str, Any]:
        """Return the fields with the names of Moonshot's class."""
        fields, recurrent = super().to_hf(), self.recurrent_layers
        for name in ("moe_renormalize", "num_expert_group", "num_experts_per_token", "num_shared_experts"):
            fields[name] = fields.pop(self._inherited("aliases")[name])
        delta_fields = {name: fields.pop(field) for name, field in self.nested.items()}
        for name, is_listed in (("kda_layers", True), ("full_attn_layers", False)):
            delta_fields[name] = [i + 1 for i, is_recurrent in enumerate(recurrent) if is_recurrent == is_listed]
        del fields["layer_types"], fields["mlp_layer_types"]
        return fields | {"linear_attn_config": delta_fields}


class BlockSumLayer(Layer):
    """A layer whose attention and feed-forward read an `AttentionResidual` and add to the current block.

    Args:
        *parts: Positional arguments of `Layer`.
        residuals: Modules that compute the inputs of attention and feed-forward.
        starts_block: Whether the layer is the first of a block.
    """

    def __init__(self, *parts: Any, residuals: tuple[AttentionResidual, AttentionResidual], starts_block: bool):
        super().__init__(*parts)
        self.starts_block = starts_block
        self.attention_residual, residual = residuals
        self.store_feed_forward(self.feed_forward, residual=residual)

    def __call__(self, x: BlockSums, context: Context, cache: PyTree | None = None) -> LayerOutput:
        y, cache = self.attention_branch(self.attention_residual(x.stack()), context=context, cache=cache)
        x = (x.start_block() if self.starts_block else x).output_tokens(context).add(y)
        residual = getattr(self, f"{self.feed_forward_name}_residual")
        y, info = self.feed_forward_branch(residual(x.stack()), context=context)
        return LayerOutput(x.add(y), cache, info)


class KimiK3(KimiLinear):
    """The text model of Kimi K3."""

    configs = (KimiK3Config,)

    def layer_type(self, index: int) -> Hashable:
        block, index_in_block = divmod(index, self.config.attn_res_block_size)
        # The first layer of a block increases the number of finished blocks, so it cannot share a stack.
        return super().layer_type(index), None if index_in_block else block

    def layer(self, index: int, form: type[Layer] = BlockSumLayer, **kw: Any) -> Layer:
        c, options = self.config, ParamOptions(dtype=kw["dtype"], rngs=kw["rngs"])
        residuals = tuple(AttentionResidual(c.hidden_size, c.rms_norm_eps, **options) for _ in range(2))
        starts_block = index % c.attn_res_block_size == 0
        return super().layer(index, form, residuals=residuals, starts_block=starts_block, **kw)

    def to_layer_input(self, x: Float[Array, "B T D"], tokens: Ids) -> BlockSums:
        return BlockSums(x[:, :, None][:, :, :0], x)

    def from_layer_output(self, x: BlockSums) -> Float[Array, "B T_out sums D"]:
        """Return the sums of all blocks, because the final norm reduces them to one hidden state."""
        return x.stack()

    def final_norm(self, **kw: Unpack[ParamOptions]) -> ResidualNorm:
        return ResidualNorm(self.config.hidden_size, self.config.rms_norm_eps, **kw)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        c, gate = self.config, None
        if c.recurrent_layers[index]:
            return self.recurrent(**kw)
        if c.mla_use_output_gate:
            gate = OutputGate(c.hidden_size, c.num_attention_heads, c.v_head_dim, **kw)
        return self.mla(gate=gate, **kw)

    def recurrent(self, **kw: Unpack[ParamOptions]) -> KimiDelta:
        c, bound = self.config, self.config.linear_lower_bound
        decays = unbounded_decays if bound is None else BoundedDecays(bound)
        ranks = c.linear_head_dim, None if c.linear_full_rank_gate else c.linear_head_dim
        return self.delta(decays, ranks, (c.linear_num_heads,), **kw)

    @property
    def activation(self) -> SiTU:
        return SiTU(self.config.activation_situ_beta or 1.0, self.config.activation_situ_linear_beta)

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> MLP | MoE:
        c, s, latent = self.config, self.strategy, self.config.routed_expert_hidden_size
        if latent is None or not c.sparse_layers[index]:
            return super().feed_forward(index, **kw)
        options = {"matmul": s.matmul, "rules": s.rules, "activation": self.activation, **kw}
        experts = Experts(latent, c.moe_intermediate_size, c.experts, **options)
        reduce = Linear((c.hidden_size,), (latent,), ("embed", "latent"), **kw)
        expand = Linear((latent,), (c.hidden_size,), ("latent", "embed"), **kw)
        norm = RMSNorm(latent, c.rms_norm_eps, **kw) if c.latent_moe_use_norm else None
        parts = self.router(**kw), experts, s.dispatch, self.shared(**kw), s.mesh
        return LatentMoE(*parts, reduce=reduce, expand=expand, latent_norm=norm)


_PARTS = {
    "reduce.kernel": "routed_expert_down_proj.weight",
    "expand.kernel": "routed_expert_up_proj.weight",
    "latent_norm.scale": "routed_expert_norm.weight",
}
_RESIDUAL = {"norm.scale": "norm.weight", "query.kernel": "proj.weight"}
_BRANCH_NAMES = {"attention": "self_attention", "mlp": "mlp", "moe": "mlp"}
_NAMES = {
    "layer.attention.gate.g.kernel": W("self_attn.g_proj.weight"),
    **{f"layer.moe.{x}": (W(f"block_sparse_moe.{name}"), W(f"mlp.{name}").files_only) for x, name in _PARTS.items()},
    **{
        f"layer.{branch}_residual.{key}": W(f"{name}_res_{end}")
        for branch, name in _BRANCH_NAMES.items()
        for key, end in _RESIDUAL.items()
    },
    **{f"norm.residual.{key}": W(f"model.output_attn_res_{end}") for key, end in _RESIDUAL.items()},
}


def _moonshot_first(key: str) -> tuple[W, ...]:
    """Return Kimi Linear's row. Alternatives to Moonshot's name become `W.files_only`, except in rows of experts."""
    first, *others = options(KIMI_LINEAR.hf, key)
    return (first, *(others if first.per_expert else (w.files_only for w in others)))


_TABLE: Hf = {key: _moonshot_first(key) for key in KIMI_LINEAR.hf} | _NAMES


def _padded_rates(config: Any) -> Mapping[str, tuple[W, ...]]:
    """Return the row of the log rates. Moonshot's files pad K3's log rates from 96 (heads) to 128 (head width)."""
    name, heads, width = W("self_attn.A_log"), config.linear_num_heads, config.linear_head_dim
    return {"layer.attention.a_log": (name, name.rows(0, width, heads)) if width > heads else (name,)}


FAMILY = Family(
    model=KimiK3,
    hf=_TABLE,
    hf_of_config=_padded_rates,
    peft_excluded=("experts",),  # Moonshot's model has one module per expert.
)
