"""Lazy arrays, read or computed one box at a time. All checkpoint formats are read and written through them.

A weight that a checkpoint stores as codes is read as floats; its `parts` are the arrays of a `QuantizedWeight`.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnxmoe.config.frozen import FrozenDict
from nnxmoe.layers.linear.code_format import CodeFormat

AT_ONCE = 1 << 62  # the block of an array that is read as a whole, such as one whose rows are not contiguous
Box = tuple[slice, ...]  # one slice with start and stop per dimension
Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]


@dataclass(frozen=True)
class LazyArray:
    """Shape and dtype of an array, and a function that reads boxes of it.

    ``read_box(box, empty)`` returns the values of a box; ``empty`` allocates memory that it may read into.
    ``block``: efficient size of a read, in bytes. ``codes``, ``parts``: how the file quantises the values, and its
    arrays by name: ``codes``, ``scale``, perhaps ``zero`` and ``order``. ``file``: its name, for messages; ``tensors``:
    names of the tensors that it is read from, if they differ from its own. ``stored``: the format's own name and the
    bytes in the file, if ``dtype`` and ``codes`` do not tell them. ``fault``: an error message from checking
    the headers. ``holders``: for an array that spans processes, those that hold all of it; ``joined`` computes it on
    all devices.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read_box: Callable[[Box, Empty], np.ndarray]
    block: int = 32 << 20
    codes: CodeFormat | None = None
    parts: Mapping[str, "LazyArray"] = FrozenDict({})
    file: str = ""
    tensors: tuple[str, ...] = ()
    stored: tuple[str, int] | None = None
    fault: str | None = None
    holders: tuple[int, ...] | None = None
    joined: Callable[[], jax.Array] | None = None

    @classmethod
    def quantized(cls, codes: CodeFormat, shape: tuple[int, ...], parts: Mapping[str, "LazyArray"]) -> "LazyArray":
        """Array of the weights ``[O, I]``, or ``[E, O, I]`` of all experts, that codes represent, in float32."""
        first, read = parts["codes"], functools.partial(_decode, codes, shape, parts)
        made = cls(shape, np.dtype(np.float32), read, first.block, codes, parts, first.file)
        tensors = tuple(name for part in parts.values() for name in part.tensors)
        return replace(made, tensors=tensors, fault=next((part.fault for part in parts.values() if part.fault), None))

    @classmethod
    def faulty(cls, fault: str, tensors: tuple[str, ...]) -> "LazyArray":
        """An array that is refused before it is read."""
        return cls((), np.dtype(np.float32), _unreadable, fault=fault, tensors=tensors)

    @property
    def kind(self) -> str:
        """The dtype in the file, or the kind of code."""
        if self.stored is not None:
            return self.stored[0]
        return str(self.dtype) if self.codes is None else self.codes.code_dtype

    @property
    def loaded(self) -> np.dtype:
        """The dtype for loading it if none is asked for: float64 as float32, codes as what their tool defines,
        those of formats with types of their own (``stored``) as float32, which is exact."""
        if self.codes is not None and self.stored is None:
            return jnp.dtype(self.codes.round_dtype or "bfloat16")
        return np.dtype(np.float32) if self.dtype.itemsize == 8 else self.dtype

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
        bits = 8 * self.dtype.itemsize if self.codes is None else self.codes.bits
        return math.prod(sizes(box)) * bits // 8

    def cast(self, dtype: np.dtype) -> "LazyArray":
        """The array with its values in another dtype."""
        return replace(self.each(lambda values: values.astype(dtype), dtype), codes=None)

    def each(self, change: Callable[[Any], Any], dtype: Any = None) -> "LazyArray":
        """Apply an elementwise function to every box that is read; ``dtype``: of its results, None: unchanged."""
        read = self.read_box
        made = self._derived(self.shape, lambda box, empty: change(read(box, empty)), change)
        return made if dtype is None else replace(made, dtype=np.dtype(dtype))

    def in_blocks(self, width: int, made: int, change: Callable[[Any], Any], dtype: Any = None) -> "LazyArray":
        """Apply a function that turns each block of ``width`` values of the last dimension into ``made`` values.
        Whole blocks are read; ``dtype``: of the results, None: unchanged."""

        def read(box: Box, empty: Empty) -> np.ndarray:
            *rows, columns = box
            first, last = columns.start // made, -(-columns.stop // made)
            found = change(self.read_box((*rows, slice(first * width, last * width)), np.empty))
            return found[..., columns.start - first * made : columns.stop - first * made]

        blocks = self._derived((*self.shape[:-1], self.shape[-1] // width * made), read, change)
        return blocks if dtype is None else replace(blocks, dtype=np.dtype(dtype))

    def mapped(
        self, shape: tuple[int, ...], dtype: np.dtype, change: Callable[[np.ndarray], np.ndarray]
    ) -> "LazyArray":
        """Apply a function to the whole array, at every read."""
        read = self.read_box

        def run(box: Box, empty: Empty) -> np.ndarray:
            return np.ascontiguousarray(change(read(whole(self.shape), np.empty)))[box]

        return replace(self, shape=shape, dtype=dtype, read_box=run, block=AT_ONCE)

    def reshaped(self, shape: tuple[int, ...]) -> "LazyArray":
        """Merge and split dimensions as `numpy.reshape` does. Of a range that is split, the smallest box that has it is
        read."""
        if shape == self.shape:
            return self
        groups = list(_groups(self.shape, shape))

        def read(box: Box, empty: Empty) -> np.ndarray:
            hull: list[slice] = []
            wanted: list[np.ndarray] = []
            for own, new in groups:
                at = np.ravel_multi_index(np.ix_(*(np.arange(r.start, r.stop) for r in box[new])), shape[new]).ravel()
                hull += _hull(self.shape[own], int(at[0]), int(at[-1]) + 1)
                first = np.ravel_multi_index([part.start for part in hull[own]], self.shape[own])
                wanted.append(at - first)
            found = self.read_box(tuple(hull), np.empty)
            found = found.reshape([math.prod(found.shape[own]) for own, _ in groups])
            for axis, at in enumerate(wanted):
                found = found if len(at) == found.shape[axis] else np.take(found, at, axis)
            return found.reshape(sizes(box))

        return self._derived(shape, read, lambda whole: whole.reshape(shape))

    def transposed(self, order: tuple[int, ...]) -> "LazyArray":
        """The dimensions in another order, as `numpy.transpose` has them."""
        if order == tuple(range(len(order))):
            return self
        read, back = self.read_box, np.argsort(order)

        def turned(box: Box, empty: Empty) -> np.ndarray:
            return np.ascontiguousarray(read(tuple(box[i] for i in back), np.empty).transpose(order))

        return self._derived(tuple(self.shape[i] for i in order), turned, lambda whole: whole.transpose(order))

    def swapped(self) -> "LazyArray":
        """The first two dimensions exchanged; a vector as it is."""
        return self.transposed((1, 0, *range(2, len(self.shape)))) if len(self.shape) > 1 else self

    def take(self, index: Sequence[int] | np.ndarray, axis: int) -> "LazyArray":
        """The entries of a dimension that `numpy.take` selects. Of each box the smallest range with its entries is
        read."""
        axis %= len(self.shape)
        lead, at = (slice(None),) * axis, index if isinstance(index, range) else np.asarray(index)

        def read(box: Box, empty: Empty) -> np.ndarray:
            found = at[box[axis]]
            first, last = (found[0], found[-1]) if isinstance(found, range) else (int(found.min()), int(found.max()))
            outer = (*box[:axis], slice(first, last + 1), *box[axis + 1 :])
            if not isinstance(found, range):
                return np.take(self.read_box(outer, np.empty), found - first, axis)
            if found.step == 1:
                return self.read_box(outer, empty)
            return self.read_box(outer, np.empty)[(*lead, slice(None, None, found.step))]

        shape = (*self.shape[:axis], len(at), *self.shape[axis + 1 :])
        return self._derived(shape, read, lambda whole: whole[(*lead, np.asarray(at))])

    def _derived(
        self, shape: tuple[int, ...], read: Callable[[Box, Empty], np.ndarray], change: Callable[[jax.Array], jax.Array]
    ) -> "LazyArray":
        """The same values in another shape; ``change`` makes it of the whole array on devices."""
        joined = self.joined
        return replace(self, shape=shape, read_box=read, joined=None if joined is None else lambda: change(joined()))

    @classmethod
    def of_columns(cls, parts: Sequence[tuple["LazyArray", Sequence[int]]]) -> "LazyArray":
        """The inverse of `take` for the last dimension; ``parts``: arrays, and the numbers of their columns."""
        back, first = np.argsort(np.concatenate([at for _, at in parts])), parts[0][0]

        def read(box: Box, empty: Empty) -> np.ndarray:
            found = [array.read_box((*box[:-1], slice(0, array.shape[-1])), np.empty) for array, _ in parts]
            return np.concatenate(found, axis=-1)[..., back[box[-1]]]

        joined = [array.joined for array, _ in parts]
        whole_array = None
        if first.joined is not None:
            whole_array = lambda: jnp.concatenate([each() for each in joined if each], axis=-1)[..., back]  # noqa: E731
        return replace(first, shape=(*first.shape[:-1], len(back)), read_box=read, joined=whole_array)

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


def _groups(one: tuple[int, ...], other: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """The shortest runs of dimensions of two shapes that have the same number of values."""
    i = j = 0
    while i < len(one) or j < len(other):
        first, a, b = (i, j), one[i], other[j]
        i, j = i + 1, j + 1
        while a != b or (i == len(one)) != (j == len(other)):
            if a < b or j == len(other):
                a, i = a * one[i], i + 1
            else:
                b, j = b * other[j], j + 1
        yield slice(first[0], i), slice(first[1], j)


def _hull(shape: tuple[int, ...], low: int, high: int) -> list[slice]:
    """The smallest box of an array that has the values from ``low`` to ``high`` of its flattened form."""
    if not shape:
        return []
    rest = math.prod(shape[1:])
    first, last = low // rest, (high - 1) // rest
    if first < last:
        return [slice(first, last + 1), *whole(shape[1:])]
    return [slice(first, last + 1), *_hull(shape[1:], low - first * rest, high - first * rest)]


def _decode(codes: CodeFormat, shape: tuple[int, ...], parts: LazyArrays, box: Box, empty: Empty) -> np.ndarray:
    """The weights in a box, in float32."""
    *experts, rows, columns = box
    if "order" in parts:
        found = _aligned(codes, parts, [], rows, slice(0, shape[1]))
        return found[:, np.argsort(np.asarray(parts["order"]))[columns]]
    tile = min(codes.tile[1], shape[-1])
    first, last = columns.start // tile * tile, min(shape[-1], -(-columns.stop // tile) * tile)
    found = _aligned(codes, parts, experts, rows, slice(first, last))
    return found[..., columns.start - first : columns.stop - first]


def _aligned(codes: CodeFormat, parts: LazyArrays, experts: list[slice], rows: slice, columns: slice) -> np.ndarray:
    """Rows of columns that begin with a tile and end with one."""
    (tall, wide), halves = codes.tile, 1 + codes.is_packed
    tiles = slice(rows.start // tall, -(-rows.stop // tall)), slice(columns.start // wide, -(-columns.stop // wide))
    octets = slice(columns.start // halves, columns.stop // halves)
    found = parts["codes"].read_box((*experts, rows, octets), np.empty)
    scale = parts["scale"].read_box((*experts, *tiles), np.empty)
    zero = parts["zero"].read_box((*experts, *tiles), np.empty) if "zero" in parts else None
    first = tiles[0].start * tall
    with np.errstate(over="ignore", invalid="ignore"):
        return codes.decode(found, scale, zero, slice(rows.start - first, rows.stop - first))


def _unreadable(box: Box, empty: Empty) -> np.ndarray:
    raise AssertionError("a faulty tensor is refused before it is read")
