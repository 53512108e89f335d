"""Prefill policies: how prompts are batched, split into chunks, and matched with cached prefixes."""

import collections
import itertools
import os.path
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from nnxmoe.generation.request import Prefix

SMALL, LARGE = 64, 512  # Tokens per prefill chunk.
MAX_SMALL = 6  # Up to this many small chunks are faster than one large chunk.
SMALL_BATCH = 8  # Maximum rows of a small batch.
# Minimum cache capacity: per row of a small batch in `generate`, which limits the number of programs, and of all rows
# together in `complete`. There, 512 tokens per row would slow down 8 rows of the demo by a factor of three (two cores).
SMALLEST_CACHE = 512
MIN_ROWS = 4  # Minimum rows of a batch with more than one row.
_MAX_RECENT = 32  # Number of recent prompts that a new prompt is compared with.


def chunk_sizes(length: int) -> list[int]:
    """Return the chunk sizes of a prompt.

    Uses as many `LARGE` chunks as fit. The rest is covered by the fewest `SMALL` chunks, or by a `LARGE`
    chunk if that is faster.
    """
    large, remainder = divmod(length, LARGE)
    small = -(-remainder // SMALL)
    return [LARGE] * large + ([SMALL] * small if small <= MAX_SMALL else [LARGE])


class PrefillGroup(NamedTuple):
    """Batch of waiting prompts to prefill.

    Attributes:
        prompts: number of prompts.
        rows: number of rows of the batch.
        sizes: tokens per chunk.
    """

    prompts: int
    rows: int
    sizes: list[int]


def as_one_large_chunk(lengths: Sequence[int], slots: int) -> PrefillGroup:
    """Batch prompts with the same chunk sizes, up to `LARGE` tokens per chunk of the batch.

    Prompts with a `LARGE` chunk are prefilled one at a time.
    """
    sizes = chunk_sizes(lengths[0])
    rows = min(slots, max(1, LARGE // max(sizes)))
    count = sum(1 for _ in itertools.takewhile(lambda length: chunk_sizes(length) == sizes, lengths[:rows]))
    return PrefillGroup(count, 1 if count == 1 else rows, sizes)


def one_by_one(lengths: Sequence[int], slots: int) -> PrefillGroup:
    """Prefill each prompt in a separate batch.

    The results of a prompt are then bitwise independent of other requests.
    """
    return PrefillGroup(1, 1, chunk_sizes(lengths[0]))


def left_padded_chunks(
    prompts: Sequence[Sequence[int]], rows: int, sizes: Sequence[int]
) -> list[tuple[Int[np.ndarray, "R T"], Bool[np.ndarray, "R T"]]]:
    """Left-pad prompts and split them into chunks.

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
    """LRU cache of prefixes. The engine stores the KV cache of a prefix while the `Prefix` object is alive.

    Attributes:
        max_prefixes: maximum number of prefixes.
        starts: maps a prefix that is not prefilled yet to the cached prefix that it starts with. Not an
            attribute of `Prefix`, because callers may share `Prefix` objects between engines.
        hits: number of prompts that started with a cached prefix.
        tokens: total number of cached ids that were reused.
    """

    def __init__(self, max_prefixes: int):
        self.starts = weakref.WeakKeyDictionary[Prefix, Prefix]()
        self.max_prefixes, self.hits, self.tokens = max_prefixes, 0, 0
        self._prefixes = collections.OrderedDict[tuple[int, ...], Prefix]()
        self._recent_prompts = collections.deque[tuple[int, ...]](maxlen=_MAX_RECENT)

    def __len__(self) -> int:
        return len(self._prefixes)

    def match(self, ids: tuple[int, ...]) -> Prefix | None:
        """Return the longest reusable prefix that is shorter than the prompt, or None.

        Usually returns a cached prefix. If the prompt shares at least `SMALL` more ids with a recent
        prompt, adds the shared ids to the cache and returns them.
        """
        matches = [cached for cached in self._prefixes if len(cached) < len(ids) and ids[: len(cached)] == cached]
        longest = max(matches, key=len, default=())
        common = 0
        for recent_prompt in self._recent_prompts:
            common = max(common, len(os.path.commonprefix([ids, recent_prompt])))  # pyright: ignore
        common = min(common, len(ids) - 1)
        self._recent_prompts.append(ids)
        prefix = self._prefixes.get(longest)
        if prefix is not None:
            self._prefixes.move_to_end(longest)
            self.hits, self.tokens = self.hits + 1, self.tokens + len(longest)
        if common - len(longest) < SMALL:
            return prefix
        extended = self.insert(Prefix(ids[:common]))
        if prefix is not None:
            self.starts[extended] = prefix
        return extended

    def clear(self) -> None:
        """Remove all prefixes and recent prompts. The counters ``hits`` and ``tokens`` keep their values."""
        self._prefixes.clear()
        self._recent_prompts.clear()

    def link(self, prefix: Prefix) -> None:
        """Record the cached prefix that ``prefix`` starts with, unless ``prefix`` has a start."""
        if prefix.start is None and prefix not in self.starts:
            start = self.match(prefix.ids)
            if start is not None:
                self.starts[prefix] = start

    def insert(self, prefix: Prefix) -> Prefix:
        """Add a prefix, and evict the least recently used prefixes beyond ``max_prefixes``. Returns ``prefix``."""
        self._prefixes[prefix.ids] = prefix
        self._prefixes.move_to_end(prefix.ids)
        while len(self._prefixes) > self.max_prefixes:
            self._prefixes.popitem(last=False)
        return prefix
