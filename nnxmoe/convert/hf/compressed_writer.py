"""Save quantized kernels, without rounding, in compressed-tensors formats for vLLM and transformers.

int8 and int4 codes are saved as ``pack-quantized``, and FP8 codes as ``float-quantized``. MXFP4 codes are saved as
``mxfp4-pack-quantized``, or as gpt-oss blocks if one tensor contains all experts.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from nnxmoe.config.printable import plain
from nnxmoe.convert.arrays.array_layout import ArrayLayout
from nnxmoe.convert.arrays.lazy_array import LazyArray
from nnxmoe.convert.arrays.tensor_parts import join_parts
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.formats import fp4
from nnxmoe.convert.hf.tensor_layout import tensor_layout
from nnxmoe.layers.linear.code_format import FP8, FULL, CodeFormat
from nnxmoe.layers.linear.quantized import ARRAYS, QuantizedWeight
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.quantization.quantized_kernels import quantizable_kernels, quantized_kernels

_FORMATS = {("float", 8): "float-quantized", ("float", 4): "mxfp4-pack-quantized"}
_FORMATS |= {("int", 8): "pack-quantized", ("int", 4): "pack-quantized"}
WHAT = "which compressed-tensors cannot store: dequantize it first with nnxmoe.dequantize(model)"


def compress_tensors(
    model: CausalLM, layouts: Mapping[str, ArrayLayout], arrays: Mapping[str, LazyArray]
) -> tuple[dict[str, LazyArray], dict[str, Any] | None]:
    """Convert the arrays of a layout to the tensors of a compressed-tensors checkpoint.

    Args:
        model: Model to save.
        layouts: Array name -> layout.
        arrays: Array name -> values.

    Returns:
        Tuple of the tensors and the ``quantization_config`` of config.json (None if no kernel is quantized).

    Raises:
        CheckpointError: If the format cannot represent a kernel.
    """
    formats = {(*kernel_ref.path, "codes"): kernel_ref.weight.format for kernel_ref in quantized_kernels(model)}
    is_fused = all(len(array.shape) == 3 for name, array in arrays.items() if name.endswith(".codes"))
    if formats and is_fused and all(code_format == fp4.MXFP4 for code_format in formats.values()):
        return fp4.gpt_oss_tensors(arrays, layouts), fp4.GPT_OSS
    tensors, groups = dict(arrays), dict[str, list[str]]()
    for name, layout in layouts.items():
        codes = formats.get(layout.parts[0].path)
        if codes is None:
            continue
        if not name.endswith(".weight.codes"):
            raise CheckpointError(
                f"{plain(layout.key)} is quantized and shares its tensor with other parameters, {WHAT}"
            )
        module = name.removesuffix(".weight.codes")
        parts = {
            part: tensors.pop(array_name) for part in ARRAYS if (array_name := f"{module}.weight.{part}") in tensors
        }
        unsupported = {
            "reordered inputs (act order)": "order" in parts,
            "NF4 codes": codes.code_dtype == "nf4",
            "FP4 codes with a group size other than 32": codes.code_dtype == "fp4" and codes.tile != fp4.MXFP4.tile,
            "offsets": codes.offset,
        }
        if unsupported_feature := next((feature for feature, is_present in unsupported.items() if is_present), None):
            raise CheckpointError(f"{plain(module)} has {unsupported_feature}, {WHAT}")
        tensors |= {f"{module}.{ending}": array for ending, array in _stored(codes, parts).items()}
        settings = _settings(codes, codes.input_count(parts["codes"]), "zero" in parts)
        groups.setdefault(json.dumps(settings, sort_keys=True), []).append(module)
    views = {name: layout.tensor_part for name, layout in layouts.items()}
    return join_parts(tensors, views), _config(model, groups) if groups else None


def _stored(codes: CodeFormat, parts: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Return the tensors of a kernel, by name suffix."""
    stored_codes, bits = parts["codes"], codes.bits
    if codes.code_dtype == "fp4":
        return {"weight_packed": fp4.pack_nibbles(stored_codes), "weight_scale": fp4.to_exponents(parts["scale"])}
    # Readers round dequantized weights to the dtype of the scales. Float32 scales prevent this rounding.
    scale = parts["scale"] if codes.round_dtype is not None else parts["scale"].astype(np.dtype(np.float32))
    if codes.tile[0] == FULL and scale.shape == (1, 1):  # the format stores a per-tensor scale as a vector of length 1
        scale = scale.reshape((1,))
    if codes.code_dtype == "fp8":
        return {"weight": stored_codes.map(lambda octets: octets.view(FP8), FP8), "weight_scale": scale}
    outs, ins = stored_codes.shape[0], codes.input_count(stored_codes)

    def pack_bits(numbers: np.ndarray) -> np.ndarray:
        """Pack unsigned numbers into 32-bit words. The last word is padded with zeros."""
        numbers = numbers if codes.is_packed else numbers.view(np.uint8) ^ 128
        padded_numbers = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % (32 // bits))))
        octets = padded_numbers if bits == 8 else padded_numbers[:, ::2] | padded_numbers[:, 1::2] << 4
        return np.ascontiguousarray(octets).view(np.int32)

    def pack_codes(values: np.ndarray) -> np.ndarray:
        return pack_bits(codes.unpack(values))

    def pack_zeros(values: np.ndarray) -> np.ndarray:
        return pack_bits(np.ascontiguousarray(values.T)).T

    tensors = {
        "weight_packed": stored_codes.map_blocks(stored_codes.shape[1], -(-ins * bits // 32), pack_codes, np.int32),
        "weight_scale": scale,
        "weight_shape": LazyArray.from_array(np.array([outs, ins], np.int64)),
    }
    if "zero" in parts:
        rows, columns = parts["zero"].shape
        shape = -(-rows * bits // 32), columns
        tensors["weight_zero_point"] = parts["zero"].map_whole(shape, np.dtype(np.int32), pack_zeros)
    return tensors


def _settings(codes: CodeFormat, ins: int, has_zeros: bool) -> dict[str, Any]:
    """Return the ``weights`` field of a group in ``config_groups``."""
    rows, columns = codes.tile
    fields: dict[str, Any] = {"num_bits": codes.bits, "type": "float" if codes.code_dtype in ("fp8", "fp4") else "int"}
    fields |= {"symmetric": not has_zeros, "dynamic": False, "group_size": None, "strategy": "tensor"}
    if rows == 1:
        fields |= {"strategy": "channel"} if columns >= ins else {"strategy": "group", "group_size": columns}
    elif rows < FULL or columns < ins:
        fields |= {"strategy": "block", "block_structure": [rows, columns]}
    return fields


def _config(model: CausalLM, groups: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return ``quantization_config``.

    A single group targets all linear layers, and ``ignore`` lists the layers that are not quantized. Several groups
    target modules by name.
    """
    quantized_modules = {module for modules in groups.values() for module in modules}
    config_groups = {}
    for i, (settings, modules) in enumerate(groups.items()):
        weights = json.loads(settings)
        targets = ["Linear"] if len(groups) == 1 else _targets(modules)
        format_name = _FORMATS[weights["type"], weights["num_bits"]]
        config_groups[f"group_{i}"] = {
            "targets": targets,
            "weights": weights,
            "input_activations": None,
            "format": format_name,
        }
    formats = {group["format"] for group in config_groups.values()}
    # Linear layers with float weights: routers, and kernels that are not quantized.
    keys = {ref.key for ref in quantizable_kernels(model) if not isinstance(ref.weight, QuantizedWeight)}
    linear_names = [
        name for name, layout in tensor_layout(model).items() if layout.key in keys or ".router.kernel" in layout.key
    ]
    float_modules = [name.removesuffix(".weight") for name in linear_names]
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": _targets([name for name in float_modules if name not in quantized_modules]),
        "config_groups": config_groups,
    }


def _targets(modules: list[str]) -> list[str]:
    """Return target expressions that match exactly these modules. One expression covers many layers and all experts."""
    layers: dict[str, set[str]] = {}
    for module in modules:
        expression = re.sub(r"\.experts\.[0-9]+", ".experts.EXPERT", module)
        match = re.search(r"\.layers\.([0-9]+)\.", expression)
        number = match[1] if match else ""
        layers.setdefault(re.sub(r"\.layers\.[0-9]+\.", ".layers.LAYER.", expression), set()).add(number)
    targets = []
    for expression, numbers in sorted(layers.items()):
        if numbers == {""}:
            targets.append(expression)
            continue
        escaped = re.escape(expression).replace("EXPERT", "[0-9]+")
        targets.append("re:^" + escaped.replace("LAYER", "(" + "|".join(sorted(numbers, key=int)) + ")") + "$")
    return targets
