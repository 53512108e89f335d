"""JAX's persistent compilation cache: programs compiled once are read from a folder by later processes."""

import os
import time
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from nnxmoe.config.printable import short
from nnxmoe.config.validate import path_text
from nnxmoe.runtime.progress import say

VARIABLE = "NNXMOE_COMPILE_CACHE"
OFF = ("", "0", "off", "no", "false")
MAX_BYTES = 2 * 2**30
_UNFINISHED = 60.0  # seconds after which an entry without its time stamp is taken for the rest of a killed process


def compile_cache(folder: str | os.PathLike[str] | None = None, max_bytes: int = MAX_BYTES) -> Path | None:
    """Keep compiled programs in a folder, so that the next process reads them instead of compiling again.

    The programs are in ``nnxmoe/xla`` within ``folder``, which defaults to the environment variable
    ``NNXMOE_COMPILE_CACHE``, else the user's cache folder (``$XDG_CACHE_HOME``, else ``~/.cache``). Beyond
    ``max_bytes`` those that were used least recently are deleted; nothing else in ``folder`` is touched. Returns the
    folder of the programs; None, and nothing changes, if the variable is ``off`` or the folder cannot be written.
    A cache that is already configured in JAX, such as by ``JAX_COMPILATION_CACHE_DIR``, is not changed. Raises
    ValueError for arguments that are not a path and a number of bytes.

    Programs depend on the shapes, the versions of jax and XLA, and the machine. The command line calls this.

        nnxmoe.compile_cache()
        model = nnxmoe.from_pretrained("demo")
    """
    if folder is not None:
        path_text(folder)
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        raise ValueError(f"compile_cache(max_bytes={short(max_bytes)}): give a positive number of bytes")
    if (given := getattr(jax.config, "jax_compilation_cache_dir", None)) is not None:
        return Path(given)
    if folder is None:
        folder = os.environ.get(VARIABLE)
        if folder is not None and folder.lower() in OFF:
            return None
    try:
        folder = folder or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        path = Path(folder).expanduser().absolute() / "nnxmoe" / "xla"
        new = not path.is_dir()
        path.mkdir(parents=True, exist_ok=True)
        for entry in path.glob("*-cache"):  # of a killed writer: JAX writes the time stamp last, and needs both
            stamp = entry.with_name(entry.name.removesuffix("-cache") + "-atime")
            if not stamp.exists() and time.time() - entry.stat().st_mtime > _UNFINISHED:
                entry.unlink(missing_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(f"{path} cannot be written to")
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        say("compiled programs are not kept: %s (%s=FOLDER: keep them elsewhere, or off)", error, VARIABLE)
        return None
    if new:
        say("compiled programs are kept in %s (%s=off: not)", path, VARIABLE)
    for name, value in {
        "jax_compilation_cache_dir": str(path),
        "jax_compilation_cache_max_size": max_bytes,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()  # JAX looks for a folder once, when it compiles first
    return path
