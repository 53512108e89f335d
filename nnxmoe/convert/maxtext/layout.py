"""MaxText's layout: for each parameter of a model the name, shape and arrangement that it has there.

Differences to our own layout: scanned layers, vectors included, are stacked on axis 1, in one array per kind if kinds
alternate (layer 5 of gpt-oss is number 2 of ``layers/layers_1``), or on axes 1 and 2 if all but the last of a block are
scanned on their own (Qwen3-Next, Gemma 4); grouped-query attention of most families has its queries divided by
sqrt(head width); with Llama 3.1's rope the two halves of a head's features are interleaved; Gemma 4 has its embeddings
multiplied by sqrt(width); Qwen3.5 has several projections in one array, sorted by heads.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nnxmoe.config.printable import plain, some
from nnxmoe.config.rope_parameters import Llama3Rope
from nnxmoe.convert.arrays.array_layout import (
    QUERY,
    UNCHANGED,
    Arrangement,
    ArrayLayout,
    Parameter,
    ValueChange,
    add_part,
    parameters,
)
from nnxmoe.convert.arrays.dtypes import float_dtype
from nnxmoe.convert.arrays.lazy_array import LazyArray, LazyArrays
from nnxmoe.convert.arrays.model_arrays import model_arrays
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.maxtext import stream_weights
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import LayerBlocks, LayerGroups, Places
from nnxmoe.models import family_of

KEY, EMBED = "layer.attention.k.", "embed.table"
NO_CHANGES: Mapping[str, ValueChange] = {}
_KIND = "{kind}"  # of a layer, in the name in a row
_SHARED = " of "  # between MaxText's name and ours of a parameter that is in an array with others


class MaxTextRow(NamedTuple):
    """A row of a family's table: MaxText's name of an array, its logical axes, and our dimensions in its order. With
    fewer axes than our array has its heads are flattened, with one more it has one head."""

    name: str
    axes: tuple[str | None, ...]
    order: tuple[int, ...] = ()


def maxtext_layout(
    model: CausalLM, scan_layers: bool, changes: Mapping[str, ValueChange] = NO_CHANGES
) -> dict[str, ArrayLayout]:
    """Map MaxText's names to an `ArrayLayout` for every parameter. ``changes``: beginning of a key -> its change.
    Raises CheckpointError for a model that MaxText does not have."""
    config, maxtext = model.config, family_of(model).maxtext
    if not maxtext.table:
        kind = config.model_type
        raise CheckpointError(f"there is no table of MaxText's names for {kind!r} models: choose another format")
    if model.mtp:
        raise CheckpointError(
            "MaxText has no place for the own norm (shared_head.norm) of multi-token prediction layers, and gives them "
            "states before the final norm: choose another format, or load a Hugging Face folder "
            "(nnxmoe.save_pretrained) without mtp=True"
        )
    every, found = parameters(model), dict[str, ArrayLayout]()
    shared, layer_types = maxtext.columns(config), maxtext.layer_types(config)
    places = _places(model, {p.stack: p.layer for p in reversed(every) if p.layer is not None}, scan_layers)
    for parameter in every:
        if parameter.key not in maxtext.table:
            kind = config.model_type
            raise CheckpointError(f"MaxText's {kind} has no parameter like {parameter.key}: choose another format")
        row = MaxTextRow(*maxtext.table[parameter.key])
        change = next((changes[start] for start in changes if parameter.key.startswith(start)), UNCHANGED)
        leaf, columns = (
            ArrayLayout(parameter.key, parameter.of_layer, change=change, axes=row.axes),
            shared.get(parameter.key),
        )
        for layer, part in parameter.layers():
            group, dims = ("", ()) if layer is None else places[layer]
            name = row.name if layer is None else f"decoder/{group}/{row.name.replace(_KIND, layer_types[layer])}"
            if dims:
                stacked = group.split("/")[0], *("local_layers",) * (len(dims) - 1)
                axes = *row.axes[:1], *stacked, *row.axes[1:]
                leaf = dataclasses.replace(leaf, axis=1, axes=axes)
            name = name if columns is None else name + _SHARED + parameter.key
            add_part(found, name, dataclasses.replace(leaf, arranged=_arranged(parameter, row, dims, columns)), part)
    return found


def _arranged(
    parameter: Parameter, row: MaxTextRow, dims: tuple[int, ...], columns: tuple[int, ...] | None
) -> Arrangement | None:
    """The arrangement of an array in MaxText, if it differs from the leaf's."""
    own, ins = parameter.of_layer, parameter.inputs or 0
    own = own if len(row.axes) <= len(own) else (own[0], 1, *own[1:])
    flat, order = len(row.axes) < len(own), row.order or range(len(own))
    first = ins if flat else 1  # the number of dimensions before those of the layers
    if not (flat or row.order or dims[1:] or columns or own != parameter.of_layer):
        return None
    before, after = [own[i] for i in order[:first]], [own[i] for i in order[first:]]
    shape = (math.prod(before), *dims, math.prod(after)) if flat else (*before, *dims, *after)
    places = {i: place for place, i in enumerate([*order[:first], *(-1 - i for i in range(len(dims))), *order[first:]])}
    natural = [places[0], *(places[-1 - i] for i in range(len(dims))), *(places[i] for i in range(1, len(own)))]
    return Arrangement(shape, (*before, *dims, *after), tuple(natural), columns)


def _places(model: CausalLM, stacks: Mapping[int | None, int], scan: bool) -> Places:
    """The place of each layer. Raises CheckpointError if the layers are not those of MaxText's model; ``stacks``: the
    first layer of each stack."""
    config, maxtext = model.config, family_of(model).maxtext
    layers = maxtext.layers(config)
    kind, groups = config.model_type, [group for group, _ in layers.places(config.sparse_layers, True)]
    if isinstance(layers, LayerGroups) and len({groups[first] for first in stacks.values()}) < len(stacks):
        raise CheckpointError(
            f"MaxText's {kind} has equal layers only, and this model has {len(stacks)} runs of layers that differ: "
            "choose another format"
        )
    if isinstance(layers, LayerBlocks):
        block, first, found = len(layers.layer_types), layers.first, maxtext.layer_types(config)[layers.first :]
        differ = len({(i % block, model.layer_type(first + i)) for i in range(len(found))}) > block
        if differ or any(one != layers.layer_types[i % block] for i, one in enumerate(found)):
            raise CheckpointError(
                f"MaxText's {kind} repeats blocks of {some(layers.layer_types, 8)} layers, and this model's layers are "
                f"{some(found, 8)}, or differ in more: choose another format"
            )
        if scan and len(found) % block:
            raise CheckpointError(
                f"MaxText scans {kind} in blocks of {block} layers, and this model has {len(found)} layers: leave "
                "them unscanned (scan_layers=False)"
            )
    return layers.places(config.sparse_layers, scan)


def is_scanned(model: CausalLM, names: Iterable[str]) -> bool:
    """Whether MaxText's names are those of scanned layers."""
    layers = family_of(model).maxtext.layers(model.config)
    groups = {group for group, dims in layers.places(model.config.sparse_layers, True) if dims}
    return any(name.startswith(f"decoder/{group}/") for name in names for group in groups)


def value_changes(model: CausalLM) -> dict[str, ValueChange]:
    """The changes from a model's parameters to MaxText's layout."""
    config = model.config
    features = "pairs" if config.scale_in_queries and isinstance(config.rope, Llama3Rope) else "as they are"
    key = ValueChange(features=features)
    query = dataclasses.replace(key, over=config.query_scalar**0.5 if config.scale_in_queries else 1.0)
    embed = ValueChange(times=config.hidden_size**0.5 if family_of(model).maxtext.scales_embeddings else 1.0)
    return {QUERY: query, KEY: key, EMBED: embed}


def maxtext_arrays(model: CausalLM, scan_layers: bool, dtype: Any = None) -> dict[str, LazyArray]:
    """MaxText's name -> lazy array, computed from the model's parameters when read."""
    leaves = maxtext_layout(model, scan_layers, value_changes(model))
    made, parts = dict[str, LazyArray](), dict[str, list[tuple[LazyArray, tuple[int, ...]]]]()
    for name, array in model_arrays(leaves, float_dtype(dtype)).items():
        stored = leaves[name].arranged
        array = array if stored is None else stored.write(array)
        if stored is None or stored.columns is None:
            made[name] = array
        else:
            parts.setdefault(name.split(_SHARED)[0], []).append((array, stored.columns))
    made |= {name: LazyArray.of_columns(each) for name, each in parts.items()}
    streams = family_of(model).maxtext.streams(model.config)
    return stream_weights.split_streams(made, streams) if streams else made


def from_maxtext(leaves: Mapping[str, ArrayLayout], given: LazyArrays, streams: int) -> dict[str, LazyArray]:
    """The inverse of `maxtext_arrays`: the arrays of leaves from MaxText's. Those of other shapes get a fault."""
    given = stream_weights.join_streams(given, leaves, streams) if streams else given
    found, widths = dict(given), collections.Counter[str]()
    for name, leaf in leaves.items():
        if leaf.arranged is not None and leaf.arranged.columns is not None:
            widths[name.split(_SHARED)[0]] += len(leaf.arranged.columns)
    for name, leaf in leaves.items():
        stored, file = leaf.arranged, name.split(_SHARED)[0]
        if stored is None or file not in given:
            continue
        found.pop(file, None)
        array, wanted = given[file], (*stored.shape[:-1], widths[file] or stored.shape[-1])
        if array.fault is not None:
            found[name] = array
        elif array.shape != wanted:
            fault = f"{plain(file)} has shape {list(array.shape)}, the config asks for {list(wanted)}"
            found[name] = LazyArray.faulty(fault, (file,))
        else:
            found[name] = stored.read(array if stored.columns is None else array.take(stored.columns, -1), leaf.shape)
    return found
