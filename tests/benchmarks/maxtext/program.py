"""Read the memory, traffic and collectives of a compiled step from XLA's dump."""

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
    ops = collectives(text, mesh)
    by_kind = {kind: [op for op in ops if op.kind == kind] for kind in sorted({op.kind for op in ops})}
    return buffers(assignment.read_text()) | {
        "received": received(ops, mesh),
        "kernels": kernel_traffic(text),
        "collectives": {
            kind: [sum(op.times for op in group), sum(op.total for op in group)] for kind, group in by_kind.items()
        },
    }


def buffers(assignment: str) -> dict[str, int]:
    """Return the bytes of arguments and temporary buffers in HBM. Buffers in other memory spaces have a color."""
    allocations = re.findall(r"allocation \d+: size (\d+), (color \d+, )?page \d+, (\S+)", assignment)
    in_hbm = [(int(size), kind) for size, color, kind in allocations if not color]
    kinds = {"arguments": "parameter", "temporary": "preallocated-temp"}
    return {name: sum(size for size, kind in in_hbm if kind.startswith(start)) for name, start in kinds.items()}


def received(ops: Sequence[Collective], mesh: Mapping[str, int]) -> float:
    """Return the bytes that a device receives if every collective runs in a ring.

    A ragged exchange counts as its whole buffer.
    """
    total = 0.0
    for op in ops:
        devices = math.prod(mesh[axis] for axis in op.axes)
        passes = {"all-reduce": 2.0}.get(op.kind, 1.0)
        total += op.total * (1.0 if op.kind == "collective-permute" else passes * (1 - 1 / devices))
    return total


def kernel_traffic(text: str) -> int:
    """Return the bytes that the experts' Pallas kernels access, according to the kernels' cost estimates."""
    return sum(
        instruction.times * int(cost[1])
        for instruction in instructions(text)
        if "tpu_custom_call" in instruction.text
        and re.search(r'op_name="[^"]*gmm', instruction.text)
        and (cost := re.search(r'"bytes_accessed":"?(\d+)', instruction.text))
    )
