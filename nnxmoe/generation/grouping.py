"""Policies for reading waiting prompts: which share a batch, and the sizes of their chunks."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

SMALL, LARGE = 64, 512  # tokens per chunk of a prompt
MOST_SMALL = 6  # small chunks that are less work than a large one


def chunk_sizes(length: int) -> list[int]:
    """Sizes of the chunks of a prompt: as many `LARGE` as fit, then as few `SMALL` as hold the rest, or one more
    `LARGE` if that is less work."""
    large, rest = divmod(length, LARGE)
    small = -(-rest // SMALL)
    return [LARGE] * large + ([SMALL] * small if small <= MOST_SMALL else [LARGE])


class PrefillGroup(NamedTuple):
    """A batch of waiting prompts to read: their number, the rows of the batch, and the sizes of its chunks."""

    count: int
    rows: int
    sizes: list[int]


def as_one_large_chunk(lengths: Sequence[int], slots: int) -> PrefillGroup:
    """Batch prompts of equally many small chunks, up to the size of a large chunk; longer prompts are read one at a
    time."""
    sizes = chunk_sizes(lengths[0])
    rows = min(slots, max(1, LARGE // max(sizes)))
    count = sum(1 for _ in itertools.takewhile(lambda length: chunk_sizes(length) == sizes, lengths[:rows]))
    return PrefillGroup(count, 1 if count == 1 else rows, sizes)


def one_by_one(lengths: Sequence[int], slots: int) -> PrefillGroup:
    """Read each prompt in a batch of its own, so that its numbers do not depend on other requests, not even in the last
    bits."""
    return PrefillGroup(1, 1, chunk_sizes(lengths[0]))


Grouping = Callable[[Sequence[int], int], PrefillGroup]  # (lengths of the waiting prompts, slots) -> PrefillGroup
