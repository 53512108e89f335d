"""A thin bridge: our NNX modules as Linen modules with MaxText's parameter tree.

``init`` declares what `maxtext.layout` says: names, shapes and logical axes as boxes. ``apply`` reads the arrays from
Linen's scope, puts them into a module structure that was built once, and calls it: no constructor runs again.
"""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta
from flax.errors import InvalidRngError
from flax.traverse_util import flatten_dict, unflatten_dict

from nnxmoe.config import DecoderConfig
from nnxmoe.convert import maxtext
from nnxmoe.convert.maxtext import from_tree as from_linen
from nnxmoe.convert.table import Path
from nnxmoe.layers.causal_lm import CausalLM, Output
from nnxmoe.layers.embed import Embed
from nnxmoe.layers.gqa import GQA, attentions
from nnxmoe.layers.mla import MLA
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.rope import Llama3Rope, rotate_pairs
from nnxmoe.layers.stack import Layer, MoELayer
from nnxmoe.models import MODELS, model_class
from nnxmoe.moe.block import MoE
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.router import Router, RouterBias
from nnxmoe.strategy import Strategy

__all__ = ["LinenCausalLM", "Wrapped", "from_linen", "wrap"]

Names = tuple[str, ...]
Make = Callable[[nnx.Rngs | None], nnx.Module]

# Our parts, and where their parameters stand in the models' tables.
_PARTS: dict[type[nnx.Module], str] = {
    Layer: "layer.",
    MoELayer: "layer.",
    GQA: "layer.attention.",
    MLA: "layer.attention.",
    MLP: "layer.mlp.",
    MoE: "layer.moe.",
    Router: "layer.moe.router.",
    Experts: "layer.moe.experts.",
    RMSNorm: "norm.",
    Embed: "embed.",
}


class LinenCausalLM(nn.Module):
    """A language model as a Linen module whose variables are MaxText's, to the name, shape and logical axis.

    Grouped queries carry 1 / sqrt(head width), as they do there; ``scan_layers`` stacks layers on axis 1, whatever the
    strategy's own says. Activations have the embedding's dtype where the strategy names none.
    """

    config: DecoderConfig
    strategy: Strategy | None = None
    scan_layers: bool = False

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        """Takes what `CausalLM.__call__` takes: tokens ``[B, T]`` first. ValueError lists all variables that do not
        fit."""
        return _call(self, _model_plan(self.config, self.strategy, self.scan_layers), args, kwargs)


class Wrapped(nn.Module):
    """What `wrap` returns: an NNX module as a Linen module."""

    blueprint: "Blueprint"

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the NNX module with its variables from this scope. ValueError lists all that do not fit."""
        return _call(self, _part_plan(self.blueprint), args, kwargs)


def wrap(nnx_class: Callable[..., nnx.Module], *args: Any, name: str | None = None, **kwargs: Any) -> Wrapped:
    """A Linen module of an NNX class (or of a function that makes a module) and its arguments but ``rngs``.

    An argument that is itself wrapped is built with it: ``wrap(MoE, wrap(Router, …), wrap(Experts, …), Sorted(),
    None)``. Our parts have MaxText's names and axes (its queries are divided: ``wrap(GQA, …, scale=1.0)``); any other
    module its attributes' names, ``layers_0`` for an item of a list, and the axes in its metadata. Arguments must be
    hashable: equal ones share one structure and one compiled program.
    """
    if "rngs" in kwargs:
        raise ValueError("wrap(…, rngs=…): random keys come from Linen's rngs, leave them out")
    parts = [value.blueprint if isinstance(value, Wrapped) else value for value in args]
    named = {key: value.blueprint if isinstance(value, Wrapped) else value for key, value in kwargs.items()}
    for key, value in [*enumerate(parts), *named.items()]:
        try:
            hash(value)
        except TypeError as error:
            what = f"{nnx_class.__name__}'s argument {key}"
            raise ValueError(f"wrap: {what} cannot be hashed, {value!r}: give a tuple or a frozen object") from error
    return Wrapped(Blueprint(nnx_class, tuple(parts), tuple(sorted(named.items()))), name=name)


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """What an NNX module is made from, but its random keys."""

    make: Callable[..., nnx.Module]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def __call__(self, rngs: nnx.Rngs | None) -> nnx.Module:
        """The module, and those among its arguments."""
        args = [value(rngs) if isinstance(value, Blueprint) else value for value in self.args]
        kwargs = {key: value(rngs) if isinstance(value, Blueprint) else value for key, value in self.kwargs}
        of = self.make.__init__ if isinstance(self.make, type) else self.make
        parameters = inspect.signature(of).parameters.values()
        takes = any(each.name == "rngs" or each.kind is each.VAR_KEYWORD for each in parameters)
        return self.make(*args, **kwargs, **({"rngs": rngs} if takes else {}))


# What is known about a module before it has values


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A variable of Linen's: where, its shape there and here, logical axes (None: no box). ``stacked``: layers lie on
    axis 1 there, 0 here."""

    collection: str
    names: Names
    shape: tuple[int, ...]
    own: tuple[int, ...]
    dtype: Any
    axes: tuple[Any, ...] | None
    stacked: bool = False

    def boxed(self, value: Any) -> Any:
        """Our value as Linen stores it."""
        if self.stacked:
            value = jnp.moveaxis(value.reshape(self.shape[1], self.shape[0], *self.shape[2:]), 0, 1)
        value = value.reshape(self.shape)
        return value if self.axes is None else nn.LogicallyPartitioned(value, self.axes)

    def read(self, value: Any) -> Any:
        """Linen's value as we have it."""
        value = value.unbox() if isinstance(value, meta.AxisMetadata) else value
        value = jnp.moveaxis(value, 1, 0) if self.stacked else value
        return value if value.shape == self.own else value.reshape(self.own)

    def fault(self, value: Any) -> str | None:
        """What is wrong with a stored value."""
        name, shape = "/".join((self.collection, *self.names)), getattr(meta.unbox(value), "shape", None)
        if shape is None:
            return f"{name} is missing, {list(self.shape)}" if value is None else f"{name} is no array: {value!r}"
        if shape != self.shape:
            return f"{name} has shape {list(shape)}, the module has {list(self.shape)}"
        dtype = meta.unbox(value).dtype
        if jnp.issubdtype(self.dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.floating):
            return f"{name} is {dtype}: weights are floating-point"
        return None


@dataclasses.dataclass(frozen=True)
class _Random:
    """The key or the count of a stream of random numbers, which begins anew at each call with a key of Linen's."""

    tag: str
    shape: tuple[int, ...]
    count: bool

    def read(self, module: nn.Module) -> Any:
        """A key for the stream, or its count."""
        if self.count:
            return jnp.zeros(self.shape, jnp.uint32)
        if not (module.has_rng(self.tag) or module.has_rng("params")):
            return _NoKey(module.name or type(module).__name__, self.tag)
        key = module.make_rng(self.tag)
        key = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
        return jax.random.split(key, self.shape) if self.shape else key


@dataclasses.dataclass(frozen=True)
class _NoKey:
    """Stands where nobody gave a key: only using it is an error, as a dropout that is off does not."""

    module: str
    tag: str

    def __getitem__(self, index: Any) -> Any:
        raise InvalidRngError(f'{self.module} needs PRNG for "{self.tag}"')


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """A module's structure, and what its leaves are, in the order of the structure."""

    make: Make
    graph: Any
    tree: Any
    leaves: tuple[tuple[Path, _Slot | _Random], ...]

    @property
    def slots(self) -> list[_Slot]:
        """What Linen stores."""
        return [leaf for _, leaf in self.leaves if isinstance(leaf, _Slot)]


@functools.lru_cache(maxsize=32)
def _model_plan(config: DecoderConfig, strategy: Strategy | None, scan_layers: bool) -> _Plan:
    if not isinstance(config, DecoderConfig) or not isinstance(scan_layers, bool):
        raise ValueError(f"LinenCausalLM({config!r}, scan_layers={scan_layers!r}): give a model's config, and a bool")
    strategy = dataclasses.replace(strategy or Strategy.auto(), scan_layers=scan_layers)

    def make(rngs: nnx.Rngs | None) -> CausalLM:
        model = model_class(config)(config, strategy, rngs=rngs)  # pyright: ignore[reportCallIssue,reportArgumentType]
        for attention in attentions(model):
            if rngs is not None:
                attention.q.kernel.set_value(attention.q.kernel.get_value() * attention.scale)
            attention.scale = 1.0  # the queries carry it
            if isinstance(config.rope, Llama3Rope):
                attention.rotate = rotate_pairs  # as MaxText stores them
        return model

    model = make(None)
    graph, state = nnx.split(model)
    found: dict[Path, _Slot] = {}
    variables = dict(nnx.to_flat_state(state))
    for name, leaf in maxtext.layout(model, scan_layers).items():
        (path,) = {path for path, _ in leaf.parts}  # layers are stacked here where they are there
        variable, stacked = variables[path], leaf.stacked is not None
        names, own = tuple(name.split("/")), tuple(variable.shape)
        found[path] = _Slot("params", names, leaf.shape, own, variable.dtype, leaf.axes, stacked)
    return _plan(make, graph, state, found)


@functools.lru_cache(maxsize=256)
def _part_plan(blueprint: Blueprint) -> _Plan:
    module: list[nnx.Module] = []

    def shapes() -> Any:
        with nnx.use_eager_sharding(False):
            module[:] = [blueprint(_Streams(lambda name: jax.random.key(0)))]
        return nnx.state(module[0])

    state = jax.eval_shape(shapes)
    graph, kind = nnx.graphdef(module[0]), type(module[0])
    if isinstance(module[0], CausalLM):
        raise ValueError(f"wrap({kind.__name__}, …): a whole model is LinenCausalLM(config, strategy, scan_layers)")
    variables: dict[Path, Any] = dict(nnx.to_flat_state(state))
    for path, variable in variables.items():
        if not isinstance(variable, nnx.Variable) or not isinstance(variable.get_value(), jax.ShapeDtypeStruct):
            what = f"{kind.__name__}.{'.'.join(map(str, path))}"
            raise ValueError(f"wrap: {what} is not one array in an nnx.Variable, so Linen cannot store it")
    prefix = next((prefix for part, prefix in _PARTS.items() if issubclass(kind, part)), None)
    kept = {path: v for path, v in variables.items() if not isinstance(v, nnx.RngState)}
    return _plan(blueprint, graph, state, _by_attribute(kept) if prefix is None else _by_table(kept, prefix, kind))


def _plan(make: Make, graph: Any, state: nnx.State, slots: Mapping[Path, _Slot]) -> _Plan:
    leaves: list[tuple[Path, _Slot | _Random]] = []
    for path, variable in nnx.to_flat_state(state):
        if isinstance(variable, nnx.RngState):
            tag = variable.get_metadata()["tag"]
            leaves.append((path, _Random(tag, tuple(variable.shape), isinstance(variable, nnx.RngCount))))
        else:
            leaves.append((path, slots[path]))
    return _Plan(make, graph, jax.tree.structure(state), tuple(leaves))


def _by_table(variables: Mapping[Path, nnx.Variable], prefix: str, kind: type) -> dict[Path, _Slot]:
    """Names and axes of the first model that has such a part, without the folders that all of them are in."""
    keys = {path: prefix + ".".join(map(str, path)) for path in variables}
    tables = [model.maxtext_table for _, model in MODELS.values()]
    table = next((table for table in tables if all(key in table for key in keys.values())), None)
    if table is None:
        odd = next((key for key in keys.values() if not any(key in table for table in tables)), "all of its parameters")
        raise ValueError(f"wrap({kind.__name__}, …): no model of MaxText's has such a part with {odd}; wrap its parts")
    names = {path: tuple(table[key][0].split("/")) for path, key in keys.items()}
    shared = len(os.path.commonprefix([list(name[:-1]) for name in names.values()]))
    return {
        path: _Slot(
            "params", names[path][shared:], _by_heads(path, variables), tuple(v.shape), v.dtype, table[keys[path]][1]
        )
        for path, v in variables.items()
    }


def _by_heads(path: Path, variables: Mapping[Path, nnx.Variable]) -> tuple[int, ...]:
    """A shape as MaxText has it: biases of projections, flat here, have the dimensions of their outputs there."""
    if path[-1] == "bias" and not isinstance(variables[path], RouterBias):
        kernel = variables[(*path[:-1], "kernel")]
        return tuple(kernel.shape[kernel.get_metadata()["inputs"] :])
    return tuple(variables[path].shape)


def _by_attribute(variables: Mapping[Path, nnx.Variable]) -> dict[Path, _Slot]:
    found: dict[Path, _Slot] = {}
    for path, variable in variables.items():
        collection = nnx.variable_name_from_type(type(variable), allow_register=True)
        shape, metadata = tuple(variable.shape), variable.get_metadata()
        axes = metadata.get("axes") or metadata.get("out_sharding")
        found[path] = _Slot(
            collection, _attributes(path), shape, shape, variable.dtype, None if axes is None else tuple(axes)
        )
    places = [(slot.collection, slot.names) for slot in found.values()]
    if twice := next((place for place in places if places.count(place) > 1), None):
        raise ValueError(f"wrap: two variables are called {'/'.join((twice[0], *twice[1]))}: rename an attribute")
    return found


def _attributes(path: Path) -> Names:
    """``("layers", 0, "kernel")`` -> ``("layers_0", "kernel")``."""
    names: list[str] = []
    for part in path:
        if isinstance(part, int) and names:
            names[-1] += f"_{part}"
        else:
            names.append(str(part))
    return tuple(names)


class _Streams(nnx.Rngs):
    """Streams of any name, each made when it is first asked for: so each keeps the name it was asked for by."""

    def __init__(self, key_of: Callable[[str], Any]):
        self._key_of = key_of

    def __getitem__(self, name: str) -> nnx.RngStream:
        if name not in self:
            setattr(self, name, nnx.RngStream(self._key_of(name), tag=name))
        return vars(self)[name]

    def __getattr__(self, name: str) -> nnx.RngStream:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]


# A call


def _call(module: nn.Module, plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if module.is_initializing() and not _holds(module, plan):
        _draw(module, plan)
    stored = _stored(module, plan)
    values = [leaf.read(module) if isinstance(leaf, _Random) else leaf.read(stored[leaf]) for _, leaf in plan.leaves]
    part = nnx.merge(plan.graph, jax.tree.unflatten(plan.tree, values))
    if isinstance(part, CausalLM):
        part.dtype = jnp.dtype(part.strategy.compute_dtype or part.embed.table.get_value().dtype)
    out = part(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    if not module.is_initializing():
        _write_back(module, plan, part, values, stored)
    return out


def _holds(module: nn.Module, plan: _Plan) -> bool:
    return any(module.has_variable(slot.collection, slot.names[0]) for slot in plan.slots)


def _draw(module: nn.Module, plan: _Plan) -> None:
    """Initial values into Linen's scope, from its own keys."""
    with nnx.use_eager_sharding(False):
        state = nnx.state(plan.make(_Streams(module.make_rng)))
    for value, (_, leaf) in zip(jax.tree.leaves(state), plan.leaves, strict=True):
        if isinstance(leaf, _Slot):
            _put(module, leaf.collection, leaf.names, leaf.boxed(value))


def _put(module: nn.Module, collection: str, names: Names, value: Any) -> None:
    """As Linen's own submodules would have put it."""
    module.put_variable(collection, names[0], unflatten_dict({names[1:]: value}) if names[1:] else value)


def _stored(module: nn.Module, plan: _Plan) -> dict[_Slot, Any]:
    """The variables in this scope. ValueError for all that are missing, of another shape, or too many."""
    slots = {(slot.collection, slot.names): slot for slot in plan.slots}
    collections = module.variables
    found = {
        (name, names): value
        for name in sorted({slot.collection for slot in slots.values()} & collections.keys())
        for names, value in flatten_dict(collections[name]).items()
    }
    faults = [fault for place, slot in slots.items() if (fault := slot.fault(found.get(place)))]
    odd = [place for place in found if place not in slots]
    faults += [f"{'/'.join((place[0], *place[1]))} is no variable of the module" for place in odd]
    if faults:
        lines = "\n  ".join(faults)
        raise ValueError(f"the variables do not fit {module.name or type(module).__name__}:\n  {lines}")
    return {slot: found[place] for place, slot in slots.items()}


def _write_back(module: nn.Module, plan: _Plan, part: nnx.Module, values: list[Any], stored: dict[_Slot, Any]) -> None:
    """What the call changed goes to Linen's collections; what it made new, where they are mutable."""
    before = {path: (leaf, value) for (path, leaf), value in zip(plan.leaves, values, strict=True)}
    for path, variable in nnx.to_flat_state(nnx.state(part)):
        leaf, value = before.get(path, (None, None))
        new = variable.get_value()
        if isinstance(leaf, _Slot) and new is not value:
            box = stored[leaf]
            _put(
                module,
                leaf.collection,
                leaf.names,
                box.replace_boxed(new) if isinstance(box, meta.AxisMetadata) else new,
            )
        elif leaf is None and isinstance(variable, nnx.Variable):
            collection = nnx.variable_name_from_type(type(variable), allow_register=True)
            if module.is_mutable_collection(collection):
                _put(module, collection, _attributes(path), new)
