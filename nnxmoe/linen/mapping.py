"""Load NNX models from Linen parameters with arbitrary names, by a mapping from our names to theirs."""

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
Part = tuple[str, int | None]  # a parameter, or one layer of it
LAYER = "{layer}"
# matches a layer's number in a name with slashes or dots between its parts
NUMBERED = re.compile(r"(^|[/. ])((?:[^/. ]*(?:layer|block)s?_?|h_?)?)(\d+)(?=[/.])", re.IGNORECASE)


def from_mapping(
    params: Mapping[str, Any], config: DecoderConfig, mapping: Mapped, strategy: Strategy | None, mesh: Mesh | None
) -> CausalLM:
    """Load a model from a Linen tree by a mapping; see `nnxmoe.linen.from_linen`."""
    check_config(config)
    model, theirs = abstract_model(config, strategy, mesh), flat(params)
    wanted, found = native.layout(model, False), dict[str, LazyArray]()
    rows, faults = read_mapping(mapping, {name: leaf.shape for name, leaf in wanted.items()}, theirs)
    for name, row in rows.items():
        try:
            found[name] = LazyArray.from_array(row(theirs))
        except ValueError as error:
            faults.append(str(error))
    check_faults(faults + unused(rows, theirs), type(model).__name__)
    report = compare_arrays(wanted, found, LoadReport(f"a Linen tree ({some(sorted(theirs), 2)})"), strict=True)
    load_model(model, wanted, found, None, report, "the Linen tree does not fit the config")
    return model


def unused(rows: Mapping[str, "Row"], theirs: Mapping[str, Any]) -> list[str]:
    """Return a fault per Linen array that no row reads."""
    used = {source for row in rows.values() for source in row.sources}
    return [f"{name} {list(np.shape(a))} of the tree is in no row" for name, a in theirs.items() if name not in used]


def check_faults(faults: list[str], target: str) -> None:
    """Raise a ValueError that lists the faults, if any."""
    if faults:
        faults = by_layer(faults)
        lines = "\n  ".join([*faults[:20], *([f"… {len(faults) - 20} more"] if len(faults) > 20 else [])])
        raise ValueError(
            f"the mapping does not take this Linen tree to {target} (nnxmoe.linen.propose_mapping lists the names of "
            f"both sides):\n  {lines}"
        )


def flat(params: Mapping[str, Any]) -> dict[str, Any]:
    """Map names to arrays of a Linen tree, boxed or not, with or without the collection ``params``."""
    found = flatten_arrays(params)
    inside = all(name.startswith("params/") for name in found)
    return {name.removeprefix("params/") if inside else name: array for name, array in found.items()}


def general_name(name: str) -> tuple[str, int | None]:
    """Replace the layer's number in a parameter's name by ``{layer}``.

    Returns the new name, and the number or None.
    """
    parts = name.split("/")
    if parts[0] != "layers":
        return name, None
    return "/".join([parts[0], LAYER, *parts[2:]]), int(parts[1])


def general_linen_name(name: str) -> tuple[str, int | None]:
    """Replace the first number in a Linen name that may be a layer's number by ``{layer}``.

    Returns the new name, and the number or None.
    """
    match = NUMBERED.search(name)
    return (NUMBERED.sub(rf"\1\2{LAYER}", name, count=1), int(match[3])) if match else (name, None)


@dataclasses.dataclass(frozen=True)
class Row:
    """A parameter of one module as a function of parameters, or of their layers, of the other module.

    Attributes:
        parts: Arguments of ``make``.
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
        return self.make(*(params[name] if at is None else jnp.asarray(params[name])[at] for name, at in self.parts))


def read_mapping(
    mapping: Mapped,
    wanted: Mapping[str, tuple[int, ...]],
    theirs: Mapping[str, Any],
    general_name: Callable[[str], tuple[str, int | None]] = general_name,
) -> tuple[dict[str, Row], list[str]]:
    """Return the row of each wanted parameter (name -> shape), and all faults of the mapping.

    A row raises ValueError if its function fails or returns a wrong shape. ``general_name`` splits a
    wanted name into general name and layer.
    """
    rows, faults, counts = dict[str, Row](), list[str](), dict[str, int]()
    candidates: Mapping[str, tuple[str, ...]] = getattr(mapping, "candidates", {})  # set by `Proposal`
    if not isinstance(mapping, Mapping):
        raise ValueError(f"the mapping is a {type(mapping).__name__}: give a dict from our names to theirs")
    for general, layer in map(general_name, wanted):
        start = general.split(LAYER)[0]
        counts[start] = max(counts.get(start, 0), 0 if layer is None else layer + 1)
    for name, shape in wanted.items():
        general, layer = general_name(name)
        source = mapping.get(name, mapping.get(general))
        if source is None:
            names = candidates.get(name, candidates.get(general, ()))
            choice = f": choose {' or '.join(names).replace(LAYER, str(layer))}" if names else ""
            faults.append(f"{name} {list(shape)} has no row in the mapping{choice}")
            continue
        names, make = (source, lambda array: array) if isinstance(source, str) else checked_pair(name, source)
        names = (names,) if isinstance(names, str) else tuple(names)
        own = layer is None or name in mapping  # a row for a single layer names that layer's arrays
        parts = tuple((each.replace(LAYER, str(layer)), None if own or LAYER in each else layer) for each in names)
        sources = tuple(source for source, _ in parts)
        if missing := [each for each in sources if each not in theirs]:
            faults.append(f"{name}: the tree has no {', '.join(missing)}")
            continue
        stacks = {each: list(np.shape(theirs[each])) for each, at in parts if at is not None}
        if odd := [
            f"{each} {shape}" for each, shape in stacks.items() if shape[:1] != [counts[general.split(LAYER)[0]]]
        ]:
            faults.append(f"{name}: {odd[0]} does not have the {counts[general.split(LAYER)[0]]} layers on axis 0")
            continue
        rows[name] = Row(parts, _add_checks(name, shape, sources, make), not isinstance(source, str))
    known = {*wanted, *(general_name(name)[0] for name in wanted)}
    odd = [f"{name} of the mapping is no parameter of this model" for name in mapping if name not in known]
    return rows, faults + odd


def _add_checks(
    name: str, shape: tuple[int, ...], sources: tuple[str, ...], make: Callable[..., Any]
) -> Callable[..., Any]:
    def make_with_checks(*arrays: Any) -> Any:
        try:
            value = make(*arrays)
        except Exception as error:
            types = ", ".join(f"{jax.dtypes.result_type(array)}{list(np.shape(array))}" for array in arrays)
            raise ValueError(f"{name}: its function fails for {types}: {type(error).__name__}: {error}") from error
        if not splits(np.shape(value), shape):
            raise ValueError(f"{name} is {list(shape)}, {' and '.join(sources)} give {list(np.shape(value))}")
        return jnp.reshape(value, shape)

    return make_with_checks


def checked_pair(name: str, source: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the pair ``(names, function)`` of a row. Raises ValueError if the source is not a pair."""
    if isinstance(source, tuple) and len(source) == 2 and callable(source[1]):
        return source
    raise ValueError(f"the mapping has {name}: {source!r}: give a name of theirs, or a pair of that and a function")


def by_layer(faults: list[str]) -> list[str]:
    """Merge faults that differ only in layer numbers into one line."""
    groups: dict[str, list[str]] = {}
    for fault in faults:
        groups.setdefault(NUMBERED.sub(r"\1\2*", fault), []).append(fault)
    return [f"{text} ({len(lines)} layers)" if len(lines) > 1 else lines[0] for text, lines in groups.items()]


def splits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Check that one shape only splits or merges adjacent dimensions of the other.

    If so, a reshape changes the order of no values.
    """
    one, other = (set(itertools.accumulate(s, lambda a, b: a * b)) for s in (shape, wanted))
    return math.prod(shape) == math.prod(wanted) and (one <= other or other <= one)
