"""The text model of Step-3.5-Flash and Step-3.7-Flash (StepFun, 2026), based on the implementation in transformers.

Grouped-query attention has normalized heads and an output gate per head. Sliding-window layers have more heads and a
different rotary embedding. The experts are as in DeepSeek-V3, with a single group and a shared expert. The last layers
clamp their activations. Multi-token prediction layers are not loaded.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import MAX_LAYERS, ConfigError, Count, Number, count, per_layer
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.layer_types import FULL, SLIDING, PartialRopesConfig
from nnxmoe.config.printable import short
from nnxmoe.layers.activations import GatedActivation, swiglu
from nnxmoe.layers.attention.gqa import GQA, OutputGate, QKNorm
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import OffsetNorm
from nnxmoe.layers.rope import PartialRotary
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.grouped_experts import corrected_router
from nnxmoe.models.shared.tables import HF_DECODER, Hf
from nnxmoe.moe.block import MoE

# Lists that have additional entries for prediction layers in published files.
_PADDED = "layer_types mlp_layer_types swiglu_limits swiglu_limits_shared rope_theta partial_rotary_factors".split()
# Field of a rope object -> top-level field of published files.
_ROPE = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factors"}


def _drop_prediction_entries(values: dict[str, Any], layers: int) -> None:
    """Truncate lists of published files to one entry per layer. The other entries are for prediction layers."""
    mtp_layers = values.get("num_nextn_predict_layers", Step3p5Config.num_nextn_predict_layers)
    Count(0, MAX_LAYERS)("num_nextn_predict_layers", mtp_layers)
    for name in _PADDED:
        entries = values.get(name)
        if mtp_layers and isinstance(entries, list) and len(entries) == layers + mtp_layers:
            values[name] = entries[:layers]


def _read_moe_layers(values: dict[str, Any], layers: int) -> None:
    """Set ``mlp_layer_types`` from the published ``moe_layers_enum``."""
    moe_layers = values.get("moe_layers_enum")
    if moe_layers is not None and values.get("mlp_layer_types") is None:
        sparse_layers = _numbers(moe_layers)
        values["mlp_layer_types"] = ["sparse" if i in sparse_layers else "dense" for i in range(layers)]


def _read_sliding_heads(values: dict[str, Any], attention_types: Sequence[Any]) -> None:
    """Set ``num_sliding_attention_heads`` from the published ``attention_other_setting``.

    Raises ConfigError if ``per_layer_config``, a field that transformers saves, has different numbers.
    """
    setting = values.get("attention_other_setting")
    if setting and not isinstance(setting, Mapping):
        raise ConfigError(f"attention_other_setting must be an object or null, got {short(setting)}")
    if setting and values.get("num_sliding_attention_heads") is None:
        values["num_sliding_attention_heads"] = setting.get("num_attention_heads")
    heads, overrides = values.get("num_sliding_attention_heads"), values.get("per_layer_config")
    expected = {}
    if heads is not None and heads != values.get("num_attention_heads", Step3p5Config.num_attention_heads):
        sliding_layers = [i for i, attention_type in enumerate(attention_types) if attention_type == SLIDING]
        expected = {str(i): {"num_attention_heads": heads} for i in sliding_layers}
    if overrides is not None and overrides != expected:
        raise ConfigError(f"per_layer_config {short(overrides)} differs from num_sliding_attention_heads {heads}")


def _read_layer_ropes(values: dict[str, Any], attention_types: Sequence[Any], layers: int) -> None:
    """Set ``rope_parameters`` from published fields.

    ``rope_theta`` and ``partial_rotary_factors`` have one value per layer. ``rope_scaling`` is for full attention only.
    """
    scaling = values.get("rope_scaling") or {}
    if values.get("rope_parameters") or not isinstance(attention_types, list) or not isinstance(scaling, Mapping):
        return
    ropes: dict[str, dict[str, Any]] = {}
    for attention_type in {*map(str, attention_types), FULL}:
        i = attention_types.index(attention_type) if attention_type in attention_types else 0
        rope = {rope_name: _layer_value(values, name, i, layers) for rope_name, name in _ROPE.items()}
        ropes[attention_type] = {"rope_theta": 1e4} | {name: x for name, x in rope.items() if x is not None}
    ropes[FULL] |= scaling
    values["rope_parameters"] = ropes
    for name in ("rope_scaling", "rope_theta"):
        values.pop(name, None)


def _numbers(value: Any) -> set[int]:
    """Return the layer indices in ``moe_layers_enum``, a list or a comma-separated string."""
    items = value.split(",") if isinstance(value, str) else value
    texts = [str(item).strip() for item in items] if isinstance(items, list) else ["?"]
    if any(text and not text.isdecimal() for text in texts):
        raise ConfigError(f"moe_layers_enum must list layer indices, got {short(value)}")
    return {int(text) for text in texts if text}


def _layer_value(values: Mapping[str, Any], name: str, index: int, layers: int) -> Any:
    """Return the value of a field for a layer. The field is a list, or one value for all layers."""
    value = values.get(name)
    if isinstance(value, list) and len(value) != layers:
        raise ConfigError(f"{name} lists {len(value)} layers, not {layers} as in num_hidden_layers")
    return value[index] if isinstance(value, list) else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step3p5Config(PartialRopesConfig):
    """Config of Step-3.5-Flash. If ``layer_types`` is null, all layers are full attention.

    Published files have ``moe_layers_enum`` instead of ``mlp_layer_types``, and ``attention_other_setting`` instead of
    ``num_sliding_attention_heads``. They have ``rope_theta``, ``partial_rotary_factors`` and ``rope_scaling`` instead
    of ``rope_parameters``.

    Attributes:
        num_sliding_attention_heads: Query heads of sliding-window layers. Defaults to ``num_attention_heads``.
        mlp_bias: Whether dense layers and shared experts have biases.
        mlp_layer_types: ``dense`` or ``sparse`` per layer. If null, all layers except the first three are sparse.
        moe_router_scaling_factor: Factor that multiplies the normalized weights of the selected experts.
        swiglu_limits: Bounds of the routed experts' activations, per layer. Null or 0 disables the bound.
        swiglu_limits_shared: Bounds of the activations in dense layers and shared experts, per layer.
    """

    model_type = "step3p5"
    architecture = "Step3p5ForCausalLM"
    experts_field = "n_routed_experts"
    aliases = {
        **dict.fromkeys(("num_local_experts", "moe_num_experts"), "n_routed_experts"),
        "moe_top_k": "num_experts_per_tok",
        "num_attention_groups": "num_key_value_heads",
        "num_mtp_layers": "num_nextn_predict_layers",
        "share_expert_dims": "share_expert_dim",
    }
    fixed = {
        "gating": (True, "per-head"),
        "use_bidirectional_attention": (False,),
        # Fields of the published code. transformers supports only these values.
        "att_impl_type": (None, "GQA"),
        "moe_every_n_layer": (None, 1),
        "moe_layer_offset": (None, 0),
        "moe_router_activation": (None, "sigmoid"),
        "norm_expert_weight": (None, True),
        "sink": (None, False),
        "use_head_wise_attn_gate": (None, True),
        "use_moe": (None, True),
        "use_moe_router_bias": (None, True),
        "use_qk_norm": (None, True),
        "use_rope_layers": (None, []),
        "yarn_only_types": (None, [FULL]),
        "zero_centered": (None, True),
    }
    ignored = """output_router_logits max_seq_len need_fp32_gate mtp_layer_types mtp_mlp_layer_types rope_theta
        moe_layers_enum attention_other_setting partial_rotary_factors per_layer_config"""  # in `_standard_fields`
    default_ropes = FrozenDict({attention_type: {"rope_theta": 1e4} for attention_type in (FULL, SLIDING)})
    scale_in_queries = True
    first_k_dense_replace = 3

    vocab_size: int = 128815
    intermediate_size: int = 11264
    num_hidden_layers: int = 45
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    num_sliding_attention_heads: int | None = count(None, most=2**14)
    head_dim: int | None = count(128, most=2**16)
    max_position_embeddings: int = 128000
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = count(None)
    mlp_layer_types: Sequence[str] | None = per_layer("dense", "sparse")
    moe_intermediate_size: int = count(1280, most=2**24)
    share_expert_dim: int = count(1280, most=2**24)
    n_routed_experts: int = count(288, most=4096)
    num_experts_per_tok: int = 8
    moe_router_scaling_factor: float = 1.0
    swiglu_limits: Sequence[float | None] | None = None
    swiglu_limits_shared: Sequence[float | None] | None = None
    num_nextn_predict_layers: int = count(0, least=0, most=1024)
    pad_token_id: int | None = 1

    @classmethod
    def _standard_fields(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        values = super()._standard_fields(fields)
        layers = values.get("num_hidden_layers", cls.num_hidden_layers)
        Count(1, MAX_LAYERS)("num_hidden_layers", layers)
        _drop_prediction_entries(values, layers)
        attention_types = values.get("layer_types") or [FULL] * layers
        if not isinstance(attention_types, list | tuple):
            attention_types = []  # the field's own check raises an error later
        _read_moe_layers(values, layers)
        _read_sliding_heads(values, attention_types)
        _read_layer_ropes(values, attention_types, layers)
        return values

    def _check(self) -> None:
        super()._check()
        if self.heads_of(SLIDING) % self.kv_heads:
            raise ConfigError(
                f"num_sliding_attention_heads {self.num_sliding_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.kv_heads}"
            )
        for name in ("swiglu_limits", "swiglu_limits_shared"):
            limits = getattr(self, name)
            if limits is not None and (not isinstance(limits, tuple) or len(limits) != self.num_hidden_layers):
                raise ConfigError(f"{name} {short(limits)} must list {self.num_hidden_layers} numbers, one per layer")
            for limit in filter(None, limits or ()):
                Number(0.0)(name, limit)

    def fold_query_scale(self) -> tuple[Self, float]:
        """Return the config unchanged, because in this family transformers reads ``query_pre_attn_scalar``."""
        return self, 1.0

    def heads_of(self, attention_type: str) -> int:
        """Return the number of query heads of a layer type."""
        return (attention_type == SLIDING and self.num_sliding_attention_heads) or self.num_attention_heads

    @property
    def attention_types(self) -> Sequence[str]:
        return self.layer_types or [FULL] * self.num_hidden_layers

    def activation(self, index: int, *, shared: bool) -> GatedActivation:
        """Return the activation of a layer's shared expert or dense feed-forward (``shared``), or of routed experts."""
        limits = self.swiglu_limits_shared if shared else self.swiglu_limits
        limit = limits[index] if limits else None
        return BoundedSwiGLU(limit) if limit else swiglu


@dataclasses.dataclass(frozen=True)
class BoundedSwiGLU:
    """Bounded SwiGLU: ``min(silu(gate), limit) * clip(up, -limit, limit)``."""

    limit: float

    def __call__(self, gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
        return jnp.minimum(jax.nn.silu(gate), self.limit) * jnp.clip(up, -self.limit, self.limit)


class Step3p5(CausalLM):
    """Step-3.5-Flash, and the text model of Step-3.7-Flash."""

    norm_class = OffsetNorm
    configs = (Step3p5Config,)

    def layer_type(self, index: int) -> Hashable:
        c = self.config
        activations = (c.activation(index, shared=shared) for shared in (False, True))
        return c.attention_types[index], c.sparse_layers[index], *activations

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> GQA:
        c, attention_type = self.config, self.config.attention_types[index]
        rope, count = c.rope_of(attention_type), c.heads_of(attention_type)
        return self.gqa(
            index,
            heads=count,
            bias=c.attention_bias,
            rotary=rope,
            rotate=PartialRotary(rope.dim),
            qk_norm=QKNorm.per_head(c.head_width, c.rms_norm_eps, norm=OffsetNorm, **kw),
            gate=OutputGate(c.hidden_size, count, 1, **kw),
            **kw,
        )

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> MLP | MoE:
        c, dim = self.config, self.config.hidden_size
        dense = functools.partial(MLP, dim, bias=c.mlp_bias, activation=c.activation(index, shared=True), **kw)
        if not c.sparse_layers[index]:
            return dense(width=c.intermediate_size)
        router = corrected_router(c, scale=c.moe_router_scaling_factor, **kw)
        activation = c.activation(index, shared=False)
        return self.moe(router, c.moe_intermediate_size, dense(width=c.share_expert_dim), activation=activation, **kw)


_GATE_UP = W("mlp.experts.gate_up_proj")
_HF: Hf = {
    **HF_DECODER,
    "layer.attention.gate.g.kernel": W("self_attn.g_proj.weight"),
    "layer.moe_norm.scale": W("post_attention_layernorm.weight"),
    "layer.moe.router.kernel": (W("moe.gate.weight"), W("mlp.gate.weight")),
    "layer.moe.router.bias": (W("moe.router_bias"), W("mlp.gate.e_score_correction_bias")),
    "layer.moe.experts.gate": (W("moe.gate_proj.weight"), _GATE_UP.rows(0, 2)),
    "layer.moe.experts.up": (W("moe.up_proj.weight"), _GATE_UP.rows(1, 2)),
    "layer.moe.experts.down": (W("moe.down_proj.weight"), W("mlp.experts.down_proj")),
    **{
        f"layer.moe.shared.{x}.{key}": (W(f"share_expert.{x}_proj.{end}"), W(f"mlp.shared_experts.{x}_proj.{end}"))
        for x in ("gate", "up", "down")
        for key, end in (("kernel", "weight"), ("bias", "bias"))
    },
}  # fmt: skip

FAMILY = Family(model=Step3p5, hf=_HF)
