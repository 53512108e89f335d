"""Caches for decoding: keys and values (or MLA's latents) per layer, and the number of stored tokens per row.

Each row has a separate length. The real tokens of a row fill the slots in order. Padding does not use slots. A full
cache stores token i of a row in slot i. A ring stores token i in slot ``i % size``. The length of a row therefore
determines which token each slot contains. Caches are pytrees. A model receives a cache as an argument and returns a new
cache. Callers may donate the argument.
"""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PyTree

from nnxmoe.layers.cache_buffer import Buffer, CacheFormat, Int8Array, as_float, write_slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotMetadata:
    """Metadata of the token in each key slot.

    Attributes:
        index: Index of the token among the real tokens of the row. Negative for empty slots. Without a batch dimension,
            the indices apply to all rows.
        valid: False for padding. ``None`` if there is no padding.
        segment: Segment of the token. ``None`` if all tokens are in one segment.
    """

    index: Int[Array, "S"] | Int[Array, "B S"]
    valid: Bool[Array, "B S"] | None
    segment: Int[Array, "B S"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheMetadata:
    """Token indices, lengths and segments of a forward pass, shared by the caches of all layers.

    Attributes:
        index: Index of each new token in the row, or -1 for padding.
        length_before: Number of tokens stored per row before this pass.
        length_after: Number of tokens stored per row after this pass.
        segment: Segment of each stored token by token index, including the new tokens.
    """

    index: Int[Array, "B T"]
    length_before: Int[Array, "B"]
    length_after: Int[Array, "B"]
    segment: Int[Array, "B C"]

    def slots(self, index: Int[Array, "B S"]) -> SlotMetadata:
        """Return the metadata of slots that contain the tokens ``index``."""
        segment = jnp.take_along_axis(self.segment, jnp.maximum(index, 0), axis=1)
        return SlotMetadata(index, None, segment)


AppendResult = tuple[Buffer, Array, Int[Array, "B S"]]
"""Updated buffer, values that queries may attend to, and token index of each value."""


def append_full(buffer: Buffer, new: Array, metadata: CacheMetadata) -> AppendResult:
    """Write token i to slot i, and return the values of all slots. Slots after the last token have index -1."""
    size, axis = buffer.shape[-2], new.ndim - 2
    buffer = write_slots(buffer, new, jnp.where(metadata.index < 0, size, metadata.index), axis)
    slots = jnp.arange(size, dtype=jnp.int32)[None]
    return buffer, as_float(buffer, new.dtype), jnp.where(slots < metadata.length_after[:, None], slots, -1)


def append_ring(buffer: Buffer, new: Array, metadata: CacheMetadata, lookahead: int) -> AppendResult:
    """Write token i to slot ``i % size``.

    For up to ``1 + lookahead`` new tokens, the returned values are the updated ring. For more new tokens, the values
    are the previous ring followed by the new tokens, because later tokens overwrite slots that earlier tokens attend
    to.
    """
    size, axis, index = buffer.shape[-2], new.ndim - 2, metadata.index
    is_written = (index >= 0) & (index >= metadata.length_after[:, None] - size)
    new_buffer = write_slots(buffer, new, jnp.where(is_written, index % size, size), axis)
    if index.shape[1] <= 1 + lookahead:
        return new_buffer, as_float(new_buffer, new.dtype), _ring_index(metadata.length_after, size)
    if isinstance(buffer, Int8Array):
        rounded_new = Int8Array.quantize(new).dequantize(new.dtype)
    else:
        rounded_new = new.astype(buffer.dtype)
    values = jnp.concatenate([as_float(buffer, new.dtype), rounded_new], axis=axis)
    return new_buffer, values, jnp.concatenate([_ring_index(metadata.length_before, size), index], axis=1)


def _ring_index(length: Int[Array, "B"], size: int) -> Int[Array, "B S"]:
    """Return the token index of each slot in a ring with ``length`` tokens. Empty slots have negative indices."""
    newest_index = length[:, None] - 1
    return newest_index - (newest_index - jnp.arange(size, dtype=jnp.int32)[None]) % size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCache:
    """Cache of a layer with one slot per token.

    Attributes:
        buffers: Pytree of arrays ``[*L, B, …, S, W]``, such as keys and values ``[*L, B, K, S, H]``, or MLA's latents
            ``[*L, B, S, W]``, each followed by the rotated key (DeepSeek-V2).
        ring: Whether the cache is a ring buffer that stores only the most recent tokens, for a sliding window.
        lookahead: Number of extra slots for draft tokens that may be discarded.
    """

    buffers: PyTree
    ring: bool = dataclasses.field(default=False, metadata={"static": True})
    lookahead: int = dataclasses.field(default=0, metadata={"static": True})

    def append(self, new: PyTree, metadata: CacheMetadata) -> tuple[Self, PyTree, SlotMetadata]:
        """Store the new tokens.

        Args:
            new: Pytree of arrays ``[B, …, T, W]`` with the structure of ``buffers``.
            metadata: Metadata of the pass.

        Returns:
            The updated cache, all values that queries may attend to, and the metadata of these values.
        """
        arrays, tree = jax.tree.flatten(new)
        append = functools.partial(append_ring, lookahead=self.lookahead) if self.ring else append_full
        buffers = tree.flatten_up_to(self.buffers)
        results = [append(buffer, array, metadata) for buffer, array in zip(buffers, arrays, strict=True)]
        buffers, values, (index, *_) = zip(*results, strict=True)
        cache = dataclasses.replace(self, buffers=tree.unflatten(buffers))
        return cache, tree.unflatten(values), metadata.slots(index)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentState:
    """States of a recurrent layer after each of the most recent tokens of a row.

    The state after token i is stored at index ``i % (1 + lookahead)``. As for keys and values, up to ``lookahead``
    tokens can therefore be discarded by reducing `Cache.length`. A `CacheFormat` does not change the dtype of states.

    Attributes:
        states: Pytree of arrays ``[*L, B, 1 + lookahead, ...]``.
    """

    states: PyTree

    @classmethod
    def empty(cls, zero: PyTree, lookahead: int) -> Self:
        """Create the states of empty rows.

        Args:
            zero: Pytree of zeros ``[B, ...]``, the state before the first token.
            lookahead: Number of most recent tokens that may be discarded.
        """
        return cls(jax.tree.map(lambda a: jnp.repeat(a[:, None], 1 + lookahead, axis=1), zero))

    @property
    def lookahead(self) -> int:
        """Number of most recent tokens that may be discarded."""
        return jax.tree.leaves(self.states)[0].shape[1] - 1

    def state_before(self, metadata: CacheMetadata) -> PyTree:
        """Return the state ``[B, ...]`` before the new tokens."""
        length = metadata.length_before

        def select(states: Array) -> Array:
            shape = (-1, *(1,) * (states.ndim - 1))
            state = jnp.take_along_axis(states, ((length - 1) % states.shape[1]).reshape(shape), axis=1)[:, 0]
            return jnp.where((length > 0).reshape(shape[:-1]), state, 0)

        return jax.tree.map(select, self.states)

    def write(self, new: PyTree, index: Int[Array, "B n"]) -> Self:
        """Store the states ``[B, n, ...]`` after the n tokens ``index``. Negative indices are skipped."""

        def write(states: Array, new: Array) -> Array:
            size = states.shape[1]
            return write_slots(states, new, jnp.where(index < 0, size, index % size), 1)

        return type(self)(jax.tree.map(write, self.states, new))


def format_caches(layers: tuple[PyTree, ...], cache_format: CacheFormat | None) -> tuple[PyTree, ...]:
    """Convert the buffers of empty caches to ``cache_format``. Recurrent states and integers are unchanged."""
    if cache_format is None:
        return layers

    def is_state(x: object) -> bool:
        return isinstance(x, RecurrentState)

    def convert(x: Any) -> Any:
        return x if is_state(x) or not jnp.issubdtype(x.dtype, jnp.floating) else cache_format(x)

    return jax.tree.map(convert, layers, is_leaf=is_state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Cache of a model.

    Attributes:
        layers: One entry per stack. The entry of a scanned stack is a single cache whose arrays have a leading layer
            dimension. All other entries are tuples with one cache per layer. The arrays of a ``TokenCache`` are in
            ``buffers``: ``(keys, values)`` for most attention layers, latents for MLA.
        length: Number of tokens stored per row.
        segment: Segment id of each stored token, by row and token index.
        capacity: Maximum number of real tokens per row.
    """

    layers: tuple[PyTree, ...]
    length: Int[Array, "B"]
    segment: Int[Array, "B C"]
    capacity: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, layers: tuple[PyTree, ...], batch: int, capacity: int) -> Self:
        """Create a cache with ``batch`` empty rows from the empty caches of the layers."""
        cache = cls(layers, jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, capacity), jnp.int32), capacity)
        return cache.remember_lengths(np.zeros(batch, np.int32))

    @property
    def lengths(self) -> np.ndarray | None:
        """``length`` as a NumPy array, or ``None`` if ``length`` is traced or not fully addressable by this process.

        Blocks until the device has computed ``length``, unless `remember_lengths` was called.
        """
        if isinstance(self.length, Tracer) or not self.length.is_fully_addressable:
            return None
        lengths = vars(self).get("_lengths")
        return np.asarray(self.length) if lengths is None else lengths

    @property
    def max_length(self) -> int | None:
        """Maximum of `lengths`, or ``None`` if `lengths` is ``None``."""
        lengths = self.lengths
        return None if lengths is None else int(lengths.max())

    def remember_lengths(self, lengths: np.ndarray) -> Self:
        """Set `lengths` in place. JAX transformations and `dataclasses.replace` discard the value."""
        object.__setattr__(self, "_lengths", lengths)
        return self

    def advance(
        self, count: int, valid: Bool[Array, "B T"] | None, segment: Int[Array, "B T"] | None
    ) -> tuple[Self, CacheMetadata]:
        """Update lengths and segments for new tokens. The layers append keys and values afterwards.

        Args:
            count: Number of new tokens per row, including padding.
            valid: False for padding. ``None`` if there is no padding.
            segment: Segment ids of the new tokens. Defaults to 0.

        Returns:
            The cache with updated lengths, and the metadata for the caches of the layers.
        """
        length_before = self.length[:, None]
        if valid is None:
            index = length_before + jnp.arange(count, dtype=jnp.int32)[None]
            length = self.length + count
        else:
            index = jnp.where(valid, length_before + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, -1)
            length = self.length + jnp.sum(valid, axis=1, dtype=jnp.int32)
        segment = jnp.zeros(index.shape, jnp.int32) if segment is None else segment
        segments = write_slots(self.segment, segment, jnp.where(index < 0, self.capacity, index), 1)
        cache = dataclasses.replace(self, length=length, segment=segments)
        return cache, CacheMetadata(index, self.length, length, segments)

    def nan_if_full(self, x: Float[Array, "B T *D"]) -> Float[Array, "B T *D"]:
        """Replace ``x`` with NaN in rows whose length exceeds ``capacity``."""
        return jnp.where((self.length > self.capacity).reshape(-1, *(1,) * (x.ndim - 1)), jnp.nan, x)

    def without_layers(self, fresh: bool) -> Self:
        """Return the cache without ``layers``.

        Args:
            fresh: Whether the caller requires an empty cache.

        Raises:
            ValueError: If ``fresh`` is True and the cache is known not to be empty.
        """
        if fresh and self.max_length:
            raise ValueError(f"fresh=True: {self.max_length} tokens are in the cache. Pass an empty cache.")
        return dataclasses.replace(self, layers=())
