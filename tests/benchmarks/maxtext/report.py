"""Tables of results in Markdown: nnxmoe / MaxText = ratio."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
GB, MB = 1e9, 1e6
COMPILED = ["step, GB per device", "arguments", "temporary", "sum", "received", "grouped matmul HBM", "lowering, CPU s"]
STEPS = ["step", "CPU seconds", "temporary, MB", "first loss", "last loss"]


def compiled_table(results: Mapping[str, Mapping[str, Result]]) -> str:
    """Format the table of compiled steps. ``results`` maps case -> side -> figures."""
    lines = _header(COMPILED)
    for case, sides in results.items():
        cells = [_ratio(sides, lambda result, name=name: result[name] / GB) for name in ("arguments", "temporary")]
        cells.append(_ratio(sides, lambda result: (result["arguments"] + result["temporary"]) / GB))
        cells += [_ratio(sides, lambda result, name=name: result[name] / GB) for name in ("received", "kernels")]
        cells.append(_ratio(sides, lambda result: result["lower_cpu"], ".1f"))
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def steps_table(results: Mapping[str, Mapping[str, Result]]) -> str:
    """Format the table of steps on CPUs. ``results`` maps case -> side -> figures."""
    lines = _header(STEPS)
    for case, sides in results.items():
        cells = [
            _ratio(sides, lambda result: _median(result["cpu"])),
            _ratio(sides, lambda result: result["temporary"] / MB, ".0f"),
        ]
        cells += [" / ".join(_loss(sides.get(side, {}), i) for side in ("ours", "theirs")) for i in (0, -1)]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _header(columns: list[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _ratio(sides: Mapping[str, Result], figure: Callable[[Result], float], form: str = ".2f") -> str:
    """Format both figures and their ratio. A side that failed or was not measured has a dash."""
    ours, theirs = (_figure(sides.get(side), figure) for side in ("ours", "theirs"))
    text = " / ".join("-" if one is None else format(one, form) for one in (ours, theirs))
    return f"{text} = **{ours / theirs:.2f}**" if ours and theirs else text


def _figure(result: Result | None, figure: Callable[[Result], float]) -> float | None:
    return None if result is None or "error" in result else figure(result)


def _median(values: Sequence[float]) -> float:
    """Return the median without the first value. A single value is returned as it is."""
    return statistics.median(values[1:] or values)


def _loss(result: Result, i: int) -> str:
    return f"{result['loss'][i]:.6f}" if "loss" in result else "-"
