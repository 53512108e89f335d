"""Options that several commands of ``nnxmoe`` share, and the values that they take."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from nnxmoe.config.printable import parse_bytes

DTYPES = ("float32", "bfloat16", "float16")


def count(text: str) -> int:
    """A positive integer."""
    if not re.fullmatch("[0-9]{1,15}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def natural(text: str) -> int:
    """An integer of at least 0."""
    return 0 if text == "0" else count(text)


def size(text: str) -> int:
    """Bytes, such as 2GB, or 0."""
    try:
        return 0 if text == "0" else parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def text(given: str) -> str:
    """A text that is not empty."""
    if not given:
        raise argparse.ArgumentTypeError("the text is empty")
    return given


def mesh(text: str) -> Any:
    """An abstract mesh of sizes such as ``fsdp=4,expert=8``."""
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


def add_model(parser: argparse.ArgumentParser, what: str = "a folder, a GGUF file, a hub id, or 'demo'") -> None:
    """MODEL, and how its files are found."""
    add = parser.add_argument
    add("model", metavar="MODEL", help=what)
    add("--dtype", choices=DTYPES, help="dtype of the weights (default: as stored)")
    add("--revision", help="branch, tag or commit on the hub")
    add("--local-files-only", action="store_true", help="use cached files only, without contacting the hub")


def add_loading(parser: argparse.ArgumentParser) -> None:
    """MODEL, an adapter, quantisation and a mesh, for commands that run a model."""
    add_model(parser)
    add_adapter(parser)
    add_quantize(parser)
    add_mesh(parser)


def add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mesh", type=mesh, metavar="AXES", help="shard over devices, such as tensor=8 or expert=8")


def add_adapter(parser: argparse.ArgumentParser) -> None:
    what = "merge this LoRA adapter (of peft or of nnxmoe) into the model"
    parser.add_argument("--adapter", metavar="FOLDER", help=what)


def add_quantize(parser: argparse.ArgumentParser, *, keep: bool = True) -> None:
    """``--quantize``, and ``--keep-quantized`` if ``keep``."""
    what = "round weights to int8, int4 (int4:32: groups of 32), fp8, or experts=int4,others=int8,head=int8; lossy"
    parser.add_argument("--quantize", type=_quantization, metavar="METHOD", help=what)
    if keep:
        what = "keep the checkpoint's FP8, MXFP4, int8, int4 or NF4 codes in memory"
        parser.add_argument("--keep-quantized", action="store_true", help=what)


def add_slots(add: Callable[..., Any]) -> None:
    add("--slots", type=count, default=8, metavar="N", help="samples computed together, as one batch (default 8)")


def add_sampling(parser: argparse.ArgumentParser, tokens: int, default: str) -> None:
    """Add options for sampling and for the maximum number of new tokens. ``default``: description of the default;
    ``tokens``: default number."""
    add, what = parser.add_argument, f"maximum number of new tokens (default {tokens})"
    add("--max-new-tokens", type=count, default=tokens, metavar="N", help=what)
    add("--temperature", type=float, metavar="T", help=f"0: always the most likely token (default: {default})")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens (0: all)")
    add("--top-p", type=float, metavar="P", help="sample from the most likely tokens whose probabilities sum to P")
    add("--min-p", type=float, metavar="P", help="sample from tokens at least P times as likely as the best")
    add("--repetition-penalty", type=float, metavar="R", help="above 1: discourages repetition")
    add(
        "--presence-penalty",
        type=float,
        metavar="R",
        help="-2 to 2: subtracted from logits of tokens already generated",
    )
    add("--frequency-penalty", type=float, metavar="R", help="-2 to 2: subtracted once per time they were generated")
    add("--seed", type=int, default=0, metavar="S", help="the same seed gives the same text")
