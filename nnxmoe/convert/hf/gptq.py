"""AWQ and GPTQ: codes with inputs first, packed into 32-bit words.

The formulas are those of AutoAWQ (``modules/linear/gemm.py``), AutoGPTQ and GPTQModel (``nn_modules/qlinear``).
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from nnxmoe.convert.core.lazy_array import Box, Empty, LazyArray, decoded
from nnxmoe.convert.hf import words
from nnxmoe.convert.hf.module_tensors import AT_ONCE, ModuleTensors, rounded_to
from nnxmoe.convert.hf.raw import raw
from nnxmoe.convert.hf.scheme import Malformed
from nnxmoe.layers.codes import Codes
from nnxmoe.storage.safetensors import TensorInfo


def awq(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """AWQ's ``gemm``: inputs first, eight outputs to a word."""
    ins, width = files.matrix(info)
    group = files.scheme.group_size() or ins
    shape, groups = (width * 8, ins), -(-ins // group)
    if info.dtype != "I32":
        raise Malformed(f"{files.where(info)} is {info.dtype}: it must be I32")
    scale = files.tensor("scales", ("F16", "BF16", "F32"), [(groups, shape[0])])
    zero = files.tensor("qzeros", ("I32",), [(groups, width)])
    codes = Codes("int4", (1, group), rounded_to(scale))
    return _inputs_first(files, info, shape, codes, scale, zero, words.awq, words.awq)


def gptq(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """GPTQ: inputs first, packed along them; zero points along the outputs, in version 1 less one."""
    bits = files.scheme.one_of("bits", (4, 8), 4)
    tall, outs = files.matrix(info)
    ins, limit = tall * 32 // bits, (1 << bits) - 1
    group = files.scheme.group_size() or ins
    groups = -(-ins // group)
    if info.dtype != "I32":
        raise Malformed(f"{files.where(info)} is {info.dtype}: it must be I32")
    scale = files.tensor("scales", ("F16", "BF16", "F32"), [(groups, outs)])
    zero = files.tensor("qzeros", ("I32",), [(groups, -(-outs * bits // 32))])
    less = files.scheme.fields.get("checkpoint_format", "gptq") == "gptq"
    codes = Codes("int4" if bits == 4 else "int8", (1, group), rounded_to(scale))
    order = _order(files, ins, group)

    def zeros(words_: np.ndarray) -> np.ndarray:
        return words.along_columns(words_, bits, outs) + np.uint8(less) & np.uint8(limit)

    def values(words_: np.ndarray) -> np.ndarray:
        found = words.along_rows(words_, bits, ins)
        return (found if order is None else found[:, order]).T

    found = _inputs_first(files, info, (outs, ins), codes, scale, zero, values, zeros)
    if order is None:
        return found
    assert found.encoded is not None
    place = LazyArray((ins,), np.dtype(np.int32), lambda box, _: order[box], tensors=(f"{files.module}.g_idx",))
    return decoded(dataclasses.replace(found.encoded, parts={**found.encoded.parts, "order": place}))


def _order(files: ModuleTensors, ins: int, group: int) -> np.ndarray | None:
    """The inputs by group (act order); None if they are in order."""
    if not files.has("g_idx"):
        return None
    found = files.values(info := files.tensor("g_idx", ("I32", "I64"), [(ins,)]))
    if found is None:
        return None
    groups = -(-ins // group)
    if found.min() < 0 or found.max() >= groups:
        bad = int(found.min() if found.min() < 0 else found.max())
        raise Malformed(f"{files.where(info)}: group {bad} does not exist: there are {groups}")
    counts = np.bincount(found, minlength=groups)
    if (counts[:-1] != group).any():
        bad = int(np.argmax(counts != group))
        raise Malformed(f"{files.where(info)}: group {bad} has {counts[bad]} inputs: it must have {group}")
    wanted = files.scheme.fields.get("desc_act") is True and groups > 1
    return np.argsort(found, kind="stable").astype(np.int32) if wanted or (np.diff(found) < 0).any() else None


def _inputs_first(
    files: ModuleTensors,
    info: TensorInfo,
    shape: tuple[int, int],
    codes: Codes,
    scale: TensorInfo,
    zero: TensorInfo,
    unpack: Callable[[np.ndarray], np.ndarray],
    unpack_zero: Callable[[np.ndarray], np.ndarray],
) -> LazyArray:
    """A weight whose tensors have inputs first. ``unpack`` gives codes ``[I, O]``, ``unpack_zero`` ``[G, O]``."""
    bits, grid, stored = (4 if codes.halves else 8), codes.grid(*shape), raw(files.checkpoint, info)

    def read(box: Box, empty: Empty) -> np.ndarray:
        values = np.ascontiguousarray(unpack(np.asarray(stored)).T)[box[0]]
        return (codes.pack(values) if codes.halves else words.signed(values))[:, box[1]]

    parts = {
        "codes": dataclasses.replace(files.codes(codes, shape, info, read), block=AT_ONCE),
        "scale": files.scale(scale, grid, turned=True),
        "zero": files.zero_words(zero, grid, lambda z: unpack_zero(z).T, bits),
    }
    return files.made(codes, shape, parts)
