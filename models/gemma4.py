"""The text model of Gemma 4 (Google, 2026), dense or with experts in parallel with a dense feed-forward.

Sliding-window and full-attention layers differ in head width and rotary embedding. Full-attention layers may use their
keys as values. Norms follow attention and feed-forward, and each layer's output has a trained factor. In E2B and E4B,
each layer also has a separate input per token, and the last layers attend to keys of earlier layers.
"""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Unpack, cast

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, check_at_most, check_multiple, count, number, one_of
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.layer_types import FULL, SLIDING, LayerRopesConfig
from nnxmoe.config.printable import short
from nnxmoe.config.rope_parameters import ProportionalRope, Rope, rope_from_fields, rope_type
from nnxmoe.layers.activations import geglu
from nnxmoe.layers.attention.cross_layer import CrossLayerAttention, ValueNormGQA
from nnxmoe.layers.attention.gqa import QKNorm
from nnxmoe.layers.context import Attention
from nnxmoe.layers.embed import Embed, ScaledEmbed
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.per_layer import OutputScale, PerLayerEmbed, PerLayerInput
from nnxmoe.model.family import Family, LayerBlocks, MaxTextNames
from nnxmoe.model.layer import Layer
from nnxmoe.model.output import Ids
from nnxmoe.models.shared.gemma4_names import HF_GEMMA4, MAXTEXT_GEMMA4
from nnxmoe.models.shared.gemma_layers import EdgeLayer, GemmaLayer
from nnxmoe.models.shared.gemma_model import GemmaModel
from nnxmoe.moe.block import MoE
from nnxmoe.moe.router_variants import ScaledRouter
from nnxmoe.moe.selection import SoftmaxTopK

FACTOR, PROPORTIONAL, WIDTH, KV_HEADS = "partial_rotary_factor", "proportional", "head_dim", "num_key_value_heads"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4TextConfig(LayerRopesConfig):
    """Text config of Gemma 4.

    If ``layer_types`` is null, every sixth layer is full attention. The last layer is always full attention.

    Attributes:
        global_head_dim: Head width in full-attention layers.
        attention_k_eq_v: Whether full-attention layers use ``num_global_key_value_heads`` heads of keys as values.
        per_layer_config: Object in which transformers saves ``global_head_dim`` and ``num_global_key_value_heads``.
        final_logit_softcapping: Soft cap of the logits.
        hidden_size_per_layer_input: Width of the separate input per layer. 0 if layers have no separate inputs.
        vocab_size_per_layer_input: Number of rows of the embedding table of these inputs.
        num_kv_shared_layers: Number of last layers that use the keys and values of an earlier layer of the same type.
        use_double_wide_mlp: Whether the feed-forwards of layers with shared keys have twice the width.
        enable_moe_block: Whether each layer has ``num_experts`` experts in parallel with its dense feed-forward.
    """

    model_type = "gemma4_text"
    architecture = "Gemma4ForCausalLM"
    experts_field, experts_per_token_field = "num_experts", "top_k_experts"
    default_ropes = FrozenDict(
        {
            FULL: {"rope_type": PROPORTIONAL, FACTOR: 0.25, "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        }
    )
    fixed = {"use_bidirectional_attention": (None, "vision")}

    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = count(256, most=2**16)
    global_head_dim: int = count(512, most=2**16)
    num_global_key_value_heads: int | None = count(None, most=2**14)
    per_layer_config: Mapping[str, Any] | None = None
    hidden_activation: str = one_of("gelu_pytorch_tanh")
    max_position_embeddings: int = 131072
    attention_bias: bool = False
    attention_k_eq_v: bool = False
    tie_word_embeddings: bool = True
    sliding_window: int | None = count(512)
    rope_theta: float = 1e6
    final_logit_softcapping: float | None = number(None, above=0.0, most=1e6)
    hidden_size_per_layer_input: int = count(256, least=0)
    vocab_size_per_layer_input: int = 262144
    num_kv_shared_layers: int = count(0, least=0)
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    num_experts: int | None = count(None, most=4096)
    top_k_experts: int | None = count(None, most=4096)
    moe_intermediate_size: int | None = count(None, most=2**24)
    bos_token_id: int | None = 2
    eos_token_id: int | Sequence[int] | None = 1
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        if isinstance(overrides := self.per_layer_config, Mapping):
            width, kv_heads = self._whole(overrides)
            object.__setattr__(self, "global_head_dim", width)
            object.__setattr__(self, "num_global_key_value_heads", kv_heads)
            object.__setattr__(self, "per_layer_config", None)
        super().__post_init__()

    def _whole(self, overrides: Mapping[str, Any]) -> tuple[Any, Any]:
        """Read head width and number of key/value heads of full-attention layers from ``per_layer_config``.

        Raises ConfigError if full-attention layers differ, or if other layers have overrides.
        """
        full_layers = {str(i) for i, attention_type in enumerate(self.attention_types) if attention_type == FULL}
        names = {WIDTH, KV_HEADS} if self.attention_k_eq_v else {WIDTH}
        settings = [overrides[name] for name in overrides]
        is_uniform = all(
            isinstance(setting, Mapping) and setting == settings[0] and {*setting} <= names for setting in settings
        )
        if not is_uniform or overrides.keys() not in (full_layers, set()):
            raise ConfigError(
                f"per_layer_config {short(overrides)} is not supported: it must set {' and '.join(sorted(names))} to "
                f"equal values for the full-attention layers {', '.join(sorted(full_layers))}"
            )
        fields = settings[0] if settings else {}
        return fields.get(WIDTH, self.head_dim), fields.get(KV_HEADS)

    def _check(self) -> None:
        super()._check()
        if self.hidden_size_per_layer_input:
            check_at_most(self, "vocab_size", "vocab_size_per_layer_input")
        first_shared, attention_types = max(self.first_shared, 0), self.attention_types
        if unmatched := [
            i
            for i in range(first_shared, len(attention_types))
            if attention_types[i] not in attention_types[:first_shared]
        ]:
            raise ConfigError(
                f"num_kv_shared_layers {self.num_kv_shared_layers}: layer {unmatched[0]} requires a "
                f"{attention_types[unmatched[0]]} layer before layer {first_shared} to share keys"
            )
        if self.attention_k_eq_v:
            check_multiple(self, "num_attention_heads", "num_global_key_value_heads")
        if self.enable_moe_block:
            for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
                if getattr(self, name) is None:
                    raise ConfigError(f"enable_moe_block requires {name}, but the field is null or missing")

    def to_hf(self) -> dict[str, Any]:
        unused = "hidden_act", "per_layer_config"  # in transformers, null in per_layer_config also overrides fields
        return {name: value for name, value in super().to_hf().items() if name not in unused}

    def rope_of(self, attention_type: str) -> Rope:
        rope_fields = self.rope_fields_of(attention_type)
        fields = {name: value for name, value in rope_fields.items() if name != FACTOR}
        width, length = self.width_of(attention_type), self.max_position_embeddings
        if rope_type(fields) != PROPORTIONAL:
            return rope_from_fields(fields, width, self.rope_theta, length, None, self.rope_field)
        linear_rope = rope_from_fields(fields | {"rope_type": "linear", "factor": fields.get("factor", 1.0)}, width,
                                  self.rope_theta, length, None, self.rope_field)  # fmt: skip
        fraction = rope_fields.get(FACTOR, 1.0)
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise ConfigError(f"rope: {FACTOR} must be a number from 0 to 1, got {short(fraction)}")
        return ProportionalRope(width, linear_rope.theta, int(fraction * width // 2), linear_rope.scale)  # pyright: ignore

    def width_of(self, attention_type: str) -> int:
        """Return the head width of layers of this type."""
        return self.global_head_dim if attention_type == FULL else self.head_width

    @property
    def passes_layer_state(self) -> bool:
        """Whether layers pass more than hidden states to the next layer."""
        return bool(self.hidden_size_per_layer_input or self.num_kv_shared_layers)

    @property
    def first_shared(self) -> int:
        """Index of the first layer that attends to the keys of an earlier layer."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    @property
    def stores_keys(self) -> Sequence[bool]:
        """Whether later layers attend to the keys of each layer."""
        attention_types, first_shared = self.attention_types, self.first_shared
        source_layers = {
            max(i for i in range(first_shared) if attention_types[i] == attention_type)
            for attention_type in set(attention_types[first_shared:])
        }
        return tuple(i in source_layers for i in range(self.num_hidden_layers))

    @property
    def unused_tensors(self) -> Collection[str]:
        shared, parts = range(self.first_shared, self.num_hidden_layers), ("k_proj", "v_proj", "k_norm", "v_norm")
        return {f"model.layers.{i}.self_attn.{part}.weight" for i in shared for part in parts}

    @property
    def full_kv_heads(self) -> int:
        """Number of key/value heads in full-attention layers."""
        return (self.num_global_key_value_heads if self.attention_k_eq_v else None) or self.kv_heads

    @property
    def attention_types(self) -> Sequence[str]:
        attention_types = self.layer_types or [SLIDING if (i + 1) % 6 else FULL for i in range(self.num_hidden_layers)]
        return (*attention_types[:-1], FULL)  # transformers ignores the last entry of the list

    @property
    def experts(self) -> int:
        return (self.num_experts or 0) if self.enable_moe_block else 0


class Gemma4Text(GemmaModel):
    """The text model of Gemma 4."""

    configs = (Gemma4TextConfig,)

    def embedding(self, form: Callable[..., Embed] = ScaledEmbed, **options: Any) -> Embed:
        c = self.config
        if not (width := c.hidden_size_per_layer_input):
            return super().embedding(form, **options)
        arguments = {"per_layer_vocab": c.vocab_size_per_layer_input, "layers": c.num_hidden_layers, "width": width}
        return super().embedding(PerLayerEmbed, eps=c.rms_norm_eps, **arguments, **options)

    def __init__(self, config: Gemma4TextConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        self.passes_layer_state = config.passes_layer_state
        self.has_layer_inputs = config.hidden_size_per_layer_input > 0

    def layer_type(self, index: int) -> Hashable:
        c = self.config
        return c.attention_types[index], index >= c.first_shared, c.stores_keys[index]

    def to_layer_input(self, x: Float[Array, "B T D"], tokens: Ids) -> PyTree:
        inputs = None
        if self.has_layer_inputs:
            if not hasattr(self.embed, "inputs"):
                raise ValueError(f"model.embed, a {type(self.embed).__name__}, must define inputs(x, tokens)")
            inputs = cast(PerLayerEmbed, self.embed).inputs(x, jnp.asarray(tokens))
        return (x, inputs, jnp.int32(0), {}) if self.passes_layer_state else x

    def from_layer_output(self, x: PyTree) -> Float[Array, "B T_out D"]:
        return x[0] if self.passes_layer_state else x

    def layer(
        self, index: int, form: type[Layer] = GemmaLayer, *, dtype: jnp.dtype, rngs: nnx.Rngs | None, **options: Any
    ) -> Layer:
        c, kw = self.config, ParamOptions(dtype=dtype, rngs=rngs)
        norms = [RMSNorm(c.hidden_size, c.rms_norm_eps, **kw) for _ in range(4 if c.experts else 2)]
        dense = (self._dense(index, **kw), norms[2], norms[3]) if c.experts else None
        options |= {"post_norms": (norms[0], norms[1]), "dense": dense, "output_scale": OutputScale(**kw)}
        if c.passes_layer_state:
            form, width = EdgeLayer, c.hidden_size_per_layer_input
            layer_input = PerLayerInput(c.hidden_size, width, c.rms_norm_eps, **kw) if width else None
            options |= {"layer_type": c.attention_types[index], "stores": c.stores_keys[index], "own": layer_input}
        return super().layer(index, form, **kw, **options)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        c, attention_type = self.config, self.config.attention_types[index]
        is_full, width = attention_type == FULL, self.config.width_of(attention_type)
        kv_heads = c.full_kv_heads if is_full else c.kv_heads
        options = {"kv_heads": kv_heads, "head_dim": width, "scale": 1.0, "bias": c.attention_bias}
        options |= {"eps": c.rms_norm_eps, "rotary": c.rope_of(attention_type), **kw}
        if index >= c.first_shared:
            return self.gqa(index, CrossLayerAttention, **options)
        norm, keys_as_values = QKNorm.per_head(width, c.rms_norm_eps, **kw), is_full and c.attention_k_eq_v
        return self.gqa(index, ValueNormGQA, keys_as_values=keys_as_values, qk_norm=norm, **options)

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> MLP | MoE:
        c = self.config
        if not c.experts:
            return self._dense(index, **kw)
        router = ScaledRouter(c.hidden_size, c.experts, SoftmaxTopK(c.experts_per_token), eps=c.rms_norm_eps, **kw)
        norm = RMSNorm(c.hidden_size, c.rms_norm_eps, **kw)
        return self.moe(router, c.moe_intermediate_size, None, activation=geglu, norm=norm, **kw)

    def _dense(self, index: int, **kw: Unpack[ParamOptions]) -> MLP:
        c = self.config
        factor = 2 if c.use_double_wide_mlp and index >= c.first_shared else 1
        return MLP(c.hidden_size, factor * c.intermediate_size, bias=False, activation=geglu, **kw)


_BLOCKS = LayerBlocks(("local",) * 5 + ("global",), "scanned_blocks", nested=True)

FAMILY = Family(model=Gemma4Text, hf=HF_GEMMA4, maxtext=MaxTextNames(MAXTEXT_GEMMA4, _BLOCKS, scales_embeddings=True))
