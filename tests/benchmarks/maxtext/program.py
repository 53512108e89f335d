"""Reads the bytes, the traffic and the collectives of a compiled step from the files that XLA dumps."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nnxmoe.apps.planning.hlo import Collective, collectives, instructions

DUMPED = "*after_optimizations-memory-usage-report.txt"  # XLA writes this file last, before it generates code.


def figures(dump: Path, mesh: Mapping[str, int]) -> dict[str, Any]:
    """Return the figures of the program that XLA dumped to a folder."""
    (assignment,) = dump.glob("*after_optimizations-buffer-assignment.txt")
    text = Path(str(assignment).replace("-buffer-assignment", "")).read_text()
    found = collectives(text, mesh)
    runs = {kind: [one for one in found if one.kind == kind] for kind in sorted({one.kind for one in found})}
    return buffers(assignment.read_text()) | {
        "received": received(found, mesh),
        "kernels": kernel_traffic(text),
        "collectives": {
            kind: [sum(one.times for one in group), sum(one.total for one in group)] for kind, group in runs.items()
        },
    }


def buffers(assignment: str) -> dict[str, int]:
    """Return the bytes of arguments and temporary buffers in HBM. Other memories have a color."""
    allocations = re.findall(r"allocation \d+: size (\d+), (color \d+, )?page \d+, (\S+)", assignment)
    in_hbm = [(int(size), kind) for size, color, kind in allocations if not color]
    kinds = {"arguments": "parameter", "temporary": "preallocated-temp"}
    return {name: sum(size for size, kind in in_hbm if kind.startswith(start)) for name, start in kinds.items()}


def received(found: Sequence[Collective], mesh: Mapping[str, int]) -> float:
    """Return the bytes that a device receives if every collective runs in a ring.

    A ragged exchange counts with its whole buffer.
    """
    total = 0.0
    for one in found:
        devices = math.prod(mesh[axis] for axis in one.axes)
        passes = {"all-reduce": 2.0}.get(one.kind, 1.0)
        total += one.total * (1.0 if one.kind == "collective-permute" else passes * (1 - 1 / devices))
    return total


def kernel_traffic(text: str) -> int:
    """Return the bytes that the experts' Pallas kernels read and write, by the kernels' own cost estimates."""
    return sum(
        instruction.times * int(cost[1])
        for instruction in instructions(text)
        if "tpu_custom_call" in instruction.text
        and re.search(r'op_name="[^"]*gmm', instruction.text)
        and (cost := re.search(r'"bytes_accessed":"?(\d+)', instruction.text))
    )
