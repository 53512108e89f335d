"""Targets of an array's values: boxes of the array, and views of the buffers that receive them."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from nnxmoe.convert.core.layout import Leaf, Part
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


def targets_of(leaf: Leaf, part: Part, buffers: Buffers) -> Iterator[Target]:
    """The targets of a part among the buffers of its parameter."""
    lead, whole = len(part.at), part.box(leaf.shape)
    inner = [i for i, at in enumerate(part.place) if not isinstance(at, int)]
    inner += range(len(part.place), len(leaf.shape))  # dimensions of the array that are dimensions of the part
    for ranges, buffer in buffers.items():
        starts = [start for start, _ in ranges[:lead]]
        if not all(start <= at < stop for at, (start, stop) in zip(part.at, ranges, strict=False)):
            continue
        values = buffer[tuple(at - start for at, start in zip(part.at, starts, strict=True))]
        own = tuple(slice(*ends) for ends in ranges[lead:])
        there, box, cut = leaf.inner_box(own, part.parameter), list(whole), None
        view = leaf.view(values, part.parameter, sizes(there))
        for dim, piece in zip(inner, there, strict=True):
            box[dim] = slice(whole[dim].start + piece.start, whole[dim].start + piece.stop)
        if leaf.change.features != "as they are" and box[-1] != whole[-1]:
            cut, box[-1] = there[-1], whole[-1]
        for dim in range(len(leaf.shape)):
            view = view if dim in inner else np.expand_dims(view, dim)
        yield Target(tuple(box), view, cut)


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
