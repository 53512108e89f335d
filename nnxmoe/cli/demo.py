"""``nnxmoe demo``: answers a few prompts with the embedded model, and shows which experts it uses."""

import os
from collections import Counter

import numpy as np

from nnxmoe.generation.decode import stream
from nnxmoe.generation.text import Tokenizer
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.runtime.progress import say

QUESTION, TEXT = "question", "text"
PROMPTS = (
    (QUESTION, "What is the capital of France?"),
    (QUESTION, "What is 47 + 38?"),
    (QUESTION, "Write a function that squares a number."),
    (TEXT, "Once upon a time there was a clever fox named Mia."),
)
BARS = " ▁▂▃▄▅▆▇█"


def run(model: CausalLM, tokenizer: Tokenizer, max_new_tokens: int) -> None:
    """Stream the completion of every prompt to stdout, followed by the experts used."""
    for kind, prompt in PROMPTS:
        text = prompt
        if kind == QUESTION:
            message = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(message, add_generation_prompt=True)
        print(f"\n{kind}: {prompt}")
        print("answer: " if kind == QUESTION else prompt, end="", flush=True)
        written = ""
        ids = tokenizer.encode(text, add_special_tokens=kind == TEXT)
        for piece in stream(model, tokenizer, ids, max_new_tokens=max_new_tokens):
            print(piece, end="", flush=True)
            written += piece
        print()
        show_experts(model, tokenizer, ids + tokenizer.encode(written, add_special_tokens=False))


def show_experts(model: CausalLM, tokenizer: Tokenizer, ids: list[int]) -> None:
    """One line per layer with the share of each expert; then the tokens by first expert of the last layer."""
    routing = model(np.asarray([ids]), return_routing=True).routing or {}
    first = np.zeros(0, int)
    for layer, choice in routing.items():
        experts, weights = np.asarray(choice.experts[0]), np.asarray(choice.weights[0])
        count = choice.scores.shape[-1]
        share = np.bincount(experts.reshape(-1), weights.reshape(-1), minlength=count) / len(ids)
        bars = "".join(BARS[min(8, round(float(s) * 16))] for s in share)
        busiest = int(share.argmax())
        print(f"  layer {layer}: experts 0-{count - 1} [{bars}]  most used: {busiest} ({share[busiest]:.0%})")
        first = experts[np.arange(len(ids)), weights.argmax(axis=1)]
    if routing:
        taken = {
            e: _words(tokenizer, [i for i, f in zip(ids, first, strict=True) if f == e]) for e in sorted(set(first))
        }
        print(f"  tokens by first expert of layer {max(routing)}:")
        for expert, words in taken.items():
            print(f"    {expert}: {words}")


def _words(tokenizer: Tokenizer, ids: list[int], limit: int = 12) -> str:
    most = [tokenizer.decode([i]) for i, _ in Counter(ids).most_common(limit)]
    return " ".join(repr(word) for word in most)


def announce(model: CausalLM, folder: str | os.PathLike[str]) -> None:
    """Log what is being run."""
    c = model.config
    say(
        "embedded %s: %d layers, width %d, trained on generated text (%s)",
        type(model).__name__,
        c.num_hidden_layers,
        c.hidden_size,
        os.fspath(folder),
    )
