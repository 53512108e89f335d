"""Ling 3.0 (Ant Group, 2026), based on the implementation in transformers.

Unlike Kimi Linear, Ling 3 has bounded decays, experts in groups, and attention with a rotary embedding and an output
gate per head. Published files have the class name ``BailingMoeV3ForCausalLM``. The multi-token prediction layer is not
loaded.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import Count, count, number
from nnxmoe.config.rope_parameters import FIELDS as ROPE_FIELDS
from nnxmoe.config.validate import python_values
from nnxmoe.layers.attention.gqa import OutputGate
from nnxmoe.layers.context import Attention
from nnxmoe.layers.recurrent.delta import DeltaDims
from nnxmoe.layers.recurrent.kimi_delta import BoundedDecays, KimiDelta, unbounded_decays
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W, options
from nnxmoe.models.deepseek_v3 import DeepSeekV3
from nnxmoe.models.kimi_linear import KimiMoEConfig
from nnxmoe.models.shared.grouped_experts import HF_GROUPED_EXPERTS
from nnxmoe.models.shared.kimi_hybrid import HF_KIMI_DELTA, KimiHybrid
from nnxmoe.models.shared.tables import HF_DECODER, HF_LATENT, Hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class BailingHybridConfig(KimiMoEConfig):
    """Config of Ling 3.

    Attributes:
        head_dim: Width of a head in recurrent layers.
        linear_head_dim: Alternative name of ``head_dim`` in config.json. Overrides ``head_dim``. Always
            None in a config.
        linear_num_heads: Number of heads in recurrent layers. If None, ``num_attention_heads`` is used.
        layer_group_size: Interval between attention layers. Used if ``layer_types`` is null.
        kda_safe_gate: Whether the log decays are bounded to the range ``kda_lower_bound`` … 0.
        kda_lower_bound: Lower bound of the log decays.
    """

    model_type = "bailing_hybrid"
    architecture = "BailingHybridForCausalLM"
    published_architectures = "BailingMoeV3ForCausalLM"
    aliases = {"short_conv_kernel_size": "linear_conv_kernel_dim"}
    # Fields of the published code. ``partial_rotary_factor`` is qk_rope_head_dim / head_dim, so it has no effect.
    fixed = {
        **dict.fromkeys(("no_kda_lora", "use_qk_norm", "moe_router_enable_expert_bias"), (None, True)),
        **dict.fromkeys(("use_kda_lora", "use_mla_nope", "use_bias", "use_qkv_bias", "use_nGPT"), (None, False)),
        **dict.fromkeys(("scale_router_input", "up_proj_norm", "value_norm"), (None, False)),
        **dict.fromkeys(("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"), (None,)),
        "gated_attention_proj_granularity_type": (None, "head_wise"),
        "score_function": (None, "sigmoid"),
        "partial_rotary_factor": (None, 0.5, 1),
    }
    rope_keys = ROPE_FIELDS - {"partial_rotary_factor"}
    ignored = """mtp_loss_scaling_factor mtp_use_kda embedding_dropout output_dropout group_norm_size linear_silu
        max_window_layers moe_shared_expert_intermediate_size num_kv_heads_for_linear_attn qk_head_dim rotary_dim
        router_dtype rope_parameters.partial_rotary_factor rope_scaling.partial_rotary_factor"""

    vocab_size: int = 157184
    hidden_size: int = 2560
    intermediate_size: int = 6144
    num_hidden_layers: int = 42
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    head_dim: int | None = count(128, most=2**16)
    max_position_embeddings: int = 262144
    rope_theta: float = 6e6
    moe_intermediate_size: int = count(768, most=2**24)
    n_routed_experts: int = count(512, most=4096)
    first_k_dense_replace: int = count(2, least=0)
    linear_head_dim: int | None = count(None, most=2**16)
    linear_num_heads: int | None = count(None, most=2**14)
    layer_group_size: int = count(6)
    kda_safe_gate: bool = True
    kda_lower_bound: float = number(-5.0, above=-1e3, most=-1e-6)
    bos_token_id: int | None = None
    eos_token_id: int | Sequence[int] | None = 156895
    pad_token_id: int | None = 156892

    def __post_init__(self) -> None:
        if self.linear_head_dim is not None:
            Count(most=2**16)("linear_head_dim", python_values(self.linear_head_dim))
            object.__setattr__(self, "head_dim", self.linear_head_dim)
            object.__setattr__(self, "linear_head_dim", None)
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", type(self).head_dim)
        if self.linear_num_heads == self.num_attention_heads:
            object.__setattr__(self, "linear_num_heads", None)
        super().__post_init__()

    @property
    def recurrent_heads(self) -> int:
        """Number of heads in recurrent layers."""
        return self.linear_num_heads or self.num_attention_heads

    @property
    def delta_heads(self) -> DeltaDims:
        heads, width = self.recurrent_heads, self.head_dim
        assert width is not None
        return DeltaDims(self.hidden_size, heads, heads, width, width)

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"linear_head_dim": self.head_dim, "linear_num_heads": self.recurrent_heads}

    def recurrent_by_default(self, index: int) -> bool:
        return (index + 1) % self.layer_group_size > 0


class BailingHybrid(KimiHybrid, DeepSeekV3):
    """Ling 3.0 Flash language model."""

    configs = (BailingHybridConfig,)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        c = self.config
        if c.recurrent_layers[index]:
            return self.recurrent(**kw)
        return self.mla(gate=OutputGate(c.hidden_size, c.num_attention_heads, 1, **kw), **kw)

    def recurrent(self, **kw: Unpack[ParamOptions]) -> KimiDelta:
        c = self.config
        decays = BoundedDecays(c.kda_lower_bound) if c.kda_safe_gate else unbounded_decays
        return self.delta(decays, (None, None), (c.recurrent_heads,), **kw)


_TABLE: Hf = HF_DECODER | HF_LATENT | HF_GROUPED_EXPERTS | HF_KIMI_DELTA
_TABLE |= {"layer.attention.gate.g.kernel": W("self_attn.g_proj.weight")}
_RENAMED = {"self_attn.o_proj": "attention.dense", "self_attn": "attention", "embed_tokens": "word_embeddings",
            "e_score_correction_bias": "expert_bias"}  # fmt: skip


def _published(row: W) -> W:
    name = row.name
    for name_part, replacement in _RENAMED.items():
        name = name.replace(name_part, replacement)
    return dataclasses.replace(row, name=name)


FAMILY = Family(
    model=BailingHybrid,
    hf={key: tuple(dict.fromkeys((*map(_published, options(_TABLE, key)), *options(_TABLE, key)))) for key in _TABLE},
)
