"""Policies for reading waiting prompts: which share a batch, sizes of chunks, and which beginnings are kept."""

import collections
import itertools
import os.path
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from nnxmoe.generation.request import Prefix

SMALL, LARGE = 64, 512  # tokens per chunk of a prompt
MOST_SMALL = 6  # small chunks that are less work than a large one
SMALLEST_CACHE, SMALLEST_BATCH = 512, 8  # tokens of up to 8 rows together; rows of a batch of several
_RECENT = 32  # prompts that a new one is compared with


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


def left_padded_chunks(
    prompts: Sequence[Sequence[int]], rows: int, sizes: Sequence[int]
) -> list[tuple[Int[np.ndarray, "R T"], Bool[np.ndarray, "R T"]]]:
    """Pad prompts on the left and split them into chunks.

    Args:
        prompts: ids, at most ``sum(sizes)`` per prompt.
        rows: number of rows. Rows without a prompt are padding.
        sizes: tokens per chunk.

    Returns:
        Ids and validity mask of each chunk.
    """
    length = sum(sizes)
    ids, valid = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :], valid[row, length - len(prompt) :] = prompt, True
    ends = itertools.accumulate(sizes)
    return [(ids[:, end - size : end], valid[:, end - size : end]) for end, size in zip(ends, sizes, strict=True)]


Grouping = Callable[[Sequence[int], int], PrefillGroup]  # (lengths of the waiting prompts, slots) -> PrefillGroup


class PrefixCache:
    """LRU cache of up to ``most`` prefixes. The engine keeps the KV cache of a prefix as long as the object lives.

    ``hits``: number of prompts that began with a cached prefix. ``tokens``: number of ids that were not computed again.
    ``starts``: maps a prefix yet to be read to the cached prefix that it begins with. It is stored here because the
    caller may share `Prefix` objects between engines.
    """

    def __init__(self, most: int):
        self.starts = weakref.WeakKeyDictionary[Prefix, Prefix]()
        self.max_prefixes, self.hits, self.tokens = most, 0, 0
        self._kept = collections.OrderedDict[tuple[int, ...], Prefix]()
        self._recent = collections.deque[tuple[int, ...]](maxlen=_RECENT)

    def __len__(self) -> int:
        return len(self._kept)

    def match(self, ids: tuple[int, ...]) -> Prefix | None:
        """The longest prefix of a prompt, shorter than it: one that is kept, or, if that is at least SMALL ids longer,
        what it has in common with a recent prompt, which is kept from now on."""
        found = [kept for kept in self._kept if len(kept) < len(ids) and ids[: len(kept)] == kept]
        best = max(found, key=len, default=())
        alike = (len(os.path.commonprefix([ids, recent])) for recent in self._recent)  # pyright: ignore
        common = min(max(alike, default=0), len(ids) - 1)
        self._recent.append(ids)
        kept = self._kept.get(best)
        if kept is not None:
            self._kept.move_to_end(best)
            self.hits, self.tokens = self.hits + 1, self.tokens + len(best)
        if common - len(best) < SMALL:
            return kept
        prefix = self.insert(Prefix(ids[:common]))
        if kept is not None:
            self.starts[prefix] = kept
        return prefix

    def link(self, prefix: Prefix) -> None:
        """Record a cached prefix as the start of a prefix that has no start yet."""
        if prefix.start is None and prefix not in self.starts and (start := self.match(prefix.ids)) is not None:
            self.starts[prefix] = start

    def insert(self, prefix: Prefix) -> Prefix:
        self._kept[prefix.ids] = prefix
        self._kept.move_to_end(prefix.ids)
        while len(self._kept) > self.max_prefixes:
            self._kept.popitem(last=False)
        return prefix
