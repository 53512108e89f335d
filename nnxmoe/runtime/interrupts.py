"""Ctrl-C during a training: the step that runs is finished and saved, then KeyboardInterrupt is raised."""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator
from typing import Any

from nnxmoe.runtime.progress import say


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a training; its text says what is saved and how to continue.

    ``fitted``: the model, metrics and state after the last step.
    """

    def __init__(self, text: str, fitted: Any = None) -> None:
        super().__init__(text)
        self.fitted = fitted


@dataclasses.dataclass
class Stop:
    """State shared by `stopping` and the loop inside it.

    ``asked``: Ctrl-C was pressed. ``deferred``: there is something to save, so the first Ctrl-C only sets ``asked``.
    """

    asked: bool = False
    deferred: bool = False


@contextlib.contextmanager
def stopping() -> Iterator[Stop]:
    """Defer Ctrl-C to the end of a step, as the `Stop` says; a second Ctrl-C raises KeyboardInterrupt at once.

    No-op outside of the main thread or if SIGINT is handled by someone else.
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
