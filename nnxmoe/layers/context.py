"""Inputs and outputs of the two halves of a layer: attention and feed-forward."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from nnxmoe.config.rope import Rope
from nnxmoe.layers.attend import Mask
from nnxmoe.layers.cache import LayerCache, Past, Slots
from nnxmoe.layers.rope import Rotation, rotation_at


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """State that all layers of a forward pass share. Each attention derives its own mask and cache slots from it.

    ``index``: position of each token among the real tokens of its row; padding repeats that of the token before.
    ``valid``: True for real tokens; None if all are. ``segment``: None if there is only one. ``past``: None without a
    cache. ``key``: random key of the router's jitter. ``of_routing``: maps each layer's routing to what is kept of it;
    None keeps all. ``fresh``: the cache was empty, so the tokens attend to each other instead of to its slots.
    ``last``: a layer returns the last token's output only; T = 1 of the S tokens is then left in ``valid``.
    ``keep_hidden``: stacks return the output of every layer.
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
    keep_hidden: bool = dataclasses.field(default=True, metadata={"static": True})

    @classmethod
    def of_rows(
        cls, rope: Rope, batch: int, length: int, lengths: Int[Array, "B"] | Sequence[int] | None = None
    ) -> Self:
        """The context of ``batch`` rows of ``length`` tokens without a cache, to call a layer or attention alone.

        ``lengths``: the number of real tokens of each row, which come first; None: all are real.

            x = jnp.ones((2, 9, config.hidden_size))
            y, _ = model.stacks[0].layers[0].attention(x, Context.of_rows(config.rope, 2, 9, lengths=[9, 4]))

        Raises ValueError for lengths that do not fit.
        """
        index = jnp.arange(length, dtype=jnp.int32)
        rotation = rotation_at(rope, jnp.broadcast_to(index, (batch, length)))
        if lengths is None:
            return cls(rotation, index)
        counts = jnp.asarray(lengths)
        if counts.shape != (batch,) or not bool(jnp.all((counts >= 0) & (counts <= length))):
            raise ValueError(f"lengths={lengths}: give {batch} numbers of real tokens, from 0 to {length}")
        return cls(rotation, jnp.minimum(index, counts[:, None] - 1), index < counts[:, None])

    def of_layer(self, index: int | Int[Array, ""]) -> "Context":
        """The context of a layer or stack, with its own random key."""
        return self if self.key is None else dataclasses.replace(self, key=jax.random.fold_in(self.key, index))

    def asking(self, x: Float[Array, "B T D"]) -> "tuple[Float[Array, 'B asked D'], Context]":
        """The tokens whose output is needed, all or the last, and their context."""
        if not self.last:
            return x, self
        end = slice(x.shape[1] - 1, x.shape[1])
        rotation = jax.tree.map(lambda a: a[:, end], self.rotation)
        valid = None if self.valid is None else self.valid[:, end]
        return x[:, end], dataclasses.replace(self, rotation=rotation, valid=valid)

    def remember(self, cache: Any, new: Any, window: int | None) -> tuple[Any, Any, Mask]:
        """Appends ``new`` (keys and values, or latents) to a layer's cache.

        Returns the cache, everything that the tokens attend to, and the mask over it.
        """
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
    """``(x, context, cache) -> y, cache``, with y of all tokens, or of the last one if ``context.last``."""

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: Any = None
    ) -> tuple[Float[Array, "B asked D"], Any]: ...

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, spare: int = 0) -> LayerCache:
        """A cache for ``capacity`` tokens, of which the ``spare`` newest may be taken back."""
        ...


class Fed(NamedTuple):
    """Output of a feed-forward, and its `MoEInfo`; None for a dense one."""

    y: Float[Array, "B T D"]
    info: Any


class FeedForward(Protocol):
    """The second half of a layer: a dense `MLP`, or a `MoE`.

    ``name``: its name in parameter keys, ``layer.mlp`` or ``layer.moe``.
    """

    name: ClassVar[str]

    def feed(self, x: Float[Array, "B T D"], context: Context) -> Fed:
        """The output for each token."""
        ...

    def separates_tokens(self, key: Key[Array, ""] | None) -> bool:
        """Whether the output for a token is independent of all other tokens; ``key`` as in `Context`."""
        ...
