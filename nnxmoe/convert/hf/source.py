"""The tensors of a Hugging Face checkpoint as lazy arrays; FP8 blocks are dequantised on reading."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from nnxmoe.convert.core.lazy_array import Box, Empty, LazyArray, sizes, whole
from nnxmoe.storage.checkpoint import Checkpoint
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.fp8 import check_scale_grid, dequantize_blocks, fp8_block
from nnxmoe.storage.safetensors import TensorInfo

CHUNK_BYTES = 2 << 20  # per read: fits into CPU caches, and is large enough that threads seldom take the GIL


def stored(
    tensors: Mapping[str, TensorInfo], fields: Mapping[str, Any], where: str, checkpoint: Checkpoint | None
) -> dict[str, LazyArray]:
    """Name -> lazy array. ``fields``: config.json, at ``where``; ``checkpoint`` None: headers only, reading fails.

    Raises CheckpointError for unsupported quantization.
    """
    block, found = fp8_block(fields, where), dict[str, LazyArray]()
    for name, info in tensors.items():
        read = functools.partial(_read, checkpoint, info)
        found[name] = LazyArray(info.shape, info.numpy_dtype, read, CHUNK_BYTES, file=info.file.name)
        if info.dtype == "F8_E4M3":
            scale = tensors.get(name + "_scale_inv")
            found[name] = _quantised(found[name], info, scale, block, checkpoint)
    return found


def _read(checkpoint: Checkpoint | None, info: TensorInfo, box: Box, empty: Empty) -> np.ndarray:
    assert checkpoint is not None, "headers only"
    out = empty(sizes(box), info.numpy_dtype)
    if box == whole(info.shape):
        checkpoint.read_into(info, out)
    elif len(box) == 3:
        for i in range(box[0].start, box[0].stop):
            checkpoint.read_into(info.at(i), out[i - box[0].start], box[1], box[2])
    else:
        checkpoint.read_into(info, out, box[0], box[1] if len(box) > 1 else None)
    return out


def _quantised(
    raw: LazyArray, info: TensorInfo, scale: TensorInfo | None, block: tuple[int, int] | None, checkpoint: Any
) -> LazyArray:
    """An FP8 tensor, dequantised with its block scales to float32."""
    fault = _scale_fault(info, scale, block)

    @functools.cache
    def scales() -> np.ndarray:
        assert scale is not None
        return checkpoint.read(scale.name)

    def read(box: Box, empty: Empty) -> np.ndarray:
        assert block is not None
        rows, cols = box
        return dequantize_blocks(raw.read_box(box, empty), scales(), block, rows.start, cols.start)

    return LazyArray(
        info.shape, np.dtype(np.float32), read, CHUNK_BYTES, info.numpy_dtype, file=info.file.name, fault=fault
    )


def _scale_fault(info: TensorInfo, scale: TensorInfo | None, block: tuple[int, int] | None) -> str | None:
    where = f"{info.name} in {info.file.name}" if info.file.name else info.name
    if block is None:
        return f"{where} is FP8, but config.json has no quantization_config"
    if scale is None:
        return f"{info.name}_scale_inv is missing: the FP8 tensor {info.name} needs its block scales"
    if len(info.shape) != 2 or scale.dtype != "F32":
        return f"{where}: FP8 weights must be 2-D with float32 scales, got {info.shape} and {scale.dtype}"
    try:
        check_scale_grid(info.name, info.shape, scale.shape, block, info.file)
    except CheckpointError as error:
        return str(error)
    return None
