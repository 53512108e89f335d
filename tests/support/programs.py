"""Drops compiled programs of a process that runs many tests."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST = 12_000  # memory maps; Linux allows 65,530 per process (vm.max_map_count)


def drop_programs() -> None:
    """Empties JAX's caches if the process has many memory maps. XLA:CPU takes some six per program, and its compiler
    crashes at the system's limit."""
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST:
        import jax

        clear_program_cache()
        jax.clear_caches()
        gc.collect()


def clear_program_cache() -> None:
    """Clears the cache of `shared_program`, so that the next call with an equal key traces again."""
    from nnxmoe.runtime.programs import _program

    _program.cache_clear()


def then_drop(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function, then drops programs."""
    try:
        return function(*arguments)
    finally:
        drop_programs()
