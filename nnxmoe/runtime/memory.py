"""Memory available for weights and caches, and refusing what does not fit before it is begun."""

import contextlib
import ctypes
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nnxmoe.config.printable import bytes_text, short
from nnxmoe.runtime.progress import logger

VARIABLE = "NNXMOE_MEMORY"
_CGROUP = Path("/sys/fs/cgroup")
# Limit, usage and statistics of memory, in versions 2 and 1; in version 1 only the totals include child groups.
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", ""),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
)


def memory_bytes() -> tuple[float, str]:
    """Bytes for the weights and caches of this process, and a description of whose: its accelerators, else the free
    memory of this machine, within the limits of the process and of its container.

    The environment variable ``NNXMOE_MEMORY`` sets it, such as ``48GB``, or with ``off`` to infinity. Infinite on
    systems without ``sysconf`` (Windows), where the size is not known.
    """
    if given := os.environ.get(VARIABLE):
        return _given(given), f"{VARIABLE}={given}"
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if device.platform != "cpu" and "bytes_limit" in stats:
        count = jax.local_device_count()
        return int(stats["bytes_limit"]) * count, f"{count} x {device.device_kind}"
    if not hasattr(os, "sysconf"):
        return math.inf, "the size of this machine's memory is unknown"
    rooms = {"this machine's memory": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))}
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                rooms["this machine's free memory"] = int(line.split()[1]) * 1024.0
    for limit, used, stat, prefix in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the limit is "max"
            room = int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text())
            held = dict(line.split() for line in (_CGROUP / stat).read_text().splitlines())
            # The kernel drops pages of files when memory is short, so they are free.
            room += sum(int(held[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
            rooms["the free memory of this container"] = float(room)
    rooms["the process's limit (ulimit -v)"] = _address_space()
    where = min(rooms, key=lambda name: rooms[name])
    return rooms[where], where


def _given(text: str) -> float:
    if text.lower() == "off":
        return math.inf
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT])B?", text.strip().upper())
    if match is None:
        raise ValueError(f"{VARIABLE}={short(text)}: give a size such as 48GB, or off")
    return float(match[1]) * 1000 ** (" KMGT".index(match[2]))


def _address_space() -> float:
    """Bytes left under the limit on this process's virtual memory."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            return float(limit - pages * os.sysconf("SC_PAGE_SIZE"))
    return math.inf


def local_bytes(arrays: Iterable[tuple[Any, Any, Any]]) -> int:
    """Bytes that this process holds of arrays of these shapes, dtypes and shardings, copies on its devices counted."""
    total = 0
    for shape, dtype, place in arrays:
        held = 1 if place is None else len(place.addressable_devices)
        total += math.prod(shape if place is None else place.shard_shape(shape)) * np.dtype(dtype).itemsize * held
    return total


def refuse_beyond_memory(need: float, what: str, remedy: str) -> None:
    """Raise ValueError if ``need`` bytes do not fit. ``remedy``: what to do besides the override."""
    have, where = memory_bytes()
    if need > have:
        raise ValueError(
            f"{what} {bytes_text(need)}, {where} is {bytes_text(have)}: {remedy}, or set {VARIABLE}=off to try anyway"
        )
    if need > 0.9 * have:
        logger.warning("%s %s of the %s of %s", what, bytes_text(need), bytes_text(have), where)


def give_back() -> None:
    """Return freed memory to the system: glibc keeps buffers freed by other threads, hundreds of MB.

    No-op where the C library is not glibc: ``CDLL(None)`` is a TypeError on Windows.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
