"""``nnxmoe demo``: run the embedded model on a few questions and show the load of its experts."""

import argparse
import time
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

import nnxmoe
from nnxmoe.apps.cli import loading
from nnxmoe.apps.cli.options import count
from nnxmoe.config.printable import count_text
from nnxmoe.convert.files.hub import DEMO
from nnxmoe.runtime.progress import say

EXAMPLE = "demo"

QUESTIONS = (
    "What is the capital of France?",
    "What is 47 + 38?",
    "Write a function that squares a number.",
    "Tell me a story about a fox named Mia.",
)
SHADES = " ░▒▓█"  # Shade per share: zero; up to 1x, 2x and 3x the uniform share; above 3x.
NEXT_COMMANDS = """try next:
  nnxmoe chat demo
  nnxmoe generate demo "Once upon a time"
  nnxmoe inspect deepseek-v3"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``nnxmoe demo``."""
    help_text = "maximum number of new tokens per prompt (default 80)"
    parser.add_argument("--max-new-tokens", type=count, default=80, metavar="N", help=help_text)


def run(options: argparse.Namespace) -> None:
    """Run the embedded tiny Mixtral and show which experts it uses."""
    tokenizer, model = nnxmoe.Tokenizer.from_pretrained(DEMO), nnxmoe.from_pretrained(DEMO)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    message = "embedded model: Mixtral with %s parameters, trained on generated text; running on %s"
    say(message, count_text(num_parameters), loading.devices_text(None))
    conversations, tokens, seconds = [], 0, 0.0
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        print(f"you:  {question}")
        stream = nnxmoe.stream(model, tokenizer, ids, max_new_tokens=options.max_new_tokens)
        answer, started, first = "", 0.0, 0
        for piece in stream:
            if not answer:
                started, first = time.perf_counter(), stream.tokens
                print("demo: ", end="")
            print(piece, end="", flush=True)
            answer += piece
        if answer:
            seconds, tokens = seconds + time.perf_counter() - started, tokens + stream.tokens - first
        print("\n")
        conversations.append(ids + tokenizer.encode(answer, add_special_tokens=False))
    if tokens:
        print(f"{tokens / seconds:.0f} tokens per second, after the first token of each answer\n")
    _show_experts(model, conversations)
    print(NEXT_COMMANDS)


def _show_experts(model: nnxmoe.CausalLM, conversations: Sequence[Sequence[int]]) -> None:
    """Print one row per layer and one column per expert, shaded by the expert's share of the routing weights."""
    tokens, mask = np.zeros((2, len(conversations), max(map(len, conversations))), np.int32)
    for row, ids in enumerate(conversations):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, 1
    routing = model(tokens, mask, return_routing=True).routing or {}
    if not routing:
        return
    shares = {}
    for layer, choice in routing.items():
        experts, weights = (np.asarray(array)[mask != 0].ravel() for array in (choice.experts, choice.weights))
        shares[layer] = np.bincount(experts, weights, minlength=choice.scores.shape[-1]) / mask.sum()
    num_experts = len(next(iter(shares.values())))
    print(f"Share of tokens routed to each of the {num_experts} experts per layer, over {mask.sum()} tokens:")
    print("  expert   " + " ".join(f"{expert:>3}" for expert in range(num_experts)))
    for layer, share in shares.items():
        cells = (SHADES[min(4, int(np.ceil(fraction * num_experts)))] * 3 for fraction in share)
        print(f"  layer {layer:<3}" + " ".join(["", *cells]) + f"   most: expert {share.argmax()}, {share.max():.0%}")
    uniform_share = 1 / num_experts
    print(
        "  " + ", ".join(f"{shade * 3} up to {i * uniform_share:.1%}" for i, shade in enumerate(SHADES[1:4], 1)), end=""
    )
    print(f", {SHADES[4] * 3} more; {uniform_share:.1%} is the uniform share\n")
