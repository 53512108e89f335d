"""Maps the parameters of an NNX module to those of a Linen module, and checks that the two trees match."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from nnxmoe.convert import maxtext
from nnxmoe.convert.core.layout import Leaf
from nnxmoe.model.causal_lm import CausalLM

Target = str | tuple[str, Callable[..., Array]]
Names = Mapping[str | tuple[str, ...], Target | list[Target]]
Part = tuple[str, int | None]  # an NNX parameter, or one layer of it
Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """The NNX parts of a Linen parameter and the function that makes it; ``changed``: it does more than stack them."""

    parts: tuple[Part, ...]
    make: Callable[..., Any]
    changed: bool

    @property
    def source(self) -> str:
        """The names of the NNX parameters."""
        return " + ".join(dict.fromkeys(name for name, _ in self.parts))

    def __call__(self, params: Arrays) -> Any:
        return self.make(*(params[name] if i is None else params[name][i] for name, i in self.parts))


def compare_trees(
    title: str, module: nnx.Module, params: Arrays, shapes: Arrays, mapping: Names | None
) -> dict[str, Row]:
    """Returns Linen's name -> row; raises AssertionError with all faults of the mapping and of both trees."""
    rows, faults = _maxtext_rows(module, shapes) if mapping is None else _rows(mapping, params)
    faults += [f"Linen's {name} {kind(a)} has no NNX parameter" for name, a in shapes.items() if name not in rows]
    for name, row in rows.items():
        source = f"{row.source} -> {name}"
        try:
            made = jax.eval_shape(row, params)
        except (TypeError, ValueError) as error:
            given = ", ".join(kind(params[part]) for part, _ in row.parts)
            faults.append(f"{source}: its function fails for {given}: {error}")
            continue
        if name not in shapes:
            faults.append(f"{source} {kind(made)}: Linen has no such parameter")
        elif (made.shape, made.dtype) != (shapes[name].shape, shapes[name].dtype):
            turned = "; it looks transposed" if made.shape == shapes[name].shape[::-1] != shapes[name].shape else ""
            faults.append(f"{source}: the row gives {kind(made)}, Linen has {kind(shapes[name])}{turned}")
    if faults:
        raise AssertionError("\n  ".join([f"{title} in their parameters:", *faults]))
    return rows


def _rows(mapping: Names, params: Arrays) -> tuple[dict[str, Row], list[str]]:
    given = [((key,) if isinstance(key, str) else key, targets) for key, targets in mapping.items()]
    mapped = {name for names, _ in given for name in names}
    faults = [f"NNX's {name} {kind(a)} has no row in the mapping" for name, a in params.items() if name not in mapped]
    rows: dict[str, Row] = {}
    for names, targets in given:
        for target in targets if isinstance(targets, list) else [targets]:
            there, make = (target, None) if isinstance(target, str) else target
            source = " + ".join(names)
            if unknown := [name for name in names if name not in params]:
                faults.append(f"{source} -> {there}: NNX has no such parameter{f', {unknown[0]}' * (len(names) > 1)}")
            elif there in rows:
                faults.append(f"{source} -> {there}: already mapped from {rows[there].source}")
            elif make is None and len(names) > 1:
                faults.append(f"{source} -> {there}: give a pair of the name and a function of {len(names)} arrays")
            else:
                parts = tuple((name, None) for name in names)
                rows[there] = Row(parts, make or (lambda a: a), changed=make is not None)
    return rows, faults


def _maxtext_rows(model: nnx.Module, shapes: Arrays) -> tuple[dict[str, Row], list[str]]:
    if not isinstance(model, CausalLM):
        raise ValueError(f"{type(model).__name__} has no MaxText names, which mapping=None stands for: give a mapping")
    scanned = any(name.startswith(f"decoder/{group}/") for name in shapes for group in model.maxtext_layers)

    def row(leaf: Leaf) -> Row:
        def make(*arrays: Array) -> Array:
            made = [leaf.change(a.reshape(leaf.inner)).astype(a.dtype) for a in arrays]
            return made[0] if leaf.axis is None else jnp.stack(made, axis=leaf.axis)

        named = [("/".join(map(str, part.parameter.path)), part.at) for part in leaf.parts]
        parts = tuple((name, at[0] if at else None) for name, at in named)
        return Row(parts, make, not leaf.change.none)

    leaves = maxtext.layout(model, scanned, *maxtext.changes(model))
    return {name: row(leaf) for name, leaf in leaves.items()}, []


def kind(array: Any) -> str:
    """Type and shape, ``float32[3, 4]``."""
    return f"{array.dtype}{list(array.shape)}"
