"""Ending a program at once on Ctrl-C or a closed pipe, without Python's regular exit.

XLA compiles and computes in C++, sometimes for minutes. Python runs its own handler of Ctrl-C only afterwards, and its
regular exit then destroys XLA's objects under threads that still use them: a segmentation fault (seen with jax 0.10.2,
also in programs without nnxmoe). Both problems are absent when the process ends with ``os._exit``.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PIPE_CLOSED = 141  # 128 + SIGPIPE: the status of other programs in `nnxmoe … | head`
PATIENCE = 2.0  # seconds that Python has to raise KeyboardInterrupt: it cannot while C++ code runs
_FLUSH = 2.0  # seconds to write buffered output, whose reader may be stuck


def leave(status: int) -> NoReturn:
    """End the process with this status: flush the output and the log handlers, and tear nothing else down."""
    late = threading.Timer(_FLUSH, os._exit, [status])
    late.daemon = True
    late.start()
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed pipe, a closed file, no file
            output.flush()
    logging.shutdown()
    os._exit(status)


def end_on_interrupt() -> None:
    """Make Ctrl-C end the process with status 130 also where no KeyboardInterrupt can reach the program.

    Python raises KeyboardInterrupt as usual, for cleaning up or for stopping an answer. The process ends at once if
    that has not happened after ``PATIENCE`` seconds, or if the exception is lost in a destructor or callback. No-op if
    SIGINT is ignored or handled by someone else.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    raised = threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        raised.set()
        signal.default_int_handler(number, frame)

    def watch() -> None:
        while signal.SIGINT in reader.recv(1):
            if not raised.wait(PATIENCE):
                interrupted()
            raised.clear()

    show_unraisable = sys.unraisablehook

    def unraisable(lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            interrupted()
        show_unraisable(lost)

    sys.unraisablehook = unraisable
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.signal(signal.SIGINT, handler)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)  # the C handler writes the signal's number there
    threading.Thread(target=watch, name="nnxmoe interrupts", daemon=True).start()


def interrupted() -> NoReturn:
    """Say so, and end the process with status 130."""
    with contextlib.suppress(OSError, ValueError):
        print("nnxmoe: interrupted", file=sys.stderr)
    leave(INTERRUPTED)
