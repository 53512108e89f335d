"""What objects are made of, checked when they are made."""

from typing import Any


def is_positive(value: Any) -> bool:
    """Whether this is an integer from 1: True is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_positive(where: str, name: str, value: Any) -> None:
    """ValueError where ``where(name=value)`` is given something else than a positive integer."""
    if not is_positive(value):
        raise ValueError(f"{where}({name}={value!r}): give a positive integer")


def check_object(where: str, name: str, value: Any, example: str) -> None:
    """ValueError where ``where(name=value)`` is given a class, or what cannot be called, instead of an object."""
    if isinstance(value, type) or not callable(value):
        raise ValueError(f"{where}({name}={value!r}): give an object such as {example}")
