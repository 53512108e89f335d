"""Measurements in processes of their own, and of two sides in turn."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.bandwidth import weights_read
from tests.benchmarks.engine import SETTINGS
from tests.benchmarks.results import Result, direction, group

ROOT = Path(__file__).resolve().parents[2]


def call(module: str, *arguments: object, timeout: float = 3600) -> dict[str, Any]:
    """What a module of this folder prints in a fresh process, in its last line; RuntimeError where it fails."""
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", *map(str, arguments)]
    environment = os.environ | {"TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command[2:])} ended with {run.returncode}:\n{run.stderr[-3000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def have_transformers() -> bool:
    """Whether the other side is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def both_sides(
    case: str,
    arguments: Sequence[object],
    sides: Sequence[str],
    repeat: int,
    limit: Mapping[str, float],
    left_out: list[str],
) -> Iterator[Result]:
    """What ``tests.benchmarks.ours`` measures given ``arguments``, a checkpoint first, beside transformers where it is
    among the sides; of decoding also how fast weights are read, beside a bandwidth with its name.

    ``case`` begins with the model's name: Llama has no experts to set.
    """
    settings = () if "theirs" not in sides else ("",) if case.startswith("llama") else SETTINGS
    results, skipped = alternating(case, arguments, settings, repeat)
    left_out += skipped
    yield from results
    for result in results:
        if result.measure == "decode batch 1, tok/s":
            yield weights_read(Path(str(arguments[0])), result, limit)


def alternating(
    case: str, arguments: Sequence[object], settings: Sequence[str], repeat: int
) -> tuple[list[Result], list[str]]:
    """Ours and each setting of theirs in turn, ``repeat`` times; what was left out, and why.

    A setting that is within a quarter of the best in no measure of the first round, loading aside, is not run again.
    """
    ours: list[dict[str, Any]] = []
    theirs: dict[str, list[dict[str, Any]]] = {setting: [] for setting in settings}
    left_out: list[str] = []
    going = list(settings)
    for round_ in range(repeat):
        ours.append(call("ours", *arguments))
        if skipped := ours[-1].pop("skipped"):
            raise RuntimeError(f"nnxmoe did not finish {case}: {skipped}")
        for setting in going:
            found = call("theirs", *arguments, *(["--setting", setting] if setting else []))
            left_out += [f"{case}, transformers {setting}: {k}: {why}" for k, why in found.pop("skipped").items()]
            theirs[setting].append(found)
        if round_ == 0:
            going = [setting for setting in going if _competes(setting, theirs)] or going[:1]
    results = []
    for name in ours[0]:
        values = {f"transformers {s}".strip(): [f[name] for f in found if name in f] for s, found in theirs.items()}
        results.append(Result(case, name, [found[name] for found in ours], {s: v for s, v in values.items() if v}))
    return results, left_out


def _competes(setting: str, theirs: dict[str, list[dict[str, float]]]) -> bool:
    for name, value in theirs[setting][0].items():
        best = max(direction(name) * found[0][name] for found in theirs.values() if name in found[0])
        if group(name) not in ("load", "warm-up") and direction(name) * value >= best - abs(best) / 4:
            return True
    return False
