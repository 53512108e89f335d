"""Short causal convolution over the tokens of a row with one filter per channel (Mamba, Gu & Dao 2023)."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import ParamOptions, parameter
from nnxmoe.layers.cache_buffer import gather_tokens


class ShortConv(nnx.Module):
    """Short convolution ``silu(sum_j w[j] x[t - taps + 1 + j] + bias)``, computed in float32.

    The weight is ``[channels, 1, taps]``, as in checkpoints.
    """

    bias: Any = None

    def __init__(self, channels: int, taps: int, *, bias: bool = False, **kw: Unpack[ParamOptions]):
        init, zeros = nnx.initializers.normal(taps**-0.5), nnx.initializers.zeros
        self.weight = parameter((channels, 1, taps), ("mlp", None, None), init, **kw)
        self.bias = parameter((channels,), ("mlp",), zeros, **kw) if bias else None

    @property
    def taps(self) -> int:
        """Number of tokens that an output depends on, including the output's token."""
        return self.weight.shape[-1]

    def filters(self) -> Float[Array, "channels 1 taps"]:
        """Return the filter of each channel."""
        return self.weight[...]

    def __call__(
        self, x: Float[Array, "B T channels"], window: Float[Array, "B _ channels"], segment: Int[Array, "B T"] | None
    ) -> tuple[Float[Array, "B T channels"], Float[Array, "B _ channels"]]:
        """Return the outputs, and the concatenation of the window and the inputs.

        Args:
            x: Inputs.
            window: The ``taps - 1`` inputs before x, in segment 0.
            segment: Number of segments that start at or before each token. Outputs depend on tokens of the same segment
                only. If None, all tokens are in segment 0.
        """
        length, past = x.shape[1], self.taps - 1
        inputs = jnp.concatenate([window.astype(x.dtype), x], axis=1)
        weight, total = self.filters().astype(jnp.float32), jnp.zeros(x.shape, jnp.float32)
        same_segment = None
        if segment is not None:
            input_segment = jnp.pad(segment, ((0, 0), (past, 0)))
            same_segment = [input_segment[:, tap : tap + length] == segment for tap in range(self.taps)]
        for tap in range(self.taps):
            term = inputs[:, tap : tap + length].astype(jnp.float32) * weight[:, 0, tap]
            if same_segment is not None:
                term = jnp.where(same_segment[tap][:, :, None], term, 0)
            total += term
        if self.bias is not None:
            total += jnp.broadcast_to(self.bias[...].astype(jnp.float32), total.shape)
        return jax.nn.silu(total).astype(x.dtype), inputs

    def windows(
        self, inputs: Float[Array, "B _ channels"], places: Int[Array, "B n"], segment: Int[Array, "B T"] | None
    ) -> Float[Array, "B n _ channels"]:
        """Gather the window after each token at ``places``. Tokens of different segments are zero in the window.

        ``inputs`` is the second result of ``__call__``, the concatenation of the window and the inputs.
        """
        past = self.taps - 1
        places = jnp.maximum(places, 0)[:, :, None] + 1 + jnp.arange(past)
        windows = gather_tokens(inputs, places)
        if segment is None:
            return windows
        segments = gather_tokens(jnp.pad(segment, ((0, 0), (past, 0))), places)
        return jnp.where((segments == segments[:, :, -1:])[..., None], windows, 0)


class SeparateConvs(ShortConv):
    """`ShortConv` of queries, keys and values, with ``channels`` each and separate weights as in checkpoints."""

    def __init__(self, channels: int, taps: int, **kw: Unpack[ParamOptions]):
        self.q, self.k, self.v = (ShortConv(channels, taps, **kw) for _ in "qkv")

    @property
    def taps(self) -> int:
        return self.q.taps

    def filters(self) -> Float[Array, "channels 1 taps"]:
        return jnp.concatenate([part.filters() for part in (self.q, self.k, self.v)])
