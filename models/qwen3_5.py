"""Dense and mixture-of-experts text models of Qwen3.5, Qwen3.6 and Qwen3.8 (Qwen team 2026).

The layers are as in Qwen3-Next, but recurrent layers have separate kernels for z, b and a. The rotary embedding has
three dimensions. Text has equal positions in all three. The multi-token prediction layer is loaded only with
``mtp=True``.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import count, one_of
from nnxmoe.config.rope_parameters import MROPE_FIELDS
from nnxmoe.layers.recurrent.delta import DeltaDims, SeparateProjection
from nnxmoe.model.family import Family, LayerBlocks
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.qwen_hybrid import (
    HF_HYBRID,
    MAXTEXT_HYBRID,
    MTP_PREFIXES,
    QwenHybrid,
    QwenHybridConfig,
    QwenHybridMaxText,
)
from nnxmoe.models.shared.qwen_moe import HF_SHARED, QwenMoe, QwenMoeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(QwenHybridConfig):
    """Fields shared by the configs of Qwen3.5's text models. `QwenHybridConfig` describes the other fields.

    ``mtp_num_hidden_layers`` is the number of multi-token prediction layers. It is 1 in all published files.
    """

    ignored = f"{MROPE_FIELDS} mtp_use_dedicated_embeddings mamba_ssm_dtype"
    fixed = {
        "attn_output_gate": (True,),
        "output_gate_type": (None, "swish", "silu"),  # activation of the gate in recurrent layers; vLLM reads it
    }

    vocab_size: int = 248320
    num_attention_heads: int = 16
    mtp_num_hidden_layers: int = count(1, least=0, most=1)

    @property
    def num_nextn_predict_layers(self) -> int:
        """Number of prediction layers. Alias of ``mtp_num_hidden_layers`` for shared code."""
        return self.mtp_num_hidden_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5TextConfig(Qwen3_5Config):
    """Text config of dense Qwen3.5 models, with the fields of `Qwen3_5Config`."""

    model_type = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"

    intermediate_size: int = 12288
    num_key_value_heads: int | None = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeTextConfig(Qwen3_5Config, QwenMoeConfig):
    """Text config of Qwen3.5-MoE. All layers have experts. The weights of the selected experts sum to 1.

    ``shared_expert_intermediate_size`` is the width of the shared expert.
    """

    model_type = "qwen3_5_moe_text"
    architecture = "Qwen3_5MoeForCausalLM"

    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_key_value_heads: int | None = 2
    moe_intermediate_size: int = count(512, most=2**24)
    shared_expert_intermediate_size: int = count(512, most=2**24)
    num_experts: int = count(256, most=4096)
    norm_topk_prob: bool = one_of(True)
    decoder_sparse_step: int = one_of(1)
    mlp_only_layers: Sequence[int] | None = one_of(None, ())


_PROJECT = "layer.attention.project"


class Qwen3_5Text(QwenHybrid):
    """Text model of dense Qwen3.5."""

    configs = (Qwen3_5TextConfig,)

    def project(self, heads: DeltaDims, **kw: Unpack[ParamOptions]) -> SeparateProjection:
        return SeparateProjection(heads, **kw)


class Qwen3_5MoeText(QwenHybrid, QwenMoe):
    """Text model of Qwen3.5-MoE."""

    configs = (Qwen3_5MoeTextConfig,)

    def project(self, heads: DeltaDims, **kw: Unpack[ParamOptions]) -> SeparateProjection:
        return SeparateProjection(heads, **kw)


_PROJECTIONS = {f"layer.attention.project.{x}.kernel": W(f"linear_attn.in_proj_{x}.weight") for x in ("qkv", *"zba")}
_MAXTEXT_PROJECTIONS = {
    f"{_PROJECT}.{x}.kernel": (f"attention/in_proj_{name}/kernel", ("embed", "gdn_head"))
    for x, name in (("qkv", "qkvz"), ("z", "qkvz"), ("b", "ba"), ("a", "ba"))
}


class Qwen3_5MaxText(QwenHybridMaxText):
    """Names of Qwen3.5 in MaxText."""

    def layers(self, config: Any) -> LayerBlocks:
        """Return blocks as in Qwen3-Next, but with a separate group per layer of a block."""
        return LayerBlocks(super().layers(config).layer_types, "layers/layer_{}")

    def columns(self, config: Any) -> Mapping[str, tuple[int, ...]]:
        """Return columns in MaxText's arrays, in which outputs are ordered by key head as in `FusedProjection`."""
        heads = config.delta_heads
        width, ba = heads.channels + heads.value_heads * heads.value_dim, 2 * heads.value_heads
        split_columns = heads.split(*(jnp.arange(size).reshape(heads.key_heads, -1) for size in (width, ba)))
        named_columns = zip(("qkv", "z", "b", "a"), split_columns, strict=True)
        return {f"{_PROJECT}.{x}.kernel": tuple(np.asarray(columns).ravel().tolist()) for x, columns in named_columns}


QWEN3_5_TEXT = Family(model=Qwen3_5Text, hf={**HF_HYBRID, **_PROJECTIONS}, mtp_prefixes=MTP_PREFIXES)

QWEN3_5_MOE_TEXT = Family(
    model=Qwen3_5MoeText,
    hf={**HF_HYBRID, **HF_SHARED, **_PROJECTIONS},
    maxtext=Qwen3_5MaxText({**MAXTEXT_HYBRID, **_MAXTEXT_PROJECTIONS}),
    mtp_prefixes=MTP_PREFIXES,
)
FAMILIES = (QWEN3_5_TEXT, QWEN3_5_MOE_TEXT)
