"""Programs of several processes: connecting them, and ending all of them if one hangs or fails.

JAX detects SLURM, Open MPI, Kubernetes and Cloud TPU and connects the processes. By default it also waits: forever in a
collective whose other side hangs, and for minutes at the end of a program that failed. Here every wait has a timeout,
after which the process reports what it waited for and exits.
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

GAVE_UP = 124  # the exit status after a timeout, as of timeout(1)
_LATER = 30  # seconds between our limits and JAX's, which end a process without our message
_FLUSH = 5  # seconds for writing buffered output, whose reader may hang too
_LAUNCHERS = ("SLURM_", "OMPI_", "JOB_COMPLETION_", "TPU_WORKER", "MEGASCALE_")  # of clusters
_FROM_ENVIRONMENT = {"coordinator_address": str, "num_processes": int, "process_id": int}


@dataclasses.dataclass(frozen=True)
class _Job:
    """This process's place in the job; ``timeout`` is None without other processes."""

    timeout: float | None = None
    me: str = "this process"


_job = _Job()


def initialize(timeout: float = 300.0, **options: Any) -> None:
    """Connect this process to the others, before any other use of JAX. No-op with a log message for a single process.

    ``options`` are those of ``jax.distributed.initialize``. What is not given is read from the environment: the
    cluster launcher's variables, or ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``.
    ``timeout`` limits, in seconds, each wait for other processes: at the start, between heartbeats, in each `deadline`,
    and at the end. After it, and at once on an uncaught exception, this process exits with a message and a non-zero
    status.
    """
    global _job
    timeout = _seconds("timeout", timeout)
    if jax.distributed.is_initialized():
        raise ValueError(f"{_job.me} is already connected to the others: call initialize once")
    given = _from_environment() | options
    count = given.get("num_processes")
    _job = _Job(timeout, "this process" if count is None else f"process {given.get('process_id')} of {count}")
    try:
        with deadline("connecting to the other processes"):
            jax.distributed.initialize(**_limits(timeout) | given)
            _end_with_the_others(timeout)
            jax.devices()  # the processes exchange their lists of devices
    except Exception as error:
        _job = _Job()
        launched = given.keys() & _FROM_ENVIRONMENT.keys() or any(name.startswith(_LAUNCHERS) for name in os.environ)
        late = "must be called before any JAX" in str(error) and not launched  # JAX is in use, as in a notebook
        if not late and (given.keys() & _FROM_ENVIRONMENT.keys() or "coordinator_address should" not in str(error)):
            raise
        say("no cluster and no JAX_COORDINATOR_ADDRESS found: running as a single process")
        return
    _job = _Job(timeout, f"process {jax.process_index()} of {jax.process_count()}")


def _seconds(name: str, value: float) -> float:
    """A validated timeout, at most the longest that threads can wait (292 years)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: give a positive number of seconds")
    return min(float(value), threading.TIMEOUT_MAX)


def _limits(timeout: float) -> dict[str, Any]:
    """JAX's own limits: JAX checks the heartbeats; its other limits are a fallback for ours."""
    later = math.ceil(timeout) + _LATER
    return {
        "initialization_timeout": later,
        "heartbeat_timeout_seconds": math.ceil(timeout),
        "shutdown_timeout_seconds": later,
    }


def _from_environment() -> dict[str, Any]:
    """Settings from ``JAX_*`` variables; if all are set, cluster detection is switched off."""
    found: dict[str, Any] = {}
    for name, kind in _FROM_ENVIRONMENT.items():
        text = os.environ.get(variable := f"JAX_{name.upper()}")
        if text is not None and kind is int and not text.isdecimal():
            raise ValueError(
                f"the environment variable {variable}={text!r} is not a number: set it to one, or unset it"
            )
        found |= {} if text is None else {name: kind(text)}
    return found | ({"cluster_detection_method": "deactivate"} if len(found) == len(_FROM_ENVIRONMENT) else {})


def _end_with_the_others(timeout: float) -> None:
    """Installs what runs when this process ends, by itself or by JAX."""
    faulthandler.enable()  # JAX aborts when another process has died: show the stacks of this one
    sys.excepthook = _EndOnException(sys.excepthook)
    atexit.register(_watchdog.add, "waiting for the other processes at the end", timeout)


@contextlib.contextmanager
def deadline(doing: str, seconds: float | None = None) -> Iterator[None]:
    """A ``with`` block, or decorator, that ends the process after more than ``seconds``.

    ``seconds`` defaults to the timeout given to `initialize`; a single process has no limit. The block must wait for
    its results with ``jax.block_until_ready``, since JAX computes asynchronously. The message names what it was
    ``doing`` ("a training step") and shows the stack of every thread; the exit status is `GAVE_UP`.
    """
    seconds = _job.timeout if seconds is None else _seconds("seconds", seconds)
    key = None if seconds is None else _watchdog.add(doing, seconds)
    try:
        yield
    finally:
        if key is not None:
            _watchdog.remove(key)


class _Watchdog:
    """The active deadlines and one thread that watches them; it starts early, as Python cannot start threads at exit.

    A thread, not a signal: Python handles signals in the main thread, which waits inside JAX.
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
    """Print the reason and every stack, and end the process in any state."""
    try:
        print(
            f"nnxmoe: {_job.me} (pid {os.getpid()} on {socket.gethostname()}) gave up {doing} after {seconds:g} s. "
            "Another process is missing, dead or stuck (see their messages), or this takes longer: then raise "
            "the timeout. Stacks:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback()
        faulthandler.dump_traceback_later(_FLUSH, exit=True)
        sys.stdout.flush()
    finally:
        os._exit(GAVE_UP)


class _EndOnException:
    """Shows an exception as usual and ends the process; a regular exit would wait for processes that wait for us."""

    def __init__(self, show: Any) -> None:
        self._show = show

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self._show(kind, error, trace)
            print(f"nnxmoe: {_job.me} exits on this {kind.__name__}, and ends the others", file=sys.stderr, flush=True)
            sys.stdout.flush()
        finally:
            os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)
