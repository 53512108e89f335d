"""Saving quantised kernels in the formats of compressed-tensors, which vLLM and transformers read.

int8 and int4 codes become ``pack-quantized``, FP8 codes ``float-quantized``, MXFP4 ``mxfp4-pack-quantized``, or the
blocks of gpt-oss where a tensor holds all experts; nothing is rounded.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from nnxmoe.config.printable import plain
from nnxmoe.convert.core.layout import Leaf
from nnxmoe.convert.core.lazy_array import LazyArray
from nnxmoe.convert.core.views import joined
from nnxmoe.convert.hf import fp4
from nnxmoe.convert.hf.layout import layout
from nnxmoe.convert.hf.words import packed
from nnxmoe.layers.codes import FP8, WHOLE, Codes
from nnxmoe.layers.quantized import ARRAYS, QuantizedWeight
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.quantization.kernels import places, quantized_weights
from nnxmoe.storage.errors import CheckpointError

_FORMATS = {("float", 8): "float-quantized", ("float", 4): "mxfp4-pack-quantized"}
_FORMATS |= {("int", 8): "pack-quantized", ("int", 4): "pack-quantized"}
WHAT = "which compressed-tensors cannot store: make it a float first with nnxmoe.dequantize(model)"


def compressed(
    model: CausalLM, leaves: Mapping[str, Leaf], arrays: Mapping[str, LazyArray]
) -> tuple[dict[str, LazyArray], dict[str, Any] | None]:
    """The tensors to write for the arrays of a layout, and the ``quantization_config`` of config.json; None without
    quantised kernels. Raises CheckpointError for codes that the format does not have."""
    kinds = {(*place.path, "codes"): place.weight.kind for place in quantized_weights(model)}
    fused = all(len(array.shape) == 3 for name, array in arrays.items() if name.endswith(".codes"))
    if kinds and fused and all(kind == fp4.MXFP4 for kind in kinds.values()):
        return fp4.in_blocks(arrays, leaves), fp4.GPT_OSS
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
            "NF4 codes": codes.kind == "nf4",
            "FP4 codes in groups of other than 32": codes.kind == "fp4" and codes.tile != fp4.MXFP4.tile,
            "offsets": codes.offset,
        }
        if has := next((what for what, found_here in odd.items() if found_here), None):
            raise CheckpointError(f"{plain(module)} has {has}, {WHAT}")
        stored = {"fp8": _floats, "fp4": _pairs}.get(codes.kind, _words)(codes, parts)
        found |= {f"{module}.{ending}": array for ending, array in stored.items()}
        settings = _settings(codes, codes.ins(parts["codes"]), "zero" in parts)
        groups.setdefault(json.dumps(settings, sort_keys=True), []).append(module)
    views = {name: leaf.part_of for name, leaf in leaves.items()}
    return joined(found, views), _config(model, groups) if groups else None


def _words(codes: Codes, parts: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """``pack-quantized``."""
    kept, bits = parts["codes"], codes.bits
    outs, ins = kept.shape[0], codes.ins(kept)

    def in_words(values: np.ndarray) -> np.ndarray:
        return packed(codes.unpack(values) if codes.halves else values.view(np.uint8) ^ 128, bits)

    def zeros(values: np.ndarray) -> np.ndarray:
        flat = values if codes.halves else values.view(np.uint8) ^ 128
        return packed(np.ascontiguousarray(flat.T), bits).T

    made = {
        "weight_packed": kept.in_blocks(kept.shape[1], -(-ins * bits // 32), in_words, np.int32),
        "weight_scale": _scale(codes, parts["scale"]),
        "weight_shape": LazyArray.of(np.array([outs, ins], np.int64)),
    }
    if "zero" in parts:
        rows, columns = parts["zero"].shape
        shape = -(-rows * bits // 32), columns
        made["weight_zero_point"] = parts["zero"].mapped(shape, np.dtype(np.int32), zeros)
    return made


def _pairs(codes: Codes, parts: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """``mxfp4-pack-quantized``."""
    return {"weight_packed": fp4.as_pairs(parts["codes"]), "weight_scale": fp4.as_exponents(parts["scale"])}


def _floats(codes: Codes, parts: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """``float-quantized``."""
    return {
        "weight": parts["codes"].each(lambda octets: octets.view(FP8), FP8),
        "weight_scale": _scale(codes, parts["scale"]),
    }


def _scale(codes: Codes, scale: LazyArray) -> LazyArray:
    """The scales; that of a whole tensor as a vector. Readers round weights to the dtype of the scales, so that codes
    whose weights are not rounded (GGUF's) have them in float32."""
    scale = scale.cast(np.dtype(np.float32)) if codes.rounded is None else scale
    return scale.reshaped((1,)) if codes.tile[0] == WHOLE and scale.shape == (1, 1) else scale


def _settings(codes: Codes, ins: int, zero: bool) -> dict[str, Any]:
    """``weights`` of a group in ``config_groups``."""
    rows, columns = codes.tile
    fields: dict[str, Any] = {"num_bits": codes.bits, "type": "float" if codes.kind in ("fp8", "fp4") else "int"}
    fields |= {"symmetric": not zero, "dynamic": False, "group_size": None, "strategy": "tensor"}
    if rows == 1:
        fields |= {"strategy": "channel"} if columns >= ins else {"strategy": "group", "group_size": columns}
    elif rows < WHOLE or columns < ins:
        fields |= {"strategy": "block", "block_structure": [rows, columns]}
    return fields


def _config(model: CausalLM, groups: Mapping[str, list[str]]) -> dict[str, Any]:
    """``quantization_config``. One group has all linear maps but those that stay floats; several have names."""
    chosen = {module for modules in groups.values() for module in modules}
    made = {}
    for i, (settings, modules) in enumerate(groups.items()):
        weights = json.loads(settings)
        targets = ["Linear"] if len(groups) == 1 else _targets(modules)
        form = _FORMATS[weights["type"], weights["num_bits"]]
        made[f"group_{i}"] = {"targets": targets, "weights": weights, "input_activations": None, "format": form}
    formats = {group["format"] for group in made.values()}
    floats = [name.removesuffix(".weight") for name in _linear_names(model)]
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": _targets([name for name in floats if name not in chosen]),
        "config_groups": made,
    }


def _linear_names(model: CausalLM) -> list[str]:
    """Names of the weights of linear maps that stay floats: routers, and kernels that are not quantised."""
    keys = {place.key for place in places(model) if not isinstance(place.weight, QuantizedWeight)}
    return [name for name, leaf in layout(model).items() if leaf.key in keys or ".router.kernel" in leaf.key]


def _targets(modules: list[str]) -> list[str]:
    """Expressions that match modules and no others, all experts of a layer and layers of one name in one of them."""
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
