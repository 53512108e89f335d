"""Validate token ids in arguments: prompts, prefixes, stop ids and keys of ``logit_bias``."""

from collections.abc import Iterable, Sequence
from types import EllipsisType
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Integer

from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_python, whole_number

Ids = Sequence[int] | Integer[Any, "_"]  # Ids of one text: a list, or a NumPy, JAX or torch array.
EosIds = int | np.integer | Ids | None | EllipsisType  # `...` means the checkpoint's EOS tokens.
T = TypeVar("T", bound=Iterable[Any])


def as_token_ids(ids: Any, name: str = "a token id", least: int = 0) -> tuple[int, ...]:
    """Return token ids as a tuple of ints.

    Raises:
        ValueError: if ``ids`` is not a list or one-dimensional array of integers >= ``least``.
    """
    if isinstance(ids, str | bytes | bytearray):
        raise ValueError(f"{ids!r:.60} is a text: encode it with the tokenizer")
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(values, Sequence):
        raise ValueError(f"{name}: ids must be a list or a one-dimensional array, got {short(ids, 60)}")
    return tuple(whole_number(name, value, least) for value in values)


def stop_ids(ids: Any, name: str, least: int = 0) -> tuple[int, ...]:
    """Return stop ids as a tuple. Accepts a single id, several ids or None.

    Raises:
        ValueError: if a value is not an integer >= ``least``.
    """
    if ids is None:
        return ()
    ids = as_python(ids)
    is_sequence = hasattr(ids, "tolist") or (isinstance(ids, Sequence) and not isinstance(ids, str | bytes))
    return as_token_ids(ids if is_sequence else [ids], name, least)


def check_ids(ids: T, vocab: int, name: str = "token ids") -> T:
    """Return ``ids`` unchanged. Raises ValueError if an id is outside the vocabulary."""
    for invalid_id in [i for i in ids if not 0 <= i < vocab][:1]:
        raise ValueError(
            f"{name} must be in 0 … {vocab - 1}, got {invalid_id}: does the tokenizer belong to this model?"
        )
    return ids


def eos_ids(model: Any, eos_token_id: EosIds) -> tuple[int, ...]:
    """Return the ids that end a sequence.

    Args:
        model: model whose checkpoint defines the EOS ids.
        eos_token_id: the ids, or ``...`` to read them from generation_config.json, or from config.json if
            the former has none. Drops ids in these files that are outside the vocabulary.

    Raises:
        ValueError: if a value is not a token id.
    """
    if eos_token_id is not ...:
        return stop_ids(eos_token_id, "eos_token_id")
    value = model.generation_config.get("eos_token_id", model.config.eos_token_id)
    ids = stop_ids(value, "eos_token_id in generation_config.json or config.json", -(2**63))
    return tuple(i for i in ids if 0 <= i < model.config.vocab_size)
