"""What loading needs of the host: a few threads, and arrays in memory that are made, checked and transposed fast."""

import contextlib
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_LINE = 64  # bytes of a cache line, and the alignment JAX asks for
_BLOCK = 32 << 20
_MOST_THREADS = 8  # more do not read faster from one memory, and each holds buffers


@contextlib.contextmanager
def few_threads() -> Iterator[ThreadPoolExecutor]:
    """A thread for each core, 8 at most. On the way out, also after an error or Ctrl-C, what has not begun is dropped
    and what runs is waited for."""
    pool = ThreadPoolExecutor(min(_cores(), _MOST_THREADS), thread_name_prefix="nnxmoe-load")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Scratch(threading.local):
    """Buffers that a thread uses again and again: fresh memory costs as much time as reading into it."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def empty(self, use: str, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        """An uninitialised array; the next one for the same use takes its place."""
        size = math.prod(shape) * dtype.itemsize
        if size > self._buffers.get(use, np.empty(0, np.uint8)).size:
            self._buffers[use] = aligned_empty((size,), np.dtype(np.uint8))
        return self._buffers[use][:size].view(dtype).reshape(shape)

    def apart(self, use: str, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        """The same, its rows an odd number of cache lines apart: the rows of a power of two would share a few places
        of the cache, and a column would not stay there."""
        lines = -(-shape[1] * dtype.itemsize // _LINE) | 1
        return self.empty(use, (shape[0], lines * _LINE // dtype.itemsize), dtype)[:, : shape[1]]


class Blocks:
    """Makes uninitialised aligned arrays, small ones side by side in one block of memory, which goes when all of them
    have gone: the system hands out large pages for it, where small ones would take as long as the reading."""

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
    """``out[...] = values``, cast; overflow becomes infinity in silence, which is counted elsewhere."""
    if out.dtype == values.dtype:
        out, values = bits(out), bits(values)  # plain integers copy faster than bfloat16
    with np.errstate(over="ignore"):
        out[...] = values


def transpose_into(out: np.ndarray, values: np.ndarray, rows: int = 256) -> None:
    """``out[...] = values.T`` in ints, some source rows at a time: as many lines as the first cache holds."""
    out, values = bits(out), bits(values)
    for row in range(0, len(values), rows):
        out[:, row : row + rows] = values[row : row + rows].T


def bits(values: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers."""
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))


def count_nonfinite(values: np.ndarray) -> int:
    """How many of an array's floats are NaN or infinite.

    Two maxima over the bits, which take no memory and little time, find out whether there are any: with the sign bit
    away, these are the floats that as integers reach infinity.
    """
    if values.size == 0:
        return 0
    unsigned = bits(values)
    infinity, sign = (int(bits(np.asarray(x, values.dtype))) for x in (np.inf, -0.0))
    if unsigned.max() < sign + infinity and values.view(np.dtype(f"i{values.dtype.itemsize}")).max() < infinity:
        return 0
    return int(np.count_nonzero((unsigned & (sign - 1)) >= infinity))
