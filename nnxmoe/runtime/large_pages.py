"""Large pages for the buffers of XLA:CPU.

XLA takes the buffers of each call from the C library, which maps large ones anew and returns them afterwards: the
system clears every page of 4 kB at its first use. With pages of 2 MB a training step takes 0.8 to 0.9 of the time
(`tests/benchmarks/README.md`). glibc decides on them when a process starts, by the environment variable
``GLIBC_TUNABLES`` (glibc 2.35 and later).
"""

import os
import sys
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def setting() -> dict[str, str]:
    """The environment variable for a new process; empty where it has no effect or ``GLIBC_TUNABLES`` is set already."""
    try:
        on_request = "[madvise]" in _PAGES.read_text()  # neither always nor never
    except OSError:  # not Linux
        return {}
    return {VARIABLE: "glibc.malloc.hugetlb=1"} if on_request and VARIABLE not in os.environ else {}


def restart() -> None:
    """Start the program of this process again, in the same process, with the `setting`; nothing if that is empty.

    For the beginning of a program: what was computed or read from stdin is lost. A program that is not a file
    (``python -c``, a script on stdin) is not started again.
    """
    if (more := setting()) and sys.executable and Path(sys.argv[0]).is_file():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | more)
