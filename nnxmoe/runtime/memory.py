"""Memory available for weights and caches, to reject arrays that do not fit before they are allocated."""

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
    """Return the bytes that this process can use for weights and caches, and the name of the limit.

    The limit is the memory of the process's accelerators. Without accelerators it is the free memory of
    the machine, within the limits of the process and its container. The environment variable
    ``NNXMOE_MEMORY`` overrides it with a size such as ``48GB``, or with ``off`` for infinity. On
    systems without ``sysconf`` (Windows), the memory is unknown and the result is infinity.
    """
    if override := os.environ.get(VARIABLE):
        return _given(override), f"{VARIABLE}={override}"
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if device.platform != "cpu" and "bytes_limit" in stats:
        count = jax.local_device_count()
        return int(stats["bytes_limit"]) * count, f"{count} x {device.device_kind}"
    if not hasattr(os, "sysconf"):
        return math.inf, "the size of this machine's memory is unknown"
    limits = {"this machine's memory": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))}
    if free := re.search(rb"^MemAvailable:\s*(\d+) kB", _read(Path("/proc/meminfo")) or b"", re.MULTILINE):
        limits["this machine's free memory"] = int(free[1]) * 1024.0
    limits["the free memory of this container"] = _container_room()
    limits["the process's limit (ulimit -v)"] = _address_space()
    limit_name = min(limits, key=lambda name: limits[name])
    return limits[limit_name], limit_name


def _container_room() -> float:
    """Return the minimum free memory of the process's control group and all its parent groups."""
    groups, room = _read(_OF_PROCESS) or b"", math.inf
    for controller, limit, usage, line in _VERSIONS:
        root, match = _CGROUP / controller, line.search(groups)
        path = Path(os.fsdecode(match[1]).strip().lstrip("/")) if match else Path()
        if ".." in path.parts:  # the group is outside the container's view
            path = Path()
        # In a container, the path may be a host path that does not exist. The group is then mounted at the root.
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
    if (limit_bytes := _number(text)) is None:
        logger.warning("%s is %s, not a number of bytes: ignoring this limit", group / limit, short(text))
        return math.inf
    pages = dict[bytes, float]()
    for words in map(bytes.split, (_read(group / "memory.stat") or b"").splitlines()):
        if len(words) == 2 and (value := _number(words[1])) is not None:
            pages[words[0]] = value
    # In version 1 only fields with the prefix total_ include child groups.
    cached_bytes = sum(pages.get(b"total_" + name, pages.get(name, 0.0)) for name in (b"active_file", b"inactive_file"))
    usage_bytes = _number(_read(group / usage) or b"") or 0.0
    return max(0.0, limit_bytes - max(0.0, usage_bytes - cached_bytes))


def _read(file: Path) -> bytes | None:
    """Read a file. Returns None if it is missing. Warns and returns None if it is not readable."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError for a path with a null character
        reason = getattr(error, "strerror", None) or error
        logger.warning("%s: %s: memory limits may be lower than assumed", file, reason)
        return None


def _number(text: bytes) -> float | None:
    """Parse a number of bytes. Returns None for other text, and infinity beyond a float's range."""
    return float(text) if text.strip().isdigit() else None


def _given(text: str) -> float:
    if text.strip().lower() == "off":
        return math.inf
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT])(I?)B?", text.strip().upper())
    if match is None:
        raise ValueError(f"{VARIABLE}={short(text)}: set it to a size such as 48GB, or to off")
    return float(match[1]) * (1024 if match[3] else 1000) ** (" KMGT".index(match[2]))


def _address_space() -> float:
    """Return the bytes left under the limit on this process's virtual memory."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            pages = re.match(rb"\d+", _read(Path("/proc/self/statm")) or b"0")
            return max(0.0, limit - int(pages[0] if pages else 0) * os.sysconf("SC_PAGE_SIZE"))
    return math.inf


def local_bytes(arrays: Iterable[tuple[Any, Any, Any]]) -> int:
    """Return the bytes of this process's shards, including replicas, of arrays given as (shape, dtype, sharding)."""
    total = 0
    for shape, dtype, sharding in arrays:
        num_devices = 1 if sharding is None else len(sharding.addressable_devices)
        total += (
            math.prod(shape if sharding is None else sharding.shard_shape(shape))
            * np.dtype(dtype).itemsize
            * num_devices
        )
    return total


def refuse_beyond_memory(need: float, what: str, remedy: str) -> None:
    """Raise ValueError if ``need`` bytes do not fit, and warn above 90 % of the memory.

    Args:
        need: Required bytes.
        what: Start of the message, such as "training takes".
        remedy: Advice in the message, followed by the option to override the limit with ``NNXMOE_MEMORY``.
    """
    available, limit_name = memory_bytes()
    if need > available:
        raise ValueError(
            f"{what} {bytes_text(need)}, {limit_name} is {bytes_text(available)}: {remedy}, or set "
            f"{VARIABLE}=off to try anyway"
        )
    if need > 0.9 * available:
        logger.warning("%s %s of the %s of %s", what, bytes_text(need), bytes_text(available), limit_name)


def give_back() -> None:
    """Return freed memory to the system. By default, glibc retains hundreds of MB freed by other threads.

    No-op without glibc. ``CDLL(None)`` raises TypeError on Windows.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
