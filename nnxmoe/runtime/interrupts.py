"""Ctrl-C during training: finish and save the current step, then raise KeyboardInterrupt."""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator
from typing import Any

from nnxmoe.runtime.progress import say


class Interrupted(KeyboardInterrupt):
    """Raised after Ctrl-C during training. The message says what is saved and how to continue.

    Attributes:
        fitted: The model, metrics and state after the last step.
    """

    def __init__(self, text: str, fitted: Any = None) -> None:
        super().__init__(text)
        self.fitted = fitted


@dataclasses.dataclass
class Stop:
    """State shared by `stopping` and the loop inside it.

    Attributes:
        asked: Ctrl-C was pressed.
        deferred: There is something to save, so the first Ctrl-C only sets ``asked``.
    """

    asked: bool = False
    deferred: bool = False


@contextlib.contextmanager
def stopping() -> Iterator[Stop]:
    """Defer Ctrl-C to the end of a step, as set in `Stop`. A second Ctrl-C raises KeyboardInterrupt at once.

    No-op outside the main thread, or if SIGINT has a different handler.
    """
    stop, before = Stop(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield stop
        return

    def handle(*_: object) -> None:
        if stop.asked or not stop.deferred:
            raise KeyboardInterrupt
        stop.asked = True
        say("stopping after this step; Ctrl-C again stops at once")

    signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
