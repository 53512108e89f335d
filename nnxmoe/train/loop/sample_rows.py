"""Conversion of a rollout's samples to the arrays of a training batch."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from nnxmoe.model.program import bucket_size
from nnxmoe.train.data.batches import place
from nnxmoe.train.data.documents import Document, Row, fill


@dataclasses.dataclass(frozen=True)
class ScoredSample:
    """Sampled answer to a prompt, with the values that the loss needs.

    Attributes:
        prompt_ids, ids: Ids of the prompt and of the answer.
        logps: Log-probability of each id of the answer in the sampler.
        routing: Expert ids of all tokens except the last one, or None.
        advantage, reward: Advantage and reward of the sample.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logps: tuple[float, ...]
    routing: Integer[np.ndarray, "tokens L X"] | None
    advantage: float
    reward: float

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    def document(self) -> Document:
        """Return all ids, with a mask of the answer's ids."""
        ids = np.asarray(self.prompt_ids + self.ids, np.int32)
        return Document(ids, np.arange(len(ids)) >= len(self.prompt_ids), chat=True)


def stack_samples(samples: Sequence[ScoredSample | None], length: int, multiple: int, *, pack: bool) -> Row:
    """Stack samples into a batch of arrays ``[B, T]``; see `nnxmoe.train.loop.policy_gradient` for the fields.

    Args:
        samples: The samples. None becomes an empty row, or no row with ``pack``.
        length: Number of tokens per row (T).
        multiple: Empty rows are added until B is a multiple of this number.
        pack: Whether rows may contain several samples. B is then also rounded up to one of a few sizes, to limit the
            number of compilations.
    """
    rows = [[] if sample is None else [sample] for sample in samples]
    if pack:
        present = [sample for sample in samples if sample is not None]
        rows = [[present[i] for i in row] for row in place(map(len, present), length)]
    row_groups = -(-len(rows) // multiple)
    if pack:
        row_groups = bucket_size(row_groups, 1)
    rows += [[]] * (multiple * row_groups - len(rows))
    routing_shape = next((s.routing.shape[1:] for s in samples if s is not None and s.routing is not None), None)
    arrays = [_fill_row(row, length, routing_shape) for row in rows]
    return {name: np.stack([row[name] for row in arrays]) for name in arrays[0]}


def _fill_row(samples: Sequence[ScoredSample], length: int, routing_shape: tuple[int, ...] | None) -> Row:
    row = fill([sample.document() for sample in samples], length, 0)
    for name in ("advantages", "rewards", "sampler_logps"):
        row[name] = np.zeros(length, np.float32)
    if routing_shape is not None:
        row["routing"] = np.full((length, *routing_shape), -1, np.int16)
    end = 0
    for sample in samples:
        start, end = end, end + len(sample)
        answer = slice(end - len(sample.ids), end)
        row["advantages"][answer], row["rewards"][answer] = sample.advantage, sample.reward
        row["sampler_logps"][answer] = sample.logps
        if sample.routing is not None:
            row["routing"][start : end - 1] = sample.routing
    return row
