"""Boxes: rectangular regions of an array, with one slice per dimension."""

import math
from collections.abc import Iterable, Iterator

import numpy as np

Box = tuple[slice, ...]  # every slice has a start and a stop but no step


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box of a whole array."""
    return tuple(slice(0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(part.stop - part.start for part in box)


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes. `None` if it is empty."""
    intersection = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return intersection if all(extent.start < extent.stop for extent in intersection) else None


def within(box: Box, outer_box: Box) -> Box:
    """Return a box relative to the start of an outer box."""
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(box, outer_box, strict=True))


def hull(boxes: Iterable[Box]) -> Box:
    """Return the smallest box that contains all boxes."""
    dimensions = zip(*boxes, strict=True)
    return tuple(slice(min(part.start for part in parts), max(part.stop for part in parts)) for parts in dimensions)


def hull_of_range(shape: tuple[int, ...], start: int, stop: int) -> Box:
    """Return the smallest box that contains the values ``start`` to ``stop - 1`` of the flattened array."""
    if not shape:
        return ()
    row_size = math.prod(shape[1:])
    first_row, last_row = start // row_size, (stop - 1) // row_size
    if first_row < last_row:
        return slice(first_row, last_row + 1), *whole(shape[1:])
    return slice(first_row, last_row + 1), *hull_of_range(
        shape[1:], start - first_row * row_size, stop - first_row * row_size
    )


def matching_dimensions(shape: tuple[int, ...], other_shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield pairs of the shortest runs of consecutive dimensions with equal sizes in both shapes."""
    i = j = 0
    while i < len(shape) or j < len(other_shape):
        starts, a, b = (i, j), shape[i], other_shape[j]
        i, j = i + 1, j + 1
        while a != b or (i == len(shape)) != (j == len(other_shape)):
            if a < b or j == len(other_shape):
                a, i = a * shape[i], i + 1
            else:
                b, j = b * other_shape[j], j + 1
        yield slice(starts[0], i), slice(starts[1], j)


def reshape_box(box: Box, shape: tuple[int, ...], new_shape: tuple[int, ...]) -> Box:
    """Return the box with the same values after `numpy.reshape` from ``shape`` to ``new_shape``.

    Raises ValueError if the values do not form a box in ``new_shape``.
    """
    reshaped: Box = ()
    for dimensions, other_dimensions in matching_dimensions(shape, new_shape):
        part, part_shape, new_part_shape = box[dimensions], shape[dimensions], new_shape[other_dimensions]
        start = _flat_index([extent.start for extent in part], part_shape)
        stop = _flat_index([extent.stop - 1 for extent in part], part_shape) + 1
        new_box = hull_of_range(new_part_shape, start, stop)
        if not stop - start == math.prod(sizes(part)) == math.prod(sizes(new_box)):
            raise ValueError(
                f"dimensions {part_shape} and {new_part_shape} can be sharded by whole rows only, got {part}: change "
                "the sharding rules"
            )
        reshaped = (*reshaped, *new_box)
    return reshaped


def _flat_index(index: list[int], shape: tuple[int, ...]) -> int:
    return int(np.ravel_multi_index(index, shape)) if shape else 0
