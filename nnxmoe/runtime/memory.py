"""Memory available for weights and caches, to reject what does not fit before it starts."""

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
_OF_PROCESS = Path("/proc/self/cgroup")
# For cgroup versions 2 and 1: the memory controller's folder, its limit and usage files, and a pattern for the line of
# _OF_PROCESS that names the process's group.
_VERSIONS = (
    ("", "memory.max", "memory.current", re.compile(rb"^0::(.*)$", re.MULTILINE)),
    (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        re.compile(rb"^\d+:(?:[^:\n]*,)?memory(?:,[^:\n]*)?:(.*)$", re.MULTILINE),
    ),
)


def memory_bytes() -> tuple[float, str]:
    """Return the bytes for weights and caches of this process, and the name of the limit.

    The limit is the memory of the process's accelerators. Without accelerators it is the free memory of
    the machine, within the limits of the process and its container. The environment variable
    ``NNXMOE_MEMORY`` overrides it with a size such as ``48GB``, or with ``off`` for infinity. The size
    is unknown and thus infinite on systems without ``sysconf`` (Windows).
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
    if free := re.search(rb"^MemAvailable:\s*(\d+) kB", _read(Path("/proc/meminfo")) or b"", re.MULTILINE):
        rooms["this machine's free memory"] = int(free[1]) * 1024.0
    rooms["the free memory of this container"] = _container_room()
    rooms["the process's limit (ulimit -v)"] = _address_space()
    where = min(rooms, key=lambda name: rooms[name])
    return rooms[where], where


def _container_room() -> float:
    """Return the least free memory of the process's control groups, from its direct group to the root."""
    groups, room = _read(_OF_PROCESS) or b"", math.inf
    for controller, limit, usage, line in _VERSIONS:
        root, match = _CGROUP / controller, line.search(groups)
        path = Path(os.fsdecode(match[1]).strip().lstrip("/")) if match else Path()
        if ".." in path.parts:  # the group is outside the container's view
            path = Path()
        # In a container, the path may be the host's and not exist, since the container's group is mounted as root.
        for group in (path, *path.parents):
            room = min(room, _group_room(root / group, limit, usage))
    return room


def _group_room(group: Path, limit: str, usage: str) -> float:
    """Return the free bytes of a control group, or infinity if it has no limit.

    Cached file pages count as free, because the kernel drops them when memory is short. Unknown usage
    counts as 0, so that the limit still applies.
    """
    text = _read(group / limit)
    if text is None or text.strip() == b"max":
        return math.inf
    if (most := _number(text)) is None:
        logger.warning("%s is %s, not a number of bytes: this limit is not known", group / limit, short(text))
        return math.inf
    pages = dict[bytes, float]()
    for words in map(bytes.split, (_read(group / "memory.stat") or b"").splitlines()):
        if len(words) == 2 and (value := _number(words[1])) is not None:
            pages[words[0]] = value
    # In version 1 only fields with the prefix total_ include child groups.
    files = sum(pages.get(b"total_" + name, pages.get(name, 0.0)) for name in (b"active_file", b"inactive_file"))
    used = _number(_read(group / usage) or b"") or 0.0
    return max(0.0, most - max(0.0, used - files))


def _read(file: Path) -> bytes | None:
    """Read a file. Returns None if it is missing, or, with a warning, if it is not readable."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        logger.warning("%s: %s: memory limits may be lower than assumed", file, error.strerror or error)
        return None


def _number(text: bytes) -> float | None:
    """Parse a number of bytes. Returns None for other text, and infinity beyond a float's range."""
    return float(text) if text.strip().isdigit() else None


def _given(text: str) -> float:
    if text.lower() == "off":
        return math.inf
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT])B?", text.strip().upper())
    if match is None:
        raise ValueError(f"{VARIABLE}={short(text)}: give a size such as 48GB, or off")
    return float(match[1]) * 1000 ** (" KMGT".index(match[2]))


def _address_space() -> float:
    """Return the bytes left under the limit on this process's virtual memory."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            return float(limit - pages * os.sysconf("SC_PAGE_SIZE"))
    return math.inf


def local_bytes(arrays: Iterable[tuple[Any, Any, Any]]) -> int:
    """Count this process's bytes of arrays with these shapes, dtypes and shardings, including replicas."""
    total = 0
    for shape, dtype, place in arrays:
        held = 1 if place is None else len(place.addressable_devices)
        total += math.prod(shape if place is None else place.shard_shape(shape)) * np.dtype(dtype).itemsize * held
    return total


def refuse_beyond_memory(need: float, what: str, remedy: str) -> None:
    """Raise ValueError if ``need`` bytes do not fit, and warn above 90 % of the memory.

    Args:
        need: Bytes.
        what: Start of the message, such as "training takes".
        remedy: Advice in the message, in addition to the override by ``NNXMOE_MEMORY``.
    """
    have, where = memory_bytes()
    if need > have:
        raise ValueError(
            f"{what} {bytes_text(need)}, {where} is {bytes_text(have)}: {remedy}, or set {VARIABLE}=off to try anyway"
        )
    if need > 0.9 * have:
        logger.warning("%s %s of the %s of %s", what, bytes_text(need), bytes_text(have), where)


def give_back() -> None:
    """Return freed memory to the system. glibc retains hundreds of MB that other threads freed.

    No-op without glibc. ``CDLL(None)`` raises TypeError on Windows.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
