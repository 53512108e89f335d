"""How fast memory is read and copied, and what decoding makes of it: ``python -m tests.benchmarks.bandwidth``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from nnxmoe.cli.inspect import summarise
from tests.benchmarks.clock import interleaved
from tests.benchmarks.results import Result


def read_bandwidth(rows: int = 4096, columns: int = 2048, matrices: int = 8) -> float:
    """GB/s of the best round of float32 matrix-vector products, of more matrices in turn than caches hold."""
    kernels, x = [jnp.full((rows, columns), 1.0 / i) for i in range(1, matrices + 1)], jnp.ones((1, rows))
    product = jax.jit(jnp.dot)

    def all_of_them(_: int) -> Any:
        return [product(x, kernel).block_until_ready() for kernel in kernels]

    return sum(kernel.nbytes for kernel in kernels) / min(interleaved({"": all_of_them}, 10)[""]) / 1e9


def copy_bandwidth(megabytes: int = 1024) -> float:
    """GB/s, read and written together, of the best of ten copies."""
    source = jnp.ones(megabytes * 250_000)
    copy = jax.jit(jnp.negative)  # something to compute: a plain copy would be the same buffer
    return 2 * source.nbytes / min(interleaved({"": lambda _: copy(source)}, 10)[""]) / 1e9


def weights_read(folder: Path, decode: Result, limit: Mapping[str, float]) -> Result:
    """GB/s of a model's active weights at batch 1, from tokens a second, beside a bandwidth with its name."""
    summary = summarise(folder)
    looked_up = summary.parts["embedding"] if "head" in summary.parts else 0
    size = (summary.active - looked_up) * jnp.dtype(summary.weight_dtype).itemsize / 1e9
    beside = {name: [speed] for name, speed in limit.items()}
    return Result(decode.case, "decode batch 1 weights, GB/s", [size * speed for speed in decode.ours], beside)


if __name__ == "__main__":
    print(json.dumps({"matrix-vector read": read_bandwidth()}))
