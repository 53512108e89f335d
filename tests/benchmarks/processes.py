"""Measurements in processes of their own, each written down as it ends, so that a later run continues."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tests.benchmarks.limits import Work
from tests.benchmarks.results import Record, direction

ROOT = Path(__file__).resolve().parents[2]
# Pages of 2 MB for large buffers (glibc >= 2.35): XLA:CPU maps them anew in each call, and clearing small pages takes a
# fifth of a training step.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def call(
    module: str, *arguments: object, python: object = sys.executable, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What a module of this folder prints in a fresh process, in its last line. Raises RuntimeError if it fails."""
    command = [str(python), "-m", f"tests.benchmarks.{module}", *map(str, arguments)]
    quiet = {"TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "NNXMOE_COMPILE_CACHE": "off"}
    variables = os.environ | LARGE_PAGES | quiet | dict(environment or {})
    variables.pop("JAX_COMPILATION_CACHE_DIR", None)  # it would take precedence over nnxmoe's compile cache
    run = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=3600)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command[2:])} ended with {run.returncode}:\n{run.stderr[-3000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def have_transformers() -> bool:
    """Whether the other side is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers", "peft"))


@dataclass(frozen=True)
class Job:
    """One process of one side. ``cache``: the folder for compiled programs, which ``fill`` fills by a first process
    that is not counted. ``variants``: the names under which a load is reported."""

    case: str
    what: str
    side: str
    round: int
    module: str
    arguments: Sequence[object]
    python: object = sys.executable
    cache: Path | None = None
    prepare: Callable[[], object] = lambda: None
    fill: bool = False
    variants: tuple[str, ...] = ()
    work: Mapping[str, Work] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Identifies the process in the file of records."""
        return " | ".join([self.case, self.what, self.side, str(self.round)])

    def record(self) -> Record:
        """Run the process; a failure is recorded too."""
        environment = {"NNXMOE_COMPILE_CACHE": "off" if self.cache is None else str(self.cache)}
        start = functools.partial(call, self.module, *self.arguments, python=self.python, environment=environment)
        try:
            self.prepare()
            if self.fill and self.cache and not (filled := self.cache / "filled").exists():
                start()
                filled.touch()
                self.prepare()
            found = start()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return Record(self.key, self.case, self.side, error=str(error))
        values = self._named(found.pop("values"))
        known = {name: self.work[name] for name in values if name in self.work}
        return Record(self.key, self.case, self.side, values, work=known, **found)

    def _named(self, values: dict[str, float]) -> dict[str, float]:
        """The names of a load with those of its variants: "load to …" becomes "load one file, warm: to …"."""
        if not self.variants:
            return values
        loads = [name for name in values if name.startswith("load ")]
        named = {f"load {v}: {name.removeprefix('load ')}": values[name] for v in self.variants for name in loads}
        return {name: value for name, value in values.items() if name not in loads} | named


def run(jobs: Iterable[Job], records: list[Record], file: TextIO | None = None) -> None:
    """Append the record of each job that has none yet, and write it to the file."""
    done = {record.key for record in records if not record.error}
    for job in jobs:
        if job.key in done or _beaten(job, records):
            continue
        print(job.key, file=sys.stderr, flush=True)
        records.append(job.record())
        done |= {job.key} if not records[-1].error else set()
        if file is not None:
            print(json.dumps(asdict(records[-1])), file=file, flush=True)


def read(file: Path) -> list[Record]:
    """The records of an earlier run; a failure is left out, and tried again."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [record for line in lines if not (record := Record(**json.loads(line))).error]


def _beaten(job: Job, records: Iterable[Record]) -> bool:
    """Whether another setting of transformers was better in every measurement of the first round."""
    if not job.round or not job.side.startswith("transformers"):
        return False
    first = {
        record.side: record.values
        for record in records
        if record.side.startswith("transformers") and record.key == f"{job.case} | {job.what} | {record.side} | 0"
    }
    mine, others = first.pop(job.side, {}), list(first.values())
    return bool(others) and all(
        any(direction(what) * values.get(what, value) > direction(what) * value for values in others)
        for what, value in mine.items()
    )
