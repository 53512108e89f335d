"""Speeds of models with random weights: prefill, decoding, the engine, training and the first token of a process.

python -m tests.benchmarks.gpu_models PRESET    # print the seconds from the start of this process to its first token
"""

import functools
import math
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnxmoe
from nnxmoe.config.base import DecoderConfig
from nnxmoe.convert.arrays.array_layout import parameters
from nnxmoe.layers.linear.quantized import QuantizedArray
from nnxmoe.model.quantization.methods import parse_method
from nnxmoe.model.quantization.rounding import quantize_structure
from nnxmoe.models import PRESETS, config_from_hf, model_class
from nnxmoe.train import Step, lora
from tests.benchmarks.clock import seconds
from tests.benchmarks.engine import age
from tests.benchmarks.gpu_kernels import Measurement, measurement
from tests.benchmarks.limits import forward_flops
from tests.benchmarks.many import jobs
from tests.benchmarks.models import Fields
from tests.benchmarks.ours import Ours
from tests.support.running import greedy_ids
from tests.support.tiny import TINY

Measured = tuple[dict[str, float], dict[str, float]]  # values, limits


def random_model(config: DecoderConfig, method: str | None) -> nnxmoe.CausalLM:
    """Create a model in bfloat16 with random weights or codes on the device."""
    model = model_class(config)(config, rngs=None, dtype="bfloat16")
    quantize_structure(model, None if method is None else parse_method(method), "bfloat16")

    @functools.partial(jax.jit, static_argnums=(1, 2, 3))
    def values(number: int, shape: tuple[int, ...], dtype: Any, codes: bool) -> jax.Array:
        key, integers = jax.random.key(number), jnp.issubdtype(dtype, jnp.integer)
        if codes and integers:
            return jax.random.bits(key, shape, jnp.uint8).view(dtype)
        return jnp.full(shape, 2.0**-10, dtype) if codes else (0.02 * jax.random.normal(key, shape)).astype(dtype)

    flat = nnx.to_flat_state(nnx.state(model))
    flat = [
        (path, v.replace(values(i, v.shape, v.dtype, isinstance(v, QuantizedArray))))
        for i, (path, v) in enumerate(flat)
    ]
    nnx.update(model, nnx.from_flat_state(flat))
    return model


def case_name(name: str, method: str | None) -> str:
    """Name of a model in the tables."""
    return f"{name}{f' in {method}' if method else ''} bfloat16"


def token_ids(config: DecoderConfig, rows: int, length: int) -> np.ndarray:
    """Random prompts, the same in every process."""
    return np.random.default_rng(rows).integers(3, config.vocab_size, (rows, length), dtype=np.int32)


def decoding_speeds(
    name: str,
    config: DecoderConfig,
    methods: Sequence[str | None],
    batches: Sequence[int],
    rate: float,
    steps: int = 48,
) -> Iterator[Measurement]:
    """Measure tokens per second by the median decoding step.

    The limit reads the selected experts and all other weights once per step, at ``rate`` GB/s.
    """
    for method in methods:
        case = case_name(name, method)
        model = functools.cache(functools.partial(random_model, config, method))
        for batch in batches:
            what = f"decode batch {batch}, tok/s"

            def run(batch: int = batch, what: str = what, model: Callable[[], nnxmoe.CausalLM] = model) -> Measured:
                ids = token_ids(config, batch, 16)
                stamps = [time.perf_counter() for _ in greedy_ids(model(), ids, 16 + steps)]
                speed = batch / median(np.diff(stamps)[15:])
                return {what: speed}, {what: batch * rate / _read(model(), batch)}

            yield measurement(case, what, run)
        model.cache_clear()


def _read(model: nnxmoe.CausalLM, batch: int) -> float:
    """GB of weights that a step reads, if every row selects its experts at random."""
    total = 0.0
    for parameter in parameters(model, codes=True):
        chance = model.config.experts_per_token / parameter.experts if parameter.experts else 1.0
        size = math.prod(parameter.shape) * parameter.variable.dtype.itemsize
        total += 0 if parameter.key.startswith("embed") else size * (1 - (1 - chance) ** batch)
    return total / 1e9


def prefill_speeds(
    name: str, config: DecoderConfig, sizes: Sequence[tuple[int, int]], flops: float, times: int = 3
) -> Iterator[Measurement]:
    """Measure tokens per second of prompts of (rows, length) by three paths: the model, ``generate`` and an engine.

    The limit computes the useful FLOPs at ``flops`` per second. The model computes the logits of all tokens. The limit
    counts the logits of the last token only.
    """
    case = case_name(name, None)
    model = functools.cache(functools.partial(random_model, config, None))
    for rows, length in sizes:
        ids = token_ids(config, rows, length)
        limit = length * flops / forward_flops(config.to_hf(), length, heads=1)
        paths = {"model": _model_prefill, "generate": _generate_prefill, "engine": _engine_prefill}
        for path, prepare in paths.items():
            what = f"prefill {rows} x {length} by {path}, tok/s"

            def run(prepare: Any = prepare, ids: np.ndarray = ids, what: str = what, limit: float = limit) -> Measured:
                call = prepare(model(), ids)
                took = [seconds(call) for _ in range(1 + times)][1:]
                return {what: ids.size / median(took)}, {what: limit}

            yield measurement(case, what, run)


def _model_prefill(model: nnxmoe.CausalLM, ids: np.ndarray) -> Callable[[], Any]:
    return lambda: model(ids).logits  # not in `jax.jit`: a traced call has no padding mask


def _generate_prefill(model: nnxmoe.CausalLM, ids: np.ndarray) -> Callable[[], Any]:
    return lambda: nnxmoe.generate(model, ids, max_new_tokens=1, eos_token_id=None)


def _engine_prefill(model: nnxmoe.CausalLM, ids: np.ndarray) -> Callable[[], Any]:
    engine = nnxmoe.Engine(model, slots=len(ids), capacity=ids.shape[1] + 1)

    def run() -> None:
        for row in ids:
            engine.submit(row, nnxmoe.RequestOptions(1, stop_ids=None))
        engine.run()

    return run


def engine_speed(name: str, config: DecoderConfig, method: str | None, count: int, slots: int) -> Measurement:
    """Measure the requested tokens per second of ``count`` requests of mixed lengths."""
    case, what = case_name(name, method), f"engine, {count} requests in {slots} slots, tok/s"

    def run() -> Measured:
        engine = nnxmoe.Engine(random_model(config, method), slots=slots, capacity=384)
        engine.warm_up()

        def submit_and_run() -> None:
            for ids, new in requests:
                engine.submit(ids, nnxmoe.RequestOptions(new, stop_ids=None))
            engine.run()

        requests = jobs(count, config.vocab_size)
        return {what: sum(new for _, new in requests) / seconds(submit_and_run)}, {}

    return measurement(case, what, run)


def training_speed(name: str, fields: Fields, rows: int, tokens: int, flops: float, times: int = 8) -> Measurement:
    """Measure milliseconds per training step of all parameters. The limit computes its FLOPs at ``flops``."""
    case, what = f"{name} {fields['torch_dtype']}", f"train {rows} x {tokens}, ms"

    def run() -> Measured:
        ids = np.random.default_rng(0).integers(0, fields["vocab_size"], (rows, tokens))
        step = Ours.training(types.SimpleNamespace(dtype=jnp.dtype(fields["torch_dtype"])), fields, ids, None)  # pyright: ignore
        best = 3 * rows * forward_flops(fields, tokens, heads=tokens) / flops
        return {what: 1e3 * median([seconds(step) for _ in range(times + 2)][2:])}, {what: 1e3 * best}

    return measurement(case, what, run)


def adapter_speed(
    name: str, config: DecoderConfig, method: str | None, rows: int, tokens: int, flops: float, times: int = 5
) -> Measurement:
    """Measure milliseconds per training step of LoRA adapters of rank 8 on a frozen, possibly quantized model."""
    case, what = case_name(name, method), f"train {'QLoRA' if method else 'LoRA'} {rows} x {tokens}, ms"

    def run() -> Measured:
        model = random_model(config, method)
        lora.add(model, 8, rngs=nnx.Rngs(1))
        step = Step(model, optax.adamw(1e-4), trainable=nnx.LoRAParam)
        state, batch = step.init(), {"tokens": token_ids(config, rows, tokens)}

        def call() -> Any:
            nonlocal state
            state, report = step(state, batch)
            return state, report

        took = median([seconds(call) for _ in range(times + 2)][2:])
        best = 2 * rows * forward_flops(config.to_hf(), tokens, heads=tokens) / flops  # no gradients of the kernels
        return {what: 1e3 * took}, {what: 1e3 * best}

    return measurement(case, what, run)


def first_token_times(preset: str, remaining: Callable[[], float]) -> Iterator[Measurement]:
    """Measure seconds from the start of a process to its first token, with an empty and a filled compile cache.

    ``remaining`` returns the seconds after which the process is terminated.
    """
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("empty", "filled"):
            what = f"start to first token, {cache} compile cache, s"

            def run(what: str = what) -> Measured:
                command = [sys.executable, "-m", "tests.benchmarks.gpu_models", preset]
                environment = os.environ | {"NNXMOE_COMPILE_CACHE": folder}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=remaining())
                if done.returncode:
                    raise RuntimeError(done.stderr[-200:])
                return {what: float(done.stdout.splitlines()[-1])}, {}

            yield measurement(case_name(preset, None), what, run)


def main() -> None:
    """Create a model with random weights and print the age of this process at the first token."""
    nnxmoe.compile_cache()
    name = sys.argv[1]
    config = PRESETS[name] if name in PRESETS else config_from_hf(TINY[name])
    list(greedy_ids(random_model(config, None), token_ids(config, 1, 16), 1))
    print(age())


if __name__ == "__main__":
    main()
