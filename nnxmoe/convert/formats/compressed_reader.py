"""Read compressed-tensors formats. The formulas follow the library's ``compressors``."""

from dataclasses import replace

import numpy as np

from nnxmoe.convert.arrays.lazy_array import AT_ONCE, LazyArray
from nnxmoe.convert.files.safetensors import TensorInfo
from nnxmoe.convert.formats.fp4 import MXFP4, NVFP4, read_fp4, read_nvfp4
from nnxmoe.convert.formats.module_tensors import FLOATS, ModuleTensors, rounding_dtype, unpack_words
from nnxmoe.convert.formats.plain_array import CHUNK_BYTES
from nnxmoe.convert.formats.scheme import MalformedTensor, WeightScheme
from nnxmoe.layers.linear.code_format import FULL, CodeFormat


def read_unpacked(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """Read ``float-quantized``, ``int-quantized`` and ``mxfp8-quantized`` weights, with one code per element."""
    shape, settings = files.matrix(info), files.scheme.weights(files.module)
    code_dtype = "fp8" if info.dtype == "F8_E4M3" else "int8"
    tile, shapes = _tile(files, settings, shape)
    exponents = ("U8",) if code_dtype == "fp8" else ()
    scale = files.tensor("weight_scale", (*FLOATS, *exponents), shapes)
    codes, parts = CodeFormat(code_dtype, tile, rounding_dtype(scale)), {}
    if _has_zero_points(files, settings):
        if code_dtype == "fp8":
            raise MalformedTensor(f"{files.module}.weight_zero_point: FP8 codes have no zero points")
        zero_info = files.tensor("weight_zero_point", ("I8", "I32", "I64"), shapes)
        parts = {"zero": files.zero_numbers(zero_info, codes.scales_shape(*shape))}
    return files.byte_codes(codes, info, scale, "not zero" if code_dtype == "int8" else "positive", **parts)


def read_packed(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """Read ``pack-quantized``, ``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized`` weights.

    ``pack-quantized`` packs codes into 32-bit words along the inputs, and zero points into words along the outputs. The
    FP4 formats pack two codes per byte.
    """
    settings = files.scheme.weights(files.module)
    if info.dtype == "U8":
        return _packed_fp4(files, info, settings)
    if info.dtype != "I32":
        raise MalformedTensor(
            f"{files.where(info)} is {info.dtype}: it must be I32 (packed integers) or U8 (pairs of FP4 codes)"
        )
    if settings.floats:
        raise MalformedTensor(
            f"{files.where(info)} is I32, but config_groups specifies type 'float': floats must be packed in U8"
        )
    outs, width = files.matrix(info)
    bits = settings.bits
    if files.has("weight_g_idx"):
        raise MalformedTensor(f"{files.module}.weight_g_idx: reordered groups of columns are not supported")
    weight_shape = files.values(files.tensor("weight_shape", ("I64", "I32"), [(2,)]))
    ins = width * 32 // bits if weight_shape is None else int(weight_shape[1])
    if weight_shape is not None and (int(weight_shape[0]) != outs or -(-ins * bits // 32) != width):
        raise MalformedTensor(
            f"{files.where(info)} has shape {[outs, width]}: with {bits} bits, weight_shape {weight_shape.tolist()} "
            f"needs {[int(weight_shape[0]), -(-ins * bits // 32)]} words"
        )
    shape = (outs, ins)
    tile, shapes = _tile(files, settings, shape)
    scale = files.tensor("weight_scale", FLOATS, shapes)
    code_dtype = "int4" if bits == 4 else "int8"
    codes = CodeFormat(code_dtype, (tile[0], min(tile[1], ins)) if bits == 4 else tile, rounding_dtype(scale))
    has_zeros = _has_zero_points(files, settings)
    grid, block = codes.scales_shape(*shape), AT_ONCE if has_zeros else CHUNK_BYTES

    def unpack(words: LazyArray, rows: slice) -> np.ndarray:
        return unpack_words(words.rows(rows), bits)[:, :ins]

    parts = {
        "codes": files.codes(codes, shape, info, unpack, block),
        "scale": files.scale(scale, grid, allowed="not zero"),
    }
    if has_zeros:
        zero = files.tensor("weight_zero_point", ("I32",), [(-(-grid[0] * bits // 32), grid[1])])
        parts["zero"] = files.zero_words(codes, shape, zero, lambda z: unpack_words(z.T, bits)[:, : grid[0]].T)
    return files.weight(codes, shape, parts)


def _packed_fp4(files: ModuleTensors, info: TensorInfo, settings: WeightScheme) -> LazyArray:
    if (settings.bits, settings.strategy, settings.size, settings.floats) == (4, "tensor_group", 16, True):
        # The library dequantizes NVFP4 in bfloat16. MXFP4 is exact in bfloat16 and needs no rounding.
        return read_nvfp4(files, info, replace(NVFP4, round_dtype="bfloat16"), "weight_global_scale", divides=True)
    if (settings.bits, settings.strategy, settings.size, settings.floats) == (4, "group", 32, True):
        return read_fp4(files, info, MXFP4, "weight_scale", ("U8", "F8_E8M0"))
    description = f"num_bits {settings.bits}, strategy {settings.strategy!r}, group_size {settings.size}"
    raise MalformedTensor(
        f"{files.where(info)} is U8, but config_groups specifies {description}, type "
        f"{'float' if settings.floats else 'int'!r}: FP4 requires type 'float' and groups of 16 ('tensor_group') or 32 "
        "('group')"
    )


def _has_zero_points(files: ModuleTensors, settings: WeightScheme) -> bool:
    """Return whether the module has zero points. Raises MalformedTensor if required zero points are missing."""
    has_zeros = files.has("weight_zero_point")
    if not has_zeros and not settings.symmetric:
        raise MalformedTensor(f"{files.module}.weight_zero_point is missing, but config_groups has symmetric false")
    return has_zeros


def _tile(
    files: ModuleTensors, settings: WeightScheme, shape: tuple[int, int]
) -> tuple[tuple[int, int], list[tuple[int, ...]]]:
    """Return (shape of the tile that shares a scale, allowed shapes of the stored scales)."""
    outs, ins = shape
    if settings.strategy == "tensor":
        return (FULL, FULL), [(1,), (), (1, 1)]
    if settings.strategy == "channel":
        return (1, FULL), [(outs, 1), (outs,)]
    if settings.strategy == "block":
        assert settings.block is not None
        return settings.block, [CodeFormat("fp8", settings.block).scales_shape(*shape)]
    assert settings.size is not None
    if ins % settings.size:
        raise MalformedTensor(f"{files.module}: groups of {settings.size} do not divide the {ins} inputs")
    return (1, settings.size), [(outs, ins // settings.size)]
