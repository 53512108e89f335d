"""How the temporary bytes of a training step grow with its layers, scanned and computed again in the backward pass.

    python -m tests.benchmarks.growth [--layers 4 8 16 32] [--dtype float32] [--accumulate 1] [--plot growth.png]

For tiny models: the bytes of the compiled step, and of what each layer adds, beside the bytes
of its input, which the backward starts from, and of its gradients in float32. All gradients are there at once, because
an update is made only where all of them are finite; parts of a batch (``--accumulate``) add theirs to the sum so far.

XLA:CPU of jax 0.10 turns a stack of bfloat16 into one of float32 to read it: there inputs cost 4 bytes a number, not 2.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import nnxmoe
from nnxmoe.models import config_from_hf, model_class
from nnxmoe.train.loop.step import Step
from tests.benchmarks.models import TINY

BATCH, LENGTH = 4, 128
# Not those with a single layer between others of another kind: XLA:CPU drops the barrier between its two computations,
# and keeps its activations. Layers in a loop are computed twice everywhere.
KINDS = tuple(kind for kind in TINY if kind != "qwen3_5")


@dataclasses.dataclass(frozen=True)
class Growth:
    """Temporary bytes by number of layers; bytes of a layer's input and of its gradients."""

    temporary: dict[int, int]
    inputs: int
    gradients: int

    @property
    def layer(self) -> float:
        """Bytes that a layer adds, between the fewest and the most."""
        few, many = min(self.temporary), max(self.temporary)
        return (self.temporary[many] - self.temporary[few]) / (many - few)


def step_of(kind: str, layers: int, dtype: Any, accumulate: int) -> Step:
    """The training step of a model without arrays."""
    config = config_from_hf(TINY[kind] | {"num_hidden_layers": layers})
    strategy = nnxmoe.Strategy(stacking=nnxmoe.Scanned(), remat=nnxmoe.Remat(), compute_dtype=dtype)
    model = model_class(config)(config, strategy, rngs=None)
    return Step(model, optax.sgd(0.1), accumulate=accumulate)


def measure(
    kind: str, counts: Sequence[int], dtype: Any = jnp.float32, accumulate: int = 1, length: int = LENGTH
) -> Growth:
    """Compiles a step for each number of layers; a part of a batch has the same shape however many there are."""
    batch = {"tokens": jax.ShapeDtypeStruct((BATCH * accumulate, length), jnp.int32)}
    temporary, parameters = {}, {}
    for layers in counts:
        step = step_of(kind, layers, dtype, accumulate)
        state = step.shapes()
        program = step._run.jitted.lower(state, batch).compile({"xla_backend_optimization_level": 0})  # read, not run
        temporary[layers] = program.memory_analysis().temp_size_in_bytes
        parameters[layers] = sum(4 * a.size for a in jax.tree.leaves(state.params))
    few, many = min(counts), max(counts)
    gradients = (parameters[many] - parameters[few]) // (many - few)
    return Growth(temporary, BATCH * length * TINY[kind]["hidden_size"] * jnp.dtype(dtype).itemsize, gradients)


def plot(found: dict[str, Growth], file: Path) -> None:
    """Temporary bytes beyond those of the fewest layers, beside what inputs and gradients come to."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(found), figsize=(4 * len(found), 3.2), squeeze=False)
    for axes, (kind, growth) in zip(panels[0], found.items(), strict=True):
        counts = list(growth.temporary)
        more = [(count - counts[0]) / 1e6 for count in counts]
        base = growth.temporary[counts[0]] / 1e6
        axes.plot(counts, [growth.temporary[n] / 1e6 for n in counts], "o-", label="temporary bytes")
        axes.plot(
            counts, [base + n * (growth.inputs + growth.gradients) for n in more], ":", label="inputs + gradients"
        )
        axes.plot(counts, [base + n * growth.inputs for n in more], "--", label="inputs alone")
        axes.set(title=kind, xlabel="layers", ylabel="MB", xticks=counts)
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(file)


def main() -> int:
    """Prints a table, and draws it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--dtype", default="float32", help="of the activations (default float32)")
    parser.add_argument("--accumulate", type=int, default=1, help="parts of a batch (default 1)")
    parser.add_argument("--plot", type=Path, help="a picture")
    options = parser.parse_args()
    print(
        f"| model | {' | '.join(f'{n} layers' for n in options.layers)} | a layer | its input | its gradients | rest |"
    )
    print("|---" * (len(options.layers) + 5) + "|")
    found = {}
    for kind in KINDS:
        growth = found[kind] = measure(kind, options.layers, options.dtype, options.accumulate)
        rest = growth.layer - growth.inputs - growth.gradients
        sizes = " | ".join(str(size) for size in growth.temporary.values())
        print(
            f"| {kind} | {sizes} | {growth.layer:.0f} | {growth.inputs} | {growth.gradients} | {rest:.0f} |", flush=True
        )
    if options.plot is not None:
        plot(found, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
