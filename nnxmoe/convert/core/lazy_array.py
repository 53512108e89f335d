"""Lazy arrays, read or computed one box at a time. All checkpoint formats are read and written through them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

Box = tuple[slice, ...]  # one slice with start and stop per dimension
Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]


@dataclass(frozen=True)
class LazyArray:
    """Shape and dtype of an array, and a function that reads boxes of it.

    ``read_box(box, empty)`` returns the values of a box; ``empty`` allocates memory that it may read into.
    ``block``: efficient size of a read, in bytes. ``stored``: the dtype in the file, if ``dtype`` is that of the
    dequantised values. ``file``: its name, for messages. ``fault``: an error message from checking the headers.
    ``holders``: for an array that spans processes, those that hold all of it; ``joined`` computes it on all devices.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read_box: Callable[[Box, Empty], np.ndarray]
    block: int = 32 << 20
    stored: np.dtype | None = None
    file: str = ""
    fault: str | None = None
    holders: tuple[int, ...] | None = None
    joined: Callable[[], jax.Array] | None = None

    @property
    def kind(self) -> np.dtype:
        """The dtype in the file."""
        return self.stored or self.dtype

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes."""
        return self.size * self.kind.itemsize

    def cast(self, dtype: np.dtype) -> "LazyArray":
        """The array with its values in another dtype."""
        return replace(
            self, dtype=dtype, stored=None, read_box=lambda box, empty: self.read_box(box, empty).astype(dtype)
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
