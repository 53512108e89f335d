"""A dict for places where nothing may change."""

from collections.abc import Iterator, Mapping
from typing import Any


class FrozenDict(Mapping[str, Any]):
    """A dict that does not change and can be hashed, so that it can be part of what a program is compiled for."""

    def __init__(self, items: Mapping[str, Any]):
        self._items = {k: tuple(v) if isinstance(v, list) else v for k, v in items.items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items))  # names only: values that are equal, 8 and 8.0, may look different

    def __repr__(self) -> str:
        return repr(self._items)
