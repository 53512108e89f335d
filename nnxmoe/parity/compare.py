"""Numbers of both sides held against each other, and the place where they part."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from nnxmoe.parity.record import Call
from nnxmoe.parity.rows import Arrays, Part, Row, kind

Pair = tuple[Call, Call]


@dataclasses.dataclass(frozen=True)
class _Gap:
    """The largest difference of two arrays, relative to their largest value or 1; a NaN in either is infinite."""

    error: float
    at: tuple[int, ...]
    ours: float
    theirs: float

    def __str__(self) -> str:
        return f"{self.error:.1e} at {list(self.at)}: NNX {self.ours:.6g}, Linen {self.theirs:.6g}"


def _gap(ours: Any, theirs: Any) -> _Gap:
    a, b = (np.asarray(x, np.float64) for x in (ours, theirs))
    if not a.size:
        return _Gap(0.0, (), 0.0, 0.0)
    with np.errstate(invalid="ignore"):
        apart = np.nan_to_num(np.where(a == b, 0.0, np.abs(a - b)), nan=np.inf, posinf=np.inf)
    at = tuple(map(int, np.unravel_index(apart.argmax(), apart.shape)))
    largest = max(float(np.abs(x).max(where=np.isfinite(x), initial=1.0)) for x in (a, b))
    return _Gap(float(apart[at]) / largest, at, float(a[at]), float(b[at]))


def compare_outputs(title: str, ours: Any, theirs: Any, pairs: list[tuple[Call, Call]], tolerance: float) -> float:
    """The largest difference; AssertionError with the first pair of submodules that part."""
    (a, form), (b, other) = (jax.tree_util.tree_flatten_with_path(out) for out in (ours, theirs))
    kinds = [[kind(leaf) for _, leaf in leaves] for leaves in (a, b)]
    if form != other or kinds[0] != kinds[1]:
        shown = [f"{', '.join(k) or 'nothing'} as {f}" for k, f in zip(kinds, (form, other), strict=True)]
        text = f"NNX gives {shown[0]}\n  Linen gives {shown[1]}\n  nnx_call and linen_call choose what is compared"
        raise AssertionError(f"{title} in the form of their outputs:\n  {text}")
    gaps = {jax.tree_util.keystr(path): _gap(x, y) for (path, x), (_, y) in zip(a, b, strict=True)}
    worst = max((gap.error for gap in gaps.values()), default=0.0)
    if not worst <= tolerance:
        faults = [f"output{name} {gap}" for name, gap in gaps.items() if not gap.error <= tolerance]
        lines = [f"{title} in their outputs (tolerance {tolerance:.1e}):", *faults, *_first_parting(pairs, tolerance)]
        raise AssertionError("\n  ".join(lines))
    return worst


def _first_parting(pairs: list[Pair], tolerance: float) -> list[str]:
    """The first pair of submodules whose results differ, what agreed before it, and whether its inputs did."""
    if not pairs:
        return ["no submodules correspond: none returns an array of the same shape from the same parameters"]
    gaps = [_gap(a.returned, b.returned) for a, b in pairs]
    first = next((i for i, gap in enumerate(gaps) if not gap.error <= tolerance), len(pairs))
    lines = [f"first place where they part, of {len(pairs)} calls of submodules in order of execution:"]
    if first:
        lines.append(f"  agree  {_names(pairs[first - 1])}  {gaps[first - 1].error:.1e}")
    if first == len(pairs):
        return [*lines, "  this is the last: the cause lies behind it, in what no submodule returns"]
    ours, theirs = pairs[first]
    lines.append(f"  PART   {_names(pairs[first])}  {gaps[first]}")
    if ours.given is None or theirs.given is None or ours.given.shape != theirs.given.shape:
        return lines
    given = _gap(ours.given, theirs.given)
    agree = given.error <= tolerance
    cause = "the cause lies within" if agree else "the cause lies before it, in what is done between the two"
    return [*lines, f"  its inputs {'agree' if agree else 'differ already'}, {given.error:.1e}: {cause}"]


def _names(pair: Pair) -> str:
    return " = ".join(map(str, pair))


# Which submodules correspond


def pairs_of(rows: Mapping[str, Row], ours: list[Call], theirs: list[Call]) -> list[Pair]:
    """Calls of submodules with the same parameters and the same shape of result, where either side has equally many."""
    there = {name: list(row.parts) for name, row in rows.items()}
    found = (_by_parameters(ours, parts_of(rows)), _by_parameters(theirs, there))
    partner = {}
    for key, calls in found[0].items():
        others = found[1][key]
        if len(calls) == len(others):
            partner |= {id(call): other for call, other in zip(calls, others, strict=True)}
    return [(call, partner[id(call)]) for call in ours if id(call) in partner]


def parts_of(rows: Mapping[str, Row]) -> dict[str, list[Part]]:
    """NNX parameter -> its parts: one, or one a layer."""
    here = defaultdict(list)
    for row in rows.values():
        for part in row.parts:
            here[part[0]].append(part)
    return here


def _by_parameters(calls: list[Call], parts: Mapping[str, list[Part]]) -> dict[Any, list[Call]]:
    found = defaultdict(list)
    for call in calls:
        under = [all_parts for name, all_parts in parts.items() if _is_in(name, call)]
        if call.of > 1 and all(len(one) == call.of for one in under):  # each time round the scan it is another layer
            under = [[one[call.number]] for one in under]
        if under and call.returned is not None:
            found[frozenset(itertools.chain(*under)), call.returned.shape].append(call)
    return found


def _is_in(name: str, call: Call) -> bool:
    return not call.path or name.startswith("/".join(map(str, call.path)) + "/")


# Gradients


def compare_gradients(
    title: str,
    ours: tuple[Arrays, Arrays],
    theirs: tuple[Arrays, Arrays],
    rows: Mapping[str, Row],
    calls: list[Call],
    tolerance: float,
) -> float:
    """The largest difference; AssertionError with the one that is nearest to the output, and with the largest."""
    (by_params, by_inputs), (their_params, their_inputs) = ours, theirs
    gaps = {f"{name} of the inputs": _gap(a, their_inputs[name]) for name, a in by_inputs.items()}
    for label, (name, i) in _in_order(rows, calls):
        at = ... if i is None else i
        if name in by_params:  # of integers there are none
            gaps[label] = _gap(by_params[name][at], their_params[name][at])
    apart = [label for label, gap in gaps.items() if not gap.error <= tolerance]
    worst = max(gaps, key=lambda label: gaps[label].error, default=None)
    if apart:
        behind = itertools.islice(gaps, list(gaps).index(apart[-1]) + 1, None)
        lines = [f"  agree  {label}  {gaps[label].error:.1e}" for label in itertools.islice(behind, 1)]
        raise AssertionError(
            "\n  ".join(
                [
                    f"{title} in their gradients (tolerance {tolerance:.1e}); their outputs agree:",
                    f"{len(apart)} of {len(gaps)} differ, most of all {worst}  {gaps[worst]}",
                    "first place where they part, walking back from the output:",
                    *lines,
                    f"  PART   {apart[-1]}  {gaps[apart[-1]]}",
                ]
            )
        )
    return gaps[worst].error if worst else 0.0


def _in_order(rows: Mapping[str, Row], calls: list[Call]) -> list[tuple[str, Part]]:
    """Label and part of every parameter, in the order in which the innermost submodules that hold them are through."""

    def place(part: Part) -> int:
        holders = [(i, call) for i, call in enumerate(calls) if _is_in(part[0], call)]
        depth = max((len(call.path) for _, call in holders), default=0)
        own = (i for i, call in holders if len(call.path) == depth and (call.of == 1 or part[1] in (None, call.number)))
        return next(own, len(calls))

    parts = parts_of(rows)
    every = sorted(itertools.chain(*parts.values()), key=place)
    return [(name if i is None else f"{name} [layer {i} of {len(parts[name])}]", (name, i)) for name, i in every]
