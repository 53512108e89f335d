"""``nnxmoe chat``: a conversation, line by line."""

import argparse
import contextlib
import sys
from typing import Any

import nnxmoe
from nnxmoe.apps.cli import loading
from nnxmoe.apps.cli.loading import Speed
from nnxmoe.apps.cli.options import add_loading, add_sampling
from nnxmoe.runtime.progress import say

EXAMPLE = "chat demo"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``nnxmoe chat``."""
    add_loading(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message at the start of the conversation")
    add_sampling(parser, 256, "the checkpoint's")


def run(options: argparse.Namespace) -> None:
    """Chat with a model. /clear starts over, /exit ends."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # Windows has no readline
            import readline  # noqa: F401  arrow keys and history for input()
    loading.sampling_of(options)  # invalid values fail before the model is loaded
    model, tokenizer = loading.load(options)
    sampling = loading.sampling_of(options, nnxmoe.Sampling.from_checkpoint(model))
    opening = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(opening)
    # Raise for an unusable template now, not after the first line.
    tokenizer.apply_chat_template([*opening, {"role": "user", "content": "Hi"}])
    say("type a message; /clear starts over, /exit ends")
    while (line := _read_line()) not in (None, "/exit"):
        if line == "/clear":
            messages = list(opening)
            say("conversation cleared")
        elif line.startswith("/"):
            say("%s is not a command; use /clear or /exit", line.split()[0])
        elif line:
            turn = [*messages, {"role": "user", "content": line}]
            text = answer(model, tokenizer, turn, sampling, options)
            if text:
                messages = [*turn, {"role": "assistant", "content": text}]


def _read_line() -> str | None:
    """Read a line, or return None at the end of stdin. On a terminal, Ctrl-C discards the current line."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print()
        say("/exit or Ctrl-D ends")
        return ""


def answer(model: Any, tokenizer: Any, messages: list[dict[str, str]], sampling: Any, options: Any) -> str:
    """Print and return the answer to a conversation, and report how it ended.

    The answer is empty if no positions are left.
    """
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    positions = model.config.max_position_embeddings
    room = positions - len(ids)
    if room < 1:
        say("the conversation has %d tokens, and the model has %d positions: /clear starts over", len(ids), positions)
        return ""
    max_new_tokens = min(room, options.max_new_tokens)
    seed = options.seed + len(messages)  # differs per turn
    stream = nnxmoe.stream(model, tokenizer, ids, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    text, speed, interrupted = "", Speed(), False
    try:
        for piece in stream:
            piece = piece if text else piece.lstrip()  # SentencePiece answers start with a space
            speed.update(stream.tokens)
            print(piece, end="", flush=True)
            text += piece
    except KeyboardInterrupt:
        if not sys.stdin.isatty():  # only a person can continue the chat
            raise
        interrupted = True
    print()
    if interrupted:
        ending = "stopped, "
    elif stream.finish == "stop":
        ending = ""
    elif stream.finish == "error":
        ending = "ended by an error, "
    elif max_new_tokens == room:
        ending = f"cut at the model's {positions} positions (/clear starts over), "
    else:
        ending = "cut by --max-new-tokens, "
    say("%s%d tokens%s", ending, stream.tokens, speed)
    return text
