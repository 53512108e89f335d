"""Bridge from NNX modules to Linen modules, with MaxText's parameter tree.

``init`` creates boxed variables with MaxText's names, shapes and logical axes. ``apply`` reads the
arrays from Linen's scope, merges them into a cached NNX graph definition (`nnxmoe.linen.places`)
and calls the merged module, without running constructors.
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
    """Language model as a Linen module. Variables have MaxText's names, shapes and logical axes.

    As in MaxText, the query kernels of grouped-query attention are stored divided by sqrt(head width).
    Activations use the strategy's ``compute_dtype`` if set, else the dtype of the weight matrices.

    Attributes:
        scan_layers: Whether to stack the layers on axis 1. Overrides the strategy's ``stacking``.
    """

    config: DecoderConfig
    strategy: Strategy | None = None
    scan_layers: bool = False

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        """Run the model on tokens ``[B, T]``. Accepts the arguments of `CausalLM.__call__`.

        Raises a ValueError that lists all missing, unexpected and misshapen variables.
        """
        return _call(self, model_plan(self.config, self.strategy, self.scan_layers), args, kwargs)


class Wrapped(nn.Module):
    """NNX module as a Linen module, created by `wrap`."""

    blueprint: Blueprint

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the NNX module.

        Raises a ValueError that lists all missing, unexpected and misshapen variables.
        """
        return _call(self, part_plan(self.blueprint), args, kwargs)


def wrap(nnx_class: Callable[..., nnx.Module], *args: Any, name: str | None = None, **kwargs: Any) -> Wrapped:
    """Wrap an NNX class, or a function that returns an NNX module, as a Linen module.

    Variables of nnxmoe modules have MaxText's names and axes. MaxText's query kernels are divided by
    sqrt(H), so use ``wrap(GQA, AttentionDims(…, scale=1.0), …)``. Other variables are named by
    attribute (``layers_0`` for list items) and have the axes of their metadata.

    Args:
        nnx_class: NNX class, or function that returns an NNX module.
        args, kwargs: Arguments of ``nnx_class`` except ``rngs``. They must be hashable, since equal
            arguments share the graph definition and compiled programs. They may be wrapped modules:
            ``wrap(MoE, wrap(Router, …), wrap(Experts, …), Sorted(), None)``.
        name: Name of the Linen module.

    Raises:
        ValueError: An argument is not hashable, or ``rngs`` is passed.
    """
    if "rngs" in kwargs:
        raise ValueError("wrap(…, rngs=…): random keys come from Linen's rngs, so omit this argument")
    positional = {i: value.blueprint if isinstance(value, Wrapped) else value for i, value in enumerate(args)}
    keywords = {key: value.blueprint if isinstance(value, Wrapped) else value for key, value in kwargs.items()}
    for key, value in {**positional, **keywords}.items():
        try:
            hash(value)
        except TypeError as error:
            raise ValueError(
                f"wrap: argument {key} is not hashable, {value!r}: pass a tuple or a frozen object"
            ) from error
    return Wrapped(Blueprint(nnx_class, tuple(positional.values()), tuple(sorted(keywords.items()))), name=name)


def from_linen(
    params: Tree,
    config: DecoderConfig,
    strategy: Strategy | None = None,
    mesh: Mesh | None = None,
    *,
    mapping: Mapped | None = None,
) -> CausalLM:
    """Build an NNX model from the parameters of a Linen module, which may be boxed.

        linen.from_linen(params, config, mapping={
            "embed/table": "wte/embedding",
            "layers/{layer}/attention/q/kernel": ("h_{layer}/qkv/kernel", lambda qkv: qkv[:, :64]),
            …
        })

    Args:
        mapping: Dict from NNX name, such as ``layers/{layer}/attention/q/kernel``, to Linen name, or
            to a pair of one or several Linen names and a function from these arrays to the NNX array.
            Dimensions are split and merged as needed. If the Linen name of a layer's parameter has no
            ``{layer}``, its array has the layers on axis 0, as stacked by ``nn.scan``. If None, the
            tree has the names of a `LinenCausalLM` or of MaxText (see `maxtext.from_tree`).
            `propose_mapping` proposes a mapping. `nnxmoe.testing.assert_module_parity` also
            accepts it.

    Raises:
        ValueError: The tree does not fit. The message lists up to 20 problems: parameters
            without a row, missing arrays, unused arrays and wrong shapes.
    """
    if mapping is not None:
        return from_mapping(params, config, mapping, strategy, mesh)
    names = flat(params)
    if names and not any("decoder" in name.split("/")[:-1] for name in names):
        raise ValueError(
            f"no name of the Linen tree begins with decoder/ ({some(sorted(names), 2)}), unlike MaxText's: pass a "
            "mapping. nnxmoe.linen.propose_mapping(config, params) lists the names of both sides"
        )
    return maxtext.from_tree(params, config, strategy, mesh)


def _call(module: nn.Module, plan: LinenPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if module.is_initializing() and not any(
        module.has_variable(collection, names[0]) for collection, names in plan.places
    ):
        _draw(module, plan)
    stored = _stored(module, plan)
    values = {
        path: slot.read(stored[path]) if isinstance(slot, LinenSlot) else _random(module, slot)
        for path, slot in plan.leaves.items()
    }
    part = nnx.merge(plan.graph, jax.tree.unflatten(plan.tree, values.values()))
    if isinstance(part, CausalLM):
        slots = ((path, slot) for path, slot in plan.leaves.items() if isinstance(slot, LinenSlot))
        dtypes = {values[path].dtype for path, slot in slots if slot.matrix}
        part.dtype = jnp.dtype(part.strategy.compute_dtype or jnp.result_type(*dtypes))
    output = part(*args, **kwargs)
    if not module.is_initializing():  # as in Linen's modules, ``init`` does not update statistics
        _write_back(module, plan, part, values, stored)
    return output


def _draw(module: nn.Module, plan: LinenPlan) -> None:
    """Initialize the variables with Linen's random keys, and store them in the scope."""
    with nnx.use_eager_sharding(False):  # boxes have the logical axes; users apply shardings
        state = dict(nnx.to_flat_state(nnx.state(plan.make(Streams(module.make_rng)))))
    for (collection, names), paths in plan.places.items():
        slots: list[Any] = [plan.leaves[path] for path in paths]
        parts = [slot.write(state[path].get_value()) for slot, path in zip(slots, paths, strict=True)]
        value, axes = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1), slots[0].axes
        _put(module, collection, names, value if axes is None else nn.LogicallyPartitioned(value, axes))


def _put(module: nn.Module, collection: str, names: Names, value: Any) -> None:
    """Store a variable in a collection under nested names."""
    module.put_variable(collection, names[0], unflatten_dict({names[1:]: value}) if names[1:] else value)


def _stored(module: nn.Module, plan: LinenPlan) -> dict[Path, Any]:
    """Return the stored value of each variable, by NNX path.

    Raises a ValueError that lists all missing, misshapen and unexpected variables.
    """
    collections, unexpected, stored = module.variables, list[str](), dict[Path, Any]()
    for collection in sorted({collection for collection, _ in plan.places} & collections.keys()):
        for names, value in flatten_dict(collections[collection]).items():
            if (paths := plan.places.get((collection, names))) is None:
                unexpected.append(f"{'/'.join((collection, *names))} is not a variable of the module")
            stored |= dict.fromkeys(paths or (), value)
    slots = ((path, slot) for path, slot in plan.leaves.items() if isinstance(slot, LinenSlot))
    errors = [fault for path, slot in slots if (fault := slot.fault(stored.get(path)))]
    if errors or unexpected:
        lines = "\n  ".join(by_layer(list(dict.fromkeys(errors + unexpected))))
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
    """Placeholder for a missing key. Raises an error on use, so that disabled dropout needs no key."""

    module: str
    tag: str

    def __getitem__(self, index: Any) -> Any:
        raise InvalidRngError(f'{self.module} needs PRNG for "{self.tag}"')


def _write_back(
    module: nn.Module, plan: LinenPlan, part: nnx.Module, values: dict[Path, Any], stored: dict[Path, Any]
) -> None:
    """Store changed variables in Linen's collections, and new variables in mutable collections."""
    for path, variable in nnx.to_flat_state(nnx.state(part, nnx.Not(nnx.RngState))):
        value, slot = variable.get_value(), plan.leaves.get(path)
        if slot is None:
            collection = collection_of(variable)
            if module.is_mutable_collection(collection):
                _put(module, collection, attributes(path), value)
        elif value is not values[path]:
            assert isinstance(slot, LinenSlot) and slot.shape == slot.own
            box = stored[path]
            value = box.replace_boxed(value) if isinstance(box, meta.AxisMetadata) else value
            _put(module, slot.collection, slot.names, value)
