"""Load quantized kernels: use the checkpoint's codes, or quantize floats during loading."""

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
    """Replace kernels with quantized kernels, in place, if the checkpoint stores their codes.

    Args:
        model: Abstract model (shapes only).
        arrays: Arrays of the checkpoint by name.

    Returns:
        Arrays to load the model from. Quantized weights are replaced with their codes, scales and zero points.

    Raises:
        CheckpointError: If the arrays of one kernel differ in quantization type, tile or zero points.
    """
    result = dict(arrays)
    for kernel_ref, names in _names(model, arrays):
        weights = {name: weight for name in names if name in arrays and (weight := arrays[name]).codes is not None}
        # `load_model` reports the faults.
        if not weights or any(weight.fault for weight in weights.values()):
            continue
        first_name, weight = next(iter(weights.items()))
        for name in names:
            if name not in weights or _form(weights[name]) != _form(weight):
                raise CheckpointError(
                    f"{plain(name)} and {plain(first_name)} are stored in different formats but belong to one array. "
                    "Load the model without keep_quantized. If only layers differ, stacking=Unrolled() also works"
                )
        for name, quantized_weight in weights.items():
            result.pop(name, None)  # two kernels may share a fused tensor
            result |= {f"{name}.{part}": array for part, array in quantized_weight.parts.items()}
            if quantized_weight.kind == "fp8":
                result[f"{name}.codes"] = _without_nan(quantized_weight.parts["codes"])
        assert weight.codes is not None
        zero, order = "zero" in weight.parts, "order" in weight.parts
        replace_with_quantized(
            kernel_ref,
            weight.codes,
            model.strategy,
            scale=weight.parts["scale"].dtype,
            zero=zero,
            order=order,
        )
    return result


def quantize_while_loading(
    model: CausalLM, arrays: LazyArrays, method: Method | Mixed, dtype: np.dtype | None
) -> tuple[dict[str, LazyArray], ErrorMeter]:
    """Quantize the kernels of an abstract model in place. Codes are computed when their arrays are read.

    Args:
        model: Abstract model (shapes only).
        arrays: Arrays of the checkpoint by name.
        method: Quantization method, or methods per kernel.
        dtype: Dtype of the scales. Defaults to the weights' default dtype.

    Returns:
        Tuple of the arrays to load the model from, and a meter of the quantization error that is updated whenever codes
        are read.
    """
    result, error = dict(arrays), ErrorMeter()
    methods = {kernel_ref.path: kernel_method for kernel_ref, kernel_method in kernels_to_quantize(model, method)}
    for kernel_ref, names in _names(model, arrays):
        kernel_method = methods.get(kernel_ref.path)
        float_arrays = [arrays[name] for name in names if name in arrays and arrays[name].fault is None]
        if kernel_method is None or len(float_arrays) < len(names):  # `load_model` reports missing and faulty arrays
            continue
        if any(len(array.shape) != 2 for array in float_arrays):
            raise CheckpointError(
                f"{plain(names[0])} cannot be quantized during loading, because it does not have two dimensions: "
                "load the model as floats and call nnxmoe.quantize"
            )
        scale_dtype = dtype or default_dtype(float_arrays)
        codes = format_for_dtype(kernel_method, scale_dtype)
        replace_with_quantized(kernel_ref, codes, model.strategy, scale=scale_dtype)
        for name, array in zip(names, float_arrays, strict=True):
            del result[name]
            result |= _on_reading(name, array, kernel_method, codes, scale_dtype, error)
    return result, error


def _on_reading(
    name: str, array: LazyArray, method: Method, code_format: CodeFormat, dtype: np.dtype, error: ErrorMeter
) -> dict[str, LazyArray]:
    """Return a float array ``[O, I]`` as lazy codes and lazy scales. Reading both reads every row of floats twice."""
    outs, ins = array.shape
    tile = min(code_format.tile[0], outs)

    def read_scaled_rows(first_row: int, last_row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return weights and scales of a range of rows that starts and ends at tile boundaries."""
        rows = array.read_box((slice(first_row, min(last_row, outs)), slice(0, ins)), np.empty)
        try:
            return rows, compute_scales(method, rows, dtype)
        except ValueError as scale_error:
            raise CheckpointError(f"{plain(name)}: {scale_error}") from None

    def read_codes(box: Box, empty: Empty) -> np.ndarray:
        first_row = box[0].start // tile * tile
        rows, scale = read_scaled_rows(first_row, -(-box[0].stop // tile) * tile)
        encoded = encode_weights(code_format, rows, scale)
        part = slice(box[0].start - first_row, box[0].stop - first_row)
        error.add(rows[part], code_format.decode(encoded, scale, None, slice(0, len(encoded)))[part])
        return encoded[part, box[1]]

    def read_scale(box: Box, empty: Empty) -> np.ndarray:
        return read_scaled_rows(box[0].start * tile, box[0].stop * tile)[1][:, box[1]].reshape(sizes(box))

    common_fields: dict[str, Any] = {"file": array.file, "tensors": array.tensors or (name,)}
    # A block corresponds to about CHUNK_BYTES of float32 weights, unless the source must be read whole.
    codes_block, scale_block = (
        max(AT_ONCE if array.block >= AT_ONCE else 0, CHUNK_BYTES // divisor) for divisor in (8, 256)
    )
    return {
        f"{name}.codes": LazyArray(
            code_format.codes_shape(outs, ins),
            STORAGE_DTYPES[code_format.code_dtype],
            read_codes,
            codes_block,
            **common_fields,
        ),
        f"{name}.scale": LazyArray(
            code_format.scales_shape(outs, ins), dtype, read_scale, scale_block, **common_fields
        ),
    }


def _names(model: CausalLM, arrays: LazyArrays) -> list[tuple[KernelRef, list[str]]]:
    """Return the quantizable kernels, each with the names of its arrays in the checkpoint."""
    names: dict[Any, list[str]] = {}
    for name, layout in tensor_layout(model, arrays).items():
        for part in layout.parts:
            kernel_names = names.setdefault(part.path, [])
            if name not in kernel_names:
                kernel_names.append(name)
    return [(kernel_ref, names[kernel_ref.path]) for kernel_ref in quantizable_kernels(model)]


def _form(array: LazyArray) -> Any:
    """Return the properties that must be equal for all weights of one kernel."""
    return array.codes, {name: part.dtype for name, part in array.parts.items()}


def _without_nan(codes: LazyArray) -> LazyArray:
    """Raise CheckpointError when NaN codes are read, because CPU matmuls treat FP8's NaN code as a number."""

    def check(values: np.ndarray) -> np.ndarray:
        if ((values & 127) == 127).any():
            raise CheckpointError(
                f"{', '.join(codes.tensors)} in {codes.file} contains NaN: load the model without keep_quantized"
            )
        return values

    return codes.map(check)
