"""What decoding remembers: per layer keys and values (or MLA's latents), and once per model which slots hold what.

Every buffer is written by the same two functions, so that the keys of a layer and the bookkeeping of their slots
cannot disagree. All are pytrees: passed in, returned, and safe to donate.
"""

import dataclasses
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int


def written(buffer: Array, new: Array, start: Int[Array, ""], axis: int) -> Array:
    """In place, where the buffer is donated or goes round with a loop.

    XLA:CPU fuses the writing with each use of what was written, and copies the whole buffer for each; not what comes
    out of a loop. One of a single turn would be no loop, so this one writes twice.
    """

    def write(_: Any, buffer: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(buffer, new, start, axis)

    return jax.lax.fori_loop(0, 2, write, buffer) if jax.default_backend() == "cpu" else write(0, buffer)


def append_full(buffer: Array, new: Array, start: Int[Array, ""], axis: int) -> tuple[Array, Array]:
    """Write ``new`` at slot ``start``; what may be attended to is the whole buffer. Returns (buffer, seen)."""
    buffer = written(buffer, new.astype(buffer.dtype), start, axis)
    return buffer, buffer


def append_ring(buffer: Array, new: Array, start: Int[Array, ""], axis: int) -> tuple[Array, Array]:
    """Write token i at slot ``i % size``. Several new tokens see the ring as it was, followed by themselves."""
    size, count = buffer.shape[axis], new.shape[axis]
    new = new.astype(buffer.dtype)
    if count == 1:
        buffer = written(buffer, new, start % size, axis)
        return buffer, buffer
    seen = jnp.concatenate([buffer, new], axis=axis)
    if count >= size:
        last = jax.lax.slice_in_dim(new, count - size, count, axis=axis)
        return jnp.roll(last, (start + count) % size, axis), seen
    slots = (start + jnp.arange(count)) % size
    return buffer.at[(slice(None),) * axis + (slots,)].set(new), seen


class LayerCache(Protocol):
    """One layer's memory of the tokens before."""

    def append(self, new: Any, start: Int[Array, ""]) -> tuple[Self, Any]:
        """Remember ``new`` (tokens ``start …``) and return the memory and all that may be attended to."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every token; as many slots as tokens."""

    k: Float[Array, "*L B K S H"]
    v: Float[Array, "*L B K S H"]

    def append(self, new: tuple[Array, Array], start: Int[Array, ""]) -> tuple[Self, tuple[Array, Array]]:
        """Add keys and values ``[B, K, T, H]``."""
        k, seen_k = self.write(self.k, new[0], start, axis=2)
        v, seen_v = self.write(self.v, new[1], start, axis=2)
        return type(self)(k, v), (seen_k, seen_v)

    write = staticmethod(append_full)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RingCache(KVCache):
    """Keys and values of the last tokens only: what a sliding window can see, whatever the length."""

    write = staticmethod(append_ring)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentCache:
    """MLA's compressed keys and values: one latent and one rotated key a token, shared by all heads (DeepSeek-V2)."""

    latent: Float[Array, "*L B S W"]

    def append(self, new: Array, start: Int[Array, ""]) -> tuple[Self, Array]:
        """Add latents ``[B, T, kv_rank + rope]``."""
        latent, seen = self.write(self.latent, new, start, axis=1)
        return type(self)(latent), seen

    write = staticmethod(append_full)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Which token each slot holds: its index in the stream (-1: none), whether it is real (None: all are), its segment
    (None: there is one)."""

    index: Int[Array, "S"]
    valid: Bool[Array, "B S"] | None
    segment: Int[Array, "B S"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """A model's memory: its layers' caches, the slots they share, and how far each row has come.

    ``capacity`` is the number of tokens (padding included) that fit; ``length`` how many were written.
    """

    layers: tuple[Any, ...]
    slots: Slots
    length: Int[Array, ""]
    next_position: Int[Array, "B"]
    capacity: int = dataclasses.field(metadata={"static": True})
    ring: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, layers: tuple[Any, ...], batch: int, slots: int, capacity: int, ring: bool) -> Self:
        """A memory of nothing, around the layers' empty caches."""
        zeros = jnp.zeros((batch, slots), jnp.int32)
        book = Slots(jnp.full((slots,), -1, jnp.int32), zeros.astype(bool), zeros)
        return cls(layers, book, jnp.int32(0), jnp.zeros((batch,), jnp.int32), capacity, ring)

    @property
    def known_length(self) -> int | None:
        """``length`` as a number; None where it is traced."""
        return None if isinstance(self.length, Tracer) else int(self.length)

    def advance(self, valid: Bool[Array, "B T"], segment: Int[Array, "B T"]) -> tuple[Self, Slots]:
        """Count in T tokens; returns the new bookkeeping (layers not yet appended) and the slots that they may see."""
        write = append_ring if self.ring else append_full
        count = valid.shape[1]
        assert self.slots.valid is not None and self.slots.segment is not None  # a cache has to know
        index, seen_index = write(self.slots.index, self.length + jnp.arange(count, dtype=jnp.int32), self.length, 0)
        valids, seen_valid = write(self.slots.valid, valid, self.length, 1)
        segments, seen_segment = write(self.slots.segment, segment, self.length, 1)
        moved = dataclasses.replace(
            self,
            slots=Slots(index, valids, segments),
            length=self.length + count,
            next_position=self.next_position + jnp.sum(valid, axis=1, dtype=jnp.int32),
        )
        return moved, Slots(seen_index, seen_valid, seen_segment)
