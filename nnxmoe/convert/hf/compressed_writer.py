"""Save quantized kernels without rounding in the formats of compressed-tensors. vLLM and transformers read them.

int8 and int4 codes become ``pack-quantized``, and FP8 codes ``float-quantized``. MXFP4 codes become
``mxfp4-pack-quantized``, or the blocks of gpt-oss if one tensor contains all experts.
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
WHAT = "which compressed-tensors cannot store: make it a float first with nnxmoe.dequantize(model)"


def compress_tensors(
    model: CausalLM, leaves: Mapping[str, ArrayLayout], arrays: Mapping[str, LazyArray]
) -> tuple[dict[str, LazyArray], dict[str, Any] | None]:
    """Convert the arrays of a layout to the tensors of a compressed-tensors checkpoint.

    Args:
        model: Model that is saved.
        leaves: Array name -> layout.
        arrays: Array name -> values.

    Returns:
        Tuple of the tensors and the ``quantization_config`` of config.json (None without quantized kernels).

    Raises:
        CheckpointError: (a ValueError) The format cannot represent a kernel.
    """
    kinds = {(*place.path, "codes"): place.weight.format for place in quantized_kernels(model)}
    fused = all(len(array.shape) == 3 for name, array in arrays.items() if name.endswith(".codes"))
    if kinds and fused and all(kind == fp4.MXFP4 for kind in kinds.values()):
        return fp4.gpt_oss_tensors(arrays, leaves), fp4.GPT_OSS
    found, groups = dict(arrays), dict[str, list[str]]()
    for name, leaf in leaves.items():
        codes = kinds.get(leaf.parts[0].path)
        if codes is None:
            continue
        if not name.endswith(".weight.codes"):
            raise CheckpointError(f"{plain(leaf.key)} is quantised and shares its tensor with others, {WHAT}")
        module = name.removesuffix(".weight.codes")
        parts = {part: found.pop(full) for part in ARRAYS if (full := f"{module}.weight.{part}") in found}
        odd = {
            "inputs in another order (act order)": "order" in parts,
            "NF4 codes": codes.code_dtype == "nf4",
            "FP4 codes in groups of other than 32": codes.code_dtype == "fp4" and codes.tile != fp4.MXFP4.tile,
            "offsets": codes.offset,
        }
        if has := next((what for what, found_here in odd.items() if found_here), None):
            raise CheckpointError(f"{plain(module)} has {has}, {WHAT}")
        found |= {f"{module}.{ending}": array for ending, array in _stored(codes, parts).items()}
        settings = _settings(codes, codes.input_count(parts["codes"]), "zero" in parts)
        groups.setdefault(json.dumps(settings, sort_keys=True), []).append(module)
    views = {name: leaf.tensor_part for name, leaf in leaves.items()}
    return join_parts(found, views), _config(model, groups) if groups else None


def _stored(codes: CodeFormat, parts: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Return the tensors of a kernel by the suffixes of their names."""
    kept, bits = parts["codes"], codes.bits
    if codes.code_dtype == "fp4":
        return {"weight_packed": fp4.pack_nibbles(kept), "weight_scale": fp4.to_exponents(parts["scale"])}
    # Readers round weights to the dtype of the scales. If the weights are not rounded, the scales must be float32.
    scale = parts["scale"] if codes.round_dtype is not None else parts["scale"].astype(np.dtype(np.float32))
    if codes.tile[0] == FULL and scale.shape == (1, 1):  # the format stores a per-tensor scale as a vector
        scale = scale.reshape((1,))
    if codes.code_dtype == "fp8":
        return {"weight": kept.map(lambda octets: octets.view(FP8), FP8), "weight_scale": scale}
    outs, ins = kept.shape[0], codes.input_count(kept)

    def packed(numbers: np.ndarray) -> np.ndarray:
        """Pack unsigned numbers into 32-bit words. The last word is padded with zeros."""
        numbers = numbers if codes.is_packed else numbers.view(np.uint8) ^ 128
        padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % (32 // bits))))
        octets = padded if bits == 8 else padded[:, ::2] | padded[:, 1::2] << 4
        return np.ascontiguousarray(octets).view(np.int32)

    def in_words(values: np.ndarray) -> np.ndarray:
        return packed(codes.unpack(values))

    def zeros(values: np.ndarray) -> np.ndarray:
        return packed(np.ascontiguousarray(values.T)).T

    made = {
        "weight_packed": kept.map_blocks(kept.shape[1], -(-ins * bits // 32), in_words, np.int32),
        "weight_scale": scale,
        "weight_shape": LazyArray.from_array(np.array([outs, ins], np.int64)),
    }
    if "zero" in parts:
        rows, columns = parts["zero"].shape
        shape = -(-rows * bits // 32), columns
        made["weight_zero_point"] = parts["zero"].map_whole(shape, np.dtype(np.int32), zeros)
    return made


def _settings(codes: CodeFormat, ins: int, zero: bool) -> dict[str, Any]:
    """Return the field ``weights`` of a group in ``config_groups``."""
    rows, columns = codes.tile
    fields: dict[str, Any] = {"num_bits": codes.bits, "type": "float" if codes.code_dtype in ("fp8", "fp4") else "int"}
    fields |= {"symmetric": not zero, "dynamic": False, "group_size": None, "strategy": "tensor"}
    if rows == 1:
        fields |= {"strategy": "channel"} if columns >= ins else {"strategy": "group", "group_size": columns}
    elif rows < FULL or columns < ins:
        fields |= {"strategy": "block", "block_structure": [rows, columns]}
    return fields


def _config(model: CausalLM, groups: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return ``quantization_config``.

    A single group targets all linear layers, and ``ignore`` lists the layers that stay floats. Several groups target
    modules by name.
    """
    chosen = {module for modules in groups.values() for module in modules}
    made = {}
    for i, (settings, modules) in enumerate(groups.items()):
        weights = json.loads(settings)
        targets = ["Linear"] if len(groups) == 1 else _targets(modules)
        form = _FORMATS[weights["type"], weights["num_bits"]]
        made[f"group_{i}"] = {"targets": targets, "weights": weights, "input_activations": None, "format": form}
    formats = {group["format"] for group in made.values()}
    # Linear layers that stay floats: routers, and kernels that are not quantized.
    keys = {place.key for place in quantizable_kernels(model) if not isinstance(place.weight, QuantizedWeight)}
    linear = [name for name, leaf in tensor_layout(model).items() if leaf.key in keys or ".router.kernel" in leaf.key]
    floats = [name.removesuffix(".weight") for name in linear]
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": _targets([name for name in floats if name not in chosen]),
        "config_groups": made,
    }


def _targets(modules: list[str]) -> list[str]:
    """Return expressions that match exactly these modules, with one regular expression for all layers and experts."""
    layers: dict[str, set[str]] = {}
    for module in modules:
        expression = re.sub(r"\.experts\.[0-9]+", ".experts.EXPERT", module)
        match = re.search(r"\.layers\.([0-9]+)\.", expression)
        number = match[1] if match else ""
        layers.setdefault(re.sub(r"\.layers\.[0-9]+\.", ".layers.LAYER.", expression), set()).add(number)
    found = []
    for expression, numbers in sorted(layers.items()):
        if numbers == {""}:
            found.append(expression)
            continue
        escaped = re.escape(expression).replace("EXPERT", "[0-9]+")
        found.append("re:^" + escaped.replace("LAYER", "(" + "|".join(sorted(numbers, key=int)) + ")") + "$")
    return found
