"""Nemotron-H, Nemotron 3 and 3.5 (NVIDIA, 2025), based on the implementation in transformers.

A layer has a norm and a single block: a Mamba-2 recurrence, attention without rotary embedding, a feed-forward, or
experts. Feed-forwards and experts have no gates. The router is as in DeepSeek-V3. There is a shared expert, and routed
experts may compute in a narrower latent space. Multi-token prediction layers are not loaded.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, PerLayer, check_multiple, count, number, one_of
from nnxmoe.config.printable import short
from nnxmoe.layers.activations import relu2
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.mlp import UngatedMLP
from nnxmoe.layers.recurrent.delta import DeltaDims
from nnxmoe.layers.recurrent.mamba2 import Mamba2
from nnxmoe.model.family import Family
from nnxmoe.model.layer import Layer, SingleLayer
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.grouped_experts import DenseOrMoE, GroupedExpertsConfig
from nnxmoe.models.shared.tables import Hf, hf_mamba2
from nnxmoe.moe.block import LatentMoE, MoE
from nnxmoe.moe.experts import UngatedExperts
from nnxmoe.moe.router import Router

MAMBA, ATTENTION, DENSE, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_LETTERS = {"M": MAMBA, "*": ATTENTION, "-": DENSE, "E": EXPERTS}
_OLD_LAYER_TYPES = {"mamba": MAMBA, "mamba2": MAMBA, "attention": ATTENTION}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NemotronHConfig(GroupedExpertsConfig):
    """Config of Nemotron-H and Nemotron 3.

    Attributes:
        layer_types: Type of each layer's block: ``linear_attention`` (Mamba-2), ``full_attention``, ``mlp`` or ``moe``.
            In a config.json, the field is ``layers_block_type``, or ``hybrid_override_pattern`` with the letters ``M``,
            ``*``, ``-`` and ``E``. The length of this list overrides ``num_hidden_layers`` of a config.json.
        mamba_num_heads: Number of heads of the recurrence.
        mamba_head_dim: Width of a head of the recurrence.
        ssm_state_size: Width of the keys of the recurrence.
        n_groups: Number of groups of heads that share keys.
        conv_kernel: Number of taps of the convolution.
        time_step_min: Minimum time step of the recurrence.
        moe_latent_size: Width of the experts' inputs and outputs. Defaults to ``hidden_size``.
    """

    model_type = "nemotron_h"
    architecture = "NemotronHForCausalLM"
    aliases = {
        "layer_norm_epsilon": "rms_norm_eps", "layers_block_type": "layer_types", "mamba_conv_bias": "use_conv_bias",
        "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min", "mamba_n_groups": "n_groups",
    }  # fmt: skip
    fixed = {"attention_bias": (False,), "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",)}
    ignored = (  # ignored fields: for training, for kernels, or not read by transformers
        "chunk_size mamba_chunk_size expand mamba_expand time_step_max mamba_dt_max time_step_limit mamba_dt_limit "
        "time_step_floor mamba_dt_init_floor use_mamba_kernels mamba_ssm_cache_dtype mamba_proj_bias "
        "moe_shared_expert_overlap rescale_prenorm_residual residual_in_fp32 hidden_dropout num_logits_to_keep "
        "mtp_layers_block_type mtp_hybrid_override_pattern hybrid_override_pattern norm_eps partial_rotary_factor "
        "sliding_window"
    )

    vocab_size: int = 131072
    hidden_size: int = 4096
    intermediate_size: int = 21504
    num_hidden_layers: int = 4
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = count(128, most=2**16)
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = one_of(False)  # transformers never ties these models
    bos_token_id: int | None = 1
    eos_token_id: int | Sequence[int] | None = 2
    pad_token_id: int | None = 0
    mlp_bias: bool = False
    use_bias: bool = False
    use_conv_bias: bool = True
    layer_types: Sequence[str] = dataclasses.field(
        default=(MAMBA, EXPERTS, ATTENTION, DENSE), metadata={"check": PerLayer(tuple(_LETTERS.values()))}
    )
    mamba_num_heads: int = count(128, most=2**14)
    mamba_head_dim: int = count(64, most=2**16)
    ssm_state_size: int = count(128, most=2**16)
    n_groups: int = count(8, most=2**14)
    conv_kernel: int = count(4, least=2, most=256)
    time_step_min: float = number(0.001, above=-1e-9, most=1e6)
    n_routed_experts: int = count(8, least=2, most=4096)
    n_shared_experts: int | None = one_of(1)
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = count(7688, most=2**24)
    moe_shared_expert_intermediate_size: int = count(7688, most=2**24)
    moe_latent_size: int | None = count(None, most=2**20)

    def _check(self) -> None:
        super()._check()
        check_multiple(self, "mamba_num_heads", "n_groups")

    @classmethod
    def _standard_fields(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        values = super()._standard_fields(fields)
        pattern, layer_types = values.pop("hybrid_override_pattern", None), values.get("layer_types")
        if layer_types is None and pattern is not None:
            if not isinstance(pattern, str) or set(pattern) - set(_LETTERS):
                letters = " ".join(_LETTERS)
                raise ConfigError(f"hybrid_override_pattern must have one of {letters} per layer, got {short(pattern)}")
            layer_types = [_LETTERS[letter] for letter in pattern]
        layer_types = cls.layer_types if layer_types is None else layer_types
        if layer_types and isinstance(layer_types, list | tuple):
            layer_types = [
                _OLD_LAYER_TYPES.get(layer_type, layer_type) if isinstance(layer_type, str) else layer_type
                for layer_type in layer_types
            ]
            values["num_hidden_layers"] = len(layer_types)
        return values | {"layer_types": layer_types}

    def to_hf(self) -> dict[str, Any]:
        fields = super().to_hf()
        del fields["layer_types"]
        letters = {layer_type: letter for letter, layer_type in _LETTERS.items()}
        pattern = "".join(letters[layer_type] for layer_type in self.layer_types)
        layer_fields = {"layers_block_type": list(self.layer_types), "hybrid_override_pattern": pattern}
        return fields | layer_fields | {"layer_norm_epsilon": fields.pop("rms_norm_eps")}

    @property
    def sparse_layers(self) -> Sequence[bool]:
        return tuple(layer_type == EXPERTS for layer_type in self.layer_types)

    @property
    def experts(self) -> int:
        return self.n_routed_experts if any(self.sparse_layers) else 0  # Nemotron-H has no experts

    @property
    def empty_tensors(self) -> Mapping[str, tuple[int, ...]]:
        return {}


class NemotronH(DenseOrMoE):
    """Nemotron-H and Nemotron 3 language models."""

    configs = (NemotronHConfig,)

    def layer_type(self, index: int) -> str:
        return self.config.layer_types[index]

    def layer(
        self, index: int, form: type[Layer] = Layer, *, dtype: jnp.dtype, rngs: nnx.Rngs | None, **options: Any
    ) -> SingleLayer:
        c, kw = self.config, ParamOptions(dtype=dtype, rngs=rngs)
        attention = functools.partial(self.gqa, index, bias=False, rotary=None)
        builders = {MAMBA: self._mamba, ATTENTION: attention, DENSE: self._dense, EXPERTS: self._experts}
        return SingleLayer(self.norm_class(c.hidden_size, c.rms_norm_eps, **kw), builders[self.layer_type(index)](**kw))

    def _mamba(self, **kw: Unpack[ParamOptions]) -> Mamba2:
        c = self.config
        heads = DeltaDims(c.hidden_size, c.n_groups, c.mamba_num_heads, c.ssm_state_size, c.mamba_head_dim)
        options = {"taps": c.conv_kernel, "bias": c.use_bias, "conv_bias": c.use_conv_bias, **kw}
        return Mamba2(heads, eps=c.rms_norm_eps, min_step=c.time_step_min, mesh=self.strategy.mesh, **options)

    def _dense(self, width: int | None = None, **kw: Unpack[ParamOptions]) -> UngatedMLP:
        c = self.config
        return UngatedMLP(c.hidden_size, width or c.intermediate_size, bias=c.mlp_bias, activation=relu2, **kw)

    def _experts(self, **kw: Unpack[ParamOptions]) -> MoE:
        c, s, latent = self.config, self.strategy, self.config.moe_latent_size
        experts = UngatedExperts(
            latent or c.hidden_size, c.moe_intermediate_size, c.experts, matmul=s.matmul, rules=s.rules,
            activation=relu2, **kw,
        )  # fmt: skip
        shared = self._dense(c.moe_shared_expert_intermediate_size, **kw)
        parts = self.router(**kw), experts, s.dispatch, shared, s.mesh
        if latent is None:
            return MoE(*parts)
        reduce = Linear((c.hidden_size,), (latent,), ("embed", "latent"), bias=c.mlp_bias, **kw)
        expand = Linear((latent,), (c.hidden_size,), ("latent", "embed"), bias=c.mlp_bias, **kw)
        return LatentMoE(*parts, reduce=reduce, expand=expand)

    def router(self, **kw: Unpack[ParamOptions]) -> Router:
        """Build the router. Its kernel is float32 regardless of ``dtype``, as in transformers."""
        router = super().router(dtype=jnp.dtype(jnp.float32), rngs=kw["rngs"])
        router.kernel.set_metadata(keeps_dtype=True)
        return router


_PARTS = ("up", "down")
_HF: Hf = {
    "embed.table": W("model.embeddings.weight"),
    "norm.scale": W("model.norm_f.weight"),
    "head.kernel": W("lm_head.weight"),
    **{f"layer.{part}_norm.scale": W("norm.weight") for part in ("attention", "mlp", "moe")},
    **hf_mamba2("mixer"),
    "layer.moe.router.kernel": W("mixer.gate.weight"),
    "layer.moe.router.bias": W("mixer.gate.e_score_correction_bias"),
    **{
        f"layer.moe.experts.{x}": (W("mixer.experts").each(f"{x}_proj.weight"), W(f"mixer.experts.{x}_proj"))
        for x in _PARTS
    },
}
_LINEAR = {f"layer.attention.{x}": f"{x}_proj" for x in "qkvo"} | {f"layer.mlp.{x}": f"{x}_proj" for x in _PARTS}
_LINEAR |= {f"layer.moe.shared.{x}": f"shared_experts.{x}_proj" for x in _PARTS}
_LINEAR |= {"layer.moe.reduce": "fc1_latent_proj", "layer.moe.expand": "fc2_latent_proj"}
_HF |= {
    f"{key}.{end}": W(f"mixer.{name}.{hf_end}")
    for key, name in _LINEAR.items()
    for end, hf_end in (("kernel", "weight"), ("bias", "bias"))
}

FAMILY = Family(model=NemotronH, hf=_HF, hf_root="backbone.", peft_excluded=("attention.out",))
