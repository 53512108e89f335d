"""Lazy arrays to save, computed from a model's parameters, which may span processes."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from nnxmoe.convert.arrays.array_layout import ArrayLayout, Parameter
from nnxmoe.convert.arrays.boxes import Box, overlap, sizes, whole, within
from nnxmoe.convert.arrays.lazy_array import Empty, LazyArray
from nnxmoe.convert.storage.multihost import AnyArray, gather, hosts_holding, local_value
from nnxmoe.sharding import spans_hosts


def model_arrays(layouts: Mapping[str, ArrayLayout], dtype: Any = None) -> dict[str, LazyArray]:
    """Return the arrays of a layout by name, as lazy arrays that are computed from the parameters on reading.

    Args:
        layouts: Array name -> layout.
        dtype: Dtype of the arrays. Defaults to the dtype of the parameters. Integers are never cast.

    Raises:
        ValueError: The model is abstract (shapes only).
    """
    arrays, holders_of = dict[str, LazyArray](), _holders(layouts)
    for name, layout in layouts.items():
        values = [part.variable.get_value() for part in layout.parts]
        if any(isinstance(value, jax.ShapeDtypeStruct) for value in values):
            raise ValueError(
                f"the parameter {layout.key} has a shape but no values: load or initialize the model before saving it"
            )
        stored_dtype = np.dtype(jnp.result_type(*{value.dtype for value in values}))
        new_dtype = stored_dtype if dtype is None or stored_dtype.kind in "iu" else np.dtype(dtype)
        if any(map(spans_hosts, values)):
            holders = tuple(sorted(holders_of[_tensor(name, layout)]))
            source = _ModelArray(layout, values, stored_dtype, is_collective=not holders)
            array = LazyArray(
                layout.shape, stored_dtype, source.read, holders=holders, global_array=source.global_array
            )
        else:
            array = LazyArray(layout.shape, stored_dtype, _ModelArray(layout, values, stored_dtype).read)
        array = layout.change.lazily(array)
        arrays[name] = array if array.dtype == new_dtype else array.astype(new_dtype)
    return arrays


def _tensor(name: str, layout: ArrayLayout) -> str:
    return name if layout.tensor_part is None else layout.tensor_part.tensor


def _holders(layouts: Mapping[str, ArrayLayout]) -> dict[str, set[int]]:
    """Map each tensor name to the processes whose shards contain the whole tensor."""
    holders = dict[str, set[int]]()
    for name, layout in layouts.items():
        tensor = _tensor(name, layout)
        stacks = {(id(part.variable), _stack_index(layout, part)): part for part in layout.parts}
        for (_, index), part in stacks.items():
            processes = set(hosts_holding(part.variable.get_value(), index))
            holders[tensor] = holders.get(tensor, processes) & processes
    return holders


def _stack_index(layout: ArrayLayout, part: Parameter) -> tuple[int, ...]:
    """Return the index of a slice in its parameter, or of the whole stack if the layout stacks slices."""
    return part.at if layout.axis is None else part.at[:-1]


@dataclass(frozen=True)
class _ModelArray:
    """Array that is assembled from parameter slices when it is read.

    If ``is_collective``, no single process has the whole tensor. All processes must then read it at the same time.
    """

    layout: ArrayLayout
    values: list[AnyArray]
    dtype: np.dtype
    is_collective: bool = False

    def read(self, box: Box, empty: Empty) -> np.ndarray:
        """Return a box of the array on the host."""
        layout = self.layout
        if layout.axis is None:
            (part,), (value,) = layout.parts, self.values
            values = _fetch(value, part.at, box == whole(layout.shape), self.is_collective)
            return layout.part_view(values, layout.part_shape)[box]
        out, stacks = np.empty(sizes(box), self.dtype), dict[Any, np.ndarray]()
        for number, (part, value) in enumerate(zip(layout.parts, self.values, strict=True)):
            part_box, index = layout.stacked_box(whole(layout.part_shape), number), _stack_index(layout, part)
            common = overlap(part_box, box)
            if common is None:
                continue
            if (id(value), index) not in stacks:
                stacks[id(value), index] = _fetch(value, index, False, self.is_collective)
            values = stacks[id(value), index][part.at[len(index) :]]
            values = np.expand_dims(layout.part_view(values, layout.part_shape), layout.axis)
            out[within(common, box)] = values[within(common, part_box)]
        return out

    def global_array(self) -> Array:
        """Return the whole array on the devices of the parameters."""
        # Without names and parts, so that equal layers share a program.
        layout = ArrayLayout("", self.layout.part_shape, axis=self.layout.axis, order=self.layout.order)
        return _assemble(layout, self.dtype, tuple(part.at for part in self.layout.parts), self.values)


# The indices are static, because XLA gathers the whole stack if an index into a sharded axis is traced.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _assemble(layout: ArrayLayout, dtype: np.dtype, indices: tuple[tuple[int, ...], ...], values: list[Array]) -> Array:
    """Return the array of ``layout`` from ``values[i][indices[i]]``."""
    parts = [
        layout.part_view(value[index], layout.part_shape).astype(dtype)
        for value, index in zip(values, indices, strict=True)
    ]
    return parts[0] if layout.axis is None else jnp.stack(parts, axis=layout.axis)


def _fetch(value: AnyArray, index: tuple[int, ...], is_only_read: bool, is_collective: bool) -> np.ndarray:
    """Return ``value[index]`` on the host. Collective if ``is_collective`` and the value spans hosts.

    If ``is_only_read``, copy only this slice from the device, because no other slice will be read. Otherwise copy the
    whole value to the host, where JAX caches it for further reads.
    """
    if spans_hosts(value):
        return gather(value, index) if is_collective else local_value(value, index)
    devices = list(value.devices()) if isinstance(value, jax.Array) else []
    on_host = not devices or (len(devices) == 1 and devices[0].platform == "cpu")  # NumPy reads this memory in place
    return np.asarray(value)[index] if on_host or not is_only_read else np.asarray(value[index])
