"""Runs of equal layers, for models whose layers differ in kind."""

import itertools
from collections.abc import Iterable, Sequence

from nnxmoe.model.layer import MakeLayer

Runs = Sequence[tuple[int, MakeLayer]]


def runs_of(layers: Iterable[MakeLayer]) -> Runs:
    """Consecutive equal functions as pairs of their number and one of them: ``[a, a, b] -> [(2, a), (1, b)]``.

    ``layers``: the function that makes each layer, first to last. Each run becomes one stack.
    """
    return [(len(list(same)), make) for make, same in itertools.groupby(layers)]
