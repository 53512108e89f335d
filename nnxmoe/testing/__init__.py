"""Parity of an NNX module with a Linen module: parameter trees, outputs, gradients, and the first place they part.

    print(testing.assert_module_parity(nnx_module, linen_module, {"kernel": "kernel"}, (x,)))

The modules beside this file hold its parts: rows (parameters), record (calls), sides, compare.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from nnxmoe.testing import sides
from nnxmoe.testing.compare import compare_gradients, compare_outputs, pairs_of
from nnxmoe.testing.rows import Names, compare_trees


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """What was compared, and the largest differences (relative to an array's largest value, which counts as 1 or more).

    ``submodules``: calls of submodules on both sides with the same parameters.
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
    mapping: Names | None,
    inputs: Any,
    *,
    tolerance: float = 1e-5,
    nnx_call: Callable[..., Any] | None = None,
    linen_call: Callable[..., Any] | None = None,
) -> ParityReport:
    """Parameter trees, outputs and gradients of both; the Linen module gets the NNX module's parameters.

    ``mapping``: NNX parameter -> Linen parameter, ``{"q/kernel": "query/kernel"}``, or a pair of that and a function
    from our array to theirs; None: MaxText's names, for a model of ours. ``inputs``: the positional arguments.
    ``nnx_call``, ``linen_call``: ``(module, *inputs) -> what is compared``, where a plain call will not do.
    AssertionError says what differs and, layer by layer, where it begins. Gradients are those of the output's product
    with fixed random numbers, with respect to all parameters and floating-point inputs.
    """
    arguments = sides.Arguments(inputs if isinstance(inputs, tuple | list) else (inputs,))
    with jax.default_matmul_precision("highest"):
        ours = sides.Ours(nnx_module, nnx_call or (lambda module, *inputs: module(*inputs)))
        theirs = sides.Theirs(linen_module, linen_call, arguments)
        title = f"NNX {type(nnx_module).__name__} and Linen {type(linen_module).__name__} part"
        theirs.rows = compare_trees(title, nnx_module, ours.params, theirs.shapes, mapping)
        (output, calls), (their_output, their_calls) = (
            sides.run(side, ours.params, arguments) for side in (ours, theirs)
        )
        pairs = pairs_of(theirs.rows, calls, their_calls)
        apart = compare_outputs(title, output, their_output, pairs, theirs.rows, tolerance)
        grads = [sides.gradients(side, ours.params, arguments, output) for side in (ours, theirs)]
        gradient = compare_gradients(title, grads[0], grads[1], theirs.rows, calls, tolerance)
    return ParityReport(len(ours.params), len(pairs), apart, gradient, tolerance)
