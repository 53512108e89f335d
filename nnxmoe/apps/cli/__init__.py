"""Entry point of the ``nnxmoe`` command."""

import _thread
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

INTERRUPTED = 130  # 128 + SIGINT
PIPE_CLOSED = 141  # 128 + SIGPIPE: the exit status of other programs in `program … | head`

# These exceptions stay referenced until the process exits. Their frames refer to objects that XLA threads are still
# compiling, and freeing those objects causes a segmentation fault (jax 0.10.2, about a third of the time if Ctrl-C
# comes within 0.2 s of the start of a compilation).
_interruptions: list[KeyboardInterrupt] = []


def command() -> NoReturn:
    """Run the command line of this process and exit with the command's exit code."""
    sys.unraisablehook = functools.partial(_repeat_interrupt, sys.unraisablehook)
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
    # Skip the interpreter's shutdown. It destroys XLA objects that threads still use, which causes a segmentation
    # fault (jax 0.10.2).
    os._exit(status)


def _repeat_interrupt(hook: Callable[[Any], Any], unraisable: Any) -> None:
    """Repeat a Ctrl-C that Python ignored. Pass other ignored exceptions to ``hook``.

    Python ignores exceptions in ``gc.callbacks``, and JAX registers one of them. Without this function, 8 of 31
    interrupts during the imports were lost (jax 0.10.2).
    """
    if unraisable.exc_type is not KeyboardInterrupt:
        hook(unraisable)
        return
    with contextlib.suppress(RuntimeError):  # during the interpreter's shutdown
        threading.Timer(0.01, _thread.interrupt_main).start()  # 10 ms later, when the callback has usually returned


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    Args:
        arguments: Arguments after ``nnxmoe``. Defaults to ``sys.argv[1:]``.

    Returns:
        0 on success, 1 after an error (reported in one line on stderr), 130 after Ctrl-C, 141 if the reader
        of the output closed the pipe.

    Raises:
        SystemExit: With code 2 if the command line is invalid.
    """
    try:
        from nnxmoe.apps.cli import parser  # imports JAX, and Ctrl-C during the import is handled below

        return parser.run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt as interruption:
        _interruptions.append(interruption)
        line = "\n" if sys.stderr.isatty() else ""  # ends a partially written line
        print(f"{line}nnxmoe: {str(interruption) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has exited, e.g. `| head`
        return PIPE_CLOSED
