"""The tensors of a Hugging Face checkpoint as lazy arrays; quantised weights are dequantised on reading."""

from collections.abc import Mapping
from typing import Any

from nnxmoe.convert.core.lazy_array import LazyArray
from nnxmoe.convert.hf.mxfp4 import mxfp4
from nnxmoe.convert.hf.packed import quantised
from nnxmoe.convert.hf.raw import raw
from nnxmoe.convert.hf.scheme import Scheme
from nnxmoe.storage.checkpoint import Checkpoint
from nnxmoe.storage.safetensors import TensorInfo
from nnxmoe.storage.source import towers


def stored(
    tensors: dict[str, TensorInfo], fields: Mapping[str, Any], where: str, checkpoint: Checkpoint | None
) -> dict[str, LazyArray]:
    """Name -> lazy array; the tensors of a quantised weight are one array ``….weight``, or ``…_blocks``.

    ``fields``: config.json, at ``where``; ``checkpoint`` None: headers only, reading fails. Raises CheckpointError for
    quantization that is not supported.
    """
    scheme = Scheme.of(fields, where)
    beside = {name for names in towers(tensors).values() for name in names}
    text = {name: info for name, info in tensors.items() if name not in beside}
    weights = quantised(text, scheme, checkpoint) | mxfp4(text, scheme, checkpoint)
    scheme.check_use(len(weights))
    inside = {name for array in weights.values() for name in array.tensors}
    plain = {name: raw(checkpoint, info) for name, info in tensors.items() if name not in inside}
    return plain | weights
