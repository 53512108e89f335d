"""One program in several processes: how they find each other, and how all of them end when one does not go on.

JAX finds SLURM, Open MPI, Kubernetes and Cloud TPU by itself and connects the processes. Left alone it also waits: for
ever in a collective whose other side is stuck, for minutes at the end of a program that has failed. Here every wait has
a limit, after which the process says what it waited for and ends.
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import itertools
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax

from nnxmoe.runtime.progress import say

GAVE_UP = 124  # the exit status, as of timeout(1)
_LATER = 30  # seconds by which JAX's own limits, which end a process without a word from us, come after ours
_FLUSH = 5  # seconds that output still in a buffer may take: its reader may be stuck as well
_FROM_ENVIRONMENT = {"coordinator_address": str, "num_processes": int, "process_id": int}


@dataclasses.dataclass(frozen=True)
class _Job:
    """What this process knows of the others; ``timeout`` None: there are none."""

    timeout: float | None = None
    me: str = "this process"


_job = _Job()


def initialize(timeout: float = 300.0, **options: Any) -> None:
    """Connect this process to the others; call it before anything else of JAX. Alone, it says so and does nothing.

    ``options`` are those of ``jax.distributed.initialize``, which finds what is not given in the environment: of the
    cluster's launcher, or ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``. ``timeout``, in
    seconds, is how long to wait for the others: to appear, for a sign of life, in each `deadline`, and at the end; then
    this process ends with a message and a status that is not 0. So it does at once on an exception.
    """
    global _job
    timeout = _seconds("timeout", timeout)
    if jax.distributed.is_initialized():
        raise ValueError(f"{_job.me} is connected to the others already: initialize once")
    given = _from_environment() | options
    count = given.get("num_processes")
    _job = _Job(timeout, "this process" if count is None else f"process {given.get('process_id')} of {count}")
    try:
        with deadline("connecting to the other processes"):
            jax.distributed.initialize(**_limits(timeout) | given)
            _end_with_the_others(timeout)
            jax.devices()  # the processes tell each other what devices they have
    except Exception as error:
        _job = _Job()
        if given.keys() & _FROM_ENVIRONMENT.keys() or "coordinator_address should be defined" not in str(error):
            raise
        say("no cluster and no JAX_COORDINATOR_ADDRESS found: this process works alone")
        return
    _job = _Job(timeout, f"process {jax.process_index()} of {jax.process_count()}")


def _seconds(name: str, value: float) -> float:
    """A time to wait: positive, and not more than threads can wait, which is 292 years."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: give the seconds to wait for other processes, more than 0")
    return min(float(value), threading.TIMEOUT_MAX)


def _limits(timeout: float) -> dict[str, Any]:
    """JAX's own limits. Only signs of life are its business; the others back ours up."""
    later = math.ceil(timeout) + _LATER
    return {
        "initialization_timeout": later,
        "heartbeat_timeout_seconds": math.ceil(timeout),
        "shutdown_timeout_seconds": later,
    }


def _from_environment() -> dict[str, Any]:
    """What JAX does not read itself; where all of it stands in the environment, no cluster needs to be found."""
    found: dict[str, Any] = {}
    for name, kind in _FROM_ENVIRONMENT.items():
        text = os.environ.get(variable := f"JAX_{name.upper()}")
        if text is not None and kind is int and not text.isdecimal():
            raise ValueError(f"the environment has {variable}={text!r}: set it to a number, or unset it")
        found |= {} if text is None else {name: kind(text)}
    return found | ({"cluster_detection_method": "deactivate"} if len(found) == len(_FROM_ENVIRONMENT) else {})


def _end_with_the_others(timeout: float) -> None:
    """What is done when this process ends, by itself or by JAX."""
    faulthandler.enable()  # JAX aborts where a process has died: show what this one was doing
    sys.excepthook = _EndOnException(sys.excepthook)
    atexit.register(_watchdog.add, "waiting for the other processes at the end", timeout)


@contextlib.contextmanager
def deadline(doing: str, seconds: float | None = None) -> Iterator[None]:
    """A ``with`` block, or decorated function, that ends the process where it takes more than ``seconds``.

    ``seconds`` None: the timeout given to `initialize`, and no limit where this process works alone. The block has to
    wait for its results (``jax.block_until_ready``): JAX computes behind the back of Python. The message names what it
    was ``doing`` ("a training step"); every thread's stack follows; the exit status is `GAVE_UP`.
    """
    seconds = _job.timeout if seconds is None else _seconds("seconds", seconds)
    key = None if seconds is None else _watchdog.add(doing, seconds)
    try:
        yield
    finally:
        if key is not None:
            _watchdog.remove(key)


class _Watchdog:
    """The limits in force, and the thread that looks after them: one, as none can be started when Python exits.

    A thread, not a signal: Python handles signals between two instructions of the main thread, which waits in JAX.
    """

    def __init__(self) -> None:
        self._keys = itertools.count()
        self._limits: dict[int, tuple[float, str, float]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, doing: str, seconds: float) -> int:
        with self._changed:
            key = next(self._keys)
            self._limits[key] = (time.monotonic() + seconds, doing, seconds)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="nnxmoe deadlines", daemon=True)
                self._thread.start()
            self._changed.notify()
        return key

    def remove(self, key: int) -> None:
        with self._changed:
            del self._limits[key]

    def _watch(self) -> None:
        while True:
            with self._changed:
                first = min(self._limits.values(), default=None)
                left = None if first is None else first[0] - time.monotonic()
                if first is not None and left is not None and left <= 0:
                    break
                self._changed.wait(left)
        _give_up(*first[1:])


_watchdog = _Watchdog()
if hasattr(os, "register_at_fork"):  # a forked child has none of its parent's threads and deadlines
    os.register_at_fork(after_in_child=_watchdog.__init__)


def _give_up(doing: str, seconds: float) -> None:
    """Say why, show every stack, and end the process, whatever state it is in."""
    try:
        print(
            f"nnxmoe: {_job.me} (pid {os.getpid()} on {socket.gethostname()}) gave up {doing} after {seconds:g} s. "
            "Another process is missing, dead or stuck (see what the others say), or this takes longer: then raise "
            "the timeout. Where it was:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback()
        faulthandler.dump_traceback_later(_FLUSH, exit=True)
        sys.stdout.flush()
    finally:
        os._exit(GAVE_UP)


class _EndOnException:
    """Shows an exception as before and ends the process; at exit JAX would wait for those that wait for this one."""

    def __init__(self, show: Any) -> None:
        self._show = show

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self._show(kind, error, trace)
            print(
                f"nnxmoe: {_job.me} ends on this {kind.__name__}, and the others with it", file=sys.stderr, flush=True
            )
            sys.stdout.flush()
        finally:
            os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)
