"""Compare nnxmoe's training step with MaxText's.

    python -m tests.benchmarks.maxtext compiled --out FILE [--cases Mixtral] [--sides ours] [--full]
    python -m tests.benchmarks.maxtext steps --out FILE [--cases EP8] [--rounds 6]
    python -m tests.benchmarks.maxtext table --out FILE

``compiled`` compiles both steps for TPU v5p 4x4x4. No TPU is needed. The compiler is stopped after buffer assignment,
which takes one minute. With ``--full``, the compiler is not stopped. ``steps`` runs both steps on eight virtual CPU
devices and on one device, in alternating processes. Both commands write their results to the JSON file and print its
tables. Results of other cases stay in the file. ``table`` only prints the tables.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from nnxmoe.apps.planning.compilation import environment
from tests.benchmarks.maxtext import report
from tests.benchmarks.maxtext.cases import CASES, COMPILED, STEPS
from tests.benchmarks.maxtext.program import DUMPED, figures
from tests.benchmarks.maxtext.worker import LOWERED, RESULT
from tests.benchmarks.processes import LARGE_PAGES, ROOT

SIDES = ("theirs", "ours")  # MaxText runs first, because it writes the initial weights
MISSING = (
    "MaxText is not installed. Create an environment with Python 3.12, run\n"
    "    pip install 'maxtext[tpu]==0.2.5' 'libtpu==0.0.50.*' && pip install --no-deps -e .\n"
    "and use its Python. To measure without MaxText, pass --sides ours"
)
QUIET = {"TQDM_DISABLE": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "DECOUPLE_GCLOUD": "TRUE", "HF_HUB_OFFLINE": "1"}
LIMIT_S = 120  # seconds for all rounds of one case


def _start(side: str, command: str, case: str, variables: Mapping[str, str], log: IO[str], **pipes: Any) -> Any:
    """Start the worker process of one side. Its files are written to the folder of ``log``."""
    folder = str(Path(log.name).parent)
    arguments = [sys.executable, "-m", f"tests.benchmarks.maxtext.{side}", command, case, folder]
    env = os.environ | LARGE_PAGES | QUIET | {"NNXMOE_COMPILE_CACHE": "off"} | dict(variables)
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    return subprocess.Popen(arguments, cwd=ROOT, env=env, stderr=log, text=True, **pipes)


def compile_case(case: str, side: str, folder: Path, full: bool) -> dict[str, Any]:
    """Compile a step for the TPU slice in a worker process, and read the figures from XLA's dump."""
    folder.mkdir()
    dump, variables = folder / "dump", environment("tpu", 1)
    variables["XLA_FLAGS"] += f" --xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*step.*"
    with (folder / "log").open("w+") as log:
        process = _start(side, "compile", case, variables, log, stdout=log)
        while process.poll() is None and (full or not any(dump.glob(DUMPED))):
            time.sleep(1)
        if process.poll() is None:
            time.sleep(3)  # wait until XLA has written the whole last file
            process.kill()
            process.wait()
        if not any(dump.glob(DUMPED)):
            return {"error": _error(log)}
    record = json.loads((folder / LOWERED).read_text())
    return record | figures(dump, record["mesh"])


def run_case(case: str, sides: Sequence[str], folder: Path, rounds: int) -> dict[str, Any]:
    """Run the steps of a case in one process per side. The processes alternate after each step.

    The first step is not included in ``rounds``.
    """
    records: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        running = {}
        for side in sides:
            log = stack.enter_context((folder / side).open("w+"))
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            variables = environment("cpu", CASES[case].devices)
            process = stack.enter_context(_start(side, "steps", case, variables, log, **pipes))
            stack.callback(process.kill)
            records[side] = _answer(process) or {"error": _error(log)}
            if "error" not in records[side]:
                running[side] = process
        started = time.monotonic()
        for i in range(rounds + 1):
            for side in list(running)[:: 1 if i % 2 else -1]:
                running[side].stdin.write("\n")
                running[side].stdin.flush()
                for name, value in (_answer(running[side]) or {}).items():
                    records[side].setdefault(name, []).append(value)
            if i and time.monotonic() - started > LIMIT_S:
                break
    return records


def _answer(process: Any) -> dict[str, Any] | None:
    """Return the next result of a process, or None if the process has ended."""
    return next((json.loads(line.removeprefix(RESULT)) for line in process.stdout if line.startswith(RESULT)), None)


def _error(log: IO[str]) -> str:
    """Return the last line of a log that contains "Error". If no line does, return the last line."""
    log.seek(0)
    lines = log.read().split("\n")
    return ([line for line in lines if "Error" in line] or lines)[-1]


def measure(options: argparse.Namespace, results: dict[str, Any], save: Callable[[], None]) -> None:
    """Measure the selected cases, and save the results after each case."""
    describe = subprocess.run(["git", "describe", "--always"], cwd=ROOT, capture_output=True, text=True)
    revision, today = describe.stdout.strip(), datetime.datetime.now(datetime.UTC).date().isoformat()
    names = [name for name in (COMPILED if options.command == "compiled" else STEPS) if options.cases in name]
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            if options.command == "steps":
                records = run_case(name, options.sides, Path(folder), options.rounds)
            else:
                records = {side: compile_case(name, side, Path(folder, side), options.full) for side in options.sides}
        measured = results[options.command]
        for side, record in records.items():
            results["versions"][side] = record.pop("versions", {})
            measured.setdefault(name, {})[side] = {"date": today, "revision": revision} | record
        results[options.command] = {name: measured[name] for name in CASES if name in measured}
        save()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        "python -m tests.benchmarks.maxtext", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("compiled", "steps", "table"))
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file of results")
    parser.add_argument("--cases", default="", metavar="TEXT", help="measure only cases whose names contain TEXT")
    parser.add_argument("--sides", choices=SIDES, metavar="SIDE", help="measure only 'ours' or 'theirs'")
    parser.add_argument("--rounds", type=int, default=6, help="steps per side after the first step (default 6)")
    parser.add_argument("--full", action="store_true", help="wait for the executable, and record the compilation time")
    options = parser.parse_args(arguments)
    options.sides = [options.sides] if options.sides else list(SIDES)
    if options.command != "table" and "theirs" in options.sides and importlib.util.find_spec("maxtext") is None:
        parser.error(MISSING)
    results: dict[str, Any] = {"versions": {}, "compiled": {}, "steps": {}}
    if options.out.exists():
        results |= json.loads(options.out.read_text())
    if options.command != "table":
        measure(options, results, lambda: options.out.write_text(json.dumps(results, indent=1) + "\n"))
    print(f"{report.compiled_table(results['compiled'])}\n\n{report.steps_table(results['steps'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
