"""A family that differs from Llama in every place that a family may: two rotations and none, a gated output, sandwich
norms and parallel branches, a recurrent layer with a convolution window, a second stream beside the hidden states, and
a router that reads token ids."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.attention.gqa import OutputGate
from nnxmoe.layers.cache import RecurrentState
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.recurrent.recurrence import scan_tokens
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family
from nnxmoe.model.layer import Layer, LayerOutput
from nnxmoe.model.weight_names import W
from nnxmoe.models.llama import HF_DECODER
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import Routing, SoftmaxTopK

WINDOW = 3  # of the convolution


class Streams(NamedTuple):
    """P3: the hidden states, and the sum of what all attentions have added, which later layers read."""

    x: Any
    added: Any


class Sandwich(Layer):
    """P4, P3: norms after both halves; the feed-forward also sees the other stream."""

    def __call__(self, x: Streams, context: Context, cache: Any = None) -> LayerOutput:
        more, cache = self.attention_branch(x.x, context, cache)
        x = Streams(context.output_tokens(x.x) + more, context.output_tokens(x.added) + more)
        more, info = self.feed_forward_branch(x.x + 0.5 * x.added, context)
        return LayerOutput(Streams(x.x + more, x.added), cache, info)


class Parallel(Layer):
    """P4: both halves read the same hidden states."""

    def __call__(self, x: Streams, context: Context, cache: Any = None) -> LayerOutput:
        before = context.output_tokens(x.x)
        one, cache = self.attention_branch(x.x, context, cache)
        other, info = self.feed_forward_branch(before, context)
        return LayerOutput(Streams(before + one + other, context.output_tokens(x.added) + one), cache, info)


class Recurrence(nnx.Module):
    """P2: ``h = d(x) h + (1 - d(x)) tanh(conv(x))``, output ``o(h)``; the state is h and the last inputs of conv."""

    def __init__(self, dim: int, *, dtype: Any, rngs: Any):
        kw: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.taps = Linear((dim,), (WINDOW, dim), ("embed", None, "mlp"), **kw)
        self.decay = Linear((dim,), (dim,), ("embed", "mlp"), **kw)
        self.o = Linear((dim,), (dim,), ("mlp", "embed"), **kw)

    def __call__(self, x: Any, context: Context, cache: Any = None) -> tuple[Any, Any]:
        taps, decay = self.taps(x).astype(jnp.float32), jax.nn.sigmoid(self.decay(x).astype(jnp.float32))

        def step(state: Any, given: Any) -> tuple[Any, Any]:
            (h, past), (tap, decay) = state, given
            window = jnp.concatenate([past, tap[:, None]], axis=1)
            conv = sum(window[:, i, i] for i in range(WINDOW))
            h = decay * h + (1 - decay) * jnp.tanh(conv)
            return (h, window[:, 1:]), h

        out, cache = scan_tokens(step, self._zero(x.shape[0]), (taps, decay), context, cache)
        return self.o(context.output_tokens(out.astype(x.dtype))), cache

    def _zero(self, batch: int) -> Any:
        (dim,) = self.o.ins
        return jnp.zeros((batch, dim)), jnp.zeros((batch, WINDOW - 1, WINDOW, dim))

    def empty_cache(self, batch: int, capacity: int, dtype: Any, lookahead: int = 0) -> RecurrentState:
        return RecurrentState.empty(self._zero(batch), lookahead)


class HashRouter(Router):
    """P6: a token's id chooses its experts, the activations their weights."""

    def __call__(self, x: Any, context: Context | None = None, mesh: Any = None) -> Routing:
        found = super().__call__(x, context, mesh)
        assert context is not None and context.tokens is not None
        count, first = found.logits.shape[-1], context.tokens % 2
        experts = jnp.stack([first, first + 2], axis=-1) % count
        weights = jax.nn.softmax(jnp.take_along_axis(found.logits, experts, axis=-1), axis=-1)
        return dataclasses.replace(found, experts=experts.astype(jnp.int32), weights=weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenConfig(DecoderConfig):
    """``forms``: a letter per layer: local and global rotation, no rotation, recurrent."""

    model_type = "openings"
    architecture = "OpeningsForCausalLM"
    experts_field = "num_local_experts"

    intermediate_size: int = 32
    forms: str = "llgnrr"
    local_theta: float = 50.0
    num_local_experts: int = 4
    num_experts_per_tok: int = 2


class Openings(CausalLM):
    """All openings in one model."""

    configs = (OpenConfig,)

    def layer_type(self, index: int) -> str:
        return self.config.forms[index]

    def to_layer_input(self, x: Any, tokens: Any) -> Streams:
        return Streams(x, jnp.zeros_like(x))

    def from_layer_output(self, x: Streams) -> Any:
        return x.x

    def layer(self, index: int, form: type[Layer] = Parallel, **kw: Any) -> Layer:
        if self.layer_type(index) == "r":
            return super().layer(index, form, **kw)
        norms = tuple(RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, **kw) for _ in range(2))
        return super().layer(index, Sandwich, post_norms=norms, **kw)

    def attention(self, index: int, **kw: Any) -> Any:
        c, kind = self.config, self.layer_type(index)
        if kind == "r":
            return Recurrence(c.hidden_size, **kw)
        rotary = {"g": c.rope, "l": Rope(c.head_width, c.local_theta), "n": None}[kind]
        gate = OutputGate(c.hidden_size, c.num_attention_heads, c.head_width, **kw)
        return self.gqa(index, rotary=rotary, window=5 if kind == "l" else None, bias=False, gate=gate, **kw)

    def feed_forward(self, index: int, **kw: Any) -> Any:
        c = self.config
        if self.layer_type(index) in "nr":
            return MLP(c.hidden_size, c.intermediate_size, bias=False, **kw)
        router = HashRouter(c.hidden_size, c.num_local_experts, SoftmaxTopK(c.num_experts_per_tok), bias=False, **kw)
        return self.moe(router, c.intermediate_size, **kw)


_HF = (
    HF_DECODER
    | {f"layer.attention.{x}.kernel": W(f"mixer.{x}.weight") for x in ("taps", "decay", "gate.g")}
    | {f"layer.{x}_post_norm.scale": W(f"{x}_post_norm.weight") for x in ("attention", "mlp", "moe")}
    | {
        "layer.moe_norm.scale": W("post_attention_layernorm.weight"),
        "layer.moe.router.kernel": W("mlp.gate.weight"),
    }
    | {f"layer.moe.experts.{x}": W("mlp.experts").each(f"{x}.weight") for x in ("gate", "up", "down")}
)
OPENINGS = Family(model=Openings, hf=_HF)
