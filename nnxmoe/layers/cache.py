"""Caches for decoding: keys and values (or MLA's latents) per layer, and how many tokens each row has stored.

Each row has its own cursor: its real tokens fill its slots in order, and padding takes no slot. A full cache stores
token i of a row in slot i, a ring in slot ``i % size``, so the row's length determines which token a slot holds. All
caches are pytrees: passed in, returned, and safe to donate.
"""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.layers.cache_buffer import Buffer, CacheFormat, Int8Array, as_float, write_slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotMetadata:
    """The token in each key slot.

    Attributes:
        index: index of the token among the real tokens of its row; negative for empty slots. Without a batch dimension
            all rows have the same indices.
        valid: whether the token is real; None: all are.
        segment: segment of the token; None: all tokens are in one segment.
    """

    index: Int[Array, "S"] | Int[Array, "B S"]
    valid: Bool[Array, "B S"] | None
    segment: Int[Array, "B S"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheMetadata:
    """State that the caches of all layers share in one forward pass.

    Attributes:
        index: index of each new token in its row; -1 for padding.
        length_before: number of tokens per row that the cache stored before this pass.
        length_after: the same after this pass.
        segment: segment of every stored token, by its index.
    """

    index: Int[Array, "B T"]
    length_before: Int[Array, "B"]
    length_after: Int[Array, "B"]
    segment: Int[Array, "B C"]

    def slots(self, index: Int[Array, "B S"]) -> SlotMetadata:
        """Describe slots that hold the tokens with these indices."""
        segment = jnp.take_along_axis(self.segment, jnp.maximum(index, 0), axis=1)
        return SlotMetadata(index, None, segment)


AppendResult = tuple[Buffer, Array, Int[Array, "B S"]]
"""The new buffer, the values that may be attended to, and the index of the token of each of these."""


def append_full(buffer: Buffer, new: Array, metadata: CacheMetadata) -> AppendResult:
    """Write token i to slot i; all slots may be attended to."""
    size, axis = buffer.shape[-2], new.ndim - 2
    buffer = write_slots(buffer, new, jnp.where(metadata.index < 0, size, metadata.index), axis)
    slots = jnp.arange(size, dtype=jnp.int32)[None]
    return buffer, as_float(buffer, new.dtype), jnp.where(slots < metadata.length_after[:, None], slots, -1)


def append_ring(buffer: Buffer, new: Array, metadata: CacheMetadata, lookahead: int) -> AppendResult:
    """Write token i to slot ``i % size``.

    Up to ``1 + lookahead`` new tokens attend to the new ring. More tokens attend to the previous ring followed by
    themselves, since later tokens overwrite slots that earlier tokens attend to.
    """
    size, axis, index = buffer.shape[-2], new.ndim - 2, metadata.index
    stays = (index >= 0) & (index >= metadata.length_after[:, None] - size)
    new_buffer = write_slots(buffer, new, jnp.where(stays, index % size, size), axis)
    if index.shape[1] <= 1 + lookahead:
        return new_buffer, as_float(new_buffer, new.dtype), _ring_index(metadata.length_after, size)
    if isinstance(buffer, Int8Array):
        rounded = Int8Array.quantize(new).dequantize(new.dtype)
    else:
        rounded = new.astype(buffer.dtype)
    values = jnp.concatenate([as_float(buffer, new.dtype), rounded], axis=axis)
    return new_buffer, values, jnp.concatenate([_ring_index(metadata.length_before, size), index], axis=1)


def _ring_index(length: Int[Array, "B"], size: int) -> Int[Array, "B S"]:
    """Index of the token in each slot of a ring after ``length`` tokens were written; negative for empty slots."""
    newest = length[:, None] - 1
    return newest - (newest - jnp.arange(size, dtype=jnp.int32)[None]) % size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCache:
    """One layer's cache with a slot per token.

    Attributes:
        buffers: a pytree of ``[*L, B, …, S, W]``, such as keys and values ``[*L, B, K, S, H]``, or MLA's latents
            ``[*L, B, S, W]``, each followed by its rotated key (DeepSeek-V2).
        ring: whether the cache stores only the last tokens, as many as a sliding window covers.
        lookahead: number of slots for draft tokens that may be removed again.
    """

    buffers: Any
    ring: bool = dataclasses.field(default=False, metadata={"static": True})
    lookahead: int = dataclasses.field(default=0, metadata={"static": True})

    def append(self, new: Any, metadata: CacheMetadata) -> tuple[Self, Any, SlotMetadata]:
        """Store ``new``, arrays ``[B, …, T, W]`` in the structure of the buffers.

        Returns the cache, all values that may be attended to, and the tokens that they belong to.
        """
        arrays, tree = jax.tree.flatten(new)
        append = functools.partial(append_ring, lookahead=self.lookahead) if self.ring else append_full
        buffers = tree.flatten_up_to(self.buffers)
        appended = [append(buffer, array, metadata) for buffer, array in zip(buffers, arrays, strict=True)]
        buffers, values, (index, *_) = zip(*appended, strict=True)
        cache = dataclasses.replace(self, buffers=tree.unflatten(buffers))
        return cache, tree.unflatten(values), metadata.slots(index)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentState:
    """A recurrent layer's states after each of the newest tokens of a row, a pytree of ``[*L, B, 1 + lookahead, ...]``.

    The state after token i is at ``i % (1 + lookahead)``, so that the ``lookahead`` newest tokens may be removed by a
    smaller `Cache.length`, as for keys and values. States keep their dtype whatever the `CacheFormat`.
    """

    states: Any

    @classmethod
    def empty(cls, zero: Any, lookahead: int) -> Self:
        """Create the states of rows without tokens from arrays of zeros ``[B, ...]``."""
        return cls(jax.tree.map(lambda a: jnp.repeat(a[:, None], 1 + lookahead, axis=1), zero))

    @property
    def lookahead(self) -> int:
        """Number of newest tokens that may be removed."""
        return jax.tree.leaves(self.states)[0].shape[1] - 1

    def before(self, metadata: CacheMetadata) -> Any:
        """Return the state ``[B, ...]`` before the new tokens."""
        length = metadata.length_before

        def select(states: Array) -> Array:
            shape = (-1, *(1,) * (states.ndim - 1))
            state = jnp.take_along_axis(states, ((length - 1) % states.shape[1]).reshape(shape), axis=1)[:, 0]
            return jnp.where((length > 0).reshape(shape[:-1]), state, 0)

        return jax.tree.map(select, self.states)

    def write(self, new: Any, index: Int[Array, "B n"]) -> Self:
        """Store the states ``[B, n, ...]`` after the n tokens with these indices; negative indices are skipped."""

        def write(states: Array, new: Array) -> Array:
            size = states.shape[1]
            return write_slots(states, new, jnp.where(index < 0, size, index % size), 1)

        return type(self)(jax.tree.map(write, self.states, new))


def format_caches(layers: Any, cache_format: CacheFormat | None) -> Any:
    """Convert the buffers of empty caches to a format, except those of recurrent states."""
    if cache_format is None:
        return layers

    def is_state(part: Any) -> bool:
        return isinstance(part, RecurrentState)

    return jax.tree.map(lambda part: part if is_state(part) else cache_format(part), layers, is_leaf=is_state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """A model's cache.

    Attributes:
        layers: One entry per stack: a tuple of layer caches, or, for a scanned stack, one cache whose arrays have a
            leading layer dimension. The arrays of a ``TokenCache`` are its ``buffers``: ``(keys, values)`` for most
            attentions, latents for MLA.
        length: Number of tokens stored per row.
        segment: Segment id of each stored token, indexed by row and position in the row.
        capacity: Number of real tokens that fit in a row.
    """

    layers: tuple[Any, ...]
    length: Int[Array, "B"]
    segment: Int[Array, "B C"]
    capacity: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, layers: tuple[Any, ...], batch: int, capacity: int) -> Self:
        """Wrap the layers' empty caches."""
        cache = cls(layers, jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, capacity), jnp.int32), capacity)
        return cache.remember_lengths(np.zeros(batch, np.int32))

    @property
    def lengths(self) -> np.ndarray | None:
        """``length`` as a NumPy array; None where it is traced or other processes hold it.

        Waits for the device unless `remember_lengths` was called.
        """
        if isinstance(self.length, Tracer) or not self.length.is_fully_addressable:
            return None
        known = vars(self).get("_lengths")
        return np.asarray(self.length) if known is None else known

    @property
    def max_length(self) -> int | None:
        """Largest of `lengths`, or None if they are unknown."""
        lengths = self.lengths
        return None if lengths is None else int(lengths.max())

    def remember_lengths(self, lengths: np.ndarray) -> Self:
        """Set the value of `lengths`; transformed and changed copies of this cache do not have it."""
        object.__setattr__(self, "_lengths", lengths)
        return self

    def advance(
        self, count: int, valid: Bool[Array, "B T"] | None, segment: Int[Array, "B T"] | None
    ) -> tuple[Self, CacheMetadata]:
        """Count ``count`` new tokens per row, whose keys and values the layers have yet to append.

        Returns the cache with the new lengths, and the metadata for the layers' caches.
        """
        before = self.length[:, None]
        if valid is None:
            index = before + jnp.arange(count, dtype=jnp.int32)[None]
            length = self.length + count
        else:
            index = jnp.where(valid, before + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, -1)
            length = self.length + jnp.sum(valid, axis=1, dtype=jnp.int32)
        segment = jnp.zeros(index.shape, jnp.int32) if segment is None else segment
        segments = write_slots(self.segment, segment, jnp.where(index < 0, self.capacity, index), 1)
        advanced = dataclasses.replace(self, length=length, segment=segments)
        return advanced, CacheMetadata(index, self.length, length, segments)

    def nan_if_full(self, x: Float[Array, "B T *D"]) -> Float[Array, "B T *D"]:
        """Replace ``x`` by NaN in rows whose tokens do not fit."""
        return jnp.where((self.length > self.capacity).reshape(-1, *(1,) * (x.ndim - 1)), jnp.nan, x)

    def shared(self, fresh: bool) -> Self:
        """Return the part that all layers share.

        Raises:
            ValueError: ``fresh`` is set and the cache is known not to be empty.
        """
        if fresh and self.max_length:
            raise ValueError(f"fresh=True: {self.max_length} tokens are in the cache; pass an empty cache")
        return dataclasses.replace(self, layers=())
