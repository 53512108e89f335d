"""How long compiled functions take beside each other."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def seconds(run: Callable[[], Any]) -> float:
    """Of one call, until its arrays are there."""
    started = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - started


def interleaved(
    runs: Mapping[str, Callable[[int], Any]], times: int, at_most: float = float("inf")
) -> dict[str, list[float]]:
    """Seconds of calls in turn, ``times`` of each after one that is not counted; each is given its number.

    Fewer, but three at least, where they take more than ``at_most`` seconds in all.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run(0))
    started = time.perf_counter()
    for i in range(1, times + 1):
        for name, run in runs.items():
            found[name].append(seconds(lambda run=run, i=i: run(i)))
        if i >= 3 and time.perf_counter() - started > at_most:
            break
    return found
