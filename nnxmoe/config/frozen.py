"""Immutable dict."""

from collections.abc import Iterator, Mapping
from typing import Any

from nnxmoe.config.validate import python_values


class FrozenDict(Mapping[str, Any]):
    """Hashable, immutable dict. Can be a static argument of a jitted function."""

    def __init__(self, items: Mapping[str, Any]):
        self._items = python_values(dict(items))

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
