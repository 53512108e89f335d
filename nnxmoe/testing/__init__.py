"""Parity tests of NNX and Linen modules, which compare parameter trees, outputs and gradients.

    print(testing.assert_module_parity(nnx_module, linen_module, {"kernel": "kernel"}, (x,)))

`load_linen` loads the parameters of a Linen module into an NNX module. `compare` compares the logits and the routing of
two language models.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from nnxmoe.config.validate import real_number
from nnxmoe.linen.mapping import Mapped
from nnxmoe.testing import explain, sides
from nnxmoe.testing.differences import compare_gradients, compare_outputs, pair_calls
from nnxmoe.testing.load import load_linen as load_linen
from nnxmoe.testing.model_comparison import Comparison as Comparison
from nnxmoe.testing.model_comparison import compare as compare
from nnxmoe.testing.model_outputs import Recorded as Recorded
from nnxmoe.testing.parameters import Names, compare_trees


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """Number of compared arrays and their largest differences.

    Differences are relative to an array's largest absolute value, or to 1 if that value is smaller.

    Attributes:
        submodules: Number of calls of submodules that have the same parameters on both sides.
    """

    parameters: int
    submodules: int
    output: float
    gradient: float
    tolerance: float

    def __str__(self) -> str:
        return (
            f"parity: {self.parameters} parameters, {self.submodules} calls of submodules; outputs within "
            f"{self.output:.1e}, gradients within {self.gradient:.1e} (tolerance {self.tolerance:.1e})"
        )


def assert_module_parity(
    nnx_module: nnx.Module,
    linen_module: nn.Module,
    mapping: Names | Mapped | None,
    inputs: Any,
    *,
    tolerance: float = 1e-5,
    nnx_call: Callable[..., Any] | None = None,
    linen_call: Callable[..., Any] | None = None,
) -> ParityReport:
    """Compare the parameter trees, outputs and gradients of an NNX and a Linen module.

    Both modules are run with the NNX module's parameters. Gradients are computed for a fixed random
    projection of the output, with respect to all parameters and floating-point inputs.

    Args:
        mapping: NNX parameter -> Linen parameter, ``{"q/kernel": "query/kernel"}``, or a pair of the
            name and a function from the NNX array to the Linen array. A tuple of NNX parameters maps to
            one Linen array, ``{("q/kernel", "k/kernel"): ("qk/kernel", lambda q, k: …)}``. An NNX
            parameter maps to a list if Linen splits it. ``{layer}`` matches any number. A whole model
            also accepts a mapping for `nnxmoe.linen.from_linen` (``layers/{layer}/…``), whose functions
            are inverted, or None for MaxText's names. See `nnxmoe.linen.propose_mapping`.
        inputs: Positional arguments of both modules.
        nnx_call, linen_call: ``(module, *inputs) -> output to compare``. Defaults to calling the module.

    Raises:
        AssertionError: The modules differ. The message lists up to 40 differences of the trees, or the first
            submodule that differs. It may also name two swapped Linen parameters, or the step of an MoE
            block that differs.
        ValueError: The modules cannot be compared, or cannot be called with these inputs.
    """
    tolerance = _check(nnx_module, linen_module, mapping, tolerance)
    arguments = sides.Arguments(inputs if isinstance(inputs, tuple | list) else (inputs,))
    title = f"NNX {type(nnx_module).__name__} and Linen {type(linen_module).__name__} differ"
    try:
        with jax.default_matmul_precision("highest"):
            nnx_side = sides.NNXSide(nnx_module, nnx_call or (lambda module, *inputs: module(*inputs)))
            linen_side = sides.LinenSide(linen_module, linen_call, arguments)
            rows = linen_side.rows = compare_trees(title, nnx_module, nnx_side.params, linen_side.shapes, mapping)
            out, calls = sides.run(nnx_side, nnx_side.params, arguments)
            their_out, their_calls = sides.run(linen_side, nnx_side.params, arguments)
            pairs = pair_calls(rows, calls, their_calls)
            try:
                worst = compare_outputs(title, out, their_out, pairs, rows, tolerance)
            except AssertionError as error:
                if list(map(jnp.shape, jax.tree.leaves(out))) != list(map(jnp.shape, jax.tree.leaves(their_out))):
                    raise  # shapes differ, so values cannot be compared
                causes = explain.find_exchange(linen_side, nnx_side.params, arguments, out, tolerance)
                causes = causes or explain.explain_routing(nnx_side, nnx_side.params, pairs, tolerance)
                raise AssertionError("\n  ".join([str(error), *causes])) from None
            grads = [sides.compute_gradients(side, nnx_side.params, arguments, out) for side in (nnx_side, linen_side)]
            gradient = compare_gradients(title, grads, rows, calls, tolerance)
    except AssertionError as error:
        raise error.with_traceback(None) from None  # the message explains the error, the traceback does not
    except TypeError as error:
        if "argument: 'context'" not in str(error):
            raise
        example = "nnx_call=lambda module, x: module(x, nnxmoe.Context.from_lengths(config.rope, batch, length))[0]"
        raise ValueError(f"{error}, which has the positions of the tokens: pass {example}") from None
    return ParityReport(len(nnx_side.params), len(pairs), worst, gradient, tolerance)


def _check(nnx_module: Any, linen_module: Any, mapping: Any, tolerance: Any) -> float:
    for name, value, module_class in (
        ("nnx_module", nnx_module, nnx.Module),
        ("linen_module", linen_module, nn.Module),
    ):
        if not isinstance(value, module_class):
            base = module_class.__module__.partition(".")[2].partition(".")[0]
            raise ValueError(f"{name} is a {type(value).__name__}: pass an instance of {base}.Module")
    if mapping is not None and not isinstance(mapping, Mapping):
        raise ValueError(f"mapping is a {type(mapping).__name__}: pass a dict of names, or None for MaxText's names")
    return real_number("tolerance", tolerance, 0)
