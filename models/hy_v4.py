"""Hy4 (Tencent, 2026): GLM-5.2's sparse attention with sinks and an output gate, and several residual streams.

Layers without an indexer attend to the keys selected by the last indexer before them. The residual streams are not
mixed. The final norm normalizes a weighted sum of the streams. Routed experts clip the inputs of their activation.
Prediction layers have a single stream. The parameters of the router, the output head, the sinks, the stream weights,
and the indexer's key norm and score weights are float32.

transformers 5.24 rotates halves of a head in the text-only Hy4, and adjacent pairs in the multimodal Hy4. vLLM and
llama.cpp always rotate adjacent pairs. Set ``rope_interleave`` to rotate adjacent pairs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from nnxmoe.axes import ParamOptions
from nnxmoe.config.bounds import count, number, one_of
from nnxmoe.config.rope_parameters import MROPE_FIELDS
from nnxmoe.layers.activations import GatedActivation, LimitedSwiGLU, swiglu
from nnxmoe.layers.attention.gqa import OutputGate, Sinks
from nnxmoe.layers.attention.indexer import TrailingIndexer
from nnxmoe.layers.attention.sparse_mla import SparseMLA
from nnxmoe.layers.context import Attention, Context
from nnxmoe.layers.hyper import CollapsedNorm, IndependentConnection, mix_streams
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import LayerNorm
from nnxmoe.layers.rope import rotate_halves, rotate_pairs
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family
from nnxmoe.model.layer import Layer, LayerOutput
from nnxmoe.model.mtp import MTP
from nnxmoe.model.weight_names import W
from nnxmoe.models.deepseek_v32 import FAMILY as DEEPSEEK_V32
from nnxmoe.models.glm_moe_dsa import GlmMoeDsa, GlmMoeDsaConfig, IndexedLayer, StatesAndSelection
from nnxmoe.models.shared.streamed import Streamed, StreamedLM
from nnxmoe.models.shared.tables import Hf
from nnxmoe.moe.router import Router

F32 = jnp.dtype(jnp.float32)
Part = TypeVar("Part", bound=nnx.Module)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyV4Config(GlmMoeDsaConfig):
    """Config of Hy4. ``num_key_value_heads`` is ignored, because latent attention has no grouped heads.

    Attributes:
        rope_interleave: Whether attention and indexers rotate adjacent pairs instead of halves.
        indexer_types: ``full`` or ``shared`` per layer. If null, layer 0 and every fourth layer from layer 1 are full.
        hc_mult: Number of residual streams.
        hc_magnitude: Factor of the sigmoid that scales the outputs of attention and feed-forward.
        hc_eps: Value that is added to the weights of the streams.
        swiglu_limit: Limit of `LimitedSwiGLU` in routed experts. If it is 0 or less, outputs are not clipped.
    """

    model_type = "hy_v4"
    architecture = "HYV4ForCausalLM"
    fixed = {"indexer_rope_interleave": (None, False), "gated_mla": (True,), "gating_type": ("elementwise",),
             "learnable_sink": (True,), "enable_ihc": (True,), "enable_lm_head_fp32": (True,)}  # fmt: skip
    ignored = "learnable_sink_init bitwise_backward_align mtp_loss_factor use_dsa use_mla"

    vocab_size: int = 120832
    hidden_size: int = 2816
    intermediate_size: int = 6912
    num_hidden_layers: int = 34
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 262144
    q_lora_rank: int = count(1536, most=2**20)
    rope_interleave: bool = one_of(False, True)
    moe_intermediate_size: int = count(768, most=2**24)
    routed_scaling_factor: float = 2.827
    first_k_dense_replace: int = one_of(1)
    index_n_heads: int = count(16, most=2**14)
    index_topk_pattern: str | Sequence[str] | None = one_of(None)
    index_topk_freq: int = one_of(4)
    index_skip_topk_offset: int = one_of(2)
    hc_mult: int = count(4, most=64)
    hc_magnitude: float = number(2.0, above=0.0, most=1e6)
    hc_eps: float = number(1e-6, above=0.0, most=1.0)
    swiglu_limit: float = number(10.0, above=-1e6, most=1e6)
    num_nextn_predict_layers: int = count(0, least=0, most=1024)
    pad_token_id: int | None = 120002
    bos_token_id: int | None = 120000
    eos_token_id: int | Sequence[int] | None = 120025

    @property
    def kv_heads(self) -> int:
        return self.num_attention_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyV4VLTextConfig(HyV4Config):
    """Text config of the multimodal Hy4. A position has three components. They are equal for text."""

    model_type = "hy_v4_vl_text"
    ignored = MROPE_FIELDS

    hidden_size: int = 6144
    intermediate_size: int = 18432
    num_hidden_layers: int = 78
    num_attention_heads: int = 64
    q_lora_rank: int = count(2048, most=2**20)
    rope_interleave: bool = one_of(True)
    moe_intermediate_size: int = count(2048, most=2**24)
    index_n_heads: int = count(32, most=2**14)

    @property
    def latent_norm_eps(self) -> float:
        return self.rms_norm_eps


class IndexedStreams(Streamed):
    """A `Streamed` layer whose attention selects keys as in `IndexedLayer`.

    Input and output are pairs: the streams, and the selected keys.
    """

    def __call__(self, x: PyTree, context: Context, cache: PyTree | None = None) -> LayerOutput:
        attention: Any = self.attention
        streams, selected = x
        inputs = self.attention_streams(streams)
        y, selected, cache = attention.attend_sparse(
            self.attention_norm(inputs.x), selected, context=context, cache=cache
        )
        streams = mix_streams(context.output_tokens(streams), y, inputs.output_tokens(context))
        inputs = self.feed_forward_streams(streams)
        y, info = self.feed_forward_branch(inputs.x, context=context)
        return LayerOutput((mix_streams(streams, y, inputs), selected), cache, info)


class SingleStreamMTP(MTP):
    """A prediction layer of Hy4: an `IndexedLayer` without streams, and an `RMSNorm`.

    Source: ``HYV4MultiTokenPredictorLayer`` in vLLM 0.33.
    """

    def __init__(self, model: Any, layer: Any, **kw: Unpack[ParamOptions]):
        parts = layer.attention_norm, layer.attention, layer.feed_forward_norm, layer.feed_forward
        super().__init__(model, IndexedLayer(*parts), **kw)
        self.norm = model.norm_class(model.config.hidden_size, model.config.rms_norm_eps, **kw)

    def combine(
        self, model: Any, embeddings: Float[Array, "B T streams D"], hidden: Any, tokens: Any
    ) -> StatesAndSelection:
        streams, selected = super().combine(model, embeddings[:, :, 0], hidden, tokens)
        return streams[:, :, 0], selected


def keep_float32(module: Part) -> Part:
    """Exclude the module's parameters from casts of the model, and return the module."""
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Variable):
            variable.set_metadata(keeps_dtype=True)
    return module


class HyV4(GlmMoeDsa, StreamedLM):
    """Hy4 language model, and the text model of the multimodal Hy4."""

    configs = (HyV4Config, HyV4VLTextConfig)
    mtp_hidden = CausalLM.mtp_hidden  # prediction layers read the normalized states instead of the streams

    def layer(self, index: int, form: type[Layer] = IndexedStreams, **kw: Any) -> Layer:
        return super().layer(index, form, **kw)

    def connection(self, **kw: Unpack[ParamOptions]) -> IndependentConnection:
        c = self.config
        options = {"magnitude": c.hc_magnitude, "eps": c.hc_eps, "norm_eps": c.rms_norm_eps}
        return IndependentConnection(c.hidden_size, c.hc_mult, rngs=kw["rngs"], **options)

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        c = self.config
        gate = OutputGate(c.hidden_size, c.num_attention_heads, c.v_head_dim, **kw)
        sinks = keep_float32(Sinks(c.num_attention_heads, dtype=F32, rngs=kw["rngs"]))
        options = {"indexer": self.indexer(index, **kw), "topk": c.index_topk, "gate": gate, "sinks": sinks}
        return self.mla(SparseMLA, **options, **kw)

    def indexer(self, index: int, **kw: Unpack[ParamOptions]) -> TrailingIndexer | None:
        c, rotate = self.config, rotate_pairs if self.config.rope_interleave else rotate_halves
        if not c.indexed[index]:
            return None
        sizes = c.hidden_size, c.q_lora_rank, c.index_n_heads, c.index_head_dim
        indexer, f32 = (
            TrailingIndexer(*sizes, rotary=c.rope, rotate=rotate, **kw),
            ParamOptions(dtype=F32, rngs=kw["rngs"]),
        )
        indexer.k_norm = keep_float32(LayerNorm(c.index_head_dim, c.rms_norm_eps, **f32))
        indexer.weights = keep_float32(Linear((c.hidden_size,), (c.index_n_heads,), ("embed", None), **f32))
        return indexer

    @property
    def expert_activation(self) -> GatedActivation:
        limit = self.config.swiglu_limit
        return LimitedSwiGLU(limit) if limit > 0 else swiglu

    def router(self, **kw: Unpack[ParamOptions]) -> Router:
        return keep_float32(super().router(dtype=F32, rngs=kw["rngs"]))

    def final_norm(self, **kw: Unpack[ParamOptions]) -> CollapsedNorm:
        c = self.config
        return CollapsedNorm(c.hidden_size, c.hc_mult, eps=c.hc_eps, norm_eps=c.rms_norm_eps, **kw)

    def output_head(self, **kw: Unpack[ParamOptions]) -> Linear | None:
        head = super().output_head(dtype=F32, rngs=kw["rngs"])
        return None if head is None else keep_float32(head)

    def _prediction_layers(self) -> Callable[..., list[Any]]:
        return functools.partial(CausalLM._prediction_layers(self), form=SingleStreamMTP)


_STREAMS = (("fn.kernel", "fn"), ("base", "base"), ("scale", "scale"))
_BRANCH_NAMES = (("attention", "attn", "attn"), ("mlp", "mlp", "ffn"), ("moe", "mlp", "ffn"))
_HEADS = "hc_head.hc_head", "hc_pre.hc_head.hc_head", "hc_head.hc_pre.hc_head", "hc_head.hc"
_GATE_UP, _EXPERTS = W("mlp.experts.gate_up_proj"), W("mlp.experts")
# The last alternative is the name in transformers' model, except for experts and `W.files_only`. transformers 5.24
# saves names with a misplaced ``hc_pre``, and saves the gates of all feed-forwards as ``linear_gate``.
_HF: Hf = {
    **{key: row for key, row in DEEPSEEK_V32.hf.items() if not key.startswith(("layer.mtp.embed", "layer.mtp.head"))},
    "layer.mtp.norm.scale": W("final_layernorm.weight"),
    "layer.attention.gate.g.kernel": (W("self_attn.linear_gate.weight"), W("self_attn.gate_proj.weight")),
    "layer.attention.sinks.scores": (W("self_attn.learnable_sink_param"), W("self_attn.sinks")),
    "layer.moe.experts.gate": (_GATE_UP.rows(0, 2), _EXPERTS.each("gate_proj.weight")),
    "layer.moe.experts.up": (_GATE_UP.rows(1, 2), _EXPERTS.each("up_proj.weight")),
    "layer.moe.experts.down": (W("mlp.experts.down_proj"), _EXPERTS.each("down_proj.weight")),
    **{
        f"layer.{key}.gate.kernel": (W(f"{block}.gate_proj.weight"), W(f"{block}.linear_gate.weight").files_only)
        for key, block in (("mlp", "mlp"), ("moe.shared", "mlp.shared_experts"))
    },
    **{
        f"layer.{branch}_streams.weights.{part}": (
            W(f"hc_{name}_layer.hc_pre.hc_{end}"), W(f"hc_pre.hc_{name}_layer.hc_{end}"), W(f"{short_name}_hc.{end}")
        )
        for branch, name, short_name in _BRANCH_NAMES
        for part, end in _STREAMS
    },
    **{
        f"norm.weights.{part}": tuple(W(f"model.{block}_{end}") for block in _HEADS)
        for part, end in _STREAMS
    },
}  # fmt: skip

FAMILY = Family(model=HyV4, hf=_HF, mtp_prefixes=("model.mtp_layers.{}.", "model.mtp_layers.{}."))
