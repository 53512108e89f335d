"""Validation of arguments: one function per type of value."""

import contextlib
import os
from typing import Any

import jax.numpy as jnp

from nnxmoe.config.printable import short


def as_python(value: Any) -> Any:
    """Convert a NumPy, JAX or torch scalar to a Python number. Returns other values and traced scalars unchanged."""
    if getattr(value, "shape", None) != () or not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (TypeError, NotImplementedError):  # a traced value or a JAX random key
        return value


def whole_number(name: str, value: Any, least: int, below: int = 2**63) -> int:
    """Convert an integer, or a float or scalar array with an integer value, to an int. Raises ValueError for other
    values, bools and integers out of range."""
    number = value if type(value) is int else as_python(value)
    is_whole = isinstance(number, int) and not isinstance(number, bool)
    is_whole = is_whole or (isinstance(number, float) and number.is_integer())
    if not is_whole or not least <= number < below:
        raise ValueError(f"{name} must be a {below.bit_length()}-bit integer >= {least}, got {short(value)}")
    return int(number)


def real_number(name: str, value: Any, least: float, most: float) -> float:
    """Convert a number or scalar array from ``least`` to ``most`` to a Python number. Raises ValueError for other
    values, bools and NaN."""
    number = as_python(value)
    if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number <= most:
        raise ValueError(f"{name} must be a number from {least:g} to {most:g}, got {short(value)}")
    return number


def check_type(name: str, value: Any, kind: Any, example: str) -> None:
    """Raise ValueError unless the value is an instance of a class or of a union of classes."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}={short(value)}: give {example}")


def is_positive(value: Any) -> bool:
    """Whether the value is an int >= 1 (bool excluded), below 2**32."""
    return is_integer(value, 1)


def is_integer(value: Any, least: int) -> bool:
    """Whether the value is an int >= ``least`` (bool excluded), below 2**32."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**32


def is_between(value: Any, least: float, most: float) -> bool:
    """Whether the value is a number (bool excluded) between the two, which are excluded."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least < value < most


def floating_dtype(where: str, name: str, value: Any) -> Any:
    """Convert ``value`` to a NumPy dtype. Raises ValueError for ``where(name=value)`` unless it is floating-point."""
    with contextlib.suppress(TypeError):  # raised by jnp.dtype for values that are not dtypes
        if value is not None and jnp.issubdtype(dtype := jnp.dtype(value), jnp.floating):
            return dtype
    raise ValueError(f"{where}({name}={short(value)}): pass a floating-point dtype, such as jnp.bfloat16")


def check_positive(where: str, name: str, value: Any) -> None:
    """Raise ValueError for ``where(name=value)`` unless the value is a positive integer."""
    if not is_positive(value):
        raise ValueError(f"{where}({name}={short(value)}): give a positive integer")


def set_positive(record: Any, *names: str) -> None:
    """Replace fields of a dataclass, frozen or not, by ints. Raises ValueError unless they are positive integers."""
    for name in names:
        number = as_python(getattr(record, name))
        check_positive(type(record).__name__, name, number)
        object.__setattr__(record, name, number)


def check_object(where: str, name: str, value: Any, example: str) -> None:
    """Raise ValueError for ``where(name=value)`` if the value is a class or is not callable."""
    if isinstance(value, type) or not callable(value):
        raise ValueError(f"{where}({name}={short(value)}): give an object such as {example}")


def path_text(path: str | os.PathLike[str], error: type[ValueError] = ValueError, name: str = "folder") -> str:
    """Return the path in argument ``name`` as text. Raises for other types, such as None from an unset option, and for
    empty text, which would be the current folder."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise error(f"{name} is {short(path)}: pass a path, as a string or a pathlib.Path")
    return text
