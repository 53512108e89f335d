"""MXFP4, as gpt-oss stores its experts: ``X_blocks`` with two codes in a byte, and ``X_scales`` with their exponents.

    w[e, o, 32 b + i] = FP4[code i of blocks[e, o, b]] * 2 ** (scales[e, o, b] - 127)

Blocks ``[E, O, I / 32, 16]`` have the even codes in the low bits, scales are ``[E, O, I / 32]``; both are bytes. The
formats are E2M1 and E8M0 of the OCP Microscaling specification 1.0 (2023); the layout is that of ``Weights`` in
``gpt_oss/torch/weights.py``. The weights are exact in bfloat16.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import UInt8

from nnxmoe.convert.core.layout import Leaf
from nnxmoe.convert.core.lazy_array import Box, Empty, LazyArray, LazyArrays
from nnxmoe.convert.core.views import View, joined
from nnxmoe.convert.hf.raw import raw
from nnxmoe.convert.hf.scheme import Malformed, Scheme
from nnxmoe.layers.codes import Codes
from nnxmoe.storage.checkpoint import Checkpoint
from nnxmoe.storage.safetensors import TensorInfo

BLOCK, OCTETS = 32, 16  # weights that share an exponent, and the bytes of their codes
CODES = Codes("fp4", (1, BLOCK))
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_BLOCKS, _SCALES = "_blocks", "_scales"


def mxfp4(tensors: Mapping[str, TensorInfo], scheme: Scheme, checkpoint: Checkpoint | None) -> dict[str, LazyArray]:
    """Map each ``X_blocks`` to a lazy array of the weights ``[E, O, I]`` that blocks and scales encode; malformed ones
    have a ``fault``."""
    found: dict[str, LazyArray] = {}
    for name, info in tensors.items():
        weight = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        if weight == name or info.dtype != "U8" or weight + _BLOCKS in found:
            continue
        try:
            found[weight + _BLOCKS] = _weights(weight, tensors, scheme, checkpoint)
        except Malformed as error:
            used = tuple(each for each in (weight, weight + _BLOCKS, weight + _SCALES) if each in tensors)
            both = [weight + _BLOCKS, *([weight] if weight in tensors else [])]
            found |= dict.fromkeys(both, LazyArray.faulty(str(error), used))
    return found


def _weights(
    weight: str, tensors: Mapping[str, TensorInfo], scheme: Scheme, checkpoint: Checkpoint | None
) -> LazyArray:
    """The weights. Raises Malformed."""
    for ending, other in ((_BLOCKS, _SCALES), (_SCALES, _BLOCKS)):
        if weight + ending not in tensors:
            raise Malformed(f"{weight}{ending} is missing: {weight}{other} needs it")
    if weight in tensors:
        raise Malformed(f"{weight} is stored twice, as {weight} and as {weight}{_BLOCKS}: remove one of them")
    blocks, scales = tensors[weight + _BLOCKS], tensors[weight + _SCALES]
    if scheme.method != "mxfp4":
        says = f"says quant_method {scheme.method!r}" if scheme.method else "has no quantization_config"
        raise Malformed(f"{_where(blocks)} is MXFP4, but config.json {says}")
    if len(blocks.shape) != 4 or blocks.shape[3] != OCTETS or 0 in blocks.shape:
        raise Malformed(
            f"{_where(blocks)} has shape {list(blocks.shape)}: it must be [experts, outputs, inputs / 32, 16]"
        )
    if scales.dtype not in ("U8", "F8_E8M0"):
        raise Malformed(f"{_where(scales)} is {scales.dtype}: it must be U8 or F8_E8M0")
    if scales.shape != blocks.shape[:3]:
        raise Malformed(f"{_where(scales)} has shape {list(scales.shape)}: its scales must be {list(blocks.shape[:3])}")
    experts, outs, groups, _ = blocks.shape
    codes = raw(checkpoint, dataclasses.replace(blocks, shape=(experts, outs, groups * OCTETS)))
    exponents = raw(checkpoint, dataclasses.replace(scales, dtype="U8"))

    def read_scales(box: Box, empty: Empty) -> np.ndarray:
        found = exponents.read_box(box, np.empty)
        if (found == 255).any():
            at = [int(i) + part.start for i, part in zip(np.argwhere(found == 255)[0], box, strict=True)]
            raise Malformed(f"{scales.name} in {scales.file} has a scale of NaN (255) at {at}: it must be finite")
        return np.ldexp(np.float32(1), found.astype(np.int32) - 127)

    parts = {
        "codes": of_pairs(codes),
        "scale": dataclasses.replace(exponents, dtype=np.dtype(np.float32), read_box=read_scales),
    }
    return LazyArray.quantized(CODES, (experts, outs, groups * BLOCK), parts)


def of_pairs(codes: LazyArray, size: int = BLOCK) -> LazyArray:
    """Convert codes ``[*E, O, I / 2]`` of bytes that hold neighbours to FP4 codes in groups of ``size`` as they are in
    memory."""
    octets = size // 2

    def read(box: Box, empty: Empty) -> np.ndarray:
        *rows, columns = box
        first, last = columns.start // octets * octets, -(-columns.stop // octets) * octets
        found = codes.read_box((*rows, slice(first, last)), np.empty)
        return _in_memory(found, octets)[..., columns.start - first : columns.stop - first]

    return dataclasses.replace(codes, read_box=read)


def in_blocks(arrays: LazyArrays, leaves: Mapping[str, Leaf]) -> dict[str, LazyArray]:
    """Convert the arrays of a layout, whose codes and scales are those of `mxfp4`, to tensors for a file, without
    rounding."""
    found, views = dict[str, LazyArray](), dict[str, View | None]()
    for name, array in arrays.items():
        view, ending = leaves[name].part_of, name.rpartition(".")[2]
        if ending in ("codes", "scale"):
            tensor = name.removesuffix("." + ending) if view is None else view.tensor
            tensor += _BLOCKS if ending == "codes" else _SCALES
            array = _as_blocks(array) if ending == "codes" else as_exponents(array)
            view = view and View(tensor, dataclasses.replace(view.w, turned=False), view.dim)
            name = tensor if view is None or view.w.whole else view.name
        found[name], views[name] = array, view
    return joined(found, views)


def _as_blocks(codes: LazyArray) -> LazyArray:
    pairs, (*rows, width) = as_pairs(codes), codes.shape

    def read(box: Box, empty: Empty) -> np.ndarray:
        octets = pairs.read_box((*box[:2], slice(0, width)), np.empty)
        return octets.reshape(*octets.shape[:2], -1, OCTETS)[:, :, *box[2:]]

    return dataclasses.replace(codes, shape=(*rows, width // OCTETS, OCTETS), read_box=read)


def as_pairs(codes: LazyArray) -> LazyArray:
    """The inverse of `of_pairs`, for `CODES`."""

    def read(box: Box, empty: Empty) -> np.ndarray:
        *rows, columns = box
        return _in_file(codes.read_box((*rows, slice(0, codes.shape[-1])), np.empty))[..., columns]

    return dataclasses.replace(codes, read_box=read)


def as_exponents(scale: LazyArray) -> LazyArray:
    """Powers of two as the bytes of E8M0."""

    def read(box: Box, empty: Empty) -> np.ndarray:
        half, exponents = np.frexp(scale.read_box(box, np.empty).astype(np.float32))
        assert (half == 0.5).all(), "scales of MXFP4 are powers of two"
        return (exponents + 126).astype(np.uint8)

    return dataclasses.replace(scale, dtype=np.dtype(np.uint8), read_box=read)


def _in_memory(octets: UInt8[np.ndarray, "*rows I"], block: int = OCTETS) -> UInt8[np.ndarray, "*rows I"]:
    """Codes whose bytes hold neighbours, as `Codes` has them: a byte holds one of each half of a block, which has so
    many bytes."""
    blocks = octets.reshape(*octets.shape[:-1], -1, 2, block // 2)
    first, second = blocks[..., 0, :], blocks[..., 1, :]
    pairs = first & 15 | second << 4, first >> 4 | second & 240
    return np.stack(pairs, axis=-1).reshape(octets.shape)


def _in_file(octets: UInt8[np.ndarray, "*rows I"]) -> UInt8[np.ndarray, "*rows I"]:
    """The inverse of `_in_memory`."""
    pairs = octets.reshape(*octets.shape[:-1], -1, OCTETS // 2, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    halves = first & 15 | second << 4, first >> 4 | second & 240
    return np.stack(halves, axis=-2).reshape(octets.shape)


def _where(info: TensorInfo) -> str:
    return f"{info.name} in {info.file.name}" if info.file.name else info.name
