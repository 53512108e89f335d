"""A training step of nnxmoe, AdamW on next-token cross-entropy: milliseconds and temporary bytes.

Unrolled with activations kept, which is what torch does too, and scanned with activations computed again, which is
what large models need (``tests.benchmarks.growth`` says how their memory grows).
"""

from collections.abc import Mapping
from statistics import median
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnxmoe
from nnxmoe.models import config_from_hf, model_class
from nnxmoe.train.loop.step import Step
from tests.benchmarks.clock import seconds

WAYS: dict[str, dict[str, Any]] = {
    "train": {},
    "train scanned with remat": {"scan_layers": True, "remat": nnxmoe.Remat()},
}


def measure(fields: Mapping[str, Any], length: int, times: int) -> dict[str, float]:
    """Of one row of ``length`` tokens; parameters and moments are float32, activations ``fields["torch_dtype"]``."""
    config = config_from_hf(dict(fields))
    batch = {"tokens": np.random.default_rng(0).integers(0, config.vocab_size, (1, length)).astype(np.int32)}
    found = {}
    for way, choices in WAYS.items():
        strategy = nnxmoe.Strategy(compute_dtype=jnp.dtype(fields["torch_dtype"]), **choices)
        step = Step(model_class(config)(config, strategy, rngs=nnx.Rngs(0)), optax.adamw(1e-4))  # pyright: ignore
        run = Run(step, batch)
        found[f"{way}, ms"] = 1e3 * median([seconds(run) for _ in range(times + 1)][1:])
        found[f"{way} temporary, MB"] = run.temporary / 1e6
        del step, run
    return found


class Run:
    """One step after the other from where the last one ended, whose state is donated."""

    def __init__(self, step: Step, batch: dict[str, Any]):
        self.state, self.batch = step.init(), batch
        self.compiled = step._run.jitted.lower(self.state, batch).compile()

    def __call__(self) -> Any:
        self.state, report = self.compiled(self.state, self.batch)
        return self.state, report

    @property
    def temporary(self) -> int:
        """Bytes beside the state and the batch."""
        memory = self.compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes
