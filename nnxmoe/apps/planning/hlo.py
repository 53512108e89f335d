"""Read the collectives of a compiled program from its text: kind, bytes, mesh axes, trip counts."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

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
        bytes: Bytes on one device of its operand or its result, whichever is larger.
        times: Number of runs.
        counted: True if the lengths of all loops around it are known. A loop of unknown length counts
            once.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    times: int
    counted: bool = True

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        return self.bytes * self.times


def collectives(text: str, mesh: Mapping[str, int], across: str | None = None) -> list[Collective]:
    """Find the reachable collectives of an optimized HLO module, with the trip counts of their loops.

    Between TPU slices, along the mesh axis ``across``, they appear as sends that name their collective.
    """
    bodies, entry = _computations(text)
    found: Counter[tuple[str, tuple[str, ...], int, bool]] = Counter()

    def walk(name: str, times: int, counted: bool) -> None:
        for line in bodies.get(name, ()):
            if match := re.search(rf" = (.*?) ({KINDS})(-start)?\(", line):
                over = _axes(line, mesh)
                if over or match[2] == "collective-permute":
                    size = _bytes(match[1], match[2], match[3] is not None)
                    if match[2] == "reduce-scatter" and match[3] is None:
                        size *= math.prod(mesh[axis] for axis in over)
                    found[match[2], over, size, counted] += times
            elif across is not None and (sent := _SENT.search(line)):
                found[sent[2], (across,), sum(_sizes(sent[1])), counted] += times
            inner, known = times, counted
            if " while(" in line:
                trips = _trips(line, bodies)
                inner, known = times * (1 if trips is None else trips), counted and trips is not None
            for called in _called(line):
                walk(called, inner, known)

    walk(entry, 1, True)
    return [Collective(kind, axes, size, times, known) for (kind, axes, size, known), times in found.items()]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Map the name of each computation to its lines. Also return the name of the entry."""
    bodies, entry, current = dict[str, list[str]](), "", ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = head[2]
            bodies[current] = []
            entry = current if head[1] else entry
        elif current:
            bodies[current].append(line)
    return bodies, entry


def _called(line: str) -> Iterator[str]:
    if re.search(rf" (?:{KINDS})(?:-start)?\(", line):
        return  # the called computation is its reduction
    yield from _CALLED.findall(line)
    if several := re.search(r"branch_computations=\{([^}]*)\}", line):
        yield from (name.strip().lstrip("%") for name in several[1].split(","))


def _trips(line: str, bodies: Mapping[str, list[str]]) -> int | None:
    """Return the length of a loop: XLA's known trip count, else the only integer in its condition."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    lines = bodies.get(condition[1], []) if condition else []
    limits = {int(n) for text in lines for n in re.findall(r"s32\[\][^=]* constant\((\d+)\)", text)}
    return limits.pop() if len(limits) == 1 else None


def _bytes(result: str, kind: str, started: bool) -> int:
    """Compute the bytes of a result.

    An asynchronous start returns a tuple of operands, results and context. The operands and results are
    tuples if several were combined. The start of an all-reduce returns only results.
    """
    result = re.sub(r"\{[^}]*\}", "", result)  # removes layouts
    if not started or kind == "all-reduce":
        return sum(_sizes(result))
    combined = re.match(r"\(\((.*?)\), \((.*?)\)", result)
    return max(sum(_sizes(part)) for part in combined.groups()) if combined else max(_sizes(result))


def _sizes(shapes: str) -> list[int]:
    found = [(kind, [int(d) for d in dims.split(",") if d]) for kind, dims in _SHAPE.findall(shapes)]
    return [math.prod(dims) * (_WIDTHS.get(kind) or int(re.sub(r"\D", "", kind)) // 8) for kind, dims in found]


def _axes(line: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which the members of the first group differ."""
    members = _first_group(line)
    if members is None:
        return tuple(axis for axis, size in mesh.items() if size > 1)
    places = np.stack(np.unravel_index(members, tuple(mesh.values())), axis=-1)
    return tuple(axis for axis, column in zip(mesh, places.T, strict=True) if len(set(column.tolist())) > 1)


def _first_group(line: str) -> Sequence[int] | None:
    """Return the devices of the first replica group or permutation pair, or None for all devices."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        found = re.findall(r"(\d+),(\d+)", pairs[1])
        moved = [pair for pair in found if pair[0] != pair[1]]
        return [int(n) for n in moved[0]] if moved else [0]
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return [int(n) for n in listed[1].split(",")]
    if named := re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))?\s*\{{([^}}]*)\}}", line):
        return _named_group(*named.groups())
    if tiled := re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", line):
        return _iota(tiled[2], tiled[3]).reshape(_numbers(tiled[1]))[0].tolist()
    return None


def _named_group(sizes: str, shape: str | None, order: str | None, over: str) -> list[int]:
    """Return the first group of ``mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b','a':(2)2}``.

    Newer XLA writes groups in this form. The example is along b and along the part of a that has size 2
    within 2 larger parts. The names may be XLA's.
    """
    mesh = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", sizes)}
    devices = _iota(shape or str(math.prod(mesh.values())), order).reshape(tuple(mesh.values()))
    found = {name: [0] for name in mesh}
    for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", over):
        count, step = (int(size), mesh[name] // (int(before) * int(size))) if size else (mesh[name], 1)
        found[name] = [base + i * step for base in found[name] for i in range(count)]
    return devices[np.ix_(*found.values())].ravel().tolist()


def _iota(shape: str, order: str | None) -> np.ndarray:
    """Return the device numbers ``[2,4]T(1,0)``: 0, 1, … in this shape, transposed."""
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids if order is None else ids.transpose(_numbers(order))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
