"""Cache keys for compiled programs that compare functions and settings by value.

`jax.jit` compares functions by identity. However, two calls of ``optax.adam(1e-4)`` return different
closures that compute the same result. A notebook cell that runs twice also creates new functions.
"""

import dataclasses
import dis
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

_LIBRARIES = {"nnxmoe", "jax", "jaxlib", "flax", "optax", "numpy", "chex", "ml_dtypes", "builtins"}
_PLAIN = (type(None), type(...), bool, int, str, bytes, complex, types.CodeType)
_MAX_ELEMENTS = 1024  # largest array that is compared by value


class _Opaque(Exception):
    """Raised if a value cannot be compared by value."""


def static_key(*values: Any) -> Any:
    """Return a hashable key that is equal only for values that compute the same result.

    Returns None if this cannot be determined. Functions are compared by code, defaults, captured
    variables and globals. The globals of functions from JAX, Flax, Optax, NumPy and this package are not
    compared. Captured arrays are compared only if they are small. A key holds no reference to a
    model or a large array.
    """
    try:
        return hashable(tuple(_key(value, {}) for value in values))
    except _Opaque:
        return None


def hashable(key: Any) -> Any:
    """Return the key, or None if it is not hashable."""
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _is_library(module: Any) -> bool:
    root = str(module).partition(".")[0]
    return root in _LIBRARIES or root in sys.stdlib_module_names


def _key(value: Any, seen: dict[int, int]) -> Any:
    value_type = type(value)
    if value_type in _PLAIN:
        return value_type, value
    if value_type is float:
        return value_type, value.hex()  # distinguishes 0.0 from -0.0
    if id(value) in seen:  # part of a recursive function
        return "seen", seen[id(value)]
    if isinstance(value, types.FunctionType):
        seen[id(value)] = len(seen)
        return value_type, *(_key(part, seen) for part in _parts(value))
    if isinstance(value, types.MethodType):
        return value_type, _key(value.__func__, seen), _key(value.__self__, seen)
    if isinstance(value, functools.partial):
        return value_type, _key(value.func, seen), _key(value.args, seen), _key(value.keywords, seen)
    if isinstance(value, np.ndarray | jax.Array):
        return _array_key(value)
    if isinstance(value, types.ModuleType):
        return _library_key(value, value.__name__)
    if isinstance(value, type):
        return _library_key(value, value.__module__)
    if getattr(sys.modules.get(getattr(value, "__module__", "")), getattr(value, "__qualname__", ""), None) is value:
        return _library_key(value, value.__module__)
    return _library_key(value_type, value_type.__module__), _content_key(value, seen)


def _content_key(value: Any, seen: dict[int, int]) -> Any:
    """Return the key of a tuple, dict, frozen dataclass, mesh or other value with a known type."""
    if isinstance(value, tuple | list):
        return tuple(_key(item, seen) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(_key(item, seen) for item in value)
    if isinstance(value, Mapping):
        return tuple((_key(name, seen), _key(item, seen)) for name, item in value.items())
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.compare]
        return tuple((name, _key(getattr(value, name), seen)) for name in names)
    if type(value).__hash__ in (None, object.__hash__):
        raise _Opaque
    return value


def _library_key(value: Any, module: str) -> Any:
    if not _is_library(module):
        raise _Opaque
    return value


def _array_key(value: Any) -> Any:
    if value.size > _MAX_ELEMENTS or not getattr(value, "is_fully_addressable", True) or value.dtype == object:
        raise _Opaque
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise _Opaque
    weak_type = getattr(value, "weak_type", None)
    return isinstance(value, jax.Array), str(value.dtype), value.shape, weak_type, np.asarray(value).tobytes()


def _parts(function: types.FunctionType) -> Iterator[Any]:
    """Yield everything that determines what a function computes, except its arguments."""
    yield from (function.__code__, function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # captured variable that is not assigned yet
            yield None
    if not _is_library(function.__globals__.get("__name__")):
        for name in sorted(set(_global_names(function.__code__)) & function.__globals__.keys()):
            yield function.__globals__[name]


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the globals used in code and its nested functions."""
    for instruction in dis.get_instructions(code):
        if "GLOBAL" in instruction.opname or instruction.opname == "LOAD_NAME":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
