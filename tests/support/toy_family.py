"""Example of a new family in one file: Qwen3 (Qwen Team 2025), a Llama with normalised queries and keys."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import count
from nnxmoe.layers.gqa import GQA
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.qk_norm import QKNorm
from nnxmoe.model.causal_lm import CausalLM, Runs
from nnxmoe.model.layer import Layer
from nnxmoe.model.strategy import Strategy
from nnxmoe.models.llama import HF_DECODER, HF_GQA, HF_MLP


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
        | {
            f"layer.attention.qk_norm.{x}.scale": (f"model.layers.{{layer}}.self_attn.{x}_norm.weight",)
            for x in ("q", "k")
        }
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
