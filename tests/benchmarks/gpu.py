"""On an accelerator: prefill, decoding, MoE layers, attention, the engine, training, and models beside transformers.

    python -m tests.benchmarks.gpu --part 1    # prefill, decoding
    python -m tests.benchmarks.gpu --part 2    # numbers, attention, layers, engine, training, start
    python -m tests.benchmarks.gpu [--minutes 9] [--only numbers models …]

| kind | measurement | limit |
|---|---|---|
| numbers | agreement with the oracle (`tests.benchmarks.agreement`) | |
| prefill | Llama-3.1-8B by the model, ``generate`` and an engine | useful FLOPs at the speed of a large product |
| decoding | steps of models with random weights in bfloat16, int8 and int4 | weights read at the bandwidth of a copy |
| attention | causal attention with grouped heads, and with the widths of MLA | the speed of a large product |
| layers | a layer of Mixtral-8x7B and of DeepSeek-V3 with each grouped matmul | a dense network with the same FLOPs |
| engine | 256 requests of mixed lengths | |
| training | a step of all parameters, of LoRA and of QLoRA | useful FLOPs at the speed of a large product |
| start | seconds from the start of a process to its first token, without and with a compile cache | |
| models | two random models, whole, as in ``python -m tests.benchmarks`` | |

No measurement starts after ``--minutes``. In a part, each kind also has its own deadline. Failed measurements are
listed with the reason: for example, a kernel does not support this device, or a model does not fit in memory.
"""

import argparse
import dataclasses
import functools
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from nnxmoe.models import PRESETS, config_from_hf
from tests.benchmarks import agreement
from tests.benchmarks.clock import interleaved
from tests.benchmarks.engine import age
from tests.benchmarks.gpu_kernels import Measurement, MosaicMatmul, attention_speeds, layer_speeds, matmuls
from tests.benchmarks.gpu_models import (
    adapter_speed,
    decoding_speeds,
    engine_speed,
    first_token_times,
    prefill_speeds,
    training_speed,
)
from tests.benchmarks.models import MIDSIZE, Fields
from tests.benchmarks.moe import Shape
from tests.benchmarks.ours import Ours
from tests.benchmarks.plan import Plan, measure
from tests.benchmarks.processes import Job, have_transformers
from tests.benchmarks.results import Record, table
from tests.support.tiny import TINY

KINDS = ["numbers", "prefill", "decoding", "attention", "layers", "engine", "training", "start", "models"]
# Part -> kind -> fraction of --minutes after which no measurement of this kind starts.
DEADLINES = {
    1: {"prefill": 0.45, "decoding": 1.0},
    2: {"numbers": 0.15, "attention": 0.35, "layers": 0.55, "engine": 0.7, "training": 0.75, "start": 0.9},
}
_WIDE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}
MODELS: dict[str, Fields] = {  # 2.0 and 3.3 billion parameters: a decoding step waits for the weights
    "llama": MIDSIZE["llama"] | _WIDE | {"intermediate_size": 14336},
    "mixtral": MIDSIZE["mixtral"] | _WIDE | {"intermediate_size": 7168},
}
_TRAINED = {"hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8}
_SMALL = {"torch_dtype": "float32"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Models and shapes of the measurements. The defaults are real models, for a device with 141 GB."""

    configs: Mapping[str, Any]
    prefilled: str = "llama-3.1-8b"
    prefill: tuple[tuple[int, int], ...] = ((1, 512), (1, 2048), (1, 8192), (4, 512), (16, 512), (4, 2048), (16, 2048),
                                            (4, 8192), (16, 8192))  # fmt: skip
    decoded: tuple[tuple[str, tuple[str | None, ...]], ...] = (
        ("llama-3.1-8b", (None,)),
        ("mixtral-8x7b", (None, "int8", "int4")),
        ("qwen3-30b-a3b", (None,)),
        ("qwen3.5-35b-a3b", (None,)),
        ("deepseek-v2-lite", (None,)),
        ("llama-3.1-8b", ("int8", "int4")),
    )
    batches: tuple[int, ...] = (1, 8, 64)
    steps: int = 48
    attention: tuple[int, ...] = (4096, 16384, 2048, 512)
    heads: tuple[tuple[int, int, tuple[int, int]], ...] = ((32, 8, (128, 128)), (128, 128, (192, 128)))
    layers: Mapping[str, Shape] = dataclasses.field(
        default_factory=lambda: {
            "Mixtral-8x7B layer": Shape(4096, 14336, 8, 2, "bfloat16"),
            "DeepSeek-V3 layer": Shape(7168, 2048, 256, 8, "bfloat16"),
        }
    )
    tokens: tuple[int, ...] = (4096, 16384)
    requests: tuple[int, int] = (256, 64)  # number of requests, slots
    served: tuple[str, ...] = ("llama-3.1-8b", "qwen3-30b-a3b")
    trained: Mapping[str, Fields] = dataclasses.field(
        default_factory=lambda: {  # 0.6 and 1.0 billion parameters
            "llama": MIDSIZE["llama"] | _TRAINED | {"intermediate_size": 5632, "torch_dtype": "bfloat16"},
            "mixtral": MIDSIZE["mixtral"] | _TRAINED | {"intermediate_size": 2048, "torch_dtype": "bfloat16"},
        }
    )
    batch: tuple[int, int] = (2, 2048)
    product: int = 8192


REAL = Sizes(PRESETS)
SMALL = Sizes(
    {name: config_from_hf(TINY[name]) for name in ("llama", "mixtral")},
    "llama", ((1, 8), (2, 16)), (("mixtral", (None, "int4:4", "int4:3")),), (1, 2), 4, (32,), ((4, 2, (16, 16)),),
    {"tiny": Shape(64, 32, 4, 2, "float32")}, (4,), (4, 2), ("mixtral",),
    {"llama": TINY["llama"] | _SMALL}, (2, 8), 256,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TimeLimit:
    """Seconds since the start of the process, and the deadlines of kinds as fractions of ``minutes``."""

    started: float
    minutes: float
    deadlines: Mapping[str, float]

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def remaining(self) -> float:
        return max(60 * self.minutes - self.elapsed(), 1.0)

    def is_late(self, kind: str) -> bool:
        """Whether no further measurement of a kind may start. If so, prints that some are left."""
        if self.elapsed() < 60 * self.minutes * self.deadlines[kind]:
            return False
        print(f"{kind}: not all measured, {self.deadlines[kind]:.0%} of --minutes {self.minutes:g} are over")
        return True


def measurements(
    kind: str, sizes: Sizes, rate: float, flops: float, remaining: Callable[[], float]
) -> Generator[Measurement, None, None]:
    """Yield the measurements of a kind.

    Args:
        kind: One of `KINDS`.
        sizes: Models and shapes.
        rate: GB/s of a copy.
        flops: FLOP/s of a large product.
        remaining: Returns the remaining seconds of this run.
    """
    if kind == "prefill":
        yield from prefill_speeds(sizes.prefilled, sizes.configs[sizes.prefilled], sizes.prefill, flops)
    if kind == "decoding":
        for name, methods in sizes.decoded:
            yield from decoding_speeds(name, sizes.configs[name], methods, sizes.batches, rate, sizes.steps)
    if kind == "attention":
        for tokens in sizes.attention:
            for heads, kv_heads, widths in sizes.heads:
                yield from attention_speeds(tokens, heads, kv_heads, widths, flops, 10)
    if kind == "layers":
        kernels = matmuls() | {"JAX mosaic": MosaicMatmul()}
        for name, shape in sizes.layers.items():
            yield from layer_speeds(name, shape, sizes.tokens, 10, kernels)
    if kind == "engine":
        for name in sizes.served:
            yield engine_speed(name, sizes.configs[name], None, *sizes.requests)
    if kind == "training":
        for method in (None, "int4:4" if sizes is SMALL else "int4"):
            yield adapter_speed(sizes.prefilled, sizes.configs[sizes.prefilled], method, *sizes.batch, flops)
        for name, fields in sizes.trained.items():
            yield training_speed(name, fields, *sizes.batch, flops)
    if kind == "start":
        yield from first_token_times(sizes.prefilled, remaining)


def product_flops(size: int) -> float:
    """FLOPs per second of a large product in bfloat16."""
    x = jnp.ones((size, size), jnp.bfloat16)
    run = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.bfloat16))
    return 2 * size**3 / min(interleaved({"": lambda _: run(x)}, 10)[""])


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--part", type=int, choices=DEADLINES, help="kinds that fit in a call of less than ten minutes")
    kinds.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--minutes", type=float, default=9.0, help="no measurement starts after this time (default 9)")
    parser.add_argument("--repeats", type=int, default=3, help="processes per side (default 3)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append a JSON line per process of the models")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # small shapes, also on CPUs
    return parser.parse_args()


def main(elapsed: float = 0.0) -> int:
    """Run the command. ``elapsed``: seconds since the start of the process."""
    started = time.monotonic() - elapsed
    options = parse_options()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the processes share the device's memory with this one
    if jax.default_backend() == "cpu" and not options.tiny:
        sys.exit("tests.benchmarks.gpu needs an accelerator that JAX sees; on CPU: python -m tests.benchmarks")
    sizes = SMALL if options.tiny else REAL
    deadlines = DEADLINES[options.part] if options.part else dict.fromkeys(options.only, 1.0)
    limit, failed = TimeLimit(started, options.minutes, deadlines), 0
    rate, flops = Ours.copy() or 10.0, product_flops(sizes.product)
    print(f"{jax.devices()[0].device_kind}: {rate:.0f} GB/s, {flops / 1e12:.2f} TFLOP/s; jax {jax.__version__}")

    for kind in deadlines:
        if kind == "numbers":
            failed += agreement.report(matmuls(), functools.partial(limit.is_late, kind))
        elif kind != "models":
            print_speeds(kind, limit, measurements(kind, sizes, rate, flops, limit.remaining))
    if "models" in deadlines and not limit.is_late("models"):
        sides = ["ours", *["transformers"] * _torch_here()]
        with tempfile.TemporaryDirectory() as folder:
            plan = Plan(Path(folder), dict.fromkeys(sides, sys.executable), options.repeats, quick=False)
            failed += measure(whole_models(plan, MODELS), options.out)
    return failed


def print_speeds(kind: str, limit: TimeLimit, found: Generator[Measurement, None, None]) -> None:
    """Run the measurements of a kind until its deadline, and print a table."""
    records: list[Record] = []
    for measurement in found:
        if limit.is_late(kind):
            break
        records.append(record := measurement())
        print(f"{limit.elapsed():.0f} s: {record.key}", file=sys.stderr, flush=True)
    found.close()
    if records:
        print(table(records), flush=True)


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
    sys.exit(main(age()))
