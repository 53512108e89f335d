"""Which beginnings of prompts an engine keeps: what several prompts share, and what has just been answered."""

import collections
import itertools

from nnxmoe.generation.grouping import SMALL
from nnxmoe.generation.request import Prefix

_RECENT = 32  # prompts that a new one is compared with


class KeptPrefixes:
    """Up to ``most`` prefixes, the least recently used out. The engine keeps the cache of a prefix as long as the
    object lives. ``hits``: prompts that began with one that was read before; ``tokens``: how many ids they saved."""

    def __init__(self, most: int):
        self.most, self.hits, self.tokens = most, 0, 0
        self._kept = collections.OrderedDict[tuple[int, ...], Prefix]()
        self._recent = collections.deque[tuple[int, ...]](maxlen=_RECENT)

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, ids: tuple[int, ...]) -> Prefix | None:
        """The longest prefix of a prompt, shorter than it: one that is kept, or, if that is at least SMALL ids longer,
        what it has in common with a recent prompt, which is kept from now on."""
        found = [kept for kept in self._kept if len(kept) < len(ids) and ids[: len(kept)] == kept]
        best = max(found, key=len, default=None)
        common = max((_common(ids, recent) for recent in self._recent), default=0)
        common = min(common, len(ids) - 1)
        self._recent.append(ids)
        kept = None
        if best is not None:
            kept = self._kept[best]
            self._kept.move_to_end(best)
            self.hits, self.tokens = self.hits + 1, self.tokens + len(best)
        if common - (0 if best is None else len(best)) < SMALL:
            return kept
        return self.add(Prefix(ids[:common], kept))

    def add(self, prefix: Prefix) -> Prefix:
        """Keep a prefix."""
        self._kept[prefix.ids] = prefix
        self._kept.move_to_end(prefix.ids)
        while len(self._kept) > self.most:
            self._kept.popitem(last=False)
        return prefix


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many first ids two prompts have in common; 0 for fewer than SMALL."""
    if one[:SMALL] != other[:SMALL]:
        return 0
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
