"""Arrays of a layout, computed from a model's parameters when they are read, also if these span several processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from nnxmoe.convert.arrays.array_layout import ArrayLayout, Parameter
from nnxmoe.convert.arrays.lazy_array import Box, Empty, LazyArray, overlap, sizes, whole, within
from nnxmoe.convert.storage.multihost import AnyArray, gather, hosts_holding, local_value
from nnxmoe.sharding import spans_hosts


def model_arrays(leaves: Mapping[str, ArrayLayout], dtype: Any = None) -> dict[str, LazyArray]:
    """Name -> lazy array of every leaf, computed from the parameters when read; ``dtype`` None: their own dtype."""
    found, held = dict[str, LazyArray](), _holders(leaves)
    for name, leaf in leaves.items():
        values = [part.variable.get_value() for part in leaf.parts]
        if any(isinstance(value, jax.ShapeDtypeStruct) for value in values):
            raise ValueError(f"the parameter {leaf.key} has a shape but no values: this model cannot be saved")
        own = np.dtype(jnp.result_type(*{value.dtype for value in values}))
        wanted = own if dtype is None or own.kind in "iu" else np.dtype(dtype)  # integers are not cast
        if any(map(spans_hosts, values)):
            holders = tuple(sorted(held[_tensor(name, leaf)]))
            made = _Made(leaf, values, own, together=not holders)
            array = LazyArray(leaf.shape, own, made.read, holders=holders, joined=made.join)
        else:
            array = LazyArray(leaf.shape, own, _Made(leaf, values, own).read)
        array = leaf.change.of(array)
        found[name] = array if array.dtype == wanted else array.cast(wanted)
    return found


def _tensor(name: str, leaf: ArrayLayout) -> str:
    return name if leaf.part_of is None else leaf.part_of.tensor


def _holders(leaves: Mapping[str, ArrayLayout]) -> dict[str, set[int]]:
    """The processes that hold all parts of each tensor."""
    held = dict[str, set[int]]()
    for name, leaf in leaves.items():
        arrays = {(id(part.variable), _stack(leaf, part)): part.variable.get_value() for part in leaf.parts}
        for (_, at), value in arrays.items():
            who = set(hosts_holding(value, at))
            held[_tensor(name, leaf)] = held.get(_tensor(name, leaf), who) & who
    return held


def _stack(leaf: ArrayLayout, part: Parameter) -> tuple[int, ...]:
    """Where in its parameter a part is, or if it is one of a stack, such as of experts, where that stack is."""
    return part.at if leaf.axis is None else part.at[:-1]


@dataclass(frozen=True)
class _Made:
    """Computes the values of a leaf from parameters. ``together``: no process holds the whole tensor, so that all
    processes read it at the same time."""

    leaf: ArrayLayout
    values: list[AnyArray]
    dtype: np.dtype
    together: bool = False

    def read(self, box: Box, empty: Empty) -> np.ndarray:
        """A box of the array, on the host. Collective if no process holds the whole tensor."""
        leaf = self.leaf
        if leaf.axis is None:
            (part,), (value,) = leaf.parts, self.values
            one = _fetch(value, part.at, box == whole(leaf.shape), self.together)
            return leaf.view(one, part)[box]
        out, stacks = np.empty(sizes(box), self.dtype), dict[Any, np.ndarray]()
        for number, (part, value) in enumerate(zip(leaf.parts, self.values, strict=True)):
            place, at = leaf.stacked(whole(leaf.inner), number), _stack(leaf, part)
            if both := overlap(place, box):
                if (id(value), at) not in stacks:
                    stacks[id(value), at] = _fetch(value, at, False, self.together)
                one = leaf.view(stacks[id(value), at][part.at[len(at) :]], part)
                one = np.expand_dims(one, leaf.axis)[within(both, place)]
                out[within(both, box)] = one
        return out

    def join(self) -> Array:
        """The whole array, on the devices of the parameters."""
        leaf = self.leaf

        def run(values: list[Array]) -> Array:
            pairs = zip(leaf.parts, values, strict=True)
            made = [leaf.view(value[part.at], part).astype(self.dtype) for part, value in pairs]
            return made[0] if leaf.axis is None else jnp.stack(made, axis=leaf.axis)

        return jax.jit(run)(self.values)


def _fetch(value: AnyArray, at: tuple[int, ...], once: bool, together: bool) -> np.ndarray:
    """``value[at]`` on the host. Collective if ``together`` and the value spans hosts.

    ``once``: no other range will be read, so only this part is copied from the device. Otherwise the whole value is
    copied to the host and cached by JAX for further reads.
    """
    if spans_hosts(value):
        return gather(value, at) if together else local_value(value, at)
    devices = list(value.devices()) if isinstance(value, jax.Array) else []
    free = not devices or (len(devices) == 1 and devices[0].platform == "cpu")  # NumPy reads this memory in place
    return np.asarray(value)[at] if free or not once else np.asarray(value[at])
