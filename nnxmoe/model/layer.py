"""One decoder layer."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key

from nnxmoe.layers.context import Attention, Context, Fed, FeedForward
from nnxmoe.layers.norm import RMSNorm


class LayerOutput(NamedTuple):
    """Hidden states ``[B asked D]`` or what the layers hand on in their place, the layer's cache, and the `MoEInfo` of
    its feed-forward (None for a dense one)."""

    x: Any
    cache: Any
    info: Any


class Layer(nnx.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``; the feed-forward is a dense `MLP` or a `MoE`.

    ``post_norms``: of what attention and feed-forward add to x (Gemma 2, 2024); None: none. ``scale``: its factor. A
    layer of another form, such as parallel branches, is a subclass that calls `mix` and `feed` in another way. The
    hidden states may be any pytree, if `CausalLM.enter` makes it of the embedding and the layers are of that form.
    """

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Attention,
        feed_forward_norm: RMSNorm,
        feed_forward: FeedForward,
        *,
        post_norms: tuple[RMSNorm | None, RMSNorm | None] = (None, None),
        scale: float = 1.0,
    ):
        self.attention_norm = attention_norm
        self.attention = attention
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward
        self.attention_post_norm, self.feed_forward_post_norm = post_norms
        self.scale = scale

    @property
    def moe(self) -> Any:
        """The feed-forward of a layer with experts; dense layers have no such attribute."""
        if self.feed_forward.name != "moe":
            raise AttributeError(f"a dense layer has no moe; its feed_forward is a {type(self.feed_forward).__name__}")
        return self.feed_forward

    def __call__(self, x: Float[Array, "B T D"], context: Context, cache: Any = None) -> LayerOutput:
        more, cache = self.mix(x, context=context, cache=cache)
        x = context.asked(x) + more
        more, info = self.feed(x, context=context)
        return LayerOutput(x + more, cache, info)

    def mix(self, x: Float[Array, "B T D"], context: Context, cache: Any) -> tuple[Float[Array, "B asked D"], Any]:
        """Return what attention adds to the hidden states ``x``, and the layer's cache."""
        y, cache = self.attention(self.attention_norm(x), context=context, cache=cache)
        return self._added(checkpoint_name(y, "attention_output"), self.attention_post_norm), cache

    def feed(self, x: Float[Array, "B asked D"], context: Context) -> Fed:
        """Return what the feed-forward adds to ``x``, with its `MoEInfo` if it has experts."""
        fed = self.feed_forward(self.feed_forward_norm(x), context=context.of_asked())
        y, info = fed if isinstance(fed, Fed) else (fed, None)
        return Fed(self._added(y, self.feed_forward_post_norm), info)

    def _added(self, y: Float[Array, "B asked D"], norm: RMSNorm | None) -> Float[Array, "B asked D"]:
        y = y if norm is None else norm(y)
        return y if self.scale == 1 else y * self.scale


class Absent(nnx.Module):
    """The half that a `SingleLayer` lacks: it stores nothing."""

    name: ClassVar[str] = "mlp"
    over_context: ClassVar[bool] = True

    def separates_tokens(self, key: Key[Array, ""] | None) -> bool:
        """Always True."""
        return True

    def scored(self, seen: float) -> list[tuple[int, float]]:
        """No products of scores."""
        return []

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, spare: int = 0) -> tuple[()]:
        """An empty pytree."""
        return ()


class SingleLayer(Layer):
    """``x + part(norm(x))``: attention alone, or a feed-forward alone (Nemotron-H, 2025)."""

    def __init__(self, norm: RMSNorm, part: Any):
        one: tuple[Any, Any] = part, norm
        other: tuple[Any, Any] = Absent(), None
        attends = not hasattr(part, "separates_tokens")
        self.attention, self.attention_norm = one if attends else other
        self.feed_forward, self.feed_forward_norm = other if attends else one
        self.attention_post_norm = self.feed_forward_post_norm = None
        self.scale = 1.0

    def __call__(self, x: Float[Array, "B T D"], context: Context, cache: Any = None) -> LayerOutput:
        if isinstance(self.attention, Absent):
            more, info = self.feed(x := context.asked(x), context=context)
            return LayerOutput(x + more, cache, info)
        more, cache = self.mix(x, context=context, cache=cache)
        return LayerOutput(context.asked(x) + more, cache, None)


MakeLayer = Callable[[nnx.Rngs | None], Layer]
