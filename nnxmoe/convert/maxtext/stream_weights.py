"""Convert the weights of residual streams (`HyperConnection`) to MaxText's layout, with three arrays per parameter.

In a family's table, ``mhc_…/alpha``, ``beta`` and ``alpha_scale`` name nnxmoe's parameters. ``alpha`` maps all streams
to the weights for reading, adding and mixing the streams. ``beta`` contains the offsets of these weights, and
``alpha_scale`` contains one factor for each of the three weights. MaxText splits each parameter into ``pre``, ``post``
and ``res``. MaxText also multiplies the streams by a scale before ``alpha``. The scale is 1 in checkpoints converted
from Hugging Face.
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np

from nnxmoe.convert.arrays.boxes import Box
from nnxmoe.convert.arrays.lazy_array import Empty, LazyArray, LazyArrays, merge_columns

_NORM, _PARTS, _KINDS = "mhc_norm/scale", ("pre", "post", "res"), ("alpha", "beta", "alpha_scale")


def split_streams(arrays: LazyArrays, streams: int) -> dict[str, LazyArray]:
    """Replace nnxmoe's `HyperConnection` arrays with MaxText's. ``streams`` is the number of residual streams."""
    result = dict(arrays)
    for name, array in arrays.items():
        folder, parameter = _of_streams(name)
        if parameter:
            del result[name]
            rows = array if parameter == "alpha" else array.swap_leading_axes()
            for part, columns, shape in _sections(parameter, streams):
                result[f"{folder}/{part}_{parameter}"] = _shaped(rows.take(columns, -1), shape, parameter)
        if parameter == "alpha":
            result[f"{folder}/{_NORM}"] = LazyArray.from_array(np.ones(array.shape[:-1], array.dtype))
    return result


def join_streams(arrays: LazyArrays, names: Iterable[str], streams: int) -> dict[str, LazyArray]:
    """Build nnxmoe's `HyperConnection` arrays from MaxText's arrays. Inverse of `split_streams`.

    Args:
        arrays: MaxText's arrays by name.
        names: Names of nnxmoe's arrays to build. An array with missing parts or wrong shapes has a ``fault``.
        streams: Number of residual streams.
    """
    result = dict(arrays)
    for name in names:
        folder, parameter = _of_streams(name)
        if not parameter:
            continue
        parts, faults = list[tuple[LazyArray, range]](), list[str]()
        for part, columns, shape in _sections(parameter, streams):
            maxtext_name = f"{folder}/{part}_{parameter}"
            array = result.pop(maxtext_name, None)
            if array is None or not _fits(array.shape, shape, parameter):
                faults.append(
                    f"{maxtext_name} is missing" if array is None else f"{maxtext_name} has shape {list(array.shape)}"
                )
            else:
                parts.append((_flat(array, shape, parameter), columns))
        norm = result.pop(f"{folder}/{_NORM}", None) if parameter == "alpha" else None
        if norm is not None and parts and norm.shape != parts[0][0].shape[:-1]:
            faults.append(f"{folder}/{_NORM} has shape {list(norm.shape)}")
        if faults:
            result[name] = LazyArray.faulty(", and ".join(faults), (name,))
            continue
        merged_array = merge_columns(parts)
        merged_array = merged_array if norm is None else _times(merged_array, norm)
        result[name] = merged_array if parameter == "alpha" else merged_array.swap_leading_axes()
    return result


def _of_streams(name: str) -> tuple[str, str]:
    """Split the name of a `HyperConnection` array into (folder, parameter). Other arrays have parameter ``""``."""
    folder, _, parameter = name.rpartition("/")
    return folder, parameter if folder.rpartition("/")[2].startswith("mhc_") and parameter in _KINDS else ""


def _sections(parameter: str, streams: int) -> Iterator[tuple[str, range, tuple[int, ...]]]:
    """Yield (MaxText's name, columns in nnxmoe's array, MaxText's shape without layers and inputs) of each part."""
    square = (streams, streams) if parameter == "beta" else (streams**2,)
    shapes = ((1,),) * 3 if parameter == "alpha_scale" else ((streams,), (streams,), square)
    start = 0
    for part, shape in zip(_PARTS, shapes, strict=True):
        yield part, range(start, start + math.prod(shape)), shape
        start += math.prod(shape)


def _shaped(rows: LazyArray, shape: tuple[int, ...], parameter: str) -> LazyArray:
    """Reshape columns ``[…, n]`` to MaxText's shape, with layers on axis 1."""
    if parameter == "alpha":
        return rows
    reshaped = rows.reshape((*rows.shape[:-1], *shape))
    return reshaped.swap_leading_axes() if len(rows.shape) > 1 else reshaped


def _flat(array: LazyArray, shape: tuple[int, ...], parameter: str) -> LazyArray:
    """Flatten MaxText's array to columns ``[…, n]``. Inverse of `_shaped`."""
    if parameter == "alpha":
        return array
    layers = array.shape[1:2] if len(array.shape) > len(shape) else ()
    return (array.swap_leading_axes() if layers else array).reshape((*layers, math.prod(shape)))


def _fits(actual: tuple[int, ...], shape: tuple[int, ...], parameter: str) -> bool:
    actual_part = (
        actual[-1:] if parameter == "alpha" else actual if len(actual) == len(shape) else (*actual[:1], *actual[2:])
    )
    return actual_part == shape


def _times(array: LazyArray, norm: LazyArray) -> LazyArray:
    """Multiply ``array [..., n]`` by ``norm [...]``."""

    def read(box: Box, empty: Empty) -> np.ndarray:
        values, factor = array.read_box(box, empty), norm.read_box(box[:-1], np.empty)
        return values * factor[..., None].astype(values.dtype)

    return LazyArray(array.shape, array.dtype, read, array.block, file=array.file)
