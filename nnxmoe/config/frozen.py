"""Immutable dict."""

from collections.abc import Iterator, Mapping
from typing import Any

from nnxmoe.config.validate import python_values


class FrozenDict(Mapping[str, Any]):
    """Hashable, immutable dict, whose nested dicts are immutable too. Can be a static argument of a jitted function."""

    def __init__(self, items: Mapping[str, Any]):
        frozen = {name: FrozenDict(item) if isinstance(item, Mapping) else item for name, item in items.items()}
        self._items = python_values(frozen)

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


def thaw(value: Any) -> Any:
    """Convert a FrozenDict to a dict and a tuple to a list, with all nested values."""
    if isinstance(value, FrozenDict):
        return {name: thaw(item) for name, item in value.items()}
    return [thaw(item) for item in value] if isinstance(value, tuple) else value
