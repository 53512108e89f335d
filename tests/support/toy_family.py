"""Examples of a new family in one file: Qwen3 (Qwen Team 2025), a Llama with normalised queries and keys, and Granite 3
(IBM 2024), a Llama with factors of the embedding, the scores, what layers add, and the logits."""

import dataclasses
import functools
from typing import Any

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import count
from nnxmoe.layers.attention.gqa import GQA, QKNorm
from nnxmoe.layers.embed import Embed
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family
from nnxmoe.model.layer import Layer
from nnxmoe.models.llama import LlamaConfig
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


TOY = Family(model=Toy, hf=HF_DECODER, presets={"toy-8b": ToyConfig()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """Factors of the embedding, of what attention and feed-forward add, and of the scores; the logits are divided."""

    model_type = "granite"
    architecture = "GraniteForCausalLM"
    scale_in_queries = False

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0


class ScaledEmbed(Embed):
    """The embedding times a factor, which a tied head does not have."""

    def __init__(self, factor: float, *given: Any, **kw: Any):
        super().__init__(*given, **kw)
        self.factor = factor

    def __call__(self, tokens: Any, dtype: Any = None) -> Any:
        return super().__call__(tokens, dtype) * self.factor


class ScaledNorm(RMSNorm):
    """A norm with a factor, which becomes one of the logits."""

    def __init__(self, factor: float, *given: Any, **kw: Any):
        super().__init__(*given, **kw)
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        return super().__call__(x) * self.factor


class Granite(CausalLM):
    """Llama with four factors: what to do where embedding, residual, scores and logits differ."""

    configs = (GraniteConfig,)

    def embedding(self, **kw: Any) -> Embed:
        return super().embedding(functools.partial(ScaledEmbed, self.config.embedding_multiplier), **kw)

    def final_norm(self, **kw: Any) -> RMSNorm:
        c = self.config
        return ScaledNorm(1 / c.logits_scaling, c.hidden_size, c.rms_norm_eps, **kw)

    def layer(self, index: int, **kw: Any) -> Layer:
        return super().layer(index, scale=self.config.residual_multiplier, **kw)

    def attention(self, index: int, **kw: Any) -> GQA:
        c = self.config
        return self.gqa(index, scale=c.attention_multiplier, bias=c.attention_bias, **kw)

    def feed_forward(self, index: int, **kw: Any) -> MLP:
        c = self.config
        return MLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, **kw)


GRANITE = Family(model=Granite, hf=HF_DECODER)
