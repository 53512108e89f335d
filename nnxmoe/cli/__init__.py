"""The command ``nnxmoe``: its parser, its commands, and how it ends."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from nnxmoe.runtime import interrupts, large_pages


def command() -> NoReturn:
    """Run the process's command line and end the process with its exit code."""
    large_pages.restart()
    interrupts.end_on_interrupt()  # before the imports of `main`, which take more than a second
    try:
        status = main()
    except KeyboardInterrupt:  # during the imports, or a second one while the first was handled
        interrupts.interrupted()
    if status in (interrupts.INTERRUPTED, interrupts.PIPE_CLOSED):
        interrupts.leave(status)
    sys.exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    from nnxmoe.cli import parser

    return parser.main(arguments)
