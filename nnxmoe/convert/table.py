"""Names of our parameters beside names of stored tensors.

A model's table maps the path of a parameter (``layer`` standing for any layer) to one or more templates, the first of
which is written. ``{layer}`` and ``{expert}`` are numbers; ``name[i/n]`` is the i-th of n equal parts of the output
rows. Which transposition lies between the two follows from the parameter itself: a linear map ``[*ins, *outs]`` is
stored as ``[outs, ins]``, everything else as it is.
"""

import dataclasses
import math
import re
from collections.abc import Container, Mapping
from typing import Any

from flax import nnx

from nnxmoe.config.printable import some
from nnxmoe.layers.lora import Kept, LoRAParam

Table = Mapping[str, tuple[str, ...]]
Path = tuple[Any, ...]

_PART = re.compile(r"^(?P<name>.*)\[(?P<part>\d+)/(?P<parts>\d+)\]$")


@dataclasses.dataclass(frozen=True)
class Piece:
    """One stored tensor (or one part of it) of a parameter: where it goes, and what it is called.

    ``at``: index into the parameter's leading layer and expert dimensions. ``experts``: the tensor holds all experts.
    """

    at: tuple[int, ...]
    name: str
    part: int = 0
    parts: int = 1
    experts: bool = False


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parameter with the pieces it is made of. ``lead``: how many leading dimensions count layers and experts."""

    path: Path
    key: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    inputs: int | None
    pieces: tuple[Piece, ...]

    @property
    def lead(self) -> int:
        """1 for stacked layers plus 1 for experts."""
        return sum(axis in ("layers", "expert") for axis in self.axes)

    @property
    def inner(self) -> tuple[int, ...]:
        """Our shape of one layer and expert."""
        return self.shape[self.lead :]

    def flat(self) -> tuple[int, ...]:
        """The stored shape of one layer and expert: ``[outs, ins]`` of a linear map."""
        if self.inputs is None:
            return self.inner
        return math.prod(self.inner[self.inputs :]), math.prod(self.inner[: self.inputs])

    def stored(self, piece: Piece) -> tuple[int, ...]:
        """The shape the whole tensor of a piece must have."""
        flat = self.flat()
        flat = (flat[0] * piece.parts, *flat[1:])
        return (self.shape[self.lead - 1], *flat) if piece.experts else flat


class TableError(AssertionError):
    """A parameter of a model without a row in its table: a fault of ours, not of a checkpoint."""


def entries(model: nnx.Module, table: Table, names: Container[str] | None = None) -> list[Entry]:
    """An entry for every parameter of the model, in the model's order.

    Of several templates the first whose tensor is among ``names`` counts (per layer), else the first.
    """
    found = []
    for path, variable in parameters(model):
        key, layers = label_of(path, variable)[:2]
        if key not in table:
            raise TableError(f"the parameter {key} has no row in the table of {type(model).__name__}")
        meta = variable.get_metadata()
        axes, shape = tuple(meta["axes"]), tuple(variable.shape)
        stacked = "layers" in axes
        numbers = range(layers, layers + shape[0]) if stacked else [layers]
        count = shape[axes.index("expert")] if "expert" in axes else None
        pieces: list[Piece] = []
        for i, layer in enumerate(numbers):
            pieces += _pieces(table[key], layer, (i,) if stacked else (), count, names)
        found.append(Entry(path, key, shape, axes, meta["inputs"], tuple(pieces)))
    return found


def parameters(model: nnx.Module) -> list[tuple[Path, nnx.Variable]]:
    """Path and variable of all that belongs in a checkpoint; of merged adapters, nothing.

    ValueError where a model has adapters that are not merged: they would be lost.
    """
    flat = [(path, v) for path, v in nnx.to_flat_state(nnx.state(model)) if not isinstance(v, Kept)]
    if found := [".".join(map(str, path)) for path, v in flat if isinstance(v, LoRAParam)]:
        raise ValueError(
            f"the model has adapters ({some(found)}), for which this format has no place: merge them first with "
            "nnxmoe.train.lora.merge(model), or save them alone with nnxmoe.train.lora.save(model, folder)"
        )
    return flat


def _pieces(
    templates: tuple[str, ...],
    layer: int | None,
    at: tuple[int, ...],
    experts: int | None,
    names: Container[str] | None,
) -> list[Piece]:
    options = [_one_template(template, layer, at, experts) for template in templates]
    if names is None:
        return options[0]
    return next((pieces for pieces in options if any(piece.name in names for piece in pieces)), options[0])


def _one_template(template: str, layer: int | None, at: tuple[int, ...], experts: int | None) -> list[Piece]:
    match = _PART.match(template)
    name, part, parts = (match["name"], int(match["part"]), int(match["parts"])) if match else (template, 0, 1)
    if experts is None:
        return [Piece(at, name.format(layer=layer), part, parts)]
    if "{expert}" not in name:
        return [Piece(at, name.format(layer=layer), part, parts, experts=True)]
    return [Piece((*at, e), name.format(layer=layer, expert=e), part, parts) for e in range(experts)]


def label_of(path: Path, variable: nnx.Variable) -> tuple[str, Any, int | None]:
    """A parameter's key, (first) layer and stack; the dotted path is the key of one that a model does not label."""
    meta = variable.get_metadata()
    return meta.get("key") or ".".join(map(str, path)), meta.get("layer"), meta.get("stack")
