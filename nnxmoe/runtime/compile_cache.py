"""JAX's persistent compilation cache: later processes read compiled programs from a folder."""

import os
import time
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_integer, path_text
from nnxmoe.runtime.progress import say

VARIABLE = "NNXMOE_COMPILE_CACHE"
OFF = ("", "0", "off", "no", "false")
MAX_BYTES = 2 * 2**30
_UNFINISHED = 60.0  # seconds after which an entry without a time stamp counts as abandoned


def compile_cache(folder: str | os.PathLike[str] | None = None, max_bytes: int = MAX_BYTES) -> Path | None:
    """Cache compiled programs in a folder, so that the next process reads them instead of compiling.

    A program is reused only for the same shapes, the same versions of JAX and XLA, and the same kind of
    machine. The command line calls this function. If JAX's cache is already configured, such as by
    ``JAX_COMPILATION_CACHE_DIR``, it is not changed.

        nnxmoe.compile_cache()
        model = nnxmoe.from_pretrained("demo")

    Args:
        folder: Programs are stored in its subfolder ``nnxmoe/xla``. Other files are not touched.
            Defaults to the environment variable ``NNXMOE_COMPILE_CACHE``, else to the user's cache
            folder (``$XDG_CACHE_HOME``, else ``~/.cache``).
        max_bytes: Maximum size of the cache. The least recently used programs are deleted first.

    Returns:
        The folder that contains the programs, or None if the variable is ``off`` or the folder is not writable.
        If None, JAX's settings are unchanged.

    Raises:
        ValueError: If ``folder`` is not a path or ``max_bytes`` is not a positive integer.
    """
    if folder is not None:
        path_text(folder)
    if (limit := as_integer(max_bytes, 1, 2**63)) is None:
        raise ValueError(f"compile_cache(max_bytes={short(max_bytes)}): pass a positive number of bytes")
    if (configured := getattr(jax.config, "jax_compilation_cache_dir", None)) is not None:
        return Path(configured)
    if folder is None:
        folder = os.environ.get(VARIABLE)
        if folder is not None and folder.lower() in OFF:
            return None
    try:
        folder = folder or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        path = Path(folder).expanduser().absolute() / "nnxmoe" / "xla"
        is_new = not path.is_dir()
        path.mkdir(parents=True, exist_ok=True)
        for entry in path.glob("*-cache"):  # remove entries of killed writers: JAX writes the time stamp last
            stamp = entry.with_name(entry.name.removesuffix("-cache") + "-atime")
            if not stamp.exists() and time.time() - entry.stat().st_mtime > _UNFINISHED:
                entry.unlink(missing_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(f"{path} is not writable")
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        say("compiled programs are not cached: %s (set %s to a different folder, or to off)", error, VARIABLE)
        return None
    if is_new:
        say("caching compiled programs in %s (set %s=off to disable the cache)", path, VARIABLE)
    for name, value in {
        "jax_compilation_cache_dir": str(path),
        "jax_compilation_cache_max_size": limit,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()  # JAX reads the folder only once, at its first compilation
    return path
