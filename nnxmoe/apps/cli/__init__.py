"""The command ``nnxmoe``: runs a command line and ends the process."""

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

INTERRUPTED = 130  # 128 + SIGINT
PIPE_CLOSED = 141  # 128 + SIGPIPE: the status of other programs in `nnxmoe … | head`

# References until the process ends. The frames of these exceptions reference objects that XLA's threads still
# compile. Freeing them is a segmentation fault (jax 0.10.2, in about a third of Ctrl-C within 0.2 s after a
# compilation began).
_interruptions: list[KeyboardInterrupt] = []


def command() -> NoReturn:
    """Run the process's command line and end the process with its exit code."""
    try:
        status = main()
    except KeyboardInterrupt:  # a second Ctrl-C while `main` reports the first
        print("nnxmoe: interrupted", file=sys.stderr)
        status = INTERRUPTED
    if status not in (INTERRUPTED, PIPE_CLOSED):
        sys.exit(status)
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe or file
            output.flush()
    # Python's exit destroys XLA's objects while threads still use them: a segmentation fault (jax 0.10.2).
    os._exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    Args:
        arguments: The words after ``nnxmoe``. Defaults to the arguments of the process.

    Returns:
        0: success. 1: failure, explained in one line on stderr. 130: Ctrl-C. 141: closed pipe.

    Raises:
        SystemExit: With code 2 for a wrong command line.
    """
    try:
        from nnxmoe.apps.cli import parser  # imports JAX: Ctrl-C meanwhile is handled below

        return parser.run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt as interruption:
        _interruptions.append(interruption)
        line = "\n" if sys.stderr.isatty() else ""  # ends an incomplete line
        print(f"{line}nnxmoe: {str(interruption) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has exited, e.g. `| head`
        return PIPE_CLOSED
