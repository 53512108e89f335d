"""A model's values from arrays of another layout, some of an array at a time: on one device, or spread over a mesh."""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from nnxmoe.axes import axes_of
from nnxmoe.config.base import DecoderConfig
from nnxmoe.convert.leaves import QUERY, Change, Later, Leaf
from nnxmoe.convert.place import natural_dtype
from nnxmoe.convert.report import LoadReport
from nnxmoe.convert.table import Path
from nnxmoe.layers.gqa import attentions, carry_scale
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.models import model_class
from nnxmoe.moe.router import RouterBias
from nnxmoe.runtime.memory import give_back
from nnxmoe.runtime.progress import bytes_bar
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.host import aligned_empty, copy_into, count_nonfinite
from nnxmoe.storage.multihost import AnyArray
from nnxmoe.strategy import Strategy

_KINDS = tuple(map(np.dtype, (np.float32, jnp.bfloat16, np.float16, np.float64)))
_ROWS_BYTES = 32 << 20  # of a leaf that are in memory at a time


def abstract(config: DecoderConfig, strategy: Strategy | None, mesh: Mesh | None) -> CausalLM:
    """A model without values; ``mesh`` None: the strategy's."""
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"config is a {type(config).__name__}: give what nnxmoe.config_from_hf makes")
    strategy = strategy or Strategy.auto()
    strategy = dataclasses.replace(strategy, mesh=strategy.mesh if mesh is None else mesh)
    return model_class(config)(config, strategy, rngs=None)  # pyright: ignore[reportCallIssue]


def restore(
    model: CausalLM,
    leaves: Mapping[str, Leaf],
    arrays: Mapping[str, Later],
    change: Change,
    *,
    carried: bool,
    dtype: np.dtype | None,
    misfit: str,
    report: LoadReport,
) -> None:
    """Give an abstract model its values and its report.

    ``carried``: the queries there are divided by sqrt(head width). So they stay, unless they are cast: then they are
    what they were before the division, rounded once. ``dtype`` None: as they are; the router's bias is always float32.
    CheckpointError that begins with ``misfit`` where arrays are missing, too many, or of another shape.
    """
    started = time.perf_counter()
    refuse_misfits(arrays, leaves, misfit)
    if carried and (dtype is None or all(array.dtype == dtype for array in arrays.values())):
        carry_scale(model)
    elif carried:
        change = _Undivided(change, model.config.head_width**0.5 if attentions(model) else 1.0)
    size = sum(array.nbytes for array in arrays.values())
    with bytes_bar(size, f"loading {os.path.basename(report.source)}") as bar:
        nonfinite, casts = _fill(model, leaves, arrays, change, dtype, bar)
    model.load_report = dataclasses.replace(
        report,
        loaded=tuple(sorted(leaves)),
        casts=casts,
        nonfinite=nonfinite,
        bytes_read=size,
        seconds=time.perf_counter() - started,
    )
    model.load_report.warn()


def refuse_misfits(arrays: Mapping[str, Later], wanted: Mapping[str, Leaf], where: str) -> None:
    """CheckpointError that lists every array that is missing, too much, or of another shape or kind than wanted."""
    faults = [f"{name} is missing, {list(leaf.shape)}" for name, leaf in wanted.items() if name not in arrays]
    faults += [f"{name} {list(array.shape)} is no parameter" for name, array in arrays.items() if name not in wanted]
    for name in sorted(wanted.keys() & arrays.keys()):
        have, want = arrays[name].shape, wanted[name].shape
        if have != want:
            turned = " (it looks transposed)" if have == want[::-1] else ""
            faults.append(f"{name} has shape {list(have)}, the config asks for {list(want)}{turned}")
        elif arrays[name].dtype not in _KINDS:
            faults.append(f"{name} is {arrays[name].dtype}: weights are {', '.join(map(str, _KINDS))}")
    if faults:
        raise CheckpointError(f"{where}:\n  " + "\n  ".join(faults))


@dataclasses.dataclass(frozen=True)
class _Undivided:
    """A change that also multiplies queries by what they were divided by, in float32: cast to another dtype, they are
    rounded once."""

    change: Change
    factor: float

    def __call__(self, leaf: Leaf, array: AnyArray) -> AnyArray:
        array = self.change(leaf, array)
        scaled = leaf.key.startswith(QUERY) and self.factor != 1
        return array.astype(np.float32) * np.float32(self.factor) if scaled else array


def _fill(
    model: CausalLM, leaves: Mapping[str, Leaf], arrays: Mapping[str, Later], change: Change, dtype: Any, bar: Any
) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Returns how many values of an array are NaN or infinite, and which arrays were cast."""
    variables: dict[Path, nnx.Variable] = dict(nnx.to_flat_state(nnx.state(model)))
    groups: dict[Path, list[str]] = {}
    for name, leaf in leaves.items():
        groups.setdefault(leaf.parts[0][0], []).append(name)
    nonfinite: dict[str, int] = {}
    casts: dict[str, list[str]] = {}
    for names in groups.values():
        group = [leaves[name] for name in names]
        own = {path: variables[path] for leaf in group for path, _ in leaf.parts}
        stored = dtype or natural_dtype({arrays[name].dtype for name in names})
        kinds = {path: np.dtype(np.float32 if isinstance(v, RouterBias) else stored) for path, v in own.items()}
        given = group, [arrays[name] for name in names], own, kinds, change
        made, bad = _on_host(*given) if model.strategy.mesh is None else _on_mesh(*given, model)
        for path, variable in own.items():
            variables[path] = variable.replace(made[path])
        nonfinite |= {name: count for name, count in zip(names, bad, strict=True) if count}
        for name in names:
            before, after = arrays[name].dtype, kinds[leaves[name].parts[0][0]]
            if before != after:
                casts.setdefault(f"{before} -> {after}", []).append(name)
        bar.update(sum(arrays[name].nbytes for name in names))
        del made
        give_back()
    nnx.update(model, nnx.from_flat_state(variables))
    model.dtype = activations_dtype(model.strategy, variables.values())
    return nonfinite, {cast: tuple(sorted(names)) for cast, names in sorted(casts.items())}


def activations_dtype(strategy: Strategy, variables: Iterable[nnx.Variable]) -> Any:
    """The strategy's, or that of the matrices among a model's parameters."""
    return matrices_dtype(variables) if strategy.compute_dtype is None else jnp.dtype(strategy.compute_dtype)


def matrices_dtype(variables: Iterable[nnx.Variable]) -> Any:
    """The dtype that holds every matrix among a model's parameters."""
    return jnp.result_type(*{v.dtype for v in variables if is_matrix(v)})


def is_matrix(variable: nnx.Variable) -> bool:
    """Whether activations have a parameter's dtype: norms, biases and routers may have another."""
    axes = [axis for axis in axes_of(variable) if axis != "layers"]
    return isinstance(variable, nnx.Param) and len(axes) > 1 and "router" not in axes


Made = tuple[dict[Path, Array], list[int]]  # parameters, and how many values of each leaf are not finite


def _on_host(
    leaves: list[Leaf],
    arrays: list[Later],
    variables: Mapping[Path, nnx.Variable],
    dtypes: Mapping[Path, np.dtype],
    change: Change,
) -> Made:
    """Parameters from the leaves that hold all of their parts, some rows of a leaf at a time."""
    out = {path: aligned_empty(tuple(v.shape), dtypes[path]) for path, v in variables.items()}
    nonfinite = [0] * len(leaves)
    for at, (leaf, array) in enumerate(zip(leaves, arrays, strict=True)):
        step = max(1, _ROWS_BYTES * array.shape[0] // max(1, array.nbytes))
        for start in range(0, array.shape[0], step):
            rows = slice(start, min(start + step, array.shape[0]))
            block = array.rows(rows)
            for j, (path, i) in enumerate(leaf.parts):
                whole = (out[path] if i is None else out[path][i]).reshape(leaf.inner)
                if leaf.stacked and leaf.axis == 0:  # the layers are the rows
                    if not rows.start <= j < rows.stop:
                        continue
                    target, piece = whole, block[j - start]
                else:
                    target, piece = whole[rows], block[:, j] if leaf.stacked else block
                copy_into(target, change(leaf, piece))
                nonfinite[at] += count_nonfinite(target)
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
    order = {path: at for at, path in enumerate(variables)}
    alike = [dataclasses.replace(leaf, parts=tuple(((order[path],), i) for path, i in leaf.parts)) for leaf in leaves]
    shapes = tuple(tuple(variable.shape) for variable in variables.values())
    places = tuple(model.strategy.sharding_of(variable) for variable in variables.values())
    build = _builder(tuple(alike), shapes, tuple(dtypes[path] for path in variables), places, change)
    first = next(iter(variables.values()))
    made, nonfinite = build([array.make(leaf.place(model, first)) for leaf, array in zip(leaves, arrays, strict=True)])
    return dict(zip(variables, made, strict=True)), [int(count) for count in nonfinite]


@functools.lru_cache(maxsize=128)  # the same for every layer
def _builder(
    leaves: tuple[Leaf, ...],
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[np.dtype, ...],
    places: tuple[Any, ...],
    change: Change,
) -> Callable[[list[Array]], tuple[list[Array], list[Array]]]:
    """Compiled: parameters of the arrays of leaves, in whose parts numbers stand for the parameters' paths."""

    def build(found: list[Array]) -> tuple[list[Array], list[Array]]:
        parts: dict[tuple[Path, int | None], Array] = {}
        for leaf, array in zip(leaves, found, strict=True):
            layers = jnp.moveaxis(array, leaf.axis, 0) if leaf.stacked else [array]
            for part, layer in zip(leaf.parts, layers, strict=True):
                parts[part] = change(leaf, layer).astype(dtypes[part[0][0]])
        made = []
        for at, shape in enumerate(shapes):
            alone = ((at,), None) in parts
            pieces = [parts[(at,), None]] if alone else [parts[(at,), i] for i in range(shape[0])]
            made.append((pieces[0] if alone else jnp.stack(pieces)).reshape(shape))
        bad = [jnp.sum(~jnp.isfinite(jnp.stack([parts[part] for part in leaf.parts]))) for leaf in leaves]
        return made, bad

    return jax.jit(build, out_shardings=(list(places), None))
