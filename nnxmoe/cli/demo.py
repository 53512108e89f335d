"""``nnxmoe demo``: a conversation with the embedded model, and a picture of the experts that it used."""

import time
from collections.abc import Sequence

import numpy as np

from nnxmoe.generation.decode import stream
from nnxmoe.generation.text import Tokenizer
from nnxmoe.model.causal_lm import CausalLM

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


def run(model: CausalLM, tokenizer: Tokenizer, max_new_tokens: int) -> None:
    """Print the answers while they are generated, their speed, a picture of the experts, and what to try next."""
    talks, count, seconds = [], 0, 0.0
    for question in QUESTIONS:
        message = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True)
        print(f"you:  {question}")
        pieces, answer = stream(model, tokenizer, ids, max_new_tokens=max_new_tokens), ""
        for piece in pieces:
            if not answer:
                started, first = time.perf_counter(), pieces.tokens
                print("demo: ", end="")
            print(piece, end="", flush=True)
            answer += piece
        if answer:
            seconds, count = seconds + time.perf_counter() - started, count + pieces.tokens - first
        print("\n")
        talks.append(ids + tokenizer.encode(answer, add_special_tokens=False))
    if count:
        print(f"{count / seconds:.0f} tokens per second, after the first of each answer\n")
    show_experts(model, talks)
    print(TRY)


def show_experts(model: CausalLM, talks: Sequence[Sequence[int]]) -> None:
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
