"""Cache of compiled programs, and log messages about compilation."""

import contextlib
import dataclasses
import functools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from nnxmoe.runtime.progress import say

# XLA:CPU starts independent collectives in any order in programs with several devices. Devices can then deadlock, most
# often in programs from the compilation cache (jax 0.10.2, 0.12.0). This scheduler fixes the order.
# ``xla_cpu_enable_concurrency_optimized_scheduler=False`` has no effect as an option of a single program.
_IN_ORDER: Any = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


class JitProgram:
    """``jax.jit(function, **options)``, compiled once per combination of argument shapes, dtypes and shardings.

    Args:
        name: Shown in a log message when XLA compiles the program. If None, no message is logged.

    Attributes:
        jitted: The function returned by ``jax.jit``.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None, **options: Any):
        self.jitted, self._name, self._options = jax.jit(function, **options), name, options
        self._known: dict[Any, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        return self.prepare(*arguments)(*arguments)

    def prepare(self, *arguments: Any) -> Any:
        """Return the program compiled for these shapes, dtypes and shardings. Each combination is compiled once."""
        shapes = shapes_of(arguments)
        if shapes not in self._known:
            leaves = jax.tree.leaves((arguments, self._options))
            shardings = [
                sharding for leaf in leaves if isinstance(sharding := getattr(leaf, "sharding", leaf), Sharding)
            ]
            device_sets = [sharding.device_set for sharding in shardings if len(sharding.device_set) > 1]
            fix_order = any(device.platform == "cpu" for devices in device_sets for device in devices)
            lowered = self.jitted.lower(*arguments)
            with contextlib.nullcontext() if self._name is None else announced(f"compiling {self._name}"):
                self._known[shapes] = lowered.compile(_IN_ORDER if fix_order else None)
        return self._known[shapes]


# JAX settings that do not affect programs. A program is reused only if all other settings are equal.
_HARMLESS = re.compile("log|cache|traceback|dump|explain|timeout|transfer_guard|pprint|profil")


def shared_program(key: Any, function: Callable[..., Any], name: str | None = None, **options: Any) -> JitProgram:
    """Return a `JitProgram` that is shared by calls with equal keys and equal ``out_shardings``.

    ``function`` must compute the same result for equal keys. Pass arrays as arguments, because the cache keeps
    arrays that ``function`` closes over. If the key is None, the function creates a program and does not cache it.
    """
    if key is None:
        return JitProgram(function, name, **options)
    leaves, tree = jax.tree.flatten(options.get("out_shardings"))
    return _program(_Request((key, name, tree, tuple(leaves), _settings()), function, name, options))


def _settings() -> tuple[tuple[str, Any], ...]:
    """Return the current JAX settings that may affect a program.

    Attributes of `jax.config` include the effect of context managers such as
    `jax.default_matmul_precision`. Settings without an attribute are read from `jax.config.values`.
    """
    values = dict(jax.config.values)
    current = [(name, getattr(jax.config, name, value)) for name, value in sorted(values.items())]
    return tuple((name, value) for name, value in current if not _HARMLESS.search(name))


@dataclasses.dataclass(frozen=True)
class _Request:
    key: Any
    function: Callable[..., Any] = dataclasses.field(compare=False)
    name: str | None = dataclasses.field(compare=False)
    options: dict[str, Any] = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=64)
def _program(request: _Request) -> JitProgram:
    return JitProgram(request.function, request.name, **request.options)


@contextlib.contextmanager
def announced(message: str) -> Iterator[list[str]]:
    """Log ``message`` when XLA starts to compile in this block. Yields a list of the logged messages.

    Programs read from the compilation cache are not reported. JAX reports a cache miss only in a DEBUG
    message of its logger, so this level is enabled in this block. Without a compilation cache, the
    message is logged immediately.
    """
    settings: Any = jax.config
    if not settings.jax_enable_compilation_cache or settings.jax_compilation_cache_dir is None:
        say("%s", message)
        yield [message]
        return
    logged, thread, logger = [], threading.get_ident(), logging.getLogger("jax._src.compiler")

    def on_record(record: logging.LogRecord) -> bool:
        if record.thread == thread and "CACHE MISS" in str(record.msg) and not logged:
            logged.append(message)
            say("%s", message)
        return record.levelno >= effective_level

    effective_level = logger.getEffectiveLevel()
    previous_level = logger.level
    logger.addFilter(on_record)
    logger.setLevel(logging.DEBUG)
    try:
        yield logged
    finally:
        logger.setLevel(previous_level)
        logger.removeFilter(on_record)


def shapes_of(arguments: Any) -> Any:
    """Return a key of a pytree: its structure, and the shapes, dtypes and shardings of its arrays."""
    leaves, tree = jax.tree.flatten(arguments)
    return tree, tuple((np.shape(a), jax.dtypes.result_type(a), getattr(a, "sharding", None)) for a in leaves)
