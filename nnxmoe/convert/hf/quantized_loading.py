"""Load into quantized kernels: use the codes of the checkpoint, or quantize floats while they are read."""

from typing import Any

import numpy as np

from nnxmoe.config.printable import plain
from nnxmoe.convert.arrays.boxes import Box, sizes
from nnxmoe.convert.arrays.dtypes import default_dtype
from nnxmoe.convert.arrays.lazy_array import AT_ONCE, Empty, LazyArray, LazyArrays
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.formats.plain_array import CHUNK_BYTES
from nnxmoe.convert.hf.tensor_layout import tensor_layout
from nnxmoe.layers.linear.code_format import STORAGE_DTYPES, CodeFormat
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.quantization.methods import (
    ErrorMeter,
    Method,
    Mixed,
    compute_scales,
    encode_weights,
    format_for_dtype,
)
from nnxmoe.model.quantization.quantized_kernels import KernelRef, quantizable_kernels, replace_with_quantized
from nnxmoe.model.quantization.rounding import kernels_to_quantize


def keep_codes(model: CausalLM, arrays: LazyArrays) -> dict[str, LazyArray]:
    """Quantize the kernels of an abstract model in place wherever the checkpoint contains codes.

    Args:
        model: Model with shapes but no values.
        arrays: Arrays of the checkpoint by name.

    Returns:
        Arrays to load the model from: ``arrays`` with the codes, scales and zero points of quantized kernels in place
        of their floats.

    Raises:
        CheckpointError: (a ValueError) The arrays of one kernel differ in quantization type, tile or zero points.
    """
    found = dict(arrays)
    for place, names in _names(model, arrays):
        kept = {name: one for name in names if name in arrays and (one := arrays[name]).codes is not None}
        if not kept or any(one.fault for one in kept.values()):  # `load_model` reports the faults
            continue
        first, one = next(iter(kept.items()))
        for name in names:
            if name not in kept or _form(kept[name]) != _form(one):
                raise CheckpointError(
                    f"{plain(name)} and {plain(first)} are stored in different ways, and one array would hold both: "
                    "load the model without keep_quantized, or with Strategy(stacking=Unrolled()) if only layers differ"
                )
        for name, each in kept.items():
            found.pop(name, None)  # two kernels may share a fused tensor
            found |= {f"{name}.{part}": array for part, array in each.parts.items()}
            if each.kind == "fp8":
                found[f"{name}.codes"] = _without_nan(each.parts["codes"])
        assert one.codes is not None
        zero, order = "zero" in one.parts, "order" in one.parts
        replace_with_quantized(place, one.codes, model.strategy, scale=one.parts["scale"].dtype, zero=zero, order=order)
    return found


def quantize_while_loading(
    model: CausalLM, arrays: LazyArrays, method: Method | Mixed, dtype: np.dtype | None
) -> tuple[dict[str, LazyArray], ErrorMeter]:
    """Quantize the kernels of an abstract model in place. The codes are computed when their arrays are read.

    Args:
        model: Model with shapes but no values.
        arrays: Arrays of the checkpoint by name.
        method: Quantization method.
        dtype: Dtype of the scales. Defaults to the weights' default dtype.

    Returns:
        Tuple of the arrays to load the model from and a meter of the quantization error. Each read of codes adds to
        the meter.
    """
    found, error = dict(arrays), ErrorMeter()
    methods = {place.path: one for place, one in kernels_to_quantize(model, method)}
    for place, names in _names(model, arrays):
        one = methods.get(place.path)
        stored = [arrays[name] for name in names if name in arrays and arrays[name].fault is None]
        if one is None or len(stored) < len(names):  # `load_model` reports missing and faulty arrays
            continue
        if any(len(array.shape) != 2 for array in stored):
            raise CheckpointError(
                f"{plain(names[0])} does not have two dimensions and cannot be quantised while it is read: load the "
                "model as floats and call nnxmoe.quantize"
            )
        kind = dtype or default_dtype(stored)
        codes = format_for_dtype(one, kind)
        replace_with_quantized(place, codes, model.strategy, scale=kind)
        for name, array in zip(names, stored, strict=True):
            del found[name]
            found |= _on_reading(name, array, one, codes, kind, error)
    return found, error


def _on_reading(
    name: str, array: LazyArray, method: Method, kind: CodeFormat, dtype: np.dtype, error: ErrorMeter
) -> dict[str, LazyArray]:
    """Return codes and scales of a float array ``[O, I]``, each computed from the rows. Every row is read twice."""
    outs, ins = array.shape
    tile = min(kind.tile[0], outs)

    def rounded(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return weights and scales of a range of rows that starts and ends at tile borders."""
        rows = array.read_box((slice(first, min(last, outs)), slice(0, ins)), np.empty)
        try:
            return rows, compute_scales(method, rows, dtype)
        except ValueError as problem:
            raise CheckpointError(f"{plain(name)}: {problem}") from None

    def codes(box: Box, empty: Empty) -> np.ndarray:
        first = box[0].start // tile * tile
        rows, scale = rounded(first, -(-box[0].stop // tile) * tile)
        found = encode_weights(kind, rows, scale)
        part = slice(box[0].start - first, box[0].stop - first)
        error.add(rows[part], kind.decode(found, scale, None, slice(0, len(found)))[part])
        return found[part, box[1]]

    def scale(box: Box, empty: Empty) -> np.ndarray:
        return rounded(box[0].start * tile, box[0].stop * tile)[1][:, box[1]].reshape(sizes(box))

    common: dict[str, Any] = {"file": array.file, "tensors": array.tensors or (name,)}
    # Blocks of about CHUNK_BYTES floats, unless each read reads the whole source.
    of_codes, of_scales = (max(AT_ONCE if array.block >= AT_ONCE else 0, CHUNK_BYTES // n) for n in (8, 256))
    return {
        f"{name}.codes": LazyArray(
            kind.codes_shape(outs, ins), STORAGE_DTYPES[kind.code_dtype], codes, of_codes, **common
        ),
        f"{name}.scale": LazyArray(kind.scales_shape(outs, ins), dtype, scale, of_scales, **common),
    }


def _names(model: CausalLM, arrays: LazyArrays) -> list[tuple[KernelRef, list[str]]]:
    """Return the quantizable kernels, each with the names of its arrays in the checkpoint."""
    names: dict[Any, list[str]] = {}
    for name, leaf in tensor_layout(model, arrays).items():
        for part in leaf.parts:
            of_kernel = names.setdefault(part.path, [])
            if name not in of_kernel:
                of_kernel.append(name)
    return [(place, names[place.path]) for place in quantizable_kernels(model)]


def _form(array: LazyArray) -> Any:
    """Return the properties that must be equal for all weights of one kernel."""
    return array.codes, {name: part.dtype for name, part in array.parts.items()}


def _without_nan(codes: LazyArray) -> LazyArray:
    """Raise CheckpointError at reading if FP8 codes contain NaN, because CPU matmuls treat the NaN code as a number."""

    def checked(found: np.ndarray) -> np.ndarray:
        if ((found & 127) == 127).any():
            raise CheckpointError(f"{', '.join(codes.tensors)} in {codes.file} has NaN: load it without keep_quantized")
        return found

    return codes.map(checked)
