"""SmolLM3 (Hugging Face, 2025): Llama's layers, some of them without a rotary embedding (NoPE; Yang et al. 2025)."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import ConfigError, check_fields, count
from nnxmoe.config.layer_types import FULL, SLIDING, OptionalWindowsConfig
from nnxmoe.config.printable import short
from nnxmoe.layers.context import Attention
from nnxmoe.model.family import Family
from nnxmoe.models.llama import FAMILY as LLAMA
from nnxmoe.models.llama import LlamaLike


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(OptionalWindowsConfig):
    """Config of SmolLM3. If ``layer_types`` is null, windows apply to the layers without rotation.

    Attributes:
        no_rope_layers: 1 for each layer with rotation, 0 for each layer without. Entries beyond the number of layers
            have no effect.
        no_rope_layer_interval: Interval between layers without rotation. Used if ``no_rope_layers`` is null.
        attention_bias: Whether q, k, v and o have biases.
        mlp_bias: Whether gate, up and down have biases.
    """

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    scale_in_queries = False
    ignored = "max_window_layers"

    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = True
    rope_theta: float = 2e6
    sliding_window: int | None = count(None)
    no_rope_layers: Sequence[int] | None = None
    no_rope_layer_interval: int = count(4)
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = 128000
    eos_token_id: int | Sequence[int] | None = 128001
    pad_token_id: int | None = 128004

    def _check(self) -> None:
        check_fields(self)
        listed = self.no_rope_layers
        if listed is not None and (len(listed) < self.num_hidden_layers or {*listed} - {0, 1}):
            raise ConfigError(
                f"no_rope_layers {short(listed)} must list 1 or 0 for each of the {self.num_hidden_layers} layers"
            )
        super()._check()

    @property
    def rotated_layers(self) -> Sequence[bool]:
        """Whether each layer rotates queries and keys."""
        layers, interval = range(self.num_hidden_layers), self.no_rope_layer_interval
        return [bool(self.no_rope_layers[i] if self.no_rope_layers else (i + 1) % interval) for i in layers]

    @property
    def attention_types(self) -> Sequence[str]:
        without_rope = FULL if self.layer_window is None else SLIDING
        return self.layer_types or [FULL if rotated else without_rope for rotated in self.rotated_layers]


class SmolLM3(LlamaLike):
    """SmolLM3 language model."""

    configs = (SmolLM3Config,)

    def layer_type(self, index: int) -> Hashable:
        return super().layer_type(index), self.config.rotated_layers[index]

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        rotary = self.config.rope if self.config.rotated_layers[index] else None
        return self.gqa(index, bias=self.config.attention_bias, rotary=rotary, **kw)


FAMILY = Family(model=SmolLM3, hf=LLAMA.hf)
