"""Reads the formats of NVIDIA's ModelOpt, by the formulas of its ``QTensor``s: NVFP4, MXFP8, and FP8 per tensor, output
or block. What activations are scaled by is left out; a factor on inputs (NVFP4_AWQ) is refused by its tensor's name."""

import dataclasses

from nnxmoe.convert.core.lazy_array import LazyArray
from nnxmoe.convert.hf.fp4 import NVFP4, nvfp4
from nnxmoe.convert.hf.module_tensors import ModuleTensors
from nnxmoe.convert.hf.scheme import Malformed
from nnxmoe.layers.codes import WHOLE, Codes
from nnxmoe.storage.safetensors import TensorInfo

_BLOCK = (128, 128)


def packed(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """NVFP4: the factor ``weight_scale_2`` multiplies the scales."""
    if info.dtype != "U8":
        raise Malformed(f"{files.where(info)} is {info.dtype}: with weight_scale_2 it must be U8")
    return nvfp4(files, info, NVFP4, "weight_scale_2", divides=False)


def fp8(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """FP8, whose kind the shape of ``weight_scale`` tells: one, one per output, one per block (4 dimensions), or bytes
    that are exponents of 32 inputs (MXFP8)."""
    shape = outs, ins = files.matrix(info)
    scale = files.tensor("weight_scale", ("F32", "BF16", "U8"))
    blocks = -(-outs // _BLOCK[0]), -(-ins // _BLOCK[1])
    if scale.dtype == "U8":
        tile, wanted = (1, 32), [(outs, -(-ins // 32))]
    elif len(scale.shape) > 2 or scale.shape == blocks != (outs, 1):
        tile, wanted = _BLOCK, [blocks, (blocks[0], 1, blocks[1], 1)]
    elif scale.shape in ((), (1,)):
        tile, wanted = (WHOLE, WHOLE), [(), (1,)]
    else:
        tile, wanted = (1, WHOLE), [(outs,), (outs, 1)]
    files.tensor("weight_scale", (scale.dtype,), wanted)
    codes = Codes("fp8", tile)
    grid = codes.grid(*shape)
    plain = dataclasses.replace(scale, shape=grid) if len(scale.shape) > 2 else scale
    return files.made(codes, shape, {"codes": files.octets(codes, info), "scale": files.scale(plain, grid)})
