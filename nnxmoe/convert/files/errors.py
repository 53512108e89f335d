"""The error of unusable checkpoints, and what its messages share."""

import re
from pathlib import Path


class CheckpointError(ValueError):
    """Raised for an unusable checkpoint; the message names the file, the tensor or field, its value and the remedy."""


def error_summary(error: BaseException) -> str:
    """Type and message of an error, without what TensorStore appends (``[tensorstore_spec='…']``), and with the middle
    cut out of a long one."""
    text = re.sub(r" \[[a-z_ ]+='.*", "", f"{type(error).__name__}: {error}", flags=re.DOTALL)
    return text if len(text) < 400 else f"{text[:150]} … {text[-200:]}"


def check_orbax_path(folder: Path) -> None:
    """Raise CheckpointError for a path that Orbax's storage library cannot name, although Python can."""
    if "\\" in str(folder) or not str(folder).isprintable():
        raise CheckpointError(
            f"{str(folder)!a}: Orbax cannot use paths with backslashes or control characters: rename it"
        )
