"""Examples of a new family in one file: Qwen3 (Qwen Team 2025), a Llama with normalised queries and keys, and Granite 3
(IBM 2024), a Llama with factors of the embedding, the scores, what layers add, and the logits."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import count
from nnxmoe.layers.context import Context
from nnxmoe.layers.embed import Embed
from nnxmoe.layers.gqa import GQA
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.qk_norm import QKNorm
from nnxmoe.model.causal_lm import CausalLM, Runs
from nnxmoe.model.layer import Layer, LayerOutput
from nnxmoe.model.strategy import Strategy
from nnxmoe.model.weight_names import W
from nnxmoe.models.llama import HF_DECODER, HF_GQA, HF_MLP, LlamaConfig


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
    presets = {"toy-8b": ToyConfig()}
    hf_table = (
        HF_DECODER
        | HF_GQA
        | HF_MLP
        | {f"layer.attention.qk_norm.{x}.scale": W(f"self_attn.{x}_norm.weight") for x in ("q", "k")}
    )

    def runs(self, config: ToyConfig, strategy: Strategy, dtype: jnp.dtype) -> Runs:
        c, dim, eps = config, config.hidden_size, config.rms_norm_eps

        def layer(rngs: nnx.Rngs | None) -> Layer:
            kw: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
            attention = GQA(
                dim,
                c.num_attention_heads,
                c.kv_heads,
                c.head_width,
                window=None,
                bias=c.attention_bias,
                attend=strategy.attend,
                qk_norm=QKNorm.per_head(c.head_width, eps, **kw),
                **kw,
            )
            mlp = MLP(dim, c.intermediate_size, bias=False, **kw)
            return Layer(RMSNorm(dim, eps, **kw), attention, RMSNorm(dim, eps, **kw), mlp)

        return [(c.num_hidden_layers, layer)]


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

    factor = 1.0

    def __call__(self, tokens: Any, dtype: Any = None) -> Any:
        return super().__call__(tokens, dtype) * self.factor


class ScaledNorm(RMSNorm):
    """A norm with a factor, which becomes one of the logits."""

    factor = 1.0

    def __call__(self, x: Any) -> Any:
        return super().__call__(x) * self.factor


class ScaledLayer(Layer):
    """``x + factor * attention(norm(x))``, then likewise the feed-forward."""

    factor = 1.0

    def __call__(self, x: Any, context: Context, cache: Any = None) -> LayerOutput:
        mixed, cache = self.attention(self.attention_norm(x), context=context, cache=cache)
        x, context = context.asking(x)
        x = x + mixed * self.factor
        fed = self.feed_forward.feed(self.feed_forward_norm(x), context=context)
        return LayerOutput(x + fed.y * self.factor, cache, fed.info)


class Granite(CausalLM):
    """Llama with four factors: what to do where embedding, residual, scores and logits differ."""

    configs = (GraniteConfig,)
    hf_table = HF_DECODER | HF_GQA | HF_MLP

    def embedding(self, config: GraniteConfig, strategy: Strategy, **kw: Any) -> Embed:
        made = ScaledEmbed(config.vocab_size, config.hidden_size, mesh=strategy.mesh, rules=strategy.rules, **kw)
        made.factor = config.embedding_multiplier
        return made

    def final_norm(self, config: GraniteConfig, **kw: Any) -> RMSNorm:
        made = ScaledNorm(config.hidden_size, config.rms_norm_eps, **kw)
        made.factor = 1 / config.logits_scaling
        return made

    def runs(self, config: GraniteConfig, strategy: Strategy, dtype: jnp.dtype) -> Runs:
        c, dim, eps = config, config.hidden_size, config.rms_norm_eps

        def layer(rngs: nnx.Rngs | None) -> Layer:
            kw: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
            options: dict[str, Any] = {"window": None, "bias": c.attention_bias, "attend": strategy.attend}
            heads = c.num_attention_heads, c.kv_heads, c.head_width
            attention = GQA(dim, *heads, scale=c.attention_multiplier, **options, **kw)
            mlp = MLP(dim, c.intermediate_size, bias=c.mlp_bias, **kw)
            made = ScaledLayer(RMSNorm(dim, eps, **kw), attention, RMSNorm(dim, eps, **kw), mlp)
            made.factor = c.residual_multiplier
            return made

        return [(c.num_hidden_layers, layer)]
