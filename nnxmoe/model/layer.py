"""One decoder layer."""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import label
from nnxmoe.layers.context import Attention, Context, FeedForward
from nnxmoe.layers.norm import RMSNorm


class LayerOutput(NamedTuple):
    """Hidden states, the layer's cache, and the `MoEInfo` of its feed-forward (None for a dense one)."""

    x: Float[Array, "B asked D"]
    cache: Any
    info: Any


class Layer(nnx.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``; the feed-forward is a dense `MLP` or a `MoE`."""

    def __init__(
        self, attention_norm: RMSNorm, attention: Attention, feed_forward_norm: RMSNorm, feed_forward: FeedForward
    ):
        self.attention_norm = attention_norm
        self.attention = attention
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward

    @property
    def moe(self) -> Any:
        """The feed-forward of a layer with experts; dense layers have no such attribute."""
        if self.feed_forward.name != "moe":
            raise AttributeError(f"a dense layer has no moe; its feed_forward is a {type(self.feed_forward).__name__}")
        return self.feed_forward

    def __call__(self, x: Float[Array, "B T D"], context: Context, cache: Any = None) -> LayerOutput:
        mixed, cache = self.attention(self.attention_norm(x), context=context, cache=cache)
        x, context = context.asking(x)
        x = x + mixed
        fed = self.feed_forward.feed(self.feed_forward_norm(x), context=context)
        return LayerOutput(x + fed.y, cache, fed.info)

    def label(self, number: int, stack: int) -> None:
        """Stamps the parameters with their keys, such as ``layer.attention.q.kernel`` and ``layer.mlp.up.kernel``."""
        kind = self.feed_forward.name
        label(self, "layer", number, stack)
        label(self.feed_forward_norm, f"layer.{kind}_norm", number, stack)
        label(self.feed_forward, f"layer.{kind}", number, stack)


MakeLayer = Callable[[nnx.Rngs | None], Layer]
