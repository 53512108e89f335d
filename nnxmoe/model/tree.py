"""Text description of a model's modules, for `print`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax import nnx


def tree(module: nnx.Module, name: str = "", indent: str = "  ") -> Iterator[str]:
    """Yield one line per module with the shapes of its direct variables. Equal items of a list share one line."""
    parts = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    arrays = [
        f"{key} {list(v.shape)}" for key, v in parts.items() if isinstance(v, nnx.Variable) and hasattr(v, "shape")
    ]
    yield f"{indent}{name}: {type(module).__name__}({', '.join(arrays)})"
    yield from children(parts, indent + "  ")


def children(parts: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yield the lines of all modules in a mapping of attributes."""
    for key, value in parts.items():
        if isinstance(value, nnx.List):
            groups: dict[tuple[str, ...], list[int]] = {}
            for i, item in enumerate(value):
                if isinstance(item, nnx.Module):
                    groups.setdefault(tuple(tree(item, "", indent)), []).append(i)
            for (first, *rest), indices in groups.items():
                yield first.replace(": ", f"{key}[{_ranges(indices)}]: ", 1)
                yield from rest
        elif isinstance(value, nnx.Module):
            yield from tree(value, key, indent)


def _ranges(indices: Sequence[int]) -> str:
    """Format indices as ranges such as ``0-3, 5``. Shortens lists of more than 4 ranges."""
    runs: list[list[Any]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    labels = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(labels) if len(labels) <= 4 else f"{', '.join(labels[:3])}, … {indices[-1]}"
