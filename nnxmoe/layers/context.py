"""What the two halves of a layer, attention and feed-forward, are given and return."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from nnxmoe.layers.attend import Mask
from nnxmoe.layers.cache import LayerCache, Past, Slots
from nnxmoe.layers.rope import Rotation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What every layer of one forward pass shares. Each attention derives its mask and its slots from it.

    ``index``: of each token in its row; padding has the index of the real token before it. ``valid``: which tokens are
    real (None: all). ``segment``: None where all are of one. ``past``: None without a cache. ``key``: of randomness.
    ``of_routing``: what is kept of each layer's routing (None: all of it).
    ``fresh``: the cache was empty, so that the tokens attend to each other and not to its slots.
    ``last``: only the last token's output is needed, and it is all that a layer returns. ``asking`` then leaves T = 1
    of the S tokens.
    """

    rotation: Rotation
    index: Int[Array, "S"] | Int[Array, "B S"]
    valid: Bool[Array, "B T"] | None = None
    segment: Int[Array, "B S"] | None = None
    past: Past | None = None
    key: Key[Array, ""] | None = None
    of_routing: Callable[[Any], Any] | None = dataclasses.field(default=None, metadata={"static": True})
    fresh: bool = dataclasses.field(default=False, metadata={"static": True})
    last: bool = dataclasses.field(default=False, metadata={"static": True})

    def of_layer(self, index: int | Int[Array, ""]) -> "Context":
        """The same with a key of its own for a layer, or a stack."""
        return self if self.key is None else dataclasses.replace(self, key=jax.random.fold_in(self.key, index))

    def asking(self, x: Float[Array, "B T D"]) -> "tuple[Float[Array, 'B asked D'], Context]":
        """The tokens whose output is needed and their context: all, or the last with its own rotation."""
        if not self.last:
            return x, self
        end = slice(x.shape[1] - 1, x.shape[1])
        rotation = jax.tree.map(lambda a: a[:, end], self.rotation)
        valid = None if self.valid is None else self.valid[:, end]
        return x[:, end], dataclasses.replace(self, rotation=rotation, valid=valid)

    def remember(self, cache: Any, new: Any, window: int | None) -> tuple[Any, Any, Mask]:
        """Stores what a layer keeps of the tokens: the cache, everything they attend to, and the mask over it."""
        slots = Slots(self.index, self.valid, self.segment)
        mask, seen = Mask(self.index, self.segment, slots, window, causal=True), new
        if cache is not None:
            assert self.past is not None
            cache, stored, slots = cache.append(new, self.past)
            if not self.fresh:
                segment = jnp.zeros(self.past.index.shape, jnp.int32) if self.segment is None else self.segment
                seen, mask = stored, Mask(self.index, segment, slots, window)
        return cache, seen, mask.part(slice(-1, None), slice(None)) if self.last else mask


class Attention(Protocol):
    """``(x, context, cache) -> y, cache``: mixes tokens; y of all of them, or of the last one (``context.last``)."""

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: Any
    ) -> tuple[Float[Array, "B asked D"], Any]: ...

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> LayerCache:
        """A cache for ``capacity`` tokens."""
        ...


class Fed(NamedTuple):
    """Output of a feed-forward, and its report: of experts a `MoEInfo`, None of a dense one."""

    y: Float[Array, "B T D"]
    info: Any


class FeedForward(Protocol):
    """The half of a layer that computes each token: a dense `MLP`, or a `MoE`.

    ``name``: what tables and checkpoints call it, ``layer.mlp`` or ``layer.moe``.
    """

    name: ClassVar[str]

    def feed(self, x: Float[Array, "B T D"], context: Context) -> Fed:
        """The output for each token."""
        ...

    def separates_tokens(self, context: Context) -> bool:
        """Whether the output for a token depends on no other token."""
        ...
