"""The command ``nnxmoe``: its parser, its commands, and how it ends."""

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from nnxmoe.apps.cli.exit_codes import INTERRUPTED, PIPE_CLOSED


def command() -> NoReturn:
    """Run the process's command line and end the process with its exit code."""
    try:
        status = main()
    except KeyboardInterrupt:  # during the imports, or a second one while the first was handled
        print("nnxmoe: interrupted", file=sys.stderr)
        status = INTERRUPTED
    if status not in (INTERRUPTED, PIPE_CLOSED):
        sys.exit(status)
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe or file
            output.flush()
    # Python's exit destroys XLA's objects under threads that still compute: a segmentation fault (jax 0.10.2).
    os._exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    from nnxmoe.apps.cli import parser

    return parser.main(arguments)
