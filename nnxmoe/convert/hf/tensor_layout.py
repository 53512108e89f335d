"""Layout of a model's parameters in Hugging Face tensors, and rules for tensors that loading skips."""

import dataclasses
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set

import numpy as np

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError
from nnxmoe.config.printable import some
from nnxmoe.convert.arrays.array_layout import ArrayLayout, Parameter, ValueChange, add_part, parameters
from nnxmoe.convert.arrays.lazy_array import LazyArray, LazyArrays
from nnxmoe.convert.arrays.load_model import compare_arrays
from nnxmoe.convert.arrays.load_report import LoadReport
from nnxmoe.convert.arrays.tensor_parts import TensorPart
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.formats.module_tensors import ACTIVATION_SCALES
from nnxmoe.convert.storage.find_checkpoint import group_towers
from nnxmoe.layers.linear.quantized import ARRAYS
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.family import Family, row_missing
from nnxmoe.model.weight_names import Table, W, layer_of, options, prefix_of
from nnxmoe.models import family_of
from nnxmoe.models.shared.tables import HF_MTP

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
_EXPERT = re.compile(r".*\.experts\.([0-9]{1,9})\.")
_MTP = "layer.mtp."  # Key prefix of multi-token prediction layers.
_COPIED = ("embed.table", "head.kernel")  # Parameters that checkpoints duplicate in prediction layers.
Row = list[tuple[str, ArrayLayout, Parameter]]  # Arrays for one layer of a parameter: (name, layout, slice).


def tensor_layout(model: CausalLM, arrays: LazyArrays | None = None, times: float = 1.0) -> dict[str, ArrayLayout]:
    """Return the layouts of a model's Hugging Face tensors, by tensor name.

    Args:
        model: Model, which may be abstract (shapes only).
        arrays: Arrays of a checkpoint. If the family's table lists several names for a parameter, each layer uses the
            first name in ``arrays`` with the right shape, or else the first name in ``arrays``. If ``arrays`` is None,
            each layer uses the first name in the table.
        times: Factor on the query projections. See `DecoderConfig.query_scalar`.

    Raises:
        ConfigError: If the family's table has no row for a parameter.
    """
    family = family_of(model)
    stored_arrays, table = {} if arrays is None else arrays, family.hf_names(model.config)
    layouts: dict[str, ArrayLayout] = {}
    for parameter in parameters(model, codes=True):
        key = parameter.key.removesuffix(parameter.ending)
        if key not in table:
            raise ConfigError(row_missing(family, key))
        change = ValueChange(times=times if parameter.takes_query_scalar else 1.0)
        for layer, layer_parameter in parameter.layers():
            prefix = _prefix(family, model.config.num_hidden_layers, key, layer)
            rows = [_row(w, prefix, layer_parameter, change) for w in options(table, key)]
            for name, layout, part in _choose_row(rows, stored_arrays):
                add_part(layouts, name, layout, part)
    if EMBED in stored_arrays or HEAD not in stored_arrays or HEAD in layouts:
        return layouts
    # The checkpoint of a tied model may contain only the head. The embedding is then read from the head.
    return {HEAD if name == EMBED else name: layout for name, layout in layouts.items()}


def _prefix(family: Family, depth: int, key: str, layer: int | None) -> str:
    """Return the prefix of a parameter's tensor names. Layers with an index >= ``depth`` are prediction layers."""
    if layer is None or layer < depth or not family.mtp_prefixes:
        return prefix_of(layer)
    return family.mtp_prefixes[not key.startswith(_MTP)].format(layer - depth)


def _row(w: W, prefix: str, parameter: Parameter, change: ValueChange) -> Row:
    """Return the arrays of one layer of a parameter: a single array, or one array per expert."""
    shape, inputs, experts = parameter.inner, parameter.inputs, parameter.experts
    flat_shape = shape if inputs is None else (math.prod(shape[:-inputs]), math.prod(shape[-inputs:]))
    axis = None if experts is None or w.per_expert else 0
    layout = ArrayLayout(parameter.key, flat_shape, axis=axis, change=change)
    parts = [parameter]
    if experts:
        parts = [dataclasses.replace(parameter, at=(*parameter.at, expert)) for expert in range(experts)]
    row: Row = []
    for expert, part in enumerate(parts):
        tensor = w.under(prefix, expert) if w.per_expert else w.under(prefix)
        tensor_part = TensorPart(tensor, w, int(axis == 0))
        part_layout = layout if w.whole else dataclasses.replace(layout, tensor_part=tensor_part)
        row.append((tensor_part.name + parameter.ending, part_layout, part))
    return row


def _choose_row(rows: list[Row], arrays: LazyArrays) -> Row:
    """Return the first row with stored arrays of the right shapes, else with any stored arrays, else the first row."""
    stored_rows = [row for row in rows if any(name in arrays for name, _, _ in row)]
    if len(stored_rows) < 2:
        return (stored_rows or rows)[0]
    return next((row for row in stored_rows if _fits(row, arrays)), stored_rows[0])


def _fits(row: Row, arrays: LazyArrays) -> bool:
    """Return whether all stored arrays of a row have the right shapes."""
    for name, layout, _ in row:
        shape = layout.part_shape if layout.axis is None else (len(row), *layout.part_shape)
        if name in arrays and arrays[name].shape != shape:
            return False
    return True


def _copied_names(table: Table, layer: int) -> dict[str, str]:
    """Map the names of the embedding and head copies in a prediction layer to the names of the originals."""
    names: dict[str, str] = {}
    for key in _COPIED:
        if _MTP + key in table:
            original = options(table, key)[0].tensor(None)
            names |= {w.tensor(layer): original for w in options(table, _MTP + key)}
    return names


def repeated_tensors(model: CausalLM, names: Container[str]) -> dict[str, str]:
    """Map the names of the embedding and head copies in all prediction layers to the names of the originals.

    Saving writes the copies for readers that expect them. Loading ignores the copies. All arrays of a quantized head
    are copied. ``names`` are the names of the main model's tensors.
    """
    originals: dict[str, str] = {}
    for index in range(len(model.mtp)):
        for copy, original in _copied_names(family_of(model).hf, model.config.num_hidden_layers + index).items():
            endings = ["", *(f".{array}" for array in ARRAYS)]
            copies = {copy + ending: original + ending for ending in endings if original + ending in names}
            originals |= copies or {copy: EMBED}
    return originals


def constant_tensors(model: CausalLM) -> dict[str, LazyArray]:
    """Return the tensors without parameters that the reference implementation stores: empty tensors and constants."""
    routers = [p for p in parameters(model, codes=True) if p.key == "layer.moe.router.kernel"]
    constants = family_of(model).constants(model.config)
    tensors = {name: LazyArray.from_array(np.array(values, np.int64)) for name, values in constants.items()}
    for name, shape in model.config.empty_tensors.items():
        for router in routers:
            array = LazyArray.from_array(np.empty(shape, router.variable.dtype))
            tensors |= {W(name).tensor(layer): array for layer, _ in router.layers()}
    return tensors


def refuse_oversized_config(config: DecoderConfig, arrays: LazyArrays, config_path: str) -> None:
    """Raise CheckpointError if config.json has far more layers or experts than the files.

    Call this function before building a layout, because the layout of an oversized config could exhaust the memory.
    """
    shapes = [array.shape for array in arrays.values() if math.prod(array.shape)]
    expert_counts = [shape[0] for shape in shapes if len(shape) == 3]  # all experts in one tensor
    layers, experts = config.num_hidden_layers, config.experts
    # layers * experts overestimates the tensors of a model with mostly dense layers. The factor 16 allows for this.
    if layers > len(shapes) or layers * experts > 16 * (len(shapes) + sum(expert_counts)):
        count = f" with {experts} experts each" if experts else ""
        raise CheckpointError(
            f"{config_path}: num_hidden_layers is {layers}{count}, but the files contain {len(shapes)} tensors in all: "
            "check that config.json belongs to these files and that no file is missing"
        )


def refuse_other_constants(constants: Mapping[str, Sequence[int]], arrays: LazyArrays) -> None:
    """Raise CheckpointError if a stored constant differs from the constant that the config determines."""
    for name, values in constants.items():
        if name in arrays and not np.array_equal(values, np.asarray(arrays[name])):
            raise CheckpointError(f"{name} does not fit config.json: check that config.json belongs to these files")


def report_tensors(
    model: CausalLM, layouts: Mapping[str, ArrayLayout], arrays: LazyArrays, report: LoadReport
) -> LoadReport:
    """Extend a report with the loaded, skipped, unexpected, missing and wrong tensors of a checkpoint."""
    config, report = model.config, compare_arrays(layouts, arrays, report)
    used_names = source_tensors(layouts.keys() & arrays.keys(), arrays)
    unused_names = {name for name in report.unexpected if not source_tensors([name], arrays) <= used_names}
    towers = group_towers(unused_names)
    skipped = {f"{tower} (outside the text model)": tuple(sorted(names)) for tower, names in towers.items()}
    unused_names -= {name for names in towers.values() for name in names}
    rules = _skip_rules(model, unused_names, layouts, arrays) if unused_names else {}
    for rule, test in rules.items():
        names = tuple(sorted(name for name in unused_names if test(name)))
        unused_names -= set(names)
        if names:
            skipped[rule] = names
    return dataclasses.replace(
        report,
        loaded=tuple(sorted(used_names)),
        unexpected=tuple(sorted(unused_names)),
        skipped=skipped,
        towers=tuple(sorted(towers)),
        notes=(*report.notes, *_beyond(config, unused_names)),
    )


def source_tensors(names: Iterable[str], arrays: LazyArrays) -> set[str]:
    """Return the names of the stored tensors that arrays are read from."""
    return {tensor for name in names for tensor in (arrays[name].tensors or (name,))}


def _skip_rules(
    model: CausalLM, unused_names: Set[str], layouts: Iterable[str], arrays: LazyArrays
) -> dict[str, Callable[[str], bool]]:
    """Return the rules for skipping tensors, as description -> predicate on the tensor's name."""
    config, table, ignored_names = model.config, family_of(model).hf, model.config.unused_tensors
    constants = family_of(model).constants(config)
    first_index = config.num_hidden_layers
    mtp_indices = range(first_index, first_index + getattr(config, "num_nextn_predict_layers", 0))
    # Tensor names that occur only in prediction layers distinguish prediction layers from surplus layers. HF_MTP
    # supplies the names for families whose own table has no prediction layers.
    mtp_names = {w.name for rows in (HF_MTP, table) for key in rows if key.startswith(_MTP) for w in options(rows, key)}
    checkpoint_layers = {
        layer for layer, name in map(layer_of, unused_names) if layer in mtp_indices and name in mtp_names
    }
    model_layers = {layer for layer, name in map(layer_of, layouts) if layer in mtp_indices and name in mtp_names}
    copied_names = {name for layer in model_layers if layer is not None for name in _copied_names(table, layer)}
    mtp_prefixes = "mtp.", "model.mtp.", "model.mtp_layers."
    return {
        "multi-token prediction layers (not part of the model)": lambda name: (
            layer_of(name)[0] in checkpoint_layers - model_layers or name.startswith(mtp_prefixes)
        ),
        "copies of the embedding and the head (the main model's tensors are used)": lambda name: name in copied_names,
        "empty tensors": lambda name: 0 in arrays[name].shape,
        "tensors that the family does not use": lambda name: name in ignored_names,
        "constants (computed)": lambda name: name in constants,
        "rotary frequencies (computed)": lambda name: name.endswith("rotary_emb.inv_freq"),
        "scales of activations and caches (which are not quantized)": lambda name: name.endswith(ACTIVATION_SCALES),
        "head tied to the embedding": lambda name: name == HEAD and config.tie_word_embeddings,
    }


def _beyond(config: DecoderConfig, unused_names: Set[str]) -> list[str]:
    """Return likely reasons for unused tensors, derived from the tensor names."""
    notes = []
    expert_indices = ((int(match[1]) if (match := _EXPERT.match(name)) else None) for name in unused_names)
    indices = {"layers": {layer_of(name)[0] for name in unused_names}, "experts": set(expert_indices)}
    for noun, expected_count in (("layers", config.num_hidden_layers), ("experts", config.experts)):
        if surplus := [str(n) for n in sorted(n for n in indices[noun] if n is not None and n >= expected_count)]:
            notes.append(f"config.json specifies {expected_count} {noun}, but the files contain more: {some(surplus)}")
    if any(name.endswith(".bias") and (layer_of(name)[0] or 0) < config.num_hidden_layers for name in unused_names):
        notes.append("the files contain biases that config.json does not enable")
    return notes
