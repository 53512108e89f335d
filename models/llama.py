"""Llama 1 to 3.x (Touvron et al. 2023; Llama 3, 2024) and Mistral (Jiang et al. 2023).

The layers have grouped-query attention, rotary embeddings that rotate halves, SwiGLU feed-forwards and optional biases.
Mistral adds a sliding window.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

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


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_LLAMA_3_1 = LlamaConfig(
    vocab_size=128256, intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072,
    rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=_llama3(8.0), bos_token_id=128000, eos_token_id=128001,
    dtype="bfloat16",
)  # fmt: skip
_SMALL = "mistral-small-3.1-24b"

_PRESETS = {
    "llama-3.1-8b": _LLAMA_3_1,
    "llama-3.1-70b": dataclasses.replace(
        _LLAMA_3_1, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
    ),
    "llama-3.1-405b": dataclasses.replace(
        _LLAMA_3_1, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128
    ),
    "llama-3.2-1b": dataclasses.replace(
        _LLAMA_3_1, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64,
        tie_word_embeddings=True, rope_scaling=_llama3(32.0),
    ),
    "mistral-7b-v0.1": MistralConfig(max_position_embeddings=32768, rms_norm_eps=1e-5, dtype="bfloat16"),
    "mistral-7b-v0.3": MistralConfig(
        vocab_size=32768, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None,
        dtype="bfloat16",
    ),
    _SMALL: MistralConfig(
        vocab_size=131072, hidden_size=5120, intermediate_size=32768, num_hidden_layers=40, head_dim=128,
        rms_norm_eps=1e-5, rope_theta=1e9, sliding_window=None, dtype="bfloat16",
    ),
}  # fmt: skip

FAMILY = Family(
    model=Llama,
    hf=HF_DECODER,
    maxtext=MaxTextNames(MAXTEXT_DECODER | MAXTEXT_GQA | MAXTEXT_MLP),
    presets=_PRESETS,
    hub_ids={
        "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
        "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
        "llama-3.1-405b": "meta-llama/Llama-3.1-405B",
        "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
        "mistral-7b-v0.1": "mistralai/Mistral-7B-v0.1",
        "mistral-7b-v0.3": "mistralai/Mistral-7B-v0.3",
        _SMALL: "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    },
    checkpoint_notes={_SMALL: "the vision tower and the projector are not loaded"},
)
