"""What quantising costs: predictions of a model that is trained a little, and memory of a training step of adapters.

    python -m tests.benchmarks.accuracy [--steps 150] [--rows 8]

Trains a Mixtral of 14 million parameters on the demo's generated text; then, per method, the bytes of its kernels, the
relative error of its weights, and on held-out text the mean Kullback-Leibler divergence of its next-token distributions
to those of the bfloat16 model, the share of tokens with the same most likely one, and the perplexity. Last, the
arguments and temporary memory of a compiled step of LoRA on bfloat16 and on int4 kernels.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnxmoe
from nnxmoe.model.quantization.methods import Method, Mixed, parse_method
from nnxmoe.model.quantization.quantized_kernels import quantizable_kernels
from nnxmoe.train import Step, lora
from tests.demo.corpus import documents
from tests.demo.tokens import Packed, pack, train_tokenizer
from tests.demo.train import LENGTH, ROWS, VOCAB, make_config, train

METHODS = ("int8", "fp8", "int4:128", "int4:32", "experts=int4:32,others=int8")
TRAINING = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}


@dataclasses.dataclass(frozen=True)
class Cost:
    """``divergence``: mean of KL(float model || quantised model) in nats. ``same``: share of the same first choice."""

    bytes: int
    error: float
    divergence: float
    same: float
    perplexity: float


@jax.jit
def compared(exact: jax.Array, rough: jax.Array, tokens: jax.Array, real: jax.Array) -> jax.Array:
    """Sums over real tokens of the divergence, of equal choices, of the loss of ``rough``; and the number of tokens."""
    p, q = jax.nn.log_softmax(exact), jax.nn.log_softmax(rough)
    divergence = jnp.sum(jnp.exp(p) * (p - q), axis=-1)[:, :-1]
    same = (p.argmax(-1) == q.argmax(-1))[:, :-1]
    loss = -jnp.take_along_axis(q[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    keep = real[:, 1:] & real[:, :-1]
    return jnp.stack([jnp.sum(jnp.where(keep, a, 0)) for a in (divergence, same, loss, jnp.ones_like(loss))])


def cost(model: nnxmoe.CausalLM, method: Method | Mixed | None, held: Packed) -> Cost:
    """The cost of a method on held-out rows; None: of nothing."""
    rough = model if method is None else nnxmoe.quantize(model, method)
    sums = np.zeros(4)
    for start in range(0, len(held.tokens), ROWS):
        tokens, segments = (np.asarray(a[start : start + ROWS]) for a in (held.tokens, held.segments))
        exact, other = (m(tokens, segment_ids=segments).logits for m in (model, rough))
        sums += np.asarray(compared(exact, other, jnp.asarray(tokens), jnp.asarray(segments > 0)), np.float64)
    kernels = [leaf for place in quantizable_kernels(rough) for leaf in jax.tree.leaves(nnx.state(place.owner))]
    size = sum({id(leaf): leaf.nbytes for leaf in kernels}.values())
    divergence, same, loss = sums[:3] / sums[3]
    return Cost(size, _error(model, rough), divergence, same, math.exp(loss))


def _error(model: nnxmoe.CausalLM, rough: nnxmoe.CausalLM) -> float:
    pairs = zip(quantizable_kernels(model), quantizable_kernels(nnxmoe.dequantize(rough, "float32")), strict=True)
    both = [[np.asarray(p.weight.get_value(), np.float32) for p in pair] for pair in pairs]
    lost = sum(float(np.sum((a - b) ** 2)) for a, b in both)
    return math.sqrt(lost / sum(float(np.sum(a**2)) for a, _ in both))


def step_memory(model: nnxmoe.CausalLM, method: Method | None) -> tuple[int, int]:
    """Argument and temporary bytes of a compiled training step of adapters of rank 8, on 2 x 256 tokens."""
    made = nnxmoe.quantize(model, method) if method else nnx.merge(*nnx.split(model))
    lora.add(made, 8, rngs=nnx.Rngs(0))
    step = Step(made, optax.adamw(1e-4), trainable=nnx.LoRAParam)
    batch = {"tokens": jax.ShapeDtypeStruct((2, 256), jnp.int32)}
    found = step.program(step.shapes(), batch).memory_analysis()
    return found.argument_size_in_bytes, found.temp_size_in_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.benchmarks.accuracy", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150, help="of training (default 150)")
    parser.add_argument("--rows", type=int, default=8, help=f"held-out rows of {LENGTH} tokens (default 8)")
    options = parser.parse_args(arguments)
    tokenizer = train_tokenizer(documents(0), VOCAB)
    data = pack(tokenizer, documents(1), options.steps * ROWS, LENGTH)
    model = train(dataclasses.replace(make_config(tokenizer), **TRAINING), data, options.steps, 0)
    model = nnxmoe.unscan(model)
    held = pack(tokenizer, documents(2), options.rows, LENGTH)
    print("| method | MB of kernels | error of weights | KL, nats | same choice | perplexity |")
    print("|---|---|---|---|---|---|")
    for name in (None, *METHODS):
        one = cost(model, parse_method(name) if name else None, held)
        cells = (
            f"{one.bytes / 1e6:.1f} | {one.error:.2%} | {one.divergence:.1e} | {one.same:.1%} | {one.perplexity:.3f}"
        )
        print(f"| {name or 'bfloat16'} | {cells} |", flush=True)
    for name in ("bfloat16", "int4:128"):
        held_bytes, temporary = step_memory(model, None if name == "bfloat16" else parse_method(name))
        print(f"a step of LoRA on {name}: {held_bytes / 1e6:.1f} MB of arguments, {temporary / 1e6:.1f} MB temporary")
    return 0


if __name__ == "__main__":
    sys.exit(main())
