"""Lazy arrays that read a checkpoint's tensors without conversion."""

import functools

import numpy as np

from nnxmoe.convert.arrays.boxes import Box, sizes, whole
from nnxmoe.convert.arrays.lazy_array import Empty, LazyArray
from nnxmoe.convert.files.safetensors import TensorInfo
from nnxmoe.convert.storage.checkpoint import Checkpoint

CHUNK_BYTES = 2 << 20  # bytes per read: small enough for CPU caches, large enough that threads rarely need the GIL


def plain_array(checkpoint: Checkpoint | None, info: TensorInfo) -> LazyArray:
    """Return a tensor as a lazy array. If ``checkpoint`` is None (headers only), reading fails."""
    read = functools.partial(_read, checkpoint, info)
    return LazyArray(info.shape, info.numpy_dtype, read, CHUNK_BYTES, file=info.file.name, tensors=(info.name,))


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
