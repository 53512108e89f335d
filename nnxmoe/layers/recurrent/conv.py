"""Short causal depthwise convolution over the tokens of a row (Mamba; Gu & Dao 2023)."""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from nnxmoe.axes import ParamOptions, parameter
from nnxmoe.layers.cache_buffer import gather_tokens


def recent_tokens(
    inputs: Shaped[Array, "B _ ..."], indices: Int[Array, "B n"], segment: Int[Array, "B T"] | None, count: int
) -> Shaped[Array, "B n count ..."]:
    """Gather the last ``count`` tokens up to each index in ``indices``. Tokens of other segments are set to zero.

    Args:
        inputs: The ``count`` tokens before a pass, in segment 0, followed by the tokens of the pass.
        indices: Indices of tokens of the pass.
        segment: Segment of each token of the pass. If ``None``, all tokens are in segment 0.
        count: Number of tokens to gather per index.
    """
    indices = jnp.maximum(indices, 0)[:, :, None] + 1 + jnp.arange(count)
    tokens = gather_tokens(inputs, indices)
    if segment is None:
        return tokens
    segments = gather_tokens(jnp.pad(segment, ((0, 0), (count, 0))), indices)
    same_segment = segments == segments[:, :, -1:]
    return jnp.where(same_segment.reshape(*same_segment.shape, *(1,) * (inputs.ndim - 2)), tokens, 0)


class ShortConv(nnx.Module):
    """Short depthwise convolution ``silu(sum_j w[j] x[t - (taps - 1 - j) * dilation] + bias)``, computed in float32.

    The weight is ``[channels, 1, taps]``, as in checkpoints. ``activation`` replaces ``silu``.
    """

    bias: Any = None
    activation: Callable[[Array], Array] = staticmethod(jax.nn.silu)
    dilation: int = 1

    def __init__(
        self,
        channels: int,
        taps: int,
        *,
        bias: bool = False,
        activation: Callable[[Array], Array] = jax.nn.silu,
        dilation: int = 1,
        **kw: Unpack[ParamOptions],
    ):
        self.dilation = dilation
        init, zeros = nnx.initializers.normal(taps**-0.5), nnx.initializers.zeros
        self.weight = parameter((channels, 1, taps), ("mlp", None, None), init, **kw)
        self.bias = parameter((channels,), ("mlp",), zeros, **kw) if bias else None
        self.activation = activation

    @property
    def taps(self) -> int:
        """Filter width: the number of tokens that an output depends on, including the current token."""
        return self.weight.shape[-1]

    @property
    def window_size(self) -> int:
        """Number of earlier tokens that the filter spans."""
        return (self.taps - 1) * self.dilation

    def filters(self) -> Float[Array, "channels 1 taps"]:
        """Return the filter of each channel."""
        return self.weight[...]

    def __call__(
        self, x: Float[Array, "B T channels"], window: Float[Array, "B _ channels"], segment: Int[Array, "B T"] | None
    ) -> tuple[Float[Array, "B T channels"], Float[Array, "B _ channels"]]:
        """Apply the convolution.

        Args:
            x: Input tokens.
            window: The `window_size` tokens before ``x``, in segment 0.
            segment: Segment of each token: the number of segments that start at or before the token. Outputs only
                depend on tokens in the same segment. If ``None``, all tokens are in segment 0.

        Returns:
            The outputs, and the concatenation of ``window`` and ``x``.
        """
        length, offsets = x.shape[1], [tap * self.dilation for tap in range(self.taps)]
        inputs = jnp.concatenate([window.astype(x.dtype), x], axis=1)
        weight, outputs = self.filters().astype(jnp.float32), jnp.zeros(x.shape, jnp.float32)
        same_segment = None
        if segment is not None:
            input_segment = jnp.pad(segment, ((0, 0), (self.window_size, 0)))
            same_segment = [input_segment[:, start : start + length] == segment for start in offsets]
        for tap, start in enumerate(offsets):
            term = inputs[:, start : start + length].astype(jnp.float32) * weight[:, 0, tap]
            if same_segment is not None:
                term = jnp.where(same_segment[tap][:, :, None], term, 0)
            outputs += term
        if self.bias is not None:
            outputs += jnp.broadcast_to(self.bias[...].astype(jnp.float32), outputs.shape)
        return self.activation(outputs).astype(x.dtype), inputs

    def windows(
        self, inputs: Float[Array, "B _ channels"], indices: Int[Array, "B n"], segment: Int[Array, "B T"] | None
    ) -> Float[Array, "B n _ channels"]:
        """Gather the last `window_size` tokens up to each index in ``indices``; see `recent_tokens`.

        ``inputs`` is the second output of ``__call__``, the concatenation of window and input tokens.
        """
        return recent_tokens(inputs, indices, segment, self.window_size)


class SeparateConvs(ShortConv):
    """`ShortConv` of concatenated queries, keys and values, with separate weights as in checkpoints."""

    def __init__(self, channels: int, taps: int, **kw: Unpack[ParamOptions]):
        self.q, self.k, self.v = (ShortConv(channels, taps, **kw) for _ in "qkv")

    @property
    def taps(self) -> int:
        return self.q.taps

    def filters(self) -> Float[Array, "channels 1 taps"]:
        return jnp.concatenate([conv.filters() for conv in (self.q, self.k, self.v)])
