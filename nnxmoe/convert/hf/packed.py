"""The quantised weights of a checkpoint: which tensors make up a weight, and how their bits become codes.

Weights are recognised by their tensors; ``quantization_config`` says what the tensors cannot. One file per tool; this
one has the FP8 of DeepSeek-V3 (README_WEIGHTS.md) and AutoFP8.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from nnxmoe.convert.core.lazy_array import Box, Empty, LazyArray
from nnxmoe.convert.hf import compressed_reader, gptq, nf4
from nnxmoe.convert.hf.module_tensors import OF_ACTIVATIONS, ModuleTensors
from nnxmoe.convert.hf.scheme import Malformed, Scheme
from nnxmoe.layers.codes import WHOLE, Codes
from nnxmoe.storage.checkpoint import Checkpoint
from nnxmoe.storage.safetensors import TensorInfo

# Endings of the tensors that hold a weight's codes, the longest first.
_CODES = ("weight_packed", "qweight", "weight")


def quantised(tensors: Mapping[str, TensorInfo], scheme: Scheme, checkpoint: Checkpoint | None) -> dict[str, LazyArray]:
    """Name (``….weight``) -> lazy array of every quantised weight; a faulty one has a ``fault`` and no shape."""
    found: dict[str, LazyArray] = {}
    for name, info in tensors.items():
        module, _, ending = name.rpartition(".")
        if ending not in _CODES or (ending == "weight" and not _is_codes(module, info, tensors)):
            continue
        if f"{module}.weight" in found:
            continue
        files = ModuleTensors(module, tensors, scheme, checkpoint)
        try:
            found[f"{module}.weight"] = _weight(files)
        except Malformed as error:
            found[f"{module}.weight"] = LazyArray(
                (), np.dtype(np.float32), _unreadable, fault=str(error), tensors=tuple(files.used)
            )
    used = {name for array in found.values() for name in array.tensors}
    for name in tensors.keys() - used:
        ends = (i for i, letter in enumerate(name) if letter == ".")
        for module in (name[:end] for end in ends if f"{name[:end]}.weight" in found):
            if name != f"{module}.bias" and not name.endswith(OF_ACTIVATIONS):
                reason = f"{name} belongs to the quantised {module}, and its use is not supported"
                array = found[f"{module}.weight"]
                found[f"{module}.weight"] = replace(array, fault=array.fault or reason, tensors=(*array.tensors, name))
    return found


def _is_codes(module: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a tensor ``….weight`` holds codes: FP8, int8, or bytes in any dtype with the scales of bitsandbytes."""
    return info.dtype in ("F8_E4M3", "I8") or f"{module}.weight.absmax" in tensors


def _unreadable(box: Box, empty: Empty) -> np.ndarray:
    raise AssertionError("a faulty tensor is refused before it is read")


def _weight(files: ModuleTensors) -> LazyArray:
    """The weight. Raises Malformed."""
    present = [ending for ending in _CODES if f"{files.module}.{ending}" in files.tensors]
    if len(present) > 1:
        both = " and as ".join(present)
        raise Malformed(f"{files.module} is stored twice, as {both}: remove one of them and its scales")
    info, method = files.tensors[f"{files.module}.{present[0]}"], files.scheme.method
    kind = present[0]
    if kind == "weight":
        kind = "NF4" if files.has("weight.absmax") else _FP8_OR_INT[info.dtype]
    if not method:
        raise Malformed(f"{files.where(info)} is {kind}, but config.json has no quantization_config")
    read = _READERS.get((kind, method))
    if read is None:
        raise Malformed(f"{files.where(info)} is {kind}, but config.json says quant_method {method!r}")
    return read(files, info)


def _fp8(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """``quant_method: fp8``: blocks with ``weight_scale_inv`` (DeepSeek; Qwen's are bfloat16), or one scale per tensor
    (AutoFP8's ``weight_scale``; transformers' ``weight_scale_inv``)."""
    shape, block = files.matrix(info), files.scheme.block()
    if files.has("weight_scale_inv") and files.has("weight_scale"):
        raise Malformed(f"{files.module} has both weight_scale_inv and weight_scale: remove one of them")
    if block is None and (files.has("weight_scale") or files.has("weight_scale_inv")):
        ending = "weight_scale" if files.has("weight_scale") else "weight_scale_inv"
        scale = files.tensor(ending, ("F32", "BF16", "F16"), [(), (1,), (1, 1)])
        codes = Codes("fp8", (WHOLE, WHOLE))
        return files.made(codes, shape, {"codes": files.octets(codes, info), "scale": files.scale(scale, (1, 1))})
    if block is None:
        raise Malformed(f"{files.where(info)}: config.json has no weight_block_size, and weight_scale is missing")
    ue8m0 = files.scheme.fields.get("scale_fmt") == "ue8m0"
    dtypes = ("F32", "BF16", "F16", "F8_E8M0", *(("U8",) if ue8m0 else ()))
    codes = Codes("fp8", block)
    scale = files.tensor("weight_scale_inv", dtypes, [codes.grid(*shape)])
    parts = {"codes": files.octets(codes, info), "scale": files.scale(scale, codes.grid(*shape))}
    return files.made(codes, shape, parts)


_FP8_OR_INT = {"F8_E4M3": "FP8", "I8": "int8"}
_READERS: dict[tuple[str, str], Callable[[ModuleTensors, TensorInfo], LazyArray]] = {
    ("FP8", "fp8"): _fp8,
    ("FP8", "compressed-tensors"): compressed_reader.plain_codes,
    ("int8", "compressed-tensors"): compressed_reader.plain_codes,
    ("weight_packed", "compressed-tensors"): compressed_reader.packed,
    ("qweight", "awq"): gptq.awq,
    ("qweight", "gptq"): gptq.gptq,
    ("NF4", "bitsandbytes"): nf4.nf4,
}
