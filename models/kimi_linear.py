"""Kimi Linear (Moonshot AI, 2025), after the implementation in transformers.

Most layers are `KimiDelta`s; the others have DeepSeek-V3's attention without rotation. The experts are DeepSeek-V3's in
one group, under Mixtral's names.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nnxmoe.config.bounds import ConfigError, count, one_of, per_layer
from nnxmoe.config.printable import short
from nnxmoe.layers.delta import DeltaHeads
from nnxmoe.layers.kimi_delta import FreeDecays, KimiDelta, KimiProjection
from nnxmoe.model.weight_names import W, options
from nnxmoe.models.deepseek_v3 import DeepSeekV3
from nnxmoe.models.grouped_experts import HF_GROUPED_EXPERTS
from nnxmoe.models.latent import LatentMoEConfig
from nnxmoe.models.tables import HF_DECODER, HF_LATENT, HF_MLP, Hf

LINEAR, FULL = "linear_attention", "full_attention"
NESTED = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
NESTED |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}


def unfolded(config: Any, names: Mapping[str, str]) -> Mapping[str, Any]:
    """``linear_attn_config`` of a config, which becomes null: its fields win over those that have these names. Raises
    ConfigError if it is no object."""
    nested = config.linear_attn_config
    if nested is not None and not isinstance(nested, Mapping):
        raise ConfigError(f"linear_attn_config must be an object or null, got {short(nested)}")
    for theirs, ours in names.items():
        object.__setattr__(config, ours, (nested or {}).get(theirs, getattr(config, ours)))
    object.__setattr__(config, "linear_attn_config", None)
    return nested or {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiHybridConfig(LatentMoEConfig):
    """``layer_types``, ``mlp_layer_types``: the kinds of each layer's attention and feed-forward. ``linear_…``: heads
    of the recurrent layers, their width, and the length of the convolutions."""

    aliases = {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    }
    fixed = {"moe_router_activation_func": (None, "sigmoid"), "use_grouped_topk": (None, True)}

    q_lora_rank: int | None = count(None, most=2**20)
    tie_word_embeddings: bool = one_of(False)  # which transformers does not do, whatever the file says
    rope_interleave: bool = one_of(True)
    linear_head_dim: int = count(128, most=2**16)
    linear_num_heads: int = count(32, most=2**14)
    linear_conv_kernel_dim: int = count(4, least=2, most=256)
    layer_types: Sequence[str] | None = per_layer(LINEAR, FULL)
    mlp_layer_types: Sequence[str] | None = per_layer("dense", "sparse")
    first_k_dense_replace: int = count(1, least=0)

    def to_hf(self) -> dict[str, Any]:
        return {"num_experts" if name == "n_routed_experts" else name: x for name, x in super().to_hf().items()}

    @property
    def sparse_layers(self) -> Sequence[bool]:
        return super().sparse_layers if self.mlp_layer_types is None else [x == "sparse" for x in self.mlp_layer_types]

    @property
    def delta_heads(self) -> DeltaHeads:
        """The heads of the recurrent layers."""
        heads, width = self.linear_num_heads, self.linear_head_dim
        return DeltaHeads(self.hidden_size, heads, heads, width, width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(KimiHybridConfig):
    """``linear_attn_config``: the fields ``linear_…`` and the recurrent layers, counted from 1, as published; kept as
    the other fields. ``layer_types`` null, without it too: every fourth from the fifth on is attention."""

    model_type = "kimi_linear"
    architecture = "KimiLinearForCausalLM"
    fixed = {"mla_use_nope": (None, True)}

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
    linear_attn_config: Mapping[str, Any] | None = None
    bos_token_id: int | None = 163584
    eos_token_id: int | Sequence[int] | None = 163586
    pad_token_id: int | None = 163839

    def __post_init__(self) -> None:
        nested = unfolded(self, NESTED)
        if self.layer_types is None and {"full_attn_layers", "kda_layers"} <= nested.keys():
            object.__setattr__(self, "layer_types", self._kinds(nested["kda_layers"], nested["full_attn_layers"]))
        super().__post_init__()

    def _kinds(self, linear: Any, full: Any) -> Sequence[str]:
        numbers = range(1, self.num_hidden_layers + 1) if isinstance(self.num_hidden_layers, int) else ()
        both = [i for part in (linear, full) if isinstance(part, list | tuple) for i in part]
        if any(type(i) is not int for i in both) or sorted(both) != [*numbers]:
            raise ConfigError(
                f"linear_attn_config: kda_layers {short(linear)} and full_attn_layers {short(full)} must name each of "
                f"the layers 1 … {short(self.num_hidden_layers)} once"
            )
        return tuple(LINEAR if i in linear else FULL for i in numbers)

    def to_hf(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_hf().items() if name != "linear_attn_config"}

    @property
    def rope_fields(self) -> Mapping[str, Any]:
        return {}  # nothing is rotated, whatever the file says

    @property
    def rotary(self) -> None:
        return None

    @property
    def recurrent_layers(self) -> Sequence[bool]:
        """Whether each layer is recurrent."""
        if self.layer_types:
            return tuple(kind == LINEAR for kind in self.layer_types)
        return tuple(i % 4 > 0 or i == 0 for i in range(self.num_hidden_layers))


HF_KIMI_DELTA: Hf = {
    **{f"layer.attention.project.{x}.kernel": W(f"self_attn.{x}_proj.weight") for x in "qkvgb"},
    **{f"layer.attention.project.g.{x}.kernel": W(f"self_attn.g_{x}_proj.weight") for x in "ab"},
    **{f"layer.attention.conv.{x}.weight": W(f"self_attn.{x}_conv1d.weight") for x in "qkv"},
    "layer.attention.norm.scale": W("self_attn.o_norm.weight"),
    "layer.attention.out.kernel": W("self_attn.o_proj.weight"),
}
_FORGET = {"a_log": "A_log", "dt_bias": "dt_bias", "project.f.kernel": "f_proj.weight"}
_FORGET |= {f"project.f.{x}.kernel": f"f_{x}_proj.weight" for x in "ab"}
HF_KIMI_DELTA |= {  # the second names are those of transformers in memory
    f"layer.attention.{ours}": (W(f"self_attn.{theirs}"), W(f"self_attn.forget_gate.{theirs}"))
    for ours, theirs in _FORGET.items()
}
_SPARSE, _PARTS = "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}
_NAMES = {
    "layer.moe.router.kernel": W(f"{_SPARSE}.gate.weight"),
    "layer.moe.router.bias": W(f"{_SPARSE}.gate.e_score_correction_bias"),
    **{f"layer.moe.experts.{x}": W(f"{_SPARSE}.experts").each(f"{w}.weight") for x, w in _PARTS.items()},
    **{f"layer.moe.shared.{x}.kernel": W(f"{_SPARSE}.shared_experts.{x}_proj.weight") for x in _PARTS},
}
_TABLE: Hf = HF_DECODER | HF_LATENT | HF_MLP | HF_GROUPED_EXPERTS | HF_KIMI_DELTA
_TABLE |= {key: (name, *options(_TABLE, key)) for key, name in _NAMES.items()}
# Dense layers are saved as the second by transformers 5.24, whose name in memory is the last.
_DENSE = "mlp", _SPARSE, "mlp"
_TABLE |= {f"layer.mlp.{x}.kernel": tuple(W(f"{name}.{x}_proj.weight") for name in _DENSE) for x in _PARTS}


class KimiHybrid(DeepSeekV3):
    """Layers of two kinds of attention; each family has a recurrent one of its own."""

    maxtext_table = {}

    def kind(self, index: int) -> Any:
        return self.config.recurrent_layers[index], self.config.sparse_layers[index]


class KimiLinear(KimiHybrid):
    """Kimi-Linear-48B-A3B."""

    configs = (KimiLinearConfig,)
    presets = {
        "kimi-linear-48b-a3b": KimiLinearConfig(
            layer_types=tuple(FULL if i in (4, 8, 12, 16, 20, 24, 27) else LINEAR for i in range(1, 28)),
            dtype="bfloat16",
        )
    }
    hub_ids = {"kimi-linear-48b-a3b": "moonshotai/Kimi-Linear-48B-A3B-Instruct"}
    hub_notes = {}
    hf_table = _TABLE

    def attention(self, index: int, **kw: Any) -> Any:
        c = self.config
        if not c.recurrent_layers[index]:
            return super().attention(index, **kw)
        project, taps = KimiProjection(c.delta_heads, c.linear_head_dim, **kw), c.linear_conv_kernel_dim
        rates = 1, 1, c.linear_num_heads, 1
        return KimiDelta(c.delta_heads, project, FreeDecays(), rates=rates, taps=taps, eps=c.rms_norm_eps, **kw)
