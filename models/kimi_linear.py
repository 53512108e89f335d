"""Kimi Linear (Moonshot AI, 2025), based on the implementation in transformers.

Most layers are recurrent (`KimiDelta`). The other layers have DeepSeek-V3's attention without rotary embedding. The
experts are as in DeepSeek-V3, with a single group and Mixtral's names.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, count, one_of, per_layer
from nnxmoe.config.printable import short
from nnxmoe.layers.recurrent.kimi_delta import KimiDelta, unbounded_decays
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W, options
from nnxmoe.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
from nnxmoe.models.shared.grouped_experts import HF_GROUPED_EXPERTS
from nnxmoe.models.shared.kimi_hybrid import (
    FULL,
    HF_KIMI_DELTA,
    LINEAR,
    KimiHybrid,
    KimiHybridConfig,
    NestedDeltaConfig,
)
from nnxmoe.models.shared.tables import HF_DECODER, HF_LATENT, Hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiMoEConfig(DeepSeekV3Config, KimiHybridConfig):
    """Config fields shared by Kimi Linear and Ling 3, named as in their published files.

    ``mlp_layer_types`` is ``dense`` or ``sparse`` per layer. If null, the first ``first_k_dense_replace`` layers are
    dense.
    """

    aliases = {
        "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group", "num_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
    }  # fmt: skip
    fixed = {"moe_router_activation_func": (None, "sigmoid"), "use_grouped_topk": (None, True)}

    q_lora_rank: int | None = count(None, most=2**20)
    tie_word_embeddings: bool = one_of(False)  # transformers never ties these models
    rope_interleave: bool = one_of(True)
    mlp_layer_types: Sequence[str] | None = per_layer("dense", "sparse")
    first_k_dense_replace: int = count(1, least=0)

    def to_hf(self) -> dict[str, Any]:
        return {"num_experts" if name == "n_routed_experts" else name: x for name, x in super().to_hf().items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(KimiMoEConfig, NestedDeltaConfig):
    """Config of Kimi Linear.

    ``linear_attn_config`` may also list the recurrent layers and the attention layers, numbered from 1. Without these
    lists and ``layer_types``, every fourth layer is an attention layer, starting at index 4.
    """

    model_type = "kimi_linear"
    architecture = "KimiLinearForCausalLM"
    fixed = {"mla_use_nope": (None, True)}
    rotates = False

    vocab_size: int = 163840
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 27
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-5
    moe_intermediate_size: int = count(1024, most=2**24)
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 2.446
    num_nextn_predict_layers: int = one_of(0)
    bos_token_id: int | None = 163584
    eos_token_id: int | Sequence[int] | None = 163586
    pad_token_id: int | None = 163839

    def unnested(self, given: Mapping[str, Any]) -> dict[str, Any]:
        delta_fields = super().unnested(given)
        if self.layer_types is None and {"full_attn_layers", "kda_layers"} <= given.keys():
            delta_fields["layer_types"] = self._kinds(given["kda_layers"], given["full_attn_layers"])
        return delta_fields

    def _kinds(self, linear: Any, full: Any) -> Sequence[str]:
        listed_layers = [i for layers in (linear, full) if isinstance(layers, list | tuple) for i in layers]
        numbers = range(1, len(listed_layers) + 1)
        if (
            any(type(i) is not int for i in listed_layers)
            or sorted(listed_layers) != [*numbers]
            or len(listed_layers) != self.num_hidden_layers
        ):
            raise ConfigError(
                f"linear_attn_config: kda_layers {short(linear)} and full_attn_layers {short(full)} must list each of "
                f"the layers 1 … {short(self.num_hidden_layers)} once"
            )
        return tuple(LINEAR if i in linear else FULL for i in numbers)

    def recurrent_by_default(self, index: int) -> bool:
        return index % 4 > 0 or index == 0


class KimiLinear(KimiHybrid, DeepSeekV3):
    """Kimi-Linear-48B-A3B language model."""

    configs = (KimiLinearConfig,)

    def recurrent(self, **kw: Unpack[ParamOptions]) -> KimiDelta:
        c, rank = self.config, self.config.linear_head_dim
        return self.delta(unbounded_decays, (rank, rank), (1, 1, c.linear_num_heads, 1), **kw)


_SPARSE, _PARTS = "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}
_NAMES = {
    "layer.moe.router.kernel": W(f"{_SPARSE}.gate.weight"),
    "layer.moe.router.bias": W(f"{_SPARSE}.gate.e_score_correction_bias"),
    **{f"layer.moe.experts.{x}": W(f"{_SPARSE}.experts").each(f"{w}.weight") for x, w in _PARTS.items()},
    **{f"layer.moe.shared.{x}.kernel": W(f"{_SPARSE}.shared_experts.{x}_proj.weight") for x in _PARTS},
}
_TABLE: Hf = HF_DECODER | HF_LATENT | HF_GROUPED_EXPERTS | HF_KIMI_DELTA
_TABLE |= {key: (name, *options(_TABLE, key)) for key, name in _NAMES.items()}
# Names on the Hugging Face Hub, in files saved by transformers 5.24, and in memory. `in_transformers` returns the last.
_DENSE = "mlp", _SPARSE, "mlp"
_TABLE |= {f"layer.mlp.{x}.kernel": tuple(W(f"{name}.{x}_proj.weight") for name in _DENSE) for x in _PARTS}

FAMILY = Family(model=KimiLinear, hf=_TABLE)
