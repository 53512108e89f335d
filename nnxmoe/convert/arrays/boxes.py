"""Boxes: rectangular regions of an array, with one slice per dimension."""

import math
from collections.abc import Iterable, Iterator

import numpy as np

Box = tuple[slice, ...]  # every slice has a start and a stop, and no step


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box of a whole array."""
    return tuple(slice(0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(part.stop - part.start for part in box)


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    both = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return both if all(part.start < part.stop for part in both) else None


def within(box: Box, outer: Box) -> Box:
    """Return a box relative to the start of an outer box."""
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(box, outer, strict=True))


def hull(boxes: Iterable[Box]) -> Box:
    """Return the smallest box that contains all boxes."""
    dimensions = zip(*boxes, strict=True)
    return tuple(slice(min(part.start for part in parts), max(part.stop for part in parts)) for parts in dimensions)


def hull_of_range(shape: tuple[int, ...], low: int, high: int) -> Box:
    """Return the smallest box that contains the values ``low`` to ``high - 1`` of the flattened array."""
    if not shape:
        return ()
    rest = math.prod(shape[1:])
    first, last = low // rest, (high - 1) // rest
    if first < last:
        return slice(first, last + 1), *whole(shape[1:])
    return slice(first, last + 1), *hull_of_range(shape[1:], low - first * rest, high - first * rest)


def matching_dimensions(shape: tuple[int, ...], other: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield the shortest runs of consecutive dimensions of two shapes with equal numbers of values."""
    i = j = 0
    while i < len(shape) or j < len(other):
        first, a, b = (i, j), shape[i], other[j]
        i, j = i + 1, j + 1
        while a != b or (i == len(shape)) != (j == len(other)):
            if a < b or j == len(other):
                a, i = a * shape[i], i + 1
            else:
                b, j = b * other[j], j + 1
        yield slice(first[0], i), slice(first[1], j)


def reshape_box(box: Box, shape: tuple[int, ...], other: tuple[int, ...]) -> Box:
    """Return the box with the same values after `numpy.reshape` from ``shape`` to ``other``.

    Raises ValueError if the values do not form a box in ``other``.
    """
    reshaped: Box = ()
    for dimensions, others in matching_dimensions(shape, other):
        part, part_shape, other_shape = box[dimensions], shape[dimensions], other[others]
        low = _flat_index([each.start for each in part], part_shape)
        high = _flat_index([each.stop - 1 for each in part], part_shape) + 1
        new = hull_of_range(other_shape, low, high)
        if not high - low == math.prod(sizes(part)) == math.prod(sizes(new)):
            raise ValueError(
                f"only whole rows of the dimensions {part_shape} and {other_shape} can be split, got {part}: change "
                "the rules"
            )
        reshaped = (*reshaped, *new)
    return reshaped


def _flat_index(index: list[int], shape: tuple[int, ...]) -> int:
    return int(np.ravel_multi_index(index, shape)) if shape else 0
