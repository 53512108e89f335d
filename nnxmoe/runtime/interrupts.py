"""Handle Ctrl-C during training: finish and save the current step, then raise KeyboardInterrupt."""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator
from typing import Any

from nnxmoe.runtime.progress import say


class Interrupted(KeyboardInterrupt):
    """Raised after Ctrl-C during training. The message states what was saved and how to continue.

    Attributes:
        fitted: The model, metrics and state after the last step.
    """

    def __init__(self, text: str, fitted: Any = None) -> None:
        super().__init__(text)
        self.fitted = fitted


@dataclasses.dataclass
class Stop:
    """State shared by `stopping` and the loop inside its block.

    Attributes:
        asked: True if Ctrl-C was pressed.
        deferred: Whether the first Ctrl-C only sets ``asked``, because the loop has state to save.
    """

    asked: bool = False
    deferred: bool = False


@contextlib.contextmanager
def stopping() -> Iterator[Stop]:
    """Defer the first Ctrl-C in this block to the end of a step (see `Stop`). A second raises KeyboardInterrupt.

    No-op outside the main thread, or if SIGINT has a custom handler.
    """
    stop, previous_handler = Stop(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous_handler is not signal.default_int_handler:
        yield stop
        return

    def handle(*_: object) -> None:
        if stop.asked or not stop.deferred:
            raise KeyboardInterrupt
        stop.asked = True
        say("stopping after this step; press Ctrl-C again to stop immediately")

    signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous_handler)
