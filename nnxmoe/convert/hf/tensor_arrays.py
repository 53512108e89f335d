"""The tensors of a Hugging Face checkpoint as lazy arrays. Quantized weights are dequantized when they are read.

Quantized weights are detected by the names and dtypes of their tensors. ``quantization_config`` supplies the remaining
settings. Each module in `nnxmoe.convert.formats` reads one family of formats.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nnxmoe.convert.arrays.lazy_array import LazyArray
from nnxmoe.convert.files.safetensors import TensorInfo
from nnxmoe.convert.files.untrusted_files import is_gguf
from nnxmoe.convert.formats import compressed_reader, fp4, fp8, gptq, nf4
from nnxmoe.convert.formats.gguf_tensors import gguf_arrays
from nnxmoe.convert.formats.module_tensors import ACTIVATION_SCALES, ModuleTensors
from nnxmoe.convert.formats.plain_array import plain_array
from nnxmoe.convert.formats.scheme import MalformedTensor, QuantizationScheme
from nnxmoe.convert.storage.checkpoint import Checkpoint
from nnxmoe.convert.storage.find_checkpoint import group_towers

Reader = Callable[[ModuleTensors, TensorInfo], LazyArray]

# Suffixes of the tensors of codes, longest first.
_CODES = ("weight_packed", "qweight", "weight")


def tensor_arrays(
    tensors: dict[str, TensorInfo], fields: Mapping[str, Any], config_path: str, checkpoint: Checkpoint | None
) -> dict[str, LazyArray]:
    """Return lazy arrays by name. The tensors of a quantized weight form one array, ``….weight`` or ``…_blocks``.

    Args:
        tensors: Tensor name -> header entry.
        fields: Fields of config.json.
        config_path: Path of config.json, for messages.
        checkpoint: Checkpoint to read from. If None, only headers are used and reading an array fails.

    Raises:
        CheckpointError: If the quantization is not supported.
    """
    if checkpoint is not None and is_gguf(checkpoint.folder):
        return gguf_arrays(checkpoint)
    scheme = QuantizationScheme.from_config(fields, config_path)
    tower_names = {name for names in group_towers(tensors).values() for name in names}
    text_tensors = {name: info for name, info in tensors.items() if name not in tower_names}
    weights = _quantised(text_tensors, scheme, checkpoint)
    scheme.check_use(len(weights))
    source_names = {name for array in weights.values() for name in array.tensors}
    plain_arrays = {name: plain_array(checkpoint, info) for name, info in tensors.items() if name not in source_names}
    return plain_arrays | weights


def _quantised(
    tensors: dict[str, TensorInfo], scheme: QuantizationScheme, checkpoint: Checkpoint | None
) -> dict[str, LazyArray]:
    """Return the lazy array of every quantized weight, by ``….weight`` or the name of a fused tensor.

    If a weight is malformed, its ``fault`` is set to the error and its shape is ``()``.
    """
    weights: dict[str, LazyArray] = {}
    all_tensors = tensors | fp8.expert_scales(tensors) if scheme.method == "fp8" else tensors
    for name, info in tensors.items():
        weight, read = _place_of(name, info, tensors, scheme)
        if weight is None or weight in weights:
            continue
        files = ModuleTensors(name.rpartition(".")[0], all_tensors, scheme, checkpoint)
        try:
            weights[weight] = read(files, info)
        except MalformedTensor as error:
            float_name = {weight.removesuffix(fp4.BLOCKS)} & tensors.keys()
            weights |= dict.fromkeys((weight, *float_name), LazyArray.faulty(str(error), tuple(files.used)))
    used_names = {name for array in weights.values() for name in array.tensors}
    for name in tensors.keys() - used_names:
        dots = (position for position, character in enumerate(name) if character == ".")
        for module in (name[:dot] for dot in dots if f"{name[:dot]}.weight" in weights):
            if name != f"{module}.bias" and not name.endswith(ACTIVATION_SCALES):
                reason = f"{name} belongs to the quantized {module}, but is not supported"
                array = weights[f"{module}.weight"]
                weights[f"{module}.weight"] = replace(
                    array, fault=array.fault or reason, tensors=(*array.tensors, name)
                )
    return weights


def _place_of(
    name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo], scheme: QuantizationScheme
) -> tuple[str | None, Reader]:
    """Return (name of the quantized weight that contains a tensor, reader). The name is None for other tensors."""
    module, _, ending = name.rpartition(".")
    if info.dtype == "U8" and ending.endswith((fp4.BLOCKS, fp4.SCALES)):
        return name.removesuffix(fp4.BLOCKS).removesuffix(fp4.SCALES) + fp4.BLOCKS, fp4.read_gpt_oss
    if info.dtype == "F8_E4M3" and scheme.method == "fp8" and fp8.FUSED.fullmatch(name):
        return name, fp8.read_fused_fp8
    # ``….weight`` contains codes if it is FP8 or int8, or (in any dtype) if it has scales of bitsandbytes or ModelOpt.
    scale_names = (f"{module}.weight.absmax", f"{module}.weight_scale_2")
    has_codes = info.dtype in ("F8_E4M3", "I8") or any(name in tensors for name in scale_names)
    return f"{module}.weight" if ending in _CODES and (ending != "weight" or has_codes) else None, _weight


def _weight(files: ModuleTensors, _: TensorInfo) -> LazyArray:
    """Return the quantized weight of a module. Raises MalformedTensor."""
    endings = [ending for ending in _CODES if files.has(ending)]
    if len(endings) > 1:
        ending_list = " and as ".join(endings)
        raise MalformedTensor(f"{files.module} is stored twice, as {ending_list}: remove one of them and its scales")
    info, format_name, method = files.tensors[f"{files.module}.{endings[0]}"], endings[0], files.scheme.method
    if format_name == "weight":
        formats_by_ending = {"weight.absmax": "NF4", "weight_scale_2": "NVFP4"}
        format_name = next(
            (format_name for ending, format_name in formats_by_ending.items() if files.has(ending)),
            _FP8_OR_INT.get(info.dtype, ""),
        )
    read = _READERS.get((format_name, method))
    if read is None:
        config_text = f"config.json has quant_method {method!r}" if method else "config.json has no quantization_config"
        raise MalformedTensor(f"{files.where(info)} is {format_name}, but {config_text}")
    return read(files, info)


_FP8_OR_INT = {"F8_E4M3": "FP8", "I8": "int8"}
_READERS: dict[tuple[str, str], Reader] = {
    ("FP8", "fp8"): fp8.read_fp8,
    ("int8", "fp8"): fp8.read_packed_fp4,
    ("FP8", "compressed-tensors"): compressed_reader.read_unpacked,
    ("int8", "compressed-tensors"): compressed_reader.read_unpacked,
    ("weight_packed", "compressed-tensors"): compressed_reader.read_packed,
    ("qweight", "awq"): gptq.read_awq,
    ("qweight", "gptq"): gptq.read_gptq,
    ("NF4", "bitsandbytes"): nf4.read_nf4,
    ("NVFP4", "modelopt"): fp4.read_modelopt_nvfp4,
    ("FP8", "modelopt"): fp8.read_modelopt_fp8,
}
