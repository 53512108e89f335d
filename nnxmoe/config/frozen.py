"""Immutable dict."""

from collections.abc import Iterator, Mapping
from typing import Any

from nnxmoe.config.validate import as_python


class FrozenDict(Mapping[str, Any]):
    """Hashable, immutable dict. Nested dicts and lists are frozen as well. Can be a static argument of `jax.jit`."""

    def __init__(self, items: Mapping[str, Any]):
        self._items = {name: _freeze(item) for name, item in items.items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items))  # values may be unhashable

    def __repr__(self) -> str:
        return repr(self._items)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenDict":
        return self


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenDict(value)
    return tuple(map(_freeze, value)) if isinstance(value, list | tuple) else as_python(value)


def thaw(value: Any) -> Any:
    """Recursively convert FrozenDicts to dicts and tuples to lists."""
    if isinstance(value, FrozenDict):
        return {name: thaw(item) for name, item in value.items()}
    return [thaw(item) for item in value] if isinstance(value, tuple) else value
