"""The least work of a measurement: bytes of weights that decoding reads, FLOPs of prefill and training.

Divided by what the machine reaches in the same run, they give the limit beside each figure of the table.
"""

import math
from collections.abc import Iterator, Mapping

import jax.numpy as jnp

from nnxmoe.convert.arrays.array_layout import parameters
from nnxmoe.models import config_from_hf, model_class
from tests.benchmarks.engine import Sizes
from tests.benchmarks.models import Fields, trained

Work = tuple[str, float]  # a measurement of the machine, and how much of it: GB or GFLOP, per token or per step


def work(fields: Fields, sizes: Sizes) -> dict[str, Work]:
    """Measurement -> its least work, for a model in the dtype of ``fields``."""
    item, (rows, length) = jnp.dtype(fields["torch_dtype"]).itemsize, sizes.rows
    found = {
        f"decode batch {n}, tok/s": ("read, GB/s", item * sum(_weights(fields, n).values()) / n / 1e9)
        for n in sizes.batches
    }
    for tokens, _ in sizes.prefill:
        once = forward_flops(fields, tokens, heads=1) / tokens
        found[f"prefill {tokens}, tok/s"] = "matrix product, GFLOP/s", once / 1e9
    step = rows * forward_flops(trained(fields), length, heads=length) / 1e9
    found["train full, ms"] = "matrix product, GFLOP/s", 3 * step  # the backward: gradients of inputs and of kernels
    found[f"train LoRA rank {sizes.rank}, ms"] = "matrix product, GFLOP/s", 2 * step  # without those of kernels
    return found


def limit(what: str, amount: float, rate: float) -> float:
    """The best possible figure, in tokens per second or in milliseconds, where the machine does ``rate`` per second."""
    return rate / amount if what.endswith("/s") else 1e3 * amount / rate


def forward_flops(fields: Fields, tokens: int, heads: int) -> float:
    """Of one row: the products of active weights, the head for ``heads`` tokens, and causal attention."""
    weights = _weights(fields, 1)
    products = 2 * (tokens * (sum(weights.values()) - weights["head"]) + heads * weights["head"])
    wide = [fields[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v") if f"{name}_head_dim" in fields]
    width = sum(wide) * fields["num_attention_heads"] if wide else 2 * fields["hidden_size"]
    return products + fields["num_hidden_layers"] * width * tokens**2


def _weights(fields: Fields, rows: int) -> Mapping[str, float]:
    """Weights that a step for so many rows uses, of the head and of the rest; each row chooses experts at random."""
    config = config_from_hf(fields)
    found = {"head": 0.0, "rest": 0.0}
    for part, size, experts in _sizes(fields):
        unused = (1 - config.experts_per_token / experts) ** rows if experts else 0
        found["head" if part == "head" else "rest"] += 0 if part == "embed" else size * (1 - unused)
    return found


def _sizes(fields: Fields) -> Iterator[tuple[str, int, int]]:
    """The part, size and number of experts of each parameter; a tied embedding is the head."""
    config = config_from_hf(fields)
    for parameter in parameters(model_class(config)(config, rngs=None)):
        part = parameter.key.partition(".")[0]
        tied = part == "embed" and config.tie_word_embeddings
        yield "head" if tied else part, math.prod(parameter.shape), parameter.experts or 0
