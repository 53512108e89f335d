"""Example of a new family in one file: Qwen3 (Qwen Team 2025), a Llama with normalised queries and keys."""

import dataclasses
from typing import Any

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import count
from nnxmoe.layers.attention.gqa import GQA, QKNorm
from nnxmoe.layers.mlp import MLP
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family
from nnxmoe.models.shared.tables import HF_DECODER


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig(DecoderConfig):
    """``attention_bias``: on q, k, v and o."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    ignored = "layer_types"
    fixed = {"use_sliding_window": (False,), "sliding_window": (None,)}

    intermediate_size: int = 22016
    head_dim: int | None = count(128, most=2**16)
    max_position_embeddings: int = 32768
    attention_bias: bool = False


class Toy(CausalLM):
    """A Qwen3 without sliding windows."""

    configs = (ToyConfig,)

    def attention(self, index: int, **kw: Any) -> GQA:
        c = self.config
        norm = QKNorm.per_head(c.head_width, c.rms_norm_eps, **kw)
        return self.gqa(index, bias=c.attention_bias, qk_norm=norm, **kw)

    def feed_forward(self, index: int, **kw: Any) -> MLP:
        return MLP(self.config.hidden_size, self.config.intermediate_size, bias=False, **kw)


TOY = Family(model=Toy, hf=HF_DECODER, presets={"Toy-8B": ToyConfig()})
