"""FP4 weights, with two codes per byte.

MXFP4 has groups of 32 codes with one exponent per group. NVFP4 (Nvidia, 2025) has groups of 16 codes with one FP8 scale
per group and one factor per tensor.

    w[o, i] = FP4[code[o, i]] * scale[o, i // size] * factor

Most tools store a matrix with the code of the even input in the low bits. gpt-oss stores all experts in ``X_blocks``,
``[E, O, I / 32, 16]`` with the same order of codes, and ``X_scales [E, O, I / 32]``. Both tensors contain bytes:

    w[e, o, 32 b + i] = FP4[code i of blocks[e, o, b]] * 2 ** (scales[e, o, b] - 127)

Codes are E2M1 and exponents are E8M0 (OCP Microscaling specification 1.0, 2023). The layout of gpt-oss follows
``Weights`` in ``gpt_oss/torch/weights.py``. MXFP4 is exact in bfloat16.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import UInt8

from nnxmoe.convert.arrays.array_layout import ArrayLayout
from nnxmoe.convert.arrays.lazy_array import LazyArray, LazyArrays
from nnxmoe.convert.arrays.tensor_parts import TensorPart, join_parts
from nnxmoe.convert.files.safetensors import TensorInfo
from nnxmoe.convert.formats.module_tensors import ModuleTensors
from nnxmoe.convert.formats.plain_array import plain_array
from nnxmoe.convert.formats.scheme import MalformedTensor
from nnxmoe.layers.linear.code_format import CodeFormat

NVFP4, MXFP4 = CodeFormat("fp4", (1, 16)), CodeFormat("fp4", (1, 32))
BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of gpt-oss's tensors
GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_OCTETS = 16  # bytes per MXFP4 block


def read_fp4(
    files: ModuleTensors,
    info: TensorInfo,
    codes: CodeFormat,
    scales: str,
    dtypes: Sequence[str],
    scale_function: Callable[[np.ndarray], np.ndarray] | None = None,
) -> LazyArray:
    """Read an FP4 weight.

    Args:
        files: Tensors of the module.
        info: Bytes ``[O, I / 2]`` with two codes each.
        codes: Format of the codes, with the group size.
        scales: Suffix of the module's tensor of scales ``[O, I / size]``.
        dtypes: Allowed dtypes of the scales.
        scale_function: Function applied to the scales in float32.

    Raises:
        MalformedTensor: A tensor is missing or has a wrong dtype or shape.
    """
    outs, octets = files.matrix(info)
    size = codes.tile[1]
    if 2 * octets % size:
        raise MalformedTensor(f"{files.where(info)} has rows of {2 * octets} codes: FP4 has groups of {size} here")
    shape = outs, 2 * octets
    scale = files.tensor(scales, dtypes, [codes.scales_shape(*shape)])
    grid = files.scale(scale, scale.shape, allowed="positive" if scale_function is None else "not negative")
    byte_array = plain_array(files.checkpoint, dataclasses.replace(info, dtype="U8"))
    parts = {
        "codes": unpack_nibbles(byte_array, size),
        "scale": grid if scale_function is None else grid.map(scale_function),
    }
    return files.weight(codes, shape, parts)


def read_nvfp4(files: ModuleTensors, info: TensorInfo, codes: CodeFormat, factor: str, divides: bool) -> LazyArray:
    """Read an NVFP4 weight.

    Args:
        files: Tensors of the module.
        info: Bytes ``[O, I / 2]`` with two codes each.
        codes: Format of the codes.
        factor: Suffix of the tensor that contains the per-tensor factor.
        divides: Whether scales are divided by the factor instead of multiplied.

    Raises:
        MalformedTensor: A tensor is missing or has a wrong dtype, shape or value.
    """
    factor_info = files.tensor(factor, ("F32",), [(), (1,)])
    factor_value = files.values(factor_info)
    if factor_value is not None and not (np.isfinite(factor_value).all() and (factor_value > 0).all()):
        raise MalformedTensor(f"{files.where(factor_info)} is {factor_value.item()}: it must be positive and finite")

    def apply_factor(scales: np.ndarray) -> np.ndarray:
        assert factor_value is not None, "headers only"
        return scales / factor_value.reshape(()) if divides else scales * factor_value.reshape(())

    return read_fp4(files, info, codes, "weight_scale", ("F8_E4M3",), apply_factor)


def read_modelopt_nvfp4(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """Read an NVFP4 weight of NVIDIA's ModelOpt (``NVFP4QTensor``). ``weight_scale_2`` multiplies the scales."""
    if info.dtype != "U8":
        raise MalformedTensor(f"{files.where(info)} is {info.dtype}: with weight_scale_2 it must be U8")
    return read_nvfp4(files, info, NVFP4, "weight_scale_2", divides=False)


def read_gpt_oss(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """Read weights ``[E, O, I]`` of gpt-oss. ``info`` is the tensor of blocks or scales.

    Raises MalformedTensor if the blocks and scales are inconsistent with each other or with config.json.
    """
    weight = info.name.removesuffix(BLOCKS).removesuffix(SCALES)
    files.used |= dict.fromkeys(name for suffix in ("", BLOCKS, SCALES) if (name := weight + suffix) in files.tensors)
    for ending, other_ending in ((BLOCKS, SCALES), (SCALES, BLOCKS)):
        if weight + ending not in files.tensors:
            raise MalformedTensor(f"{weight}{ending} is missing: {weight}{other_ending} requires it")
    if weight in files.tensors:
        raise MalformedTensor(f"{weight} is stored twice, as {weight} and as {weight}{BLOCKS}: remove one of them")
    blocks, kernel = files.tensors[weight + BLOCKS], weight.rpartition(".")[2]
    if files.scheme.method != "mxfp4":
        config_text = (
            f"has quant_method {files.scheme.method!r}" if files.scheme.method else "has no quantization_config"
        )
        raise MalformedTensor(f"{files.where(blocks)} is MXFP4, but config.json {config_text}")
    if len(blocks.shape) != 4 or blocks.shape[3] != _OCTETS or 0 in blocks.shape:
        shape = list(blocks.shape)
        raise MalformedTensor(
            f"{files.where(blocks)} has shape {shape}: it must be [experts, outputs, inputs / 32, 16]"
        )
    scales = files.tensor(kernel + SCALES, ("U8", "F8_E8M0"), [blocks.shape[:3]])
    experts, outs, groups, octets = blocks.shape
    byte_array = plain_array(files.checkpoint, dataclasses.replace(blocks, shape=(experts, outs, groups * octets)))
    parts = {"codes": unpack_nibbles(byte_array, 32), "scale": files.scale(scales, scales.shape)}
    return files.weight(MXFP4, (experts, outs, groups * 32), parts)


def gpt_oss_tensors(arrays: LazyArrays, layouts: Mapping[str, ArrayLayout]) -> dict[str, LazyArray]:
    """Convert the arrays of a layout to gpt-oss tensors, without rounding. Inverse of `read_gpt_oss`."""
    tensors, tensor_parts = dict[str, LazyArray](), dict[str, TensorPart | None]()
    for name, array in arrays.items():
        tensor_part, ending = layouts[name].tensor_part, name.rpartition(".")[2]
        if ending in ("codes", "scale"):
            tensor = name.removesuffix("." + ending) if tensor_part is None else tensor_part.tensor
            tensor += BLOCKS if ending == "codes" else SCALES
            if ending == "codes":
                array = pack_nibbles(array).reshape((*array.shape[:-1], array.shape[-1] // _OCTETS, _OCTETS))
            else:
                array = to_exponents(array)
            tensor_part = tensor_part and TensorPart(
                tensor, dataclasses.replace(tensor_part.w, transposed=False), tensor_part.dim
            )
            name = tensor if tensor_part is None or tensor_part.w.whole else tensor_part.name
        tensors[name], tensor_parts[name] = array, tensor_part
    return join_parts(tensors, tensor_parts)


def unpack_nibbles(byte_array: LazyArray, size: int) -> LazyArray:
    """Repack bytes ``[*E, O, I / 2]`` of two neighboring codes each into the order of `CodeFormat`.

    In `CodeFormat`, a byte contains one code of each half of a group of ``size`` codes.
    """

    def repack(octets: UInt8[np.ndarray, "*rows I"]) -> UInt8[np.ndarray, "*rows I"]:
        groups = octets.reshape(*octets.shape[:-1], -1, 2, size // 4)
        first_half, second_half = groups[..., 0, :], groups[..., 1, :]
        pairs = first_half & 15 | second_half << 4, first_half >> 4 | second_half & 240
        return np.stack(pairs, axis=-1).reshape(octets.shape)

    return byte_array.map_blocks(size // 2, size // 2, repack)


def pack_nibbles(codes: LazyArray) -> LazyArray:
    """Repack MXFP4 codes into bytes of two neighboring codes each. Inverse of `unpack_nibbles`."""

    def repack(octets: UInt8[np.ndarray, "*rows I"]) -> UInt8[np.ndarray, "*rows I"]:
        pairs = octets.reshape(*octets.shape[:-1], -1, _OCTETS // 2, 2)
        even_bytes, odd_bytes = pairs[..., 0], pairs[..., 1]
        halves = even_bytes & 15 | odd_bytes << 4, even_bytes >> 4 | odd_bytes & 240
        return np.stack(halves, axis=-2).reshape(octets.shape)

    return codes.map_blocks(_OCTETS, _OCTETS, repack)


def to_exponents(scale: LazyArray) -> LazyArray:
    """Convert powers of two to E8M0 bytes."""

    def extract_exponents(values: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(values.astype(np.float32))
        assert (mantissa == 0.5).all(), "scales of MXFP4 are powers of two"
        return (exponent + 126).astype(np.uint8)

    return scale.map(extract_exponents, np.uint8)
