"""Caches for decoding: keys and values (or MLA's latents) per layer, and how many tokens each row has stored.

Every row has a cursor of its own: its real tokens fill its slots in order, and padding takes none. A full cache holds
token i of a row in slot i, a ring in slot i % size, so which token a slot holds follows from the row's length. All
caches are pytrees: passed in, returned, and safe to donate.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Shaped

from nnxmoe.layers.linear.xla_cpu import one_cpu, write_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Array:
    """Floats as int8 codes with one float32 scale for each index of all dimensions but the last."""

    codes: Array  # [..., W]
    scale: Array  # [..., 1]

    @classmethod
    def of(cls, array: Float[Array, "..."]) -> Self:
        """Each vector of the last dimension, rounded to a 127th of its largest magnitude."""
        wide = array.astype(jnp.float32)
        scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / 127
        codes = jnp.round(wide / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)
        return cls(codes, scale)

    def floats(self, dtype: Any) -> Float[Array, "..."]:
        return (self.codes.astype(jnp.float32) * self.scale).astype(dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape


Buffer = Array | Int8Array


def written(buffer: Buffer, new: Array, slots: Int[Array, "B T"], axis: int) -> Any:
    """``buffer`` with token t of row b of ``new`` at slot ``slots[b, t]``; slots out of range are not written.

    In place where the buffer is donated or carried by a loop.
    """
    if isinstance(buffer, Int8Array):
        return jax.tree.map(lambda part, values: written(part, values, slots, axis), buffer, Int8Array.of(new))
    new = new.astype(buffer.dtype)
    if slots.shape[1] == 1 and one_cpu():
        return write_rows(buffer, new, slots, axis)
    at = (slice(None),) * (axis - 1)
    return jax.vmap(lambda row, new, slots: row.at[(*at, slots)].set(new, mode="drop"))(buffer, new, slots)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotMetadata:
    """The token that each slot holds: its index in its row (negative: none), whether it is real (None: all are), and
    its segment (None: all are of one). Indices without a batch dimension are those of every row."""

    index: Int[Array, "S"] | Int[Array, "B S"]
    valid: Bool[Array, "B S"] | None
    segment: Int[Array, "B S"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheMetadata:
    """State that the caches of all layers share in one forward pass.

    ``index``: of each new token in its row, -1 for padding. ``before`` and ``after``: tokens that a row has stored
    before and after this pass. ``segment``: of every stored token, by its index.
    """

    index: Int[Array, "B T"]
    before: Int[Array, "B"]
    after: Int[Array, "B"]
    segment: Int[Array, "B C"]

    def slots(self, index: Int[Array, "B S"]) -> SlotMetadata:
        """The slots that hold the tokens of these indices."""
        segment = jnp.take_along_axis(self.segment, jnp.maximum(index, 0), axis=1)
        return SlotMetadata(index, None, segment)


def gather_tokens(x: Shaped[Array, "B S ..."], at: Int[Array, "B ..."]) -> Shaped[Array, "B ..."]:
    """Gather the places ``at`` of each row."""
    return jax.vmap(lambda row, places: row[places])(x, at)


Stored = tuple[Buffer, Array, Int[Array, "B S"]]  # the buffer, what may be attended to, and the index of its tokens


def floats(buffer: Buffer, like: Array) -> Array:
    """The values of a buffer: itself, or those of its codes."""
    return buffer.floats(like.dtype) if isinstance(buffer, Int8Array) else buffer


def append_full(buffer: Buffer, new: Array, past: CacheMetadata, lookahead: int) -> Stored:
    """Write token i to slot i; all slots may be attended to."""
    size, axis = buffer.shape[-2], new.ndim - 2
    buffer = written(buffer, new, jnp.where(past.index < 0, size, past.index), axis)
    slots = jnp.arange(size, dtype=jnp.int32)[None]
    return buffer, floats(buffer, new), jnp.where(slots < past.after[:, None], slots, -1)


def append_ring(buffer: Buffer, new: Array, past: CacheMetadata, lookahead: int) -> Stored:
    """Write token i to slot ``i % size``. More new tokens than one and the spare slots attend to the previous ring
    followed by themselves, since later ones of them overwrite slots that earlier ones attend to."""
    size, axis, index = buffer.shape[-2], new.ndim - 2, past.index
    kept = (index >= 0) & (index >= past.after[:, None] - size)
    after = written(buffer, new, jnp.where(kept, index % size, size), axis)
    if index.shape[1] <= 1 + lookahead:
        return after, floats(after, new), _ring_index(past.after, size)
    own = Int8Array.of(new).floats(new.dtype) if isinstance(buffer, Int8Array) else new.astype(buffer.dtype)
    seen = jnp.concatenate([floats(buffer, new), own], axis=axis)
    return after, seen, jnp.concatenate([_ring_index(past.before, size), index], axis=1)


def _ring_index(length: Int[Array, "B"], size: int) -> Int[Array, "B S"]:
    """Index of the token in each slot of a ring after ``length`` tokens were written; negative for empty slots."""
    newest = length[:, None] - 1
    return newest - (newest - jnp.arange(size, dtype=jnp.int32)[None]) % size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCache:
    """One layer's cache with a slot per token. ``buffers``: a pytree of ``[*L, B, …, S, W]``, such as keys and values
    ``[*L, B, K, S, H]``, or MLA's latents ``[*L, B, S, W]``, each followed by its rotated key (DeepSeek-V2).

    ``ring``: only for the last tokens, as many as a sliding window covers. ``lookahead``: how many of the slots are for
    tokens that may be taken back.
    """

    buffers: Any
    ring: bool = dataclasses.field(default=False, metadata={"static": True})
    lookahead: int = dataclasses.field(default=0, metadata={"static": True})

    def append(self, new: Any, past: CacheMetadata) -> tuple[Self, Any, SlotMetadata]:
        """Store ``new``, arrays ``[B, …, T, W]`` in the structure of the buffers. Returns the cache, all that may be
        attended to, and the tokens that it holds."""
        arrays, tree = jax.tree.flatten(new)
        store, buffers = append_ring if self.ring else append_full, tree.flatten_up_to(self.buffers)
        stored = [store(buffer, array, past, self.lookahead) for buffer, array in zip(buffers, arrays, strict=True)]
        buffers, seen, (index, *_) = zip(*stored, strict=True)
        return dataclasses.replace(self, buffers=tree.unflatten(buffers)), tree.unflatten(seen), past.slots(index)


CacheFormat = Callable[[Array], Buffer]
"""``Strategy.cache``: returns an empty buffer ``[..., W]`` of a layer's cache in the format in which it is stored."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentState:
    """A pytree of state arrays ``[*L, B, 1 + lookahead, ...]`` after each of the newest tokens of a row.

    Token i's is at ``i % (1 + lookahead)``, so that the ``lookahead`` newest tokens may be taken back by a smaller
    `Cache.length`, as for keys and values.
    """

    states: Any

    exact: ClassVar[bool] = True  # whatever the `CacheFormat`

    @classmethod
    def empty(cls, zero: Any, lookahead: int) -> Self:
        """The state of rows without tokens, from arrays ``[B, ...]`` of zeros."""
        return cls(jax.tree.map(lambda a: jnp.repeat(a[:, None], 1 + lookahead, axis=1), zero))

    @property
    def lookahead(self) -> int:
        """How many tokens may be taken back."""
        return jax.tree.leaves(self.states)[0].shape[1] - 1

    def before(self, past: CacheMetadata) -> Any:
        """The state ``[B, ...]`` before the new tokens."""

        def one(states: Array) -> Array:
            shape = (-1, *(1,) * (states.ndim - 1))
            found = jnp.take_along_axis(states, ((past.before - 1) % states.shape[1]).reshape(shape), axis=1)[:, 0]
            return jnp.where((past.before > 0).reshape(shape[:-1]), found, 0)

        return jax.tree.map(one, self.states)

    def written(self, state: Any, index: Int[Array, "B n"]) -> Self:
        """Store the states ``[B, n, ...]`` after the n tokens of these indices; nothing for negative ones (padding)."""

        def one(states: Array, new: Array) -> Array:
            size = states.shape[1]
            return written(states, new, jnp.where(index < 0, size, index % size), 1)

        return type(self)(jax.tree.map(one, self.states, state))


def format_caches(layers: Any, cache_format: CacheFormat | None) -> Any:
    """Empty caches in a format; parts with an attribute ``exact``, such as recurrent states, stay as they are."""
    if cache_format is None:
        return layers

    def exact(part: Any) -> bool:
        return getattr(part, "exact", False)

    return jax.tree.map(lambda part: part if exact(part) else cache_format(part), layers, is_leaf=exact)


@dataclasses.dataclass(frozen=True)
class Int8Cache:
    """Keys, values and latents as int8, with one float32 scale per token and head. **Changes numbers**: each key and
    value by up to a 254th of its largest component. 0.52 of the bytes of bfloat16 with heads of 128."""

    def __call__(self, buffer: Array) -> Int8Array:
        return Int8Array.of(buffer)


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
        """A cache without tokens, around the layers' empty caches."""
        cache = cls(layers, jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, capacity), jnp.int32), capacity)
        return cache.remember(np.zeros(batch, np.int32))

    @property
    def lengths(self) -> np.ndarray | None:
        """``length`` in this process; None where it is traced, or held by other processes. Waits for the device, unless
        it was remembered."""
        if isinstance(self.length, Tracer) or not self.length.is_fully_addressable:
            return None
        known = vars(self).get("_lengths")
        return np.asarray(self.length) if known is None else known

    @property
    def max_length(self) -> int | None:
        return None if (lengths := self.lengths) is None else int(lengths.max())

    def remember(self, lengths: np.ndarray) -> Self:
        """This cache, with ``length`` known in advance, which transformations and changes of it forget."""
        object.__setattr__(self, "_lengths", lengths)
        return self

    def advance(
        self, count: int, valid: Bool[Array, "B T"] | None, segment: Int[Array, "B T"] | None
    ) -> tuple[Self, CacheMetadata]:
        """Count in ``count`` tokens per row. Returns the cache, whose layers do not hold them yet, and the past."""
        before = self.length[:, None]
        if valid is None:
            index = before + jnp.arange(count, dtype=jnp.int32)[None]
        else:
            index = jnp.where(valid, before + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, -1)
        length = self.length + (count if valid is None else jnp.sum(valid, axis=1, dtype=jnp.int32))
        segment = jnp.zeros(index.shape, jnp.int32) if segment is None else segment
        segments = written(self.segment, segment, jnp.where(index < 0, self.capacity, index), 1)
        moved = dataclasses.replace(self, length=length, segment=segments)
        return moved, CacheMetadata(index, self.length, length, segments)

    def nan_if_full(self, x: Float[Array, "B T *D"]) -> Float[Array, "B T *D"]:
        """``x`` with NaN in the rows whose tokens do not fit."""
        return jnp.where((self.length > self.capacity).reshape(-1, *(1,) * (x.ndim - 1)), jnp.nan, x)

    def shared(self, fresh: bool) -> Self:
        """The part that all layers share. Raises ValueError if it is promised to be empty and is not."""
        if fresh and self.max_length:
            raise ValueError(f"fresh=True: {self.max_length} tokens are in the cache; pass an empty cache")
        return dataclasses.replace(self, layers=())
