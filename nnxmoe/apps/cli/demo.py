"""``nnxmoe demo``: a conversation with the embedded model, and a picture of the experts that it used."""

import argparse
import time
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

import nnxmoe
from nnxmoe.apps.cli import commands
from nnxmoe.apps.cli.options import count
from nnxmoe.config.printable import count_text
from nnxmoe.convert.files.hub import DEMO
from nnxmoe.runtime.progress import say

QUESTIONS = (
    "What is the capital of France?",
    "What is 47 + 38?",
    "Write a function that squares a number.",
    "Tell me a story about a fox named Mia.",
)
SHADES = " ░▒▓█"  # of a share of 0, and up to 1, 2, 3 and more times the even share
TRY = """try next:
  nnxmoe chat demo
  nnxmoe generate demo "Once upon a time"
  nnxmoe inspect deepseek-v3"""


def options(parser: argparse.ArgumentParser) -> None:
    what = "maximum number of new tokens per prompt (default 80)"
    parser.add_argument("--max-new-tokens", type=count, default=80, metavar="N", help=what)


def demo(options: argparse.Namespace) -> None:
    """Run the embedded tiny Mixtral, and show which experts it uses."""
    tokenizer, model = nnxmoe.Tokenizer.from_pretrained(DEMO), nnxmoe.from_pretrained(DEMO)
    what = "the embedded model: a Mixtral of %s parameters, trained on generated text, on %s"
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    say(what, count_text(size), commands.devices_text(None))
    talks, made, seconds = [], 0, 0.0
    for question in QUESTIONS:
        message = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True)
        print(f"you:  {question}")
        pieces, answer = nnxmoe.stream(model, tokenizer, ids, max_new_tokens=options.max_new_tokens), ""
        for piece in pieces:
            if not answer:
                started, first = time.perf_counter(), pieces.tokens
                print("demo: ", end="")
            print(piece, end="", flush=True)
            answer += piece
        if answer:
            seconds, made = seconds + time.perf_counter() - started, made + pieces.tokens - first
        print("\n")
        talks.append(ids + tokenizer.encode(answer, add_special_tokens=False))
    if made:
        print(f"{made / seconds:.0f} tokens per second, after the first of each answer\n")
    _show_experts(model, talks)
    print(TRY)


def _show_experts(model: nnxmoe.CausalLM, talks: Sequence[Sequence[int]]) -> None:
    """A row per layer and a column per expert, shaded by the expert's share of all tokens' weights."""
    tokens, mask = np.zeros((2, len(talks), max(map(len, talks))), np.int32)
    for row, ids in enumerate(talks):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, 1
    routing = model(tokens, mask, return_routing=True).routing or {}
    if not routing:
        return
    shares = {}
    for layer, choice in routing.items():
        experts, weights = (np.asarray(a)[mask != 0].ravel() for a in (choice.experts, choice.weights))
        shares[layer] = np.bincount(experts, weights, minlength=choice.scores.shape[-1]) / mask.sum()
    count = len(next(iter(shares.values())))
    print(f"How much of the tokens each of the {count} experts of a layer took, of {mask.sum()} tokens:")
    print("  expert   " + " ".join(f"{expert:>3}" for expert in range(count)))
    for layer, share in shares.items():
        cells = (SHADES[min(4, int(np.ceil(part * count)))] * 3 for part in share)
        print(f"  layer {layer:<3}" + " ".join(["", *cells]) + f"   most: expert {share.argmax()}, {share.max():.0%}")
    even = 1 / count
    print("  " + ", ".join(f"{shade * 3} up to {i * even:.1%}" for i, shade in enumerate(SHADES[1:4], 1)), end="")
    print(f", {SHADES[4] * 3} more; {even:.1%} would be even\n")
