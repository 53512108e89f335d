"""Decoders with several residual streams (manifold-constrained hyper-connections, Xie et al. 2025)."""

from typing import Any

import jax.numpy as jnp

from nnxmoe.layers.context import Context
from nnxmoe.layers.hyper import HyperConnection, mixed
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.layer import Layer, LayerOutput


class Streamed(Layer):
    """A layer whose halves read from several residual streams and add to them."""

    def __init__(self, *parts: Any, connections: tuple[HyperConnection, HyperConnection]):
        super().__init__(*parts)
        self.attention_streams, self.feed_forward_streams = connections

    def __call__(self, x: Any, context: Context, cache: Any = None) -> LayerOutput:
        one = self.attention_streams(x)
        y, cache = self.mix(one.x, context=context, cache=cache)
        x = mixed(context.asked(x), y, one.asked(context))
        other = self.feed_forward_streams(x)
        y, info = self.feed(other.x, context=context)
        return LayerOutput(mixed(x, y, other), cache, info)


class StreamedLM(CausalLM):
    """A decoder with ``hc_mult`` residual streams, which its final norm reduces to one."""

    def enter(self, x: Any, tokens: Any) -> Any:
        return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], self.norm.streams, x.shape[2]))

    def leave(self, x: Any) -> Any:
        """The streams: the last norm makes one of them."""
        return x

    def layer(self, index: int, form: type[Layer] = Streamed, **kw: Any) -> Layer:
        return super().layer(
            index, form, connections=(self._connection(kw["rngs"]), self._connection(kw["rngs"])), **kw
        )

    def _connection(self, rngs: Any) -> HyperConnection:
        c = self.config
        return HyperConnection(
            c.hidden_size, c.hc_mult, iterations=c.hc_sinkhorn_iters, eps=c.hc_eps, norm_eps=c.rms_norm_eps, rngs=rngs
        )
