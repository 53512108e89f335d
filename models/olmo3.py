"""OLMo 3 (Ai2, 2025): norms after attention and feed-forward instead of before, and windows in three of four layers.

Attention normalizes all heads of a token together, as in OLMoE. Only full-attention layers may have a scaled rotary
embedding.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, count
from nnxmoe.config.layer_types import ScaledFullRopeConfig, interleaved_types
from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_number
from nnxmoe.layers.attention.gqa import GQA, QKNorm
from nnxmoe.model.family import Family
from nnxmoe.model.layer import Layer, PostNormLayer
from nnxmoe.model.weight_names import W
from nnxmoe.models.llama import LlamaLike
from nnxmoe.models.shared.tables import HF_DECODER, Hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo3Config(ScaledFullRopeConfig):
    """Config of OLMo 3. If ``layer_types`` is null, every fourth layer is full attention.

    Attributes:
        attention_bias: Whether q, k, v and o have biases.
    """

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    mlp_bias = False

    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    rope_theta: float = 5e5
    attention_bias: bool = False
    sliding_window: int | None = count(4096)
    eos_token_id: int | Sequence[int] | None = 50279
    pad_token_id: int | None = 1

    def __post_init__(self) -> None:
        if not self.rope_parameters and as_number(self.rope_theta) != type(self).rope_theta:
            raise ConfigError(  # transformers 5.24 ignores a top-level rope_theta in sliding-window layers
                f"rope_theta {short(self.rope_theta)} is not supported without rope_parameters per layer type: set them"
            )
        super().__post_init__()

    @property
    def sliding_theta(self) -> float:
        return type(self).rope_theta

    @property
    def attention_types(self) -> Sequence[str]:
        return self.layer_types or interleaved_types(self.num_hidden_layers, 4)


class Olmo3(LlamaLike):
    """OLMo 3 language model."""

    configs = (Olmo3Config,)

    def layer(self, index: int, form: type[Layer] = PostNormLayer, **options: Any) -> Layer:
        return super().layer(index, form, **options)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> GQA:
        c = self.config
        norm = QKNorm.all_heads(c.num_attention_heads, c.kv_heads, c.head_width, c.rms_norm_eps, **kw)
        rotary = c.rope_of(c.attention_types[index])
        return self.gqa(index, bias=c.attention_bias, qk_norm=norm, rotary=rotary, **kw)


_HF: Hf = {
    **HF_DECODER,
    "layer.attention_post_norm.scale": W("post_attention_layernorm.weight"),
    "layer.mlp_post_norm.scale": W("post_feedforward_layernorm.weight"),
}

FAMILY = Family(model=Olmo3, hf=_HF)
