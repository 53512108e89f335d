"""Parts of tensors as arrays of their own, read from a tensor on loading and put into it on saving.

No other code knows that a tensor holds several parameters, or has its inputs before its outputs, as gpt-oss's experts.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from nnxmoe.convert.arrays.lazy_array import Box, Empty, LazyArray, LazyArrays, sizes, whole
from nnxmoe.convert.files.host_memory import transpose_into
from nnxmoe.model.weight_names import Table, W, layer_of, options

_OF_EXPERT = re.compile(r"(.+?)\.[0-9]{1,9}\.(.+)")


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """The part ``w`` of a tensor, whose outputs are dimension ``dim`` of the tensor without its inputs."""

    tensor: str
    w: W
    dim: int

    @property
    def name(self) -> str:
        """The name of this part."""
        return self.w.label(self.tensor)

    def outputs(self, size: int) -> range:
        """Those of the tensor's ``size`` outputs that this part has."""
        w = self.w
        if w.alternate:
            return range(w.part, size, w.parts)
        return range(w.part * (size // w.parts), (w.part + w.span) * (size // w.parts))

    def of(self, array: LazyArray) -> LazyArray:
        """The part of a tensor, with a fault if the tensor cannot be divided."""
        if array.fault is not None:
            return array
        w, shape = self.w, _turned(array.shape) if self.w.turned else array.shape
        array = dataclasses.replace(array, tensors=array.tensors or (self.tensor,))
        if len(shape) < self.dim + 1 + w.turned or shape[self.dim] % w.parts:
            where = f"{self.tensor} in {array.file}" if array.file else self.tensor
            several = f"{w.parts} parts of equal size" if w.parts > 1 else "a kernel per expert"
            return dataclasses.replace(array, fault=f"{where} has shape {list(array.shape)}: it must hold {several}")
        made = part = array.take(self.outputs(shape[self.dim]), self.dim + w.turned)
        if w.turned:

            def read(box: Box, empty: Empty) -> np.ndarray:
                found = part.read_box((*box[:-2], box[-1], box[-2]), np.empty)
                _transpose(out := np.empty(sizes(box), array.dtype), found)
                return out

            # A transpose is read a matrix at a time, because its rows in memory are columns of the tensor.
            block = math.prod(part.shape[-2:]) * array.dtype.itemsize
            made = dataclasses.replace(part, shape=_turned(part.shape), read_box=read, block=block)
        return made if array.codes is None else self._quantized(array, made)

    def _quantized(self, array: LazyArray, floats: LazyArray) -> LazyArray:
        """Slice a quantised tensor, keeping its codes; ``floats``: the slice of the decoded values."""
        assert array.codes is not None
        tall, high = array.codes.tile[0], array.shape[self.dim]
        common = {"order"} if tall < high else {"order", "scale", "zero"}
        parts = {name: part if name in common else self.of(part) for name, part in array.parts.items()}
        apart = high % tall == 0 and high // tall % self.w.parts == 0 and not (self.w.alternate and tall > 1)
        if tall < high and not apart:
            fault = f"{self.tensor} in {array.file} has tiles that share a scale and belong to two parameters"
            parts = {name: dataclasses.replace(part, fault=fault) for name, part in parts.items()}
            return dataclasses.replace(floats, parts=parts)
        return LazyArray.quantized(array.codes, floats.shape, parts)


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *shape[:-3:-1])


def _transpose(out: np.ndarray, values: np.ndarray) -> None:
    """``out[...] = values`` with its last two dimensions exchanged."""
    for at in np.ndindex(values.shape[:-2]):
        transpose_into(out[at], values[at])


def split_tensors(table: Table, arrays: LazyArrays) -> dict[str, LazyArray]:
    """Replace tensors that hold several parameters by the parts that a table names."""
    every = [(w, int(".experts." in key and not w.per_expert)) for key in table for w in options(table, key)]
    divided = {(w.name, w.per_expert) for w, _ in every if not w.whole}
    rows: dict[tuple[str, ...], list[tuple[W, int]]] = {}
    for w, dim in every:
        if (w.name, w.per_expert) in divided:  # whole too, if that is an alternative
            rows.setdefault((w.name, w.per_expert), []).append((w, dim))
    found: dict[str, LazyArray] = {}
    for name, array in arrays.items():
        inner = layer_of(name)[1]
        keys = (inner, ""), match.groups() if (match := _OF_EXPERT.fullmatch(inner)) else ()
        views = [TensorPart(name, w, dim) for key in keys for w, dim in rows.get(key, ())]
        found |= {view.name: view.of(array) for view in views} or {name: array}
    return found


def join_parts(arrays: LazyArrays, views: Mapping[str, TensorPart | None]) -> dict[str, LazyArray]:
    """The inverse of `split_tensors`, for saving: the arrays of tensors. ``views``: of the arrays that are parts."""
    found: dict[str, LazyArray] = {}
    parts: dict[str, dict[TensorPart, LazyArray]] = {}
    for name, array in arrays.items():
        if (view := views.get(name)) is None:
            found[name] = array
        else:
            parts.setdefault(view.tensor, {})[view] = array
    return found | {name: _joined(each) for name, each in parts.items()}


def _joined(parts: Mapping[TensorPart, LazyArray]) -> LazyArray:
    """Join parts to the tensor that they form."""
    view, first = next(iter(parts.items()))
    assert sum(view.w.span for view in parts) == view.w.parts, parts.keys()
    dim = view.dim
    total = first.shape[dim] // view.w.span * view.w.parts
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    shape = _turned(shape) if view.w.turned else shape

    def read(box: Box, empty: Empty) -> np.ndarray:
        lead = (box[0],) if dim else ()  # of all experts only those in the box
        out = np.empty((*sizes(lead), *shape[len(lead) :]), first.dtype)
        for view, array in parts.items():
            rest = whole(array.shape)[len(lead) :]
            values = array.read_box((*lead, *rest), np.empty)
            outs = view.outputs(total)
            part = out[(*(slice(None),) * (dim + view.w.turned), slice(outs.start, outs.stop, outs.step))]
            if view.w.turned:
                _transpose(part, values)
            else:
                part[...] = values
        return out[(*whole(sizes(lead)), *box[len(lead) :])]

    holders = next((array.holders for array in parts.values() if array.holders is not None), None)
    return LazyArray(shape, first.dtype, read, holders=holders)
