"""GLM-5, 5.1, 5.2 and 5.3 (Zhipu AI, 2026): DeepSeek-V3.2's layers with indexers that rotate adjacent pairs.

In GLM-5.2 and 5.3, most layers have no indexer. These layers attend to the keys selected by the last indexer before
them. Layers pass the selected keys to the next layer together with the hidden states. Prediction layers have indexers.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, count, per_layer
from nnxmoe.layers.attention.indexer import Indexer
from nnxmoe.layers.attention.sparse_attention import NO_SLOT, SelectedSlots
from nnxmoe.layers.context import Context
from nnxmoe.layers.rope import rotate_pairs
from nnxmoe.model.family import Family
from nnxmoe.model.layer import Layer, LayerOutput
from nnxmoe.model.mtp import last_matching_layer
from nnxmoe.model.output import Ids
from nnxmoe.models.deepseek_v32 import FAMILY as DEEPSEEK_V32
from nnxmoe.models.deepseek_v32 import DeepSeekV32, DeepSeekV32Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmMoeDsaConfig(DeepSeekV32Config):
    """Config of GLM-5, 5.1, 5.2 and 5.3.

    Attributes:
        indexer_types: ``full`` (with an indexer) or ``shared`` (with the keys of the last full layer) per layer.
        index_topk_pattern: Indexer types if ``indexer_types`` is null, as words or as the letters F and S.
        index_topk_freq: Interval between full layers, starting at index ``index_skip_topk_offset - 1``. Used if both
            other fields are null. All layers before this index are full.
        index_skip_topk_offset: See ``index_topk_freq``.
    """

    model_type = "glm_moe_dsa"
    architecture = "GlmMoeDsaForCausalLM"
    fixed = {"indexer_rope_interleave": (True,), "moe_router_dtype": (None, "float32")}
    ignored = "index_share_for_mtp_iteration"

    vocab_size: int = 154880
    hidden_size: int = 6144
    intermediate_size: int = 12288
    num_hidden_layers: int = 78
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 64
    max_position_embeddings: int = 202752
    rms_norm_eps: float = 1e-5
    q_lora_rank: int = count(2048, most=2**20)
    qk_nope_head_dim: int = count(192, most=2**16)
    v_head_dim: int = count(256, most=2**16)
    n_group: int = 1
    topk_group: int = 1
    index_n_heads: int = count(32, most=2**14)
    indexer_types: Sequence[str] | None = per_layer("full", "shared")
    index_topk_pattern: str | Sequence[str] | None = None
    index_topk_freq: int = count(1, least=0)
    index_skip_topk_offset: int = count(2, least=0)

    def _check(self) -> None:
        super()._check()
        pattern = self.index_topk_pattern
        if pattern is not None and (len(pattern) != self.num_hidden_layers or {*pattern} - {*"FS", "full", "shared"}):
            raise ConfigError(f"index_topk_pattern {pattern!r} must have an F or S for each layer")
        if not self.indexed[0]:
            raise ConfigError("the first layer has no earlier layer to share keys with: its indexer type must be full")

    @property
    def indexed(self) -> Sequence[bool]:
        """Whether each layer has an indexer."""
        if types := self.indexer_types or self.index_topk_pattern:
            return tuple(indexer_type in ("full", "F") for indexer_type in types)
        first_index, interval = self.index_skip_topk_offset - 1, max(self.index_topk_freq, 1)
        return tuple(max(i - first_index, 0) % interval == 0 for i in range(self.num_hidden_layers))


# Input and output of a layer: the hidden states, and the keys that the last indexer selected.
StatesAndSelection = tuple[Float[Array, "B T *streams D"], SelectedSlots]


class IndexedLayer(Layer):
    """A pre-norm layer that attends to the keys selected by its indexer.

    A layer without an indexer attends to the keys selected by the last indexer before it.
    """

    def __call__(self, x: StatesAndSelection, context: Context, cache: PyTree | None = None) -> LayerOutput:
        attention: Any = self.attention
        layer_input, selected_keys = x
        update, selected_keys, cache = attention.attend_sparse(
            self.attention_norm(layer_input), selected_keys, context=context, cache=cache
        )
        hidden = context.output_tokens(layer_input) + update
        update, info = self.feed_forward_branch(hidden, context=context)
        return LayerOutput((hidden + update, selected_keys), cache, info)


class GlmMoeDsa(DeepSeekV32):
    """GLM-5, 5.1, 5.2 and 5.3 language models."""

    configs = (GlmMoeDsaConfig,)
    rotate_index = staticmethod(rotate_pairs)

    def __init__(self, config: GlmMoeDsaConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        self.topk = config.index_topk

    @property
    def mtp_layer_index(self) -> int:
        c = self.config
        layers = zip(c.indexed, c.sparse_layers, strict=True)
        return last_matching_layer(
            has_indexer and is_sparse == any(c.sparse_layers) for has_indexer, is_sparse in layers
        )

    def layer_type(self, index: int) -> Hashable:
        return self.config.sparse_layers[index], self.config.indexed[index]

    def layer(self, index: int, form: type[Layer] = IndexedLayer, **kw: Any) -> Layer:
        return super().layer(index, form, **kw)

    def indexer(self, index: int, **kw: Unpack[ParamOptions]) -> Indexer | None:
        return super().indexer(index, **kw) if self.config.indexed[index] else None

    def to_layer_input(self, x: Float[Array, "B T D"], tokens: Ids) -> StatesAndSelection:
        return super().to_layer_input(x, tokens), jnp.full((*x.shape[:2], self.topk), NO_SLOT, jnp.int32)

    def from_layer_output(self, x: StatesAndSelection) -> Float[Array, "B T_out *streams D"]:
        return super().from_layer_output(x[0])


FAMILY = Family(model=GlmMoeDsa, hf=DEEPSEEK_V32.hf)
