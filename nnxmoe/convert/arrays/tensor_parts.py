"""Split tensors that contain several parameters during loading, and join the parts during saving.

Only this module handles tensors with several parameters, and tensors with inputs before outputs, as in gpt-oss.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from nnxmoe.convert.arrays.boxes import Box, sizes, whole
from nnxmoe.convert.arrays.coded_array import coded_array
from nnxmoe.convert.arrays.lazy_array import Empty, LazyArray, LazyArrays
from nnxmoe.convert.files.host_memory import transpose_matrices
from nnxmoe.model.weight_names import Table, W, layer_of, options

_OF_EXPERT = re.compile(r"(.+?)\.[0-9]{1,9}\.(.+)")


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """A part of a tensor.

    Attributes:
        tensor: Name of the tensor.
        w: Row of the name table, with the range of outputs.
        dim: Axis of the outputs if the tensor is not transposed. 1 if the tensor contains all experts, else 0.
    """

    tensor: str
    w: W
    dim: int

    @property
    def name(self) -> str:
        """Name of the part as an array."""
        return self.w.label(self.tensor)

    def outputs(self, size: int) -> range:
        """Return the indices of the part's outputs among the tensor's ``size`` outputs."""
        w = self.w
        if w.alternate:
            return range(w.part, size, w.parts)
        return range(w.part * (size // w.parts), (w.part + w.span) * (size // w.parts))

    def select(self, array: LazyArray) -> LazyArray:
        """Select the part from a tensor. If the tensor cannot be split, the result has a ``fault``."""
        if array.fault is not None:
            return array
        w, shape = self.w, _swap_last(array.shape) if self.w.transposed else array.shape
        array = dataclasses.replace(array, tensors=array.tensors or (self.tensor,))
        if len(shape) < self.dim + 1 + w.transposed or shape[self.dim] % w.parts:
            where = f"{self.tensor} in {array.file}" if array.file else self.tensor
            several = f"{w.parts} parts of equal size" if w.parts > 1 else "a kernel per expert"
            return dataclasses.replace(array, fault=f"{where} has shape {list(array.shape)}: it must hold {several}")
        part = array.take(self.outputs(shape[self.dim]), self.dim + w.transposed)
        if w.transposed:
            # Read one whole matrix at a time, because its rows in memory are columns of the tensor.
            block = math.prod(part.shape[-2:]) * array.dtype.itemsize
            last = len(part.shape) - 1
            part = dataclasses.replace(part.transpose((*range(last - 1), last, last - 1)), block=block)
        return part if array.codes is None else self._select_codes(array, part)

    def _select_codes(self, array: LazyArray, floats: LazyArray) -> LazyArray:
        """Select the part from the codes, scales and zero points. ``floats`` is the part of the dequantized tensor."""
        assert array.codes is not None
        tall, high = array.codes.tile[0], array.shape[self.dim]
        common = {"order"} if tall < high else {"order", "scale", "zero"}
        parts = {name: part if name in common else self.select(part) for name, part in array.parts.items()}
        apart = high % tall == 0 and high // tall % self.w.parts == 0 and not (self.w.alternate and tall > 1)
        if tall < high and not apart:
            fault = f"{self.tensor} in {array.file} has tiles that share a scale and belong to two parameters"
            parts = {name: dataclasses.replace(part, fault=fault) for name, part in parts.items()}
            return dataclasses.replace(floats, parts=parts)
        return coded_array(array.codes, floats.shape, parts)


def _swap_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *shape[:-3:-1])


def split_tensors(table: Table, arrays: LazyArrays) -> dict[str, LazyArray]:
    """Replace each tensor that contains several parameters by its parts.

    Args:
        table: Parameter key -> tensor name and part.
        arrays: Tensors of a checkpoint by name.
    """
    rows = [(w, int(".experts." in key and not w.per_expert)) for key in table for w in options(table, key)]
    split = {(w.name, w.per_expert) for w, _ in rows if not w.whole}
    parts_of: dict[tuple[str, ...], list[tuple[W, int]]] = {}
    for w, dim in rows:
        if (w.name, w.per_expert) in split:  # includes the whole tensor if the table lists it as an alternative
            parts_of.setdefault((w.name, w.per_expert), []).append((w, dim))
    result: dict[str, LazyArray] = {}
    for name, array in arrays.items():
        name_in_layer = layer_of(name)[1]
        match = _OF_EXPERT.fullmatch(name_in_layer)
        keys = (name_in_layer, ""), match.groups() if match else ()
        parts = [TensorPart(name, w, dim) for key in keys for w, dim in parts_of.get(key, ())]
        result |= {part.name: part.select(array) for part in parts} or {name: array}
    return result


def join_parts(arrays: LazyArrays, parts: Mapping[str, TensorPart | None]) -> dict[str, LazyArray]:
    """Invert `split_tensors`, for saving.

    Args:
        arrays: Arrays of a layout by name.
        parts: Array name -> part of a tensor, or None if the array is a whole tensor.
    """
    tensors: dict[str, LazyArray] = {}
    split: dict[str, dict[TensorPart, LazyArray]] = {}
    for name, array in arrays.items():
        part = parts.get(name)
        if part is None:
            tensors[name] = array
        else:
            split.setdefault(part.tensor, {})[part] = array
    return tensors | {name: _join(each) for name, each in split.items()}


def _join(parts: Mapping[TensorPart, LazyArray]) -> LazyArray:
    first, array = next(iter(parts.items()))
    assert sum(part.w.span for part in parts) == first.w.parts, parts.keys()
    dim, dtype = first.dim, array.dtype
    total = array.shape[dim] // first.w.span * first.w.parts
    shape = (*array.shape[:dim], total, *array.shape[dim + 1 :])
    shape = _swap_last(shape) if first.w.transposed else shape

    def read(box: Box, empty: Empty) -> np.ndarray:
        experts = (box[0],) if dim else ()  # read only the experts in the box
        tensor = np.empty((*sizes(experts), *shape[len(experts) :]), dtype)
        for part, array in parts.items():
            values = array.read_box((*experts, *whole(array.shape)[len(experts) :]), np.empty)
            outs = part.outputs(total)
            target = tensor[(*(slice(None),) * (dim + part.w.transposed), slice(outs.start, outs.stop, outs.step))]
            if part.w.transposed:
                transpose_matrices(target, values)
            else:
                target[...] = values
        return tensor[(*whole(sizes(experts)), *box[len(experts) :])]

    holders = next((array.holders for array in parts.values() if array.holders is not None), None)
    return LazyArray(shape, dtype, read, holders=holders)
