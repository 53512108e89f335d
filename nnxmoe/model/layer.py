"""Decoder layers: attention and feed-forward with residual connections."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key, PyTree

from nnxmoe.layers.context import Attention, Context, FeedForward, FeedForwardOutput, check_call, token_independent
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.moe.block import MoEInfo


class LayerOutput(NamedTuple):
    """Output of a layer.

    Attributes:
        x: Hidden states ``[B, T, D]`` of the requested tokens, or a pytree (see `CausalLM.to_layer_input`).
        cache: The layer's updated cache.
        info: `MoEInfo` of the feed-forward. None if the feed-forward is dense.
    """

    x: PyTree
    cache: PyTree | None
    info: MoEInfo | None


class Layer(nnx.Module):
    """A pre-norm decoder layer: ``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``.

    The feed-forward is the attribute ``moe`` if it has experts, and ``mlp`` if it is dense. Its norms have the
    same prefix (``moe_norm`` or ``mlp_norm``), as in parameter keys. The property `feed_forward` returns either.

    A layer with a different structure, such as parallel branches, is a subclass that overrides ``__call__`` and calls
    `attention_branch` and `feed_forward_branch`. The hidden states can be any pytree if `CausalLM.to_layer_input`
    returns that pytree and the layer class supports it.

    Args:
        attention_norm: Norm of the attention's input.
        attention: Attention, or a recurrent layer with the same interface.
        feed_forward_norm: Norm of the feed-forward's input.
        feed_forward: Feed-forward.
        post_norms: Norms of the outputs of attention and feed-forward before they are added to x (Gemma 2, 2024).
        scale: Factor that multiplies the outputs of attention and feed-forward.
    """

    moe: Any  # a layer has either ``moe`` or ``mlp``, with norms of the same prefix
    mlp: Any
    attention: Any

    def __init__(
        self,
        attention_norm: Callable[[Array], Array],
        attention: Attention,
        feed_forward_norm: Callable[[Array], Array],
        feed_forward: FeedForward,
        *,
        post_norms: tuple[RMSNorm | None, RMSNorm | None] = (None, None),
        scale: float = 1.0,
    ):
        self.attention_norm, self.attention, self.attention_post_norm = attention_norm, attention, post_norms[0]
        self.store_feed_forward(feed_forward, norm=feed_forward_norm, post_norm=post_norms[1])
        self.scale = scale

    def store_feed_forward(self, part: "FeedForward | EmptyPart", **modules: Callable[..., Any] | None) -> None:
        """Assign the feed-forward to the attribute named by ``part.name`` (default ``mlp``).

        Args:
            part: The feed-forward.
            modules: Modules whose attribute names share the feed-forward's prefix, by suffix. ``norm=…`` is stored as
                ``moe_norm`` or ``mlp_norm``.
        """
        setattr(self, getattr(part, "name", "mlp"), part)
        for suffix, module in modules.items():
            setattr(self, f"feed_forward_{suffix}", module)

    def __setattr__(self, name: str, value: object) -> None:
        """Assign a submodule. Translates the prefix ``feed_forward`` to ``moe`` or ``mlp``.

        Raises:
            ValueError: The submodule cannot be called with the layer's arguments, or the layer would have both ``moe``
                and ``mlp``.
        """
        other = {"moe": "mlp", "mlp": "moe"}.get(name)
        if other in vars(self):
            raise ValueError(
                f"{name} cannot be assigned: this layer's feed-forward is {other}, and a layer can have only one"
            )
        name = name.replace("feed_forward", self.feed_forward_name) if name.startswith("feed_forward") else name
        if name in ("moe", "mlp", "attention") and not isinstance(value, EmptyPart):
            check_call(f"layer.{name}", value, "context")
        super().__setattr__(name, value)

    @property
    def feed_forward_name(self) -> str:
        """Attribute name of the feed-forward: ``moe`` or ``mlp``."""
        return "moe" if "moe" in vars(self) else "mlp"

    @property
    def feed_forward(self) -> "FeedForward | EmptyPart":
        """The feed-forward: ``moe`` in a layer with experts, ``mlp`` in a dense layer."""
        return getattr(self, self.feed_forward_name)

    @property
    def feed_forward_norm(self) -> Callable[[Array], Array]:
        """Norm of the feed-forward's input: ``moe_norm`` or ``mlp_norm``."""
        return getattr(self, f"{self.feed_forward_name}_norm")

    @property
    def feed_forward_post_norm(self) -> Callable[[Array], Array] | None:
        """Norm of the feed-forward's output, ``moe_post_norm`` or ``mlp_post_norm``. None if there is no such norm."""
        return getattr(self, f"{self.feed_forward_name}_post_norm")

    def token_independent(self, key: Key[Array, ""] | None) -> bool:
        """Return whether the feed-forward declares that its output for a token does not depend on other tokens."""
        return token_independent(self.feed_forward, key)

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> PyTree:
        """Create an empty cache for the attention.

        Raises:
            ValueError: The attention has no method ``empty_cache``.
        """
        if not hasattr(self.attention, "empty_cache"):
            raise ValueError(
                f"the attention {type(self.attention).__name__} has no cache: define "
                "empty_cache(batch, capacity, dtype, lookahead). A wrapper can call the wrapped attention's method"
            )
        return self.attention.empty_cache(batch, capacity, dtype, lookahead)

    def __call__(self, x: PyTree, context: Context, cache: PyTree | None = None) -> LayerOutput:
        update, cache = self.attention_branch(x, context=context, cache=cache)
        x = context.output_tokens(x) + update
        update, info = self.feed_forward_branch(x, context=context)
        return LayerOutput(x + update, cache, info)

    def attention_branch(
        self, x: Float[Array, "B T D"], context: Context, cache: PyTree | None
    ) -> tuple[Float[Array, "B T_out D"], PyTree | None]:
        """Compute the attention's contribution to the hidden states ``x``.

        Returns:
            The values to add to ``x``, and the layer's updated cache.
        """
        out = self.attention(self.attention_norm(x), context=context, cache=cache)
        if not isinstance(out, tuple) or len(out) != 2:
            raise ValueError(f"the attention {type(self.attention).__name__} must return (y, cache)")
        y, cache = out
        return self._normalize_and_scale(checkpoint_name(y, "attention_output"), self.attention_post_norm), cache

    def feed_forward_branch(self, x: Float[Array, "B T_out D"], context: Context) -> FeedForwardOutput:
        """Compute the feed-forward's contribution to ``x``, with its `MoEInfo` if it has experts."""
        y, info = self.call_feed_forward(self.feed_forward_norm(x), context=context)
        return FeedForwardOutput(self._normalize_and_scale(y, self.feed_forward_post_norm), info)

    def call_feed_forward(self, x: Float[Array, "B T_out D"], context: Context) -> FeedForwardOutput:
        """Call the feed-forward without its norms. Raises ValueError if it returns a tuple of a different type."""
        part = self.feed_forward
        assert not isinstance(part, EmptyPart)
        out = part(x, context=context.for_output_tokens())
        if isinstance(out, tuple) and not isinstance(out, FeedForwardOutput):
            raise ValueError(f"the feed-forward {type(part).__name__} must return y or FeedForwardOutput(y, info)")
        return out if isinstance(out, FeedForwardOutput) else FeedForwardOutput(out, None)

    def _normalize_and_scale(
        self, y: Float[Array, "B T_out D"], norm: Callable[[Array], Array] | None
    ) -> Float[Array, "B T_out D"]:
        y = y if norm is None else norm(y)
        return y if self.scale == 1 else y * self.scale


class EmptyPart(nnx.Module):
    """Placeholder for the attention or feed-forward that a `SingleLayer` does not have."""

    name: ClassVar[str] = "mlp"
    supports_context_parallel: ClassVar[bool] = True

    def token_independent(self, key: Key[Array, ""] | None) -> bool:
        """Return True, because the placeholder computes nothing."""
        return True

    def score_ops(self, num_keys: float) -> list[tuple[int, float]]:
        """Return an empty list, because there are no attention scores."""
        return []

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> tuple[()]:
        """Return an empty pytree."""
        return ()


class SingleLayer(Layer):
    """A layer with either attention or a feed-forward: ``x + part(norm(x))`` (Nemotron-H, 2025)."""

    def __init__(self, norm: RMSNorm, part: Any):
        is_attention = hasattr(part, "empty_cache")
        attention, feed_forward = (part, EmptyPart()) if is_attention else (EmptyPart(), part)
        self.attention, self.attention_norm, self.attention_post_norm = attention, norm if is_attention else None, None
        self.store_feed_forward(feed_forward, norm=None if is_attention else norm, post_norm=None)
        self.scale = 1.0

    def __call__(self, x: Float[Array, "B T D"], context: Context, cache: PyTree | None = None) -> LayerOutput:
        if isinstance(self.attention, EmptyPart):
            update, info = self.feed_forward_branch(x := context.output_tokens(x), context=context)
            return LayerOutput(x + update, cache, info)
        update, cache = self.attention_branch(x, context=context, cache=cache)
        return LayerOutput(context.output_tokens(x) + update, cache, None)


class PostNormLayer(Layer):
    """A layer that normalizes outputs, not inputs: ``x + norm(attention(x))``, then ``x + norm(feed_forward(x))``.

    Source: OLMo 2 (Walsh et al. 2025).
    """

    def __init__(
        self, attention_norm: RMSNorm, attention: Attention, feed_forward_norm: RMSNorm, feed_forward: FeedForward
    ):
        norms = attention_norm, feed_forward_norm
        super().__init__(jax.nn.identity, attention, jax.nn.identity, feed_forward, post_norms=norms)


MakeLayer = Callable[[nnx.Rngs | None], Layer]
