"""Held-out batches, measured while a model is trained."""

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from nnxmoe.config.printable import short
from nnxmoe.config.validate import is_positive
from nnxmoe.runtime.programs import JitProgram
from nnxmoe.train.loop.batch import Batch, rows_of
from nnxmoe.train.loop.feed import put_batch
from nnxmoe.train.loop.step import Step, TrainState


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Held-out batches, measured every ``every`` steps (None: not before the end) and at the end."""

    batches: Iterable[Batch]
    every: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.batches, Iterator):
            raise ValueError("evaluate is an iterator, which can be used only once: pass a list of batches, list(…)")
        if self.every is not None and not is_positive(self.every):
            raise ValueError(f"every={short(self.every)}: pass an int of at least 1, or None")


class Evaluator:
    """Computes the mean cross-entropy of held-out batches. Raises ValueError if there are none, or if the first one is
    unusable: before the training, of which an error in the evaluation would lose the last steps."""

    def __init__(self, step: Step, held: Evaluation) -> None:
        self.step, self.data, self.every = step, held.batches, held.every
        if (first := next(iter(self.data), None)) is None:
            raise ValueError("evaluate: there are no batches: pass at least one, or leave it out")
        put_batch(first, step)
        self.losses = JitProgram(step.losses, "the evaluation")

    def due(self, step: int, last: bool) -> bool:
        return last or (self.every is not None and step % self.every == 0)

    def __call__(self, state: TrainState) -> float:
        found, weights = [], []
        for batch in self.data:
            losses = self.losses(state, batch := put_batch(batch, self.step))
            found.append(float(losses.total if losses.cross_entropy is None else losses.cross_entropy))
            weights.append(float(rows_of(batch) if losses.tokens is None else losses.tokens))
        if not sum(weights):
            raise ValueError("evaluate: the batches have no token to predict")
        return float(np.average(found, weights=weights))
