"""``nnxmoe chat``: a conversation, line by line."""

import argparse
import contextlib
import sys
from typing import Any

import nnxmoe
from nnxmoe.apps.cli import commands
from nnxmoe.apps.cli.options import add_loading, add_sampling
from nnxmoe.apps.cli.prompts import Speed
from nnxmoe.runtime.progress import say


def options(parser: argparse.ArgumentParser) -> None:
    add_loading(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message at the start of the conversation")
    add_sampling(parser, 256, "the checkpoint's")


def chat(options: argparse.Namespace) -> None:
    """Chat with a model. /clear starts over, /exit ends."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # Windows has no readline
            import readline  # noqa: F401  arrow keys and history for input()
    commands.sampling_of(options)  # a wrong value fails before the model is loaded
    model, tokenizer = commands.load(options)
    sampling = commands.sampling_of(options, nnxmoe.Sampling.from_checkpoint(model))
    opening = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(opening)
    # Fails now rather than after the first line.
    tokenizer.apply_chat_template([*opening, {"role": "user", "content": "Hi"}])
    say("type a message; /clear starts over, /exit ends")
    while (line := _line()) not in (None, "/exit"):
        if line == "/clear":
            messages = list(opening)
            say("conversation cleared")
        elif line.startswith("/"):
            say("%s is not a command; use /clear or /exit", line.split()[0])
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            if said := answer(model, tokenizer, asked, sampling, options):
                messages = [*asked, {"role": "assistant", "content": said}]


def _line() -> str | None:
    """The next line; None at the end of stdin. Ctrl-C at a terminal drops the line that is being typed."""
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
    """Print the answer to a conversation, and what ended it; empty if it was stopped before it began."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    positions = model.config.max_position_embeddings
    if (room := positions - len(ids)) < 1:
        say("the conversation has %d tokens, and the model has %d positions: /clear starts over", len(ids), positions)
        return ""
    most, said, made, stopped = min(room, options.max_new_tokens), "", Speed(), False
    seed = options.seed + len(messages)  # another one in each turn
    pieces = nnxmoe.stream(model, tokenizer, ids, max_new_tokens=most, sampling=sampling, seed=seed)
    try:
        for piece in pieces:
            piece = piece if said else piece.lstrip()  # SentencePiece answers begin with a space
            made.note(pieces.tokens)
            print(piece, end="", flush=True)
            said += piece
    except KeyboardInterrupt:
        if not sys.stdin.isatty():  # only a person can continue the chat
            raise
        stopped = True
    print()
    full = f"cut at the model's {positions} positions (/clear starts over), " if most == room else ""
    cut = full or "cut by --max-new-tokens, "
    cut = "ended by an error, " if pieces.finish == "error" else cut
    end = "stopped, " if stopped else "" if pieces.finish == "stop" else cut
    say("%s%d tokens%s", end, pieces.tokens, made)
    return said
