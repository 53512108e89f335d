"""``--draft`` of ``nnxmoe generate`` and ``nnxmoe serve``."""

import argparse
import re
from typing import Any, NamedTuple

import nnxmoe

FORMS = "prompt, prompt:K, mtp, mtp:K or auto, with K drafts per step"


class Choice(NamedTuple):
    """``source``: prompt, mtp or auto. ``count``: drafts per step, None for the default."""

    source: str
    count: int | None


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft",
        type=_choice,
        metavar="SOURCE",
        help="verify several drafted tokens per step; the text stays the same. prompt[:K]: what followed the newest "
        "tokens before (K = 7); mtp[:K]: the model's own prediction layer (K = 1); auto: the one that the model has, "
        "refused where it cannot pay",
    )


def _choice(text: str) -> Choice:
    found = re.fullmatch("(prompt|mtp)(?::([1-9][0-9]{0,2}))?|(auto)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {FORMS}")
    return Choice(found[1] or found[3], int(found[2]) if found[2] else None)


def needs_mtp(choice: Choice | None, model: str, options: argparse.Namespace) -> bool:
    """Whether the layers for multi-token prediction must be loaded; with ``auto``, whether the checkpoint has them."""
    if choice is None or choice.source != "auto":
        return choice is not None and choice.source == "mtp"
    from nnxmoe.apps.cli.summary import find
    from nnxmoe.model.mtp import has_mtp
    from nnxmoe.model.weight_names import prefix_of
    from nnxmoe.models import family_of

    config, arrays = find(model, options.revision, options.local_files_only)
    family = family_of(config)
    prefix = family.mtp_prefixes[0].format(0) if family.mtp_prefixes else prefix_of(config.num_hidden_layers)
    return has_mtp(config, family.hf) and any(name.startswith(prefix) for name in arrays)


def draft_of(choice: Choice | None, model: nnxmoe.CausalLM) -> Any:
    """The ``draft`` of an engine with this model."""
    if choice is None or choice.source == "auto":
        return None if choice is None else "auto"
    if choice.source == "prompt":
        return nnxmoe.PromptLookup(choice.count or 7)
    return nnxmoe.MTPDraft.of(model, choice.count or 1)
