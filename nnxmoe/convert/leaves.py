"""Arrays of another layout beside the parameters they are made of: whole stacks of layers, or a layer at a time.

Both ways one array at a time is held beside the model, whatever the model's size.
"""

import dataclasses
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
from nnxmoe.convert.place import aligned_empty, count_nonfinite
from nnxmoe.convert.source import CheckpointError
from nnxmoe.convert.table import Path, first_layers, table_key
from nnxmoe.convert.together import AnyArray, apart
from nnxmoe.layers.causal_lm import CausalLM
from nnxmoe.layers.gqa import attentions
from nnxmoe.moe.router import RouterBias
from nnxmoe.strategy import Strategy


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
    """An array that is made, or read, when its turn comes; perhaps as a `jax.Array` that lies as a sharding says."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[NamedSharding | None], AnyArray]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, array: AnyArray) -> "Later":
        """One that is there."""
        shape, dtype = tuple(np.shape(array)), np.dtype(getattr(array, "dtype", type(array)))
        return cls(shape, dtype, lambda _: np.asarray(array))


QUERY = "layer.attention.q."
Change = Callable[[Leaf, AnyArray], AnyArray]  # of one layer's values, from one layout to the other


# (key, path, number of the layer, shape without layers) -> name, the same for all that are stacked; leaf without parts
Describe = Callable[[str, Path, int | None, tuple[int, ...]], tuple[str, Leaf]]


def collect(model: CausalLM, describe: Describe) -> dict[str, Leaf]:
    """Name -> leaf for every parameter of a model."""
    firsts, found = first_layers(model), dict[str, Leaf]()
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        key, first = table_key(path, firsts)
        own = "layers" in variable.get_metadata()["axes"]
        for i in range(variable.shape[0]) if own else [None]:
            number = None if first is None else first + (i or 0)
            name, leaf = describe(key, path, number, tuple(variable.shape[own:]))
            before = found[name].parts if name in found else ()
            found[name] = dataclasses.replace(leaf, parts=(*before, (path, i)))
    return found


def made_of(model: CausalLM, leaves: Mapping[str, Leaf], change: Change, dtype: Any = None) -> dict[str, Later]:
    """Name -> array of every leaf, made of parameters when it is asked for; ``dtype`` None: in their own."""
    values: dict[Path, Array] = {path: v.get_value() for path, v in nnx.to_flat_state(nnx.state(model))}
    for path, value in values.items():
        if isinstance(value, jax.ShapeDtypeStruct):
            name = ".".join(map(str, path))
            raise ValueError(f"the parameter {name} has a shape but no values: this model cannot be saved")
    return {
        name: Later(
            leaf.shape,
            np.dtype(dtype or values[leaf.parts[0][0]].dtype),
            lambda _, leaf=leaf: joined(leaf, values, change),
        )
        for name, leaf in leaves.items()
    }


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


def undivided(model: CausalLM, change: Change) -> Change:
    """Also multiplies queries that were divided by sqrt(head width), in float32: so they are cast to another dtype as
    they were before the division, and rounded once."""
    factor = np.float32(model.config.head_width**0.5 if attentions(model) else 1)

    def both(leaf: Leaf, array: AnyArray) -> AnyArray:
        array = change(leaf, array)
        return array.astype(np.float32) * factor if leaf.key.startswith(QUERY) and factor != 1 else array

    return both


def joined(leaf: Leaf, values: Mapping[Path, Array], change: Change) -> AnyArray:
    """The array of a leaf, made of parameters."""
    paths = list(dict.fromkeys(path for path, _ in leaf.parts))

    def join(arrays: list[AnyArray]) -> AnyArray:
        found = dict(zip(paths, arrays, strict=True))
        pieces = [(found[path] if i is None else found[path][i]).reshape(leaf.inner) for path, i in leaf.parts]
        pieces = [change(leaf, piece) for piece in pieces]
        return pieces[0].__array_namespace__().stack(pieces, axis=leaf.axis) if leaf.stacked else pieces[0]

    arrays = [values[path] for path in paths]
    if any(map(apart, arrays)):
        return jax.jit(join)(arrays)
    return join([np.asarray(array) for array in arrays])


def refuse_misfits(arrays: Mapping[str, Later], wanted: Mapping[str, Leaf], where: str) -> None:
    """CheckpointError that lists every array that is missing, too much, or of another shape or kind than wanted."""
    faults = [f"{name} is missing, {list(leaf.shape)}" for name, leaf in wanted.items() if name not in arrays]
    faults += [f"{name} {list(array.shape)} is no parameter" for name, array in arrays.items() if name not in wanted]
    for name in sorted(wanted.keys() & arrays.keys()):
        have, want = arrays[name].shape, wanted[name].shape
        if have != want:
            turned = " (it looks transposed)" if have == want[::-1] else ""
            faults.append(f"{name} has shape {list(have)}, the config asks for {list(want)}{turned}")
        elif not jnp.issubdtype(arrays[name].dtype, jnp.floating):
            faults.append(f"{name} is {arrays[name].dtype}: weights are floating-point")
    if faults:
        raise CheckpointError(f"{where}:\n  " + "\n  ".join(faults))


def fill(
    model: CausalLM, leaves: Mapping[str, Leaf], arrays: Mapping[str, Later], change: Change, dtype: Any, bar: Any
) -> dict[str, int]:
    """Give an abstract model its values; ``dtype`` None: as they are, the router's correction bias always float32.

    The largest come first, while there is most room. Returns how many values of an array are NaN or infinite.
    """
    variables: dict[Path, nnx.Variable] = dict(nnx.to_flat_state(nnx.state(model)))
    groups: dict[Path, list[str]] = {}
    for name, leaf in leaves.items():
        groups.setdefault(leaf.parts[0][0], []).append(name)
    state: dict[Path, nnx.Variable] = {}
    nonfinite: dict[str, int] = {}
    for names in sorted(groups.values(), key=lambda names: -sum(arrays[name].nbytes for name in names)):
        group = [leaves[name] for name in names]
        own = {path: variables[path] for leaf in group for path, _ in leaf.parts}
        place, found = group[0].place(model, variables[group[0].parts[0][0]]), []
        for name in names:
            found.append(arrays[name].make(place))
            if isinstance(found[-1], np.ndarray) and (bad := count_nonfinite(found[-1])):
                nonfinite[name] = bad
            if bar is not None:
                bar.update(arrays[name].nbytes)
        made = _parameters(group, found, own, change, dtype, model.strategy)
        state |= {path: variable.replace(value) for (path, variable), value in zip(own.items(), made, strict=True)}
    nnx.update(model, nnx.from_flat_state(state))
    model.dtype = jnp.dtype(model.strategy.compute_dtype or model.embed.table.get_value().dtype)
    return nonfinite


def _parameters(
    leaves: list[Leaf],
    arrays: list[AnyArray],
    variables: Mapping[Path, nnx.Variable],
    change: Change,
    dtype: Any,
    strategy: Strategy,
) -> list[Array]:
    """The values of parameters, on their devices, from the leaves that hold all of their parts."""
    plan = [(path, tuple(v.shape), _dtype(v, dtype or arrays[0].dtype)) for path, v in variables.items()]

    def build(arrays: list[AnyArray]) -> list[AnyArray]:
        parts: dict[tuple[Path, int | None], AnyArray] = {}
        for leaf, array in zip(leaves, arrays, strict=True):
            layers = array.__array_namespace__().moveaxis(array, leaf.axis, 0) if leaf.stacked else [array]
            parts |= {part: change(leaf, layer) for part, layer in zip(leaf.parts, layers, strict=True)}
        return [
            _one(parts[path, None], shape, kind)
            if (path, None) in parts
            else _stacked([parts[path, i] for i in range(shape[0])], shape, kind)
            for path, shape, kind in plan
        ]

    places = [strategy.sharding_of(variable) for variable in variables.values()]
    if not isinstance(arrays[0], np.ndarray):
        return jax.jit(build, out_shardings=places)(arrays)
    return [_put(value, place) for value, place in zip(build(arrays), places, strict=True)]


def _dtype(variable: nnx.Variable, dtype: Any) -> np.dtype:
    return np.dtype(np.float32 if isinstance(variable, RouterBias) else dtype)


def _one(array: AnyArray, shape: tuple[int, ...], dtype: np.dtype) -> AnyArray:
    return _stacked([array], (1, *shape), dtype)[0]


def _stacked(arrays: list[AnyArray], shape: tuple[int, ...], dtype: np.dtype) -> AnyArray:
    """Layers as one array; in memory that JAX can take over without a copy."""
    arrays = [array.reshape(shape[1:]) for array in arrays]
    if not isinstance(arrays[0], np.ndarray):
        return jnp.stack(arrays).astype(dtype)
    out = aligned_empty(shape, dtype)
    for place, array in zip(out, arrays, strict=True):
        place[...] = array
    return out


def _put(value: np.ndarray, place: NamedSharding | None) -> Array:
    return (
        jax.device_put(value) if place is None else jax.make_array_from_callback(value.shape, place, value.__getitem__)
    )


def nested(found: Mapping[str, Any]) -> dict[str, Any]:
    """The tree that names with slashes describe."""
    tree: dict[str, Any] = {}
    for name, value in found.items():
        *folders, last = name.split("/")
        branch = tree
        for folder in folders:
            branch = branch.setdefault(folder, {})
        branch[last] = value
    return tree
