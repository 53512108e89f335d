"""Five execution modes on eight devices reproduce MaxText's losses within its memory."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flax import nnx

from tests.benchmarks.modes import CASE, MODES, deepseek, load, mixtral, strategy

WANTED = json.loads((CASE / "train.json").read_text())["losses"]


def trained(mode: str) -> tuple[list[float], float, float, dict[str, int]]:
    """Eight losses, mean parameter error against MaxText, temporary megabytes, and collectives.

    The error is a mean because Adam divides rounding errors by each other where a gradient is nearly 0.
    """
    training = mixtral(mode)
    losses, _ = training.run(len(WANTED))
    theirs = nnx.state(load("params_step8", strategy(mode)), nnx.Param)
    pairs = zip(nnx.to_flat_state(training.state[0]), nnx.to_flat_state(theirs), strict=True)
    error = max(float(np.abs(a.get_value() - b.get_value()).mean()) for (_, a), (_, b) in pairs)
    return losses, error, training.temporary, dict(training.collectives)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=pytest.mark.slow if mode != "sparse ring EP8" else []) for mode in MODES],
)
def test_eight_steps_equal_maxtext(eight: Callable[..., Any], mode: str) -> None:
    losses, error, megabytes, found = eight(trained, mode)
    assert np.abs(np.array(losses) - WANTED).max() < 5e-6, losses
    assert error < 1e-6, error
    assert megabytes <= MODES[mode][2]
    scatters = {"sparse ring EP8": 3, "sparse FSDP8": 3}  # of y and two gradients; of three kernel gradients
    assert found.get("reduce-scatter", 0) == scatters.get(mode, 0)


def memory(mode: str) -> float:
    return deepseek(mode).temporary


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_deepseek_memory_is_within_maxtext(eight: Callable[..., Any], mode: str) -> None:
    assert eight(memory, mode) <= MODES[mode][3]
