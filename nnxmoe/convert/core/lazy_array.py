"""Lazy arrays, read or computed one box at a time. All checkpoint formats are read and written through them.

A weight that a checkpoint stores as codes is read as floats, or as the arrays of a `QuantizedWeight` (`Encoded`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnxmoe.layers.codes import Codes

Box = tuple[slice, ...]  # one slice with start and stop per dimension
Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]


@dataclass(frozen=True)
class LazyArray:
    """Shape and dtype of an array, and a function that reads boxes of it.

    ``read_box(box, empty)`` returns the values of a box; ``empty`` allocates memory that it may read into.
    ``block``: efficient size of a read, in bytes. ``encoded``: the codes in the file, if the values are what they stand
    for. ``file``: its name, for messages; ``tensors``: what it is read from in the file, if that has other names.
    ``fault``: an error message from checking the headers. ``holders``: for an array that spans processes, those that
    hold all of it; ``joined`` computes it on all devices.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read_box: Callable[[Box, Empty], np.ndarray]
    block: int = 32 << 20
    encoded: "Encoded | None" = None
    file: str = ""
    tensors: tuple[str, ...] = ()
    fault: str | None = None
    holders: tuple[int, ...] | None = None
    joined: Callable[[], jax.Array] | None = None

    @property
    def kind(self) -> str:
        """The dtype in the file, or the kind of code."""
        return str(self.dtype) if self.encoded is None else self.encoded.codes.kind

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes; of codes, without their scales."""
        return self.bytes_of(whole(self.shape))

    def bytes_of(self, box: Box) -> int:
        """Size of a box in bytes."""
        bits = 8 * self.dtype.itemsize if self.encoded is None else self.encoded.codes.bits
        return math.prod(sizes(box)) * bits // 8

    def cast(self, dtype: np.dtype) -> "LazyArray":
        """The array with its values in another dtype."""
        return replace(
            self, dtype=dtype, encoded=None, read_box=lambda box, empty: self.read_box(box, empty).astype(dtype)
        )

    def rows(self, rows: slice) -> np.ndarray:
        """Read a range of rows."""
        return self.read_box((slice(*rows.indices(self.shape[0])[:2]), *whole(self.shape[1:])), np.empty)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read_box(whole(self.shape), np.empty), dtype)

    @classmethod
    def of(cls, array: Any) -> "LazyArray":
        """Wrap an array already in memory."""
        shape, dtype = tuple(np.shape(array)), np.dtype(getattr(array, "dtype", type(array)))
        return cls(shape, dtype, lambda box, _: np.asarray(array)[box])


LazyArrays = Mapping[str, LazyArray]


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole array."""
    return tuple(slice(0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(part.stop - part.start for part in box)


def overlap(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    both = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return both if all(part.start < part.stop for part in both) else None


def within(box: Box, outer: Box) -> Box:
    """A box relative to the start of an outer box."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


@dataclass(frozen=True)
class Encoded:
    """A weight ``[O, I]``, or ``[E, O, I]`` of all experts, as codes. ``parts``: the arrays of a `QuantizedWeight` by
    name: ``codes``, ``scale``, perhaps ``zero`` and ``order``."""

    codes: Codes
    shape: tuple[int, ...]
    parts: Mapping[str, LazyArray]

    @property
    def dtype(self) -> np.dtype:
        """The dtype for loading the weight as floats if none is asked for."""
        return jnp.dtype(self.codes.rounded or "bfloat16")

    def read(self, box: Box, empty: Empty) -> np.ndarray:
        """The weights in a box, in float32."""
        *experts, rows, columns = box
        if "order" in self.parts:
            order = np.asarray(self.parts["order"])
            return self._aligned([], rows, slice(0, self.shape[1]))[:, np.argsort(order)[columns]]
        ins = self.shape[-1]
        tile = min(self.codes.tile[1], ins)
        first, last = columns.start // tile * tile, min(ins, -(-columns.stop // tile) * tile)
        found = self._aligned(experts, rows, slice(first, last))
        return found[..., columns.start - first : columns.stop - first]

    def _aligned(self, experts: list[slice], rows: slice, columns: slice) -> np.ndarray:
        """Rows of columns that begin with a tile and end with one."""
        (tall, wide), halves = self.codes.tile, 1 + self.codes.halves
        tiles = slice(rows.start // tall, -(-rows.stop // tall)), slice(columns.start // wide, -(-columns.stop // wide))
        octets = slice(columns.start // halves, columns.stop // halves)
        codes = self.parts["codes"].read_box((*experts, rows, octets), np.empty)
        tiles = *experts, *tiles
        scale = self.parts["scale"].read_box(tiles, np.empty)
        zero = self.parts["zero"].read_box(tiles, np.empty) if "zero" in self.parts else None
        first = tiles[-2].start * tall
        with np.errstate(over="ignore", invalid="ignore"):
            return self.codes.decode(codes, scale, zero, slice(rows.start - first, rows.stop - first))


def decoded(encoded: Encoded) -> LazyArray:
    """The weight as a lazy array of floats."""
    codes = encoded.parts["codes"]
    tensors = tuple(name for part in encoded.parts.values() for name in part.tensors)
    return LazyArray(
        encoded.shape,
        np.dtype(np.float32),
        encoded.read,
        codes.block,
        encoded=encoded,
        file=codes.file,
        fault=next((part.fault for part in encoded.parts.values() if part.fault), None),
        tensors=tensors,
    )
