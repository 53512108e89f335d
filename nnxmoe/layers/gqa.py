"""Grouped-query attention (Ainslie et al. 2023), with an optional sliding window (Mistral)."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from nnxmoe.layers.attend import Attend, Mask
from nnxmoe.layers.cache import KVCache, LayerCache, RingCache
from nnxmoe.layers.linear import Linear
from nnxmoe.layers.rope import Rotate, Rotation, rotate_halves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What every layer of one forward pass shares: rotations, mask, first slot to write, which tokens are real (None:
    all are), where there is randomness its key, and what is kept of each layer's routing (None: all of it).

    ``fresh``: the cache was empty, and the mask is of these tokens alone: they attend to each other, not to its slots.
    ``last``: nobody wants the layer's output of any but the last token, which is then all that it returns.
    """

    rotation: Rotation
    mask: Mask
    start: Int[Array, ""]
    valid: Bool[Array, "B T"] | None
    key: Key[Array, ""] | None = None
    of_routing: Callable[[Any], Any] | None = dataclasses.field(default=None, metadata={"static": True})
    fresh: bool = dataclasses.field(default=False, metadata={"static": True})
    last: bool = dataclasses.field(default=False, metadata={"static": True})

    def of_layer(self, index: int | Int[Array, ""]) -> "Context":
        """The same with a key of its own for a layer, or a stack."""
        return self if self.key is None else dataclasses.replace(self, key=jax.random.fold_in(self.key, index))

    def asking(self, x: Float[Array, "B T D"]) -> "tuple[Float[Array, 'B asked D'], Context]":
        """The tokens whose output is wanted and the context for those: all, or the last with its own rotation."""
        if not self.last:
            return x, self
        end = slice(x.shape[1] - 1, x.shape[1])
        rotation = jax.tree.map(lambda a: a[:, end], self.rotation)
        valid = None if self.valid is None else self.valid[:, end]
        mask = self.mask.part(end, slice(None))
        return x[:, end], dataclasses.replace(self, rotation=rotation, mask=mask, valid=valid)


class Attention(Protocol):
    """``(x, context, cache) -> y, cache``: mixes tokens; y of all of them, or of the last one (``context.last``)."""

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: Any
    ) -> tuple[Float[Array, "B asked D"], Any]: ...

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> LayerCache:
        """A memory for ``capacity`` tokens."""
        ...


class GQA(nnx.Module):
    """N query heads over K key/value heads of width H; kernels ``q [D N H]``, ``k v [D K H]``, ``o [N H D]``.

    ``scale`` is what scores are multiplied by: None is ``H ** -0.5``; 1 where the queries carry it (MaxText's layout),
    which are then drawn smaller, so that scores start the same. ``rotate``: pairs by halves, or side by side.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        window: int | None,
        bias: bool,
        attend: Attend,
        scale: float | None = None,
        rotate: Rotate = rotate_halves,
        dtype: jnp.dtype,
        rngs: nnx.Rngs | None,
    ):
        self.window = window
        self.attend = attend
        self.rotate = rotate
        self.scale = head_dim**-0.5 if scale is None else scale
        kw: dict[str, Any] = {"bias": bias, "dtype": dtype, "rngs": rngs}
        gain = head_dim**-0.5 / self.scale
        self.q = Linear((dim,), (heads, head_dim), ("embed", "heads", "head"), gain=gain, **kw)
        self.k = Linear((dim,), (kv_heads, head_dim), ("embed", "kv_heads", "head"), **kw)
        self.v = Linear((dim,), (kv_heads, head_dim), ("embed", "kv_heads", "head"), **kw)
        self.o = Linear((heads, head_dim), (dim,), ("heads", "head", "embed"), **kw)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None
    ) -> tuple[Float[Array, "B asked D"], KVCache | None]:
        asking, asked = context.asking(x)
        q = jnp.swapaxes(self.rotate(self.q(asking), asked.rotation), 1, 2)
        k = jnp.swapaxes(self.rotate(self.k(x), context.rotation), 1, 2)
        v = jnp.swapaxes(self.v(x), 1, 2)
        if cache is not None:
            cache, seen = cache.append((k, v), context.start)
            k, v = (k, v) if context.fresh else seen
        y = self.attend(q, k, v, asked.mask, self.scale)
        return self.o(jnp.swapaxes(y, 1, 2)), cache

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> KVCache:
        """A ring of the window's size where there is a window, else a slot for every token."""
        kv_heads, head_dim = self.k.kernel.outs
        slots = capacity if self.window is None else min(self.window, capacity)
        kind = KVCache if self.window is None else RingCache
        return kind(*(jnp.zeros((batch, kv_heads, slots, head_dim), dtype) for _ in range(2)))


def attentions(model: nnx.Module) -> list[GQA]:
    """The grouped-query attentions of a model, one a layer or one a stack of them."""
    return [module for _, module in nnx.iter_graph(model) if isinstance(module, GQA)]


def carry_scale(model: nnx.Module) -> None:
    """Say that the queries of a model have been divided by sqrt(H), so that scores are not."""
    for attention in attentions(model):
        attention.scale = 1.0


def query_divisor(model: nnx.Module) -> float:
    """What the queries of its grouped-query attention have been divided by: 1, or sqrt(H) as MaxText has them."""
    found = {attention.scale / attention.q.kernel.shape[-1] ** -0.5 for attention in attentions(model)}
    assert len(found) < 2, found
    return found.pop() if found else 1.0
