"""Command-line options that several commands of ``nnxmoe`` share, and parsers of their values."""

import argparse
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from nnxmoe.config.printable import parse_bytes

DTYPES = ("float32", "bfloat16", "float16")


def count(text: str) -> int:
    """Parse a positive integer."""
    if not re.fullmatch("[0-9]{1,15}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def natural(text: str) -> int:
    """Parse a non-negative integer."""
    return 0 if text == "0" else count(text)


def size(text: str) -> int:
    """Parse a number of bytes, such as 2GB or 0."""
    try:
        return 0 if text == "0" else parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def nonempty(text: str) -> str:
    """Return the text. Raises ArgumentTypeError if the text is empty."""
    if not text:
        raise argparse.ArgumentTypeError("the text is empty")
    return text


def mesh(text: str) -> Any:
    """Parse axis sizes such as ``fsdp=4,expert=8`` into an abstract mesh."""
    from nnxmoe.mesh import abstract_mesh

    try:
        return abstract_mesh(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _quantization(text: str) -> str:
    from nnxmoe.model.quantization.methods import parse_method

    try:
        parse_method(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def add_model(parser: argparse.ArgumentParser, help_text: str = "a folder, a GGUF file, a hub id, or 'demo'") -> None:
    """Add MODEL and the options that select its files and dtype."""
    add = parser.add_argument
    add("model", metavar="MODEL", help=help_text)
    add("--dtype", choices=DTYPES, help="dtype of the weights (default: as stored)")
    add("--revision", help="branch, tag or commit on the hub")
    add("--local-files-only", action="store_true", help="use cached files only, without contacting the hub")


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Add the options that `nnxmoe.apps.cli.loading.load` reads."""
    add_model(parser)
    add_adapter(parser)
    add_quantize(parser)
    add_mesh(parser)


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add ``--mesh``."""
    parser.add_argument("--mesh", type=mesh, metavar="AXES", help="shard the model, such as tensor=8 or expert=8")


def add_adapter(parser: argparse.ArgumentParser) -> None:
    """Add ``--adapter``."""
    help_text = "merge this LoRA adapter (PEFT or nnxmoe) into the model"
    parser.add_argument("--adapter", metavar="FOLDER", help=help_text)


def add_quantize(parser: argparse.ArgumentParser, *, keep: bool = True) -> None:
    """Add ``--quantize`` and, if ``keep``, ``--keep-quantized``."""
    help_text = "quantize to int8, int4, int4:32 (groups of 32), fp8 or, by part, experts=int4,others=int8,head=int8"
    parser.add_argument("--quantize", type=_quantization, metavar="METHOD", help=help_text)
    if keep:
        help_text = "keep the checkpoint's FP8, MXFP4, int8, int4 or NF4 weights quantized in memory"
        parser.add_argument("--keep-quantized", action="store_true", help=help_text)


def add_slots(add: Callable[..., Any]) -> None:
    """Add ``--slots``. ``add`` is ``add_argument`` of a parser or an argument group."""
    add("--slots", type=count, default=8, metavar="N", help="samples decoded together in one batch (default 8)")


class DraftChoice(NamedTuple):
    """Value of ``--draft``.

    Attributes:
        source: prompt, mtp or auto.
        drafts: Drafted tokens per step. `None` if the option does not set it.
    """

    source: str
    drafts: int | None


def _draft(text: str) -> DraftChoice:
    match = re.fullmatch("(prompt|mtp)(?::([1-9][0-9]{0,2}))?|(auto)", text)
    if match is None:
        forms = "prompt, prompt:K, mtp, mtp:K or auto, with K drafts per step"
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {forms}")
    return DraftChoice(match[1] or match[3], int(match[2]) if match[2] else None)


def add_draft(parser: argparse.ArgumentParser) -> None:
    """Add ``--draft``."""
    parser.add_argument(
        "--draft",
        type=_draft,
        metavar="SOURCE",
        help="speculative decoding: verify drafted tokens in each step, without changing the text (up to rounding). "
        "prompt[:K] drafts the K tokens after an earlier occurrence of the newest tokens (default 7). mtp[:K] drafts K "
        "tokens with the model's prediction layer (default 1). auto uses mtp if the model has the layer, else "
        "prompt, and raises an error if no speed-up is expected",
    )


def add_sampling(parser: argparse.ArgumentParser, tokens: int, default: str) -> None:
    """Add options for sampling and for the maximum number of new tokens.

    Args:
        parser: Parser of a command.
        tokens: Default of ``--max-new-tokens``.
        default: Default temperature, as shown in the help text.
    """
    add = parser.add_argument
    help_text = f"maximum number of new tokens (default {tokens})"
    add("--max-new-tokens", type=count, default=tokens, metavar="N", help=help_text)
    add("--temperature", type=float, metavar="T", help=f"0 always picks the most likely token (default: {default})")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens (0: all)")
    add("--top-p", type=float, metavar="P", help="sample from the most likely tokens whose probabilities sum to P")
    add("--min-p", type=float, metavar="P", help="sample from tokens at least P times as likely as the best")
    add("--repetition-penalty", type=float, metavar="R", help="values above 1 discourage repetition")
    add(
        "--presence-penalty",
        type=float,
        metavar="R",
        help="-2 to 2, subtracted from the logits of tokens already generated",
    )
    add("--frequency-penalty", type=float, metavar="R", help="-2 to 2, subtracted once per occurrence of a token")
    add("--seed", type=int, default=0, metavar="S", help="random seed (default 0)")
