"""Layers of Gemma 4: post-norms, scaled outputs, and experts in parallel with a dense feed-forward.

In E2B and E4B, each layer also has a separate input per token, and the last layers attend to keys of earlier layers.
"""

from typing import Any

import jax
from jaxtyping import Array, Float, PyTree

from nnxmoe.layers.context import Context, FeedForwardOutput
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.per_layer import OutputScale, PerLayerInput
from nnxmoe.model.layer import Layer, LayerOutput


class GemmaLayer(Layer):
    """A `Layer` with post-norms and a scaled output, optionally with experts in parallel with a dense feed-forward.

    With experts, `feed_forward_norm` is the norm of the dense feed-forward's input. The `MoE` has a separate norm.

    Args:
        dense: The dense feed-forward, the norm of its output, and the norm of the experts' output. None if the layer
            has no experts.
        output_scale: Trained factor that multiplies the layer's output.
    """

    def __init__(
        self, *parts: Any, dense: tuple[MLP, RMSNorm, RMSNorm] | None, output_scale: OutputScale, **options: Any
    ):
        super().__init__(*parts, **options)
        self.dense, self.dense_post_norm, self.experts_post_norm = (None, None, None) if dense is None else dense
        self.output_scale = output_scale

    def __call__(self, x: Float[Array, "B T D"], context: Context, cache: PyTree | None = None) -> LayerOutput:
        out = super().__call__(x, context=context, cache=cache)
        return out._replace(x=self.output_scale(out.x))

    def feed_forward_branch(self, x: Float[Array, "B T_out D"], context: Context) -> FeedForwardOutput:
        if self.dense is None or self.dense_post_norm is None or self.experts_post_norm is None:
            return super().feed_forward_branch(x, context=context)
        expert_output = self.call_feed_forward(x, context=context)
        combined = self.dense_post_norm(self.dense(self.feed_forward_norm(x))) + self.experts_post_norm(expert_output.y)
        return FeedForwardOutput(self._normalize_and_scale(combined, self.feed_forward_post_norm), expert_output.info)


class EdgeLayer(GemmaLayer):
    """A `GemmaLayer` of E2B and E4B.

    Layer inputs and outputs are tuples: the hidden states, the inputs of all layers, the layer's index, and a dict from
    layer type to the keys and values that later layers attend to.

    Args:
        layer_type: Type of the layer.
        stores: Whether later layers attend to the keys of this layer.
        own: Module that adds the layer's separate input. None if layers have no separate inputs.
    """

    def __init__(self, *parts: Any, layer_type: str, stores: bool, own: PerLayerInput | None, **options: Any):
        super().__init__(*parts, **options)
        self.layer_type, self.stores, self.own = layer_type, stores, own

    def __call__(self, x: PyTree, context: Context, cache: PyTree | None = None) -> LayerOutput:
        hidden, inputs, layer_index, shared_keys = x
        attention: Any = self.attention
        if hasattr(attention, "attend_and_share"):
            update, cache, keys = attention.attend_and_share(self.attention_norm(hidden), context=context, cache=cache)
            shared_keys = shared_keys | {self.layer_type: keys} if self.stores else shared_keys
        elif self.layer_type in shared_keys:  # a `CrossLayerAttention`, which may be wrapped
            update, _ = attention(self.attention_norm(hidden), context=context, cache=shared_keys[self.layer_type])
        else:
            raise ValueError(f"layer.attention, a {type(attention).__name__}, must define attend_and_share")
        hidden = context.output_tokens(hidden) + self._normalize_and_scale(update, self.attention_post_norm)
        update, info = self.feed_forward_branch(hidden, context=context)
        hidden = hidden + update
        if self.own is not None:
            layer_input = jax.lax.dynamic_index_in_dim(inputs, layer_index, axis=2, keepdims=False)
            hidden = hidden + self.own(hidden, context.output_tokens(layer_input))
        return LayerOutput((self.output_scale(hidden), inputs, layer_index + 1, shared_keys), cache, info)
