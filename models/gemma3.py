"""The text model of Gemma 3 (Google, 2025): norms before and after attention and feed-forward.

Most layers have a sliding window. Sliding-window and full-attention layers have different rotary embeddings. Only the
embedding of full-attention layers may be scaled for long contexts.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import count, number, one_of
from nnxmoe.config.layer_types import SLIDING, PatternWindowsConfig, ScaledFullRopeConfig
from nnxmoe.config.rope_parameters import theta_in
from nnxmoe.layers.activations import geglu
from nnxmoe.layers.context import Attention
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import OffsetNorm
from nnxmoe.model.family import Family
from nnxmoe.model.layer import Layer
from nnxmoe.models.gemma4 import FAMILY as GEMMA4
from nnxmoe.models.shared.gemma_model import GemmaModel
from nnxmoe.models.shared.normed_heads import NormedHeads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3TextConfig(PatternWindowsConfig, ScaledFullRopeConfig):
    """Text config of Gemma 3.

    Attributes:
        query_pre_attn_scalar: Attention multiplies scores by ``query_pre_attn_scalar ** -0.5``.
        attention_bias: Whether q, k, v and o have biases.
        rope_local_base_freq: ``rope_theta`` of sliding-window layers. Used if ``rope_parameters`` does not set it.
        final_logit_softcapping: Soft cap of the logits.
    """

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    scale_in_queries = True
    fixed = {"attn_logit_softcapping": (None,), "use_bidirectional_attention": (False, None)}
    ignored = "cache_implementation _sliding_window_pattern"

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = count(256, most=2**16)
    query_pre_attn_scalar: int | None = count(256, most=2**16)  # pyright: ignore[reportIncompatibleVariableOverride]
    hidden_activation: str = one_of("gelu_pytorch_tanh")
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    rope_theta: float = 1e6
    rope_local_base_freq: float = number(10000.0, above=1.0, most=1e15)
    attention_bias: bool = False
    sliding_window: int | None = count(4096)
    sliding_window_pattern: int | str | None = 6
    final_logit_softcapping: float | None = number(None, above=0.0, most=1e6)
    bos_token_id: int | None = 2
    eos_token_id: int | Sequence[int] | None = 1
    pad_token_id: int | None = 0

    @classmethod
    def rope_overrides(cls, scaling: Any, parameters: Any) -> dict[str, Any]:
        return super().rope_overrides(scaling, parameters) | {"rope_local_base_freq": theta_in(parameters, SLIDING)}

    @property
    def sliding_theta(self) -> float:
        return self.rope_local_base_freq

    def fold_query_scale(self) -> tuple[Self, float]:
        """Return the config unchanged and the factor 1, because transformers' Gemma 3 reads the field."""
        return self, 1.0


class Gemma3Text(NormedHeads, GemmaModel):
    """The text model of Gemma 3."""

    configs = (Gemma3TextConfig,)
    norm_class = OffsetNorm

    def layer(self, index: int, form: type[Layer] = Layer, **options: Any) -> Layer:
        norm1, norm2 = (OffsetNorm(self.config.hidden_size, self.config.rms_norm_eps, **options) for _ in range(2))
        return super().layer(index, form, post_norms=(norm1, norm2), **options)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        return super().attention(index, rotary=self.config.rope_of(self.config.attention_types[index]), **kw)

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> MLP:
        return MLP(self.config.hidden_size, self.config.intermediate_size, bias=False, activation=geglu, **kw)


FAMILY = Family(model=Gemma3Text, hf=GEMMA4.hf)
