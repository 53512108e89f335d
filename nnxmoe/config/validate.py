"""Validation of constructor arguments."""

from typing import Any


def is_positive(value: Any) -> bool:
    """Whether the value is an int >= 1 (bool excluded)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_positive(where: str, name: str, value: Any) -> None:
    """Raises ValueError for ``where(name=value)`` unless the value is a positive integer."""
    if not is_positive(value):
        raise ValueError(f"{where}({name}={value!r}): give a positive integer")


def check_object(where: str, name: str, value: Any, example: str) -> None:
    """Raises ValueError for ``where(name=value)`` if the value is a class or is not callable."""
    if isinstance(value, type) or not callable(value):
        raise ValueError(f"{where}({name}={value!r}): give an object such as {example}")
