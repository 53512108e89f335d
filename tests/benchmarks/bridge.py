"""What the bridge costs, beside a layer written by hand in Linen and beside flax's own bridge around the same layer.

    python -m tests.benchmarks.bridge [--layers 16] [--repeat 15]

A Mixtral layer alone, in a list and scanned: tracing forward and backward, and what XLA makes of it. Times are medians
of processor time over alternating repetitions. Prints a Markdown table.
"""

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import jaxprs_in_params

from nnxmoe.models import MixtralConfig
from tests.support import linen_modules as hand

CONFIG = MixtralConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    max_position_embeddings=64,
    num_local_experts=8,
)


def by_hand(name: str) -> nn.Module:
    """Linen's own."""
    return hand.DecoderLayer(CONFIG, True, name=name)


def by_flax(name: str) -> nn.Module:
    """Flax's bridge around our layer."""
    return nnx.bridge.to_linen(hand.wrapped_layer(CONFIG, True).blueprint, name=name)


def by_us(name: str) -> nn.Module:
    """Our bridge around our layer."""
    return hand.wrapped_layer(CONFIG, True, name=name)


MAKERS: dict[str, Callable[[str], nn.Module]] = {"Linen": by_hand, "ToLinen": by_flax, "nnxmoe.linen": by_us}


@dataclasses.dataclass(frozen=True)
class Program:
    """Forward and backward of some layers, and what it is traced with."""

    module: nn.Module
    variables: Any
    x: Any

    def trace(self) -> Any:
        """Traced from nothing."""
        context = hand.context_of(CONFIG, self.x.shape[1])

        def loss(variables: Any, x: Any) -> Any:
            return jnp.sum(self.module.apply(variables, x, context) ** 2)

        return jax.jit(jax.value_and_grad(loss)).trace(self.variables, self.x)

    def compile(self, options: Any = None) -> Any:
        """Compiled, with options for XLA."""
        return self.trace().lower().compile(options)


def program(make: Callable[[str], nn.Module], count: int, scan: bool) -> Program:
    """One of the kinds, as many layers, with shapes for arrays."""
    module, x = hand.Layers(make, count, scan), jax.ShapeDtypeStruct((2, 16, CONFIG.hidden_size), jnp.float32)
    context = hand.context_of(CONFIG, x.shape[1])
    variables = jax.eval_shape(lambda key, x: module.init(key, x, context), jax.random.key(0), x)
    return Program(module, nn.meta.unbox(variables), x)


def instructions(compiled: Any) -> int:
    """Of a compiled program, those of its inner computations too."""
    return sum(" = " in line for line in compiled.as_text().splitlines())


def equations(jaxpr: Any) -> int:
    """Of a traced program, those of its inner ones too, without the names that a `Remat` looks for."""
    inner = (sub for equation in jaxpr.eqns for sub in jaxprs_in_params(equation.params))
    return sum(each.primitive.name != "name" for each in jaxpr.eqns) + sum(map(equations, inner))


def tracing(programs: dict[str, Program], repeat: int) -> dict[str, float]:
    """Milliseconds of processor time, alternating."""
    took: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeat + 1):
        for name, made in programs.items():
            gc.collect()
            start = time.process_time()
            made.trace()
            took[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(times[1:]) for name, times in took.items()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    print("| layers | by | trace, ms | to Linen's | temporary bytes | instructions |\n|---|---|---|---|---|---|")
    cases = {
        "1": (1, False),
        f"{options.layers} in a list": (options.layers, False),
        f"{options.layers} scanned": (options.layers, True),
    }
    for label, (count, scan) in cases.items():
        programs = {name: program(make, count, scan) for name, make in MAKERS.items()}
        times = tracing(programs, options.repeat)
        for name, made in programs.items():
            done, ratio = made.compile(), times[name] / times["Linen"]
            size = done.memory_analysis().temp_size_in_bytes
            print(f"| {label} | {name} | {times[name]:.1f} | {ratio:.2f} | {size} | {instructions(done)} |", flush=True)


if __name__ == "__main__":
    main()
