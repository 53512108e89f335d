"""AWQ and GPTQ weights. Codes of shape [in, out] are packed into 32-bit words.

The formulas follow AutoAWQ (``modules/linear/gemm.py``, ``utils/packing_utils``), AutoGPTQ and GPTQModel
(``nn_modules/qlinear``).
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from nnxmoe.convert.arrays.lazy_array import LazyArray
from nnxmoe.convert.files.safetensors import TensorInfo
from nnxmoe.convert.formats.module_tensors import FLOATS, ModuleTensors, rounding_dtype, unpack_words
from nnxmoe.convert.formats.scheme import GPTQ_FORMATS, MalformedTensor
from nnxmoe.layers.linear.code_format import CodeFormat

_AWQ_COLUMNS = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # column within a word -> index of its nibble


def read_awq(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """Read an AWQ weight in the ``gemm`` format. The codes have shape [in, out], with eight outputs per word."""
    ins, width = files.matrix(info)

    def unpack(packed: np.ndarray) -> np.ndarray:
        return unpack_words(packed, 4).reshape(*packed.shape, 8)[..., _AWQ_COLUMNS].reshape(len(packed), -1).T

    return _inputs_first(files, info, (width * 8, ins), 4, files.scheme.group_size() or ins, unpack, unpack)


def read_gptq(files: ModuleTensors, info: TensorInfo) -> LazyArray:
    """Read a GPTQ weight.

    The codes have shape [in, out] and are packed along the input axis. The zero points are packed along the output
    axis. Version 1 of the format stores each zero point minus one.
    """
    num_word_rows, outs = files.matrix(info)
    bits, group = _settings(files, num_word_rows, outs)
    ins, max_code = num_word_rows * 32 // bits, (1 << bits) - 1
    zero_offset = files.scheme.choice("checkpoint_format", GPTQ_FORMATS, "gptq") != "gptq_v2"

    def unpack(packed: np.ndarray) -> np.ndarray:
        return unpack_words(packed.T, bits)[:, :ins]

    def unpack_zero(packed: np.ndarray) -> np.ndarray:
        return (unpack_words(packed, bits)[:, :outs] + np.uint8(zero_offset) & np.uint8(max_code)).T

    order = _order(files, ins, group)
    return _inputs_first(files, info, (outs, ins), bits, group, unpack, unpack_zero, order)


def _settings(files: ModuleTensors, num_word_rows: int, outs: int) -> tuple[int, int]:
    """Return (bits, group size) of a module.

    If ``quantization_config`` has the field ``dynamic`` (GPTQModel), modules may have different settings. The
    settings are then derived from the module's tensors.
    """
    bits, scheme = files.scheme.choice("bits", (4, 8), None), files.scheme
    if not scheme.fields.get("dynamic"):
        return bits, scheme.group_size() or num_word_rows * 32 // bits
    zeros, scales = files.tensor("qzeros", ("I32",)), files.tensor("scales", FLOATS)
    bits = next((candidate for candidate in (bits, 4, 8) if zeros.shape[-1:] == (-(-outs * candidate // 32),)), bits)
    ins = num_word_rows * 32 // bits
    group, groups = scheme.group_size() or ins, scales.shape[0] if scales.shape else 0
    group_index = files.values(files.tensor("g_idx", ("I32", "I64"), [(ins,)])) if files.has("g_idx") else None
    if group_index is not None and group_index.min() >= 0:
        group = int((group_index == group_index[0]).sum())
    elif -(-ins // group) != groups and groups and ins % groups == 0:
        group = ins // groups
    return bits, group


def _order(files: ModuleTensors, ins: int, group: int) -> np.ndarray | None:
    """Return the indices of the inputs sorted by group (act order). `None` if the inputs are already in order."""
    if not files.has("g_idx"):
        return None
    group_index = files.values(info := files.tensor("g_idx", ("I32", "I64"), [(ins,)]))
    if group_index is None:
        return None
    groups = -(-ins // group)
    if group_index.min() < 0 or group_index.max() >= groups:
        invalid_group = int(group_index.min() if group_index.min() < 0 else group_index.max())
        raise MalformedTensor(
            f"{files.where(info)}: group {invalid_group} is out of range, because the number of groups is {groups}"
        )
    counts = np.bincount(group_index, minlength=groups)
    if (counts[:-1] != group).any():
        invalid_group = int(np.argmax(counts != group))
        raise MalformedTensor(
            f"{files.where(info)}: group {invalid_group} has {counts[invalid_group]} inputs, but must have {group}"
        )
    settings = files.scheme.fields
    uses_act_order = settings.get("desc_act") is True and settings.get("static_groups") is not True and groups > 1
    return (
        np.argsort(group_index, kind="stable").astype(np.int32)
        if uses_act_order or (np.diff(group_index) < 0).any()
        else None
    )


def _inputs_first(
    files: ModuleTensors,
    info: TensorInfo,
    shape: tuple[int, int],
    bits: int,
    group: int,
    unpack: Callable[[np.ndarray], np.ndarray],
    unpack_zero: Callable[[np.ndarray], np.ndarray],
    order: np.ndarray | None = None,
) -> LazyArray:
    """Return the quantized weight of a module whose tensors have shape [in, out].

    Args:
        files: Tensors of the module.
        info: Tensor of the packed codes.
        shape: Shape ``[O, I]`` of the weight.
        bits: Bits per code.
        group: Inputs per group.
        unpack: Function that converts packed codes to codes ``[O, I]``.
        unpack_zero: Function that converts packed zero points to zero points ``[O, groups]``.
        order: Permutation of the inputs. See `QuantizedWeight`.
    """
    (outs, ins), groups = shape, -(-shape[1] // group)
    files.tensor("qweight", ("I32",))
    scale = files.tensor("scales", FLOATS, [(groups, outs)])
    zero = files.tensor("qzeros", ("I32",), [(groups, -(-outs * bits // 32))])
    codes = CodeFormat("int4" if bits == 4 else "int8", (1, group), rounding_dtype(scale))

    def unpack_rows(words: LazyArray, rows: slice) -> np.ndarray:
        code_values = unpack(np.asarray(words))[rows]
        return code_values if order is None else code_values[:, order]

    parts = {
        "codes": files.codes(codes, shape, info, unpack_rows),
        "scale": files.scale(scale, codes.scales_shape(outs, ins), transposed=True, allowed="not zero"),
        "zero": files.zero_words(codes, shape, zero, unpack_zero),
    }
    if order is not None:
        parts["order"] = dataclasses.replace(LazyArray.from_array(order), tensors=(f"{files.module}.g_idx",))
    return files.weight(codes, shape, parts)
