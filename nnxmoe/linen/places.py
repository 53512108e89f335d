"""Cached graph definitions of NNX modules in Linen, and the Linen collection and path of each variable.

The variables of whole models are named as in `maxtext_layout`, and the variables of nnxmoe's layers as
in the families' tables. The variables of other modules are named by attribute.
"""

import dataclasses
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta

from nnxmoe.config.base import DecoderConfig
from nnxmoe.convert.arrays.array_layout import ArrayLayout, Parameter, Path
from nnxmoe.convert.arrays.dtypes import is_matrix
from nnxmoe.convert.maxtext.layout import KEY, maxtext_layout, value_changes
from nnxmoe.layers.attention.gqa import GQA
from nnxmoe.layers.attention.mla import MLA
from nnxmoe.layers.embed import Embed
from nnxmoe.layers.linear.kernel import ParamWeight, is_kernel
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.rope import rotate_pairs
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.layer import Layer
from nnxmoe.model.stack import Scanned, Unrolled
from nnxmoe.model.strategy import Strategy
from nnxmoe.models import FAMILIES, model_class
from nnxmoe.moe.block import MoE
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.router import Router

Names = tuple[str, ...]
Place = tuple[str, Names]  # a Linen collection, and the name in it
Make = Callable[[nnx.Rngs | None], nnx.Module]

# Module of nnxmoe -> prefix of its parameters in the families' tables.
_PARTS: dict[type[nnx.Module], str] = {
    Layer: "layer.",
    GQA: "layer.attention.",
    MLA: "layer.attention.",
    MLP: "layer.mlp.",
    MoE: "layer.moe.",
    Router: "layer.moe.router.",
    Experts: "layer.moe.experts.",
    RMSNorm: "norm.",
    Embed: "embed.",
}


@dataclasses.dataclass(frozen=True)
class LinenSlot:
    """Linen collection, path and shape of an NNX variable.

    Attributes:
        collection: Linen's collection, such as ``params``.
        names: Path within the collection.
        shape: Shape in Linen.
        own: Shape in NNX.
        dtype: Dtype in Linen and NNX.
        axes: Logical axes of the box in Linen, or None if it is unboxed.
        rows: Range of the variable's layers on axis 1 of the Linen array, or None if it is not
            stacked. NNX has the layers on axis 0.
        matrix: True for weight matrices, see `is_matrix`.
    """

    collection: str
    names: Names
    shape: tuple[int, ...]
    own: tuple[int, ...]
    dtype: Any
    axes: tuple[Any, ...] | None
    rows: slice | None = None
    matrix: bool = False

    def write(self, value: Any) -> Any:
        """Convert an NNX value to the unboxed Linen value, or to its layers of a stacked Linen value."""
        if self.rows is None:
            return value.reshape(self.shape)
        return jnp.moveaxis(value.reshape(-1, self.shape[0], *self.shape[2:]), 0, 1)

    def read(self, value: Any) -> Any:
        """Convert a Linen value, boxed or not, to the NNX value."""
        value = value.unbox() if isinstance(value, meta.AxisMetadata) else value
        value = jnp.asarray(value) if isinstance(value, np.ndarray) else value
        value = value if self.rows is None else jnp.moveaxis(value[:, self.rows], 1, 0)
        return value if value.shape == self.own else value.reshape(self.own)

    def fault(self, boxed: Any) -> str | None:
        """Return an error message if a stored value is missing or has a wrong shape or dtype, else None."""
        name, value = "/".join((self.collection, *self.names)), meta.unbox(boxed)
        if value is None:
            return f"{name} is missing, {list(self.shape)}"
        if not hasattr(value, "shape"):
            return f"{name} is not an array: {value!r}"
        if value.shape != self.shape:
            return f"{name} has shape {list(value.shape)}, but the module requires {list(self.shape)}"
        if jnp.issubdtype(self.dtype, jnp.floating) and not jnp.issubdtype(value.dtype, jnp.floating):
            return f"{name} is {value.dtype}: weights are floating-point"
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class LinenPlan:
    """Graph definition of a module, and the Linen collection and path of each variable.

    Several NNX variables share a path if they are layers of one Linen array. The keys and counts of
    RNG streams are not stored in Linen.
    """

    make: Make
    graph: Any
    tree: Any
    leaves: Mapping[Path, LinenSlot | nnx.RngState]
    places: Mapping[Place, list[Path]]


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """Constructor and arguments of an NNX module, without random keys."""

    make: Callable[..., nnx.Module]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def __call__(self, rngs: nnx.Rngs | None) -> nnx.Module:
        """Construct the module and the blueprints among its arguments."""
        args = [value(rngs) if isinstance(value, Blueprint) else value for value in self.args]
        kwargs = {key: value(rngs) if isinstance(value, Blueprint) else value for key, value in self.kwargs}
        signature = inspect.signature(self.make.__init__ if isinstance(self.make, type) else self.make)
        takes_rngs = any(p.name == "rngs" or p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        return self.make(*args, **kwargs, **({"rngs": rngs} if takes_rngs else {}))


class Streams(nnx.Rngs):
    """RNG streams that are created on first access, each with its name as its tag."""

    def __init__(self, key_of: Callable[[str], Any]):
        self._key_of = key_of
        _ = self["params"], self["dropout"]  # created eagerly, for constructors that split all streams

    def __getitem__(self, name: str) -> nnx.RngStream:
        if name not in self:
            setattr(self, name, nnx.RngStream(self._key_of(name), tag=name))
        return vars(self)[name]

    def __getattr__(self, name: str) -> nnx.RngStream:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]


@functools.lru_cache(maxsize=32)
def model_plan(config: DecoderConfig, strategy: Strategy | None, scan_layers: bool) -> LinenPlan:
    """Return the `LinenPlan` of a whole model in MaxText's layout. Queries are divided by sqrt(head width)."""
    if not isinstance(config, DecoderConfig) or not isinstance(scan_layers, bool):
        raise ValueError(f"LinenCausalLM({config!r}, scan_layers={scan_layers!r}): pass a model's config and a bool")
    strategy = dataclasses.replace(strategy or Strategy.auto(), stacking=Scanned() if scan_layers else Unrolled())

    config = dataclasses.replace(config, query_pre_attn_scalar=1.0) if config.scale_in_queries else config

    def make(rngs: nnx.Rngs | None) -> CausalLM:
        model = _move_inputs_first(model_class(config)(config, strategy, rngs=rngs))
        for _, module in nnx.iter_graph(model) if value_changes(model)[KEY].features == "pairs" else ():
            if isinstance(module, GQA):
                module.rotate = rotate_pairs
        return model

    model = make(None)
    graph, state = nnx.split(model)
    slots = dict[Path, LinenSlot]()
    for name, leaf in maxtext_layout(model, scan_layers).items():
        names = tuple(name.split("/"))
        if leaf.rearrange is not None:
            call = f"LinenCausalLM({type(config).__name__}(…), scan_layers={scan_layers})"
            raise ValueError(f"{call}: MaxText stores {name} in a different layout. Convert checkpoints instead")
        for parameter, rows in _rows(leaf):
            nnx_shape, variable = parameter.shape, parameter.variable
            properties = variable.dtype, leaf.axes, rows, is_matrix(variable)
            slots[parameter.path] = LinenSlot("params", names, leaf.shape, nnx_shape, *properties)
    return _plan(make, graph, state, slots)


def _rows(leaf: ArrayLayout) -> list[tuple[Parameter, slice | None]]:
    """Return the parameters in an array, each with its range of layers on axis 1 (None if not stacked)."""
    if leaf.axis is None:
        return [(leaf.parts[0], None)]
    same = itertools.groupby(enumerate(leaf.parts), lambda pair: pair[1].path)
    runs = [list(run) for _, run in same]
    return [(run[0][1], slice(run[0][0], run[-1][0] + 1)) for run in runs]


@functools.lru_cache(maxsize=256)
def part_plan(blueprint: Blueprint) -> LinenPlan:
    """Return the `LinenPlan` of a layer or other NNX module. Raises ValueError if Linen cannot store its state."""
    modules: list[nnx.Module] = []

    def shapes() -> Any:
        with nnx.use_eager_sharding(False):
            modules[:] = [_move_inputs_first(blueprint(Streams(lambda name: jax.random.key(0))))]
        return nnx.state(modules[0])

    state = jax.eval_shape(shapes)
    module_class = type(modules[0])
    if issubclass(module_class, CausalLM):
        raise ValueError(f"wrap({module_class.__name__}, …): use LinenCausalLM(config, strategy, …) for a whole model")
    variables: dict[Path, Any] = dict(nnx.to_flat_state(state))
    for path, variable in variables.items():
        if not isinstance(variable, nnx.Variable) or not isinstance(variable.get_value(), jax.ShapeDtypeStruct):
            name = f"{module_class.__name__}.{'.'.join(map(str, path))}"
            raise ValueError(f"wrap: {name} is not an array in an nnx.Variable, and Linen can store only arrays")
    stored = {path: variable for path, variable in variables.items() if not isinstance(variable, nnx.RngState)}
    prefix = next((prefix for part, prefix in _PARTS.items() if issubclass(module_class, part)), None)
    slots = _slots_by_attribute(stored) if prefix is None else _slots_by_table(stored, prefix, modules[0])
    return _plan(lambda rngs: _move_inputs_first(blueprint(rngs)), nnx.graphdef(modules[0]), state, slots)


def _move_inputs_first(module: Any) -> Any:
    """Store kernels as [in, out], like Linen, so that programs need no transposes and round as in Flax."""
    for _, node in nnx.iter_graph(module):
        if is_kernel(node):
            ParamWeight(node).move_inputs_first()
        elif isinstance(node, Embed):
            node.ins_first = True
    return module


def _plan(make: Make, graph: Any, state: Any, slots: Mapping[Path, LinenSlot]) -> LinenPlan:
    leaves = {path: v if isinstance(v, nnx.RngState) else slots[path] for path, v in nnx.to_flat_state(state)}
    places: dict[Place, list[Path]] = {}
    for path, slot in leaves.items():
        if isinstance(slot, LinenSlot):
            paths = places.setdefault((slot.collection, slot.names), [])
            if paths and slot.rows is None:
                duplicate = "/".join((slot.collection, *slot.names))
                raise ValueError(f"wrap: two variables would be called {duplicate}: rename an attribute")
            paths.append(path)
    return LinenPlan(make, graph, jax.tree.structure(state), leaves, places)


def _slots_by_table(variables: Mapping[Path, nnx.Variable], prefix: str, module: nnx.Module) -> dict[Path, LinenSlot]:
    """Name the variables of a layer by the first family's table that contains all of them.

    A layer does not know its family. The common prefix of the names is removed.
    """
    keys = {path: prefix + ".".join(map(str, path)) for path in variables}
    table = _table_with(set(keys.values()))
    if table is None:
        raise ValueError(f"wrap({type(module).__name__}, …): no MaxText model has all of {', '.join(keys.values())}")
    names = {path: tuple(table[key][0].split("/")) for path, key in keys.items()}
    prefix_length = len(os.path.commonprefix([path_names[:-1] for path_names in names.values()]))
    slots: dict[Path, LinenSlot] = {}
    for path, variable in variables.items():
        nnx_shape, axes = tuple(variable.shape), table[keys[path]][1]
        shape = tuple(variable.get_metadata().get("outs", nnx_shape))  # NNX stores the biases of all heads as a vector
        slots[path] = LinenSlot("params", names[path][prefix_length:], shape, nnx_shape, variable.dtype, axes)
    return slots


def _table_with(keys: set[str]) -> Mapping[str, tuple[Any, ...]] | None:
    for family in FAMILIES.values():
        if family.maxtext.table.keys() >= keys:
            return family.maxtext.table
    return None


def _slots_by_attribute(variables: Mapping[Path, nnx.Variable]) -> dict[Path, LinenSlot]:
    slots: dict[Path, LinenSlot] = {}
    for path, variable in variables.items():
        shape, axes = tuple(variable.shape), variable.get_metadata().get("out_sharding")
        axes = None if axes is None else tuple(axes)
        slots[path] = LinenSlot(collection_of(variable), attributes(path), shape, shape, variable.dtype, axes)
    return slots


def collection_of(variable: nnx.Variable) -> str:
    """Return Linen's collection of a variable: ``params``, ``batch_stats``, …, or the name of its class."""
    return nnx.variable_name_from_type(type(variable), allow_register=True)


def attributes(path: Path) -> Names:
    """Append indices to names: ``("layers", 0, "kernel")`` becomes ``("layers_0", "kernel")``."""
    names: list[str] = []
    for part in path:
        if isinstance(part, int) and names:
            names[-1] += f"_{part}"
        else:
            names.append(str(part))
    return tuple(names)
