"""The tensors of a Hugging Face checkpoint as lazy arrays; quantised weights are dequantised on reading.

Such weights are recognised by their tensors; ``quantization_config`` says what the tensors cannot. One file per tool.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nnxmoe.convert.core.lazy_array import LazyArray
from nnxmoe.convert.hf import compressed_reader, fp8, gptq, modelopt, nf4
from nnxmoe.convert.hf.gguf_tensors import of_gguf
from nnxmoe.convert.hf.module_tensors import OF_ACTIVATIONS, ModuleTensors
from nnxmoe.convert.hf.mxfp4 import mxfp4
from nnxmoe.convert.hf.raw import raw
from nnxmoe.convert.hf.scheme import Malformed, Scheme
from nnxmoe.storage.checkpoint import Checkpoint
from nnxmoe.storage.gguf import is_gguf
from nnxmoe.storage.safetensors import TensorInfo
from nnxmoe.storage.source import towers

# Endings of the tensors that hold a weight's codes, the longest first.
_CODES = ("weight_packed", "qweight", "weight")


def stored(
    tensors: dict[str, TensorInfo], fields: Mapping[str, Any], where: str, checkpoint: Checkpoint | None
) -> dict[str, LazyArray]:
    """Name -> lazy array; the tensors of a quantised weight are one array ``….weight``, or ``…_blocks``.

    ``fields``: config.json, at ``where``; ``checkpoint`` None: headers only, reading fails. Raises CheckpointError for
    quantization that is not supported.
    """
    if checkpoint is not None and is_gguf(checkpoint.folder):
        return of_gguf(checkpoint)
    scheme = Scheme.of(fields, where)
    beside = {name for names in towers(tensors).values() for name in names}
    text = {name: info for name, info in tensors.items() if name not in beside}
    weights = _quantised(text, scheme, checkpoint) | mxfp4(text, scheme, checkpoint)
    scheme.check_use(len(weights))
    inside = {name for array in weights.values() for name in array.tensors}
    plain = {name: raw(checkpoint, info) for name, info in tensors.items() if name not in inside}
    return plain | weights


def _quantised(tensors: dict[str, TensorInfo], scheme: Scheme, checkpoint: Checkpoint | None) -> dict[str, LazyArray]:
    """Name (``….weight``) -> lazy array of every quantised weight; a faulty one has a ``fault`` and no shape."""
    found: dict[str, LazyArray] = {}
    every = tensors | fp8.scales_of_experts(tensors) if scheme.method == "fp8" else tensors
    for name, info in tensors.items():
        module, _, ending = name.rpartition(".")
        of_experts = info.dtype == "F8_E4M3" and scheme.method == "fp8" and fp8.FUSED.fullmatch(name)
        weight = name if of_experts else f"{module}.weight"
        if not of_experts and (ending not in _CODES or (ending == "weight" and not _is_codes(module, info, tensors))):
            continue
        if weight in found:
            continue
        files = ModuleTensors(module, every, scheme, checkpoint)
        try:
            found[weight] = fp8.fused(files, info, ending) if of_experts else _weight(files)
        except Malformed as error:
            found[weight] = LazyArray.faulty(str(error), tuple(files.used))
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
    """Whether a tensor ``….weight`` holds codes: FP8, int8, or bytes in any dtype with the scales of bitsandbytes or of
    ModelOpt."""
    beside = (f"{module}.weight.absmax", f"{module}.weight_scale_2")
    return info.dtype in ("F8_E4M3", "I8") or any(name in tensors for name in beside)


def _weight(files: ModuleTensors) -> LazyArray:
    """The weight. Raises Malformed."""
    present = [ending for ending in _CODES if f"{files.module}.{ending}" in files.tensors]
    if len(present) > 1:
        both = " and as ".join(present)
        raise Malformed(f"{files.module} is stored twice, as {both}: remove one of them and its scales")
    info, method = files.tensors[f"{files.module}.{present[0]}"], files.scheme.method
    kind = present[0]
    if kind == "weight":
        packed = {"weight.absmax": "NF4", "weight_scale_2": "NVFP4"}
        kind = next((kind for ending, kind in packed.items() if files.has(ending)), _FP8_OR_INT.get(info.dtype, ""))
    if not method:
        raise Malformed(f"{files.where(info)} is {kind}, but config.json has no quantization_config")
    read = _READERS.get((kind, method))
    if read is None:
        raise Malformed(f"{files.where(info)} is {kind}, but config.json says quant_method {method!r}")
    return read(files, info)


_FP8_OR_INT = {"F8_E4M3": "FP8", "I8": "int8"}
_READERS: dict[tuple[str, str], Callable[[ModuleTensors, TensorInfo], LazyArray]] = {
    ("FP8", "fp8"): fp8.fp8,
    ("int8", "fp8"): fp8.fp4,
    ("FP8", "compressed-tensors"): compressed_reader.plain_codes,
    ("int8", "compressed-tensors"): compressed_reader.plain_codes,
    ("weight_packed", "compressed-tensors"): compressed_reader.packed,
    ("qweight", "awq"): gptq.awq,
    ("qweight", "gptq"): gptq.gptq,
    ("NF4", "bitsandbytes"): nf4.nf4,
    ("NVFP4", "modelopt"): modelopt.packed,
    ("FP8", "modelopt"): modelopt.fp8,
}
