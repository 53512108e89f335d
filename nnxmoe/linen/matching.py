"""Match parameters of both sides: find possible pairs, then accept those that the rules make certain."""

import dataclasses
import re
from collections.abc import Callable, Mapping

import jax.numpy as jnp

from nnxmoe.linen.mapping import Source, splits
from nnxmoe.linen.words import Words

Shape = tuple[int, ...]
Layers = frozenset[int | None]
OUTSIDE: Layers = frozenset({None})
_AS_IS, _TRANSPOSED, _EITHER = "as is", "transposed", "unknown"  # how values are stored


@dataclasses.dataclass
class Entry:
    """A parameter, or, with ``{layer}`` in its name, the parameters of equal shape in several ``layers``.

    ``members``: the parameters' full names. ``rows``: their names in a mapping, which are ``name``, or ``members`` if
    shapes differ between layers. ``hidden``: a number in the name may be a layer's number that our model does not have.
    """

    name: str
    shape: Shape
    layers: Layers
    words: Words
    members: tuple[str, ...]
    rows: tuple[str, ...]
    hidden: bool = False

    @property
    def parent(self) -> str:
        """Name of the module that has the parameter."""
        return re.split(r"[/.](?=[^/.]*$)", self.name)[0] if re.search(r"[/.]", self.name) else ""


class Matching:
    """Possible pairs, ``edges[ours][theirs]`` -> how the values are stored, and certain pairs."""

    def __init__(self, ours: list[Entry], theirs: list[Entry], every: Layers):
        self.ours, self.theirs, self.every = ours, theirs, every
        fits = {
            (i, j): fit
            for i, a in enumerate(ours)
            for j, b in enumerate(theirs)
            if not a.words.contradicts(b.words) and (fit := self._fits(a, b))
        }
        votes = {inside: self._votes(fits, inside) for inside in (False, True)}
        usual = {False} if any(b.name.split("/")[-1] == "kernel" for b in theirs) else set[bool]()
        self.edges: dict[int, dict[int, str]] = {i: {} for i in range(len(ours))}
        for (i, j), (as_is, transposed, matrix) in fits.items():
            stored = votes[ours[i].layers != OUTSIDE] or usual | votes[False] | votes[True]
            known = next(iter(stored)) if len(stored) == 1 else None
            as_is, transposed = as_is and not (matrix and transposed and known), transposed and known is not False
            if as_is or transposed:
                self.edges[i][j] = _EITHER if as_is and transposed else _AS_IS if as_is else _TRANSPOSED
        self.complete = self._complete_layers()
        self.pairs: dict[int, tuple[int, str]] = {}

    def _fits(self, a: Entry, b: Entry) -> tuple[bool, bool, bool] | None:
        """Whether values fit in order, whether they fit transposed, and whether they are a matrix; None if no fit."""
        stored = b.shape
        if a.layers == OUTSIDE:
            if b.layers != OUTSIDE or b.hidden or (self.every and self._stacked(b) and len(stored) > len(a.shape)):
                return None
        elif b.layers == OUTSIDE:
            if not self._stacked(b) or a.rows != (a.name,):
                return None
            stored = stored[1:]
        elif b.layers not in (a.layers, self.every):
            return None
        as_is = splits(stored, a.shape)
        matrix = not (a.words.norm or a.words.bias or a.words.roles == {"embed"})
        experts = len(a.shape) == 3 and a.words.aspects[1] == "experts"
        transposed = matrix and (len(stored) == 2 or (experts and len(stored) == 3 and stored[1] == stored[2]))
        transposed = transposed and splits(stored[::-1] if len(stored) == 2 else stored, a.shape)
        return (as_is, transposed, matrix and len(stored) == 2) if as_is or transposed else None

    def _stacked(self, b: Entry) -> bool:
        return b.layers == OUTSIDE and b.shape[:1] == (len(self.every),)

    def _votes(self, fits: Mapping[tuple[int, int], tuple[bool, bool, bool]], inside: bool) -> set[bool]:
        """Decide whether their matrices are ``[out, in]``, by the matrices that fit in one orientation only and share a
        role with ours. Returns both answers if these contradict each other."""
        votes: dict[int, set[bool]] = {}
        for (i, j), (as_is, transposed, matrix) in fits.items():
            in_scope = matrix and (self.ours[i].layers != OUTSIDE) == inside
            if in_scope and self.ours[i].words.roles & self.theirs[j].words.roles:
                votes.setdefault(j, set()).update([False] * as_is + [True] * transposed)
        return {vote for each in votes.values() if len(each) == 1 for vote in each}

    def _complete_layers(self) -> Layers:
        """Layers in which both sides have equally many parameters, and each has at least one that fits."""
        fitting = {j for edges in self.edges.values() for j in edges}
        inside = {j for i, edges in self.edges.items() if self.ours[i].layers != OUTSIDE for j in edges}
        if any(j not in fitting and b.layers == OUTSIDE for j, b in enumerate(self.theirs)):
            return frozenset()

        def complete(layer: int | None) -> bool:
            here = [i for i, a in enumerate(self.ours) if layer in a.layers]
            there = [
                j
                for j, b in enumerate(self.theirs)
                if (layer in b.layers if b.layers != OUTSIDE or j not in inside else layer is not None)
            ]
            return len(here) == len(there) and all(self.edges[i] for i in here) and fitting.issuperset(there)

        return frozenset(layer for layer in (*self.every, None) if complete(layer))

    def run(self) -> None:
        """Apply the rules in turn until none accepts another pair."""
        rules = (self._same_words, self._same_role, self._same_module, self._only_fit)
        while any(self._accept(rule) for rule in rules):
            pass

    def _accept(self, rule: Callable[[int, int], float]) -> bool:
        """Accept each pair that scores higher than all other pairs with one of its parameters. A pair with a negative
        score is not accepted, but its absolute value competes with others."""
        scores = {
            i: {j: score for j in row if (score := rule(i, j))} for i, row in self.edges.items() if i not in self.pairs
        }
        columns: dict[int, list[int]] = {}
        for i, row in scores.items():
            for j in row:
                columns.setdefault(j, []).append(i)

        def certain(i: int, j: int) -> bool:
            score = scores[i][j]
            if score < 0 or self.edges[i][j] == _EITHER or any(abs(scores[i][k]) >= score for k in scores[i] if k != j):
                return False
            return not any(abs(scores[k][j]) >= score for k in columns[j] if k != i and self._overlap(i, k))

        found = [(i, j) for i, row in scores.items() for j in row if certain(i, j)]
        for i, j in found:
            self.pairs[i] = j, self.edges[i][j]
            for k, edges in self.edges.items():
                if self._overlap(i, k):
                    edges.pop(j, None)
            self.edges[i] = {}
        return bool(found)

    def _same_words(self, i: int, j: int) -> float:
        """Score pairs whose names have equal words. Equal numbers count if these words have the same numbers on both
        sides."""
        a, b = self.ours[i].words, self.theirs[j].words
        if a.stem != b.stem or a.digits != b.digits:
            return 0
        return not a.digits or self._digits(self.ours, a.stem) == self._digits(self.theirs, b.stem)

    @staticmethod
    def _digits(entries: list[Entry], stem: tuple[str, ...]) -> set[tuple[str, ...]]:
        return {entry.words.digits for entry in entries if entry.words.stem == stem}

    def _same_role(self, i: int, j: int) -> float:
        """Score pairs with a role that both names allow, if theirs has all other words of ours. An unambiguous role
        scores higher."""
        a, b = self.ours[i].words, self.theirs[j].words
        matches = a.roles & b.roles and a.rest <= b.rest
        return 1 + (len(b.roles) == 1) + 2 * len(a.rest) if matches else 0

    def _same_module(self, i: int, j: int) -> float:
        """Score pairs in modules that are already matched by another parameter, such as the bias after the kernel."""
        ours, theirs = self.ours[i].parent, self.theirs[j].parent
        together = (self.ours[k].parent == ours and self.theirs[n].parent == theirs for k, (n, _) in self.pairs.items())
        alone = sum(entry.parent == theirs for entry in self.theirs) == 2
        return bool(ours and theirs) and alone and any(together)

    def _only_fit(self, i: int, j: int) -> float:
        """Score pairs for which nothing else fits, in layers that match completely, and among norms in all layers."""
        a, b = self.ours[i], self.theirs[j]
        return 1 if a.layers <= self.complete or (a.words.norm and b.words.norm) else -1

    def _overlap(self, i: int, k: int) -> bool:
        return bool(self.ours[i].layers & self.ours[k].layers)

    def sources(self) -> dict[int, Source]:
        """Map the index of our entry to their name, or to a pair of their name and `jnp.transpose`."""
        named = {i: (self.theirs[j].name, how) for i, (j, how) in self.pairs.items()}
        return {i: (name, jnp.transpose) if how == _TRANSPOSED else name for i, (name, how) in named.items()}

    def candidates(self, i: int) -> tuple[str, ...]:
        return tuple(self.theirs[j].name for j in self.edges[i])
