"""Run a function in a process forked from a server that has imported the modules whose functions are run."""

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

# One server per test process, started by the first test that needs it: it must suit all of them.
IMPORTED = ["tests.corpus.runner", "tests.convert.test_save", "tests.convert.test_checkpoint"]


def forked(
    function: Callable[..., None], *arguments: Any, answer_within: float = 60, kill_after: float | None = None
) -> tuple[int, list[Any]]:
    """Return the process's exit code and what it sent through the pipe, its last argument.

    Args:
        answer_within: Seconds until the first message; a process that is later is killed.
        kill_after: Seconds from the first message until the process is killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(function, arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    said: list[Any] = []
    try:
        if ours.poll(answer_within):
            said.append(ours.recv())
            if kill_after is not None:
                time.sleep(kill_after)
                assert process.pid
                os.kill(process.pid, signal.SIGKILL)
            process.join(60)
            while ours.poll():
                said.append(ours.recv())
    except EOFError:
        process.join(10)
    finally:
        process.kill()
        process.join()
        ours.close()
    assert process.exitcode is not None
    return process.exitcode, said


def _run(function: Callable[..., None], arguments: tuple[Any, ...], pipe: Connection) -> None:
    logging.getLogger().handlers.clear()  # as in a script: a library may have added one to the server
    function(*arguments, pipe)
