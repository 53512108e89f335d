"""Run both modules as functions of the NNX parameters and the inputs, and compute their gradients."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict

from nnxmoe.layers.linear.kernel import flax_order
from nnxmoe.linen.mapping import Row
from nnxmoe.testing.parameters import Arrays, is_parameter
from nnxmoe.testing.record import Call, Tape, is_floating


class Arguments:
    """Inputs of both modules. Floating-point arrays are differentiated. All other inputs are constants."""

    def __init__(self, inputs: Sequence[Any]):
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(tuple(inputs))
        arrays = [(path, jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf) for path, leaf in leaves]
        self._leaves = {f"input {jax.tree_util.keystr(path)}": leaf for path, leaf in arrays}
        for name, leaf in self._leaves.items():
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise ValueError(f"{name} has a shape but no values: pass an array")
        self.floats = {name: leaf for name, leaf in self._leaves.items() if is_floating(leaf)}

    def with_floats(self, floats: Arrays) -> tuple[Any, ...]:
        """Return all inputs, with the floating-point arrays replaced."""
        return jax.tree.unflatten(self._tree, [floats.get(name, leaf) for name, leaf in self._leaves.items()])


class NNXSide:
    """NNX module as a function of its parameters (see `is_parameter`).

    Kernels of nnxmoe are in Flax's dimension order, ``[*ins, *outs]``.
    """

    def __init__(self, module: nnx.Module, call: Callable[..., Any]):
        self.call = call
        self.graph, state = nnx.split(module)
        self.flat = [("/".join(map(str, path)), path, variable) for path, variable in nnx.to_flat_state(state)]
        self.params: Arrays = {}
        self.orders: dict[str, tuple[int, ...]] = {}
        for name, _, variable in self.flat:
            if not is_parameter(variable):
                continue
            value = variable.get_value()
            if isinstance(value, jax.ShapeDtypeStruct):
                raise ValueError(f"the NNX parameter {name} has a shape but no values: create the module with rngs")
            self.orders[name] = flax_order(variable, range(value.ndim))
            self.params[name] = value.transpose(self.orders[name])

    def module(self, params: Mapping[str, Any]) -> Any:
        """Return a copy of the module with these parameters."""
        values = {name: value.transpose(np.argsort(self.orders[name])) for name, value in params.items()}
        filled = [(path, v.replace(values[name]) if name in values else v) for name, path, v in self.flat]
        return nnx.merge(self.graph, nnx.from_flat_state(filled))

    def __call__(self, params: Arrays, inputs: tuple[Any, ...], tape: Tape | None = None) -> Any:
        module = self.module(params)
        if tape is not None:
            tape.attach(module)
        return self.call(module, *inputs)


class LinenSide:
    """Linen module as a function of the NNX parameters. ``rows`` converts them to Linen parameters."""

    rows: dict[str, Row]

    def __init__(self, module: nn.Module, call: Callable[..., Any] | None, arguments: Arguments):
        self.module, self.call = module, call
        inputs = arguments.with_floats(arguments.floats)
        variables = jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs, method=call))
        if collections := sorted(variables.keys() - {"params"}):
            raise ValueError(
                f"the Linen module has variables in {', '.join(collections)}, but only parameters can be compared: "
                "pass a linen_call that creates no other variables (inference, no cache)"
            )
        self.shapes: Arrays = flatten_dict(meta.unbox(variables.get("params", {})), sep="/")

    def __call__(self, params: Arrays, inputs: tuple[Any, ...], tape: Tape | None = None) -> Any:
        with nn.intercept_methods(tape.intercept) if tape else contextlib.nullcontext():
            return self.apply({name: row(params) for name, row in self.rows.items()}, inputs)

    def apply(self, stored: Mapping[str, Any], inputs: tuple[Any, ...]) -> Any:
        """Call the module with Linen parameters."""
        return self.module.apply({"params": unflatten_dict(dict(stored), sep="/")}, *inputs, method=self.call)


def run(side: NNXSide | LinenSide, params: Arrays, arguments: Arguments) -> tuple[Any, list[Call]]:
    """Return the module's output and the calls of its submodules."""
    tape = Tape()
    run = jax.jit(lambda params, floats: side(params, arguments.with_floats(floats), tape))
    return jax.block_until_ready(run(params, arguments.floats)), tape.calls()


def compute_gradients(
    side: NNXSide | LinenSide, params: Arrays, arguments: Arguments, like: Any
) -> tuple[Arrays, Arrays]:
    """Differentiate a random weighted sum of all floating-point outputs.

    The gradients are with respect to parameters and inputs.
    """
    key, fixed = jax.random.key(0), {name: value for name, value in params.items() if not is_floating(value)}
    weights = [jax.random.normal(jax.random.fold_in(key, i), a.shape) for i, a in enumerate(jax.tree.leaves(like))]

    def weighted_sum(params: Arrays, floats: Arrays, weights: list[Any]) -> Any:
        outputs = jax.tree.leaves(side(params | fixed, arguments.with_floats(floats)))
        sums = (jnp.sum(weight * a) for weight, a in zip(weights, outputs, strict=True) if is_floating(a))
        return sum(sums, start=jnp.float32(0))  # integer outputs have no gradients

    trained = {name: value for name, value in params.items() if name not in fixed}
    return jax.jit(jax.grad(weighted_sum, argnums=(0, 1)))(trained, arguments.floats, weights)
