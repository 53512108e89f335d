"""Match NNX parameters with Linen parameters: find candidate pairs, then accept unambiguous pairs.

Entries in ``ours`` are NNX parameters, and entries in ``theirs`` are Linen parameters.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from nnxmoe.linen.mapping import Source, splits
from nnxmoe.linen.words import Words

Shape = tuple[int, ...]
Layers = frozenset[int | None]
OUTSIDE: Layers = frozenset({None})
_AS_IS, _TRANSPOSED, _EITHER = "as is", "transposed", "unknown"  # how a Linen array stores NNX values


class _Fit(NamedTuple):
    """Whether two shapes fit as is, whether they fit transposed, and whether the parameter is a matrix."""

    as_is: bool
    transposed: bool
    is_matrix: bool

    def storage(self, matrices_transposed: bool | None) -> str | None:
        """Return how values are stored, or None if the shapes do not fit.

        ``matrices_transposed`` is whether the tree's other matrices are stored transposed, or None if
        unknown.
        """
        as_is, transposed = self.as_is, self.transposed
        if matrices_transposed is False:
            transposed = False
        elif matrices_transposed and self.is_matrix and transposed:
            as_is = False
        if as_is and transposed:
            return _EITHER
        if as_is:
            return _AS_IS
        return _TRANSPOSED if transposed else None


@dataclasses.dataclass
class Entry:
    """A parameter, or the parameters of equal shape in several layers (``{layer}`` in the name).

    Attributes:
        members: Full names of the parameters.
        rows: Names of the parameters in a mapping: ``name``, or ``members`` if shapes differ between
            layers.
        hidden: True if the name may contain the index of a layer that the NNX model does not have.
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
        """Name of the module that contains the parameter."""
        return re.split(r"[/.](?=[^/.]*$)", self.name)[0] if re.search(r"[/.]", self.name) else ""


class Matching:
    """Candidate pairs and accepted pairs. ``edges[i][j]`` is how Linen entry j stores NNX entry i."""

    def __init__(self, ours: list[Entry], theirs: list[Entry], every: Layers):
        self.ours, self.theirs, self.every = ours, theirs, every
        self.roles = frozenset[str]().union(*(a.words.roles for a in ours))
        shapes = [a.shape for a in ours if a.layers != OUTSIDE]
        # MaxText stacks layers on axis 1. True if only axis 1 can be the layer axis of some parameter.
        self.layers_on_axis_1 = any(
            b.layers == OUTSIDE
            and b.shape[1:2] == (len(every),) != b.shape[:1]
            and any(splits(rest, s) for s in shapes)
            for b in theirs
            for rest in [b.shape[:1] + b.shape[2:]]
        )
        fits: dict[tuple[int, int], _Fit] = {}
        for i, a in enumerate(ours):
            for j, b in enumerate(theirs):
                fit = None if a.words.contradicts(b.words) else self._fit(a, b)
                if fit is not None:
                    fits[i, j] = fit
        self.edges: dict[int, dict[int, str]] = {i: {} for i in range(len(ours))}
        votes = {inside: self._votes(fits, inside) for inside in (False, True)}
        for (i, j), fit in fits.items():
            is_linen_kernel = theirs[j].name.split("/")[-1] == "kernel"
            answers = votes[ours[i].layers != OUTSIDE] or ({False} if is_linen_kernel else set[bool]())
            storage = fit.storage(next(iter(answers)) if len(answers) == 1 else None)
            if storage is not None:
                self.edges[i][j] = storage
        self.complete = self._complete_layers()
        self.pairs: dict[int, tuple[int, str]] = {}

    def _fit(self, a: Entry, b: Entry) -> _Fit | None:
        their_shape = b.shape
        if a.layers == OUTSIDE:
            if b.layers != OUTSIDE or b.hidden or (self.every and self._stacked(b) and len(their_shape) > len(a.shape)):
                return None
        elif b.layers == OUTSIDE:
            if not self._stacked(b) or a.rows != (a.name,):
                return None
            their_shape = their_shape[1:]
        elif b.layers not in (a.layers, self.every):
            return None
        as_is = splits(their_shape, a.shape)
        matrix = not (a.words.norm or a.words.bias or a.words.roles == {"embed"})
        experts = len(a.shape) == 3 and a.words.aspects[1] == "experts"
        transposed = matrix and (
            len(their_shape) == 2 or (experts and len(their_shape) == 3 and their_shape[1] == their_shape[2])
        )
        transposed = transposed and splits(their_shape[::-1] if len(their_shape) == 2 else their_shape, a.shape)
        return _Fit(as_is, transposed, matrix and len(their_shape) == 2) if as_is or transposed else None

    def _stacked(self, b: Entry) -> bool:
        """Check whether axis 0 contains the layers."""
        on_axis = [size == len(self.every) for size in b.shape]
        return b.layers == OUTSIDE and on_axis[:1] == [True] and not (self.layers_on_axis_1 and on_axis[1:2] == [True])

    def _votes(self, fits: Mapping[tuple[int, int], _Fit], inside: bool) -> set[bool]:
        """Determine whether the Linen matrices are stored as ``[out, in]``.

        Uses pairs of matrices that fit in only one orientation and have a common role. Returns both True and
        False if these pairs contradict each other.
        """
        votes: dict[int, set[bool]] = {}
        for (i, j), (as_is, transposed, is_matrix) in fits.items():
            in_scope = is_matrix and (self.ours[i].layers != OUTSIDE) == inside
            if in_scope and self.ours[i].words.roles & self.theirs[j].words.roles:
                votes.setdefault(j, set()).update([False] * as_is + [True] * transposed)
        return {vote for orientations in votes.values() if len(orientations) == 1 for vote in orientations}

    def _complete_layers(self) -> Layers:
        """Return the layers with equally many parameters on both sides, all of which have candidates."""
        fitting = {j for edges in self.edges.values() for j in edges}
        inside = {j for i, edges in self.edges.items() if self.ours[i].layers != OUTSIDE for j in edges}
        if any(j not in fitting and b.layers == OUTSIDE for j, b in enumerate(self.theirs)):
            return frozenset()

        def is_complete(layer: int | None) -> bool:
            our_indices = [i for i, a in enumerate(self.ours) if layer in a.layers]
            their_indices: list[int] = []
            for j, b in enumerate(self.theirs):
                is_stack = b.layers == OUTSIDE and j in inside
                has_layer = layer is not None if is_stack else layer in b.layers
                if has_layer:
                    their_indices.append(j)
            if len(our_indices) != len(their_indices):
                return False
            return all(self.edges[i] for i in our_indices) and fitting.issuperset(their_indices)

        return frozenset(layer for layer in (*self.every, None) if is_complete(layer))

    def run(self) -> None:
        """Apply the rules repeatedly until no rule accepts another pair."""
        rules = (self._same_words, self._same_role, self._same_module, self._only_fit)
        while any(self._accept(rule) for rule in rules):
            pass

    def _accept(self, rule: Callable[[int, int], float]) -> bool:
        """Accept each pair that scores higher than all other pairs of its two parameters.

        A pair with a negative score is never accepted, but its absolute value competes with other pairs.
        """
        scores = {
            i: {j: score for j in row if (score := rule(i, j))} for i, row in self.edges.items() if i not in self.pairs
        }
        columns: dict[int, list[int]] = {}
        for i, row in scores.items():
            for j in row:
                columns.setdefault(j, []).append(i)

        def is_certain(i: int, j: int) -> bool:
            score = scores[i][j]
            if score < 0 or self.edges[i][j] == _EITHER:
                return False
            if any(abs(scores[i][k]) >= score for k in scores[i] if k != j):
                return False
            return not any(abs(scores[k][j]) >= score for k in columns[j] if k != i and self._overlap(i, k))

        accepted = [(i, j) for i, row in scores.items() for j in row if is_certain(i, j)]
        for i, j in accepted:
            self.pairs[i] = j, self.edges[i][j]
            for k, edges in self.edges.items():
                if self._overlap(i, k):
                    edges.pop(j, None)
            self.edges[i] = {}
        return bool(accepted)

    def _same_words(self, i: int, j: int) -> float:
        """Score pairs whose names have equal words and numbers.

        If there are numbers, these words must occur with the same numbers on both sides.
        """
        a, b = self.ours[i].words, self.theirs[j].words
        if a.stem != b.stem or a.digits != b.digits:
            return 0
        return not a.digits or self._digits(self.ours, a.stem) == self._digits(self.theirs, b.stem)

    @staticmethod
    def _digits(entries: list[Entry], stem: tuple[str, ...]) -> set[tuple[str, ...]]:
        return {entry.words.digits for entry in entries if entry.words.stem == stem}

    def _same_role(self, i: int, j: int) -> float:
        """Score pairs whose names have a common role, if the Linen name contains all other words of the NNX name.

        Linen names with exactly one role of the model score higher. Linen names without a role score -1.
        """
        a, b = self.ours[i].words, self.theirs[j].words
        if not b.roles:
            return -1
        matches = a.roles & b.roles and a.rest <= b.rest
        return 1 + (len(b.roles & self.roles) == 1) + 2 * len(a.rest) if matches else 0

    def _same_module(self, i: int, j: int) -> float:
        """Score pairs in modules that have a matched parameter, such as the bias once the kernel is matched."""
        our_module, their_module = self.ours[i].parent, self.theirs[j].parent
        matched = (
            self.ours[k].parent == our_module and self.theirs[n].parent == their_module
            for k, (n, _) in self.pairs.items()
        )
        has_two_parameters = sum(entry.parent == their_module for entry in self.theirs) == 2
        return bool(our_module and their_module) and has_two_parameters and any(matched)

    def _only_fit(self, i: int, j: int) -> float:
        """Score pairs in layers that match completely, and norms in all layers.

        These pairs are accepted if their parameters have no other candidates. All other pairs score negative.
        """
        a, b = self.ours[i], self.theirs[j]
        return 1 if a.layers <= self.complete or (a.words.norm and b.words.norm) else -1

    def _overlap(self, i: int, k: int) -> bool:
        return bool(self.ours[i].layers & self.ours[k].layers)

    def sources(self) -> dict[int, Source]:
        """Map the index of each matched NNX entry to the Linen name, or to (Linen name, `jnp.transpose`)."""
        matches = {i: (self.theirs[j].name, storage) for i, (j, storage) in self.pairs.items()}
        return {i: (name, jnp.transpose) if storage == _TRANSPOSED else name for i, (name, storage) in matches.items()}

    def candidates(self, i: int) -> tuple[str, ...]:
        """Return the names of the Linen entries that are candidates for an NNX entry."""
        return tuple(self.theirs[j].name for j in self.edges[i])
