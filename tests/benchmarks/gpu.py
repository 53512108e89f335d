"""On an accelerator: the mixture-of-experts layer beside dense products, whole models beside transformers.

    python -m tests.benchmarks.gpu [--tokens 4096 8192 16384] [--only layers models quantized] [--repeats N]

TFLOP/s of one layer of Mixtral-8x7B and one of DeepSeek-V3, forward, and forward and backward, with each grouped
product that runs here; the limit is plain products of the same useful FLOPs. Then two random models, whole, as in
``python -m tests.benchmarks``; the limit of decoding is the bandwidth of a copy. Last, decoding with the shapes of
Mixtral-8x7B and random int8 and int4 codes, at batch 1, 8 and 64.
"""

import argparse
import importlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nnxmoe
from nnxmoe.config.base import DecoderConfig
from nnxmoe.convert.core.layout import parameters
from nnxmoe.generation.decode import generate_tokens
from nnxmoe.kernels import tokamax
from nnxmoe.layers.quantized import QuantizedArray
from nnxmoe.models import PRESETS, model_class
from nnxmoe.moe.grouped_matmul import GroupedMatmul
from nnxmoe.quantization.methods import Method, parse
from nnxmoe.quantization.quantize import quantize_shapes
from tests.benchmarks.models import MIDSIZE, Fields
from tests.benchmarks.moe import Layer, Shape
from tests.benchmarks.ours import Ours
from tests.benchmarks.plan import Plan, measure
from tests.benchmarks.processes import Job, have_transformers
from tests.benchmarks.results import Record, table

KINDS = ["models", "layers", "quantized"]
LAYERS = {
    "Mixtral-8x7B layer": Shape(4096, 14336, 8, 2, "bfloat16"),
    "DeepSeek-V3 layer": Shape(7168, 2048, 256, 8, "bfloat16"),
}
_WIDE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}
MODELS: dict[str, Fields] = {  # 2.0 and 3.3 billion parameters: their weights are what a step of decoding waits for
    "llama": MIDSIZE["llama"] | _WIDE | {"intermediate_size": 14336},
    "mixtral": MIDSIZE["mixtral"] | _WIDE | {"intermediate_size": 7168},
}


def matmuls() -> dict[str, GroupedMatmul]:
    """What is installed, by name; the default of this backend first."""
    found: list[GroupedMatmul] = [nnxmoe.Strategy.auto().matmul, nnxmoe.Blocked(), nnxmoe.RaggedDot()]
    if tokamax.installed():
        found += [tokamax.Tokamax(), tokamax.Tokamax("triton"), tokamax.Tokamax("mosaic")]
    return {str(matmul): matmul for matmul in found}


def layer_speeds(name: str, shape: Shape, tokens: Sequence[int], times: int) -> Iterator[Record]:
    """TFLOP/s with each grouped product; one that fails is recorded with its reason."""
    for label, matmul in matmuls().items():
        case = f"{name}, {label} {shape.dtype}"
        for count in tokens:
            key = f"{case} | T={count}"
            try:
                took = Layer(shape, nnxmoe.Strategy(matmul=matmul)).time(count, times, at_most=10.0)
            except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
                yield Record(key, case, "ours", error=f"{type(error).__name__}: {str(error)[:200]}")
                continue
            values, limits = (
                {
                    f"moe {what} T={count}, TFLOP/s": factor * shape.flops(count) / 1e12 / median(took[what][side])
                    for what, factor in (("forward", 1), ("forward and backward", 3))
                }
                for side in ("nnxmoe", "ideal")
            )
            yield Record(key, case, "ours", values, limits)


def random_model(config: DecoderConfig, method: Method) -> nnxmoe.CausalLM:
    """A quantised model in bfloat16 with random codes, made where it is computed."""
    model = model_class(config)(config, rngs=None, dtype="bfloat16")
    quantize_shapes(model, method, "bfloat16")

    def values(number: int, variable: nnx.Variable) -> jax.Array:
        key, shape = jax.random.key(number), variable.shape
        if isinstance(variable, QuantizedArray):
            integers = jnp.issubdtype(variable.dtype, jnp.integer)
            made = jax.random.bits(key, shape, jnp.uint8) if integers else jnp.full(shape, 2.0**-10)
            return made.view(variable.dtype) if integers else made.astype(variable.dtype)
        return (0.02 * jax.random.normal(key, shape)).astype(variable.dtype)

    flat = [(p, v.replace(jax.jit(lambda i=i, v=v: values(i, v))())) for i, (p, v) in enumerate(_flat(model))]
    nnx.update(model, nnx.from_flat_state(flat))
    return model


def _flat(model: nnxmoe.CausalLM) -> list[tuple[tuple[str, ...], nnx.Variable]]:
    return list(nnx.to_flat_state(nnx.state(model)))


def quantized_speeds(
    name: str, config: DecoderConfig, methods: Sequence[str], batches: Sequence[int], rate: float, steps: int = 48
) -> Iterator[Record]:
    """Tokens per second by the median step; the limit reads the chosen experts and all other weights once per step, at
    ``rate`` GB/s. What fails, such as a model that does not fit, is recorded with its reason."""
    for method in methods:
        case = f"{name} in {method} bfloat16"
        try:
            model = random_model(config, parse(method))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            yield Record(case, case, "ours", error=f"{type(error).__name__}: {str(error)[:200]}")
            continue
        for batch in batches:
            what = f"decode batch {batch}, tok/s"
            ids = np.random.default_rng(batch).integers(0, config.vocab_size, (batch, 16))
            try:
                stamps = [time.perf_counter() for _ in generate_tokens(model, ids, None, 16 + steps, None, 0)]
            except jax.errors.JaxRuntimeError as error:
                yield Record(f"{case} | {what}", case, "ours", error=f"{type(error).__name__}: {str(error)[:200]}")
                continue
            speed = batch / median(np.diff(stamps)[15:])
            yield Record(f"{case} | {what}", case, "ours", {what: speed}, {what: batch * rate / _read(model, batch)})
        del model


def _read(model: nnxmoe.CausalLM, batch: int) -> float:
    """GB of weights that a step needs, if every row chooses its experts at random."""
    total = 0.0
    for parameter in parameters(model, codes=True):
        chance = model.config.experts_per_token / parameter.experts if parameter.experts else 1.0
        size = math.prod(parameter.shape) * parameter.variable.dtype.itemsize
        total += 0 if parameter.key.startswith("embed") else size * (1 - (1 - chance) ** batch)
    return total / 1e9


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--repeats", type=int, default=3, help="processes per side (default 3)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append a JSON line per process of the models")
    options = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the processes share the device's memory with this one
    if jax.default_backend() == "cpu":
        sys.exit("tests.benchmarks.gpu needs an accelerator that JAX sees; on CPU: python -m tests.benchmarks")
    failed = 0
    if "models" in options.only:
        sides = ["ours", *["transformers"] * _torch_here()]
        with tempfile.TemporaryDirectory() as folder:
            plan = Plan(Path(folder), dict.fromkeys(sides, sys.executable), options.repeats, quick=False)
            failed = measure(whole_models(plan, MODELS), options.out)
    if "layers" in options.only:
        print(table([record for n, s in LAYERS.items() for record in layer_speeds(n, s, options.tokens, 10)]))
    if "quantized" in options.only:
        rate = Ours.copy()
        assert rate is not None
        found = quantized_speeds("Mixtral-8x7B", PRESETS["mixtral-8x7b"], ("int8", "int4"), (1, 8, 64), rate)
        print(table(list(found)))
    return failed


def whole_models(plan: Plan, models: Mapping[str, Fields]) -> Iterator[Job]:
    """The machine, then prefill and decoding of each model."""
    for i, (name, fields) in enumerate(models.items()):
        yield from plan.model(name, fields, [*["machine"] * (i == 0), "prefill", "decode"])


def _torch_here() -> bool:
    """Whether torch computes on this device; prints why not."""
    if not have_transformers():
        print("transformers is not installed", file=sys.stderr)
    elif importlib.import_module("torch").cuda.is_available():
        return True
    else:
        print("torch does not see this device", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main())
