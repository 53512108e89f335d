"""Starts several processes of `tests.support.worker` and waits for them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nnxmoe.runtime import launch

ROOT = Path(__file__).resolve().parents[2]


def wait(done: Callable[[], bool], within: float = 1200) -> bool:
    """Polls ``done`` for up to ``within`` seconds; returns its last value."""
    end = time.monotonic() + within
    while not done() and time.monotonic() < end:
        time.sleep(0.02)
    return done()


class Launch:
    """N processes of `tests.support.worker`; leaving the context kills them."""

    def __init__(self, out: Path, count: int, *task: str, devices: int = 1, started: int | None = None) -> None:
        self.out, self.count, self.task = out, count, task
        port = launch.free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        for i in range(count if started is None else started):
            env = os.environ | launch.environment(i, count, port, devices)
            command = [sys.executable, "-m", "tests.support.worker", str(out), *task]
            with self._log(i).open("wb") as log:
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                self.processes.append(subprocess.Popen(command, env=env, cwd=ROOT, start_new_session=True, **streams))

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _log(self, i: int) -> Path:
        return self.out / f"log {i}"

    def said(self, i: int) -> str:
        return self._log(i).read_text(errors="replace")

    def _fail(self, why: str) -> None:
        logs = "\n".join(f"--- process {i}:\n{self.said(i)[-4000:]}" for i in range(len(self.processes)))
        pytest.fail(f"{self.task}: {why}\n{logs}")

    def until(self, done: Callable[[], bool], within: float) -> None:
        """Waits for ``done``; on timeout fails the test and shows all output."""
        if not wait(done, within):
            self._fail(f"not done within {within} s")

    def ended(self, i: int) -> bool:
        """Whether a process has exited with 0; fails the test on any other exit code."""
        if code := self.processes[i].poll():
            self._fail(f"process {i} ended with {code}")
        return code == 0

    def finish(self, within: float) -> None:
        """Waits until every process has exited with 0."""
        self.until(lambda: all([self.ended(i) for i in range(self.count)]), within)

    def ten(self) -> None:
        """Waits until every process has run ten steps."""
        self.until(lambda: all([(self.out / f"ten {i}").exists() or self.ended(i) for i in range(self.count)]), 1200)

    def end(self, i: int, within: float) -> int:
        """Waits for a process and returns its exit status."""
        self.until(lambda: self.processes[i].poll() is not None, within)
        return self.processes[i].returncode
