"""Parse the collectives in a compiled program's HLO: type, bytes, mesh axes and number of executions."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

KINDS = "all-gather|reduce-scatter|all-reduce|ragged-all-to-all|all-to-all|collective-permute"
_WIDTHS = {"pred": 1, "bf16": 2, "f16": 2, "f8e4m3fn": 1, "f8e5m2": 1}
_SHAPE = re.compile(r"\b(pred|bf16|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_SENT = re.compile(r" = \((\w+\[[\d,]*\]).* send\(.*xla_megascale_runtime.*_rendezvous=\"([a-z-]+)\.")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        axes: Mesh axes of the collective.
        bytes: Bytes of the operand or the result on one device, whichever is larger.
        times: Number of executions.
        counted: Whether the trip counts of all enclosing loops are known. A loop with an unknown trip count
            counts once.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    times: int
    counted: bool = True

    @property
    def total(self) -> int:
        """Bytes of all executions."""
        return self.bytes * self.times


class Instruction(NamedTuple):
    """One HLO instruction of a program.

    Attributes:
        text: HLO text of the instruction.
        computation: Name of the computation that contains the instruction.
        times, counted: See `Collective`.
    """

    text: str
    computation: str
    times: int
    counted: bool


def instructions(text: str) -> Iterator[Instruction]:
    """Yield each instruction reachable from the entry of an optimized HLO module, with its number of executions."""
    bodies, entry = _computations(text)

    def walk(name: str, times: int, counted: bool) -> Iterator[Instruction]:
        for line in bodies.get(name, ()):
            yield Instruction(line, name, times, counted)
            inner_times, is_counted = times, counted
            if " while(" in line:
                trips = _trips(line, bodies)
                inner_times, is_counted = times * (1 if trips is None else trips), counted and trips is not None
            for computation in _called(line):
                yield from walk(computation, inner_times, is_counted)

    return walk(entry, 1, True)


def collectives(text: str, mesh: Mapping[str, int], across: str | None = None) -> list[Collective]:
    """Find the collectives of an optimized HLO module, and count their executions.

    Collectives between TPU slices, along the mesh axis ``across``, are send instructions named after the
    collective. XLA:TPU emits a reduce-scatter as a fusion of an all-reduce and a slice. Such a fusion is counted as
    a reduce-scatter.
    """
    counts: Counter[tuple[str, tuple[str, ...], int, bool]] = Counter()
    for line, computation, times, counted in instructions(text):
        if match := re.search(rf" = (.*?) ({KINDS})(-start)?\(", line):
            mesh_axes = _axes(line, mesh)
            if mesh_axes or match[2] == "collective-permute":
                size = _bytes(match[1], match[2], match[3] is not None)
                if match[2] == "reduce-scatter" and match[3] is None:
                    size *= math.prod(mesh[axis] for axis in mesh_axes)
                kind = "reduce-scatter" if computation.startswith("all-reduce-scatter") else match[2]
                counts[kind, mesh_axes, size, counted] += times
        elif across is not None and (send := _SENT.search(line)):
            counts[send[2], (across,), sum(_sizes(send[1])), counted] += times
    return [Collective(kind, axes, size, times, is_counted) for (kind, axes, size, is_counted), times in counts.items()]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Map the name of each computation to its instructions. Also returns the name of the entry computation.

    An instruction with Pallas kernel metadata spans several lines. These lines are joined.
    """
    bodies, entry, current = dict[str, list[str]](), "", ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = head[2]
            bodies[current] = []
            entry = current if head[1] else entry
        elif current and line.startswith("  "):
            bodies[current].append(line)
        elif current and bodies[current] and line.strip("} "):
            bodies[current][-1] += line
    return bodies, entry


def _called(line: str) -> Iterator[str]:
    if re.search(rf" (?:{KINDS})(?:-start)?\(", line):
        return  # the called computation is the collective's reduction function
    yield from _CALLED.findall(line)
    if branches := re.search(r"branch_computations=\{([^}]*)\}", line):
        yield from (name.strip().lstrip("%") for name in branches[1].split(","))


def _trips(line: str, bodies: Mapping[str, list[str]]) -> int | None:
    """Return the trip count of a loop: XLA's known trip count, else the only integer in the loop condition."""
    if known_count := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line):
        return int(known_count[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    lines = bodies.get(condition[1], []) if condition else []
    limits = {int(n) for text in lines for n in re.findall(r"s32\[\][^=]* constant\((\d+)\)", text)}
    return limits.pop() if len(limits) == 1 else None


def _bytes(result: str, kind: str, is_start: bool) -> int:
    """Compute the bytes of a collective's result.

    An asynchronous start returns a tuple of operands, results and context. The operands and results are
    tuples if XLA combined several collectives. The start of an all-reduce returns only results.
    """
    result = re.sub(r"\{[^}]*\}", "", result)  # removes layouts
    if not is_start or kind == "all-reduce":
        return sum(_sizes(result))
    combined_results = re.match(r"\(\((.*?)\), \((.*?)\)", result)
    return max(sum(_sizes(part)) for part in combined_results.groups()) if combined_results else max(_sizes(result))


def _sizes(shapes: str) -> list[int]:
    typed_shapes = [(dtype, [int(d) for d in dims.split(",") if d]) for dtype, dims in _SHAPE.findall(shapes)]
    return [
        math.prod(dims) * (_WIDTHS.get(dtype) or int(re.sub(r"\D", "", dtype)) // 8) for dtype, dims in typed_shapes
    ]


def _axes(line: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of the first replica group differ."""
    devices = _first_group(line)
    if devices is None:
        return tuple(axis for axis, size in mesh.items() if size > 1)
    coordinates = np.stack(np.unravel_index(devices, tuple(mesh.values())), axis=-1)
    return tuple(axis for axis, column in zip(mesh, coordinates.T, strict=True) if len(set(column.tolist())) > 1)


def _first_group(line: str) -> Sequence[int] | None:
    """Return the devices of the first replica group or permutation pair, or None for all devices."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        all_pairs = re.findall(r"(\d+),(\d+)", pairs[1])
        moving_pairs = [pair for pair in all_pairs if pair[0] != pair[1]]
        return [int(n) for n in moving_pairs[0]] if moving_pairs else [0]
    if explicit_groups := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return [int(n) for n in explicit_groups[1].split(",")]
    if mesh_groups := re.search(
        rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))?\s*\{{([^}}]*)\}}", line
    ):
        return _named_group(*mesh_groups.groups())
    if iota_groups := re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", line):
        return _iota(iota_groups[2], iota_groups[3]).reshape(_numbers(iota_groups[1]))[0].tolist()
    return None


def _named_group(sizes: str, shape: str | None, order: str | None, axes: str) -> list[int]:
    """Return the first group of ``mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b','a':(2)2}``.

    Newer versions of XLA write replica groups in this form. The example is along b, and along the inner
    part of a if a is split into 2 x 2. The axis names may differ from the names of the mesh.
    """
    mesh = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", sizes)}
    devices = _iota(shape or str(math.prod(mesh.values())), order).reshape(tuple(mesh.values()))
    indices = {name: [0] for name in mesh}
    for name, outer_size, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes):
        count, step = (int(size), mesh[name] // (int(outer_size) * int(size))) if size else (mesh[name], 1)
        indices[name] = [base + i * step for base in indices[name] for i in range(count)]
    return devices[np.ix_(*indices.values())].ravel().tolist()


def _iota(shape: str, order: str | None) -> np.ndarray:
    """Parse device ids such as ``[2,4]T(1,0)``: ``arange(8)``, reshaped to [2, 4] and transposed."""
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids if order is None else ids.transpose(_numbers(order))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
