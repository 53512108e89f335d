"""Host-side tools of loading: a thread pool, and fast allocation, checks and transposition of NumPy arrays."""

import contextlib
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_LINE = 64  # bytes of a cache line, and the alignment JAX asks for
_BLOCK = 32 << 20
_MOST_THREADS = 8  # more threads do not read faster from one memory, and each holds buffers


@contextlib.contextmanager
def reader_threads() -> Iterator[ThreadPoolExecutor]:
    """A pool with one thread per core, at most 8. On exit, also after an error or Ctrl-C, pending work is cancelled and
    running work is waited for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(min(cores, _MOST_THREADS), thread_name_prefix="nnxmoe-load")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class ScratchBuffers(threading.local):
    """Buffers that a thread reuses: touching fresh memory takes as long as reading into it."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def empty(self, use: str, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        """An uninitialised array, valid until the next call for the same use."""
        size = math.prod(shape) * dtype.itemsize
        if size > self._buffers.get(use, np.empty(0, np.uint8)).size:
            self._buffers[use] = aligned_empty((size,), np.dtype(np.uint8))
        return self._buffers[use][:size].view(dtype).reshape(shape)

    def padded(self, use: str, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        """Like `empty`, with rows an odd number of cache lines apart: rows at a distance of a power of two map to the
        same few cache sets, so that a column would not stay in the cache."""
        lines = -(-shape[1] * dtype.itemsize // _LINE) | 1
        return self.empty(use, (shape[0], lines * _LINE // dtype.itemsize), dtype)[:, : shape[1]]


class BlockAllocator:
    """Allocates uninitialised aligned arrays, small ones side by side in one block that is freed with the last of them.

    The system gives large pages to large blocks; mapping small pages takes as long as reading the data.
    """

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Like `aligned_empty`."""
        size = math.prod(shape) * dtype.itemsize
        if size > _BLOCK // 4:
            return aligned_empty(shape, dtype)
        if size > self._free.size:
            self._free = aligned_empty((_BLOCK,), np.dtype(np.uint8))
        out, self._free = self._free[:size], self._free[-(-size // _LINE) * _LINE :]
        return out.view(dtype).reshape(shape)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that JAX can take over on CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + size].view(dtype).reshape(shape)


def copy_into(out: np.ndarray, values: np.ndarray) -> None:
    """``out[...] = values``, cast. Overflow becomes infinity without a warning: `count_nonfinite` reports it."""
    if out.dtype == values.dtype:
        out, values = as_unsigned(out), as_unsigned(values)  # plain integers copy faster than bfloat16
    with np.errstate(over="ignore"):
        out[...] = values


def transpose_into(out: np.ndarray, values: np.ndarray, rows: int = 256) -> None:
    """``out[...] = values.T`` as integers, ``rows`` source rows at a time: as many lines as the L1 cache holds."""
    out, values = as_unsigned(out), as_unsigned(values)
    for row in range(0, len(values), rows):
        out[:, row : row + rows] = values[row : row + rows].T


def transpose_matrices(out: np.ndarray, values: np.ndarray) -> None:
    """``out[...] = values`` with the last two dimensions exchanged."""
    for index in np.ndindex(values.shape[:-2]):
        transpose_into(out[index], values[index])


def as_unsigned(values: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers."""
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))


def count_nonfinite(values: np.ndarray) -> int:
    """Number of NaN and infinite values of a float array; 0 for integers.

    Without the sign bit, these are the values whose bits, as an integer, reach those of infinity. Two maxima over the
    bits, which need no memory, decide whether counting is necessary at all.
    """
    if values.size == 0 or values.dtype.kind in "iu":
        return 0
    unsigned = as_unsigned(values)
    infinity, sign = (int(as_unsigned(np.asarray(x, values.dtype))) for x in (np.inf, -0.0))
    if unsigned.max() < sign + infinity and values.view(np.dtype(f"i{values.dtype.itemsize}")).max() < infinity:
        return 0
    return int(np.count_nonzero((unsigned & (sign - 1)) >= infinity))
