"""Mapping between a model's parameters and the arrays of a checkpoint, for all formats.

An `ArrayLayout` maps slices of parameters to positions in an external array, such as a tensor in a file. The Hugging
Face, MaxText and native formats each have a function that returns the layouts of a model by array name. Loading,
validation and saving depend only on these layouts, not on the format.
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
    """Parameter of a model, or its slice for one layer or expert.

    Attributes:
        path: Path in the model's state.
        key: Name of the parameter (see `name_of`).
        layer: Index of the parameter's first layer. `None` if the parameter belongs to no layer.
        stack: Index of the parameter's layer stack. `None` if the parameter belongs to no stack.
        variable: Variable with the parameter's value, shape and metadata.
        at: Indices into the leading layer and expert dimensions. Empty for the whole parameter.
    """

    path: Path
    key: str
    layer: int | None
    stack: int | None
    variable: nnx.Variable
    at: tuple[int, ...] = ()

    @property
    def ending(self) -> str:
        """Suffix that names an array of a quantized kernel, such as ``.scale``. Empty for other parameters."""
        return self.key[self.key.rindex(".") :] if isinstance(self.variable, QuantizedArray) else ""

    @property
    def takes_query_scalar(self) -> bool:
        """Whether the query scale can be folded into the parameter: query weights, biases and quantization scales."""
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
        """Number of trailing input dimensions of a linear layer's kernel. `None` for other parameters."""
        return self.variable.get_metadata().get("inputs")

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape without the layer and expert dimensions."""
        return self.shape[sum(axis in STACK_AXES for axis in self.axes) :]

    @property
    def of_layer(self) -> tuple[int, ...]:
        """Shape without the layer dimension, in the dimension order of Flax's kernels, experts first.

        For a bias, the unflattened output shape, such as [heads, width].
        """
        output_shape = self.variable.get_metadata().get("outs")
        layer_shape = self.shape[1:] if is_stacked(self.axes) else self.shape
        return flax_order(self.variable, layer_shape) if output_shape is None else output_shape

    @property
    def experts(self) -> int | None:
        """Size of the expert dimension. `None` if the parameter has no expert dimension."""
        return self.shape[self.axes.index("expert")] if "expert" in self.axes else None

    def layers(self) -> Iterator[tuple[int | None, "Parameter"]]:
        """Yield (layer index in the model, slice of the parameter for that layer).

        If the parameter is not stacked, yield it whole, with its layer index or None.
        """
        if is_stacked(self.axes):
            assert self.layer is not None
            yield from ((self.layer + i, replace(self, at=(i,))) for i in range(self.shape[0]))
        else:
            yield self.layer, self


def parameters(model: nnx.Module, *, codes: bool = False) -> list[Parameter]:
    """Return the parameters to store in a checkpoint, in the model's order.

    The values that `lora.unmerge` restores are not stored.

    Args:
        model: Model, which may be abstract (shapes only).
        codes: Whether the layout can store the arrays of quantized kernels.

    Raises:
        ValueError: The model has unmerged adapters, or quantized kernels that the layout cannot store.
    """
    variables = [(path, v) for path, v in nnx.to_flat_state(nnx.state(model)) if not isinstance(v, UnmergeValue)]
    if unsupported := [".".join(map(str, path)) for path, v in variables if isinstance(v, nnx.LoRAParam)]:
        raise ValueError(
            f"the model has adapters ({some(unsupported)}), which this format cannot store: merge them first with "
            "nnxmoe.train.lora.merge(model), or save them separately with nnxmoe.train.lora.save(model, folder)"
        )
    if not codes and (
        unsupported := [".".join(map(str, path)) for path, v in variables if isinstance(v, QuantizedArray)]
    ):
        raise ValueError(
            f"the model has quantized kernels ({some(unsupported)}), which this layout cannot store: "
            "dequantize them first with nnxmoe.dequantize(model)"
        )
    return [Parameter(path, *name_of(model, path), variable) for path, variable in variables]


@dataclass(frozen=True)
class Rearrange:
    """Reshape, transpose and second reshape of an array, as in `einops.rearrange`.

    Accepts NumPy, JAX and lazy arrays.

    Attributes:
        source: Shape of the input.
        split: Shape before the transpose: ``source`` with merged dimensions split.
        order: Axes of the transpose, as positions in ``split``.
        target: Shape of the result.
    """

    source: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    target: tuple[int, ...]

    @property
    def inverse(self) -> "Rearrange":
        """Inverse rearrangement, from ``target`` to ``source``."""
        split_shape = tuple(self.split[i] for i in self.order)
        return Rearrange(self.target, split_shape, tuple(map(int, np.argsort(self.order))), self.source)

    def __call__(self, array: Any) -> Any:
        return array.reshape(self.split).transpose(self.order).reshape(self.target)


@dataclass(frozen=True)
class ValueChange:
    """Scaling and feature order applied to an external array during loading or saving.

    Attributes:
        times: Factor, applied in float32 and rounded once.
        over: Divisor, applied in float32 and rounded once.
        features: ``halves`` moves the even features of the last dimension before the odd features. ``pairs`` is the
            inverse of ``halves``.
    """

    times: float = 1.0
    over: float = 1.0
    features: Literal["as they are", "halves", "pairs"] = "as they are"

    @property
    def inverse(self) -> "ValueChange":
        """Inverse of this change."""
        inverse_features: dict[str, Any] = {"halves": "pairs", "pairs": "halves"}
        return ValueChange(self.over, self.times, inverse_features.get(self.features, self.features))

    def __call__(self, array: AnyArray) -> AnyArray:
        """Apply the change to an array in memory."""
        return self._scale(self._reorder(array))

    def lazily(self, array: LazyArray) -> LazyArray:
        """Apply the change to the values of a lazy array when they are read."""
        array = self._reorder(array)
        return array if self.times == self.over == 1 else array.map(self._scale, np.float32)

    def _reorder(self, array: Any) -> Any:
        if self.features == "as they are":
            return array
        shape, ndim = tuple(array.shape), len(array.shape)
        half = shape[-1] // 2
        split_sizes = (half, 2) if self.features == "halves" else (2, half)
        return Rearrange(shape, (*shape[:-1], *split_sizes), (*range(ndim - 1), ndim, ndim - 1), shape)(array)

    def _scale(self, array: AnyArray) -> AnyArray:
        if self.times != 1:
            array = array.astype(np.float32) * np.float32(self.times)
        if self.over != 1:
            array = array.astype(np.float32) / np.float32(self.over)
        return array


UNCHANGED = ValueChange()


@dataclass(frozen=True)
class ArrayLayout:
    """Layout of an external array: the parameter slices that it contains, and their order.

    Attributes:
        key: Name of the parameters (`Parameter.key`).
        part_shape: Shape of each parameter slice in the external array.
        parts: Parameter slices in the array. Several slices are stacked along ``axis``.
        axis: Axis of the stack. `None` for a single slice.
        order: Permutation from the dimensions of a part in memory to the dimensions in the array, applied before the
            reshape to ``part_shape``. Empty if the order is the same.
        change: Change to apply to the values during loading or saving.
        axes: Logical axes of the array, if the layout defines them.
        tensor_part: Slice of the stored tensor that corresponds to the array, if the file stores the array transposed
            or fused with other arrays.
        rearrange: Rearrangement from the file's shape to this array's shape, if they differ.
        columns: Columns of the file's array that belong to this array, if the file's array has other columns too.
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

    # Kernels are stored in memory as [*outs, *ins]. Only the next two methods and `flax_order` depend on this order.

    def part_view(self, values: AnyArray, shape: tuple[int, ...]) -> AnyArray:
        """Convert values of a parameter slice, or of a box in it, from memory order to the external array's order.

        ``shape`` is the shape of the result. The result is a view if ``values`` is a NumPy array.
        """
        return values.transpose(self.order or tuple(range(values.ndim))).reshape(shape)

    def part_box(self, box: Box, shape: tuple[int, ...]) -> Box:
        """Convert a box of a parameter slice in memory to the same slice's box in the external array.

        ``shape`` is the shape of the slice in memory. Raises ValueError if the values do not form a box in the external
        array.
        """
        dimensions = self.order or range(len(shape))
        return reshape_box(tuple(box[i] for i in dimensions), tuple(shape[i] for i in dimensions), self.part_shape)

    def stacked_box(self, box: Box, number: int) -> Box:
        """Convert a box of the parameter slice with index ``number`` to a box of the stacked array."""
        return box if self.axis is None else _insert(box, self.axis, slice(number, number + 1))


def _insert(values: tuple[T, ...], axis: int, value: T) -> tuple[T, ...]:
    return (*values[:axis], value, *values[axis:])


def add_part(layouts: dict[str, ArrayLayout], name: str, layout: ArrayLayout, part: Parameter) -> None:
    """Append a parameter slice to the layout of array ``name``. A new array starts with a copy of ``layout``."""
    parts = layouts[name].parts if name in layouts else ()
    layouts[name] = replace(layout, parts=(*parts, part))
