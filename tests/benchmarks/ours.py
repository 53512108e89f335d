"""nnxmoe's side of one checkpoint.

python -m tests.benchmarks.ours FOLDER {machine,decode,prefill,load,train,quantized} [--setting int8] [--quick]
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nnxmoe
from nnxmoe.model.quantization.methods import parse_method
from nnxmoe.models import config_from_hf, model_class
from tests.benchmarks import engine
from tests.benchmarks.clock import interleaved
from tests.benchmarks.models import Fields
from tests.support.running import greedy_ids


class Ours:
    """A model of ``nnxmoe.from_pretrained``. Compiled programs are kept in ``$NNXMOE_COMPILE_CACHE``, if it is set."""

    def __init__(self, folder: Path, quantize: str | None = None):
        self.folder, self.method = folder, parse_method(quantize) if quantize else None
        self.dtype = jnp.dtype(json.loads((folder / "config.json").read_text())["torch_dtype"])
        nnxmoe.compile_cache()
        jax.device_put(1.0).block_until_ready()  # starts the backend, which is not part of loading, nor is importing
        self.read, self.generate_ids = nnxmoe.from_pretrained, nnxmoe.generate

    def load(self) -> None:
        """Until every array is ready."""
        self.model = self.read(self.folder, quantize=self.method)
        jax.block_until_ready(nnx.state(self.model))

    def generate(self, ids: np.ndarray, new: int) -> np.ndarray:
        return self.generate_ids(self.model, ids, max_new_tokens=new, eos_token_id=None)

    def stamps(self, ids: np.ndarray, new: int) -> Sequence[float]:
        """Of the loop that ``generate`` and ``stream`` both consume."""
        return [time.perf_counter() for _ in greedy_ids(self.model, ids, new)]

    def training(self, fields: Fields, tokens: np.ndarray, rank: int | None) -> Callable[[], Any]:
        import optax  # here, since loading reports the time of the imports that it needs

        from nnxmoe.train import Step, lora

        config = config_from_hf(fields)
        strategy = nnxmoe.Strategy(compute_dtype=self.dtype)
        model = model_class(config)(config, strategy, rngs=nnx.Rngs(0))
        if rank is not None:
            lora.add(model, rank, rngs=nnx.Rngs(1))
        step = Step(model, optax.adamw(1e-4), trainable=nnx.LoRAParam if rank else nnx.Param)
        state, batch = step.init(), {"tokens": tokens.astype(np.int32)}

        def run() -> None:
            nonlocal state
            state, report = step(state, batch)
            jax.block_until_ready((state, report))

        return run

    def products(self, size: int) -> Sequence[Callable[[], Any]]:
        """As is, and accumulated in float32, which is faster for bfloat16 in jax 0.10."""
        x, y = jnp.ones((size, size), self.dtype), jnp.ones((size, size), self.dtype)
        ways = [jax.jit(jnp.dot), jax.jit(lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.float32))]
        return [lambda way=way: way(x, y).block_until_ready() for way in ways]

    @staticmethod
    def copy() -> float | None:
        """Read and written together, the best of ten copies of a gigabyte."""
        if jax.default_backend() == "cpu":
            return None
        source = jnp.ones(250_000_000)
        copy = jax.jit(jnp.negative)  # a plain copy would return the same buffer
        return 2 * source.nbytes / min(interleaved({"": lambda _: copy(source)}, 10)[""]) / 1e9


if __name__ == "__main__":
    engine.main(Ours)
