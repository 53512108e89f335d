"""The layers of Gemma 4: post norms, a factor of the output, experts beside a dense feed-forward, and in E2B and E4B an
input per layer and keys of earlier layers."""

from typing import Any

import jax
from jaxtyping import Array, Float

from nnxmoe.layers.attention.cross_layer import CrossLayerAttention
from nnxmoe.layers.context import Context, FeedForwardOutput
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.per_layer import OutputScale, PerLayerInput
from nnxmoe.model.layer import Layer, LayerOutput


class GemmaLayer(Layer):
    """A `Layer` with post norms whose output has a factor, and with experts beside its dense feed-forward or not.

    ``dense``: the feed-forward beside the experts, and the norms after it and after the experts; None: without
    experts. `feed_forward_norm` is that of the dense one; the experts have theirs.
    """

    def __init__(
        self, *parts: Any, dense: tuple[MLP, RMSNorm, RMSNorm] | None, output_scale: OutputScale, **options: Any
    ):
        super().__init__(*parts, **options)
        self.dense, self.dense_post_norm, self.experts_post_norm = (None, None, None) if dense is None else dense
        self.output_scale = output_scale

    def __call__(self, x: Float[Array, "B T D"], context: Context, cache: Any = None) -> LayerOutput:
        out = super().__call__(x, context=context, cache=cache)
        return out._replace(x=self.output_scale(out.x))

    def feed_forward_branch(self, x: Float[Array, "B asked D"], context: Context) -> FeedForwardOutput:
        if self.dense is None or self.dense_post_norm is None or self.experts_post_norm is None:
            return super().feed_forward_branch(x, context=context)
        routed = self.call_feed_forward(x, context=context)
        both = self.dense_post_norm(self.dense(self.feed_forward_norm(x))) + self.experts_post_norm(routed.y)
        return FeedForwardOutput(self._added(both, self.feed_forward_post_norm), routed.info)


class EdgeLayer(GemmaLayer):
    """A `GemmaLayer` of E2B and E4B. Layers hand on the hidden states, the inputs of all layers, the number of the
    layer, and by kind what later layers attend to.

    ``kind``: its type; ``stores``: whether later ones use its keys; ``own``: adds its own input, None: it has none.
    """

    def __init__(self, *parts: Any, kind: str, stores: bool, own: PerLayerInput | None, **options: Any):
        super().__init__(*parts, **options)
        self.kind, self.stores, self.own = kind, stores, own

    def __call__(self, x: Any, context: Context, cache: Any = None) -> LayerOutput:
        hidden, inputs, place, kept = x
        attention: Any = self.attention
        if isinstance(attention, CrossLayerAttention):
            more = attention(self.attention_norm(hidden), kept[self.kind], context=context)
        else:
            more, cache, seen = attention.attend_sharing_kv(self.attention_norm(hidden), context=context, cache=cache)
            kept = kept | {self.kind: seen} if self.stores else kept
        hidden = context.output_tokens(hidden) + self._added(more, self.attention_post_norm)
        more, info = self.feed_forward_branch(hidden, context=context)
        hidden = hidden + more
        if self.own is not None:
            mine = jax.lax.dynamic_index_in_dim(inputs, place, axis=2, keepdims=False)
            hidden = hidden + self.own(hidden, context.output_tokens(mine))
        return LayerOutput((self.output_scale(hidden), inputs, place + 1, kept), cache, info)
