"""The common description of external layouts: ``layout(model) -> {external name: ArrayLayout}``.

An `ArrayLayout` says which parts of which parameters an external array holds, where, and how they are arranged.
Hugging Face,
MaxText, the native format and Linen each build one; loading, checking and saving depend on it alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from flax import nnx

from nnxmoe.axes import axes_of, is_stacked
from nnxmoe.config.printable import some
from nnxmoe.convert.arrays.lazy_array import Box, LazyArray, whole
from nnxmoe.convert.arrays.tensor_parts import TensorPart
from nnxmoe.convert.storage.multihost import AnyArray
from nnxmoe.layers.linear.kernel import STACK_AXES, flax_order
from nnxmoe.layers.linear.lora import UnmergeValue
from nnxmoe.layers.linear.quantized import QuantizedArray
from nnxmoe.model.paths import name_of

Path = tuple[Any, ...]
T = TypeVar("T")
QUERY = "layer.attention.q."


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model: its name (see `name_of`) and its variable, with shape and metadata. ``at``: which of
    its layers or experts is meant; empty: all of it."""

    path: Path
    key: str
    layer: int | None
    stack: int | None
    variable: nnx.Variable
    at: tuple[int, ...] = ()

    @property
    def ending(self) -> str:
        """Suffix of a key that names an array of a quantised kernel, such as ``.scale``; empty for other keys."""
        return self.key[self.key.rindex(".") :] if isinstance(self.variable, QuantizedArray) else ""

    @property
    def takes_query_scalar(self) -> bool:
        """Whether a factor on the queries multiplies it: yes for weights, biases, and the scales of codes."""
        return self.key.startswith(QUERY) and self.ending in ("", ".scale")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, with the layer and expert dimensions first."""
        return tuple(self.variable.shape)

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axes."""
        return axes_of(self.variable)

    @property
    def inputs(self) -> int | None:
        """Number of trailing dimensions that a linear map contracts; None for other parameters."""
        return self.variable.get_metadata().get("inputs")

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape per layer and expert."""
        return self.shape[sum(axis in STACK_AXES for axis in self.axes) :]

    @property
    def of_layer(self) -> tuple[int, ...]:
        """Shape per layer, experts first, in the order of Flax's kernels; for a bias, its unflattened output shape,
        such as [heads, width]."""
        outs = self.variable.get_metadata().get("outs")
        own = self.shape[1:] if is_stacked(self.axes) else self.shape
        return flax_order(self.variable, own) if outs is None else outs

    @property
    def experts(self) -> int | None:
        """Size of the expert dimension; None without one."""
        return self.shape[self.axes.index("expert")] if "expert" in self.axes else None

    def layers(self) -> Iterator[tuple[int | None, "Parameter"]]:
        """Yield (layer number in the model, the parameter of that layer); ``(None, self)`` outside of stacks."""
        if is_stacked(self.axes):
            assert self.layer is not None
            yield from ((self.layer + i, replace(self, at=(i,))) for i in range(self.shape[0]))
        else:
            yield self.layer, self


def parameters(model: nnx.Module, *, codes: bool = False) -> list[Parameter]:
    """The parameters to store in a checkpoint, in the model's order, without values kept for `lora.unmerge`.

    ``codes``: whether the layout stores the arrays of quantised kernels. Raises ValueError if the model has such
    kernels and it does not, or unmerged adapters, which would be lost.
    """
    flat = [(path, v) for path, v in nnx.to_flat_state(nnx.state(model)) if not isinstance(v, UnmergeValue)]
    if found := [".".join(map(str, path)) for path, v in flat if isinstance(v, nnx.LoRAParam)]:
        raise ValueError(
            f"the model has adapters ({some(found)}), which this format cannot store: merge them first with "
            "nnxmoe.train.lora.merge(model), or save them separately with nnxmoe.train.lora.save(model, folder)"
        )
    if not codes and (found := [".".join(map(str, path)) for path, v in flat if isinstance(v, QuantizedArray)]):
        raise ValueError(
            f"the model has quantised kernels ({some(found)}), which this layout cannot store: make them floats first "
            "with nnxmoe.dequantize(model)"
        )
    return [Parameter(path, *name_of(model, path), variable) for path, variable in flat]


@dataclass(frozen=True)
class ValueChange:
    """A transformation of an external array's values, on loading or saving.

    ``times``, ``over``: multiply and divide, in float32, rounded once. ``features``: reorders the last dimension;
    ``halves`` puts even features before odd ones, ``pairs`` is its inverse.
    """

    times: float = 1.0
    over: float = 1.0
    features: Literal["as they are", "halves", "pairs"] = "as they are"

    @property
    def inverse(self) -> "ValueChange":
        """The transformation back."""
        back: dict[str, Any] = {"halves": "pairs", "pairs": "halves"}
        return ValueChange(self.over, self.times, back.get(self.features, self.features))

    def __call__(self, array: AnyArray) -> AnyArray:
        if self.features == "halves":
            array = array.__array_namespace__().concatenate([array[..., ::2], array[..., 1::2]], axis=-1)
        elif self.features == "pairs":
            half = array.shape[-1] // 2
            both = [array[..., :half], array[..., half:]]
            array = array.__array_namespace__().stack(both, axis=-1).reshape(array.shape)
        if self.times != 1:
            array = array.astype(np.float32) * np.float32(self.times)
        if self.over != 1:
            array = array.astype(np.float32) / np.float32(self.over)
        return array

    def of(self, array: LazyArray) -> LazyArray:
        """The array whose values are transformed when they are read."""
        if self == UNCHANGED:
            return array
        dtype = array.dtype if self.times == self.over == 1 else np.float32
        if self.features == "as they are":
            return array.each(self, dtype)
        return array.in_blocks(array.shape[-1], array.shape[-1], self, dtype)


UNCHANGED = ValueChange()


@dataclass(frozen=True)
class Arrangement:
    """The arrangement of an array in a file, where it has another shape.

    ``shape``: its shape there. ``parts``: the same with every dimension apart that is merged there or in our array.
    ``order``: for each dimension of our array, its place among ``parts``. ``columns``: if the file's array holds others
    too, which of its columns are this one.
    """

    shape: tuple[int, ...]
    parts: tuple[int, ...]
    order: tuple[int, ...]
    columns: tuple[int, ...] | None = None

    def read(self, array: LazyArray, shape: tuple[int, ...]) -> LazyArray:
        """Our array of this shape, from the file's."""
        return array.reshaped(self.parts).transposed(self.order).reshaped(shape)

    def write(self, array: LazyArray) -> LazyArray:
        """The file's array, from ours."""
        parts = array.reshaped(tuple(self.parts[i] for i in self.order))
        return parts.transposed(tuple(map(int, np.argsort(self.order)))).reshaped(self.shape)


@dataclass(frozen=True)
class ArrayLayout:
    """An external array: the parts of parameters that it holds, each of shape ``inner``, stacked on ``axis``, or
    one part without ``axis``.

    ``flat``: linear maps are stored as ``[outs, ins]`` with heads flattened; otherwise as in Flax, ``[*ins, *outs]``.
    ``axes``: its logical axes, if the layout has them. ``part_of``: the tensor that holds it with others or in another
    order, if any. ``arranged``: its arrangement in the file, if it has another
    shape there.
    """

    key: str
    inner: tuple[int, ...]
    parts: tuple[Parameter, ...] = ()
    axis: int | None = None
    flat: bool = False
    change: ValueChange = UNCHANGED
    axes: tuple[str | None, ...] = ()
    part_of: TensorPart | None = None
    arranged: Arrangement | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.inner if self.axis is None else _inserted(self.inner, self.axis, len(self.parts))

    def stacked(self, box: Box, number: int) -> Box:
        """Convert a box of a part, which has this number, to a box of the array."""
        return box if self.axis is None else _inserted(box, self.axis, slice(number, number + 1))

    # Only these two methods and `flax_order` depend on how parameters are stored in memory: kernels as [*outs, *ins].

    def view(self, values: AnyArray, parameter: Parameter, shape: tuple[int, ...] | None = None) -> AnyArray:
        """Rearrange values of one part, or of a box of it, as in the external layout (a view, for NumPy arrays)."""
        inputs = parameter.inputs
        if inputs is None:
            return values.reshape(self.inner if shape is None else shape)
        if self.flat:
            end = values.ndim - inputs
            return values.reshape(math.prod(values.shape[:end]), math.prod(values.shape[end:]))
        return values.transpose(flax_order(parameter.variable, range(values.ndim)))

    def inner_box(self, box: Box, parameter: Parameter) -> Box:
        """A box of one part in memory as a box of the external array. ValueError if it has no such box."""
        own, inputs = parameter.inner, parameter.inputs
        if self.flat and inputs is not None:
            end = len(own) - inputs
            return _flattened(box[:end], own[:end]), _flattened(box[end:], own[end:])
        if len(self.inner) == len(box):
            return flax_order(parameter.variable, box)
        width = math.prod(self.inner[1:])  # a bias, flat in memory, [heads, width] in the external array
        low, high = box[0].start, box[0].stop
        if low % width or high % width:
            raise ValueError(f"heads of width {width} cannot be split: change the rules")
        return (slice(low // width, high // width), *whole(self.inner[1:]))


def _flattened(box: Box, shape: tuple[int, ...]) -> slice:
    """The range of a box after flattening the dimensions; only the first may be sliced."""
    if any(part != slice(0, size) for part, size in zip(box[1:], shape[1:], strict=True)):
        raise ValueError(f"only the first of the dimensions {shape} can be split, got {box}: change the rules")
    rest = math.prod(shape[1:])
    return slice(box[0].start * rest, box[0].stop * rest) if box else slice(0, 1)


def _inserted(values: tuple[T, ...], axis: int, value: T) -> tuple[T, ...]:
    return (*values[:axis], value, *values[axis:])


def add_part(found: dict[str, ArrayLayout], name: str, leaf: ArrayLayout, part: Parameter) -> None:
    """Append a part to the leaf of a named array, creating it from ``leaf`` if it is new."""
    found[name] = replace(leaf, parts=(*(found[name].parts if name in found else ()), part))
