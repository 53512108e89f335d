"""Nested dicts of arrays as names: what a checkpoint holds, and how that differs from what is asked for."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from nnxmoe.config.printable import short
from nnxmoe.storage.errors import CheckpointError, summary

_MAX_EXTRA = 1_000_000  # of JSON; more could not be read back within `files.MAX_JSON_VALUES`
_SHOWN = 40  # lines of one error
Signature = dict[str, tuple[tuple[int, ...], str]]


def flat(tree: Mapping[str, Any], what: str) -> dict[str, Any]:
    """``{"a": {"b": x}}`` -> ``{"a/b": x}``; the leaves have to be arrays, or their shapes, of JAX."""
    found: dict[str, Any] = {}

    def visit(node: Any, path: str) -> None:
        if not isinstance(node, Mapping):
            if not isinstance(node, jax.Array | jax.ShapeDtypeStruct):
                raise CheckpointError(
                    f"{what}: {path or 'it'} is a {type(node).__name__}: give nested dicts of jax arrays"
                )
            found[path] = node
            return
        for key, value in node.items():
            if not isinstance(key, str) or not key or "/" in key:
                where = f" in {path}" if path else ""
                raise CheckpointError(f"{what}: the key {short(key)}{where} must be a str, not empty, without '/'")
            visit(value, f"{path}/{key}" if path else key)

    visit(tree, "")
    return found


def nested_as(like: Mapping[str, Any], values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flat values in the nested dicts of ``like``."""
    return {
        key: nested_as(node, values, f"{path}{key}/") if isinstance(node, Mapping) else values[path + key]
        for key, node in like.items()
    }


def signature(arrays: Mapping[str, Any]) -> Signature:
    """Shape and dtype of each array."""
    return {name: (tuple(array.shape), str(array.dtype)) for name, array in arrays.items()}


def differences(wanted: Signature, found: Signature) -> list[str]:
    """A line for every array that is missing in ``found``, too much, or of another shape or dtype."""
    lines = [f"{name} {list(shape)} {dtype} is missing" for name, (shape, dtype) in wanted.items() if name not in found]
    lines += [
        f"{name} {list(shape)} {dtype} is too much" for name, (shape, dtype) in found.items() if name not in wanted
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
    """Whatever Orbax raises is a CheckpointError that names the folder."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{doing}: {summary(error)}; {remedy}") from error


def plain(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What comes back as it went in."""
    given = dict(extra)
    try:
        text = json.dumps(given, allow_nan=False)
        same = json.loads(text) == given
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"extra={short(given)} cannot be kept as JSON: {error}") from None
    if not same:
        raise CheckpointError(
            f"extra={short(given)} would come back from JSON as something else: use str keys and lists"
        )
    if len(text) > _MAX_EXTRA:
        raise CheckpointError(f"extra has {len(text)} bytes as JSON, more than {_MAX_EXTRA}: keep arrays as arrays")
    return json.loads(text)


def is_key(leaf: Any) -> bool:
    """Whether an array is of random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def stored(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
    """As Orbax keeps it: random keys as their bits."""
    data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=place)


def empty(leaf: Any, place: Any) -> jax.Array:
    """An array without elements, which Orbax does not keep, where it belongs."""
    return jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=place)()


def listed(title: str, lines: list[str]) -> str:
    """A message with the first of many lines, and how many more there are."""
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return f"{title}:\n  " + "\n  ".join(lines[:_SHOWN]) + more
