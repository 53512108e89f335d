"""What was found: values of both sides, their medians and ratio, as Markdown and as JSON."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import nnxmoe

PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "transformers")


def direction(measure: str) -> int:
    """1 where more is better, which is what is counted a second; -1 where less is: seconds, bytes."""
    return 1 if measure.endswith("/s") else -1


def group(measure: str) -> str:
    """Its first word: "load", "prefill", …"""
    return measure.replace(",", " ").split()[0]


@dataclasses.dataclass(frozen=True)
class Result:
    """One measure, ``what, unit``, of one case: our values, and those of what they are beside, if anything."""

    case: str
    measure: str
    ours: Sequence[float]
    beside: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)

    @property
    def best(self) -> str | None:
        """Which of the others has the best median."""
        return max(self.beside, key=lambda name: direction(self.measure) * median(self.beside[name]), default=None)

    @property
    def ratio(self) -> float | None:
        """Ours to the best other by their medians; above 1 nnxmoe is better."""
        if self.best is None:
            return None
        return (median(self.ours) / median(self.beside[self.best])) ** direction(self.measure)

    def row(self) -> str:
        """Of the table."""
        cells = [self.case, self.measure, f"{median(self.ours):.4g}"]
        if self.best is not None:
            cells += [f"{median(self.beside[self.best]):.4g}", self.best, f"{self.ratio:.2f}"]
        return f"| {' | '.join(cells + [''] * (6 - len(cells)))} |"

    def json(self) -> dict[str, Any]:
        """With every value."""
        more = {"median": median(self.ours), "best": self.best, "ratio": self.ratio}
        return {**dataclasses.asdict(self), **more}


def markdown(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    """The table, under what it was made on and with, above what was left out."""
    machine, versions = about["machine"], about["versions"]
    lines = [
        f"`{about['command']}` on {machine['cpu']}, {machine['cores']} cores, Python {machine['python']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        "| case | measure | nnxmoe | beside | which | ratio |",
        "|---|---|---|---|---|---|",
        *(result.row() for result in results),
    ]
    return "\n".join([*lines, *([""] if about["left out"] else []), *(f"- not run: {x}" for x in about["left out"])])


def report(results: Iterable[Result], left_out: list[str], file: Path | None, table_file: Path | None) -> None:
    """Print each result when it is there, and all of them as a table; write them, as JSON and as the table."""
    kept = []
    for result in results:
        kept.append(result)
        print(result.row(), file=sys.stderr, flush=True)
    said = about(left_out)
    table = markdown(kept, said)
    print(table)
    if table_file:
        table_file.write_text(table + "\n")
    if file:
        file.write_text(json.dumps(said | {"results": [result.json() for result in kept]}, indent=1))


def about(left_out: Sequence[str]) -> dict[str, Any]:
    """The command, the machine, and the versions of what is installed."""
    return {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
        },
        "versions": {"nnxmoe": nnxmoe.__version__}
        | {name: version for name in PACKAGES if (version := _version(name))},
        "left out": list(left_out),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
