"""Nested dicts of arrays under flat names, and the differences between two of them."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from nnxmoe.config.printable import short
from nnxmoe.storage.errors import CheckpointError, summary

_MAX_EXTRA = 1_000_000  # bytes of JSON; more might exceed `files.MAX_JSON_VALUES` when read
_SHOWN = 40  # lines per error message
Signature = dict[str, tuple[tuple[int, ...], str]]


def flat(tree: Mapping[str, Any], what: str) -> dict[str, Any]:
    """``{"a": {"b": x}}`` -> ``{"a/b": x}``. Leaves must be jax arrays or ShapeDtypeStructs."""
    found: dict[str, Any] = {}

    def visit(node: Any, path: str) -> None:
        if not isinstance(node, Mapping):
            if not isinstance(node, jax.Array | jax.ShapeDtypeStruct):
                raise CheckpointError(
                    f"{what}: {path or 'the value'} is a {type(node).__name__}: pass nested dicts of jax arrays"
                )
            found[path] = node
            return
        for key, value in node.items():
            if not isinstance(key, str) or not key or "/" in key:
                where = f" in {path}" if path else ""
                raise CheckpointError(f"{what}: the key {short(key)}{where} must be a non-empty str without '/'")
            visit(value, f"{path}/{key}" if path else key)

    visit(tree, "")
    return found


def nested_as(like: Mapping[str, Any], values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flat values in nested dicts structured like ``like``."""
    return {
        key: nested_as(node, values, f"{path}{key}/") if isinstance(node, Mapping) else values[path + key]
        for key, node in like.items()
    }


def signature(arrays: Mapping[str, Any]) -> Signature:
    """Shape and dtype of each array."""
    return {name: (tuple(array.shape), str(array.dtype)) for name, array in arrays.items()}


def differences(wanted: Signature, found: Signature) -> list[str]:
    """One line per array that is missing in ``found``, unexpected, or of another shape or dtype."""
    lines = [f"{name} {list(shape)} {dtype} is missing" for name, (shape, dtype) in wanted.items() if name not in found]
    lines += [
        f"{name} {list(shape)} {dtype} is unexpected" for name, (shape, dtype) in found.items() if name not in wanted
    ]
    for name in wanted.keys() & found.keys():
        (shape, dtype), (other, kind) = wanted[name], found[name]
        if shape != other:
            lines.append(f"{name} has shape {list(other)}, not {list(shape)}")
        if dtype != kind:
            lines.append(f"{name} has dtype {kind}, not {dtype}")
    return sorted(lines)


@contextlib.contextmanager
def failing(doing: str, remedy: str) -> Iterator[None]:
    """Turns any error of Orbax into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{doing}: {summary(error)}; {remedy}") from error


def plain(extra: Mapping[str, Any], what: str = "extra") -> dict[str, Any]:
    """A copy of ``extra`` by way of JSON; ``what``: its name in messages. Raises CheckpointError for values that JSON
    does not preserve."""
    given = dict(extra)
    try:
        text = json.dumps(given, allow_nan=False)
        same = json.loads(text) == given
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}={short(given)} cannot be stored as JSON: {error}") from None
    if not same:
        raise CheckpointError(
            f"{what}={short(given)} is not preserved by JSON: use str keys, and lists instead of tuples"
        )
    if len(text) > _MAX_EXTRA:
        raise CheckpointError(f"{what} has {len(text)} bytes as JSON, more than {_MAX_EXTRA}: save arrays as arrays")
    return json.loads(text)


def is_key(leaf: Any) -> bool:
    """Whether an array holds random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def stored(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
    """The shape under which Orbax stores an array: random keys as their bits."""
    data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=place)


def empty(leaf: Any, place: Any) -> jax.Array:
    """An array without elements, with its sharding; Orbax stores none."""
    return jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=place)()


def listed(title: str, lines: list[str]) -> str:
    """A title with the first lines below it, and the number of the others."""
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return f"{title}:\n  " + "\n  ".join(lines[:_SHOWN]) + more
