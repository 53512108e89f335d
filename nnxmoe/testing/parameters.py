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
    """Origin of an NNX parameter's values in a Linen array.

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

    Raises AssertionError with all errors in the mapping and in both trees.
    """
    if mapping is None:
        rows, errors = _maxtext_rows(module, shapes)
    elif isinstance(module, CausalLM) and any(isinstance(key, str) and key.startswith("layers/") for key in mapping):
        rows, errors = _taken_rows(module, cast(Mapped, mapping), params, shapes)
    else:
        rows, errors = _rows(cast(Names, mapping), params)
    errors += [f"Linen's {name} {kind(a)} has no NNX parameter" for name, a in shapes.items() if name not in rows]
    for name, row in rows.items():
        source = f"{' + '.join(row.sources)} -> {name}"
        try:
            result = jax.eval_shape(row, params)
        except Exception as error:
            inputs = ", ".join(kind(params[part]) for part, _ in row.parts)
            errors.append(f"{source}: its function fails for {inputs}: {type(error).__name__}: {error}")
            continue
        if not isinstance(result, jax.ShapeDtypeStruct):
            errors.append(f"{source}: its function returns a {type(result).__name__}: return one array")
        elif name not in shapes:
            errors.append(f"{source} {kind(result)}: Linen has no such parameter")
        elif (result.shape, result.dtype) != (shapes[name].shape, shapes[name].dtype):
            hint = "; it looks transposed" if result.shape == shapes[name].shape[::-1] != shapes[name].shape else ""
            errors.append(f"{source}: the row returns {kind(result)}, but Linen has {kind(shapes[name])}{hint}")
    if errors:
        errors = by_layer(errors)
        listed = errors if len(errors) <= 40 else [*errors[:40], f"… {len(errors) - 40} more"]
        raise AssertionError("\n  ".join([f"{title} in their parameters:", *listed]))
    return rows


def _rows(mapping: Names, params: Arrays) -> tuple[dict[str, Row], list[str]]:
    filled = list(_filled(mapping, params))
    mapped = {name for names, _ in filled for name in names}
    errors = [f"NNX's {name} {kind(a)} has no row in the mapping" for name, a in params.items() if name not in mapped]
    rows: dict[str, Row] = {}
    for names, targets in filled:
        for linen_name, convert in targets:
            source = " + ".join(names)
            if unknown := [name for name in names if name not in params]:
                errors.append(
                    f"{source} -> {linen_name}: NNX has no such parameter{f', {unknown[0]}' * (len(names) > 1)}"
                )
            elif linen_name in rows:
                errors.append(f"{source} -> {linen_name}: already mapped from {' + '.join(rows[linen_name].sources)}")
            elif convert is None and len(names) > 1:
                errors.append(
                    f"{source} -> {linen_name}: pass a pair of the name and a function of {len(names)} arrays"
                )
            else:
                parts = tuple((name, None) for name in names)
                rows[linen_name] = Row(parts, convert or (lambda a: a), changed=convert is not None)
    return rows, errors


def _filled(mapping: Names, params: Arrays) -> Iterator[tuple[tuple[str, ...], list[tuple[str, Any]]]]:
    """Yield the rows of a mapping, with ``{layer}`` replaced by each number in the NNX module's names."""
    for key, target in mapping.items():
        names = (key,) if isinstance(key, str) else key
        targets = target if isinstance(target, list) else [target]
        pairs = [(t, None) if isinstance(t, str) else checked_pair(names[0], t) for t in targets]
        pattern = re.escape(names[0]).replace(re.escape(LAYER), r"(\d+)")
        numbers = [match[1] for name in params if LAYER in names[0] and (match := re.fullmatch(pattern, name))]
        for number in numbers or [LAYER]:
            filled = [(linen_name.replace(LAYER, number), convert) for linen_name, convert in pairs]
            yield tuple(name.replace(LAYER, number) for name in names), filled


def _taken_rows(model: CausalLM, mapping: Mapped, params: Arrays, shapes: Arrays) -> tuple[dict[str, Row], list[str]]:
    """Invert a mapping for `nnxmoe.linen.from_linen`, which computes NNX arrays from Linen arrays."""
    leaves = native.layout(model, False)
    nnx_rows, errors = read_mapping(mapping, {name: leaf.shape for name, leaf in leaves.items()}, shapes)
    users: dict[str, list[tuple[Part, _Origin]]] = {}
    for name, row in nnx_rows.items():
        try:
            origins = _origins(row, shapes)
        except ValueError as error:
            errors.append(str(error))
            continue
        for source, origin in origins.items():
            users.setdefault(source, []).append((_part(leaves[name].parts[0]), origin))
    changed_names = {source for row in nnx_rows.values() if row.changed for source in row.sources}
    rows = {
        name: Row(
            tuple(part for part, _ in uses), _undo([origin for _, origin in uses], shapes[name]), name in changed_names
        )
        for name, uses in users.items()
    }
    for name, row in {} if errors else nnx_rows.items():
        key, layer = _part(leaves[name].parts[0])
        computed = np.asarray(row({source: rows[source](params) for source in row.sources}), np.float64)
        expected = np.asarray(params[key] if layer is None else params[key][layer], np.float64).reshape(computed.shape)
        if not np.abs(computed - expected).max(initial=0.0) <= 1e-5 * np.abs(expected).max(initial=1e-30):
            description = f"{name}: its function of {' and '.join(row.sources)}"
            errors.append(f"{description} cannot be inverted; it may only select, reorder, reshape, scale and shift")
    return rows, errors


def _origins(row: Row, shapes: Arrays) -> dict[str, _Origin]:
    """Find the origin of each value of a parameter by passing positions through the mapping's function."""
    sizes = [math.prod(shapes[source].shape) for source in row.sources]
    numbers = np.arange(sum(sizes))

    def through(values: np.ndarray) -> np.ndarray:
        arrays = np.split(values.astype(np.float32), np.cumsum(sizes)[:-1])
        linen_arrays = {
            name: array.reshape(shapes[name].shape) for name, array in zip(row.sources, arrays, strict=True)
        }
        return np.asarray(row(linen_arrays), np.float64).reshape(-1)

    shift = through(0 * numbers)
    scale = through(0 * numbers + 1) - shift
    nonzero = np.flatnonzero(scale)
    low, high = ((through(v)[nonzero] - shift[nonzero]) / scale[nonzero] for v in (numbers % 4096, numbers // 4096))
    positions, origins = np.rint(low) + 4096 * np.rint(high), {}
    for source, size, end in zip(row.sources, sizes, np.cumsum(sizes), strict=True):
        in_source = (positions >= end - size) & (positions < end)
        indices = nonzero[in_source]
        origins[source] = _Origin(
            indices, (positions[in_source] - (end - size)).astype(int), scale[indices], shift[indices]
        )
    return origins


def _undo(origins: list[_Origin], like: Any) -> Callable[..., Array]:
    """Return the function from NNX arrays to the Linen array. Values without a source are 0."""

    def to_linen(*nnx_arrays: Array) -> Array:
        values = jnp.zeros(like.size, like.dtype)
        for array, origin in zip(nnx_arrays, origins, strict=True):
            original = (array.reshape(-1)[origin.ours] - origin.shift) / origin.scale
            values = values.at[origin.theirs].set(original.astype(like.dtype))
        return values.reshape(like.shape)

    return to_linen


def _maxtext_rows(model: nnx.Module, shapes: Arrays) -> tuple[dict[str, Row], list[str]]:
    if not isinstance(model, CausalLM):
        raise ValueError(f"{type(model).__name__} has no MaxText names, as required by mapping=None: pass a mapping")
    if not any(name.startswith("decoder/") for name in shapes):
        raise ValueError(
            "mapping=None requires MaxText's names (decoder/…), but no parameter of the Linen module begins with "
            f"decoder/ ({some(sorted(shapes), 2)}): pass a mapping. nnxmoe.linen.propose_mapping lists both sides"
        )

    def row(leaf: ArrayLayout) -> Row:
        def make(*arrays: Array) -> Array:
            converted = [leaf.change(a.reshape(leaf.part_shape)).astype(a.dtype) for a in arrays]
            return converted[0] if leaf.axis is None else jnp.stack(converted, axis=leaf.axis)

        return Row(tuple(map(_part, leaf.parts)), make, leaf.change != UNCHANGED)

    leaves = layout.maxtext_layout(model, layout.is_scanned(model, shapes), layout.value_changes(model))
    if rearranged := [name for name, leaf in leaves.items() if leaf.rearrange is not None]:
        raise ValueError(
            f"MaxText arranges {some(rearranged, 2)} differently than {type(model).__name__}: pass a mapping, or "
            "compare with nnxmoe.convert.maxtext.from_tree(params, config)"
        )
    return {name: row(leaf) for name, leaf in leaves.items()}, []


def _part(part: Parameter) -> Part:
    return "/".join(map(str, part.path)), part.at[0] if part.at else None


def kind(array: Any) -> str:
    """Return dtype and shape as text, such as ``float32[3, 4]``."""
    return f"{array.dtype}{list(array.shape)}"


def is_parameter(leaf: Any) -> bool:
    """Return whether a leaf of a module's state is a variable with an array, except for random state."""
    is_variable = isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.RngState)
    return is_variable and isinstance(leaf.get_value(), jax.Array | np.ndarray | jax.ShapeDtypeStruct)
