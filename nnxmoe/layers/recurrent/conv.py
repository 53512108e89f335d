"""Short causal convolution over the tokens of a row, one filter per channel (Mamba, Gu & Dao 2023)."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import ParamOptions, parameter
from nnxmoe.layers.cache import gather_tokens


class ShortConv(nnx.Module):
    """``silu(sum_j w[j] x[t - taps + 1 + j] + bias)``, in float32; weight ``[channels, 1, taps]`` as in checkpoints."""

    bias: Any = None

    def __init__(self, channels: int, taps: int, *, bias: bool = False, **kw: Unpack[ParamOptions]):
        init, zeros = nnx.initializers.normal(taps**-0.5), nnx.initializers.zeros
        self.weight = parameter((channels, 1, taps), ("mlp", None, None), init, **kw)
        self.bias = parameter((channels,), ("mlp",), zeros, **kw) if bias else None

    @property
    def taps(self) -> int:
        """Number of tokens that an output depends on, its own included."""
        return self.weight.shape[-1]

    def filters(self) -> Float[Array, "channels 1 taps"]:
        """The filter of each channel."""
        return self.weight[...]

    def __call__(
        self, x: Float[Array, "B T channels"], window: Float[Array, "B _ channels"], run: Int[Array, "B T"] | None
    ) -> tuple[Float[Array, "B T channels"], Float[Array, "B _ channels"]]:
        """The outputs, and the inputs with the window before them.

        ``window``: the ``taps - 1`` inputs before x. ``run``: the number of segments that begin up to each token, whose
        output depends on tokens of its own run only; the window is of run 0. None: all are of run 0.
        """
        (_, length, _), past = x.shape, self.taps - 1
        seen = jnp.concatenate([window.astype(x.dtype), x], axis=1)
        weight, total = self.filters().astype(jnp.float32), jnp.zeros(x.shape, jnp.float32)
        runs = None if run is None else jnp.pad(run, ((0, 0), (past, 0)))
        for tap in range(self.taps):
            part = seen[:, tap : tap + length].astype(jnp.float32) * weight[:, 0, tap]
            if run is not None and runs is not None:
                part = jnp.where((runs[:, tap : tap + length] == run)[:, :, None], part, 0)
            total += part
        if self.bias is not None:
            total += jnp.broadcast_to(self.bias[...].astype(jnp.float32), total.shape)
        return jax.nn.silu(total).astype(x.dtype), seen

    def windows(
        self, seen: Float[Array, "B _ channels"], at: Int[Array, "B n"], run: Int[Array, "B T"] | None
    ) -> Float[Array, "B n _ channels"]:
        """The window after each of the tokens ``at``, with zeros for tokens of another run. ``seen``: the inputs that
        the call returns."""
        past = self.taps - 1
        places = jnp.maximum(at, 0)[:, :, None] + 1 + jnp.arange(past)
        found = gather_tokens(seen, places)
        if run is None:
            return found
        runs = gather_tokens(jnp.pad(run, ((0, 0), (past, 0))), places)
        return jnp.where((runs == runs[:, :, -1:])[..., None], found, 0)


class SeparateConvs(ShortConv):
    """`ShortConv` for queries, keys and values of ``channels`` each, with a weight each as in checkpoints."""

    def __init__(self, channels: int, taps: int, **kw: Unpack[ParamOptions]):
        self.q, self.k, self.v = (ShortConv(channels, taps, **kw) for _ in "qkv")

    @property
    def taps(self) -> int:
        return self.q.taps

    def filters(self) -> Float[Array, "channels 1 taps"]:
        return jnp.concatenate([part.filters() for part in (self.q, self.k, self.v)])
