"""Arrays of another layout beside the parameters they are made of: whole stacks of layers, or a layer at a time.

Both ways one array at a time is held beside the model, whatever the model's size.
"""

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
from nnxmoe.convert.place import aligned_empty, count_nonfinite
from nnxmoe.convert.source import CheckpointError
from nnxmoe.convert.table import Path, first_layers, table_key
from nnxmoe.convert.together import AnyArray, apart
from nnxmoe.layers.causal_lm import CausalLM
from nnxmoe.layers.gqa import attentions
from nnxmoe.memory import give_back
from nnxmoe.moe.router import RouterBias


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

    ``part``: some of its rows alone, where that saves memory.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[NamedSharding | None], AnyArray]
    part: Callable[[slice], np.ndarray] | None = None

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


_ROWS_BYTES = 32 << 20  # of a leaf that are in memory at a time
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
    found: dict[str, Later] = {}
    for name, leaf in leaves.items():
        kind = np.dtype(dtype or values[leaf.parts[0][0]].dtype)
        part = functools.partial(joined, leaf, values, change)
        found[name] = Later(leaf.shape, kind, lambda _, part=part: part(slice(None)), part)
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


def undivided(model: CausalLM, change: Change) -> Change:
    """Also multiplies queries that were divided by sqrt(head width), in float32: so they are cast to another dtype as
    they were before the division, and rounded once."""
    factor = np.float32(model.config.head_width**0.5 if attentions(model) else 1)

    def both(leaf: Leaf, array: AnyArray) -> AnyArray:
        array = change(leaf, array)
        return array.astype(np.float32) * factor if leaf.key.startswith(QUERY) and factor != 1 else array

    return both


def joined(leaf: Leaf, values: Mapping[Path, Array], change: Change, rows: slice) -> AnyArray:
    """Rows of the array of a leaf, made of parameters."""
    paths = list(dict.fromkeys(path for path, _ in leaf.parts))
    first = leaf.stacked is not None and leaf.axis == 0  # the layers are the rows

    def join(arrays: list[AnyArray]) -> AnyArray:
        found, pieces = dict(zip(paths, arrays, strict=True)), []
        for path, i in leaf.parts[rows] if first else leaf.parts:
            piece = (found[path] if i is None else found[path][i]).reshape(leaf.inner)
            pieces.append(change(leaf, piece if first else piece[rows]))
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

    Returns how many values of an array are NaN or infinite.
    """
    variables: dict[Path, nnx.Variable] = dict(nnx.to_flat_state(nnx.state(model)))
    groups: dict[Path, list[str]] = {}
    for name, leaf in leaves.items():
        groups.setdefault(leaf.parts[0][0], []).append(name)
    nonfinite: dict[str, int] = {}
    for names in groups.values():
        group = [leaves[name] for name in names]
        own = {path: variables[path] for leaf in group for path, _ in leaf.parts}
        kinds = {path: _dtype(v, dtype or arrays[names[0]].dtype) for path, v in own.items()}
        make = _on_host if model.strategy.mesh is None else _on_mesh
        made, bad = make(group, [arrays[name] for name in names], own, kinds, change, model)
        for path, variable in own.items():
            variables[path] = variable.replace(made[path])
        nonfinite |= {name: count for name, count in zip(names, bad, strict=True) if count}
        bar.update(sum(arrays[name].nbytes for name in names))
        del made
        give_back()
    nnx.update(model, nnx.from_flat_state(variables))
    model.dtype = jnp.dtype(model.strategy.compute_dtype or model.embed.table.get_value().dtype)
    return nonfinite


def _dtype(variable: nnx.Variable, dtype: Any) -> np.dtype:
    return np.dtype(np.float32 if isinstance(variable, RouterBias) else dtype)


Made = tuple[dict[Path, Array], list[int]]  # parameters, and how many values of each leaf are not finite


def _on_host(
    leaves: list[Leaf],
    arrays: list[Later],
    variables: Mapping[Path, nnx.Variable],
    dtypes: Mapping[Path, np.dtype],
    change: Change,
    model: CausalLM,
) -> Made:
    """Parameters from the leaves that hold all of their parts, some rows of a leaf at a time."""
    out = {path: aligned_empty(tuple(v.shape), dtypes[path]) for path, v in variables.items()}
    nonfinite = [0] * len(leaves)
    for at, (leaf, array) in enumerate(zip(leaves, arrays, strict=True)):
        step = max(1, _ROWS_BYTES * array.shape[0] // max(1, array.nbytes))
        for start in range(0, array.shape[0], step):
            rows = slice(start, min(start + step, array.shape[0]))
            block = array.rows(rows)
            nonfinite[at] += count_nonfinite(block)
            for j, (path, i) in enumerate(leaf.parts):
                whole = (out[path] if i is None else out[path][i]).reshape(leaf.inner)
                if not leaf.stacked:
                    whole[rows] = change(leaf, block)
                elif leaf.axis == 1:
                    whole[rows] = change(leaf, block[:, j])
                elif rows.start <= j < rows.stop:
                    whole[...] = change(leaf, block[j - start])
    return {path: jax.device_put(value) for path, value in out.items()}, nonfinite


def _on_mesh(
    leaves: list[Leaf],
    arrays: list[Later],
    variables: Mapping[Path, nnx.Variable],
    dtypes: Mapping[Path, np.dtype],
    change: Change,
    model: CausalLM,
) -> Made:
    """The same on the model's mesh: each device reads its share of the leaves, and the devices exchange the rest."""
    shapes = {path: tuple(v.shape) for path, v in variables.items()}

    def build(found: list[Array]) -> tuple[list[Array], list[Array]]:
        parts: dict[tuple[Path, int | None], Array] = {}
        for leaf, array in zip(leaves, found, strict=True):
            layers = jnp.moveaxis(array, leaf.axis, 0) if leaf.stacked else [array]
            parts |= {part: change(leaf, layer) for part, layer in zip(leaf.parts, layers, strict=True)}
        made = []
        for path, shape in shapes.items():
            alone = (path, None) in parts
            pieces = [parts[path, None]] if alone else [parts[path, i] for i in range(shape[0])]
            made.append((pieces[0] if alone else jnp.stack(pieces)).reshape(shape).astype(dtypes[path]))
        return made, [jnp.sum(~jnp.isfinite(array)) for array in found]

    places = [model.strategy.sharding_of(variable) for variable in variables.values()]
    first = next(iter(variables.values()))
    found = [array.make(leaf.place(model, first)) for leaf, array in zip(leaves, arrays, strict=True)]
    made, nonfinite = jax.jit(build, out_shardings=(places, None))(found)
    return dict(zip(shapes, made, strict=True)), [int(count) for count in nonfinite]


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
