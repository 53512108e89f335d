"""Load NNX models from Linen parameters, with a mapping from NNX names to Linen names."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import some
from nnxmoe.convert import native
from nnxmoe.convert.arrays.lazy_array import LazyArray
from nnxmoe.convert.arrays.load_model import abstract_model, check_config, compare_arrays, load_model
from nnxmoe.convert.arrays.load_report import LoadReport
from nnxmoe.convert.maxtext.array_trees import flatten_arrays
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.strategy import Strategy

Source = str | tuple[str | tuple[str, ...], Callable[..., Any]]
Mapped = Mapping[str, Source]
Part = tuple[str, int | None]  # a parameter, or one layer of a stacked parameter
LAYER = "{layer}"
# Matches a layer number in a name whose components are separated by slashes or dots.
NUMBERED = re.compile(r"(^|[/. ])((?:[^/. ]*(?:layer|block)s?_?|h_?)?)(\d+)(?=[/.])", re.IGNORECASE)


def from_mapping(
    params: Mapping[str, Any], config: DecoderConfig, mapping: Mapped, strategy: Strategy | None, mesh: Mesh | None
) -> CausalLM:
    """Load a model from a Linen tree with a mapping. See `nnxmoe.linen.from_linen`."""
    check_config(config)
    model, linen_arrays = abstract_model(config, strategy, mesh), flat(params)
    targets, values = native.layout(model, False), dict[str, LazyArray]()
    rows, errors = read_mapping(mapping, {name: leaf.shape for name, leaf in targets.items()}, linen_arrays)
    for name, row in rows.items():
        try:
            values[name] = LazyArray.from_array(row(linen_arrays))
        except ValueError as error:
            errors.append(str(error))
    check_faults(errors + unused(rows, linen_arrays), type(model).__name__)
    report = compare_arrays(targets, values, LoadReport(f"a Linen tree ({some(sorted(linen_arrays), 2)})"), strict=True)
    load_model(model, targets, values, None, report, "the Linen tree does not fit the config")
    return model


def unused(rows: Mapping[str, "Row"], linen_arrays: Mapping[str, Any]) -> list[str]:
    """Return an error message for each Linen array that no row reads."""
    used_names = {source for row in rows.values() for source in row.sources}
    return [
        f"{name} {list(np.shape(a))} of the tree is not used by any row"
        for name, a in linen_arrays.items()
        if name not in used_names
    ]


def check_faults(errors: list[str], target: str) -> None:
    """Raise a ValueError that lists the error messages, if any."""
    if errors:
        errors = by_layer(errors)
        lines = "\n  ".join([*errors[:20], *([f"… {len(errors) - 20} more"] if len(errors) > 20 else [])])
        raise ValueError(
            f"the mapping does not convert this Linen tree to {target} (nnxmoe.linen.propose_mapping lists the names "
            f"of both sides):\n  {lines}"
        )


def flat(params: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a Linen tree to a dict of arrays. Removes boxes and the collection name ``params``."""
    arrays = flatten_arrays(params)
    has_collection = all(name.startswith("params/") for name in arrays)
    return {name.removeprefix("params/") if has_collection else name: array for name, array in arrays.items()}


def general_name(name: str) -> tuple[str, int | None]:
    """Replace the layer number in an NNX name with ``{layer}``.

    Returns the new name, and the layer number or None.
    """
    parts = name.split("/")
    if parts[0] != "layers":
        return name, None
    return "/".join([parts[0], LAYER, *parts[2:]]), int(parts[1])


def general_linen_name(name: str) -> tuple[str, int | None]:
    """Replace the first number in a Linen name that can be a layer number with ``{layer}``.

    Returns the new name, and the number or None.
    """
    match = NUMBERED.search(name)
    return (NUMBERED.sub(rf"\1\2{LAYER}", name, count=1), int(match[3])) if match else (name, None)


@dataclasses.dataclass(frozen=True)
class Row:
    """Function that computes a parameter of one module from parameters of the other module.

    Attributes:
        parts: Arguments of ``make``: whole parameters or single layers.
        changed: True if ``make`` does more than stack the parts.
    """

    parts: tuple[Part, ...]
    make: Callable[..., Any]
    changed: bool

    @property
    def sources(self) -> list[str]:
        """Names of the other module's parameters."""
        return list(dict.fromkeys(name for name, _ in self.parts))

    def __call__(self, params: Mapping[str, Any]) -> Any:
        return self.make(
            *(params[name] if index is None else jnp.asarray(params[name])[index] for name, index in self.parts)
        )


def read_mapping(
    mapping: Mapped,
    target_shapes: Mapping[str, tuple[int, ...]],
    linen_arrays: Mapping[str, Any],
    general_name: Callable[[str], tuple[str, int | None]] = general_name,
) -> tuple[dict[str, Row], list[str]]:
    """Return the row of each parameter in ``target_shapes``, and all error messages about the mapping.

    A row raises ValueError if its function fails or returns a wrong shape. ``general_name`` splits a
    target name into general name and layer.
    """
    rows, errors, counts = dict[str, Row](), list[str](), dict[str, int]()
    candidates: Mapping[str, tuple[str, ...]] = getattr(mapping, "candidates", {})  # set by `Proposal`
    if not isinstance(mapping, Mapping):
        raise ValueError(f"the mapping is a {type(mapping).__name__}: pass a dict from NNX names to Linen names")
    for general, layer in map(general_name, target_shapes):
        start = general.split(LAYER)[0]
        counts[start] = max(counts.get(start, 0), 0 if layer is None else layer + 1)
    for name, shape in target_shapes.items():
        general, layer = general_name(name)
        source = mapping.get(name, mapping.get(general))
        if source is None:
            names = candidates.get(name, candidates.get(general, ()))
            choice = f": choose {' or '.join(names).replace(LAYER, str(layer))}" if names else ""
            errors.append(f"{name} {list(shape)} has no row in the mapping{choice}")
            continue
        names, convert = (source, lambda array: array) if isinstance(source, str) else checked_pair(name, source)
        names = (names,) if isinstance(names, str) else tuple(names)
        is_layer_row = layer is None or name in mapping  # a row for a single layer names that layer's arrays
        parts = tuple(
            (linen_name.replace(LAYER, str(layer)), None if is_layer_row or LAYER in linen_name else layer)
            for linen_name in names
        )
        sources = tuple(source for source, _ in parts)
        if missing := [linen_name for linen_name in sources if linen_name not in linen_arrays]:
            errors.append(f"{name}: the tree has no {', '.join(missing)}")
            continue
        stacks = {
            linen_name: list(np.shape(linen_arrays[linen_name])) for linen_name, index in parts if index is not None
        }
        if invalid := [
            f"{linen_name} {shape}"
            for linen_name, shape in stacks.items()
            if shape[:1] != [counts[general.split(LAYER)[0]]]
        ]:
            errors.append(f"{name}: {invalid[0]} does not have the {counts[general.split(LAYER)[0]]} layers on axis 0")
            continue
        rows[name] = Row(parts, _add_checks(name, shape, sources, convert), not isinstance(source, str))
    known_names = {*target_shapes, *(general_name(name)[0] for name in target_shapes)}
    invalid = [f"{name} of the mapping is not a parameter of this model" for name in mapping if name not in known_names]
    return rows, errors + invalid


def _add_checks(
    name: str, shape: tuple[int, ...], sources: tuple[str, ...], convert: Callable[..., Any]
) -> Callable[..., Any]:
    def convert_with_checks(*arrays: Any) -> Any:
        try:
            value = jnp.asarray(convert(*arrays))
        except Exception as error:
            types = ", ".join(f"{jax.dtypes.result_type(array)}{list(np.shape(array))}" for array in arrays)
            raise ValueError(f"{name}: its function fails for {types}: {type(error).__name__}: {error}") from error
        if not splits(value.shape, shape):
            raise ValueError(
                f"{name} has shape {list(shape)}, but the value from {' and '.join(sources)} has shape "
                f"{list(value.shape)}"
            )
        return jnp.reshape(value, shape)

    return convert_with_checks


def checked_pair(name: str, source: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the pair ``(names, function)`` of a row. Raises ValueError if the source is not a pair."""
    if isinstance(source, tuple) and len(source) == 2 and callable(source[1]):
        return source
    raise ValueError(f"the mapping has {name}: {source!r}: pass a Linen name, or a pair of a Linen name and a function")


def by_layer(errors: list[str]) -> list[str]:
    """Merge error messages that differ only in layer numbers into one line."""
    groups: dict[str, list[str]] = {}
    for error in errors:
        groups.setdefault(NUMBERED.sub(r"\1\2*", error), []).append(error)
    return [f"{text} ({len(lines)} layers)" if len(lines) > 1 else lines[0] for text, lines in groups.items()]


def splits(shape: tuple[int, ...], target_shape: tuple[int, ...]) -> bool:
    """Check whether one shape only splits or merges adjacent dimensions of the other.

    A reshape then preserves the order of all values.
    """
    sizes, target_sizes = (set(itertools.accumulate(s, lambda a, b: a * b)) for s in (shape, target_shape))
    return math.prod(shape) == math.prod(target_shape) and (sizes <= target_sizes or target_sizes <= sizes)
