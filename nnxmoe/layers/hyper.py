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
    """``x``: the streams collapsed to one. ``post``: factors of what is added to each stream. ``mix [.. i, o]``: the
    share of stream i in stream o, of which rows and columns sum to 1."""

    x: Float[Array, "B T D"]
    post: Float[Array, "B T streams"]
    mix: Float[Array, "B T streams streams"]

    def output_tokens(self, context: Context) -> "Connection":
        return Connection(*map(context.output_tokens, self))


class StreamWeights(nnx.Module):
    """``scale * (fn @ unit(streams)) + base``: ``count`` weights of a token, in float32 whatever the model's dtype.

    ``groups``: how many weights each of the scales is for.
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
        scale = jnp.concatenate([jnp.broadcast_to(s, (n,)) for s, n in zip(self.scale[...], self.groups, strict=True)])
        return weights * scale + self.base[...]


class HyperConnection(nnx.Module):
    """How half of a layer reads the streams and adds to them; all factors depend on the streams of the token.

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

        def even(_: Any, mix: Array) -> Array:
            mix = mix / (jnp.sum(mix, axis=-1, keepdims=True) + self.eps)
            return mix / (jnp.sum(mix, axis=-2, keepdims=True) + self.eps)

        mix = jax.lax.fori_loop(0, self.iterations - 1, even, mix)
        return Connection(collapse_streams(streams, jax.nn.sigmoid(pre) + self.eps), 2 * jax.nn.sigmoid(post), mix)


def collapse_streams(
    streams: Float[Array, "B T streams D"], weights: Float[Array, "B T streams"]
) -> Float[Array, "B T D"]:
    """The weighted sum of the streams, in their dtype."""
    return jnp.einsum("btn,btnd->btd", weights, streams.astype(jnp.float32)).astype(streams.dtype)


def mix_streams(
    streams: Float[Array, "B T streams D"], y: Float[Array, "B T D"], by: Connection
) -> Float[Array, "B T streams D"]:
    """The streams mixed with each other, with ``y`` added to each."""
    moved = jnp.einsum("btio,btid->btod", by.mix.astype(streams.dtype), streams)
    return by.post.astype(y.dtype)[..., None] * y[:, :, None] + moved.astype(y.dtype)


class MeanNorm(RMSNorm):
    """The norm after the last layer, of the mean of the streams (GLM-5.3, 2026)."""

    def __init__(self, dim: int, streams: int, eps: float, **kw: Unpack[ParamOptions]):
        super().__init__(dim, eps, **kw)
        self.streams = streams

    def __call__(self, x: Float[Array, "B T streams D"]) -> Float[Array, "B T D"]:
        return super().__call__(jnp.mean(x, axis=2))


class CollapsedNorm(RMSNorm):
    """The norm after the last layer, of the streams collapsed to one."""

    def __init__(self, dim: int, streams: int, *, eps: float, norm_eps: float, **kw: Unpack[ParamOptions]):
        super().__init__(dim, norm_eps, **kw)
        self.streams = streams
        self.weights, self.floor = StreamWeights(dim, streams, (streams,), norm_eps, rngs=kw["rngs"]), eps

    def __call__(self, x: Float[Array, "B T streams D"]) -> Float[Array, "B T D"]:
        return super().__call__(collapse_streams(x, jax.nn.sigmoid(self.weights(x)) + self.floor))
