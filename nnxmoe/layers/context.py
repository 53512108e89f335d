"""Interfaces of the two halves of a layer, attention and feed-forward, and the inputs that all layers share."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Integer, Key, Shaped

from nnxmoe.config.rope_parameters import Rope
from nnxmoe.layers.cache import Cache, CacheMetadata, SlotMetadata
from nnxmoe.layers.mask import Mask
from nnxmoe.layers.rope import RotateFn, Rotations, compute_rotation


@dataclasses.dataclass(frozen=True)
class OutputRequest:
    """Outputs that a caller requests from the layers of a pass.

    Attributes:
        last_token_only: Whether to return the output of the last token only.
        all_hidden: Whether to return the output of every layer instead of the last layer only.
        reduce_routing: Maps the routing of each layer to the value that is returned, to save memory. If None, the
            whole routing is returned.
    """

    last_token_only: bool = False
    all_hidden: bool = True
    reduce_routing: Callable[[Any], Any] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Inputs that all layers of a forward pass share: positions, padding, segments and the state of the cache.

    Each attention layer derives its mask, its cache slots and its rotation from the context.

    Attributes:
        index: Index of each token among the real tokens of its row. Padding repeats the index of the previous token.
        valid: True for real tokens. None if all tokens are real.
        segment: Segment ids of packed documents. None if each row is one segment.
        past: State of the cache. None without a cache.
        key: Random key of the router's jitter. None disables jitter.
        tokens: Token ids, for routers that read them.
        positions: Positions of the rotary embedding.
        rotations: Rotations computed once for all layers.
        fresh: Whether the cache was empty. If so, the tokens attend to each other and the slots are not read.
        request: Outputs that each layer returns.
    """

    index: Int[Array, "S"] | Int[Array, "B S"]
    valid: Bool[Array, "B T"] | None = None
    segment: Int[Array, "B S"] | None = None
    past: CacheMetadata | None = None
    key: Key[Array, ""] | None = None
    tokens: Int[Array, "B T"] | None = None
    positions: Int[Array, "B S"] | None = None
    rotations: Rotations = dataclasses.field(default_factory=Rotations)
    fresh: bool = dataclasses.field(default=False, metadata={"static": True})
    request: OutputRequest = dataclasses.field(default=OutputRequest(), metadata={"static": True})

    @classmethod
    def from_lengths(
        cls, rope: Rope, batch: int, length: int, lengths: Integer[Any, "B"] | Sequence[int] | None = None
    ) -> Self:
        """Create a context without a cache, to call a layer or attention directly.

            x = jnp.ones((2, 9, config.hidden_size))
            y, _ = model.stacks[0].layers[0].attention(x, Context.from_lengths(config.rope, 2, 9, lengths=[9, 4]))

        Args:
            rope: Rotary position embedding of the layer.
            batch: Number of rows.
            length: Number of tokens per row.
            lengths: Number of real tokens per row. Padding follows the real tokens. If None, all tokens are real.

        Raises:
            ValueError: If ``lengths`` is not ``batch`` integers from 0 to ``length``. Traced values are not checked.
        """
        index = jnp.arange(length, dtype=jnp.int32)
        context = cls(index)._rotating((rope,), jnp.broadcast_to(index, (batch, length)))
        if lengths is None:
            return context
        traced = any(isinstance(part, Tracer) for part in jax.tree.leaves(lengths))
        counts = jnp.asarray(lengths) if traced else np.asarray(lengths)  # NumPy, so jit does not trace the checks
        fits = counts.shape == (batch,) and jnp.issubdtype(counts.dtype, jnp.integer)
        if not fits or not (traced or np.all((counts >= 0) & (counts <= length))):
            raise ValueError(f"lengths={lengths}: give {batch} numbers of real tokens, from 0 to {length}")
        counts = jnp.asarray(counts, jnp.int32)  # signed, because the last index of an empty row is -1
        valid = index < counts[:, None]
        return dataclasses.replace(context, index=jnp.minimum(index, counts[:, None] - 1), valid=valid)

    def for_layer(self, index: int | Int[Array, ""], *, last_token_only: bool | None = None) -> Self:
        """Return the context of one layer or stack.

        Args:
            index: Index of the layer or stack. It is folded into the random key.
            last_token_only: Replaces ``request.last_token_only`` if not None.
        """
        key = None if self.key is None else jax.random.fold_in(self.key, index)
        request = self.request
        if last_token_only is not None:
            request = dataclasses.replace(request, last_token_only=last_token_only)
        return dataclasses.replace(self, key=key, request=request)

    def output_tokens(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B asked ..."]:
        """Select the tokens whose output is requested: all tokens, or the last token."""
        return x[:, -1:] if self.request.last_token_only else x

    def output_queries(self, mask: Mask) -> Mask:
        """Select the rows of a mask for the tokens whose output is requested."""
        return mask.select(slice(-1, None), slice(None)) if self.request.last_token_only else mask

    def for_output_tokens(self) -> Self:
        """Return the context of the tokens whose output is requested."""
        valid = None if self.valid is None else self.output_tokens(self.valid)
        tokens = None if self.tokens is None else self.output_tokens(self.tokens)
        return dataclasses.replace(self, valid=valid, tokens=tokens)

    def rotated(
        self, x: Float[Array, "B asked N H"], rope: Rope | None, rotate: RotateFn
    ) -> Float[Array, "B asked N H"]:
        """Rotate queries or keys by their positions. Return ``x`` unchanged if ``rope`` is None."""
        if rope is None:
            return x
        if (rotation := self.rotations.get(rope)) is None:
            assert self.positions is not None
            rotation = compute_rotation(rope, self.positions, self.valid)
        return rotate(x, rotation)

    def _rotating(self, ropes: tuple[Rope, ...], positions: Int[Array, "B S"]) -> Self:
        """Return the context with these positions, and with the rotations of all layers."""
        rotations = Rotations({rope: compute_rotation(rope, positions, self.valid) for rope in ropes})
        return dataclasses.replace(self, positions=positions, rotations=rotations)

    @classmethod
    def from_inputs(
        cls,
        ropes: tuple[Rope, ...],
        tokens: Int[Array, "B T"],
        attention_mask: Any,
        positions: Any,
        segment_ids: Any,
        cache: Cache | None,
        key: Key[Array, ""] | None,
        fresh: bool,
    ) -> tuple[Self, Cache | None]:
        """Create the context of a pass over tokens. Also return the cache with the new lengths.

        Args:
            ropes: Rotary position embeddings of all layers.
            cache: The cache without its layers; see `Cache.shared`.
            tokens, attention_mask, positions, segment_ids, key, fresh: See `CausalLM.body`.
        """
        past, moved, index, shape = None, None, jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape
        valid = None if attention_mask is None else jnp.asarray(attention_mask) != 0
        segment = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
        if positions is None and cache is None:
            positions = jnp.broadcast_to(index, shape)
        if valid is not None:
            index = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
        if cache is not None:
            index = cache.length[:, None] + jnp.broadcast_to(index, shape)
            moved, past = cache.advance(shape[1], valid, segment)
            positions = jnp.maximum(index, 0) if positions is None else positions
        context = cls(index, valid, segment, past, key, tokens, fresh=fresh and cache is not None)
        return context._rotating(ropes, jnp.asarray(positions)), moved

    def append_to_cache(self, cache: Any, new: Any, window: int | None) -> tuple[Any, Any, Mask]:
        """Append new tokens to a layer's cache.

        Args:
            cache: Cache of the layer, or None.
            new: Keys and values, or latents, of the new tokens.
            window: Size of the sliding window, or None.

        Returns:
            The cache, the keys and values (or latents) that the tokens attend to, and the mask over them.
        """
        slots = SlotMetadata(self.index, self.valid, self.segment)
        mask, seen = Mask(self.index, self.segment, slots, window, causal=True), new
        if cache is not None:
            assert self.past is not None
            cache, stored, slots = cache.append(new, self.past)
            if not self.fresh:
                segment = jnp.zeros(self.past.index.shape, jnp.int32) if self.segment is None else self.segment
                seen, mask = stored, Mask(self.index, segment, slots, window)
        return cache, seen, self.output_queries(mask)


class Attention(Protocol):
    """Protocol of the first half of a layer, ``(x, context, cache) -> y, cache``.

    If ``context.request.last_token_only``, y has only the last token, otherwise all tokens. Inputs have padding, so
    tokens may attend to real tokens only (``context.valid``). Calls with a cache, such as generation, also need
    ``empty_cache``.
    """

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: Any = None
    ) -> tuple[Float[Array, "B asked D"], Any]: ...

    def empty_cache(self, batch: int, capacity: int, dtype: jnp.dtype, lookahead: int = 0) -> Any:
        """Create a cache for ``capacity`` tokens per row. The ``lookahead`` newest tokens may be removed again."""
        ...


class FeedForwardOutput(NamedTuple):
    """Output of a feed-forward with experts, and its `MoEInfo`.

    This is a named tuple because `nnx.tabulate` fails on dataclasses in plain tuples.
    """

    y: Float[Array, "B T D"]
    info: Any


class FeedForward(Protocol):
    """Protocol of the second half of a layer, a dense `MLP` or a `MoE`: ``(x, context) -> y`` or `FeedForwardOutput`.

    If a feed-forward does not define ``token_independent``, inputs are neither padded nor split.

    Attributes:
        name: Attribute name in a layer and in parameter keys, ``mlp`` or ``moe``. A feed-forward without ``name`` gets
            the name of the part that it replaces, or ``mlp``.
    """

    name: ClassVar[str]

    def __call__(self, x: Float[Array, "B T D"], context: Context | None = None) -> Any: ...

    def token_independent(self, key: Key[Array, ""] | None) -> bool:
        """Return whether the output for a token is independent of all other tokens. ``key`` is `Context.key`."""
        ...


def token_independent(part: Any, key: Key[Array, ""] | None) -> bool:
    """Call ``part.token_independent(key)``. Return False if the part does not define it."""
    separates = getattr(part, "token_independent", None)
    return separates is not None and separates(key)


def check_call(name: str, part: Any, *options: str) -> None:
    """Raise ValueError unless a part of a layer can be called with ``x`` and these keyword arguments.

    Args:
        name: Name of the part, for the error message.
        part: The part.
        *options: Names of the keyword arguments.
    """
    known = inspect.signature(part).parameters.values() if callable(part) else ()
    several = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known)
    if not callable(part) or not (several or {one.name for one in known} >= set(options)):
        call = ", ".join(("x", *(f"{option}=…" for option in options)))
        raise ValueError(f"{name} = {type(part).__name__}(…): it must be a module that is called as ({call})")
