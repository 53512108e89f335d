"""The common description of external layouts: ``layout(model) -> {external name: ArrayLayout}``.

An `ArrayLayout` says which parts of which parameters an external array holds, where, and how they are arranged. Hugging
Face, MaxText and the native format each build them. Loading, checking and saving depend on them alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from flax import nnx

from nnxmoe.axes import axes_of, is_stacked
from nnxmoe.config.printable import some
from nnxmoe.convert.arrays.boxes import Box, reshape_box
from nnxmoe.convert.arrays.lazy_array import LazyArray
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
class Rearrange:
    """A reshape, a transpose and another reshape, as `einops.rearrange` does for names.

    Calls accept NumPy, JAX and lazy arrays alike.

    Attributes:
        source: Shape of the arrays that it is called with.
        split: ``source`` with merged dimensions apart.
        order: For each dimension after the transpose, its position in ``split``.
        target: Shape of the result.
    """

    source: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    target: tuple[int, ...]

    @property
    def inverse(self) -> "Rearrange":
        """The rearrangement back."""
        split = tuple(self.split[i] for i in self.order)
        return Rearrange(self.target, split, tuple(map(int, np.argsort(self.order))), self.source)

    def __call__(self, array: Any) -> Any:
        return array.reshape(self.split).transpose(self.order).reshape(self.target)


@dataclass(frozen=True)
class ValueChange:
    """A change of an external array's values, on loading or saving.

    Attributes:
        times: Factor, applied in float32 and rounded once.
        over: Divisor, likewise.
        features: ``halves`` puts the even features of the last dimension before the odd ones. ``pairs`` inverts it.
    """

    times: float = 1.0
    over: float = 1.0
    features: Literal["as they are", "halves", "pairs"] = "as they are"

    @property
    def inverse(self) -> "ValueChange":
        """The change back."""
        back: dict[str, Any] = {"halves": "pairs", "pairs": "halves"}
        return ValueChange(self.over, self.times, back.get(self.features, self.features))

    def __call__(self, array: AnyArray) -> AnyArray:
        """Change an array in memory."""
        return self._scale(self._reorder(array))

    def lazily(self, array: LazyArray) -> LazyArray:
        """Change the values of a lazy array when they are read."""
        array = self._reorder(array)
        return array if self.times == self.over == 1 else array.map(self._scale, np.float32)

    def _reorder(self, array: Any) -> Any:
        if self.features == "as they are":
            return array
        shape, last = tuple(array.shape), len(array.shape)
        half = shape[-1] // 2
        split = (half, 2) if self.features == "halves" else (2, half)
        return Rearrange(shape, (*shape[:-1], *split), (*range(last - 1), last, last - 1), shape)(array)

    def _scale(self, array: AnyArray) -> AnyArray:
        if self.times != 1:
            array = array.astype(np.float32) * np.float32(self.times)
        if self.over != 1:
            array = array.astype(np.float32) / np.float32(self.over)
        return array


UNCHANGED = ValueChange()


@dataclass(frozen=True)
class ArrayLayout:
    """How an external array holds parts of parameters: which, where and in which order.

    Attributes:
        key: Key of the parameters.
        part_shape: Shape of each part in the external array.
        parts: The parts that the array holds; several are stacked on ``axis``.
        axis: Axis of the stack; None for a single part.
        order: Order in which the array has the dimensions of a part in memory, before they are merged or split to
            ``part_shape``; empty for the order in memory.
        change: Change of the values.
        axes: Logical axes of the array, if the layout has them.
        tensor_part: The part of a tensor that the array is, if the file stores it with others or transposed.
        rearrange: Rearranges the file's array to this one, if its shape differs there.
        columns: Columns of the file's array that are this one, if it also holds others.
    """

    key: str
    part_shape: tuple[int, ...]
    parts: tuple[Parameter, ...] = ()
    axis: int | None = None
    order: tuple[int, ...] = ()
    change: ValueChange = UNCHANGED
    axes: tuple[str | None, ...] = ()
    tensor_part: TensorPart | None = None
    rearrange: Rearrange | None = None
    columns: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.part_shape if self.axis is None else _insert(self.part_shape, self.axis, len(self.parts))

    # Kernels are stored in memory as [*outs, *ins]. Only the next two methods and `flax_order` depend on it.

    def part_view(self, values: AnyArray, shape: tuple[int, ...]) -> AnyArray:
        """Arrange values of a part, or of a box of it, as in the external array, where they have this shape.

        The result is a view if ``values`` is a NumPy array.
        """
        return values.transpose(self.order or tuple(range(values.ndim))).reshape(shape)

    def part_box(self, box: Box, shape: tuple[int, ...]) -> Box:
        """Convert a box of one part in memory, where it has this shape, to a box of the part in the external array.

        Raises ValueError if its values form no box there.
        """
        order = self.order or range(len(shape))
        return reshape_box(tuple(box[i] for i in order), tuple(shape[i] for i in order), self.part_shape)

    def stacked_box(self, box: Box, number: int) -> Box:
        """Convert a box of the part with this number to a box of the array."""
        return box if self.axis is None else _insert(box, self.axis, slice(number, number + 1))


def _insert(values: tuple[T, ...], axis: int, value: T) -> tuple[T, ...]:
    return (*values[:axis], value, *values[axis:])


def add_part(layouts: dict[str, ArrayLayout], name: str, layout: ArrayLayout, part: Parameter) -> None:
    """Append a part to the layout of a named array, which is ``layout`` without parts if the name is new."""
    parts = layouts[name].parts if name in layouts else ()
    layouts[name] = replace(layout, parts=(*parts, part))
