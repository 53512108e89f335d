"""Records of processes, and the table of their medians."""

import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.limits import Work, limit

OTHER = "ours, other lane"
FLAGS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX512_BF16", "amx_tile": "AMX", "amx_bf16": "AMX_BF16"}
COLUMNS = ["model", "dtype", "what", "nnxmoe", "transformers", "ratio", "limit", "of the limit"]


def direction(what: str) -> int:
    """1 if more is better, as per second; -1 if less is: seconds, bytes."""
    return 1 if what.endswith("/s") else -1


@dataclass(frozen=True)
class Record:
    """What one process found. ``limits`` are figures of a limit, ``work`` is what the machine's speed divides."""

    key: str
    case: str  # model and dtype
    side: str  # "ours", OTHER, "transformers", "transformers eager", …
    values: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    work: Mapping[str, Work] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


@dataclass
class Row:
    """One measurement of one case: the values of each side, and the limit."""

    case: str
    what: str
    sides: dict[str, list[float]] = field(default_factory=dict)
    limits: list[float] = field(default_factory=list)

    @property
    def ours(self) -> float | None:
        """Our median."""
        return median(self.sides["ours"]) if "ours" in self.sides else None

    @property
    def other(self) -> float | None:
        """Our median on the other lane."""
        return median(self.sides[OTHER]) if OTHER in self.sides else None

    @property
    def theirs(self) -> float | None:
        """The median of transformers' best setting."""
        medians = [median(values) for side, values in self.sides.items() if side.startswith("transformers")]
        return max(medians, key=lambda value: direction(self.what) * value, default=None)

    @property
    def limit(self) -> float | None:
        """What the machine allows."""
        return median(self.limits) if self.limits else None

    def relative(self, value: float | None) -> float | None:
        """Our figure relative to another; above 1, ours is better."""
        if self.ours is None or value is None:
            return None
        return (self.ours / value) ** direction(self.what)

    def line(self, lane: bool) -> str:
        """The row in Markdown."""
        model, _, dtype = self.case.rpartition(" ")
        figures = [self.ours, *[self.other] * lane, self.theirs]
        cells = [model, dtype, self.what, *map(_figure, figures), _ratio(self.relative(self.theirs))]
        return f"| {' | '.join([*cells, _figure(self.limit), _ratio(self.relative(self.limit))])} |"


def rows(records: Iterable[Record]) -> list[Row]:
    """The rows of the table. A limit is that of the fastest side on this machine in the same dtype."""
    found: dict[tuple[str, str], Row] = {}
    records = [record for record in records if not record.error]
    for record in records:
        for what, value in record.values.items():
            row = found.setdefault((record.case, what), Row(record.case, what))
            row.sides.setdefault(record.side, []).append(value)
            row.limits += [record.limits[what]] if what in record.limits and record.side == "ours" else []
    for record in records:
        for what, (name, amount) in record.work.items():
            machine = found.get((f"machine {record.case.rpartition(' ')[2]}", name))
            if machine is not None:
                best = max(median(values) for values in machine.sides.values())
                found[record.case, what].limits = [limit(what, amount, best)]
    for (case, what), row in found.items():
        plain = what.partition(": ")[2]
        if plain and (base := found.get((case, plain))) is not None and base.ours is not None:
            row.sides |= {side: values for side, values in base.sides.items() if side.startswith("transformers")}
            row.limits = [base.ours]  # of a quantised model: our own floats
    return list(found.values())


def table(records: Sequence[Record]) -> str:
    """The table in Markdown, below the machine and the versions and above what failed."""
    lane = any(record.side == OTHER for record in records)
    columns = COLUMNS[:4] + ["nnxmoe, other lane"] * lane + COLUMNS[4:]
    versions = {record.side: record.versions for record in records if record.versions}
    lines = [f"`{' '.join(['python', *sys.orig_argv[1:]])}` on {machine()}. A ratio above 1: nnxmoe is better.", ""]
    lines += [f"- {side}: {', '.join(f'{k} {v}' for k, v in found.items())}" for side, found in versions.items()]
    lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [row.line(lane) for row in rows(records)]
    failed = {record.key: record.error for record in records if record.error}
    done = {record.key for record in records if not record.error}
    errors = [f"- failed: {key}: {error}" for key, error in failed.items() if key not in done]
    return "\n".join([*lines, *([""] if errors else []), *errors])


def machine() -> str:
    """The processor, its matrix instructions, the number of cores and how busy they are."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    fields: dict[str, Any] = {name.strip(): value.strip() for name, _, value in lines}
    flags = [name for flag, name in FLAGS.items() if flag in fields.get("flags", "").split()]
    name, cores = fields.get("model name", platform.machine()), len(os.sched_getaffinity(0))
    return f"{name}, {cores} cores ({', '.join(flags) or 'no AVX'}), load {os.getloadavg()[0]:.1f}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
