"""Conversion from and to MaxText's Linen layout: nested dicts with MaxText's names and shapes.

Differences to our own layout: scanned layers, vectors included, are stacked on axis 1, one array per kind if kinds
alternate (layer 5 of gpt-oss is number 2 of ``layers/layers_1``); grouped-query attention of most families has its
queries divided by sqrt(head width); with Llama 3.1's rope the two halves of a head's features are interleaved.
"""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import meta
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import some
from nnxmoe.config.rope import Llama3Rope
from nnxmoe.convert import orbax_folder
from nnxmoe.convert.core.dtypes import float_dtype
from nnxmoe.convert.core.layout import (
    QUERY,
    SAME,
    Change,
    Leaf,
    TableError,
    add_part,
    arrays_of,
    parameters,
)
from nnxmoe.convert.core.lazy_array import Box, Empty, LazyArray, LazyArrays
from nnxmoe.convert.core.report import LoadReport
from nnxmoe.convert.core.restore import abstract, check_config, restore, unless_cast
from nnxmoe.convert.hf.side_files import parse_config, read_generation_config, write_side_files
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.strategy import Strategy
from nnxmoe.runtime.progress import bytes_bar, logger
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.files import absolute
from nnxmoe.storage.multihost import shared_folder
from nnxmoe.storage.source import find_config

Tree = Mapping[str, Any]
_TRAINING = frozenset({"opt_state", "step"})  # stored next to params in a training state
_AROUND = re.compile(r"^(params/){0,2}(nnx_aux/(model/)?)?(?=(decoder|token_embedder)/)")
_KEY = "layer.attention.k."


def layout(model: CausalLM, scan_layers: bool, query: Change = SAME, key: Change = SAME) -> dict[str, Leaf]:
    """Map MaxText's names to a `Leaf` for every parameter of a model. ``query``, ``key``: changes to those projections.
    Raises TableError for a parameter without a name in MaxText."""
    if not model.maxtext_table:
        kind = model.config.model_type
        raise CheckpointError(f"there is no table of MaxText's names for {kind!r} models: choose another format")
    if model.mtp:
        raise CheckpointError(
            "MaxText has no place for the own norm (shared_head.norm) of multi-token prediction layers, and gives them "
            "states before the final norm: load the model without mtp=True, or choose another format"
        )
    every, found, block = parameters(model), dict[str, Leaf](), len(model.maxtext_block)
    sparse = {parameter.stack for parameter in every if parameter.experts}
    groups: dict[int | None, str] = {p.stack: model.maxtext_layers[p.stack in sparse] for p in every}
    first = {groups[p.stack]: p.layer for p in reversed(every) if p.stack is not None}  # parameters are in layer order
    _check_layers(model, [group for stack, group in groups.items() if stack is not None], scan_layers)
    changes = {QUERY: query, _KEY: key}
    for parameter in every:
        if parameter.key not in model.maxtext_table:
            raise TableError(f"the parameter {parameter.key} has no name in MaxText's layout")
        name, axes = model.maxtext_table[parameter.key]
        change = next((changes[start] for start in changes if parameter.key.startswith(start)), SAME)
        leaf = Leaf(parameter.key, parameter.of_layer, change=change, axes=axes)
        if parameter.layer is None:
            add_part(found, name, leaf, parameter)
            continue
        group = groups[parameter.stack]
        if scan_layers:
            leaf = dataclasses.replace(leaf, axis=1, axes=(*axes[:1], group, *axes[1:]))
        for layer, part in parameter.layers():
            assert layer is not None
            among = f"{group}/layers_{layer % block}" if block else group
            among = among if scan_layers else f"{group}_{layer - (first[group] or 0)}"
            add_part(found, f"decoder/{among}/{name}", leaf, part)
    return found


def _check_layers(model: CausalLM, groups: Collection[str], scan_layers: bool) -> None:
    """Raise CheckpointError for a model whose layers are not those of MaxText's model."""
    kind, block, windows = model.config.model_type, model.maxtext_block, model.config.windows
    if not block and len(set(groups)) < len(groups):
        raise CheckpointError(
            f"MaxText's {kind} has equal layers only, and this model has {len(groups)} runs of layers that differ: "
            "choose another format"
        )
    if block and any((window is not None) != block[i % len(block)] for i, window in enumerate(windows)):
        raise CheckpointError(
            f"the windows of MaxText's {kind} alternate, the first layer with one, and this model's windows are "
            f"{some(list(map(str, windows)))}: choose another format"
        )
    if block and scan_layers and len(windows) % len(block):
        raise CheckpointError(
            f"MaxText scans {kind} in blocks of {len(block)} layers, and this model has {len(windows)} layers: leave "
            "them unscanned (scan_layers=False)"
        )


def changes(model: CausalLM) -> tuple[Change, Change]:
    """The changes from a model's query and key projections to MaxText's layout."""
    config = model.config
    features = "pairs" if config.scale_in_queries and isinstance(config.rope, Llama3Rope) else "as they are"
    key = Change(features=features)
    return dataclasses.replace(key, over=config.query_scalar**0.5 if config.scale_in_queries else 1.0), key


def arrays(model: CausalLM, scan_layers: bool, dtype: Any = None) -> dict[str, LazyArray]:
    """MaxText's name -> lazy array, computed from the model's parameters when read."""
    return arrays_of(layout(model, scan_layers, *changes(model)), float_dtype(dtype))


def _warn_of_rounding(model: CausalLM, found: LazyArrays) -> None:
    narrow = {a.dtype for a in found.values()} - {np.dtype(np.float32)}
    if narrow and math.frexp(changes(model)[0].over)[0] != 0.5:
        logger.warning(
            "queries divided by sqrt(%d) are rounded to %s, as in MaxText; float32 avoids the rounding",
            model.config.head_width,
            ", ".join(sorted(map(str, narrow))),
        )


def to_tree(model: CausalLM, scan_layers: bool = True, dtype: Any = None) -> dict[str, Any]:
    """The model as MaxText's ``{"params": {"decoder": …, "token_embedder": …}}``, with NumPy arrays (JAX arrays if the
    model spans processes); ``dtype`` None: the model's. Arrays that are equal in both layouts are not copied.

    Queries are divided in float32 and rounded once. The result is exact if sqrt(head width) is a power of two; for a
    bfloat16 model use ``dtype=float32`` to avoid the rounding.
    """
    found = arrays(model, scan_layers, dtype)
    _warn_of_rounding(model, found)
    made = {name: array.joined() if array.joined else np.asarray(array) for name, array in found.items()}
    return {"params": unflatten_dict(made, sep="/")}


def from_tree(
    tree: Tree,
    config: DecoderConfig,
    strategy: Strategy | None = None,
    mesh: Mesh | None = None,
    *,
    dtype: Any = None,
) -> CausalLM:
    """A model from MaxText's parameter tree, scanned or not, boxed or not, with zero to two levels of ``params``.

    ``dtype`` None: as in the tree. The optimizer state of a training state is skipped and listed in ``load_report``.
    Raises CheckpointError (a ValueError) that lists all missing and unexpected arrays, and all shapes that differ from
    those of the config.
    """
    tops = _TRAINING & tree.keys() if "params" in tree else set()
    found = {"/".join(path): leaf for path, leaf in _leaves(tree, ()) if path[0] not in tops}
    if empty := [name for name, leaf in found.items() if isinstance(leaf, jax.ShapeDtypeStruct)]:
        raise CheckpointError(f"the tree holds shapes without values: {some(empty)}")
    skipped = {"state of a training": tuple(sorted(tops))} if tops else {}
    report = LoadReport("the tree", skipped=skipped)
    return _model({name: LazyArray.of(leaf) for name, leaf in found.items()}, report, config, strategy, mesh, dtype)


def _model(
    found: LazyArrays,
    report: LoadReport,
    config: DecoderConfig,
    strategy: Strategy | None,
    mesh: Mesh | None,
    dtype: Any,
) -> CausalLM:
    check_config(config)
    names, kind = _names(found), float_dtype(dtype)
    carried = dataclasses.replace(config, query_pre_attn_scalar=1.0) if config.scale_in_queries else config
    config, times = unless_cast(carried, [array for array, _ in names.values()], kind)
    model = abstract(config, strategy, mesh)
    scanned = any(name.startswith(f"decoder/{group}/") for name in names for group in model.maxtext_layers)
    features = "halves" if changes(model)[1].features == "pairs" else "as they are"
    wanted = layout(model, scanned, Change(times=times, features=features), Change(features=features))
    # MaxText 0.2.5 also stores other values in nnx_aux, such as the state of random number generators.
    aside = tuple(name for name, (_, aux) in names.items() if aux and name not in wanted)
    skipped = {**report.skipped, "no parameter of the model (nnx_aux)": aside} if aside else report.skipped
    given = {name: _from_aux(a) if aux and scanned else a for name, (a, aux) in names.items() if name not in aside}
    misfit = f"{report.source} does not fit the config ({config.model_type})"
    restore(model, wanted, given, kind, dataclasses.replace(report, skipped=skipped), misfit)
    return model


def save(
    model: CausalLM, folder: str | os.PathLike[str], scan_layers: bool = True, *, parameters_only: bool = False
) -> None:
    """Save an Orbax checkpoint as MaxText's converter does: ``0/items`` with ``step``, ``params`` and ``opt_state``,
    plus config.json and the other small files of a Hugging Face folder, which are optional for `load`.

    ``parameters_only``: only the parameters, in the folder itself, as MaxText does for inference. Holds one array at a
    time in memory. The folder must be new or empty and is created atomically. Raises CheckpointError (a ValueError).
    """
    found = arrays(model, scan_layers)
    _warn_of_rounding(model, found)
    with shared_folder(folder) as stage, bytes_bar(sum(a.nbytes for a in found.values()), "writing") as bar:
        params = {"params": {"params": unflatten_dict(found, sep="/")}}
        if parameters_only:
            orbax_folder.write(stage, params, bar)
        else:
            orbax_folder.write_step(stage, {"step": 0, **params, "opt_state": {}}, bar)
        if jax.process_index() == 0:
            write_side_files(stage, model, folder, model.config.folded()[0])


def load(
    folder: str | os.PathLike[str],
    config: DecoderConfig | None = None,
    strategy: Strategy | None = None,
    mesh: Mesh | None = None,
    *,
    dtype: Any = None,
) -> CausalLM:
    """Load a model from a MaxText Orbax checkpoint, in either form, scanned or not, without the optimizer state.

    ``folder``: the checkpoint, one of its steps, or ``items``. ``config`` None: the folder's config.json, which
    MaxText does not write. Raises CheckpointError as `from_tree` does.
    """
    where = absolute(folder)
    if config is None and not os.path.lexists(where / "config.json"):
        raise CheckpointError(
            f"{where} has no config.json; MaxText does not write one. Pass the config (nnxmoe convert: --config)"
        )
    notes: tuple[str, ...] = ()
    if config is None:
        config, notes = parse_config(find_config(where), str(where / "config.json"))
    report = LoadReport(str(where), files=str(where), notes=notes)
    model = _model(read(where), report, config, strategy, mesh, dtype)
    model.generation_config = read_generation_config(where, config)
    return model


def read(folder: str | os.PathLike[str]) -> dict[str, LazyArray]:
    """Name -> lazy array of the parameters in a MaxText Orbax checkpoint."""
    return orbax_folder.read(items(absolute(folder)), ("params", "nnx_aux"))


def items(folder: pathlib.Path) -> pathlib.Path:
    """The folder with the arrays: the folder itself, its ``items``, or the ``items`` of its last complete step."""
    steps = sorted(
        (path for path in folder.glob("*") if path.name.isdecimal()), key=lambda p: int(p.name), reverse=True
    )
    for where in (folder, folder / "items", *(step / "items" for step in steps)):
        if (where / "_METADATA").is_file():
            if incomplete := steps[: steps.index(where.parent)] if where.parent in steps else []:
                names = ", ".join(step.name for step in incomplete)
                logger.warning("%s: step %s is read; incomplete: %s", folder, where.parent.name, names)
            return where
    raise CheckpointError(f"{folder} holds no Orbax checkpoint: neither _METADATA, items nor a step such as 0/items")


def _names(found: LazyArrays) -> dict[str, tuple[LazyArray, bool]]:
    """Name without prefixes such as ``params/`` -> (array, whether it is in MaxText 0.2.5's ``nnx_aux``)."""
    names: dict[str, tuple[LazyArray, bool]] = {}
    for name, later in found.items():
        short = _AROUND.sub("", name)
        if short in names:
            raise CheckpointError(f"there are two arrays {short}, one of them at {name}: remove one of them")
        names[short] = later, name.startswith("nnx_aux/")
    return names


def _from_aux(array: LazyArray) -> LazyArray:
    """An array of MaxText 0.2.5's ``nnx_aux``, which has layers on axis 0, with layers moved to axis 1."""
    shape = (*array.shape[1:2], array.shape[0], *array.shape[2:])

    def read(box: Box, empty: Empty) -> np.ndarray:
        return np.moveaxis(array.read_box((*box[1:2], box[0], *box[2:]), empty), 0, 1)

    return dataclasses.replace(array, shape=shape, read_box=read)


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for name, branch in tree.items():
            yield from _leaves(branch, (*path, str(name)))
    elif isinstance(tree, meta.AxisMetadata):
        yield path, tree.unbox()
    else:
        yield path, tree.get_value() if isinstance(tree, nnx.Variable) else tree
