"""A thin bridge from NNX modules to Linen modules, with MaxText's parameter tree.

``init`` creates boxed variables with MaxText's names, shapes and logical axes. ``apply`` reads the
arrays from Linen's scope, merges them into a cached NNX graph definition (`nnxmoe.linen.places`)
and calls the result. ``apply`` runs no constructors.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta
from flax.errors import InvalidRngError
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import some
from nnxmoe.convert import maxtext
from nnxmoe.convert.arrays.array_layout import Path
from nnxmoe.convert.maxtext.array_trees import Tree
from nnxmoe.linen.mapping import Mapped, by_layer, flat, from_mapping
from nnxmoe.linen.places import (
    Blueprint,
    LinenPlan,
    LinenSlot,
    Names,
    Streams,
    attributes,
    collection_of,
    model_plan,
    part_plan,
)
from nnxmoe.linen.propose import propose_mapping as propose_mapping
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.output import Output
from nnxmoe.model.strategy import Strategy


class LinenCausalLM(nn.Module):
    """Language model as a Linen module, with MaxText's names, shapes and logical axes of variables.

    As in MaxText, grouped queries are stored divided by sqrt(head width). Activations use the
    strategy's ``compute_dtype`` if set, else the dtype of the matrices.

    Attributes:
        scan_layers: Stack the layers on axis 1. Overrides the strategy's ``stacking``.
    """

    config: DecoderConfig
    strategy: Strategy | None = None
    scan_layers: bool = False

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        """Run the model with the arguments of `CausalLM.__call__`, tokens ``[B, T]`` first.

        Raises ValueError with a list of all variables that do not fit.
        """
        return _call(self, model_plan(self.config, self.strategy, self.scan_layers), args, kwargs)


class Wrapped(nn.Module):
    """NNX module as a Linen module, created by `wrap`."""

    blueprint: Blueprint

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the NNX module. Raises ValueError with a list of all variables that do not fit."""
        return _call(self, part_plan(self.blueprint), args, kwargs)


def wrap(nnx_class: Callable[..., nnx.Module], *args: Any, name: str | None = None, **kwargs: Any) -> Wrapped:
    """Wrap an NNX class, or a function that returns an NNX module, as a Linen module.

    Variables of nnxmoe modules have MaxText's names and axes. MaxText's queries are divided by sqrt(H):
    use ``wrap(GQA, AttentionDims(…, scale=1.0), …)``. Other variables are named by attribute
    (``layers_0`` for list items) and have the axes of their metadata.

    Args:
        nnx_class: The class or function.
        args, kwargs: Its arguments except ``rngs``. They must be hashable, since equal arguments
            share the graph definition and compiled programs. Arguments may be wrapped modules:
            ``wrap(MoE, wrap(Router, …), wrap(Experts, …), Sorted(), None)``.
        name: Name of the Linen module.

    Raises:
        ValueError: If an argument is unhashable, or for ``rngs``.
    """
    if "rngs" in kwargs:
        raise ValueError("wrap(…, rngs=…): random keys come from Linen's rngs; omit the argument")
    given = {i: value.blueprint if isinstance(value, Wrapped) else value for i, value in enumerate(args)}
    named = {key: value.blueprint if isinstance(value, Wrapped) else value for key, value in kwargs.items()}
    for key, value in {**given, **named}.items():
        try:
            hash(value)
        except TypeError as error:
            raise ValueError(f"wrap: argument {key} has no hash, {value!r}: pass a tuple or frozen object") from error
    return Wrapped(Blueprint(nnx_class, tuple(given.values()), tuple(sorted(named.items()))), name=name)


def from_linen(
    params: Tree,
    config: DecoderConfig,
    strategy: Strategy | None = None,
    mesh: Mesh | None = None,
    *,
    mapping: Mapped | None = None,
) -> CausalLM:
    """Build the NNX model with the variables of a Linen module, boxed or not.

        linen.from_linen(params, config, mapping={
            "embed/table": "wte/embedding",
            "layers/{layer}/attention/q/kernel": ("h_{layer}/qkv/kernel", lambda qkv: qkv[:, :64]),
            …
        })

    Args:
        mapping: Source of each parameter: our name, such as ``layers/{layer}/attention/q/kernel``, ->
            name in the tree, or a pair of one or several names and a function from those arrays to
            our array. Dimensions are split and merged as needed. A name in the tree without
            ``{layer}`` is an array with the layers on axis 0, as stacked by ``nn.scan``. If None, the
            tree has the names of a `LinenCausalLM` or of MaxText (see `maxtext.from_tree`).
            `propose_mapping` proposes a mapping. `nnxmoe.testing.assert_module_parity` also
            accepts it.

    Raises:
        ValueError: With a list of all parameters without a row, missing and unused arrays, and shapes
            that differ.
    """
    if mapping is not None:
        return from_mapping(params, config, mapping, strategy, mesh)
    names = flat(params)
    if names and not any("decoder" in name.split("/")[:-1] for name in names):
        raise ValueError(
            f"no name of the Linen tree begins with decoder/ ({some(sorted(names), 2)}), as MaxText's do: give a "
            "mapping; nnxmoe.linen.propose_mapping(config, params) lists the names of both sides"
        )
    return maxtext.from_tree(params, config, strategy, mesh)


def _call(module: nn.Module, plan: LinenPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if module.is_initializing() and not any(module.has_variable(where, names[0]) for where, names in plan.places):
        _draw(module, plan)
    stored = _stored(module, plan)
    values = {
        path: slot.read(stored[path]) if isinstance(slot, LinenSlot) else _random(module, slot)
        for path, slot in plan.leaves.items()
    }
    part = nnx.merge(plan.graph, jax.tree.unflatten(plan.tree, values.values()))
    if isinstance(part, CausalLM):
        slots = ((path, slot) for path, slot in plan.leaves.items() if isinstance(slot, LinenSlot))
        kinds = {values[path].dtype for path, slot in slots if slot.matrix}
        part.dtype = jnp.dtype(part.strategy.compute_dtype or jnp.result_type(*kinds))
    out = part(*args, **kwargs)
    if not module.is_initializing():  # as in Linen's modules, ``init`` does not update statistics
        _write_back(module, plan, part, values, stored)
    return out


def _draw(module: nn.Module, plan: LinenPlan) -> None:
    """Store initial values in the scope, drawn with Linen's keys."""
    with nnx.use_eager_sharding(False):  # boxes have the logical axes; users apply shardings
        state = dict(nnx.to_flat_state(nnx.state(plan.make(Streams(module.make_rng)))))
    for (collection, names), paths in plan.places.items():
        slots: list[Any] = [plan.leaves[path] for path in paths]
        parts = [slot.write(state[path].get_value()) for slot, path in zip(slots, paths, strict=True)]
        value, axes = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1), slots[0].axes
        _put(module, collection, names, value if axes is None else nn.LogicallyPartitioned(value, axes))


def _put(module: nn.Module, collection: str, names: Names, value: Any) -> None:
    """Store a variable under nested scopes of these names."""
    module.put_variable(collection, names[0], unflatten_dict({names[1:]: value}) if names[1:] else value)


def _stored(module: nn.Module, plan: LinenPlan) -> dict[Path, Any]:
    """Return the scope's value of each leaf.

    Raises ValueError with all missing, misshapen and unexpected variables.
    """
    collections, odd, stored = module.variables, list[str](), dict[Path, Any]()
    for collection in sorted({collection for collection, _ in plan.places} & collections.keys()):
        for names, value in flatten_dict(collections[collection]).items():
            if (paths := plan.places.get((collection, names))) is None:
                odd.append(f"{'/'.join((collection, *names))} is not a variable of the module")
            stored |= dict.fromkeys(paths or (), value)
    slots = ((path, slot) for path, slot in plan.leaves.items() if isinstance(slot, LinenSlot))
    faults = [fault for path, slot in slots if (fault := slot.fault(stored.get(path)))]
    if faults or odd:
        lines = "\n  ".join(by_layer(list(dict.fromkeys(faults + odd))))
        raise ValueError(f"the variables do not fit {module.name or type(module).__name__}:\n  {lines}")
    return stored


def _random(module: nn.Module, state: nnx.RngState) -> Any:
    """Return the key or count of a random stream. Every call restarts the stream with a key from Linen."""
    shape, tag = tuple(state.shape), state.get_metadata()["tag"]
    if isinstance(state, nnx.RngCount):
        return jnp.zeros(shape, jnp.uint32)
    if not (module.has_rng(tag) or module.has_rng("params")):
        return _NoKey(module.name or type(module).__name__, tag)
    key = module.make_rng(tag)
    key = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
    return jax.random.split(key, shape) if shape else key


@dataclasses.dataclass(frozen=True)
class _NoKey:
    """Placeholder for a missing key. Raises only when it is used, so that disabled dropout needs no key."""

    module: str
    tag: str

    def __getitem__(self, index: Any) -> Any:
        raise InvalidRngError(f'{self.module} needs PRNG for "{self.tag}"')


def _write_back(
    module: nn.Module, plan: LinenPlan, part: nnx.Module, values: dict[Path, Any], stored: dict[Path, Any]
) -> None:
    """Store changed variables in Linen's collections, and new variables in mutable collections."""
    for path, variable in nnx.to_flat_state(nnx.state(part, nnx.Not(nnx.RngState))):
        new, slot = variable.get_value(), plan.leaves.get(path)
        if slot is None:
            collection = collection_of(variable)
            if module.is_mutable_collection(collection):
                _put(module, collection, attributes(path), new)
        elif new is not values[path]:
            assert isinstance(slot, LinenSlot) and slot.shape == slot.own
            box = stored[path]
            new = box.replace_boxed(new) if isinstance(box, meta.AxisMetadata) else new
            _put(module, slot.collection, slot.names, new)
