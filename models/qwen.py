"""Qwen2 and Qwen2.5 (Yang et al. 2024), and the dense models of Qwen3 (Qwen3 technical report, 2025).

The layers are as in Llama. Qwen2 has biases for queries, keys and values. Qwen3 normalizes the heads of queries and
keys instead. Some layers may attend to a sliding window.
"""

import dataclasses
from typing import Unpack

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import count
from nnxmoe.config.layer_types import OptionalWindowsConfig
from nnxmoe.layers.attention.gqa import GQA
from nnxmoe.model.family import Family, MaxTextNames
from nnxmoe.models.llama import FAMILY as LLAMA
from nnxmoe.models.llama import LlamaLike
from nnxmoe.models.shared.normed_heads import NormedHeads
from nnxmoe.models.shared.tables import MAXTEXT_QK_NORM


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(OptionalWindowsConfig):
    """Config of Qwen2."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    scale_in_queries = False
    mlp_bias = False

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    max_window_layers: int = count(28, least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """Config of Qwen3's dense models.

    Attributes:
        attention_bias: Whether q, k, v and o have biases.
    """

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"

    head_dim: int | None = count(128, most=2**16)
    attention_bias: bool = False


class Qwen2(LlamaLike):
    """Qwen2 and Qwen2.5 language models."""

    configs = (Qwen2Config,)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> GQA:
        return self.gqa(index, bias=True, out_bias=False, **kw)


class Qwen3(NormedHeads, LlamaLike):
    """The dense models of Qwen3."""

    configs = (Qwen3Config,)


QWEN2 = Family(model=Qwen2, hf=LLAMA.hf, maxtext=LLAMA.maxtext)

QWEN3 = Family(model=Qwen3, hf=LLAMA.hf, maxtext=MaxTextNames({**LLAMA.maxtext.table, **MAXTEXT_QK_NORM}))
FAMILIES = (QWEN2, QWEN3)
