"""Argument validation, with one function per type of value."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from nnxmoe.config.printable import short

_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16", "float": "float32"}


def as_python(value: Any) -> Any:
    """Convert a NumPy, JAX or torch scalar to a Python number. Returns tracers and other values unchanged."""
    if getattr(value, "shape", None) != () or not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (TypeError, NotImplementedError):  # a traced value or a JAX random key
        return value


def python_values(value: Any) -> Any:
    """Apply `as_python` to all items of nested lists, tuples and dicts. Converts lists to tuples."""
    if isinstance(value, dict):
        return {name: python_values(item) for name, item in value.items()}
    return tuple(map(python_values, value)) if isinstance(value, list | tuple) else as_python(value)


def as_number(value: Any) -> int | float | None:
    """Convert a Python number or a scalar array to a Python number.

    Returns None for bools, NaN and other values.
    """
    number = as_python(value)
    valid = isinstance(number, int | float) and not isinstance(number, bool) and number == number
    return number if valid else None


def as_integer(value: Any, least: int, below: int = 2**32) -> int | None:
    """Convert a number with an integral value (int, float or scalar array) to an int.

    Returns None for bools, for other values, and for integers outside ``least`` <= value < ``below``.
    """
    number = as_number(value)
    return int(number) if number is not None and least <= number < below and number == int(number) else None


def whole_number(name: str, value: Any, least: int, below: int = 2**63) -> int:
    """Convert a value to an int with `as_integer`. Raises a ValueError that names ``name`` if the value is invalid."""
    if (number := as_integer(value, least, below)) is None:
        raise ValueError(f"{name} must be a {below.bit_length()}-bit integer >= {least}, got {short(value)}")
    return number


def real_number(name: str, value: Any, least: float, most: float = sys.float_info.max, positive: bool = False) -> float:
    """Convert a value to a number with `as_number`.

    Raises:
        ValueError: If the value is not a number, is outside [``least``, ``most``], or is not positive if
            ``positive`` is True.
    """
    if (number := as_number(value)) is None or not least <= number <= most or (positive and number <= 0):
        number_type, upper_bound = (
            "positive number" if positive else "number",
            f" to {most:g}" if most < sys.float_info.max else "",
        )
        raise ValueError(f"{name} must be a finite {number_type} from {least:g}{upper_bound}, got {short(value)}")
    return number


def set_numbers(record: Any, *names: str, positive: bool = False) -> None:
    """Convert fields of a (frozen) dataclass to Python numbers >= 0 in place. See `real_number`."""
    for name in names:
        number = real_number(f"{type(record).__name__}: {name}", getattr(record, name), 0, positive=positive)
        object.__setattr__(record, name, number)


def check_type(name: str, value: Any, expected: Any, example: str) -> None:
    """Raise ValueError unless the value is an instance of ``expected`` (a class or a union of classes)."""
    if not isinstance(value, expected):
        raise ValueError(f"{name}={short(value)}: pass {example}")


def iterator_of(name: str, value: Any, example: str) -> Iterator[Any]:
    """Return an iterator of the value. Raises ValueError if the value is not iterable."""
    try:
        return iter(value)
    except TypeError as error:
        raise ValueError(f"{name}={short(value)}: pass {example}") from error


def as_dtype(value: Any) -> Any:
    """Convert a NumPy, JAX or torch dtype, or a name such as "bf16", to a NumPy dtype.

    Returns None for other values.
    """
    name = str(value).removeprefix("torch.")
    try:
        return jnp.dtype(_DTYPE_NAMES.get(name, name if name != str(value) else value))
    except TypeError:
        return None


def floating_dtype(where: str, name: str, value: Any) -> jnp.dtype:
    """Convert ``value`` with `as_dtype`. Raises ValueError with ``where(name=value)`` unless it is a floating dtype."""
    dtype = None if value is None else as_dtype(value)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{where}({name}={short(value)}): pass a floating-point dtype, such as jnp.bfloat16")
    return dtype


def check_positive(where: str, name: str, value: Any) -> int:
    """Convert a positive integer with `as_integer`, or raise ValueError with ``where(name=value)``."""
    if (number := as_integer(value, 1)) is None:
        raise ValueError(f"{where}({name}={short(value)}): pass a positive integer")
    return number


def set_positive(record: Any, *names: str, where: str = "") -> None:
    """Convert fields of a (frozen) dataclass to positive ints in place.

    Raises:
        ValueError: If a field is not a positive integer. Fields whose default is None may be None.
    """
    for name in names:
        value = getattr(record, name)
        if value is not None or getattr(type(record), name, ...) is not None:
            object.__setattr__(record, name, check_positive(where or type(record).__name__, name, value))


def check_object(where: str, name: str, value: Any, example: str) -> None:
    """Raise ValueError with ``where(name=value)`` if the value is a class or is not callable."""
    if isinstance(value, type) or not callable(value):
        raise ValueError(f"{where}({name}={short(value)}): pass an object such as {example}")


def path_text(path: str | os.PathLike[str], error: type[ValueError] = ValueError, name: str = "folder") -> str:
    """Convert a path to str.

    Raises ``error`` with ``name`` if the value is not a path (such as None from an unset option) or is empty. An empty
    path would mean the current directory.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise error(f"{name} is {short(path)}: pass a path, as a string or a pathlib.Path")
    return text
