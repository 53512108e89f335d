"""Which waiting prompts are read together, and in chunks of which sizes."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

SMALL, LARGE = 64, 512  # tokens per chunk of a prompt
MOST_SMALL = 6  # small chunks that are less work than a large one


def chunk_sizes(length: int) -> list[int]:
    """Sizes of the chunks in which a prompt is read: as many of `LARGE` as it fills, then as few of `SMALL` as hold the
    rest, or one `LARGE` where that is less work."""
    large, rest = divmod(length, LARGE)
    small = -(-rest // SMALL)
    return [LARGE] * large + ([SMALL] * small if small <= MOST_SMALL else [LARGE])


class PrefillGroup(NamedTuple):
    """How the first waiting prompts are read: how many of them, in a batch of how many rows, in chunks of which
    sizes."""

    count: int
    rows: int
    sizes: list[int]


def as_one_large_chunk(lengths: Sequence[int], slots: int) -> PrefillGroup:
    """Prompts of equal small chunks together, as many as a large chunk has room for; longer ones alone."""
    sizes = chunk_sizes(lengths[0])
    rows = min(slots, max(1, LARGE // max(sizes)))
    count = sum(1 for _ in itertools.takewhile(lambda length: chunk_sizes(length) == sizes, lengths[:rows]))
    return PrefillGroup(count, 1 if count == 1 else rows, sizes)


def one_by_one(lengths: Sequence[int], slots: int) -> PrefillGroup:
    """Every prompt alone, so that not even the last bits of what follows depend on what else is waiting."""
    return PrefillGroup(1, 1, chunk_sizes(lengths[0]))


Grouping = Callable[[Sequence[int], int], PrefillGroup]  # (lengths of the waiting prompts, slots) -> PrefillGroup
