"""Makes the demo checkpoint: `python -m nnxmoe.models.demo.train [--steps N] [--out DIR] [--seed S]`."""

import argparse
import functools
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon
from tokenizers import Tokenizer

import nnxmoe
from nnxmoe.models import Mixtral, MixtralConfig
from nnxmoe.models.demo.corpus import BOS, END, EOS, PAD, documents
from nnxmoe.models.demo.exam import expert_use, questions, sit
from nnxmoe.models.demo.tokens import Packed, pack, save_tokenizer, special_ids, train_tokenizer
from nnxmoe.moe.router import Routing

HERE = Path(__file__).parent
STEPS = 8000
VOCAB, ROWS, LENGTH = 768, 8, 144  # a step sees ROWS rows of LENGTH tokens
MATRICES, OTHERS, BALANCE = 0.014, 0.015, 0.01  # peak learning rates; weight of the balance loss


def make_config(tokenizer: Tokenizer) -> MixtralConfig:
    """Three layers of eight experts, two a token; half a million parameters."""
    ids = special_ids(tokenizer)
    return MixtralConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=96,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=ids[BOS],
        eos_token_id=(ids[END], ids[EOS]),
        pad_token_id=ids[PAD],
        dtype="bfloat16",
    )


def balance(routing: Routing) -> jax.Array:
    """1 when the load is even: E * sum(share of choices * mean probability) (Switch Transformer; Fedus et al. 2021)."""
    count = routing.scores.shape[-1]
    assert routing.valid is not None
    real = routing.valid[..., None]
    chosen = jnp.sum(jax.nn.one_hot(routing.experts, count), axis=-2) * real
    load = jnp.sum(chosen, axis=(0, 1)) / jnp.sum(chosen)
    return count * jnp.sum(load * jnp.sum(routing.scores * real, axis=(0, 1)) / jnp.sum(real))


def loss(model: nnxmoe.CausalLM, rows: Packed) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy of the targets plus the balance loss; also [cross-entropy, balance]."""
    inputs = jax.tree.map(lambda x: x[:, :-1], rows)
    real = inputs.segments > 0
    out = model(inputs.tokens, attention_mask=real, segment_ids=inputs.segments, return_routing=True)
    weight = rows.learn[:, 1:] & (rows.segments[:, 1:] == inputs.segments)
    each = optax.softmax_cross_entropy_with_integer_labels(out.logits, rows.tokens[:, 1:])
    mean = jnp.sum(each * weight) / jnp.sum(weight)
    assert out.routing is not None
    even = jnp.mean(jnp.stack([balance(routing) for routing in out.routing.values()]))
    return mean + BALANCE * even, jnp.stack([mean, even])


def optimiser(variables: Sequence[Any], steps: int) -> optax.GradientTransformation:
    """Muon (Jordan 2024) for the matrices of the layers; Adam for the embedding, the norms and the routers."""

    def matrix(variable: Any) -> MuonDimensionNumbers | None:
        axes, inputs = variable.get_metadata()["axes"], variable.get_metadata()["inputs"]
        if inputs is None or "router" in axes:
            return None
        first = int(axes[0] == "expert")
        return MuonDimensionNumbers(tuple(range(first, first + inputs)), tuple(range(first + inputs, len(axes))))

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, min(100, steps // 10), steps)

    kinds: Any = [matrix(variable) for variable in variables]  # a tree like the list of leaves
    rule = muon(
        schedule(MATRICES),
        adam_learning_rate=schedule(OTHERS),
        weight_decay=0.1,
        muon_weight_dimension_numbers=lambda _: kinds,
        consistent_rms=0.2,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


def train(config: MixtralConfig, data: Packed, steps: int, seed: int) -> nnxmoe.CausalLM:
    """The model after `steps` steps in float32, cast to bfloat16; prints the mean losses of every 100 steps."""
    graph, params, rest = nnx.split(Mixtral(config, rngs=nnx.Rngs(seed)), nnx.Param, ...)
    leaves, tree = jax.tree.flatten(params)
    rule = optimiser(jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable)), steps)

    def merge(leaves: list[jax.Array]) -> nnxmoe.CausalLM:
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves), rest)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(leaves: list[jax.Array], state: Any, rows: Packed) -> tuple[Any, Any, jax.Array]:
        slopes, means = jax.grad(lambda leaves: loss(merge(leaves), rows), has_aux=True)(leaves)
        updates, state = rule.update(slopes, state, leaves)
        return optax.apply_updates(leaves, updates), state, means

    state, means, start = rule.init(leaves), [], time.monotonic()
    for i in range(steps):
        leaves, state, mean = step(leaves, state, Packed(*(x[i * ROWS : (i + 1) * ROWS] for x in data)))
        means.append(mean)
        if (i + 1) % 100 == 0 or i + 1 == steps:
            entropy, even = np.mean(jax.device_get(means), axis=0)
            print(f"step {i + 1}: loss {entropy:.4f}, balance {even:.3f}, {time.monotonic() - start:.0f} s", flush=True)
            means = []
    model = merge([leaf.astype(jnp.bfloat16) for leaf in leaves])
    model.dtype = jnp.dtype(jnp.bfloat16)
    return model


def write(model: nnxmoe.CausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """The whole checkpoint, made in a temporary folder beside `out` and then moved into it file by file."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        made = Path(folder) / "checkpoint"
        nnxmoe.save_pretrained(model, made)
        save_tokenizer(tokenizer, made, model.config.max_position_embeddings)
        shutil.copy(HERE / "chat_template.jinja", made)
        for path in made.iterdir():
            path.replace(out / path.name)


def report(folder: Path) -> None:
    """Sit the exam with the checkpoint as written, and print the share of right answers and an example of each."""
    model, tokenizer = nnxmoe.from_pretrained(folder), nnxmoe.Tokenizer.from_pretrained(folder)
    for subject, results in sit(model, tokenizer, questions()).items():
        right = sum(right for _, _, right in results)
        question, said, _ = results[0]
        print(
            f"{subject:20s} {right:4d} of {len(results):4d} = {right / len(results):.1%}   {question.prompt!r} {said!r}"
        )
    for kind, use in expert_use(model, tokenizer).items():
        print(f"{kind:20s} layer 0: " + " ".join(f"{share:.2f}" for share in use[0]))


def main(argv: Sequence[str] | None = None) -> None:
    """Train, write, examine."""
    parser = argparse.ArgumentParser(prog="python -m nnxmoe.models.demo.train", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-exam", action="store_true", help="write the checkpoint and stop")
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    tokenizer = train_tokenizer(documents(arguments.seed), VOCAB)
    data = pack(tokenizer, documents(arguments.seed + 1), arguments.steps * ROWS, LENGTH)
    print(f"text ready: {np.sum(data.segments > 0):,} tokens, {time.monotonic() - start:.0f} s", flush=True)
    model = train(make_config(tokenizer), data, arguments.steps, arguments.seed)
    write(model, tokenizer, arguments.out.resolve())
    print(f"written to {arguments.out}, {time.monotonic() - start:.0f} s", flush=True)
    if not arguments.no_exam:
        report(arguments.out)


if __name__ == "__main__":
    main()
