"""Runs of equal layers, each of which becomes a stack."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from flax import nnx

from nnxmoe.model.layer import Layer, MakeLayer
from nnxmoe.model.stack import Stack
from nnxmoe.model.strategy import Strategy

Runs = Sequence[tuple[int, MakeLayer]]


def runs_of(model: Any, dtype: Any) -> Runs:
    """Consecutive layers of one kind, as pairs of their number and a function that makes one of them."""
    runs = (list(same) for _, same in itertools.groupby(range(model.config.num_hidden_layers), model.kind))

    def make(index: int, rngs: nnx.Rngs | None) -> Layer:
        return model.layer(index, dtype=dtype, rngs=rngs)

    return [(len(run), functools.partial(make, run[0])) for run in runs]


def stacks_of(runs: Runs, strategy: Strategy, rngs: nnx.Rngs | None) -> list[Stack]:
    """The stacks of layers of a model: one per run, of which a pipeline computes the longest.

    Raises ValueError if that has fewer layers than there are stages.
    """
    assert strategy.stacking is not None
    stacks: list[Stack] = []
    longest = max(range(len(runs)), key=lambda i: runs[i][0])
    for i, (count, make) in enumerate(runs):
        if strategy.pipeline is not None and i == longest:
            stacks.append(strategy.pipeline.stack(strategy.mesh, count, make, rngs, strategy.remat))
        else:
            stacks.append(strategy.stacking(count, make, rngs, strategy.remat))
    return stacks
