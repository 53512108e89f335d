"""Map the parameters of an NNX module to the parameters of a Linen module, and check both trees."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from nnxmoe.config.printable import some
from nnxmoe.convert import native
from nnxmoe.convert.arrays.array_layout import UNCHANGED, ArrayLayout, Parameter
from nnxmoe.convert.maxtext import layout
from nnxmoe.linen.mapping import LAYER, Mapped, Part, Row, by_layer, checked_pair, read_mapping
from nnxmoe.model.causal_lm import CausalLM

Target = str | tuple[str, Callable[..., Array]]
Names = Mapping[str | tuple[str, ...], Target | list[Target]]
Arrays = dict[str, Any]


class _Origin(NamedTuple):
    """Origin of values of an NNX parameter in a Linen array.

    The values at index ``ours`` are ``scale`` times the values at index ``theirs``, plus ``shift``.
    """

    ours: np.ndarray
    theirs: np.ndarray
    scale: np.ndarray
    shift: np.ndarray


def compare_trees(
    title: str, module: nnx.Module, params: Arrays, shapes: Arrays, mapping: Names | Mapped | None
) -> dict[str, Row]:
    """Return the row of each Linen parameter.

    Raises AssertionError with all faults of the mapping and of both trees.
    """
    if mapping is None:
        rows, faults = _maxtext_rows(module, shapes)
    elif isinstance(module, CausalLM) and any(isinstance(key, str) and key.startswith("layers/") for key in mapping):
        rows, faults = _taken_rows(module, cast(Mapped, mapping), params, shapes)
    else:
        rows, faults = _rows(cast(Names, mapping), params)
    faults += [f"Linen's {name} {kind(a)} has no NNX parameter" for name, a in shapes.items() if name not in rows]
    for name, row in rows.items():
        source = f"{' + '.join(row.sources)} -> {name}"
        try:
            made = jax.eval_shape(row, params)
        except Exception as error:
            given = ", ".join(kind(params[part]) for part, _ in row.parts)
            faults.append(f"{source}: its function fails for {given}: {type(error).__name__}: {error}")
            continue
        if not isinstance(made, jax.ShapeDtypeStruct):
            faults.append(f"{source}: its function returns a {type(made).__name__}: return one array")
        elif name not in shapes:
            faults.append(f"{source} {kind(made)}: Linen has no such parameter")
        elif (made.shape, made.dtype) != (shapes[name].shape, shapes[name].dtype):
            turned = "; it looks transposed" if made.shape == shapes[name].shape[::-1] != shapes[name].shape else ""
            faults.append(f"{source}: the row gives {kind(made)}, Linen has {kind(shapes[name])}{turned}")
    if faults:
        faults = by_layer(faults)
        shown = faults if len(faults) <= 40 else [*faults[:40], f"… {len(faults) - 40} more"]
        raise AssertionError("\n  ".join([f"{title} in their parameters:", *shown]))
    return rows


def _rows(mapping: Names, params: Arrays) -> tuple[dict[str, Row], list[str]]:
    given = list(_filled(mapping, params))
    mapped = {name for names, _ in given for name in names}
    faults = [f"NNX's {name} {kind(a)} has no row in the mapping" for name, a in params.items() if name not in mapped]
    rows: dict[str, Row] = {}
    for names, targets in given:
        for there, make in targets:
            source = " + ".join(names)
            if unknown := [name for name in names if name not in params]:
                faults.append(f"{source} -> {there}: NNX has no such parameter{f', {unknown[0]}' * (len(names) > 1)}")
            elif there in rows:
                faults.append(f"{source} -> {there}: already mapped from {' + '.join(rows[there].sources)}")
            elif make is None and len(names) > 1:
                faults.append(f"{source} -> {there}: give a pair of the name and a function of {len(names)} arrays")
            else:
                parts = tuple((name, None) for name in names)
                rows[there] = Row(parts, make or (lambda a: a), changed=make is not None)
    return rows, faults


def _filled(mapping: Names, params: Arrays) -> Iterator[tuple[tuple[str, ...], list[tuple[str, Any]]]]:
    """Yield the rows with ``{layer}`` replaced by each number in the NNX module's names."""
    for key, target in mapping.items():
        names = (key,) if isinstance(key, str) else key
        targets = target if isinstance(target, list) else [target]
        pairs = [(t, None) if isinstance(t, str) else checked_pair(names[0], t) for t in targets]
        pattern = re.escape(names[0]).replace(re.escape(LAYER), r"(\d+)")
        found = [match[1] for name in params if LAYER in names[0] and (match := re.fullmatch(pattern, name))]
        for number in found or [LAYER]:
            filled = [(there.replace(LAYER, number), make) for there, make in pairs]
            yield tuple(name.replace(LAYER, number) for name in names), filled


def _taken_rows(model: CausalLM, mapping: Mapped, params: Arrays, shapes: Arrays) -> tuple[dict[str, Row], list[str]]:
    """Invert the rows of a mapping for `nnxmoe.linen.from_linen`, which maps Linen arrays to ours."""
    leaves = native.layout(model, False)
    taken, faults = read_mapping(mapping, {name: leaf.shape for name, leaf in leaves.items()}, shapes)
    users: dict[str, list[tuple[Part, _Origin]]] = {}
    for name, one in taken.items():
        try:
            origins = _origins(one, shapes)
        except ValueError as error:
            faults.append(str(error))
            continue
        for source, origin in origins.items():
            users.setdefault(source, []).append((_part(leaves[name].parts[0]), origin))
    changed = {source for one in taken.values() if one.changed for source in one.sources}
    rows = {
        name: Row(tuple(part for part, _ in used), _undo([origin for _, origin in used], shapes[name]), name in changed)
        for name, used in users.items()
    }
    for name, one in {} if faults else taken.items():
        key, at = _part(leaves[name].parts[0])
        made = np.asarray(one({source: rows[source](params) for source in one.sources}), np.float64)
        ours = np.asarray(params[key] if at is None else params[key][at], np.float64).reshape(made.shape)
        if not np.abs(made - ours).max(initial=0.0) <= 1e-5 * np.abs(ours).max(initial=1e-30):
            texts = f"{name}: its function of {' and '.join(one.sources)}"
            faults.append(f"{texts} cannot be undone; it may select, reorder, reshape, scale and shift")
    return rows, faults


def _origins(one: Row, shapes: Arrays) -> dict[str, _Origin]:
    """Find the origin of each value of a parameter by passing positions through the mapping's function."""
    sizes = [math.prod(shapes[source].shape) for source in one.sources]
    numbers = np.arange(sum(sizes))

    def through(values: np.ndarray) -> np.ndarray:
        arrays = np.split(values.astype(np.float32), np.cumsum(sizes)[:-1])
        given = {name: array.reshape(shapes[name].shape) for name, array in zip(one.sources, arrays, strict=True)}
        return np.asarray(one(given), np.float64).reshape(-1)

    shift = through(0 * numbers)
    scale = through(0 * numbers + 1) - shift
    known = np.flatnonzero(scale)
    low, high = ((through(v)[known] - shift[known]) / scale[known] for v in (numbers % 4096, numbers // 4096))
    found, origins = np.rint(low) + 4096 * np.rint(high), {}
    for source, size, end in zip(one.sources, sizes, np.cumsum(sizes), strict=True):
        here = (found >= end - size) & (found < end)
        at = known[here]
        origins[source] = _Origin(at, (found[here] - (end - size)).astype(int), scale[at], shift[at])
    return origins


def _undo(origins: list[_Origin], like: Any) -> Callable[..., Array]:
    """Return the function from our arrays to the Linen array. Values without a source are 0."""

    def make(*ours: Array) -> Array:
        values = jnp.zeros(like.size, like.dtype)
        for array, origin in zip(ours, origins, strict=True):
            moved = (array.reshape(-1)[origin.ours] - origin.shift) / origin.scale
            values = values.at[origin.theirs].set(moved.astype(like.dtype))
        return values.reshape(like.shape)

    return make


def _maxtext_rows(model: nnx.Module, shapes: Arrays) -> tuple[dict[str, Row], list[str]]:
    if not isinstance(model, CausalLM):
        raise ValueError(f"{type(model).__name__} has no MaxText names, which mapping=None stands for: give a mapping")
    if not any(name.startswith("decoder/") for name in shapes):
        raise ValueError(
            "mapping=None stands for MaxText's names (decoder/…), and no parameter of the Linen module begins with "
            f"decoder/ ({some(sorted(shapes), 2)}): give a mapping; nnxmoe.linen.propose_mapping lists both sides"
        )

    def row(leaf: ArrayLayout) -> Row:
        def make(*arrays: Array) -> Array:
            made = [leaf.change(a.reshape(leaf.part_shape)).astype(a.dtype) for a in arrays]
            return made[0] if leaf.axis is None else jnp.stack(made, axis=leaf.axis)

        return Row(tuple(map(_part, leaf.parts)), make, leaf.change != UNCHANGED)

    leaves = layout.maxtext_layout(model, layout.is_scanned(model, shapes), layout.value_changes(model))
    if found := [name for name, leaf in leaves.items() if leaf.rearrange is not None]:
        raise ValueError(
            f"MaxText arranges {some(found, 2)} otherwise than {type(model).__name__}: give a mapping, or compare with "
            "nnxmoe.convert.maxtext.from_tree(params, config)"
        )
    return {name: row(leaf) for name, leaf in leaves.items()}, []


def _part(part: Parameter) -> Part:
    return "/".join(map(str, part.path)), part.at[0] if part.at else None


def kind(array: Any) -> str:
    """Return dtype and shape as text, such as ``float32[3, 4]``."""
    return f"{array.dtype}{list(array.shape)}"
