"""Manifold-constrained hyper-connections: several residual streams (Xie et al. 2026; DeepSeek-V4, 2026)."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions, parameter
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import RMSNorm, rms_normalize

F32 = jnp.dtype(jnp.float32)


class Connection(NamedTuple):
    """Input of half a layer, and how its output is added to the streams.

    Attributes:
        x: the streams collapsed to one.
        post: factors of what is added to each stream.
        mix: ``[..., i, o]``: the share of stream i in stream o; rows and columns sum to 1.
    """

    x: Float[Array, "B T D"]
    post: Float[Array, "B T streams"]
    mix: Float[Array, "B T streams streams"]

    def output_tokens(self, context: Context) -> "Connection":
        """Select the tokens whose output is needed."""
        return Connection(*map(context.output_tokens, self))


class StreamWeights(nnx.Module):
    """``scale * (fn @ unit(streams)) + base``: ``count`` weights per token, in float32 whatever the model's dtype.

    ``groups``: number of weights per scale; ``count`` is their sum.
    """

    def __init__(self, dim: int, streams: int, groups: tuple[int, ...], eps: float, *, rngs: nnx.Rngs | None):
        self.groups, self.eps = groups, eps
        count = sum(groups)
        kw: dict[str, Any] = {"dtype": F32, "rngs": rngs}
        self.fn = Linear((streams, dim), (count,), (None, None, None), **kw)
        self.fn.kernel.set_metadata(keeps_dtype=True)
        self.base = parameter((count,), (None,), nnx.initializers.zeros, keeps_dtype=True, **kw)
        self.scale = parameter((len(groups),), (None,), nnx.initializers.ones, keeps_dtype=True, **kw)

    def __call__(self, streams: Float[Array, "B T streams D"]) -> Float[Array, "B T count"]:
        flat = streams.reshape(*streams.shape[:2], -1).astype(jnp.float32)
        weights = self.fn.weight().matmul_f32(rms_normalize(flat, self.eps), jax.lax.Precision.HIGHEST)
        scales = [jnp.broadcast_to(s, (n,)) for s, n in zip(self.scale[...], self.groups, strict=True)]
        return weights * jnp.concatenate(scales) + self.base[...]


class HyperConnection(nnx.Module):
    """Reads the streams for half a layer, and says how its output is added; all factors depend on the token's streams.

    ``mix`` is made doubly stochastic by ``iterations`` of Sinkhorn and Knopp (1967), with ``eps`` in its divisors.
    """

    def __init__(self, dim: int, streams: int, *, iterations: int, eps: float, norm_eps: float, rngs: nnx.Rngs | None):
        self.streams, self.iterations, self.eps = streams, iterations, eps
        self.weights = StreamWeights(dim, streams, (streams, streams, streams**2), norm_eps, rngs=rngs)

    def __call__(self, streams: Float[Array, "B T streams D"]) -> Connection:
        n = self.streams
        pre, post, mix = jnp.split(self.weights(streams), [n, 2 * n], axis=-1)
        mix = jax.nn.softmax(mix.reshape(*mix.shape[:2], n, n), axis=-1) + self.eps
        mix = mix / (jnp.sum(mix, axis=-2, keepdims=True) + self.eps)

        def normalize(_: Any, mix: Array) -> Array:
            mix = mix / (jnp.sum(mix, axis=-1, keepdims=True) + self.eps)
            return mix / (jnp.sum(mix, axis=-2, keepdims=True) + self.eps)

        mix = jax.lax.fori_loop(0, self.iterations - 1, normalize, mix)
        x = collapse_streams(streams, jax.nn.sigmoid(pre) + self.eps)
        return Connection(x, 2 * jax.nn.sigmoid(post), mix)


def collapse_streams(
    streams: Float[Array, "B T streams D"], weights: Float[Array, "B T streams"]
) -> Float[Array, "B T D"]:
    """Sum the streams with weights, in their dtype."""
    return jnp.einsum("btn,btnd->btd", weights, streams.astype(jnp.float32)).astype(streams.dtype)


def mix_streams(
    streams: Float[Array, "B T streams D"], y: Float[Array, "B T D"], connection: Connection
) -> Float[Array, "B T streams D"]:
    """Mix the streams with each other and add ``y`` to each."""
    mixed = jnp.einsum("btio,btid->btod", connection.mix.astype(streams.dtype), streams)
    return connection.post.astype(y.dtype)[..., None] * y[:, :, None] + mixed.astype(y.dtype)


class MeanNorm(RMSNorm):
    """Norm after the last layer, of the mean of the streams (GLM-5.3, 2026)."""

    def __init__(self, dim: int, streams: int, eps: float, **kw: Unpack[ParamOptions]):
        super().__init__(dim, eps, **kw)
        self.streams = streams

    def __call__(self, x: Float[Array, "B T streams D"]) -> Float[Array, "B T D"]:
        return super().__call__(jnp.mean(x, axis=2))


class CollapsedNorm(RMSNorm):
    """Norm after the last layer, of the streams collapsed to one."""

    def __init__(self, dim: int, streams: int, *, eps: float, norm_eps: float, **kw: Unpack[ParamOptions]):
        super().__init__(dim, norm_eps, **kw)
        self.streams, self.min_weight = streams, eps
        self.weights = StreamWeights(dim, streams, (streams,), norm_eps, rngs=kw["rngs"])

    def __call__(self, x: Float[Array, "B T streams D"]) -> Float[Array, "B T D"]:
        return super().__call__(collapse_streams(x, jax.nn.sigmoid(self.weights(x)) + self.min_weight))
