"""What happens before and beside the computing, for tiny DeepSeek-shaped models of many layers.

    python -m tests.benchmarks.compiling [scanned LAYERS] [unrolled LAYERS] [overhead LAYERS] [abstract PRESET]

``scanned``: seconds to trace and to compile a training step; ``unrolled``: a forward; ``overhead``: milliseconds of a
decoding step outside of the device's work; ``abstract``: seconds to the shapes of a whole model. One line of JSON. What
is traced first in a process takes longer: numbers to compare come from processes of their own.
"""

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nnxmoe
from nnxmoe.models import config_from_hf, model_class, preset
from tests.benchmarks.clock import interleaved
from tests.benchmarks.growth import BATCH, LENGTH, step_of
from tests.benchmarks.models import TINY

STEPS = 32


def scanned(layers: str) -> dict[str, float]:
    """The training step of a scanned stack, computed again in the backward pass."""
    step = step_of("deepseek", int(layers), jnp.float32, 1)
    state, batch = step.shapes(), {"tokens": jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)}
    return _trace_and_compile(
        f"compile train step of {layers} scanned layers", lambda: step._run.jitted.lower(state, batch)
    )


def unrolled(layers: str) -> dict[str, float]:
    """Logits of a model whose layers are one after the other in the program."""
    graph, params = nnx.split(_model(layers, rngs=None))
    run = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens).logits)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    return _trace_and_compile(f"compile forward of {layers} unrolled layers", lambda: run.lower(shapes, tokens))


def overhead(layers: str) -> dict[str, float]:
    """A step of ``generate`` beside a step of the same model in one compiled loop, which is the device's work alone."""
    model = _model(layers, rngs=nnx.Rngs(0))
    prompt = np.ones((1, 8), np.int32)
    graph, params = nnx.split(model)

    @jax.jit
    def loop(params: Any, cache: Any) -> Any:
        model = nnx.merge(graph, params)

        def step(_: int, carry: Any) -> Any:
            out = model(carry[0], cache=carry[1])
            return jnp.argmax(out.logits, -1).astype(jnp.int32), out.cache

        return jax.lax.fori_loop(0, STEPS, step, (jnp.ones((1, 1), jnp.int32), cache))

    took = interleaved(
        {
            "generate": lambda _: nnxmoe.generate(model, prompt, max_new_tokens=1 + STEPS, eos_token_id=None),
            "first": lambda _: nnxmoe.generate(model, prompt, max_new_tokens=1, eos_token_id=None),
            "loop": lambda _: loop(params, model.empty_cache(1, 64)),
        },
        9,
    )
    whole, first, device = (1e3 * median(took[name]) for name in ("generate", "first", "loop"))
    name = f"decode step of {layers} unrolled tiny layers"
    return {
        f"{name}, ms": (whole - first) / STEPS,
        f"{name} in a compiled loop, ms": device / STEPS,
        f"{name} host overhead, ms": (whole - first - device) / STEPS,
    }


def abstract(name: str) -> dict[str, float]:
    """All parameters of a preset with shapes, dtypes and axes, none of them computed."""
    config = preset(name)
    assert config is not None
    started = time.perf_counter()
    model = model_class(config)(config, rngs=None)
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return {f"build abstract {name} of {count / 1e9:.0f}B, s": time.perf_counter() - started}


def _model(layers: str, rngs: nnx.Rngs | None) -> nnxmoe.CausalLM:
    config = config_from_hf(TINY["deepseek"] | {"num_hidden_layers": int(layers)})
    return model_class(config)(config, rngs=rngs)


def _trace_and_compile(name: str, lower: Callable[[], Any]) -> dict[str, float]:
    started = time.perf_counter()
    lowered = lower()
    traced = time.perf_counter()
    lowered.compile()
    done = time.perf_counter()
    return {f"{name}: trace, s": traced - started, f"{name}: compile, s": done - traced}


KINDS: dict[str, Callable[[str], dict[str, float]]] = {
    "scanned": scanned,
    "unrolled": unrolled,
    "overhead": overhead,
    "abstract": abstract,
}

if __name__ == "__main__":
    jax.device_put(1.0).block_until_ready()
    found = [KINDS[kind](what) for kind, what in zip(sys.argv[1::2], sys.argv[2::2], strict=True)]
    print(json.dumps({name: value for values in found for name, value in values.items()}))
