"""Memory available for weights and caches."""

import contextlib
import ctypes
import math
import os
from pathlib import Path

import jax


def memory_bytes() -> tuple[float, str]:
    """Bytes for weights and caches, and a description of whose: all accelerators, else this machine's free memory.

    Infinite on systems without ``sysconf`` (Windows), where the size is not known.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if device.platform != "cpu" and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) * jax.device_count(), f"{jax.device_count()} x {device.device_kind}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024, "this machine's free memory"
    if not hasattr(os, "sysconf"):
        return math.inf, "the size of this machine's memory is unknown"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine's memory"


def give_back() -> None:
    """Return freed memory to the system: glibc keeps buffers freed by other threads, hundreds of MB.

    No-op where the C library is not glibc: ``CDLL(None)`` is a TypeError on Windows.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
