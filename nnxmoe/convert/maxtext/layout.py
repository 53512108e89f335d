"""MaxText's layout: name, shape and dimension order of every parameter of a model.

Differences from nnxmoe's layout:

- Scanned layers, including vectors, are stacked on axis 1. If layer types alternate, each type has its own array
  (layer 5 of gpt-oss has index 2 in ``layers/layers_1``). If all layers of a block except the last are scanned
  separately (Qwen3-Next, Gemma 4), layers are on axes 1 and 2.
- Queries of grouped-query attention are divided by sqrt(head width) in most families.
- With Llama 3.1's rope, the two halves of a head's features are interleaved.
- Embeddings of Gemma 4 are multiplied by sqrt(width).
- Qwen3.5 has several projections in one array, sorted by heads.
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
    ArrayLayout,
    Parameter,
    Rearrange,
    ValueChange,
    add_part,
    parameters,
)
from nnxmoe.convert.arrays.dtypes import float_dtype
from nnxmoe.convert.arrays.lazy_array import LazyArray, LazyArrays, merge_columns
from nnxmoe.convert.arrays.model_arrays import model_arrays
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.maxtext import stream_weights
from nnxmoe.layers.linear.kernel import flax_order
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import LayerBlocks, LayerGroups, Places
from nnxmoe.models import family_of

KEY, EMBED = "layer.attention.k.", "embed.table"
NO_CHANGES: Mapping[str, ValueChange] = {}
_KIND = "{kind}"  # Placeholder for the layer type in the name of a row.
_SHARED = " of "  # Separator between MaxText's name and the parameter's key, for arrays with several parameters.


class MaxTextRow(NamedTuple):
    """Row of a family's table of MaxText arrays.

    If MaxText's array has fewer axes than nnxmoe's array, the heads are flattened. An additional axis is a single head.

    Attributes:
        name: MaxText's name of the array.
        axes: Logical axes of MaxText's array.
        order: nnxmoe's dimensions in the order of MaxText's array. Empty if the order is the same.
    """

    name: str
    axes: tuple[str | None, ...]
    order: tuple[int, ...] = ()


def maxtext_layout(
    model: CausalLM, scan_layers: bool, changes: Mapping[str, ValueChange] = NO_CHANGES
) -> dict[str, ArrayLayout]:
    """Return the layouts of a model's MaxText arrays, by name.

    Args:
        model: Model, which may be abstract (shapes only).
        scan_layers: Whether MaxText's layers are scanned.
        changes: Prefix of parameter keys -> change of the values.

    Raises:
        CheckpointError: If MaxText does not support the model.
    """
    config, maxtext = model.config, family_of(model).maxtext
    if not maxtext.table:
        model_type = config.model_type
        raise CheckpointError(f"the MaxText format does not support {model_type!r} models: choose another format")
    if model.mtp:
        raise CheckpointError(
            "MaxText does not support the norm (shared_head.norm) of multi-token prediction layers, and uses hidden "
            "states before the final norm: choose another format, or load a Hugging Face folder "
            "(nnxmoe.save_pretrained) without mtp=True"
        )
    layouts: dict[str, ArrayLayout] = {}
    model_parameters, columns_of = parameters(model), maxtext.columns(config)
    layer_types = maxtext.layer_types(config)
    layer_places = _places(
        model,
        {parameter.stack: parameter.layer for parameter in reversed(model_parameters) if parameter.layer is not None},
        scan_layers,
    )
    for parameter in model_parameters:
        if parameter.key not in maxtext.table:
            model_type = config.model_type
            raise CheckpointError(
                f"MaxText's {model_type} has no counterpart of {parameter.key}: choose another format"
            )
        row = MaxTextRow(*maxtext.table[parameter.key])
        columns = columns_of.get(parameter.key)
        for layer, part in parameter.layers():
            group, dims = ("", ()) if layer is None else layer_places[layer]
            name = row.name if layer is None else f"decoder/{group}/{row.name.replace(_KIND, layer_types[layer])}"
            name = name if columns is None else name + _SHARED + parameter.key
            axes = row.axes
            if dims:
                stacked = group.split("/")[0], *("local_layers",) * (len(dims) - 1)
                axes = *row.axes[:1], *stacked, *row.axes[1:]
            layout = ArrayLayout(
                parameter.key,
                parameter.of_layer,
                axis=1 if dims else None,
                order=flax_order(parameter.variable, range(len(part.shape) - len(part.at))),
                change=next((changes[prefix] for prefix in changes if parameter.key.startswith(prefix)), UNCHANGED),
                axes=axes,
                rearrange=_rearrange(parameter, row, dims, columns),
                columns=columns,
            )
            add_part(layouts, name, layout, part)
    return layouts


def _rearrange(
    parameter: Parameter, row: MaxTextRow, dims: tuple[int, ...], columns: tuple[int, ...] | None
) -> Rearrange | None:
    """Return the rearrangement from MaxText's array to the array of a layout. `None` if no rearrangement is needed.

    ``dims`` are the sizes of the scanned dimensions in MaxText's array.
    """
    shape, ins = parameter.of_layer, parameter.inputs or 0
    shape = shape if len(row.axes) <= len(shape) else (shape[0], 1, *shape[1:])
    is_flat, order = len(row.axes) < len(shape), row.order or range(len(shape))
    if not (is_flat or row.order or dims[1:] or columns or shape != parameter.of_layer):
        return None
    num_first = ins if is_flat else 1  # number of dimensions before the layer dimensions
    first_sizes, last_sizes = [shape[i] for i in order[:num_first]], [shape[i] for i in order[num_first:]]
    source = (math.prod(first_sizes), *dims, math.prod(last_sizes)) if is_flat else (*first_sizes, *dims, *last_sizes)
    # nnxmoe's dimensions by position in MaxText's array. Layer dimensions are numbered -1, -2, …
    maxtext_order = [*order[:num_first], *(-1 - i for i in range(len(dims))), *order[num_first:]]
    positions = {dimension: position for position, dimension in enumerate(maxtext_order)}
    target_order = (0, *(-1 - i for i in range(len(dims))), *range(1, len(shape)))
    stacked = (math.prod(dims),) if dims else ()
    target = (parameter.of_layer[0], *stacked, *parameter.of_layer[1:])
    return Rearrange(source, (*first_sizes, *dims, *last_sizes), tuple(positions[i] for i in target_order), target)


def _places(model: CausalLM, stacks: Mapping[int | None, int], scan: bool) -> Places:
    """Return the group and scanned dimensions of each layer. ``stacks`` maps a stack to its first layer.

    Raises CheckpointError if the layer types differ from the layer types of MaxText's model.
    """
    config, maxtext = model.config, family_of(model).maxtext
    layers = maxtext.layers(config)
    model_type, groups = config.model_type, [group for group, _ in layers.places(config.sparse_layers, True)]
    if isinstance(layers, LayerGroups) and len({groups[first] for first in stacks.values()}) < len(stacks):
        raise CheckpointError(
            f"MaxText's {model_type} requires equal layers, but this model has {len(stacks)} stacks of different "
            "layers: choose another format"
        )
    if isinstance(layers, LayerBlocks):
        block, first, types = (
            len(layers.layer_types),
            layers.first,
            maxtext.layer_types(config)[layers.first :],
        )
        has_more_types = len({(i % block, model.layer_type(first + i)) for i in range(len(types))}) > block
        if has_more_types or any(layer_type != layers.layer_types[i % block] for i, layer_type in enumerate(types)):
            raise CheckpointError(
                f"MaxText's {model_type} repeats blocks of {some(layers.layer_types, 8)} layers, but this model's "
                f"layers are {some(types, 8)}, or differ in other ways: choose another format"
            )
        if scan and len(types) % block:
            raise CheckpointError(
                f"MaxText scans {model_type} in blocks of {block} layers, but this model has {len(types)} layers: save "
                "them unscanned (scan_layers=False)"
            )
    return layers.places(config.sparse_layers, scan)


def is_scanned(model: CausalLM, names: Iterable[str]) -> bool:
    """Return whether MaxText's names belong to scanned layers."""
    layers = family_of(model).maxtext.layers(model.config)
    groups = {group for group, dims in layers.places(model.config.sparse_layers, True) if dims}
    return any(name.startswith(f"decoder/{group}/") for name in names for group in groups)


def value_changes(model: CausalLM) -> dict[str, ValueChange]:
    """Return the value changes that convert parameters to MaxText's arrays, by prefix of the parameter key."""
    config = model.config
    features = "pairs" if config.scale_in_queries and isinstance(config.rope, Llama3Rope) else "as they are"
    key = ValueChange(features=features)
    query = dataclasses.replace(key, over=config.query_scalar**0.5 if config.scale_in_queries else 1.0)
    embed = ValueChange(times=config.hidden_size**0.5 if family_of(model).maxtext.scales_embeddings else 1.0)
    return {QUERY: query, KEY: key, EMBED: embed}


def maxtext_arrays(model: CausalLM, scan_layers: bool, dtype: Any = None) -> dict[str, LazyArray]:
    """Return lazy arrays in MaxText's layout by name, computed from the model's parameters when they are read."""
    layouts = maxtext_layout(model, scan_layers, value_changes(model))
    arrays, columns = dict[str, LazyArray](), dict[str, list[tuple[LazyArray, tuple[int, ...]]]]()
    for name, array in model_arrays(layouts, float_dtype(dtype)).items():
        layout = layouts[name]
        if layout.rearrange is not None:
            array = layout.rearrange.inverse(array)
        if layout.columns is None:
            arrays[name] = array
        else:
            columns.setdefault(name.split(_SHARED)[0], []).append((array, layout.columns))
    arrays |= {name: merge_columns(parts) for name, parts in columns.items()}
    streams = family_of(model).maxtext.streams(model.config)
    return stream_weights.split_streams(arrays, streams) if streams else arrays


def from_maxtext(layouts: Mapping[str, ArrayLayout], source_arrays: LazyArrays, streams: int) -> dict[str, LazyArray]:
    """Convert MaxText's arrays to the arrays of a layout. Arrays with a wrong shape have a ``fault``.

    Args:
        layouts: Layout of the model.
        source_arrays: MaxText's arrays by name.
        streams: Number of residual streams, or 0 for a model without `HyperConnection`.
    """
    source_arrays = stream_weights.join_streams(source_arrays, layouts, streams) if streams else source_arrays
    arrays, widths = dict(source_arrays), collections.Counter[str]()
    for name, layout in layouts.items():
        widths[name.split(_SHARED)[0]] += len(layout.columns or ())
    for name, layout in layouts.items():
        stored_name = name.split(_SHARED)[0]
        if layout.rearrange is None or stored_name not in source_arrays:
            continue
        arrays.pop(stored_name, None)
        array, source = source_arrays[stored_name], layout.rearrange.source
        shape = (*source[:-1], widths[stored_name] or source[-1])
        if array.fault is not None:
            arrays[name] = array
        elif array.shape != shape:
            fault = f"{plain(stored_name)} has shape {list(array.shape)}, but the config requires {list(shape)}"
            arrays[name] = LazyArray.faulty(fault, (stored_name,))
        else:
            arrays[name] = layout.rearrange(array if layout.columns is None else array.take(layout.columns, -1))
    return arrays
