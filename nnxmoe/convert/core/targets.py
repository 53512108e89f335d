"""Targets of an array's values: boxes of the array, and views of the buffers that receive them."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from nnxmoe.convert.core.layout import Leaf
from nnxmoe.convert.core.lazy_array import Box, LazyArray, sizes

Ranges = tuple[tuple[int, int], ...]  # (start, stop) per dimension
Buffers = dict[Ranges, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Target:
    """A box of an array, and the buffer view that receives its values, with the array's dimensions.

    ``cut``: the range of the last dimension to keep after `Leaf.change`, which needs the whole dimension.
    """

    box: Box
    view: np.ndarray
    cut: slice | None = None


def targets_of(leaf: Leaf, number: int, buffers: Buffers) -> Iterator[Target]:
    """The targets of a part, given its number, among the buffers of its parameter."""
    part = leaf.parts[number]
    lead = len(part.at)
    for ranges, buffer in buffers.items():
        if not all(start <= at < stop for at, (start, stop) in zip(part.at, ranges, strict=False)):
            continue
        values = buffer[tuple(at - start for at, (start, _) in zip(part.at, ranges, strict=False))]
        box, cut = leaf.inner_box(tuple(slice(*ends) for ends in ranges[lead:]), part), None
        view = leaf.view(values, part, sizes(box))
        if leaf.change.features != "as they are" and box[-1] != slice(0, leaf.inner[-1]):
            box, cut = (*box[:-1], slice(0, leaf.inner[-1])), box[-1]
        yield Target(leaf.stacked(box, number), view if leaf.axis is None else np.expand_dims(view, leaf.axis), cut)


def blocks(targets: list[Target], array: LazyArray) -> Iterator[Box]:
    """Boxes of about ``array.block`` bytes that cover all targets."""
    if not targets:
        return
    ends = zip(*(target.box for target in targets), strict=True)
    box = tuple(slice(min(part.start for part in parts), max(part.stop for part in parts)) for parts in ends)
    lines = 1 if all(target.view.flags.c_contiguous for target in targets) else 64
    yield from _cut(box, -(-array.nbytes // max(1, array.size)), array.block, lines)


def _cut(box: Box, item: int, limit: int, lines: int) -> Iterator[Box]:
    """A box in pieces of about ``limit`` bytes; row counts are multiples of ``lines``, to fill whole cache lines."""
    if not box:
        yield box
        return
    first, rest = box[0], box[1:]
    row = max(1, item * math.prod(sizes(rest)))
    if len(rest) > 1 and row > limit:
        for i in range(first.start, first.stop):
            yield from ((slice(i, i + 1), *inner) for inner in _cut(rest, item, limit, lines))
        return
    step = max(lines, limit // row // lines * lines)
    for start in range(first.start, first.stop, step):
        yield slice(start, min(start + step, first.stop)), *rest
