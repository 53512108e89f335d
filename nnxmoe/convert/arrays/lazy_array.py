"""Lazy arrays, read or computed one box at a time. All checkpoint formats are read and written as lazy arrays."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnxmoe.config.frozen import FrozenDict
from nnxmoe.convert.arrays.boxes import Box, hull_of_range, matching_dimensions, sizes, whole
from nnxmoe.convert.files.host_memory import transpose_matrices
from nnxmoe.layers.linear.code_format import CodeFormat

AT_ONCE = 1 << 62  # block size of an array that must be read whole, for example if its rows are not contiguous
Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]


@dataclass(frozen=True)
class LazyArray:
    """Array with a known shape and dtype, whose values are read or computed on demand, one box at a time.

    Attributes:
        shape: Shape of the whole array.
        dtype: Dtype of the values that are read.
        read_box: ``read_box(box, empty)`` returns the values in a box. It may allocate the result with ``empty``.
        block: Preferred size of a read in bytes.
        codes: Quantization format in the file. `None` if the values are not quantized.
        parts: Stored arrays of a quantized weight: ``codes``, ``scale``, and ``zero`` and ``order`` if present.
        file: Name of the file, for messages.
        tensors: Names of the tensors that the array reads, if they differ from the array's name.
        stored: Pair of type name and size in bytes in the file, for types that ``dtype`` and ``codes`` cannot describe,
            such as the types of GGUF.
        fault: Error message if the array's headers are invalid. An array with a fault must not be read.
        holders: Processes whose shards contain all values. Set only for an array that spans processes.
        global_array: Function that computes the whole array on all devices. Set only for an array that spans processes.
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
    global_array: Callable[[], jax.Array] | None = None

    @classmethod
    def from_array(cls, array: Any) -> "LazyArray":
        """Wrap an array already in memory."""
        shape, dtype = tuple(np.shape(array)), np.dtype(getattr(array, "dtype", type(array)))
        return cls(shape, dtype, lambda box, _: np.asarray(array)[box])

    @classmethod
    def faulty(cls, fault: str, tensors: tuple[str, ...]) -> "LazyArray":
        """Return a placeholder for an invalid array. Loading reports its ``fault`` before reading any array."""
        return cls((), np.dtype(np.float32), _refuse_read, fault=fault, tensors=tensors)

    @property
    def kind(self) -> str:
        """Name of the dtype or quantization type in the file."""
        if self.stored is not None:
            return self.stored[0]
        return str(self.dtype) if self.codes is None else self.codes.code_dtype

    @property
    def load_dtype(self) -> np.dtype:
        """Default dtype for loading.

        Dtypes of 8 bytes, such as float64, are loaded as float32. Quantized values are loaded in the dtype that the
        quantization tool defines, by default bfloat16. Formats with ``stored`` types are loaded as float32 without
        rounding.
        """
        if self.codes is not None and self.stored is None:
            return jnp.dtype(self.codes.round_dtype or "bfloat16")
        return np.dtype(np.float32) if self.dtype.itemsize == 8 else self.dtype

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes. For a quantized array, the size of the codes without the scales."""
        return self.box_nbytes(whole(self.shape))

    def box_nbytes(self, box: Box) -> int:
        """Return the size of a box in bytes."""
        bits = 8 * self.dtype.itemsize if self.codes is None else self.codes.bits
        return math.prod(sizes(box)) * bits // 8

    def rows(self, rows: slice) -> np.ndarray:
        """Read a range of rows."""
        return self.read_box((slice(*rows.indices(self.shape[0])[:2]), *whole(self.shape[1:])), np.empty)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read_box(whole(self.shape), np.empty), dtype)

    def astype(self, dtype: np.dtype) -> "LazyArray":
        """Cast the values to a dtype when they are read."""
        return replace(self.map(lambda values: values.astype(dtype), dtype), codes=None)

    def map(self, function: Callable[[Any], Any], dtype: Any = None) -> "LazyArray":
        """Apply an elementwise function to every box that is read.

        ``dtype`` is the dtype of the result and defaults to the array's dtype.
        """
        read_source = self.read_box
        return self._derive(self.shape, lambda box, empty: function(read_source(box, empty)), function, dtype)

    def map_blocks(self, width: int, new_width: int, function: Callable[[Any], Any], dtype: Any = None) -> "LazyArray":
        """Apply a function that converts each group of ``width`` values in the last dimension to ``new_width`` values.

        Reads whole blocks of ``width`` values. ``dtype`` is the dtype of the result and defaults to the array's dtype.
        """

        def read(box: Box, empty: Empty) -> np.ndarray:
            *rows, columns = box
            first_block, last_block = columns.start // new_width, -(-columns.stop // new_width)
            values = function(self.read_box((*rows, slice(first_block * width, last_block * width)), np.empty))
            return values[..., columns.start - first_block * new_width : columns.stop - first_block * new_width]

        return self._derive((*self.shape[:-1], self.shape[-1] // width * new_width), read, function, dtype)

    def map_whole(
        self, shape: tuple[int, ...], dtype: np.dtype, function: Callable[[np.ndarray], np.ndarray]
    ) -> "LazyArray":
        """Apply a function to the whole array on every read. ``shape`` and ``dtype`` describe the result."""
        read_source = self.read_box

        def read(box: Box, empty: Empty) -> np.ndarray:
            return np.ascontiguousarray(function(read_source(whole(self.shape), np.empty)))[box]

        return replace(self, shape=shape, dtype=dtype, read_box=read, block=AT_ONCE)

    def reshape(self, shape: tuple[int, ...]) -> "LazyArray":
        """Reshape as `numpy.reshape` does.

        If a box of the result is not a box of the source, the smallest source box that contains it is read.
        """
        if shape == self.shape:
            return self
        runs = list(matching_dimensions(self.shape, shape))

        def read(box: Box, empty: Empty) -> np.ndarray:
            source_box: Box = ()
            positions: list[np.ndarray] = []
            for source, target in runs:
                ranges = np.ix_(*(np.arange(part.start, part.stop) for part in box[target]))
                index = np.ravel_multi_index(ranges, shape[target]).ravel()
                part = hull_of_range(self.shape[source], int(index[0]), int(index[-1]) + 1)
                positions.append(index - np.ravel_multi_index([extent.start for extent in part], self.shape[source]))
                source_box = (*source_box, *part)
            values = self.read_box(source_box, np.empty)
            values = values.reshape([math.prod(values.shape[source]) for source, _ in runs])
            for axis, index in enumerate(positions):
                values = values if len(index) == values.shape[axis] else np.take(values, index, axis)
            return values.reshape(sizes(box))

        return self._derive(shape, read, lambda array: array.reshape(shape))

    def transpose(self, order: tuple[int, ...]) -> "LazyArray":
        """Reorder the dimensions as `numpy.transpose` does."""
        last_axis = len(order) - 1
        if order == tuple(range(len(order))):
            return self
        read_source, inverse = self.read_box, np.argsort(order)
        swaps_last_axes = order == (*range(last_axis - 1), last_axis, last_axis - 1)

        def read(box: Box, empty: Empty) -> np.ndarray:
            values = read_source(tuple(box[i] for i in inverse), np.empty)
            if not swaps_last_axes:
                return np.ascontiguousarray(values.transpose(order))
            transposed = np.empty(sizes(box), values.dtype)
            transpose_matrices(transposed, values)
            return transposed

        return self._derive(tuple(self.shape[i] for i in order), read, lambda array: array.transpose(order))

    def swap_leading_axes(self) -> "LazyArray":
        """Swap the first two dimensions. A vector is returned unchanged."""
        return self.transpose((1, 0, *range(2, len(self.shape)))) if len(self.shape) > 1 else self

    def take(self, index: Sequence[int] | np.ndarray, axis: int) -> "LazyArray":
        """Select entries along a dimension as `numpy.take` does.

        Reading a box reads the smallest source range that contains the selected entries.
        """
        axis %= len(self.shape)
        leading_slices, entries = (slice(None),) * axis, index if isinstance(index, range) else np.asarray(index)

        def read(box: Box, empty: Empty) -> np.ndarray:
            indices = entries[box[axis]]
            is_range = isinstance(indices, range)
            min_index, max_index = (indices[0], indices[-1]) if is_range else (int(indices.min()), int(indices.max()))
            source_box = (*box[:axis], slice(min_index, max_index + 1), *box[axis + 1 :])
            if not isinstance(indices, range):
                return np.take(self.read_box(source_box, np.empty), indices - min_index, axis)
            if indices.step == 1:
                return self.read_box(source_box, empty)
            return self.read_box(source_box, np.empty)[(*leading_slices, slice(None, None, indices.step))]

        shape = (*self.shape[:axis], len(entries), *self.shape[axis + 1 :])
        return self._derive(shape, read, lambda array: array[(*leading_slices, np.asarray(entries))])

    def _derive(
        self,
        shape: tuple[int, ...],
        read: Callable[[Box, Empty], np.ndarray],
        function: Callable[[jax.Array], jax.Array],
        dtype: Any = None,
    ) -> "LazyArray":
        """Return an array with a new ``read_box``. ``function`` computes the same result from `global_array`."""
        source = self.global_array
        compute = None if source is None else lambda: function(source())
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        return replace(self, shape=shape, dtype=dtype, read_box=read, global_array=compute)


LazyArrays = Mapping[str, LazyArray]


def merge_columns(parts: Sequence[tuple[LazyArray, Sequence[int]]]) -> LazyArray:
    """Merge arrays along the last dimension. ``parts`` are pairs of an array and its column indices in the result."""
    order, first_array = np.argsort(np.concatenate([columns for _, columns in parts])), parts[0][0]

    def read(box: Box, empty: Empty) -> np.ndarray:
        values = [array.read_box((*box[:-1], slice(0, array.shape[-1])), np.empty) for array, _ in parts]
        return np.concatenate(values, axis=-1)[..., order[box[-1]]]

    sources = [array.global_array for array, _ in parts]

    def compute() -> jax.Array:
        return jnp.concatenate([source() for source in sources if source], axis=-1)[..., order]

    shape = (*first_array.shape[:-1], len(order))
    return replace(first_array, shape=shape, read_box=read, global_array=compute if first_array.global_array else None)


def _refuse_read(box: Box, empty: Empty) -> np.ndarray:
    raise AssertionError("an array with a fault must not be read")
