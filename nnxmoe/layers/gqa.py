"""Grouped-query attention (Ainslie et al. 2023), with an optional sliding window (Mistral) and normalised heads."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.config.rope import Rope
from nnxmoe.layers.attend import Attend, Scores
from nnxmoe.layers.cache import KVCache, RingCache
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear import Linear
from nnxmoe.layers.qk_norm import QKNorm
from nnxmoe.layers.rope import Rotate, rotate_halves
from nnxmoe.layers.sinks import Sinks


class OutputGate(nnx.Module):
    """``y * sigmoid(g(x))``: factors of the heads' outputs ``y [B T N H]`` from the layer's input (Qiu et al. 2025)."""

    def __init__(self, dim: int, heads: int, head_dim: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        self.g = Linear((dim,), (heads, head_dim), ("embed", "heads", "head"), dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B asked D"], y: Float[Array, "B asked N H"]) -> Float[Array, "B asked N H"]:
        return y * jax.nn.sigmoid(self.g(x))


class GQA(nnx.Module):
    """N query heads over K key/value heads of width H; kernels ``q [D N H]``, ``k v [D K H]``, ``o [N H D]``.

    ``scale``: factor of the scores; None means ``H ** -0.5``. With another scale the query kernel is initialised so
    that the scores have the same variance (MaxText folds the scale into that kernel and uses 1). ``rotary``:
    rotary position embedding of queries and keys, None: they carry no position; ``rotate``: its pairing of a head's
    components. ``bias``: of q, k and v. ``out_bias``: of o; None means as ``bias``. ``window``: number of
    keys that a query attends to, its own included; None means all. ``sinks``: None for a softmax over the keys alone.
    ``gate``: factors of the output of each head; None: no factors.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rotary: Rope | None,
        window: int | None,
        bias: bool,
        attend: Attend,
        scale: float | None = None,
        rotate: Rotate = rotate_halves,
        out_bias: bool | None = None,
        qk_norm: QKNorm | None = None,
        sinks: Sinks | None = None,
        gate: OutputGate | None = None,
        dtype: jnp.dtype,
        rngs: nnx.Rngs | None,
    ):
        self.window = window
        self.attend = attend
        self.rotary, self.rotate = rotary, rotate
        self.scale = head_dim**-0.5 if scale is None else scale
        self.qk_norm, self.sinks, self.gate = qk_norm, sinks, gate
        kw: dict[str, Any] = {"bias": bias, "dtype": dtype, "rngs": rngs}
        gain = head_dim**-0.5 / self.scale
        self.q = Linear((dim,), (heads, head_dim), ("embed", "heads", "head"), gain=gain, **kw)
        self.k = Linear((dim,), (kv_heads, head_dim), ("embed", "kv_heads", "head"), **kw)
        self.v = Linear((dim,), (kv_heads, head_dim), ("embed", "kv_heads", "head"), **kw)
        kw["bias"] = bias if out_bias is None else out_bias
        self.o = Linear((heads, head_dim), (dim,), ("heads", "head", "embed"), **kw)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None = None
    ) -> tuple[Float[Array, "B asked D"], KVCache | None]:
        q, k = self.q(context.asked(x)), self.k(x)
        q, k = (q, k) if self.qk_norm is None else self.qk_norm(q, k)
        q = jnp.swapaxes(context.rotated(q, self.rotary, self.rotate), 1, 2)
        k = jnp.swapaxes(context.rotated(k, self.rotary, self.rotate), 1, 2)
        v = jnp.swapaxes(self.v(x), 1, 2)
        cache, (k, v), mask = context.remember(cache, (k, v), self.window)
        y = self.attend(q, k, v, Scores(mask, self.scale, sinks=None if self.sinks is None else self.sinks()))
        y = jnp.swapaxes(y, 1, 2)
        return self.o(y if self.gate is None else self.gate(context.asked(x), y)), cache

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, spare: int = 0) -> KVCache:
        """A ring of the window's size and ``spare`` slots more if there is a window, else one slot per token."""
        kv_heads, head_dim = self.k.kernel.outs
        slots = capacity if self.window is None else min(self.window + spare, capacity)
        kind = KVCache if self.window is None else RingCache
        k, v = (jnp.zeros((batch, kv_heads, slots, head_dim), dtype) for _ in range(2))
        return kind(k, v, spare)
