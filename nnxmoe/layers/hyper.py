"""Multiple residual streams: manifold-constrained hyper-connections (Xie et al. 2026; DeepSeek-V4, 2026).

`IndependentConnection` (Hy4, 2026) and `GatedConnection` (Qwen3.8-Flash-Next, 2026) do not mix the streams.
"""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions, parameter
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import OffsetNorm, RMSNorm, rms_normalize

F32 = jnp.dtype(jnp.float32)


class Connection(NamedTuple):
    """Input of an attention or feed-forward module, and the weights that add the module's output to the streams.

    Attributes:
        x: Input of the module: a weighted sum of the streams.
        post: Scale factor for the output, per stream.
        mix: Mixing matrix. ``mix[..., i, o]`` is the weight of stream i in the new stream o. Rows and columns sum to 1.
            ``None`` if the streams are not mixed.
    """

    x: Float[Array, "B T D"]
    post: Float[Array, "B T streams"]
    mix: Float[Array, "B T streams streams"] | None = None

    def output_tokens(self, context: Context) -> "Connection":
        """Select the tokens whose output is requested."""
        return jax.tree.map(context.output_tokens, self)


class StreamWeights(nnx.Module):
    """Projection to float32 weights per token, ``scale * (fn @ rms_normalize(streams)) + base``.

    The parameters are float32 for any dtype of the model.

    Args:
        dim: Width of a stream, D.
        streams: Number of streams.
        groups: Number of weights per scale. The total number of weights is ``sum(groups)``.
        eps: Epsilon for the normalization.
        rngs: Random number generators of the initial values. ``None`` for abstract parameters.
    """

    def __init__(self, dim: int, streams: int, groups: tuple[int, ...], eps: float, *, rngs: nnx.Rngs | None):
        self.groups, self.eps = groups, eps
        num_weights = sum(groups)
        kw: dict[str, Any] = {"dtype": F32, "rngs": rngs}
        self.fn = Linear((streams, dim), (num_weights,), (None, None, None), **kw)
        self.fn.kernel.set_metadata(keeps_dtype=True)
        self.base = parameter((num_weights,), (None,), nnx.initializers.zeros, keeps_dtype=True, **kw)
        self.scale = parameter((len(groups),), (None,), nnx.initializers.ones, keeps_dtype=True, **kw)

    def __call__(self, streams: Float[Array, "B T streams D"]) -> Float[Array, "B T count"]:
        flat_streams = streams.reshape(*streams.shape[:2], -1).astype(jnp.float32)
        weights = self.fn.weight().matmul_f32(rms_normalize(flat_streams, self.eps), jax.lax.Precision.HIGHEST)
        scales = [jnp.broadcast_to(s, (n,)) for s, n in zip(self.scale[...], self.groups, strict=True)]
        return weights * jnp.concatenate(scales) + self.base[...]


class HyperConnection(nnx.Module):
    """Projection of each token's streams to the `Connection` of an attention or feed-forward module.

    Sinkhorn-Knopp iterations (1967) normalize ``mix`` to a doubly stochastic matrix.

    Args:
        dim: Width of a stream, D.
        streams: Number of streams.
        iterations: Number of Sinkhorn-Knopp iterations.
        eps: Value that is added to ``mix``, to the divisors of the iterations, and to the weights of the sum ``x``.
        norm_eps: Epsilon for the stream normalization.
        rngs: Random number generators of the initial values. ``None`` for abstract parameters.
    """

    def __init__(self, dim: int, streams: int, *, iterations: int, eps: float, norm_eps: float, rngs: nnx.Rngs | None):
        self.streams, self.iterations, self.eps = streams, iterations, eps
        self.weights = StreamWeights(dim, streams, (streams, streams, streams**2), norm_eps, rngs=rngs)

    def __call__(self, streams: Float[Array, "B T streams D"]) -> Connection:
        pre, post, mix = self.compute_weights(streams)
        return Connection(collapse_streams(streams, pre), post, mix)

    def compute_weights(
        self, streams: Float[Array, "B T streams D"]
    ) -> tuple[Float[Array, "B T streams"], Float[Array, "B T streams"], Float[Array, "B T streams streams"]]:
        """Compute the weights of the streams in the module's input, `Connection.post` and `Connection.mix`."""
        n = self.streams
        pre, post, mix = jnp.split(self.weights(streams), [n, 2 * n], axis=-1)
        mix = jax.nn.softmax(mix.reshape(*mix.shape[:2], n, n), axis=-1) + self.eps
        mix = mix / (jnp.sum(mix, axis=-2, keepdims=True) + self.eps)

        def normalize(_: Any, mix: Array) -> Array:
            mix = mix / (jnp.sum(mix, axis=-1, keepdims=True) + self.eps)
            return mix / (jnp.sum(mix, axis=-2, keepdims=True) + self.eps)

        mix = jax.lax.fori_loop(0, self.iterations - 1, normalize, mix)
        return jax.nn.sigmoid(pre) + self.eps, 2 * jax.nn.sigmoid(post), mix


class IndependentConnection(nnx.Module):
    """Connection of an attention or feed-forward module to streams that are not mixed (Hy4, 2026).

    Source: ``HYV4HyperConnection`` in transformers 5.24.

    Args:
        dim: Width of a stream, D.
        streams: Number of streams.
        magnitude: Factor of the sigmoid that scales the module's output.
        eps: Value that is added to the weights of the sum ``x`` and of the module's output.
        norm_eps: Epsilon for the stream normalization.
        rngs: Random number generators of the initial values. ``None`` for abstract parameters.
    """

    def __init__(self, dim: int, streams: int, *, magnitude: float, eps: float, norm_eps: float, rngs: nnx.Rngs | None):
        self.magnitude, self.eps = magnitude, eps
        self.weights = StreamWeights(dim, streams, (streams, streams), norm_eps, rngs=rngs)

    def __call__(self, streams: Float[Array, "B T streams D"]) -> Connection:
        pre, post = jax.nn.sigmoid(jnp.stack(jnp.split(self.weights(streams), 2, axis=-1)))
        return Connection(collapse_streams(streams, pre + self.eps), self.magnitude * post + self.eps, None)


def collapse_streams(
    streams: Float[Array, "B T streams D"], weights: Float[Array, "B T streams"]
) -> Float[Array, "B T D"]:
    """Compute the weighted sum of the streams in float32, and cast the sum to the dtype of the streams."""
    return jnp.einsum("btn,btnd->btd", weights, streams.astype(jnp.float32)).astype(streams.dtype)


def mix_streams(
    streams: Float[Array, "B T streams D"], y: Float[Array, "B T D"], connection: Connection
) -> Float[Array, "B T streams D"]:
    """Mix the streams by ``connection.mix``, and add ``y`` times ``connection.post`` to each stream.

    Without ``mix``, the sum is computed in float32.
    """
    if connection.mix is None:
        return (streams + connection.post[..., None] * y[:, :, None].astype(jnp.float32)).astype(streams.dtype)
    mixed_streams = jnp.einsum("btio,btid->btod", connection.mix.astype(streams.dtype), streams)
    return connection.post.astype(y.dtype)[..., None] * y[:, :, None] + mixed_streams.astype(y.dtype)


class MeanNorm(RMSNorm):
    """Final norm of a model, applied to the mean of the streams (GLM-5.3, 2026)."""

    def __init__(self, dim: int, streams: int, eps: float, **kw: Unpack[ParamOptions]):
        super().__init__(dim, eps, **kw)
        self.streams = streams

    def __call__(self, x: Float[Array, "B T streams D"]) -> Float[Array, "B T D"]:
        return super().__call__(jnp.mean(x, axis=2))


class CollapsedNorm(RMSNorm):
    """Final norm of a model, applied to a weighted sum of the streams. `StreamWeights` computes weights per token."""

    def __init__(self, dim: int, streams: int, *, eps: float, norm_eps: float, **kw: Unpack[ParamOptions]):
        super().__init__(dim, norm_eps, **kw)
        self.streams, self.min_weight = streams, eps
        self.weights = StreamWeights(dim, streams, (streams,), norm_eps, rngs=kw["rngs"])

    def __call__(self, x: Float[Array, "B T streams D"]) -> Float[Array, "B T D"]:
        return super().__call__(collapse_streams(x, jax.nn.sigmoid(self.weights(x)) + self.min_weight))


class StreamNorm(OffsetNorm):
    """`OffsetNorm` of each residual stream. The streams have separate scales, stored as one vector."""

    def __init__(self, dim: int, streams: int, eps: float, **kw: Unpack[ParamOptions]):
        super().__init__(streams * dim, eps, **kw)
        self.streams = streams

    def __call__(self, x: Float[Array, "B T streams D"]) -> Float[Array, "B T streams D"]:
        scale = self.scale[...].astype(jnp.float32).reshape(x.shape[2:])
        return (rms_normalize(x.astype(jnp.float32), self.eps) * (1 + scale)).astype(x.dtype)


class StreamMixer(StreamNorm):
    """Weighted mean of the normalized streams. A low-rank projection computes one weight per component.

    Computes ``mean_n(sigmoid(up(silu(down(s) / N)))_n * s_n)`` for the N normalized streams s. It is the final norm of
    Qwen3.8-Flash-Next. Source: ``Qwen4ExpTextGatedResidual`` in transformers 5.24.

    Args:
        dim: Width of a stream, D.
        streams: Number of streams, N.
        rank: Rank of the projection.
        eps: Epsilon for the norm.
        **kw: Parameter dtype and rngs.
    """

    def __init__(self, dim: int, streams: int, rank: int, eps: float, **kw: Unpack[ParamOptions]):
        super().__init__(dim, streams, eps, **kw)
        self.down = Linear((streams, dim), (rank,), (None, None, "q_rank"), **kw)
        self.up = Linear((rank,), (streams, dim), ("q_rank", None, None), **kw)

    def mix(self, normalized: Float[Array, "B T streams D"]) -> Float[Array, "B T D"]:
        """Compute the weighted mean of the normalized streams."""
        weights = jax.nn.sigmoid(self.up(jax.nn.silu(self.down(normalized) / self.streams)))
        return jnp.mean(weights * normalized, axis=2)

    def normalize(self, x: Float[Array, "B T streams D"]) -> Float[Array, "B T streams D"]:
        """Normalize each stream."""
        return super().__call__(x)

    def __call__(self, x: Float[Array, "B T streams D"]) -> Float[Array, "B T D"]:
        return self.mix(self.normalize(x))


class GatedConnection(StreamMixer):
    """Connection of an attention or feed-forward module to streams that are not mixed (Qwen3.8-Flash-Next, 2026).

    The input of the module is the output of `StreamMixer`. The factors of the module's output, one per stream, are
    ``2 sigmoid(inject(s) / N)`` for the N normalized streams s. See `StreamMixer` for the arguments.
    """

    def __init__(self, dim: int, streams: int, rank: int, eps: float, **kw: Unpack[ParamOptions]):
        super().__init__(dim, streams, rank, eps, **kw)
        self.inject = Linear((streams, dim), (streams,), (None, None, None), **kw)

    def __call__(self, x: Float[Array, "B T streams D"]) -> Connection:  # pyright: ignore[reportIncompatibleMethodOverride]
        normalized = self.normalize(x)
        return Connection(self.mix(normalized), 2 * jax.nn.sigmoid(self.inject(normalized) / self.streams))


class JointNorm(OffsetNorm):
    """`OffsetNorm` of all residual streams of a token together, with a scale ``[streams * D]``."""

    def __call__(self, x: Float[Array, "B T streams D"]) -> Float[Array, "B T streams D"]:
        return super().__call__(x.reshape(*x.shape[:2], -1)).reshape(x.shape)
