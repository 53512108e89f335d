"""``nnxmoe chat``: an interactive conversation with a model."""

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
    loading.sampling_of(options)  # raises for invalid values before the model is loaded
    model, tokenizer = loading.load(options)
    sampling = loading.sampling_of(options, nnxmoe.Sampling.from_checkpoint(model))
    system_messages = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(system_messages)
    # Raise for an unusable chat template now instead of after the first message.
    tokenizer.apply_chat_template([*system_messages, {"role": "user", "content": "Hi"}])
    say("type a message; /clear starts over, /exit ends")
    while (line := _read_line()) not in (None, "/exit"):
        if line == "/clear":
            messages = list(system_messages)
            say("conversation cleared")
        elif line.startswith("/"):
            say("%s is not a command; use /clear or /exit", line.split()[0])
        elif line:
            conversation = [*messages, {"role": "user", "content": line}]
            text = answer(model, tokenizer, conversation, sampling, options)
            if text:
                messages = [*conversation, {"role": "assistant", "content": text}]


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
        say("type /exit or Ctrl-D to end the chat")
        return ""


def answer(model: Any, tokenizer: Any, messages: list[dict[str, str]], sampling: Any, options: Any) -> str:
    """Stream the answer to a conversation to stdout, log why it ended, and return it.

    The answer is empty if the conversation fills all positions of the model.
    """
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    max_positions = model.config.max_position_embeddings
    remaining_positions = max_positions - len(ids)
    if remaining_positions < 1:
        say(
            "the conversation has %d tokens, but the model has %d positions: /clear starts over",
            len(ids),
            max_positions,
        )
        return ""
    max_new_tokens = min(remaining_positions, options.max_new_tokens)
    seed = options.seed + len(messages)  # a different seed per turn
    stream = nnxmoe.stream(model, tokenizer, ids, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    text, speed, is_interrupted = "", Speed(), False
    try:
        for piece in stream:
            piece = piece if text else piece.lstrip()  # SentencePiece answers start with a space
            speed.update(stream.tokens)
            print(piece, end="", flush=True)
            text += piece
    except KeyboardInterrupt:
        if not sys.stdin.isatty():  # without a terminal, Ctrl-C ends the command
            raise
        is_interrupted = True
    print()
    if is_interrupted:
        ending = "stopped, "
    elif stream.finish == "stop":
        ending = ""
    elif stream.finish == "error":
        ending = "ended by an error, "
    elif max_new_tokens == remaining_positions:
        ending = f"cut at the model's {max_positions} positions (/clear starts over), "
    else:
        ending = "cut by --max-new-tokens, "
    say("%s%d tokens%s", ending, stream.tokens, speed)
    return text
