"""FP8 of DeepSeek-V3 (README_WEIGHTS.md) and V4, whose experts are FP4, of AutoFP8, ModelOpt, and of
transformers, which stores the scales of experts fused."""

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
    """``quant_method: fp8``: blocks with ``weight_scale_inv`` (DeepSeek-V3; Qwen's are bfloat16) or ``scale``
    (DeepSeek-V4), or one scale per tensor (AutoFP8's ``weight_scale``; transformers' ``weight_scale_inv``)."""
    shape, ending = files.matrix(info), _ending(files)
    block = _block(files, ending)
    if block is None and not files.has(ending):
        raise MalformedTensor(f"{files.where(info)}: config.json has no weight_block_size, and weight_scale is missing")
    codes = CodeFormat("fp8", block or (FULL, FULL))
    dtypes, shapes = (_dtypes(files), [codes.scales_shape(*shape)]) if block else (FLOATS, [(), (1,), (1, 1)])
    return files.byte_codes(codes, info, files.tensor(ending, dtypes, shapes))


def read_modelopt_fp8(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """FP8 of NVIDIA's ModelOpt, by the formulas of its ``QTensor``s. The shape of ``weight_scale`` tells the kind: one
    scale, one per output, one per block (4 dimensions), or bytes that are exponents of 32 inputs (MXFP8). Scales of
    activations are left out; a factor on inputs (NVFP4_AWQ) is refused by its tensor's name."""
    outs, ins = files.matrix(info)
    scale = files.tensor("weight_scale", ("F32", "BF16", "U8"))
    blocks = -(-outs // _BLOCK[0]), -(-ins // _BLOCK[1])
    if scale.dtype == "U8":
        tile, wanted = (1, 32), [(outs, -(-ins // 32))]
    elif len(scale.shape) > 2 or scale.shape == blocks != (outs, 1):
        tile, wanted = _BLOCK, [blocks, (blocks[0], 1, blocks[1], 1)]
    elif scale.shape in ((), (1,)):
        tile, wanted = (FULL, FULL), [(), (1,)]
    else:
        tile, wanted = (1, FULL), [(outs,), (outs, 1)]
    files.tensor("weight_scale", (scale.dtype,), wanted)
    return files.byte_codes(
        CodeFormat("fp8", tile), info, replace(scale, shape=blocks) if len(scale.shape) > 2 else scale
    )


def read_packed_fp4(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """Experts of DeepSeek-V4: ``weight [O, I / 2]`` of FP4 codes and ``scale [O, I / 32]`` of exponents."""
    return read_fp4(files, info, MXFP4, _ending(files), ("F8_E8M0", "U8"))


def _block(files: ModuleTensors, ending: str) -> tuple[int, int] | None:
    """``weight_block_size``. If it is absent and there are several scales: 128 by 128, the default of transformers."""
    scale = files.tensors.get(f"{files.module}.{ending}")
    if "weight_block_size" in files.scheme.fields or scale is None or not ending.endswith(_SCALE):
        return files.scheme.block()
    return _BLOCK if len(scale.shape) > 1 and math.prod(scale.shape[-2:]) > 1 else None


def _ending(files: ModuleTensors) -> str:
    """The end of the name of the scales. Raises Malformed if there are several."""
    found = [ending for ending in ("weight_scale_inv", "weight_scale", "scale") if files.has(ending)]
    if len(found) > 1:
        raise MalformedTensor(f"{files.module} has both {found[0]} and {found[1]}: remove one of them")
    return found[0] if found else "weight_scale_inv"


def read_fused_fp8(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """The kernels ``[E, O, I]`` of all experts in one tensor, each in blocks or with one scale. Raises Malformed."""
    files.used[info.name] = None
    if len(info.shape) != 3 or 0 in info.shape:
        raise MalformedTensor(
            f"{files.where(info)} has shape {list(info.shape)}: it must be [experts, outputs, inputs]"
        )
    (experts, outs, ins), kernel = info.shape, info.name.rpartition(".")[2]
    block = _block(files, kernel + _SCALE)
    # With one scale per expert, gate and up get a tile each, so that the tensor can be split into their kernels.
    codes = CodeFormat("fp8", block or (-(-outs // len(_KERNELS[kernel])), FULL))
    grid = (experts, *codes.scales_shape(outs, ins))
    whole = grid if block else (experts, 1, 1)
    one = files.scale(files.tensor(kernel + _SCALE, _dtypes(files), [whole]), whole)

    scale = one if block else one.take([0] * grid[1], 1)
    parts = {"codes": plain_array(files.checkpoint, replace(info, dtype="U8")), "scale": scale}
    return files.weight(codes, info.shape, parts)


def expert_scales(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """``….experts.N.gate_proj.weight_scale_inv`` -> its part of ``….experts.gate_up_proj_scale_inv``, for experts whose
    own weights are stored one by one."""
    found: dict[str, TensorInfo] = {}
    for name, scale in tensors.items():
        match = FUSED.fullmatch(name.removesuffix(_SCALE))
        if match is None or match[0] == name or len(scale.shape) != 3 or 0 in scale.shape or match[0] in tensors:
            continue
        kernels = _KERNELS[match["kernel"]]
        for e in range(scale.shape[0]):
            for i, names in enumerate(kernels):
                part = _rows(scale.at(e), i, len(kernels))
                modules = (f"{match['experts']}.{e}.{module}" for module in names)
                found |= {f"{m}.weight{_SCALE}": part for m in modules if f"{m}.weight" in tensors}
    return {name: info for name, info in found.items() if name not in tensors}


def _rows(info: TensorInfo, i: int, n: int) -> TensorInfo:
    """Select the i-th of n equal row ranges of a matrix; the whole matrix if it has a single row."""
    if info.shape[0] == 1:
        return info
    rows = info.shape[0] // n
    size = info.nbytes // info.shape[0] * rows
    return replace(info, shape=(rows, info.shape[1]), begin=info.begin + i * size, end=info.begin + (i + 1) * size)


def _dtypes(files: ModuleTensors) -> tuple[str, ...]:
    """Dtypes of scales; bytes are exponents if the settings say so."""
    return (*FLOATS, "F8_E8M0", *(("U8",) if files.scheme.fields.get("scale_fmt") == "ue8m0" else ()))
