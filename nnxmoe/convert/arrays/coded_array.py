"""Quantized weights of a checkpoint, dequantized when they are read."""

import functools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from nnxmoe.convert.arrays.boxes import Box
from nnxmoe.convert.arrays.lazy_array import Empty, LazyArray, LazyArrays
from nnxmoe.layers.linear.code_format import CodeFormat


def coded_array(codes: CodeFormat, shape: tuple[int, ...], parts: Mapping[str, LazyArray]) -> LazyArray:
    """Return quantized weights as a lazy float32 array. Reading a box dequantizes it.

    Args:
        codes: Quantization format.
        shape: Shape of the weights, ``[O, I]``, or ``[E, O, I]`` for all experts.
        parts: Arrays of a `QuantizedWeight` by name: ``codes``, ``scale``, and ``zero`` and ``order`` if present.
    """
    code_array, read_box = parts["codes"], functools.partial(_decode, codes, shape, parts)
    tensors = tuple(name for part in parts.values() for name in part.tensors)
    fault = next((part.fault for part in parts.values() if part.fault), None)
    weights = LazyArray(shape, np.dtype(np.float32), read_box, code_array.block, codes, parts, code_array.file)
    return replace(weights, tensors=tensors, fault=fault)


def _decode(codes: CodeFormat, shape: tuple[int, ...], parts: LazyArrays, box: Box, empty: Empty) -> np.ndarray:
    *experts, rows, columns = box
    if "order" in parts:
        weights = _decode_tiles(codes, parts, [], rows, slice(0, shape[1]))
        return weights[:, np.argsort(np.asarray(parts["order"]))[columns]]
    tile = min(codes.tile[1], shape[-1])
    first_column, last_column = columns.start // tile * tile, min(shape[-1], -(-columns.stop // tile) * tile)
    weights = _decode_tiles(codes, parts, experts, rows, slice(first_column, last_column))
    return weights[..., columns.start - first_column : columns.stop - first_column]


def _decode_tiles(
    codes: CodeFormat, parts: LazyArrays, experts: list[slice], rows: slice, columns: slice
) -> np.ndarray:
    """Dequantize any range of rows. The range of columns must start and end at tile boundaries."""
    (tile_rows, tile_columns), per_byte = codes.tile, 1 + codes.is_packed
    tiles = (
        slice(rows.start // tile_rows, -(-rows.stop // tile_rows)),
        slice(columns.start // tile_columns, -(-columns.stop // tile_columns)),
    )
    bytes_ = slice(columns.start // per_byte, columns.stop // per_byte)
    code_values = parts["codes"].read_box((*experts, rows, bytes_), np.empty)
    scale = parts["scale"].read_box((*experts, *tiles), np.empty)
    zero = parts["zero"].read_box((*experts, *tiles), np.empty) if "zero" in parts else None
    first_row = tiles[0].start * tile_rows
    with np.errstate(over="ignore", invalid="ignore"):
        return codes.decode(code_values, scale, zero, slice(rows.start - first_row, rows.stop - first_row))
