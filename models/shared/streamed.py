"""Decoders with several residual streams (manifold-constrained hyper-connections, Xie et al. 2025)."""

import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from nnxmoe.axes import ParamOptions
from nnxmoe.layers.context import Context
from nnxmoe.layers.hyper import Connection, HyperConnection, collapse_streams, mix_streams
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.recurrent.ngram import NGramBranch
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.layer import Layer, LayerOutput
from nnxmoe.model.mtp import MTP
from nnxmoe.model.output import Ids

StreamConnection = Callable[[Float[Array, "B T streams D"]], Connection]


class Streamed(Layer):
    """A layer whose attention and feed-forward read from several residual streams and add to the streams.

    Args:
        *parts: Positional arguments of `Layer`.
        connections: Connections of attention and feed-forward to the streams.
    """

    def __init__(self, *parts: Any, connections: tuple[StreamConnection, StreamConnection]):
        super().__init__(*parts)
        self.attention_streams, streams = connections
        self.store_feed_forward(self.feed_forward, streams=streams)

    @property
    def feed_forward_streams(self) -> StreamConnection:
        """Connection of the feed-forward to the streams: ``moe_streams`` or ``mlp_streams``."""
        return getattr(self, f"{self.feed_forward_name}_streams")

    def __call__(self, x: PyTree, context: Context, cache: PyTree | None = None) -> LayerOutput:
        attention_input = self.attention_streams(x)
        y, cache = self.attention_branch(attention_input.x, context=context, cache=cache)
        x = mix_streams(context.output_tokens(x), y, attention_input.output_tokens(context))
        feed_forward_input = self.feed_forward_streams(x)
        y, info = self.feed_forward_branch(feed_forward_input.x, context=context)
        return LayerOutput(mix_streams(x, y, feed_forward_input), cache, info)


class NGramStreamed(Streamed):
    """A `Streamed` layer that first adds the outputs of an `NGramBranch` to the streams."""

    def __init__(self, *parts: Any, ngram: NGramBranch, **options: Any):
        super().__init__(*parts, **options)
        self.ngram = ngram

    def __call__(self, x: PyTree, context: Context, cache: PyTree | None = None) -> LayerOutput:
        attention_cache, ngram_cache = (None, None) if cache is None else cache
        update, ngram_cache = self.ngram(x, context=context, cache=ngram_cache)
        out = super().__call__(x + update, context=context, cache=attention_cache)
        return out._replace(cache=None if cache is None else (out.cache, ngram_cache))

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> PyTree:
        """Create empty caches for the attention and for the `NGramBranch`."""
        attention_cache = super().empty_cache(batch, capacity, dtype, lookahead)
        return attention_cache, self.ngram.empty_cache(batch, dtype, lookahead)


class SinglePassStreamed(Streamed):
    """A `Streamed` layer that reads the streams with the weights of the previous connection (DeepSeek-V4.1, 2026).

    The attention uses the weights of the previous layer's feed-forward. The feed-forward uses the weights of this
    layer's attention. Layers also pass `SharedEntries` to the next layer.
    """

    def __call__(self, x: PyTree, context: Context, cache: PyTree | None = None) -> LayerOutput:
        attention: Any = self.attention
        attention_streams: Any = self.attention_streams
        feed_forward_streams: Any = self.feed_forward_streams
        streams, weights, entries = x
        feed_forward_weights, *factors = attention_streams.compute_weights(streams)
        attention_input = Connection(collapse_streams(streams, weights), *factors)
        y, entries, cache = attention.attend_and_share(
            self.attention_norm(attention_input.x), entries, context=context, cache=cache
        )
        streams = mix_streams(context.output_tokens(streams), y, attention_input.output_tokens(context))
        next_weights, *factors = feed_forward_streams.compute_weights(streams)
        feed_forward_input = Connection(
            collapse_streams(streams, context.output_tokens(feed_forward_weights)), *factors
        )
        y, info = self.feed_forward_branch(feed_forward_input.x, context=context)
        return LayerOutput((mix_streams(streams, y, feed_forward_input), next_weights, entries), cache, info)


class TokenAndStreams(nnx.Module):
    """Projections of a token and of each stream of a state. `StreamedMTP` adds their outputs."""

    def __init__(self, dim: int, **kw: Unpack[ParamOptions]):
        self.token, self.state = (Linear((dim,), (dim,), ("embed", "norm"), **kw) for _ in range(2))


class StreamedMTP(MTP):
    """A prediction layer with residual streams (``MTPBlock`` in DeepSeek's code of V4).

    Computes ``norm(layer(token(token_norm(x)) + state(hidden_norm(s))))`` for a token x and each stream s.
    """

    def projection(self, dim: int, **kw: Unpack[ParamOptions]) -> TokenAndStreams:
        return TokenAndStreams(dim, **kw)

    def combine(self, model: Any, embeddings: Any, hidden: Any, tokens: Any) -> Any:
        streams = hidden.astype(embeddings.dtype).reshape(*embeddings.shape[:2], self.norm.streams, -1)
        token = self.project.token(self.token_norm(embeddings[:, :, 0]))
        return token[:, :, None] + self.project.state(self.hidden_norm(streams))

    @property
    def width(self) -> int:
        return super().width * self.norm.streams


class StreamedLM(CausalLM):
    """A decoder with several residual streams. The final norm reduces the streams to one hidden state."""

    def to_layer_input(self, x: Float[Array, "B T D"], tokens: Ids) -> PyTree:
        return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], self.norm.streams, x.shape[2]))

    def from_layer_output(self, x: PyTree) -> Float[Array, "B T_out streams D"]:
        """Return the streams, because the final norm reduces them to one hidden state."""
        return x

    def mtp_hidden(
        self, hidden: Float[Array, "B T_out streams D"], normalized: Float[Array, "B T_out D"]
    ) -> Float[Array, "B T_out S"]:
        """Return the streams of each token, concatenated."""
        return hidden.reshape(*hidden.shape[:2], -1)

    def _prediction_layers(self) -> Callable[..., list[Any]]:
        return functools.partial(super()._prediction_layers(), form=StreamedMTP)

    def layer(self, index: int, form: type[Layer] = Streamed, **kw: Any) -> Layer:
        connections = tuple(self.connection(dtype=kw["dtype"], rngs=kw["rngs"]) for _ in range(2))
        return super().layer(index, form, connections=connections, **kw)

    def connection(self, **kw: Unpack[ParamOptions]) -> StreamConnection:
        """Build the connection of an attention or feed-forward module to the streams."""
        c, options = self.config, {"eps": self.config.hc_eps, "norm_eps": self.config.rms_norm_eps}
        return HyperConnection(c.hidden_size, c.hc_mult, iterations=c.hc_sinkhorn_iters, rngs=kw["rngs"], **options)
