"""Host-side tools for loading: a thread pool, and fast allocation, checks and transposes of NumPy arrays."""

import contextlib
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_LINE = 64  # bytes per cache line, and the alignment that JAX requires
_BLOCK = 32 << 20
_MOST_THREADS = 8  # memory bandwidth limits more threads, and each needs buffers


@contextlib.contextmanager
def reader_threads() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool with one thread per core, at most 8.

    On exit, including exit after an error or Ctrl-C, cancel pending work and wait for running work.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(min(cores, _MOST_THREADS), thread_name_prefix="nnxmoe-load")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class ScratchBuffers(threading.local):
    """Reusable buffers per thread.

    Reuse avoids page faults in newly allocated memory, which take as long as reading the data.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def empty(self, use: str, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialized array. The array is valid until the next call with the same ``use``."""
        size = math.prod(shape) * dtype.itemsize
        if size > self._buffers.get(use, np.empty(0, np.uint8)).size:
            self._buffers[use] = aligned_empty((size,), np.dtype(np.uint8))
        return self._buffers[use][:size].view(dtype).reshape(shape)

    def padded(self, use: str, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialized array whose rows are an odd number of cache lines apart.

        Rows that are a power of two apart map to the same few cache sets, so the values of a column would evict each
        other from the cache.
        """
        lines = -(-shape[1] * dtype.itemsize // _LINE) | 1
        return self.empty(use, (shape[0], lines * _LINE // dtype.itemsize), dtype)[:, : shape[1]]


class BlockAllocator:
    """Allocator of uninitialized aligned arrays.

    Small arrays share a block, which is freed with the last array in it. The operating system can map large blocks with
    huge pages. Page faults on small pages would take as long as reading the data.
    """

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialized array as `aligned_empty` does."""
        size = math.prod(shape) * dtype.itemsize
        if size > _BLOCK // 4:
            return aligned_empty(shape, dtype)
        if size > self._free.size:
            self._free = aligned_empty((_BLOCK,), np.dtype(np.uint8))
        out, self._free = self._free[:size], self._free[-(-size // _LINE) * _LINE :]
        return out.view(dtype).reshape(shape)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialized array, aligned so that JAX can use its memory on CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _LINE, np.uint8)
    start = -buffer.ctypes.data % _LINE
    return buffer[start : start + size].view(dtype).reshape(shape)


def copy_into(out: np.ndarray, values: np.ndarray) -> None:
    """Assign ``out[...] = values`` with a cast.

    Values out of range become infinity without a warning. `count_nonfinite` counts them.
    """
    if out.dtype == values.dtype:
        out, values = as_unsigned(out), as_unsigned(values)  # plain integers copy faster than bfloat16
    with np.errstate(over="ignore"):
        out[...] = values


def transpose_into(out: np.ndarray, values: np.ndarray, rows: int = 256) -> None:
    """Assign ``out[...] = values.T`` as integers, in blocks of ``rows`` source rows.

    A column of 256 rows occupies 256 cache lines, which fit into the L1 cache.
    """
    out, values = as_unsigned(out), as_unsigned(values)
    for row in range(0, len(values), rows):
        out[:, row : row + rows] = values[row : row + rows].T


def transpose_matrices(out: np.ndarray, values: np.ndarray) -> None:
    """Copy ``values`` to ``out`` with the last two dimensions swapped."""
    for index in np.ndindex(values.shape[:-2]):
        transpose_into(out[index], values[index])


def as_unsigned(values: np.ndarray) -> np.ndarray:
    """Return a view of an array as unsigned integers of the same size."""
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))


def count_nonfinite(values: np.ndarray) -> int:
    """Count the NaN and infinite values of a float array. Returns 0 for integers.

    A value is NaN or infinite if its bits without the sign bit, as an integer, are >= the bits of infinity. Two maxima
    over the bits, which need no temporary memory, show whether the array has any such values.
    """
    if values.size == 0 or values.dtype.kind in "iu":
        return 0
    unsigned = as_unsigned(values)
    infinity, sign = (int(as_unsigned(np.asarray(x, values.dtype))) for x in (np.inf, -0.0))
    if unsigned.max() < sign + infinity and values.view(np.dtype(f"i{values.dtype.itemsize}")).max() < infinity:
        return 0
    return int(np.count_nonzero((unsigned & (sign - 1)) >= infinity))
