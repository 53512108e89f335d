"""Load Linen parameters into any NNX module, by a mapping from its names to theirs."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxmoe.layers.linear.kernel import flax_order
from nnxmoe.linen.mapping import LAYER, Mapped, Source, check_faults, checked_pair, flat, read_mapping, unused
from nnxmoe.model.causal_lm import CausalLM


def load_linen(module: nnx.Module, params: Mapping[str, Any], mapping: Mapped) -> None:
    """Set all parameters of an NNX module to the parameters of a Linen module.

    Values are cast to the dtypes of the module and placed on its devices.

    Args:
        module: Any module, including an abstract module (``nnx.eval_shape``). Random number state does
            not change. For models of nnxmoe use `nnxmoe.linen.from_linen`.
        params: The Linen tree, boxed or not, with or without the collection ``params``.
        mapping: NNX parameter (its path, ``blocks/{layer}/up/kernel``) -> name in the tree, or a pair
            of one or several names and a function from those arrays to the NNX array, as for
            `nnxmoe.linen.from_linen`. ``{layer}`` matches each number in the module's paths. If only
            the parameter has ``{layer}``, the tree's array has the layers on axis 0, as with
            ``nn.scan``. If only the name in the tree has ``{layer}``, its layers are stacked on axis
            0, as with ``nnx.scan`` and ``nnx.vmap``. Dimensions are split and merged as needed.
            `nnxmoe.linen.propose_mapping` proposes a mapping.

    Raises:
        ValueError: With a list of all parameters without a row, missing and unused arrays, and arrays
            of wrong shapes or kinds of numbers. The module is then unchanged.
    """
    if not isinstance(module, nnx.Module) or isinstance(module, CausalLM):
        raise ValueError(
            f"module is a {type(module).__name__}: give an NNX module of yours; linen.from_linen makes nnxmoe's models"
        )
    if not isinstance(mapping, Mapping):
        raise ValueError(f"the mapping is a {type(mapping).__name__}: give a dict from NNX names to names in the tree")
    theirs, state = flat(params), nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.RngState)))
    variables = {"/".join(map(str, path)): (path, variable) for path, variable in state}
    wanted = {name: tuple(flax_order(variable, variable.shape)) for name, (_, variable) in variables.items()}
    rows, faults = read_mapping(_Stacked(mapping, theirs), wanted, theirs, _general_name(mapping))
    faults += [f"{name} has a shape but no values" for name, a in theirs.items() if isinstance(a, jax.ShapeDtypeStruct)]
    values: list[tuple[Any, nnx.Variable]] = []
    for name, row in {} if faults else rows.items():
        path, variable = variables[name]
        old, order = variable.get_value(), flax_order(variable, range(len(wanted[name])))
        try:
            made = jnp.asarray(row(theirs)).transpose(np.argsort(order))
        except ValueError as error:
            faults.append(str(error))
            continue
        if not any(jnp.issubdtype(made.dtype, kind) and jnp.issubdtype(old.dtype, kind) for kind in _KINDS):
            faults.append(f"{name} is {old.dtype}, {' and '.join(row.sources)} give {made.dtype}")
        made = made.astype(old.dtype)
        values.append((path, variable.replace(jax.device_put(made, getattr(old, "sharding", None)))))
    check_faults(faults + unused(rows, theirs), type(module).__name__)
    nnx.update(module, nnx.from_flat_state(values))


_KINDS = (jnp.floating, jnp.integer, jnp.bool_, jnp.complexfloating)


def _general_name(mapping: Mapped) -> Callable[[str], tuple[str, int | None]]:
    """Return a function from a parameter's name to the matching key of the mapping and the layer number."""
    patterns = {key: re.compile(re.escape(key).replace(re.escape(LAYER), r"(\d+)")) for key in mapping if LAYER in key}

    def general(name: str) -> tuple[str, int | None]:
        matches = ((key, match) for key, pattern in patterns.items() if (match := pattern.fullmatch(name)))
        return next(((key, int(match[1])) for key, match in matches), (name, None))

    return general


class _Stacked(dict[str, Source]):
    """Mapping that stacks the layers of rows with ``{layer}`` only in the tree's names."""

    def __init__(self, mapping: Mapped, theirs: Mapping[str, Any]):
        super().__init__({key: _stacked(key, source, theirs) for key, source in mapping.items()})
        self.candidates = getattr(mapping, "candidates", {})


def _stacked(key: str, source: Source, theirs: Mapping[str, Any]) -> Source:
    names, make = (source, lambda array: array) if isinstance(source, str) else checked_pair(key, source)
    names = (names,) if isinstance(names, str) else tuple(names)
    if LAYER in key or not any(LAYER in name for name in names):
        return source
    pattern = re.compile(re.escape(next(name for name in names if LAYER in name)).replace(re.escape(LAYER), r"(\d+)"))
    layers = sorted({int(match[1]) for name in theirs if (match := pattern.fullmatch(name))})
    each = len(names)

    def stack(*arrays: Any) -> Any:
        return jnp.stack([make(*arrays[i * each : (i + 1) * each]) for i in range(len(layers))])

    return tuple(name.replace(LAYER, str(layer)) for layer in layers for name in names) or names, stack
