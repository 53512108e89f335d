"""On an accelerator: decoding and prefill of real shapes, MoE layers, attention, training, models beside transformers.

    python -m tests.benchmarks.gpu [--minutes 9] [--only numbers decoding layers attention training models]

``numbers``: agreement with the oracle (`tests.benchmarks.agreement`). ``decoding``: the shapes of Llama-3.1-8B and
Mixtral-8x7B with random weights in bfloat16, int8 and int4, at batch 1, 8 and 64, and prefill of 512 tokens; the limits
are the bandwidth of a copy and the speed of a large product. ``layers``:
one layer of Mixtral-8x7B and one of DeepSeek-V3, forward, and forward and backward, with each grouped product that runs
here; the limit is plain products of the same useful FLOPs. ``attention``: 4096 tokens of 32 heads that share 8 keys,
causal. ``training``: a step of a model of width 2048. ``models``: two random models, whole, as in
``python -m tests.benchmarks``. Nothing is begun after ``--minutes``.
"""

import argparse
import functools
import importlib
import math
import os
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nnxmoe
from nnxmoe.config.base import DecoderConfig
from nnxmoe.convert.arrays.array_layout import parameters
from nnxmoe.layers.attention.softmax_attention import MaskedSoftmax
from nnxmoe.layers.cache import SlotMetadata
from nnxmoe.layers.linear.quantized import QuantizedArray
from nnxmoe.layers.mask import Mask
from nnxmoe.model.quantization.methods import Method, parse_method
from nnxmoe.model.quantization.rounding import quantize_structure
from nnxmoe.models import PRESETS, model_class
from nnxmoe.moe import tokamax
from nnxmoe.moe.grouped_matmul import GroupedMatmul
from tests.benchmarks import agreement
from tests.benchmarks.clock import interleaved, seconds
from tests.benchmarks.limits import forward_flops
from tests.benchmarks.models import MIDSIZE, Fields
from tests.benchmarks.moe import Layer, Shape
from tests.benchmarks.ours import Ours
from tests.benchmarks.plan import Plan, measure
from tests.benchmarks.processes import Job, have_transformers
from tests.benchmarks.results import Record, table
from tests.support.running import greedy_ids

KINDS = ["numbers", "decoding", "layers", "attention", "training", "models"]
LAYERS = {
    "Mixtral-8x7B layer": Shape(4096, 14336, 8, 2, "bfloat16"),
    "DeepSeek-V3 layer": Shape(7168, 2048, 256, 8, "bfloat16"),
}
_WIDE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}
MODELS: dict[str, Fields] = {  # 2.0 and 3.3 billion parameters: their weights are what a step of decoding waits for
    "llama": MIDSIZE["llama"] | _WIDE | {"intermediate_size": 14336},
    "mixtral": MIDSIZE["mixtral"] | _WIDE | {"intermediate_size": 7168},
}
_TRAINED = {"hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8}
TRAINED: dict[str, Fields] = {  # 0.6 and 1.0 billion parameters
    "llama": MIDSIZE["llama"] | _TRAINED | {"intermediate_size": 5632, "torch_dtype": "bfloat16"},
    "mixtral": MIDSIZE["mixtral"] | _TRAINED | {"intermediate_size": 2048, "torch_dtype": "bfloat16"},
}
DECODED = (
    ("Llama-3.1-8B", "llama-3.1-8b", (None, "int8", "int4")),
    ("Mixtral-8x7B", "mixtral-8x7b", ("int4", "int8", None)),  # bfloat16 does not fit in 80 GB
)


def matmuls() -> dict[str, GroupedMatmul]:
    """What is installed, by name; the default of this backend first."""
    found: list[GroupedMatmul] = [nnxmoe.Strategy.auto().matmul, nnxmoe.BlockedMatmul(), nnxmoe.RaggedDotMatmul()]
    if tokamax.is_installed():
        found.append(tokamax.TokamaxMatmul())
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


def random_model(config: DecoderConfig, method: Method | None) -> nnxmoe.CausalLM:
    """A model in bfloat16 with random weights or codes, made where it is computed."""
    model = model_class(config)(config, rngs=None, dtype="bfloat16")
    quantize_structure(model, method, "bfloat16")

    @functools.partial(jax.jit, static_argnums=(1, 2, 3))
    def values(number: int, shape: tuple[int, ...], dtype: Any, codes: bool) -> jax.Array:
        key, integers = jax.random.key(number), jnp.issubdtype(dtype, jnp.integer)
        if codes and integers:
            return jax.random.bits(key, shape, jnp.uint8).view(dtype)
        return jnp.full(shape, 2.0**-10, dtype) if codes else (0.02 * jax.random.normal(key, shape)).astype(dtype)

    flat = [
        (path, v.replace(values(i, v.shape, v.dtype, isinstance(v, QuantizedArray))))
        for i, (path, v) in enumerate(_flat(model))
    ]
    nnx.update(model, nnx.from_flat_state(flat))
    return model


def _flat(model: nnxmoe.CausalLM) -> list[tuple[tuple[str, ...], nnx.Variable]]:
    return list(nnx.to_flat_state(nnx.state(model)))


def decoding_speeds(
    name: str,
    config: DecoderConfig,
    methods: Sequence[str | None],
    batches: Sequence[int],
    rate: float,
    flops: float,
    steps: int = 48,
    prompt: int = 512,
) -> Iterator[Record]:
    """Tokens per second of prefill, and of decoding by the median step. The limit of decoding reads the chosen experts
    and all other weights once per step, at ``rate`` GB/s; that of prefill computes at ``flops`` per second. Failures,
    such as a model that does not fit, are recorded with their reason."""
    for method in methods:
        case = f"{name}{f' in {method}' if method else ''} bfloat16"
        try:
            model = random_model(config, None if method is None else parse_method(method))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            yield Record(case, case, "ours", error=f"{type(error).__name__}: {str(error)[:200]}")
            continue
        for batch in batches:
            what = f"decode batch {batch}, tok/s"
            ids = np.random.default_rng(batch).integers(0, config.vocab_size, (batch, 16))
            try:
                stamps = [time.perf_counter() for _ in greedy_ids(model, ids, 16 + steps)]
            except jax.errors.JaxRuntimeError as error:
                yield Record(f"{case} | {what}", case, "ours", error=f"{type(error).__name__}: {str(error)[:200]}")
                continue
            speed = batch / median(np.diff(stamps)[15:])
            yield Record(f"{case} | {what}", case, "ours", {what: speed}, {what: batch * rate / _read(model, batch)})
        what, ids = f"prefill {prompt}, tok/s", np.arange(prompt)[None] % config.vocab_size
        took = [seconds(lambda: list(greedy_ids(model, ids, 1))) for _ in range(6)][1:]  # noqa: B023
        best = prompt * flops / forward_flops(config.to_hf(), prompt, heads=1)
        yield Record(f"{case} | {what}", case, "ours", {what: prompt / median(took)}, {what: best})
        del model


def _read(model: nnxmoe.CausalLM, batch: int) -> float:
    """GB of weights that a step needs, if every row chooses its experts at random."""
    total = 0.0
    for parameter in parameters(model, codes=True):
        chance = model.config.experts_per_token / parameter.experts if parameter.experts else 1.0
        size = math.prod(parameter.shape) * parameter.variable.dtype.itemsize
        total += 0 if parameter.key.startswith("embed") else size * (1 - (1 - chance) ** batch)
    return total / 1e9


def attention_speeds(tokens: int, heads: int, kv_heads: int, width: int, flops: float, times: int) -> Iterator[Record]:
    """TFLOP/s of causal attention, forward and with its backward, of the default and of `BlockwiseAttention`."""
    shapes = (heads, tokens, width), (kv_heads, tokens, width), (kv_heads, tokens, width)
    q, k, v = (jax.random.normal(jax.random.key(i), (1, *shape), jnp.bfloat16) for i, shape in enumerate(shapes))
    index = jnp.arange(tokens, dtype=jnp.int32)
    scores = MaskedSoftmax(Mask(index, None, SlotMetadata(index, None, None), None, causal=True), width**-0.5)
    useful = 2 * tokens * tokens * heads * width / 1e12  # half of all pairs
    case = f"attention T={tokens} N={heads} K={kv_heads} H={width} bfloat16"
    for attention_fn in dict.fromkeys((nnxmoe.Strategy.auto().attention_fn, nnxmoe.Strategy.auto("cpu").attention_fn)):
        forward = jax.jit(lambda q, k, v, attention_fn=attention_fn: attention_fn(q, k, v, scores))
        backward = jax.jit(jax.grad(lambda q, k, v, f=forward: jnp.sum(f(q, k, v).astype(jnp.float32)), (0, 1, 2)))
        for what, run, factor in (("forward", forward, 1.0), ("forward and backward", backward, 3.5)):
            name = f"{what}, {type(attention_fn).__name__}, TFLOP/s"
            try:
                took = median(interleaved({"": lambda _, run=run: run(q, k, v)}, times)[""])
            except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
                yield Record(f"{case} | {name}", case, "ours", error=f"{type(error).__name__}: {str(error)[:200]}")
                continue
            yield Record(f"{case} | {name}", case, "ours", {name: factor * useful / took}, {name: flops / 1e12})


def training_speed(name: str, fields: Fields, rows: int, tokens: int, flops: float, times: int = 8) -> Record:
    """Milliseconds of a training step of all parameters; the limit computes its FLOPs at the speed of a product."""
    case, what = f"{name} {fields['torch_dtype']}", f"train {rows} x {tokens}, ms"
    try:
        ids = np.random.default_rng(0).integers(0, fields["vocab_size"], (rows, tokens))
        run = Ours.training(types.SimpleNamespace(dtype=jnp.dtype(fields["torch_dtype"])), fields, ids, None)  # pyright: ignore
        took = median([seconds(run) for _ in range(times + 2)][2:])
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return Record(case, case, "ours", error=f"{type(error).__name__}: {str(error)[:200]}")
    best = 3 * rows * forward_flops(fields, tokens, heads=tokens) / flops
    return Record(case, case, "ours", {what: 1e3 * took}, {what: 1e3 * best})


def product_flops(size: int = 8192) -> float:
    """FLOPs per second of a large product in bfloat16."""
    x = jnp.ones((size, size), jnp.bfloat16)
    run = jax.jit(lambda x: jnp.dot(x, x, preferred_element_type=jnp.bfloat16))
    return 2 * size**3 / min(interleaved({"": lambda _: run(x)}, 10)[""])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], help="of decoding")
    parser.add_argument("--methods", nargs="+", help="of decoding: none, int8, int4 (default: those that fit)")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing after this time (default 9)")
    parser.add_argument("--repeats", type=int, default=3, help="processes per side (default 3)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append a JSON line per process of the models")
    options = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the processes share the device's memory with this one
    if jax.default_backend() == "cpu":
        sys.exit("tests.benchmarks.gpu needs an accelerator that JAX sees; on CPU: python -m tests.benchmarks")
    rate, flops, started, failed = Ours.copy(), product_flops(), time.monotonic(), 0
    assert rate is not None
    print(f"{jax.devices()[0].device_kind}: {rate:.0f} GB/s, {flops / 1e12:.0f} TFLOP/s; jax {jax.__version__}")

    def late(kind: str) -> bool:
        if time.monotonic() - started < 60 * options.minutes:
            return False
        print(f"{kind}: not all measured, --minutes {options.minutes:g} are over")
        return True

    def until_late(kind: str, found: Iterator[Record]) -> None:
        """Prints the table of what was found in time."""
        records: list[Record] = []
        while kind in options.only and not late(kind) and (record := next(found, None)):
            records.append(record)
        print(table(records) if records else "", flush=True)

    if "numbers" in options.only:
        failed += agreement.report(matmuls())
    for name, preset, methods in DECODED:
        methods = methods if options.methods is None else [m if m != "none" else None for m in options.methods]
        until_late("decoding", decoding_speeds(name, PRESETS[preset], methods, options.batches, rate, flops))
    for name, shape in LAYERS.items():
        until_late("layers", layer_speeds(name, shape, options.tokens, 10))
    until_late("attention", attention_speeds(4096, 32, 8, 128, flops, 10))
    for name, fields in TRAINED.items():
        until_late("training", (training_speed(*given, 2, 2048, flops) for given in [(name, fields)]))
    if "models" in options.only and not late("models"):
        sides = ["ours", *["transformers"] * _torch_here()]
        with tempfile.TemporaryDirectory() as folder:
            plan = Plan(Path(folder), dict.fromkeys(sides, sys.executable), options.repeats, quick=False)
            failed += measure(whole_models(plan, MODELS), options.out)
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
