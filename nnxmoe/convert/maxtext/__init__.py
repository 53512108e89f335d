"""Convert models to and from MaxText's layout: parameter trees and Orbax checkpoints with MaxText's names and shapes.

`nnxmoe.convert.maxtext.layout` describes the differences from nnxmoe's layout.
"""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import some
from nnxmoe.convert.arrays.array_layout import QUERY, ArrayLayout
from nnxmoe.convert.arrays.config_mismatch import refuse_config_mismatch
from nnxmoe.convert.arrays.dtypes import float_dtype
from nnxmoe.convert.arrays.lazy_array import LazyArray, LazyArrays
from nnxmoe.convert.arrays.load_model import (
    abstract_model,
    check_config,
    compare_arrays,
    fold_query_scale_if_cast,
    load_model,
)
from nnxmoe.convert.arrays.load_report import LoadReport
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.untrusted_files import absolute_path
from nnxmoe.convert.hf.auxiliary_files import read_generation_config, write_auxiliary_files
from nnxmoe.convert.maxtext import orbax_folder
from nnxmoe.convert.maxtext.array_trees import Tree, check_arrays, flatten_tree, split_off_states, strip_boxes
from nnxmoe.convert.maxtext.layout import (
    EMBED,
    KEY,
    from_maxtext,
    is_scanned,
    maxtext_arrays,
    maxtext_layout,
    value_changes,
)
from nnxmoe.convert.storage.find_checkpoint import read_config_fields
from nnxmoe.convert.storage.multihost import shared_folder
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.strategy import Strategy
from nnxmoe.models import family_of, parse_config
from nnxmoe.runtime.progress import bytes_bar, logger

_MTP = "mtp_block"  # MaxText's prediction layers, next to ``decoder``.
BIASES = "MoEBiasVar"  # MaxText 0.2.5's collection of router correction biases.
_BARE = ("decoder", "token_embedder")  # Top-level names of a tree without ``params``.
# Names that MaxText, Flax's TrainState and Orbax give to enclosing levels, in any number and order.
_LEVELS = ("params", "model", "model_params", "state", "train_state", "items", "default", "target")
_TOPS = (*_LEVELS, "nnx_aux", *_BARE, _MTP)  # Top-level names in a checkpoint folder.
_AROUND = re.compile(
    rf"^(?P<levels>(({'|'.join(_LEVELS)})/)*)(?P<aux>nnx_aux/|[A-Z]\w*Var/)?(({'|'.join(_LEVELS)})/)*"
    rf"(?=({'|'.join(_BARE)}|{_MTP})/)"
)
_NO_ITEM = re.compile(r"^\d+$|\.orbax-checkpoint-tmp")  # a step, or a temporary folder of an interrupted save


def roundings(model: CausalLM, arrays: LazyArrays) -> list[str]:
    """Describe the tensors that MaxText's layout scales and that are rounded to a dtype narrower than float32."""
    narrow_dtypes, changes = {a.dtype for a in arrays.values()} - {np.dtype(np.float32)}, value_changes(model)
    factors = [("queries divided", changes[QUERY].over), ("embeddings multiplied", changes[EMBED].times)]
    dtype_names = ", ".join(sorted(map(str, narrow_dtypes)))
    rounded = [(noun, factor) for noun, factor in factors if narrow_dtypes and math.frexp(factor)[0] != 0.5]
    return [f"{noun} by sqrt({round(factor**2)}) are rounded to {dtype_names}" for noun, factor in rounded]


def _warn_of_rounding(model: CausalLM, arrays: LazyArrays) -> None:
    for text in roundings(model, arrays):
        logger.warning("%s, as in MaxText; float32 avoids the rounding", text)


def to_tree(model: CausalLM, scan_layers: bool = True, dtype: Any = None) -> dict[str, Any]:
    """Convert a model to MaxText's parameter tree ``{"params": {"decoder": …, "token_embedder": …}}``.

    Arrays that are equal in both layouts are not copied if they are in CPU memory. Queries are divided by sqrt(head
    width) in float32 and rounded once. The division is exact if sqrt(head width) is a power of two. For a bfloat16
    model, ``dtype=float32`` avoids the rounding. The arrays are NumPy arrays, or JAX arrays if the model spans
    processes.

    Args:
        scan_layers: Whether to stack the layers, as MaxText does with ``scan_layers=True``.
        dtype: Dtype of the arrays. Defaults to the model's dtype.
    """
    arrays = maxtext_arrays(model, scan_layers, dtype)
    _warn_of_rounding(model, arrays)
    values = {name: array.global_array() if array.global_array else np.asarray(array) for name, array in arrays.items()}
    return {"params": unflatten_dict(values, sep="/")}


def from_tree(
    tree: Tree,
    config: DecoderConfig,
    strategy: Strategy | None = None,
    mesh: Mesh | None = None,
    *,
    dtype: Any = None,
) -> CausalLM:
    """Build a model from MaxText's parameter tree.

    Args:
        tree: Nested mappings of arrays. Layers may be scanned, values may be boxed, and the tree may be nested under
            levels such as ``params``, ``model`` or ``train_state``. The state of optimizers and random number
            generators is skipped and listed in ``load_report.skipped``.
        config: Config of the model.
        strategy: Computation strategy of the model. Defaults to `Strategy.auto()`.
        mesh: Mesh to shard the parameters over. Defaults to the strategy's mesh.
        dtype: Dtype of the parameters. Defaults to the dtype of the tree.

    Raises:
        CheckpointError: If arrays are missing, unexpected or misshapen. The message lists up to 20 arrays.
        ValueError: If ``tree`` is not a tree of arrays.
    """
    values, skipped = split_off_states(flatten_tree(tree))
    values = {name: value for name, value in values.items() if value is not None or _AROUND.match(name)}
    check_arrays(values)
    if empty_names := [name for name, value in values.items() if isinstance(value, jax.ShapeDtypeStruct)]:
        raise CheckpointError(f"the tree contains shapes without values: {some(empty_names)}")
    report = LoadReport("the tree", skipped=skipped)
    return _model(
        {name: LazyArray.from_array(value) for name, value in values.items()}, report, config, strategy, mesh, dtype
    )


def _model(
    tree_arrays: LazyArrays,
    report: LoadReport,
    config: DecoderConfig,
    strategy: Strategy | None,
    mesh: Mesh | None,
    dtype: Any,
) -> CausalLM:
    check_config(config)
    names, load_dtype = _names(tree_arrays), float_dtype(dtype)
    maxtext_config = dataclasses.replace(config, query_pre_attn_scalar=1.0) if config.scale_in_queries else config
    config, times = fold_query_scale_if_cast(maxtext_config, [array for array, _ in names.values()], load_dtype)
    model = abstract_model(config, strategy, mesh)
    scan, inverses = is_scanned(model, names), {key: change.inverse for key, change in value_changes(model).items()}
    # The factor on the queries is either in the config or in `times`.
    layouts = maxtext_layout(model, scan, inverses | {QUERY: dataclasses.replace(inverses[KEY], times=times)})
    # MaxText 0.2.5 also stores values that are not parameters in nnx_aux, such as random number generator states.
    mtp_names = {name for name in names if name.startswith(f"{_MTP}/")}
    aux_names = {name for name, (_, aux) in names.items() if aux and name not in layouts} - mtp_names
    rules = {
        f"prediction layers in MaxText's format ({_MTP})": mtp_names,
        "values that are not parameters (nnx_aux)": aux_names,
    }
    skipped = {**report.skipped, **{rule: tuple(sorted(group)) for rule, group in rules.items() if group}}
    names = {name: entry for name, entry in names.items() if name not in mtp_names | aux_names}
    stacked_names = {name for name, layout in layouts.items() if layout.axis is not None}
    layers_first = _layers_first({name: array.shape for name, (array, aux) in names.items() if not aux}, layouts)
    # In MaxText 0.2.5, layers are also on axis 0 in ``nnx_aux``, and in the router biases of NNX model states.
    bias = f"/{family_of(model).maxtext.table.get('layer.moe.router.bias', ('',))[0]}"
    is_nnx = any("model" in match["levels"].split("/") for match in map(_AROUND.match, tree_arrays) if match)
    biases = {name: names[name][0].shape for name in stacked_names & names.keys() if name.endswith(bias)}
    swapped_names = {n for n, s in biases.items() if s == layouts[n].shape[::-1] and (is_nnx or s != layouts[n].shape)}
    arrays = {
        n: a.swap_leading_axes() if (aux or layers_first or n in swapped_names) and n in stacked_names else a
        for n, (a, aux) in names.items()
    }
    arrays = from_maxtext(layouts, arrays, family_of(model).maxtext.streams(config))
    mismatch = f"{report.source} does not fit the config ({config.model_type})"
    report = compare_arrays(layouts, arrays, dataclasses.replace(report, skipped=skipped), strict=True)
    load_model(model, layouts, arrays, load_dtype, report, mismatch)
    return model


def save(
    model: CausalLM, folder: str | os.PathLike[str], scan_layers: bool = True, *, parameters_only: bool = False
) -> None:
    """Save an Orbax checkpoint as MaxText's converter does: ``0/items`` with ``step``, ``params`` and ``opt_state``.

    Also writes config.json, generation_config.json and the tokenizer files. Scanned router biases are written twice,
    with the layers on either axis, because MaxText 0.2.5 moved this axis. Only one array at a time is in host memory.
    The folder is created atomically.

    Args:
        folder: New or empty folder.
        scan_layers: Whether to stack the layers, as MaxText does with ``scan_layers=True``.
        parameters_only: Whether to write only the parameters, directly to the folder, as MaxText does for inference.

    Raises:
        CheckpointError: If the folder cannot be written, or MaxText does not support the model.
    """
    refuse_config_mismatch(model)
    arrays = maxtext_arrays(model, scan_layers)
    _warn_of_rounding(model, arrays)
    with shared_folder(folder) as stage, bytes_bar(sum(a.nbytes for a in arrays.values()), "writing") as bar:
        row = family_of(model).maxtext.table.get("layer.moe.router.bias", ("/",))[0]
        biases = {n: a.swap_leading_axes() for n, a in arrays.items() if n.endswith(f"/{row}") and len(a.shape) == 2}
        collections = {"params": unflatten_dict(arrays, sep="/"), BIASES: unflatten_dict(biases, sep="/")}
        params = {"params": collections if biases else {"params": collections["params"]}}
        tree = params if parameters_only else {"step": 0, **params, "opt_state": {}}
        orbax_folder.write(stage, tree, bar, step=not parameters_only)
        if jax.process_index() == 0:
            write_auxiliary_files(stage, model, model.config.fold_query_scale()[0])


def load(
    folder: str | os.PathLike[str],
    config: DecoderConfig | None = None,
    strategy: Strategy | None = None,
    mesh: Mesh | None = None,
    *,
    dtype: Any = None,
) -> CausalLM:
    """Load a model from a MaxText Orbax checkpoint, scanned or not, without the optimizer state.

    Args:
        folder: Folder of the checkpoint, of a step, or of ``items``.
        config: Config of the model. Defaults to config.json in the folder. MaxText itself does not write config.json.
        strategy, mesh, dtype: See `from_tree`.

    Raises:
        CheckpointError: If the checkpoint is damaged or does not fit the config.
    """
    path = absolute_path(folder)
    if config is None and not os.path.lexists(path / "config.json"):
        raise CheckpointError(
            f"{path} has no config.json, because MaxText does not write it. Pass config=, or --config to nnxmoe convert"
        )
    notes: tuple[str, ...] = ()
    if config is None:
        config, notes = parse_config(read_config_fields(path), str(path / "config.json"))
    arrays, skipped = split_off_states(read(path))
    unknown_names, state_names = split_off_states(
        {name: np.int32() for name in orbax_folder.top_level_names(items(path)) if name not in _TOPS}
    )
    if unknown_names := [name for name in unknown_names if not name.endswith("Var")]:
        raise CheckpointError(
            f"{path} holds {some(unknown_names)} in addition to the parameters: remove it, or pass a tree to from_tree"
        )
    for state, names in state_names.items():
        skipped[state] = (*skipped.get(state, ()), *names)
    report = LoadReport(str(path), files=str(path), notes=notes, skipped=skipped)
    model = _model(arrays, report, config, strategy, mesh, dtype)
    model.generation_config = read_generation_config(path, config)
    return model


def read(folder: str | os.PathLike[str]) -> dict[str, LazyArray]:
    """Return the lazy arrays of the parameters in a MaxText Orbax checkpoint, by name."""
    return orbax_folder.read(items(absolute_path(folder)), _TOPS)


def items(folder: pathlib.Path) -> pathlib.Path:
    """Return the Orbax item with the arrays: the folder itself, its item, or the item of the last complete step.

    The item is the folder ``items``, or else the only item, such as ``default``. Raises CheckpointError if the folder
    has no item, or several items but not ``items``.
    """
    steps = sorted(
        (path for path in folder.glob("*") if path.name.isdecimal()), key=lambda path: int(path.name), reverse=True
    )
    for parent in (folder, *steps):
        folders = sorted(path.parent for path in parent.glob("*/_METADATA") if not _NO_ITEM.search(path.parent.name))
        folders = [parent] if (parent / "_METADATA").is_file() else [p for p in folders if p.name == "items"] or folders
        if len(folders) > 1:
            raise CheckpointError(f"{parent} holds {some([p.name for p in folders])}: pass the folder of one of these")
        if folders:
            if incomplete_steps := steps[: steps.index(parent)] if parent in steps else []:
                names = ", ".join(step.name for step in incomplete_steps)
                logger.warning("%s: reading step %s; incomplete steps: %s", folder, parent.name, names)
            return folders[0]
    raise CheckpointError(
        f"{folder} contains no Orbax checkpoint: neither _METADATA, items nor a step such as 0/items; pass the folder "
        "that contains _METADATA"
    )


def _names(arrays: LazyArrays) -> dict[str, tuple[LazyArray, bool]]:
    """Map names without prefixes such as ``params/`` to (array, True if its collection is not ``params``).

    Besides ``params``, MaxText 0.2.5 has the collection ``nnx_aux`` and a collection per variable class, such as
    ``MoEBiasVar``. As in MaxText, the collection of a class overrides ``params``.
    """
    names: dict[str, tuple[LazyArray, bool]] = {}
    for name in sorted(arrays, key=lambda name: "Var/" in name):
        prefix = _AROUND.match(name)
        short_name = strip_boxes(name[prefix.end() :] if prefix else name)
        if short_name in names and "Var/" not in name:
            raise CheckpointError(f"two arrays are named {short_name}, one of them at {name}: remove one of them")
        names[short_name] = arrays[name], bool(prefix and prefix["aux"])
    return names


def _layers_first(shapes: Mapping[str, tuple[int, ...]], layouts: Mapping[str, ArrayLayout]) -> bool:
    """Return whether all unambiguous shapes have scanned layers on axis 0 (MaxText's ``param_scan_axis: 0``)."""
    if any(layout.rearrange is not None for layout in layouts.values()):
        return False
    pairs = [(shapes[n], layout.shape) for n, layout in layouts.items() if layout.axis is not None and n in shapes]
    unambiguous = [(shape, swapped) for shape, full in pairs if (swapped := (full[1], full[0], *full[2:])) != full]
    return bool(unambiguous) and all(shape == swapped for shape, swapped in unambiguous)
