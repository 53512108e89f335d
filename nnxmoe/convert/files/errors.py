"""Error class for unusable checkpoints, and helpers for its messages."""

import re
from pathlib import Path


class CheckpointError(ValueError):
    """Error for an unusable checkpoint. The message names the file, the tensor or field, the value and the remedy."""


def error_summary(error: BaseException) -> str:
    """Return the type and message of an error.

    Removes TensorStore's suffix (``[tensorstore_spec='…']``), and the middle of texts of 400 or more characters.
    """
    text = re.sub(r" \[[a-z_ ]+='.*", "", f"{type(error).__name__}: {error}", flags=re.DOTALL)
    return text if len(text) < 400 else f"{text[:150]} … {text[-200:]}"


def check_orbax_path(folder: Path) -> None:
    """Raise CheckpointError if TensorStore, Orbax's storage library, does not support the path."""
    if "\\" in str(folder) or not str(folder).isprintable():
        raise CheckpointError(
            f"{str(folder)!a}: Orbax cannot use paths with backslashes or control characters: rename the folder"
        )
