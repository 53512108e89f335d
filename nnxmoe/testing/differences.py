"""Compare the values of both modules, and locate the first difference."""

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnxmoe.linen.mapping import Part, Row
from nnxmoe.testing.parameters import Arrays, kind
from nnxmoe.testing.record import Call

Pair = tuple[Call, Call]


class _Gap(NamedTuple):
    """Largest difference between two arrays, relative to their largest magnitude if it exceeds 1. Infinite for NaN."""

    error: float
    at: tuple[int, ...]
    ours: float
    theirs: float

    def __str__(self) -> str:
        if not self.error:
            return "0"
        return f"{self.error:.1e} at {list(self.at)}: NNX {self.ours:.6g}, Linen {self.theirs:.6g}"


def measure_gap(nnx_values: Any, linen_values: Any) -> _Gap:
    """Compute the largest difference between two arrays."""
    a, b = (np.asarray(x, np.float64) for x in (nnx_values, linen_values))
    if not a.size:
        return _Gap(0.0, (), 0.0, 0.0)
    with np.errstate(invalid="ignore"):
        gaps = np.nan_to_num(np.where(a == b, 0.0, np.abs(a - b)), nan=np.inf, posinf=np.inf)
    index = tuple(map(int, np.unravel_index(gaps.argmax(), gaps.shape)))
    largest = max(float(np.abs(x).max(where=np.isfinite(x), initial=1.0)) for x in (a, b))
    return _Gap(float(gaps[index]) / largest, index, float(a[index]), float(b[index]))


def compare_outputs(
    title: str, nnx_output: Any, linen_output: Any, pairs: list[Pair], rows: Mapping[str, Row], tolerance: float
) -> float:
    """Return the largest difference between the outputs.

    Raises AssertionError with the first pair of submodules whose results differ.
    """
    (a, tree), (b, their_tree) = (jax.tree_util.tree_flatten_with_path(output) for output in (nnx_output, linen_output))
    if tree != their_tree or [kind(leaf) for _, leaf in a] != [kind(leaf) for _, leaf in b]:
        lines = [
            f"{title} in the structure of their outputs:",
            f"NNX returns {_shown(nnx_output, a)}",
            f"Linen returns {_shown(linen_output, b)}",
            _selection(a, b),
        ]
        raise AssertionError("\n  ".join(lines))
    if not any(leaf.size for _, leaf in a):
        raise ValueError("the outputs have no values to compare: pass inputs that are not empty")
    if complex_leaves := [kind(leaf) for _, leaf in a if jnp.iscomplexobj(leaf)]:
        raise ValueError(
            f"the outputs have {complex_leaves[0]}: return real and imaginary parts separately (nnx_call, linen_call)"
        )
    gaps = {jax.tree_util.keystr(path): measure_gap(x, y) for (path, x), (_, y) in zip(a, b, strict=True)}
    worst = max((gap.error for gap in gaps.values()), default=0.0)
    if not worst <= tolerance:
        differences = [f"output{name} {gap}" for name, gap in gaps.items() if not gap.error <= tolerance]
        lines = [
            f"{title} in their outputs (tolerance {tolerance:.1e}):",
            *differences,
            *_first_parting(pairs, rows, tolerance),
        ]
        raise AssertionError("\n  ".join(lines))
    return worst


def _shown(output: Any, leaves: list[Any]) -> str:
    name = "" if isinstance(output, jax.Array) else f"{type(output).__name__} of "
    return name + (", ".join(kind(leaf) for _, leaf in leaves) or "nothing")


def _selection(nnx_leaves: list[Any], linen_leaves: list[Any]) -> str:
    """Suggest how to select an output if one side returns a single output and the other several."""
    for call, several, single in (("nnx_call", nnx_leaves, linen_leaves), ("linen_call", linen_leaves, nnx_leaves)):
        paths = [
            jax.tree_util.keystr(path)
            for path, leaf in several
            if len(single) == 1 and kind(leaf) == kind(single[0][1])
        ]
        if paths and paths[0]:
            return f"select the output to compare with {call}=lambda m, *x: m(*x){paths[0]}"
    return "select the outputs to compare with nnx_call and linen_call"


def _first_parting(pairs: list[Pair], rows: Mapping[str, Row], tolerance: float) -> list[str]:
    """Describe the first pair of submodules whose results differ.

    Also describes the last pair that agrees, and whether the inputs of the first differing pair agree.
    Skips intended differences, such as MaxText's divided queries, unless there are no others. A
    difference may be intended if an enclosing submodule agrees or if the mapping changes the parameters.
    """
    if not pairs:
        return ["no submodules correspond: no pair has the same parameters and returns arrays of the same shape"]
    gaps = [measure_gap(a.returned, b.returned) for a, b in pairs]
    agree = [gap.error <= tolerance for gap in gaps]
    differing = [i for i in range(len(pairs)) if not agree[i] and not _is_healed(i, pairs, agree)]
    changed_modules = {part[0].rpartition("/")[0] for row in rows.values() if row.changed for part in row.parts}
    unexplained = [i for i in differing if "/".join(map(str, pairs[i][0].path)) not in changed_modules]
    first = next(iter(unexplained or differing), len(pairs))
    lines = [f"first difference, of {len(pairs)} calls of submodules in order of execution:"]
    for i in [i for i in range(first) if agree[i]][-1:] + [i for i in differing if i < first]:
        lines.append(f"  {'agree' if agree[i] else 'maybe'}  {' = '.join(map(str, pairs[i]))}  {gaps[i]}")
        lines[-1] += "" if agree[i] else " (perhaps intended: the mapping changes its parameters)"
    if first == len(pairs):
        return [*lines, "  this is the last call: the cause is after it, outside all submodules"]
    nnx_call, linen_call = pairs[first]
    lines.append(f"  DIFFER {nnx_call} = {linen_call}  {gaps[first]}")
    if nnx_call.given is not None and linen_call.given is not None and nnx_call.given.shape == linen_call.given.shape:
        gap = measure_gap(nnx_call.given, linen_call.given).error
        inputs_agree = f"  its inputs agree, {gap:.1e}: the cause is inside it"
        inputs_differ = f"  its inputs already differ, {gap:.1e}: the cause is before it, between the two"
        lines.append(inputs_agree if gap <= tolerance else inputs_differ)
    return lines


def _is_healed(i: int, pairs: list[Pair], agree: list[bool]) -> bool:
    """Check whether an enclosing submodule agrees although this submodule differs.

    For example, both sides may apply the same factor in different submodules.
    """
    path, enclosing = pairs[i][0].path, {}
    for j in range(i + 1, len(pairs)):
        other_path = pairs[j][0].path
        if len(other_path) < len(path) and other_path == path[: len(other_path)]:
            enclosing.setdefault(other_path, agree[j])
    return any(enclosing.values())


# Correspondence of submodules


def pair_calls(rows: Mapping[str, Row], nnx_calls: list[Call], linen_calls: list[Call]) -> list[Pair]:
    """Pair calls of submodules with equal parameters and equal shapes of results, in execution order.

    If the numbers of calls differ, for example because one side wraps a layer, only the last calls
    are paired, which are the outermost.
    """
    linen_parts = {name: list(row.parts) for name, row in rows.items()}
    calls_by_key = (_by_parameters(nnx_calls, parts_of(rows)), _by_parameters(linen_calls, linen_parts))
    partner = {}
    for key in calls_by_key[0].keys() & calls_by_key[1].keys():
        calls, linen_matches = calls_by_key[0][key], calls_by_key[1][key]
        if len(calls) != len(linen_matches):
            calls, linen_matches = calls[-1:], linen_matches[-1:]
        partner |= {id(call): linen_match for call, linen_match in zip(calls, linen_matches, strict=True)}
    return [(call, partner[id(call)]) for call in nnx_calls if id(call) in partner]


def parts_of(rows: Mapping[str, Row]) -> dict[str, list[Part]]:
    """Map each NNX parameter to its parts: one part, or one per layer."""
    nnx_parts = defaultdict(dict)  # ordered, without duplicates: several rows may read a part
    for row in rows.values():
        for part in row.parts:
            nnx_parts[part[0]][part] = None
    return {name: list(parts) for name, parts in nnx_parts.items()}


def _by_parameters(calls: list[Call], parts: Mapping[str, list[Part]]) -> dict[Any, list[Call]]:
    calls_by_key = defaultdict(list)
    for call in calls:
        inner_parts = [all_parts for name, all_parts in parts.items() if _is_in(name, call)]
        if call.of > 1 and all(
            len(parameter_parts) == call.of for parameter_parts in inner_parts
        ):  # each iteration of the scan is a layer
            inner_parts = [[parameter_parts[call.number]] for parameter_parts in inner_parts]
        if inner_parts:
            calls_by_key[frozenset(itertools.chain(*inner_parts)), call.returned.shape].append(call)
    return calls_by_key


def _is_in(name: str, call: Call) -> bool:
    return not call.path or name.startswith("/".join(map(str, call.path)) + "/")


# Gradients


def compare_gradients(
    title: str, grads: list[tuple[Arrays, Arrays]], rows: Mapping[str, Row], calls: list[Call], tolerance: float
) -> float:
    """Return the largest difference between the two modules' gradients, as measured by `measure_gap`.

    Raises AssertionError with the largest difference and the difference nearest to the output.
    """
    (param_grads, input_grads), (their_params, their_inputs) = grads
    gaps = {name: measure_gap(a, their_inputs[name]) for name, a in input_grads.items()}
    for label, (name, i) in _in_order(rows, calls):
        index = ... if i is None else i
        if name in param_grads:  # integer parameters have no gradient
            gaps[label] = measure_gap(param_grads[name][index], their_params[name][index])
    differing = [label for label, gap in gaps.items() if not gap.error <= tolerance]
    if differing:
        worst, last = max(gaps, key=lambda label: gaps[label].error), differing[-1]
        previous = list(gaps)[list(gaps).index(last) + 1 :][:1]
        lines = [
            f"{title} in their gradients (tolerance {tolerance:.1e}); their outputs agree:",
            f"{len(differing)} of {len(gaps)} differ, the largest is {worst}  {gaps[worst]}",
            "first difference, going back from the output:",
            *(f"  agree  {label}  {gaps[label]}" for label in previous),
            f"  DIFFER {last}  {gaps[last]}",
        ]
        raise AssertionError("\n  ".join(lines))
    return max((gap.error for gap in gaps.values()), default=0.0)


def _in_order(rows: Mapping[str, Row], calls: list[Call]) -> list[tuple[str, Part]]:
    """Return label and part of every parameter, in the order in which their innermost submodules finish."""

    def place(part: Part) -> int:
        holders = [(i, call) for i, call in enumerate(calls) if _is_in(part[0], call)]
        depth = max((len(call.path) for _, call in holders), default=0)
        positions = (
            i for i, call in holders if len(call.path) == depth and (call.of == 1 or part[1] in (None, call.number))
        )
        return next(positions, len(calls))

    parts = parts_of(rows)
    ordered = sorted(itertools.chain(*parts.values()), key=place)
    return [(name if i is None else f"{name} [layer {i} of {len(parts[name])}]", (name, i)) for name, i in ordered]
