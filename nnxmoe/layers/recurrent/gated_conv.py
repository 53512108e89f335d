"""Gated short convolution (LFM2; Liquid AI, 2025). Its recurrent state is the last few inputs of the convolution."""

from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions
from nnxmoe.layers.cache import RecurrentState
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.recurrent.conv import ShortConv
from nnxmoe.layers.recurrent.recurrence import OrderedTokens


class GatedShortConv(nnx.Module):
    """Gated short convolution ``out(c * conv(b * v))``, where b, c and v are projections of the input.

    The state of a row consists of the last ``taps - 1`` inputs of the convolution. Source: ``Lfm2ShortConv`` in
    transformers.

    Args:
        dim: Width of the activations.
        taps: Filter width of the convolution.
        bias: Whether the projections and the convolution have biases.
        **kw: Parameter dtype and rngs.
    """

    supports_context_parallel: ClassVar[bool] = True  # Whether mesh axis ``context`` may shard the tokens.

    def __init__(self, dim: int, *, taps: int, bias: bool, **kw: Unpack[ParamOptions]):
        self.project = Linear((dim,), (3 * dim,), ("embed", "mlp"), bias=bias, **kw)
        self.conv = ShortConv(dim, taps, bias=bias, activation=jax.nn.identity, **kw)
        self.out = Linear((dim,), (dim,), ("mlp", "embed"), bias=bias, **kw)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: RecurrentState | None = None
    ) -> tuple[Float[Array, "B T_out D"], RecurrentState | None]:
        tokens = OrderedTokens.from_context(context, x.shape[0], x.shape[1], cached=cache is not None)
        b, c, v = jnp.split(self.project(tokens.sort(x)), 3, axis=-1)
        if cache is None or context.past is None:
            window = self._empty_window(x.shape[0], x.dtype)
        else:
            window = cache.state_before(context.past)
        y, conv_inputs = self.conv(b * v, window, tokens.segment)
        if cache is not None:
            recent = tokens.count[:, None] - 1 - jnp.arange(1 + cache.lookahead)
            windows = self.conv.windows(conv_inputs, recent, tokens.segment)
            cache = cache.write(windows, tokens.token_indices(recent))
        return self.out(context.output_tokens(tokens.unsort(c * y))), cache

    def _empty_window(self, batch: int, dtype: Any) -> Float[Array, "B _ D"]:
        return jnp.zeros((batch, self.conv.taps - 1, *self.out.ins), dtype)

    def score_ops(self, num_keys: float) -> list[tuple[int, float]]:
        """Return [(multiplications per token, 1)], independent of the number of earlier tokens, ``num_keys``."""
        (dim,) = self.out.ins
        return [(self.conv.taps * dim, 1.0)]

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> RecurrentState:
        """Create ``1 + lookahead`` states. ``capacity`` has no effect."""
        return RecurrentState.empty(self._empty_window(batch, dtype), lookahead)
