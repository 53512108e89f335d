"""Worker process of one side. It compiles a step for the TPU slice, or runs one step per line on stdin.

python -m tests.benchmarks.maxtext.SIDE {compile,steps} CASE FOLDER
"""

import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.maxtext.cases import CASES, Case

WEIGHTS = "weights.npz"  # MaxText's initial weights, which the nnxmoe side loads
RESULT = "RESULT "  # prefix of the lines for the parent process, because the libraries also print
LOWERED = "lowered.json"
Lower = Callable[[], Any]
Advance = Callable[[Any], float]


def tokens(case: Case) -> tuple[np.ndarray, ...]:
    """Return random tokens, their targets, segment ids that are all 1, and positions."""
    ids = np.random.RandomState(0).randint(0, case.config.vocab_size, (case.rows, case.length + 1)).astype(np.int32)
    shape = case.rows, case.length
    positions = np.broadcast_to(np.arange(case.length, dtype=np.int32), shape)
    return ids[:, :-1], ids[:, 1:], np.ones(shape, np.int32), positions


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the result of a call, its CPU seconds over all threads, and its wall seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def main(
    prepare: Callable[[Case], tuple[Lower, Any]],
    start: Callable[[Case, Path], tuple[Lower, Advance]],
    packages: Sequence[str],
) -> None:
    """Run the command line.

    Args:
        prepare: Returns a function that lowers the step for the TPU slice, and the mesh.
        start: Returns a function that lowers the step for the CPU, and a function that runs one step with the compiled
            program and returns the loss.
        packages: Packages whose versions are recorded.
    """
    command, case, folder = sys.argv[1:]
    versions = {name: version(name) for name in packages}
    record: dict[str, Any] = {"versions": {"python": platform.python_version()} | versions}
    if command == "steps":
        return _serve(*start(CASES[case], Path(folder)), record)
    lower, mesh = prepare(CASES[case])
    lowered, cpu, _ = timed(lower)
    # Without ``--full``, the parent process kills this process after XLA has dumped the program.
    record |= {"mesh": dict(mesh.shape), "lower_cpu": cpu, "until_lowered_cpu": time.process_time()}
    Path(folder, LOWERED).write_text(json.dumps(record))
    _, cpu, wall = timed(lowered.compile)
    Path(folder, LOWERED).write_text(json.dumps(record | {"compile_cpu": cpu, "compile": wall}))
    return None


def _serve(lower: Lower, advance: Advance, record: dict[str, Any]) -> None:
    lowered, lower_cpu, _ = timed(lower)
    compiled, compile_cpu, _ = timed(lowered.compile)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    _report(record | {"lower_cpu": lower_cpu, "compile_cpu": compile_cpu, "temporary": temporary})
    for _ in sys.stdin:
        loss, cpu, wall = timed(lambda: advance(compiled))
        _report({"cpu": cpu, "wall": wall, "loss": loss})


def _report(record: dict[str, Any]) -> None:
    print(RESULT + json.dumps(record), flush=True)
