"""How much memory there is for weights and caches."""

import contextlib
import ctypes
import os
from pathlib import Path

import jax


def memory_bytes() -> tuple[int, str]:
    """Memory for weights and caches: of the first accelerator, else what this machine has free; and its name."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if device.platform != "cpu" and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) * jax.device_count(), f"{jax.device_count()} x {device.device_kind}"
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024, "this machine's free memory"
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine's memory"


def give_back() -> None:
    """Return freed memory to the system: glibc keeps what other threads have freed, hundreds of MB of buffers."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
