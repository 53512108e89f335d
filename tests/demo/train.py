"""Trains the checkpoint in models/demo: `python -m tests.demo.train [--steps N] [--out DIR] [--seed S]`."""

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon
from tokenizers import Tokenizer

import nnxmoe
from nnxmoe.models import Mixtral, MixtralConfig
from nnxmoe.train import Objective, fit
from tests.demo.corpus import BOS, END, EOS, PAD, documents
from tests.demo.exam import expert_use, questions, sit
from tests.demo.tokens import Packed, pack, save_tokenizer, special_ids, train_tokenizer

FOLDER = Path(nnxmoe.models.__file__).parent / "demo"
STEPS = 8000
VOCAB, ROWS, LENGTH = 768, 8, 144  # a step sees ROWS rows of LENGTH tokens
MATRICES, OTHERS, BALANCE = 0.014, 0.015, 0.005  # peak learning rates; weight of the balance loss


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


def optimizer(model: nnxmoe.CausalLM, steps: int) -> optax.GradientTransformation:
    """Muon (Jordan 2024) for the matrices of the layers; Adam for the embedding, the norms and the routers."""

    def matrix(variable: Any) -> MuonDimensionNumbers | None:
        axes, inputs = variable.get_metadata()["out_sharding"], variable.get_metadata()["inputs"]
        if inputs is None or "router" in axes:
            return None
        first = int(axes[0] == "expert")
        return MuonDimensionNumbers(tuple(range(first, first + inputs)), tuple(range(first + inputs, len(axes))))

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, min(100, steps // 10), steps)

    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    kinds: Any = {".".join(map(str, path)): matrix(variable) for path, variable in flat}
    rule = muon(
        schedule(MATRICES),
        adam_learning_rate=schedule(OTHERS),
        weight_decay=0.1,
        muon_weight_dimension_numbers=lambda _: kinds,
        consistent_rms=0.2,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


def train(config: MixtralConfig, data: Packed, steps: int, seed: int) -> nnxmoe.CausalLM:
    """The model after `steps` steps: parameters and activations are float32 meanwhile, bfloat16 when it is done."""
    strategy = nnxmoe.Strategy(compute_dtype=jnp.float32)
    model = Mixtral(config, strategy, dtype=jnp.bfloat16, rngs=nnx.Rngs(seed))
    batches = (
        {"tokens": rows.tokens, "segment_ids": rows.segments, "loss_mask": rows.learn}
        for rows in (Packed(*(x[i * ROWS : (i + 1) * ROWS] for x in data)) for i in range(steps))
    )
    objective = Objective(balance=BALANCE)
    return fit(model, batches, optimizer=optimizer(model, steps), steps=steps, objective=objective, seed=seed).model


def write(model: nnxmoe.CausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """The whole checkpoint, made in a temporary folder beside `out` and then moved into it file by file."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        made = Path(folder) / "checkpoint"
        nnxmoe.save_pretrained(model, made)
        save_tokenizer(tokenizer, made, model.config.max_position_embeddings)
        shutil.copy(FOLDER / "chat_template.jinja", made)
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
    parser = argparse.ArgumentParser(prog="python -m tests.demo.train", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=FOLDER)
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
