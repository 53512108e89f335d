"""Tensors that hold parameters in another arrangement than ours, such as gpt-oss's experts.

A name in a family's table may end like an expression of NumPy: ``name[:, :, 1::2].mT`` is every second entry of the
third dimension of the tensor ``name``, from the second on, with the last two dimensions exchanged. Such a *form* is an
array of its own, read from the tensor on loading and put into it on saving, so that no other code needs to know its
form. The first dimension, of the experts, is left as it is.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from nnxmoe.convert.core.lazy_array import Box, Empty, Encoded, LazyArray, LazyArrays, decoded, sizes, whole
from nnxmoe.storage.host import transpose_into

_FORM = re.compile(r"(?P<tensor>.*?)(\[(?P<before>(:, )*)(?P<first>[0-9]+)::(?P<step>[0-9]+)\])?(?P<turned>\.mT)?")


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of a name: entries ``first::step`` of dimension ``dim`` of a tensor, its last two exchanged if
    ``turned``."""

    tensor: str
    dim: int = 0
    first: int = 0
    step: int = 1
    turned: bool = False

    @classmethod
    def of(cls, name: str) -> "Form":
        """The form that a name ends with, if any."""
        match = _FORM.fullmatch(name)
        assert match is not None
        if match["step"] is None:
            return cls(match["tensor"], turned=match["turned"] is not None)
        first, step = int(match["first"]), int(match["step"])
        return cls(match["tensor"], match["before"].count(":"), first, step, match["turned"] is not None)

    @property
    def plain(self) -> bool:
        """Whether the name is that of a tensor."""
        return self.step == 1 and not self.turned

    def place(self, box: Box) -> Box:
        """A box of this form's array as slices of the tensor; the one of the form's dimension has a step."""
        box = (*box[:-2], box[-1], box[-2]) if self.turned else box
        cut = box[self.dim]
        strided = slice(self.first + cut.start * self.step, self.first + (cut.stop - 1) * self.step + 1, self.step)
        return (*box[: self.dim], strided, *box[self.dim + 1 :])


def arranged(table: Mapping[str, tuple[str, ...]], arrays: LazyArrays) -> dict[str, LazyArray]:
    """Arrays of tensors with those that a table names by forms in the place of their tensors."""
    found = dict(arrays)
    for template in {name for names in table.values() for name in names if not Form.of(name).plain}:
        form = Form.of(template)
        pattern = re.compile(re.escape(form.tensor).replace(re.escape("{layer}"), "[0-9]{1,9}"))
        for name in filter(pattern.fullmatch, arrays):
            found.pop(name, None)
            suffix = template.removeprefix(form.tensor)
            found[name + suffix] = _read_from(dataclasses.replace(form, tensor=name), arrays[name])
    return found


def _read_from(form: Form, array: LazyArray) -> LazyArray:
    """The array of a form of a tensor, with a fault if the tensor cannot have that form."""
    if array.fault is not None:
        return array
    array = dataclasses.replace(array, tensors=array.tensors or (form.tensor,))
    if len(array.shape) < 2 + form.turned or array.shape[form.dim] % form.step:
        where = f"{form.tensor} in {array.file}" if array.file else form.tensor
        several = f"{form.step} parameters of the experts" if form.step > 1 else "a kernel per expert"
        return dataclasses.replace(array, fault=f"{where} has shape {list(array.shape)}: it must hold {several}")
    shape = (*array.shape[: form.dim], array.shape[form.dim] // form.step, *array.shape[form.dim + 1 :])
    if array.encoded is not None:
        parts = {name: _read_from(form, part) for name, part in array.encoded.parts.items()}
        return decoded(Encoded(array.encoded.codes, shape, parts))

    def read(box: Box, empty: Empty) -> np.ndarray:
        place = form.place(box)
        hull = tuple(slice(part.start, part.stop) for part in place)
        found = array.read_box(hull, np.empty)[tuple(slice(None, None, part.step) for part in place)]
        if not form.turned:
            return np.ascontiguousarray(found)
        out = np.empty(sizes(box), array.dtype)
        _turn_into(out, found)
        return out

    if form.turned:  # a matrix at a time, because its rows in memory are columns of the tensor
        shape = (*shape[:-2], shape[-1], shape[-2])
        array = dataclasses.replace(array, block=math.prod(shape[-2:]) * array.dtype.itemsize)
    return dataclasses.replace(array, shape=shape, read_box=read)


def _turn_into(out: np.ndarray, values: np.ndarray) -> None:
    """``out[...] = values`` with its last two dimensions exchanged."""
    for at in np.ndindex(values.shape[:-2]):
        transpose_into(out[at], values[at])


def restored(arrays: LazyArrays) -> dict[str, LazyArray]:
    """The inverse of `arranged`, for saving: the arrays of tensors."""
    found: dict[str, LazyArray] = {}
    forms: dict[str, dict[Form, LazyArray]] = {}
    for name, array in arrays.items():
        form = Form.of(name)
        if form.plain:
            found[name] = array
        else:
            forms.setdefault(form.tensor, {})[form] = array
    return found | {name: _joined(parts) for name, parts in forms.items()}


def _joined(parts: Mapping[Form, LazyArray]) -> LazyArray:
    """The tensor that consists of the arrays of its forms."""
    form, first = next(iter(parts.items()))
    assert len(parts) == form.step, parts.keys()
    shape = (*first.shape[:-2], first.shape[-1], first.shape[-2]) if form.turned else first.shape
    shape = (*shape[: form.dim], shape[form.dim] * form.step, *shape[form.dim + 1 :])

    def read(box: Box, empty: Empty) -> np.ndarray:
        out = np.empty((box[0].stop - box[0].start, *shape[1:]), first.dtype)
        for form, array in parts.items():
            every = whole(array.shape)[1:]
            values, part = array.read_box((box[0], *every), np.empty), out[form.place((slice(0, len(out)), *every))]
            if form.turned:
                _turn_into(part, values)
            else:
                part[...] = values
        return out[(slice(None), *box[1:])]

    spread = any(array.holders is not None for array in parts.values())
    return LazyArray(shape, first.dtype, read, holders=() if spread else None)
