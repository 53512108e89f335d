"""The mixture-of-experts layer beside the ideal: one dense gated network on as many rows, the same useful FLOPs.

    python -m tests.benchmarks.moe DIM WIDTH EXPERTS CHOSEN float32 [--tokens 512 4096]

Milliseconds forward, and forward with the gradients of x and all kernels, in turn in one process. Random tokens, others
at each call, and a random router, which is part of the layer but not of the ideal. One line of JSON.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import nnxmoe
from nnxmoe.layers.linear.kernel import ParamWeight
from nnxmoe.moe.block import MoE
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import SoftmaxTopK
from tests.benchmarks import engine
from tests.benchmarks.clock import interleaved

INPUTS = 8  # different ones, in turn; two if they are large


@dataclasses.dataclass(frozen=True)
class Shape:
    """D, F, E, X and the dtype of weights and activations."""

    dim: int
    width: int
    experts: int
    chosen: int
    dtype: str

    def __str__(self) -> str:
        return f"D={self.dim} F={self.width} E={self.experts} X={self.chosen} {self.dtype}"

    def flops(self, tokens: int) -> int:
        """Useful ones of the forward; the backward has twice as many."""
        return 6 * self.dim * self.width * self.chosen * tokens


def dot(x: Array, y: Array) -> Array:
    """In the operands' dtype, accumulated in float32."""
    return jnp.dot(x, y, preferred_element_type=jnp.float32).astype(x.dtype)


def gated(gate: Array, up: Array) -> Array:
    """SwiGLU's product."""
    return jax.nn.silu(gate) * up


def dense(kernels: Sequence[Array], x: Array) -> Array:
    """The ideal: three products."""
    gate, up, down = kernels
    return dot(gated(dot(x, gate), dot(x, up)), down)


def dense_gradients(kernels: Sequence[Array], x: Array, dy: Array) -> Any:
    """Its forward and backward by hand, three products and six: JAX's own would cast bfloat16 operands to float32."""
    gate, up, down = kernels
    hidden, pull = jax.vjp(gated, dot(x, gate), dot(x, up))
    d_gate, d_up = pull(dot(dy, down.T))
    d_kernels = dot(x.T, d_gate), dot(x.T, d_up), dot(hidden.T, dy)
    return dot(hidden, down), d_kernels, dot(d_gate, gate.T) + dot(d_up, up.T)


class Layer:
    """One layer with random weights; each call of ``run`` and ``ideal`` has other tokens and, if ideal, weights."""

    def __init__(self, shape: Shape, strategy: nnxmoe.Strategy):
        rngs, dtype = nnx.Rngs(0), jnp.dtype(shape.dtype)
        router = Router(shape.dim, shape.experts, SoftmaxTopK(shape.chosen), bias=False, dtype=dtype, rngs=rngs)
        experts = Experts(shape.dim, shape.width, shape.experts, matmul=strategy.matmul, dtype=dtype, rngs=rngs)
        graph, self.params = nnx.split(MoE(router, experts, strategy.dispatch, shared=None))
        self.shape = shape
        first = range(min(shape.experts, INPUTS))
        kernels = [ParamWeight(kernel).read() for kernel in (experts.gate, experts.up, experts.down)]
        self.kernels = [[kernel.expert(e).dense() for kernel in kernels] for e in first]

        def forward(params: Any, x: Array) -> Array:
            return nnx.merge(graph, params)(x)[0]

        def gradients(params: Any, x: Array, dy: Array) -> Any:
            y, pull = jax.vjp(forward, params, x)
            return y, pull(dy)

        self.forward, self.gradients = jax.jit(forward), jax.jit(gradients)
        self.dense, self.dense_gradients = jax.jit(dense), jax.jit(dense_gradients)

    def inputs(self, rows: int) -> list[Array]:
        """``[1, rows, D]``, different ones."""
        keys = jax.random.split(jax.random.key(rows), INPUTS if rows <= 512 else 2)
        return [jax.random.normal(key, (1, rows, self.shape.dim), jnp.float32).astype(self.shape.dtype) for key in keys]

    def time(
        self, tokens: int, times: int, at_most: float, only: str | None = None
    ) -> dict[str, dict[str, list[float]]]:
        """Measure the layer and the ideal: seconds per forward pass, and per forward and backward pass.

        ``only`` selects one of the two.
        """
        inputs, rows = self.inputs(tokens), [x[0] for x in self.inputs(tokens * self.shape.chosen)]

        def ours(i: int) -> tuple[Any, Array]:
            return self.params, inputs[i % len(inputs)]

        def ideal(i: int) -> tuple[Any, Array]:
            return self.kernels[i % len(self.kernels)], rows[i % len(rows)]

        calls = {
            "forward": {"nnxmoe": lambda i: self.forward(*ours(i)), "ideal": lambda i: self.dense(*ideal(i))},
            "forward and backward": {
                "nnxmoe": lambda i: self.gradients(*ours(i), inputs[0]),
                "ideal": lambda i: self.dense_gradients(*ideal(i), rows[0]),
            },
        }
        return {name: interleaved(runs, times, at_most) for name, runs in calls.items() if only in (None, name)}


def measure(shape: Shape, tokens: Sequence[int], times: int = 20, at_most: float = 2.0) -> Iterator[tuple[str, Any]]:
    """Name -> median milliseconds of each side."""
    layer = Layer(shape, nnxmoe.Strategy.auto())
    for count in tokens:
        for name, took in layer.time(count, times, at_most).items():
            yield f"moe {name} T={count}, ms", {side: 1e3 * median(values) for side, values in took.items()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("dim", "width", "experts", "chosen"):
        parser.add_argument(name, type=int)
    parser.add_argument("dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    options = parser.parse_args()
    shape = Shape(options.dim, options.width, options.experts, options.chosen, options.dtype)
    found = dict(measure(shape, options.tokens))
    values, limits = ({name: sides[side] for name, sides in found.items()} for side in ("nnxmoe", "ideal"))
    engine.say(values, limits=limits)


if __name__ == "__main__":
    main()
