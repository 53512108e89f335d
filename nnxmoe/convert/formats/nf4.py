"""NF4 weights of bitsandbytes (``functional.py``; Dettmers et al., QLoRA, 2023)."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from nnxmoe.config.printable import short
from nnxmoe.convert.arrays.boxes import Box
from nnxmoe.convert.arrays.lazy_array import AT_ONCE, Empty, LazyArray
from nnxmoe.convert.files.safetensors import TensorInfo
from nnxmoe.convert.formats.module_tensors import ModuleTensors
from nnxmoe.convert.formats.plain_array import plain_array
from nnxmoe.convert.formats.scheme import MalformedTensor
from nnxmoe.layers.linear.code_format import NF4, CodeFormat

_STATE = "quant_state.bitsandbytes__nf4"


def read_nf4(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """Read an NF4 weight of bitsandbytes.

    The file stores the flattened weight with two codes per byte, the first code in the high bits. Each block of codes
    (by default 64) has one scale. The scales may be quantized to 256 levels. The bytes may be stored in any dtype
    (``bnb_4bit_quant_storage``). A block may span several rows. The tile width is therefore the greatest common divisor
    of block size and row length, so that each tile is within one block.
    """
    files.used[info.name] = None
    state = _state(files)
    shape, block = tuple(state["shape"]), state["blocksize"]
    octets, size = -(-math.prod(shape) // 2), info.numpy_dtype.itemsize
    if info.shape != (-(-octets // size), 1):
        raise MalformedTensor(
            f"{files.where(info)} has shape {list(info.shape)}: {list(shape)} needs {[-(-octets // size), 1]}"
        )
    info = dataclasses.replace(info, dtype="U8", shape=(info.nbytes, 1))
    levels = files.values(files.tensor("weight.quant_map", ("F32",), [(16,)]))
    if levels is not None and not np.array_equal(levels, NF4):
        raise MalformedTensor(f"{files.module}.weight.quant_map does not contain the NF4 levels")
    codes = CodeFormat("nf4", (1, math.gcd(shape[1], block)), str(state["dtype"]))

    def unpack(file_array: LazyArray, rows: slice) -> np.ndarray:
        first_code, last_code = rows.start * shape[1], rows.stop * shape[1]
        code_values = file_array.rows(slice(first_code // 2, -(-last_code // 2)))
        code_values = np.concatenate([code_values >> 4, code_values & 15], axis=-1).reshape(-1)
        return code_values[first_code % 2 :][: last_code - first_code].reshape(-1, shape[1])

    scale = _scales(files, state, codes)
    if not codes.tile[1] % 2:
        return files.weight(codes, shape, {"codes": files.codes(codes, shape, info, unpack), "scale": scale})
    # Tiles of odd width cannot be packed as two codes per byte, so the weight is dequantized.
    file_array = plain_array(files.checkpoint, info)

    def read(box: Box, empty: Empty) -> np.ndarray:
        return (NF4[unpack(file_array, box[0])] * np.asarray(scale)[box[0]])[:, box[1]].astype(dtype)

    dtype = jnp.dtype(state["dtype"])
    return LazyArray(shape, dtype, read, AT_ONCE, file=info.file.name, tensors=tuple(files.used))


def _state(files: ModuleTensors) -> dict[str, Any]:
    data = files.values(info := files.tensor(f"weight.{_STATE}", ("U8",)))
    if data is None:
        raise MalformedTensor(f"{files.where(info)} contains the shape of the NF4 weight: download the file first")
    try:
        state = json.loads(data.tobytes())
        shape, block, dtype = state["shape"], state["blocksize"], state["dtype"]
        is_valid = (
            all(type(size) is int and 0 < size < 2**31 for size in (*shape, block))
            and len(shape) == 2
            and block % 2 == 0
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        state, is_valid, dtype = {}, False, ""
    if not is_valid or state.get("quant_type") != "nf4" or dtype not in ("float32", "bfloat16", "float16"):
        raise MalformedTensor(f"{files.where(info)} is not a valid NF4 state: {short(data.tobytes()[:200])}")
    return state


def _scales(files: ModuleTensors, state: Mapping[str, Any], codes: CodeFormat) -> LazyArray:
    """Return the scale of every tile, copied from the block that contains the tile.

    With double quantization, a block's scale is one of 256 levels, times a scale shared by several blocks, plus an
    offset.
    """
    (outs, ins), block = state["shape"], state["blocksize"]
    grid, num_blocks = codes.scales_shape(outs, ins), -(-outs * ins // block)
    is_nested = files.has("weight.nested_absmax")
    scale_info = files.tensor("weight.absmax", ("U8" if is_nested else "F32",), [(num_blocks,)])
    tensor_infos, nested_block, offset = [scale_info], state.get("nested_blocksize", 0), state.get("nested_offset")
    if is_nested:
        if (
            type(nested_block) is not int
            or nested_block < 1
            or not (isinstance(offset, int | float) and math.isfinite(offset))
        ):
            raise MalformedTensor(f"{files.module}.weight.{_STATE} lacks nested_blocksize or nested_offset")
        tensor_infos.append(files.tensor("weight.nested_quant_map", ("F32",), [(256,)]))
        tensor_infos.append(files.tensor("weight.nested_absmax", ("F32",), [(-(-num_blocks // nested_block),)]))

    def read_scales() -> np.ndarray:
        assert files.checkpoint is not None
        block_scales, *nested_tensors = (files.checkpoint.read(info.name) for info in tensor_infos)
        if not is_nested:
            return block_scales
        table, scales = nested_tensors
        return table[block_scales] * np.repeat(scales, nested_block)[:num_blocks] + np.float32(offset)

    def read(box: Box, empty: Empty) -> np.ndarray:
        starts = np.arange(outs)[box[0], None] * ins + np.arange(grid[1])[None, box[1]] * codes.tile[1]
        scales = read_scales()[starts // block]
        if not np.isfinite(scales).all():  # negative scales are valid, because double quantization may round 0 down
            raise MalformedTensor(f"{files.where(scale_info)}: scales must be finite")
        return scales

    tensors = (f"{files.module}.weight.quant_map", *(info.name for info in tensor_infos))
    return LazyArray(grid, np.dtype(np.float32), read, AT_ONCE, file=scale_info.file.name, tensors=tensors)
