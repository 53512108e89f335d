"""Load the arrays of a checkpoint into the parameters of a model, which may be sharded over a mesh.

Each parameter has one aligned buffer per distinct shard on this process's devices. Arrays are read in blocks, and each
block is read once. The values of a block are cast, transposed and copied into every buffer that overlaps the block.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from nnxmoe.config.printable import plain
from nnxmoe.convert.arrays.array_layout import ArrayLayout, Parameter, Path
from nnxmoe.convert.arrays.boxes import Box, hull, overlap, sizes, within
from nnxmoe.convert.arrays.lazy_array import LazyArray, LazyArrays
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.host_memory import (
    BlockAllocator,
    ScratchBuffers,
    copy_into,
    count_nonfinite,
    reader_threads,
    transpose_into,
)

AHEAD_BYTES = 128 << 20  # limit on the total size of parameters that are read but not yet on devices


Ranges = tuple[tuple[int, int], ...]  # (start, stop) per dimension.
Buffers = dict[Ranges, np.ndarray]  # A parameter's shards on this process's devices.
BoxView = tuple[Box, np.ndarray]  # Box of an array, and the buffer view that receives its values.


class LoadTarget(NamedTuple):
    """Parameter to load, with its dtype and sharding after loading."""

    parameter: Parameter
    dtype: np.dtype
    sharding: Sharding | None


class LoadGroup(NamedTuple):
    """Parameters that share arrays, with the names of the arrays."""

    targets: list[LoadTarget]
    names: list[str]


class ParameterLoader:
    """Loader of parameter groups. Up to 8 threads read, and the calling thread transfers finished groups to devices.

    The buffers in host memory contain a single group, or several groups of at most AHEAD_BYTES in total.

    Attributes:
        layouts: Array name -> layout.
        arrays: Array name -> lazy array.
        bar: Progress bar in bytes, or None.
        nonfinite: Array name -> number of NaN and infinite values in this process's shards.
        bytes_read: Bytes read so far.
    """

    def __init__(self, layouts: Mapping[str, ArrayLayout], arrays: LazyArrays, bar: Any = None):
        self.layouts, self.arrays, self.bar = layouts, arrays, bar
        self.nonfinite: dict[str, int] = {}
        self.bytes_read = 0
        self._scratch, self._allocator = ScratchBuffers(), BlockAllocator()

    def load(self, groups: Iterable[LoadGroup]) -> dict[Path, jax.Array]:
        """Load all groups, and return the sharded parameters by path."""
        device_arrays: dict[Path, jax.Array] = {}
        pending: deque[tuple[LoadGroup, dict[Path, Buffers], int, list[Future[Any]]]] = deque()
        pending_bytes = 0

        def place_first() -> int:
            group, buffers, size, reads = pending.popleft()
            self.await_reads(reads)
            for parameter, _, sharding in group.targets:
                device_arrays[parameter.path] = _place(parameter.shape, buffers[parameter.path], sharding)
            return size

        with reader_threads() as pool:
            for group in groups:
                buffers = {target.parameter.path: self._buffers(*target) for target in group.targets}
                size = sum(buffer.nbytes for shards in buffers.values() for buffer in shards.values())
                while pending and pending_bytes + size > AHEAD_BYTES:
                    pending_bytes -= place_first()
                pending.append((group, buffers, size, self.submit_reads(group.names, buffers, pool)))
                pending_bytes += size
            while pending:
                place_first()
        return device_arrays

    def _buffers(self, parameter: Parameter, dtype: np.dtype, sharding: Sharding | None) -> Buffers:
        """Allocate a buffer for each distinct shard of a parameter on this process's devices."""
        shape, indices = parameter.shape, [(slice(None),) * len(parameter.shape)]
        if sharding is not None:
            indices = sharding.addressable_devices_indices_map(shape).values()
        shards = sorted({_ranges(index, shape) for index in indices})
        return {
            ranges: self._allocator.empty(tuple(stop - start for start, stop in ranges), dtype) for ranges in shards
        }

    def submit_reads(
        self, names: Iterable[str], buffers: Mapping[Path, Buffers], pool: Executor
    ) -> list[Future[tuple[str, int, int]]]:
        """Submit reads that fill the parameters' buffers from the named arrays."""
        reads = []
        for name in names:
            layout, array = self.layouts[name], self.arrays[name]
            views = _buffer_views(layout, buffers)
            if not views:
                continue
            itemsize = -(-array.nbytes // max(1, array.size))
            rows = 1 if all(view.flags.c_contiguous for _, view in views) else 64
            for block in _split_box(hull(box for box, _ in views), itemsize, array.block, rows):
                block_views: list[BoxView] = []
                for box, view in views:
                    common = overlap(box, block)
                    if common is not None:
                        block_views.append((common, view[within(common, box)]))
                if block_views:
                    box = hull(common for common, _ in block_views)
                    reads.append(pool.submit(self._read, name, layout.change.lazily(array), box, block_views))
        return reads

    def await_reads(self, reads: list[Future[tuple[str, int, int]]]) -> None:
        """Wait for the reads, and raise the first exception from a reader thread."""
        pending_reads: set[Future[Any]] = set(reads)
        while pending_reads:  # wake up at most every 0.1 s, because each wake-up takes the GIL from the readers
            finished_reads, pending_reads = wait(pending_reads, timeout=0.1, return_when=FIRST_EXCEPTION)
            for name, nonfinite, size in [read.result() for read in finished_reads]:
                self.bytes_read += size
                if nonfinite:
                    self.nonfinite[name] = self.nonfinite.get(name, 0) + nonfinite
            if self.bar is not None:
                self.bar.update(self.bytes_read - self.bar.n)

    def _read(self, name: str, array: LazyArray, box: Box, views: list[BoxView]) -> tuple[str, int, int]:
        """Read a box into buffer views, and return (array name, number of non-finite values, bytes read)."""
        buffer = views[0][1] if len(views) == 1 and views[0][1].flags.c_contiguous else None

        def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            if buffer is not None and buffer.dtype == dtype:
                return buffer  # read directly into the buffer, without a copy
            return self._scratch.empty("raw", (1, math.prod(shape)), dtype).reshape(shape)

        values = array.read_box(box, empty)
        assert values.shape == sizes(box), (name, values.shape, box)
        upper_bound = getattr(self.layouts[name].parts[0].variable, "below", None)
        if upper_bound is not None and (invalid_values := values[(values < 0) | (values >= upper_bound)]).size:
            raise CheckpointError(
                f"{plain(name)} in {array.file} has {invalid_values[0]}: its values must be integers from 0 to "
                f"{upper_bound - 1}"
            )
        if values is buffer:
            nonfinite = count_nonfinite(values)
        else:
            nonfinite = sum(self._copy(view, values[within(part, box)]) for part, view in views)
        return name, nonfinite, self.arrays[name].box_nbytes(box)

    def _copy(self, view: np.ndarray, values: np.ndarray) -> int:
        """Assign ``view[...] = values`` with a cast, and return the number of non-finite values in the view."""
        if view.ndim > 2 and not view.flags.c_contiguous:
            view, values = _merge_dimensions(view, values)
        if view.ndim > 2:
            return sum(self._copy(*pair) for pair in zip(view, values, strict=True))
        if view.ndim == 2 and view.strides[0] < view.strides[1]:  # the view is a transpose
            cast = self._scratch.padded("cast", (view.shape[0], view.shape[1]), view.dtype)
            copy_into(cast, values)
            transpose_into(view.T, cast)
            return count_nonfinite(cast)
        copy_into(view, values)
        return count_nonfinite(view)


def _merge_dimensions(view: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Drop dimensions of size 1, and merge neighboring dimensions if merging does not copy the view."""
    view, shape = view.squeeze(), list[int]()
    for i, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        if i and view.strides[i - 1] == stride * size:
            shape[-1] *= size
        else:
            shape.append(size)
    return view.reshape(shape), values.reshape(shape)


def _buffer_views(layout: ArrayLayout, buffers: Mapping[Path, Buffers]) -> list[BoxView]:
    """Return the boxes of an array that this process needs, each with the buffer view that receives the values.

    The views have the dimension order of the array.
    """
    views: list[BoxView] = []
    for number, part in enumerate(layout.parts):
        num_indexed = len(part.at)  # number of leading dimensions (layers, experts) that the part indexes
        for ranges, buffer in buffers.get(part.path, {}).items():
            if not all(start <= index < stop for index, (start, stop) in zip(part.at, ranges, strict=False)):
                continue
            values = buffer[tuple(index - start for index, (start, _) in zip(part.at, ranges, strict=False))]
            box = layout.part_box(tuple(slice(*ends) for ends in ranges[num_indexed:]), part.shape[num_indexed:])
            view = layout.part_view(values, sizes(box))
            view = view if layout.axis is None else np.expand_dims(view, layout.axis)
            views.append((layout.stacked_box(box, number), view))
    return views


def _split_box(box: Box, itemsize: int, block: int, row_multiple: int) -> Iterator[Box]:
    """Split a box into boxes of about ``block`` bytes, each with a multiple of ``row_multiple`` rows.

    With a multiple of 64 rows, a transpose writes whole cache lines.
    """
    if not box:
        yield box
        return
    rows, row_box = box[0], box[1:]
    row_bytes = max(1, itemsize * math.prod(sizes(row_box)))
    if len(row_box) > 1 and row_bytes > block:
        for row in range(rows.start, rows.stop):
            for inner_box in _split_box(row_box, itemsize, block, row_multiple):
                yield slice(row, row + 1), *inner_box
        return
    step = max(row_multiple, block // row_bytes // row_multiple * row_multiple)
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop)), *row_box


def _ranges(index: Any, shape: tuple[int, ...]) -> Ranges:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _place(shape: tuple[int, ...], buffers: Buffers, sharding: Sharding | None) -> jax.Array:
    """Put the buffers of a parameter on the devices as one array."""
    if sharding is None:
        return jax.device_put(*buffers.values())
    return jax.make_array_from_callback(shape, sharding, lambda index: buffers[_ranges(index, shape)])
