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


def _qwen2(vocab: int, hidden: int, width: int, layers: int, heads: int, kv_heads: int, tied: bool) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=32768,
        rope_theta=1e6, tie_word_embeddings=tied, bos_token_id=151643, eos_token_id=151645, dtype="bfloat16",
    )  # fmt: skip


def _qwen3(hidden: int, width: int, layers: int, heads: int, kv_heads: int, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=40960, rope_theta=1e6, tie_word_embeddings=tied,
        bos_token_id=151643, eos_token_id=151645, dtype="bfloat16",
    )  # fmt: skip


_QWEN2_PRESETS = {
    "qwen2.5-0.5b": _qwen2(151936, 896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-1.5b": _qwen2(151936, 1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-3b": _qwen2(151936, 2048, 11008, 36, 16, 2, tied=True),
    "qwen2.5-7b": _qwen2(152064, 3584, 18944, 28, 28, 4, tied=False),
    "qwen2.5-72b": _qwen2(152064, 8192, 29568, 80, 64, 8, tied=False),
}

QWEN2 = Family(
    model=Qwen2,
    hf=LLAMA.hf,
    maxtext=LLAMA.maxtext,
    presets=_QWEN2_PRESETS,
    hub_ids={name: f"Qwen/Qwen{name[4:].upper()}-Instruct" for name in _QWEN2_PRESETS},
)
_QWEN3_PRESETS = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8, tied=False),
}

QWEN3 = Family(
    model=Qwen3,
    hf=LLAMA.hf,
    maxtext=MaxTextNames({**LLAMA.maxtext.table, **MAXTEXT_QK_NORM}),
    presets=_QWEN3_PRESETS,
    hub_ids={name: f"Qwen/Qwen{name[4:].upper()}" for name in _QWEN3_PRESETS},
)
FAMILIES = (QWEN2, QWEN3)
