"""Ctrl-C: ending a program at once, or stopping a training after its step.

XLA compiles and computes in C++, sometimes for minutes. Python runs its own handler of Ctrl-C only afterwards, and its
regular exit then destroys XLA's objects under threads that still use them: a segmentation fault (seen with jax 0.10.2,
also in programs without nnxmoe). Both problems are absent when the process ends with ``os._exit``.
"""

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PIPE_CLOSED = 141  # 128 + SIGPIPE: the status of other programs in `nnxmoe … | head`
PATIENCE = 1.0  # seconds that Python has to run its handler: it cannot while C++ code runs
_FLUSH = 2.0  # seconds to write buffered output, whose reader may be stuck
_POLL = 0.05  # seconds

_handled = threading.Event()  # set once Python's handler has run
_stop: "Stop | None" = None  # within `stopping`


def _farewell() -> str:
    return "interrupted"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a training; its text says what is saved and how to continue.

    ``fitted``: the model, metrics and state so far; None before the first step. A script that does not catch it ends
    with status 130 and the text, without a traceback.
    """

    def __init__(self, text: str, fitted: Any = None) -> None:
        super().__init__(text)
        self.fitted = fitted
        if not _interactive():
            _end_quietly(self)


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


def farewell(text: Callable[[], str]) -> None:
    """Set the function that returns what a program says when Ctrl-C ends it."""
    global _farewell
    _farewell = text


def say_farewell() -> None:
    """Print it to stderr; on a terminal, where there may be half a line, on a line of its own."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"{chr(10) if sys.stderr.isatty() else ''}nnxmoe: {_farewell()}", file=sys.stderr)


def interrupted() -> NoReturn:
    """Say so, and end the process with status 130."""
    say_farewell()
    leave(INTERRUPTED)


def end_on_interrupt() -> None:
    """Make Ctrl-C end the process with status 130 also where no KeyboardInterrupt can reach the program.

    Python raises KeyboardInterrupt as usual, for cleaning up or for stopping an answer. The process ends at once if
    that has not happened after ``PATIENCE`` seconds, at a second Ctrl-C, or if the exception is lost in a destructor or
    callback. No-op if SIGINT is ignored or handled by someone else.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    show_unraisable = sys.unraisablehook

    def unraisable(lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            interrupted()
        show_unraisable(lost)

    sys.unraisablehook = unraisable
    signal.signal(signal.SIGINT, _handle)
    _watch()


class Stop:
    """The object that `stopping` yields. Until ``defer`` is called, Ctrl-C raises Interrupted, or ends the process if
    Python cannot handle it; from then on the first one only sets ``asked``, and a second one does that."""

    def __init__(self) -> None:
        self.asked = False
        self.deferred = False

    def defer(self) -> None:
        """From now on there is something to save."""
        self.deferred = True

    @property
    def patience(self) -> float:
        """Seconds that Python has to handle Ctrl-C before the process is ended."""
        return math.inf if self.deferred and not self.asked else PATIENCE


@contextlib.contextmanager
def stopping() -> Iterator[Stop]:
    """Within the block Ctrl-C is handled as the `Stop` says. No-op outside of the main thread or if SIGINT is handled
    by someone else."""
    global _stop
    stop, before = Stop(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before not in (signal.default_int_handler, _handle):
        yield stop
        return
    _stop = stop
    signal.signal(signal.SIGINT, _handle)
    stop_watching = _watch() if before is signal.default_int_handler and not _interactive() else lambda: None
    try:
        yield stop
    finally:
        _stop = None
        stop_watching()
        signal.signal(signal.SIGINT, before)


def _end_quietly(stopped: Interrupted) -> None:
    """Lets a script that does not catch this exception end with status 130 and its text instead of a traceback."""
    show = sys.excepthook

    def hook(kind: Any, error: BaseException, traceback: Any) -> None:
        if error is stopped:
            farewell(lambda: str(error))
            interrupted()
        show(kind, error, traceback)

    sys.excepthook = hook


def _handle(number: int, frame: FrameType | None) -> None:
    _handled.set()
    if _stop is None:
        signal.default_int_handler(number, frame)
    elif _stop.asked or not _stop.deferred:
        raise Interrupted(_farewell())
    else:
        _stop.asked = True
        logging.getLogger("nnxmoe").info("stopping after this step; Ctrl-C again ends the process at once")


def _watch() -> Callable[[], None]:
    """Starts the thread that ends the process where Python cannot; returns the function that stops it."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    end = writer.detach()
    before = signal.set_wakeup_fd(end, warn_on_full_buffer=False)  # gets the numbers of signals, from C
    if before != -1:  # an event loop uses it
        signal.set_wakeup_fd(before)
        os.close(end)
        return lambda: None

    def watch() -> None:
        while numbers := reader.recv(1):
            if signal.SIGINT in numbers:
                _wait(reader)
        reader.close()

    def stop() -> None:
        signal.set_wakeup_fd(-1)
        os.close(end)

    threading.Thread(target=watch, name="nnxmoe interrupts", daemon=True).start()
    return stop


def _wait(reader: socket.socket) -> None:
    """Returns when Python has handled the signal; ends the process if it takes too long, or at a second Ctrl-C."""
    started = time.monotonic()
    reader.settimeout(_POLL)
    while not _handled.is_set():
        with contextlib.suppress(TimeoutError):
            if signal.SIGINT in reader.recv(1):
                interrupted()
        if time.monotonic() - started > (PATIENCE if _stop is None else _stop.patience):
            interrupted()
    _handled.clear()
    reader.settimeout(None)


def _interactive() -> bool:
    """Whether a person types the program, in Python or a notebook: ending the process would lose what they have."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
