"""Llama 1 to 3.x (Touvron et al. 2023; Llama 3, 2024) and Mistral (Jiang et al. 2023).

The layers have grouped-query attention, rotary embeddings that rotate halves, SwiGLU feed-forwards and optional biases.
Mistral adds a sliding window.
"""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import count
from nnxmoe.layers.context import Attention, FeedForward
from nnxmoe.layers.mlp import MLP
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family, MaxTextNames
from nnxmoe.models.shared.tables import HF_DECODER, MAXTEXT_DECODER, MAXTEXT_GQA, MAXTEXT_MLP


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Config of Llama.

    Attributes:
        attention_bias: Whether q, k, v and o have biases.
        mlp_bias: Whether gate, up and down have biases.
    """

    model_type = "llama"
    architecture = "LlamaForCausalLM"

    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | Sequence[int] | None = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """Config of Mistral.

    A query attends to the last ``sliding_window`` keys, including its own, or to all keys if the field is null.
    """

    model_type = "mistral"
    architecture = "MistralForCausalLM"

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = count(4096)
    bos_token_id: int | None = 1
    eos_token_id: int | Sequence[int] | None = 2

    attention_bias = False
    mlp_bias = False

    @property
    def window(self) -> int | None:
        return self.sliding_window


class LlamaLike(CausalLM):
    """A decoder with Llama's layers. Subclasses override parts of the layers."""

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        return self.gqa(index, bias=self.config.attention_bias, **kw)

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> FeedForward:
        return MLP(self.config.hidden_size, self.config.intermediate_size, bias=self.config.mlp_bias, **kw)


class Llama(LlamaLike):
    """Llama and Mistral language models."""

    configs = (LlamaConfig, MistralConfig)


FAMILY = Family(model=Llama, hf=HF_DECODER, maxtext=MaxTextNames(MAXTEXT_DECODER | MAXTEXT_GQA | MAXTEXT_MLP))
