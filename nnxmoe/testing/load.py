"""Load Linen parameters into any NNX module, with a mapping from NNX names to Linen names."""

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
from nnxmoe.testing.parameters import is_parameter


def load_linen(module: nnx.Module, params: Mapping[str, Any], mapping: Mapped) -> None:
    """Set all parameters of an NNX module to the parameters of a Linen module.

    Values are cast to the dtypes of the module and placed on its devices.

    Args:
        module: Any NNX module, including an abstract module (``nnx.eval_shape``). Random state, arrays outside of
            variables, and variables without an array do not change. For models of nnxmoe use
            `nnxmoe.linen.from_linen`.
        params: The Linen tree, boxed or not, with or without the collection ``params``.
        mapping: Dict from the path of an NNX parameter, ``blocks/{layer}/up/kernel``, to a Linen name,
            or to a pair of one or several Linen names and a function from these arrays to the NNX
            array, as for `nnxmoe.linen.from_linen`. ``{layer}`` matches any number in the module's
            paths. If only the NNX path has ``{layer}``, the Linen array has the layers on axis 0, as
            with ``nn.scan``. If only the Linen name has ``{layer}``, the layers are stacked on axis 0,
            as with ``nnx.scan`` and ``nnx.vmap``. Dimensions are split and merged as needed.
            `nnxmoe.linen.propose_mapping` proposes a mapping.

    Raises:
        ValueError: The tree does not fit. The message lists up to 20 problems: parameters without a row, missing
            arrays, unused arrays, and arrays of a wrong shape or type. The module is unchanged.
    """
    if not isinstance(module, nnx.Module) or isinstance(module, CausalLM):
        raise ValueError(
            f"module is a {type(module).__name__}: pass your own NNX module; for nnxmoe's models, use linen.from_linen"
        )
    if not isinstance(mapping, Mapping):
        raise ValueError(f"the mapping is a {type(mapping).__name__}: pass a dict from NNX names to names in the tree")
    linen_arrays, state = flat(params), nnx.to_flat_state(nnx.state(module))
    variables = {"/".join(map(str, path)): (path, leaf) for path, leaf in state if is_parameter(leaf)}
    target_shapes = {name: tuple(flax_order(variable, variable.shape)) for name, (_, variable) in variables.items()}
    rows, errors = read_mapping(_Stacked(mapping, linen_arrays), target_shapes, linen_arrays, _general_name(mapping))
    errors += [
        f"{name} has a shape but no values" for name, a in linen_arrays.items() if isinstance(a, jax.ShapeDtypeStruct)
    ]
    values: list[tuple[Any, nnx.Variable]] = []
    for name, row in {} if errors else rows.items():
        path, variable = variables[name]
        current, order = variable.get_value(), flax_order(variable, range(len(target_shapes[name])))
        try:
            value = jnp.asarray(row(linen_arrays)).transpose(np.argsort(order))
        except ValueError as error:
            errors.append(str(error))
            continue
        if not any(
            jnp.issubdtype(value.dtype, number_type) and jnp.issubdtype(current.dtype, number_type)
            for number_type in _KINDS
        ):
            errors.append(
                f"{name} has dtype {current.dtype}, but the value from {' and '.join(row.sources)} has dtype "
                f"{value.dtype}"
            )
        value = value.astype(current.dtype)
        values.append((path, variable.replace(jax.device_put(value, getattr(current, "sharding", None)))))
    check_faults(errors + unused(rows, linen_arrays), type(module).__name__)
    nnx.update(module, nnx.from_flat_state(values))


_KINDS = (jnp.floating, jnp.integer, jnp.bool_, jnp.complexfloating)


def _general_name(mapping: Mapped) -> Callable[[str], tuple[str, int | None]]:
    """Return a function that maps a parameter name to (matching key of the mapping, layer number)."""
    patterns = {key: re.compile(re.escape(key).replace(re.escape(LAYER), r"(\d+)")) for key in mapping if LAYER in key}

    def general(name: str) -> tuple[str, int | None]:
        matches = ((key, match) for key, pattern in patterns.items() if (match := pattern.fullmatch(name)))
        return next(((key, int(match[1])) for key, match in matches), (name, None))

    return general


class _Stacked(dict[str, Source]):
    """Mapping whose rows stack all layers if only the Linen name has ``{layer}``."""

    def __init__(self, mapping: Mapped, theirs: Mapping[str, Any]):
        super().__init__({key: _stacked(key, source, theirs) for key, source in mapping.items()})
        self.candidates = getattr(mapping, "candidates", {})


def _stacked(key: str, source: Source, linen_arrays: Mapping[str, Any]) -> Source:
    names, convert = (source, lambda array: array) if isinstance(source, str) else checked_pair(key, source)
    names = (names,) if isinstance(names, str) else tuple(names)
    if LAYER in key or not any(LAYER in name for name in names):
        return source
    pattern = re.compile(re.escape(next(name for name in names if LAYER in name)).replace(re.escape(LAYER), r"(\d+)"))
    layers = sorted({int(match[1]) for name in linen_arrays if (match := pattern.fullmatch(name))})
    num_names = len(names)

    def stack(*arrays: Any) -> Any:
        return jnp.stack([convert(*arrays[i * num_names : (i + 1) * num_names]) for i in range(len(layers))])

    return tuple(name.replace(LAYER, str(layer)) for layer in layers for name in names) or names, stack
