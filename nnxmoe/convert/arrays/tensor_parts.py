"""Split tensors that contain several parameters during loading, and join the parts during saving.

Only this module handles fused tensors such as ``gate_up_proj``, and kernels of shape [in, out] (gpt-oss).
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from nnxmoe.convert.arrays.boxes import Box, sizes, whole
from nnxmoe.convert.arrays.coded_array import coded_array
from nnxmoe.convert.arrays.lazy_array import Empty, LazyArray, LazyArrays
from nnxmoe.convert.arrays.tensor_shards import join_shards
from nnxmoe.convert.files.host_memory import transpose_matrices
from nnxmoe.model.weight_names import Table, W, layer_of, options

_OF_EXPERT = re.compile(r"(.+?)\.[0-9]{1,9}\.(.+)")
_IN_MTP = re.compile(r"(?:model\.)?mtp[._](?:layers\.)?[0-9]{1,9}\.(.+)")  # see `Family.mtp_prefixes`


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """Slice of a tensor that contains several parameters, such as the gate half of ``gate_up_proj``.

    Attributes:
        tensor: Name of the tensor.
        w: Row of the name table, with the range of outputs.
        dim: Axis of the outputs in a tensor of shape [*E, out, in]: 1 if it contains all experts, else 0.
    """

    tensor: str
    w: W
    dim: int

    @property
    def name(self) -> str:
        """Name of the array that contains only this slice."""
        return self.w.label(self.tensor)

    def outputs(self, size: int) -> range:
        """Return the indices of the slice's outputs among the tensor's ``size`` outputs."""
        w = self.w
        if w.alternate:
            return range(w.part, size, w.parts)
        return range(w.part * (size // w.parts), (w.part + w.span) * (size // w.parts))

    def select(self, array: LazyArray) -> LazyArray:
        """Select the slice from a tensor. If the tensor cannot be split, the result has a ``fault``."""
        if array.fault is not None:
            return array
        w, shape = self.w, _swap_last(array.shape) if self.w.transposed else array.shape
        array = dataclasses.replace(array, tensors=array.tensors or (self.tensor,))
        if len(shape) < self.dim + 1 + w.transposed or shape[self.dim] % w.parts:
            location = f"{self.tensor} in {array.file}" if array.file else self.tensor
            expected_content = f"{w.parts} parts of equal size" if w.parts > 1 else "a kernel per expert"
            return dataclasses.replace(
                array, fault=f"{location} has shape {list(array.shape)}: it must contain {expected_content}"
            )
        part = array.take(self.outputs(shape[self.dim]), self.dim + w.transposed)
        if w.transposed:
            # Read one whole matrix at a time, because the rows of the matrix in memory are columns of the tensor.
            block = math.prod(part.shape[-2:]) * array.dtype.itemsize
            last_axis = len(part.shape) - 1
            part = dataclasses.replace(part.transpose((*range(last_axis - 1), last_axis, last_axis - 1)), block=block)
        return part if array.codes is None else self._select_codes(array, part)

    def _select_codes(self, array: LazyArray, floats: LazyArray) -> LazyArray:
        """Select the slice from the codes, scales and zero points. ``floats`` is the slice of dequantized values."""
        assert array.codes is not None
        tile_rows, num_rows = array.codes.tile[0], array.shape[self.dim]
        unsplit_names = {"order"} if tile_rows < num_rows else {"order", "scale", "zero"}
        parts = {name: part if name in unsplit_names else self.select(part) for name, part in array.parts.items()}
        is_divisible = (
            num_rows % tile_rows == 0
            and num_rows // tile_rows % self.w.parts == 0
            and not (self.w.alternate and tile_rows > 1)
        )
        if tile_rows < num_rows and not is_divisible:
            fault = f"{self.tensor} in {array.file} has quantization tiles that span two parameters"
            parts = {name: dataclasses.replace(part, fault=fault) for name, part in parts.items()}
            return dataclasses.replace(floats, parts=parts)
        return coded_array(array.codes, floats.shape, parts)


def _swap_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *shape[:-3:-1])


def split_tensors(table: Table, arrays: LazyArrays) -> dict[str, LazyArray]:
    """Replace each tensor that contains several parameters with one array per parameter.

    Args:
        table: Parameter key -> tensor name and slice.
        arrays: Tensors of a checkpoint by name.
    """
    rows = [(w, int(".experts." in key and not w.per_expert)) for key in table for w in options(table, key)]
    if sharded_names := {w.name for w, _ in rows if w.max_shards}:
        arrays = join_shards(sharded_names, arrays)
    split_names = {(w.name, w.per_expert) for w, _ in rows if not w.whole}
    parts_of: dict[tuple[str, ...], list[tuple[W, int]]] = {}
    for w, dim in rows:
        if (w.name, w.per_expert) in split_names:  # also the whole tensor, if the table lists it as an alternative
            parts_of.setdefault((w.name, w.per_expert), []).append((w, dim))
    result: dict[str, LazyArray] = {}
    for name, array in arrays.items():
        in_mtp = _IN_MTP.fullmatch(name)
        name_in_layer = in_mtp[1] if in_mtp else layer_of(name)[1]
        match = _OF_EXPERT.fullmatch(name_in_layer)
        keys = (name_in_layer, ""), match.groups() if match else ()
        parts = [TensorPart(name, w, dim) for key in keys for w, dim in parts_of.get(key, ())]
        result |= {part.name: part.select(array) for part in parts} or {name: array}
    return result


def join_parts(arrays: LazyArrays, parts: Mapping[str, TensorPart | None]) -> dict[str, LazyArray]:
    """Join arrays into tensors that contain several parameters, for saving. Inverse of `split_tensors`.

    Args:
        arrays: Arrays of a layout by name.
        parts: Array name -> slice of a tensor, or None if the array is a whole tensor.
    """
    tensors: dict[str, LazyArray] = {}
    parts_of: dict[str, dict[TensorPart, LazyArray]] = {}
    for name, array in arrays.items():
        part = parts.get(name)
        if part is None:
            tensors[name] = array
        else:
            parts_of.setdefault(part.tensor, {})[part] = array
    return tensors | {name: _join(tensor_parts) for name, tensor_parts in parts_of.items()}


def _join(parts: Mapping[TensorPart, LazyArray]) -> LazyArray:
    first_part, array = next(iter(parts.items()))
    assert sum(part.w.span for part in parts) == first_part.w.parts, parts.keys()
    axis, dtype = first_part.dim, array.dtype
    num_outputs = array.shape[axis] // first_part.w.span * first_part.w.parts
    shape = (*array.shape[:axis], num_outputs, *array.shape[axis + 1 :])
    shape = _swap_last(shape) if first_part.w.transposed else shape

    def read(box: Box, empty: Empty) -> np.ndarray:
        experts = (box[0],) if axis else ()  # read only the experts in the box
        tensor = np.empty((*sizes(experts), *shape[len(experts) :]), dtype)
        for part, array in parts.items():
            values = array.read_box((*experts, *whole(array.shape)[len(experts) :]), np.empty)
            outputs = part.outputs(num_outputs)
            target = tensor[
                (*(slice(None),) * (axis + part.w.transposed), slice(outputs.start, outputs.stop, outputs.step))
            ]
            if part.w.transposed:
                transpose_matrices(target, values)
            else:
                target[...] = values
        return tensor[(*whole(sizes(experts)), *box[len(experts) :])]

    holders = next((array.holders for array in parts.values() if array.holders is not None), None)
    return LazyArray(shape, dtype, read, holders=holders)
