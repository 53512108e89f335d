"""Validation of constructor arguments."""

import contextlib
from typing import Any

import jax.numpy as jnp

from nnxmoe.config.printable import short


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
    """``value`` as a NumPy dtype. Raises ValueError for ``where(name=value)`` unless it is a floating-point one."""
    with contextlib.suppress(TypeError):  # of values that are not dtypes
        if value is not None and jnp.issubdtype(dtype := jnp.dtype(value), jnp.floating):
            return dtype
    raise ValueError(f"{where}({name}={short(value)}): give a floating-point dtype, such as jnp.bfloat16")


def check_positive(where: str, name: str, value: Any) -> None:
    """Raise ValueError for ``where(name=value)`` unless the value is a positive integer."""
    if not is_positive(value):
        raise ValueError(f"{where}({name}={short(value)}): give a positive integer")


def check_object(where: str, name: str, value: Any, example: str) -> None:
    """Raise ValueError for ``where(name=value)`` if the value is a class or is not callable."""
    if isinstance(value, type) or not callable(value):
        raise ValueError(f"{where}({name}={short(value)}): give an object such as {example}")
