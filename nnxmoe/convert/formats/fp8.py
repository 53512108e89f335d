"""FP8 weights of DeepSeek-V3 (README_WEIGHTS.md), DeepSeek-V4 (with FP4 experts), AutoFP8, ModelOpt and transformers.

In transformers' format, one tensor contains the scales of all experts.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from nnxmoe.convert.arrays.lazy_array import LazyArray
from nnxmoe.convert.files.safetensors import TensorInfo
from nnxmoe.convert.formats.fp4 import MXFP4, read_fp4
from nnxmoe.convert.formats.module_tensors import FLOATS, ModuleTensors
from nnxmoe.convert.formats.plain_array import plain_array
from nnxmoe.convert.formats.scheme import MalformedTensor
from nnxmoe.layers.linear.code_format import FULL, CodeFormat

FUSED = re.compile(r"(?P<experts>.*\.experts)\.(?P<kernel>gate_up_proj|down_proj)")
_SCALE, _BLOCK = "_scale_inv", (128, 128)
_KERNELS = {"gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")), "down_proj": (("down_proj", "w2"),)}


def read_fp8(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """Read a weight of ``quant_method: fp8``, with one scale per block or per tensor.

    Scales per block are named ``weight_scale_inv`` (DeepSeek-V3 in float32, Qwen in bfloat16) or ``scale``
    (DeepSeek-V4). Scales per tensor are named ``weight_scale`` (AutoFP8) or ``weight_scale_inv`` (transformers).
    """
    shape, ending = files.matrix(info), _ending(files)
    block = _block(files, ending)
    if block is None and not files.has(ending):
        raise MalformedTensor(f"{files.where(info)}: config.json has no weight_block_size, and weight_scale is missing")
    codes = CodeFormat("fp8", block or (FULL, FULL))
    dtypes, shapes = (_dtypes(files), [codes.scales_shape(*shape)]) if block else (FLOATS, [(), (1,), (1, 1)])
    return files.byte_codes(codes, info, files.tensor(ending, dtypes, shapes))


def read_modelopt_fp8(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """Read an FP8 weight of NVIDIA's ModelOpt, with the formulas of the library's ``QTensor`` classes.

    The dtype and shape of ``weight_scale`` determine the tile: one scale per tensor, per output or per block, or one
    exponent byte per 32 inputs (MXFP8). Scales of activations are ignored. Scaling of the inputs (NVFP4_AWQ) is
    not supported and raises CheckpointError.
    """
    outs, ins = files.matrix(info)
    scale = files.tensor("weight_scale", ("F32", "BF16", "U8"))
    blocks = -(-outs // _BLOCK[0]), -(-ins // _BLOCK[1])
    if scale.dtype == "U8":
        tile, expected_shapes = (1, 32), [(outs, -(-ins // 32))]
    elif len(scale.shape) > 2 or scale.shape == blocks != (outs, 1):
        tile, expected_shapes = _BLOCK, [blocks, (blocks[0], 1, blocks[1], 1)]
    elif scale.shape in ((), (1,)):
        tile, expected_shapes = (FULL, FULL), [(), (1,)]
    else:
        tile, expected_shapes = (1, FULL), [(outs,), (outs, 1)]
    files.tensor("weight_scale", (scale.dtype,), expected_shapes)
    return files.byte_codes(
        CodeFormat("fp8", tile), info, replace(scale, shape=blocks) if len(scale.shape) > 2 else scale
    )


def read_packed_fp4(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """Read an expert of DeepSeek-V4: FP4 codes ``weight [O, I / 2]`` and exponents ``scale [O, I / 32]``."""
    return read_fp4(files, info, MXFP4, _ending(files), ("F8_E8M0", "U8"))


def _block(files: ModuleTensors, ending: str) -> tuple[int, int] | None:
    """Return ``weight_block_size``.

    If the field is missing and the weight has several scales, return (128, 128), the default in transformers.
    """
    scale = files.tensors.get(f"{files.module}.{ending}")
    if "weight_block_size" in files.scheme.fields or scale is None or not ending.endswith(_SCALE):
        return files.scheme.block()
    return _BLOCK if len(scale.shape) > 1 and math.prod(scale.shape[-2:]) > 1 else None


def _ending(files: ModuleTensors) -> str:
    """Return the suffix of the scales. Raises MalformedTensor if the module has scales with several suffixes."""
    endings = [ending for ending in ("weight_scale_inv", "weight_scale", "scale") if files.has(ending)]
    if len(endings) > 1:
        raise MalformedTensor(f"{files.module} has both {endings[0]} and {endings[1]}: remove one of them")
    return endings[0] if endings else "weight_scale_inv"


def read_fused_fp8(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """Read the kernels ``[E, O, I]`` of all experts from one tensor, with one scale per block or per expert.

    Raises MalformedTensor if a tensor is missing or has a wrong dtype or shape.
    """
    files.used[info.name] = None
    if len(info.shape) != 3 or 0 in info.shape:
        raise MalformedTensor(
            f"{files.where(info)} has shape {list(info.shape)}: it must be [experts, outputs, inputs]"
        )
    (experts, outs, ins), kernel = info.shape, info.name.rpartition(".")[2]
    block = _block(files, kernel + _SCALE)
    # With one scale per expert, use one tile per kernel, so that the tensor can be split into gate and up.
    codes = CodeFormat("fp8", block or (-(-outs // len(_KERNELS[kernel])), FULL))
    grid = (experts, *codes.scales_shape(outs, ins))
    scale_shape = grid if block else (experts, 1, 1)
    stored_scale = files.scale(files.tensor(kernel + _SCALE, _dtypes(files), [scale_shape]), scale_shape)

    scale = stored_scale if block else stored_scale.take([0] * grid[1], 1)
    parts = {"codes": plain_array(files.checkpoint, replace(info, dtype="U8")), "scale": scale}
    return files.weight(codes, info.shape, parts)


def expert_scales(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the scales of single experts as slices of fused scale tensors, for weights that are not fused.

    For example, ``….experts.N.gate_proj.weight_scale_inv`` is a slice of ``….experts.gate_up_proj_scale_inv``.
    """
    scales: dict[str, TensorInfo] = {}
    for name, scale in tensors.items():
        match = FUSED.fullmatch(name.removesuffix(_SCALE))
        if match is None or match[0] == name or len(scale.shape) != 3 or 0 in scale.shape or match[0] in tensors:
            continue
        kernels = _KERNELS[match["kernel"]]
        for expert in range(scale.shape[0]):
            for index, names in enumerate(kernels):
                part = _rows(scale.at(expert), index, len(kernels))
                modules = (f"{match['experts']}.{expert}.{module}" for module in names)
                scales |= {f"{module}.weight{_SCALE}": part for module in modules if f"{module}.weight" in tensors}
    return {name: info for name, info in scales.items() if name not in tensors}


def _rows(info: TensorInfo, index: int, count: int) -> TensorInfo:
    """Select one of ``count`` equal row ranges of a matrix, or the whole matrix if it has a single row."""
    if info.shape[0] == 1:
        return info
    rows = info.shape[0] // count
    size = info.nbytes // info.shape[0] * rows
    return replace(
        info, shape=(rows, info.shape[1]), begin=info.begin + index * size, end=info.begin + (index + 1) * size
    )


def _dtypes(files: ModuleTensors) -> tuple[str, ...]:
    """Return the allowed dtypes of scales. If ``scale_fmt`` is ``ue8m0``, bytes with exponents are also allowed."""
    return (*FLOATS, "F8_E8M0", *(("U8",) if files.scheme.fields.get("scale_fmt") == "ue8m0" else ()))
