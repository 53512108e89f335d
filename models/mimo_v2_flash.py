"""MiMo-V2-Flash (Xiaomi, 2025), based on the implementation in transformers.

In grouped-query attention, values are narrower than keys. Sliding-window layers have attention sinks and twice as many
key/value heads. The experts are as in DeepSeek-V3, without a shared expert. Multi-token prediction layers are not
loaded.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, count, number, per_layer
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.layer_types import FULL, SLIDING, PartialRopesConfig
from nnxmoe.config.validate import python_values
from nnxmoe.layers.attention.gqa import GQA, ConstantGate, Sinks
from nnxmoe.layers.rope import PartialRotary
from nnxmoe.model.family import Family
from nnxmoe.model.weight_names import W
from nnxmoe.models.shared.grouped_experts import HF_GROUPED_EXPERTS, DenseOrMoE, check_groups
from nnxmoe.models.shared.tables import HF_DECODER, Hf

_FACTOR = {"partial_rotary_factor": 0.334}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiMoV2FlashConfig(PartialRopesConfig):
    """Config of MiMo-V2-Flash. If ``layer_types`` is null, the first layer and every sixth layer attend to all keys.

    Attributes:
        mlp_layer_types: ``dense`` or ``sparse`` per layer. If null, all layers except the first are sparse.
        v_head_dim: Width of a value head.
        attention_value_scale: Factor by which values are multiplied. Null if values are not scaled.
        sliding_window_size: Number of keys in the window, excluding the key at the query's position.
    """

    model_type = "mimo_v2_flash"
    architecture = "MiMoV2FlashForCausalLM"
    experts_field = "n_routed_experts"
    aliases = {"num_local_experts": "n_routed_experts"}
    ignored = "output_router_logits router_aux_loss_coef"
    fixed = {"n_shared_experts": (None,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
    default_ropes = FrozenDict({FULL: {"rope_theta": 5e6, **_FACTOR}, SLIDING: {"rope_theta": 1e4, **_FACTOR}})
    default_rotary_factor = 0.334
    min_group_size = 2
    n_shared_experts = None
    first_k_dense_replace = 1

    vocab_size: int = 152576
    intermediate_size: int = 16384
    num_hidden_layers: int = 48
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 4
    head_dim: int | None = count(192, most=2**16)
    v_head_dim: int = count(128, most=2**16)
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 5e6
    attention_bias: bool = False
    attention_value_scale: float | None = number(0.707, above=0.0, most=1e6)
    sliding_window: int | None = count(129)
    sliding_window_size: int | None = count(None)
    mlp_layer_types: Sequence[str] | None = per_layer("dense", "sparse")
    moe_intermediate_size: int = count(2048, most=2**24)
    n_routed_experts: int = count(256, most=4096)
    num_experts_per_tok: int = 8
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float | None = 1.0
    bos_token_id: int | None = 1

    def __post_init__(self) -> None:
        if isinstance(size := python_values(self.sliding_window_size), int) and not isinstance(size, bool):
            object.__setattr__(self, "sliding_window", size + 1)
            object.__setattr__(self, "sliding_window_size", None)
        if self.routed_scaling_factor is None:
            object.__setattr__(self, "routed_scaling_factor", 1.0)
        super().__post_init__()

    def _check(self) -> None:
        super()._check()
        for layer_type in {*self.attention_types}:
            if self.num_attention_heads % (heads := self.kv_heads_of(layer_type)):
                raise ConfigError(
                    f"num_attention_heads {self.num_attention_heads} is not a multiple of the {heads} key heads of "
                    f"{layer_type} layers (num_key_value_heads is {self.kv_heads})"
                )

    def _check_experts(self) -> None:
        check_groups(self)

    def kv_heads_of(self, layer_type: str) -> int:
        """Return the number of key/value heads of a layer type. Sliding-window layers have twice as many."""
        return self.kv_heads if layer_type == FULL else 2 * self.kv_heads

    @property
    def attention_types(self) -> Sequence[str]:
        return self.layer_types or [FULL if i == 0 or i % 6 == 5 else SLIDING for i in range(self.num_hidden_layers)]


class MiMoV2Flash(DenseOrMoE):
    """MiMo-V2-Flash language model."""

    configs = (MiMoV2FlashConfig,)

    def layer_type(self, index: int) -> Hashable:
        return self.config.attention_types[index], self.config.sparse_layers[index]

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> GQA:
        c, attention_type, window = self.config, self.config.attention_types[index], self.config.windows[index]
        rope = c.rope_of(attention_type)
        return self.gqa(
            index,
            kv_heads=c.kv_heads_of(attention_type),
            value_dim=c.v_head_dim,
            bias=c.attention_bias,
            out_bias=False,
            rotary=rope,
            rotate=PartialRotary(rope.dim),
            sinks=None if window is None else Sinks(c.num_attention_heads, **kw),
            gate=None if c.attention_value_scale is None else ConstantGate(c.attention_value_scale),
            **kw,
        )


_HF: Hf = {
    **HF_DECODER, **HF_GROUPED_EXPERTS,
    "layer.attention.sinks.scores": (W("self_attn.attention_sink_bias"), W("self_attn.sinks")),
}  # fmt: skip

FAMILY = Family(model=MiMoV2Flash, hf=_HF)
