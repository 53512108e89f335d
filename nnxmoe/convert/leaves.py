"""Arrays of another layout, described and made of a model's parameters: whole stacks, or a layer at a time."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from nnxmoe.axes import axes_of, partition_spec
from nnxmoe.convert.table import Path, label_of, parameters
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.storage.multihost import AnyArray, spans_hosts


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of another layout: our key, its shape without layers, and its parts: (parameter, layer in it).

    ``stacked``: the name of a group, all layers of which lie on ``axis``; else one part. The layer is None for a
    parameter of one layer. ``labels``: the logical axes without layers.
    """

    key: str
    inner: tuple[int, ...]
    stacked: str | None
    parts: tuple[tuple[Path, int | None], ...]
    labels: tuple[str | None, ...]
    axis: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """As it is there."""
        return self._with_layers(self.inner, len(self.parts))

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Its logical axes, as they are called there."""
        return self._with_layers(self.labels, self.stacked)

    def _with_layers(self, one: tuple[Any, ...], layers: Any) -> tuple[Any, ...]:
        return (*one[: self.axis], layers, *one[self.axis :]) if self.stacked else one

    def place(self, model: CausalLM, variable: nnx.Variable) -> NamedSharding | None:
        """Where the array lies on the model's mesh: split as its parameter is; None without a mesh."""
        mesh, own = model.strategy.mesh, [axis for axis in axes_of(variable) if axis != "layers"]
        if mesh is None:
            return None
        same = len(own) == len(self.inner)  # but for biases, which are by heads there
        spec = tuple(partition_spec(own, self.inner, mesh, model.strategy.rules)) if same else ()
        spec += (None,) * (len(self.inner) - len(spec))
        return NamedSharding(mesh, PartitionSpec(*self._with_layers(spec, None)))


@dataclasses.dataclass(frozen=True)
class Later:
    """An array that is made, or read, when its turn comes; perhaps as a `jax.Array` that lies as a sharding says.

    ``part``: some of its rows alone, where that saves memory. ``spread``: over the devices of several processes, which
    must ask for it together.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[NamedSharding | None], AnyArray]
    part: Callable[[slice], np.ndarray] | None = None
    spread: bool = False

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.size * self.dtype.itemsize

    def rows(self, rows: slice) -> np.ndarray:
        """Some of it."""
        return self.make(None)[rows] if self.part is None else self.part(rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.make(None), dtype)

    @classmethod
    def of(cls, array: AnyArray) -> "Later":
        """One that is there."""
        shape, dtype = tuple(np.shape(array)), np.dtype(getattr(array, "dtype", type(array)))

        def make(place: NamedSharding | None) -> AnyArray:
            host = np.asarray(array)
            return host if place is None else jax.make_array_from_callback(shape, place, host.__getitem__)

        return cls(shape, dtype, make)


QUERY = "layer.attention.q."
Change = Callable[[Leaf, AnyArray], AnyArray]  # one layer's values between layouts; hashable, programs are kept by it


# (key, path, number of the layer, shape without layers) -> name, the same for all that are stacked; leaf without parts
Describe = Callable[[str, Path, int | None, tuple[int, ...]], tuple[str, Leaf]]


def collect(model: CausalLM, describe: Describe) -> dict[str, Leaf]:
    """Name -> leaf for every parameter of a model."""
    found = dict[str, Leaf]()
    for path, variable in parameters(model):
        key, first, _ = label_of(path, variable)
        own = "layers" in axes_of(variable)
        for i in range(variable.shape[0]) if own else [None]:
            number = None if first is None else first + (i or 0)
            name, leaf = describe(key, path, number, tuple(variable.shape[own:]))
            before = found[name].parts if name in found else ()
            found[name] = dataclasses.replace(leaf, parts=(*before, (path, i)))
    return found


def made_of(model: CausalLM, leaves: Mapping[str, Leaf], change: Change, dtype: Any = None) -> dict[str, Later]:
    """Name -> array of every leaf, made of parameters when it is asked for; ``dtype`` None: in their own."""
    values: dict[Path, Array] = {path: v.get_value() for path, v in parameters(model)}
    for path, value in values.items():
        if isinstance(value, jax.ShapeDtypeStruct):
            name = ".".join(map(str, path))
            raise ValueError(f"the parameter {name} has a shape but no values: this model cannot be saved")
    found: dict[str, Later] = {}
    for name, leaf in leaves.items():
        kind = np.dtype(dtype or jnp.result_type(*{values[path].dtype for path, _ in leaf.parts}))
        part = functools.partial(joined, leaf, values, change, kind)
        spread = any(spans_hosts(values[path]) for path, _ in leaf.parts)
        found[name] = Later(leaf.shape, kind, lambda _, part=part: part(slice(None)), part, spread)
    return found


def float_dtype(dtype: Any) -> np.dtype | None:
    """A dtype for weights; None stays None. ValueError for others than float32, bfloat16 and float16."""
    if dtype is None:
        return None
    try:
        named = jnp.dtype(dtype)
    except TypeError:
        named = dtype
    if named not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"dtype {named} is not supported for weights; supported: float32, bfloat16, float16")
    return named


def joined(leaf: Leaf, values: Mapping[Path, Array], change: Change, dtype: np.dtype, rows: slice) -> AnyArray:
    """Rows of the array of a leaf, made of parameters."""
    paths = list(dict.fromkeys(path for path, _ in leaf.parts))
    first = leaf.stacked is not None and leaf.axis == 0  # the layers are the rows

    def join(arrays: list[AnyArray]) -> AnyArray:
        found, pieces = dict(zip(paths, arrays, strict=True)), []
        for path, i in leaf.parts[rows] if first else leaf.parts:
            piece = (found[path] if i is None else found[path][i]).reshape(leaf.inner)
            piece = change(leaf, piece if first else piece[rows])
            pieces.append(piece if piece.dtype == dtype else piece.astype(dtype))
        return pieces[0].__array_namespace__().stack(pieces, axis=leaf.axis) if leaf.stacked else pieces[0]

    arrays = [values[path] for path in paths]
    if any(map(spans_hosts, arrays)):
        return jax.jit(join)(arrays)
    return join([np.asarray(array) for array in arrays])
