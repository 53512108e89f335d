"""The native checkpoint format: parameters as an Orbax checkpoint, plus the small files of a Hugging Face folder.

A folder contains ``config.json``, ``nnxmoe.json`` (the version of this format and the quantized kernels) and
``parameters/``. The parameters are a nested dict with names such as ``layers/3/attention/q/kernel``. In the scanned
form, the layers of a stack are one array, such as ``stacks/0/attention/q/kernel``, with the layers on axis 0.
"""

import os
from typing import Any

import jax
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from nnxmoe.config.printable import short
from nnxmoe.convert.arrays.array_layout import UNCHANGED, ArrayLayout, ValueChange, add_part, parameters
from nnxmoe.convert.arrays.config_mismatch import refuse_config_mismatch
from nnxmoe.convert.arrays.dtypes import float_dtype
from nnxmoe.convert.arrays.lazy_array import LazyArray
from nnxmoe.convert.arrays.load_model import abstract_model, compare_arrays, fold_query_scale_if_cast, load_model
from nnxmoe.convert.arrays.load_report import LoadReport
from nnxmoe.convert.arrays.model_arrays import model_arrays
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.untrusted_files import absolute_path, read_object
from nnxmoe.convert.hf.auxiliary_files import read_config, read_generation_config, write_auxiliary_files
from nnxmoe.convert.storage.find_checkpoint import NATIVE_FILE
from nnxmoe.convert.storage.multihost import shared_folder
from nnxmoe.convert.storage.write_safetensors import write_json
from nnxmoe.layers.linear.kernel import flax_order
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.quantization.quantized_kernels import apply_quantization_record, quantization_record
from nnxmoe.model.stack import Scanned
from nnxmoe.model.strategy import Strategy
from nnxmoe.runtime.progress import bytes_bar

PARAMETERS = "parameters"
_VERSION = 3
_QUANTIZED = "quantized"


def layout(model: CausalLM, scan_layers: bool, query: ValueChange = UNCHANGED) -> dict[str, ArrayLayout]:
    """Return the `ArrayLayout` of every stored array, by name.

    Args:
        model: Model, with values or without.
        scan_layers: Whether the layers of a stack are one array.
        query: Change of the values of query projections.
    """
    found: dict[str, ArrayLayout] = {}
    for parameter in parameters(model, codes=True):
        name = parameter.key.replace(".", "/")
        change = query if parameter.takes_query_scalar else UNCHANGED
        for layer, part in parameter.layers():
            stacked = layer is not None and scan_layers
            inner = flax_order(parameter.variable, part.shape[len(part.at) :])
            order = flax_order(parameter.variable, range(len(inner)))
            leaf = ArrayLayout(parameter.key, inner, axis=0 if stacked else None, order=order, change=change)
            within = f"stacks/{parameter.stack}" if stacked else f"layers/{layer}"
            add_part(found, name if layer is None else name.replace("layer", within, 1), leaf, part)
    return found


def arrays(model: CausalLM, scan_layers: bool) -> dict[str, LazyArray]:
    """Return the stored arrays by name, computed from the model's parameters when they are read."""
    return model_arrays(layout(model, scan_layers))


def save(model: CausalLM, folder: str | os.PathLike[str], *, scan_layers: bool | None = None) -> None:
    """Save a model for `load`: an Orbax checkpoint of the parameters, the config and the tokenizer files.

    Each process writes its shards. The folder is created atomically.

    Args:
        model: Model to save.
        folder: New or empty folder.
        scan_layers: Whether to store the layers of a stack as one array. Scanned models load this form faster. Defaults
            to the model's own form.

    Raises:
        CheckpointError: (a ValueError) The folder cannot be written, or the model does not fit its config.
    """
    from nnxmoe.convert.maxtext import orbax_folder

    refuse_config_mismatch(model)
    found = arrays(model, isinstance(model.strategy.stacking, Scanned) if scan_layers is None else scan_layers)
    with shared_folder(folder) as stage, bytes_bar(sum(a.nbytes for a in found.values()), "writing") as bar:
        orbax_folder.write(stage / PARAMETERS, unflatten_dict(found, sep="/"), bar)
        if jax.process_index() == 0:
            write_auxiliary_files(stage, model, model.config)
            write_json(stage / NATIVE_FILE, {"version": _VERSION, _QUANTIZED: quantization_record(model)})


def load(
    folder: str | os.PathLike[str], dtype: Any = None, mesh: Mesh | None = None, strategy: Strategy | None = None
) -> CausalLM:
    """Load a model that `save` wrote. The mesh and the stacking may differ from the saved model's.

    Args:
        folder: Folder that `save` wrote.
        dtype: Dtype of the parameters. Defaults to the stored dtype.
        mesh: Mesh to shard the parameters over. Defaults to the strategy's mesh.
        strategy: Computation strategy of the model, including whether layers are scanned.

    Raises:
        CheckpointError: (a ValueError) The message lists the arrays that do not fit the config.
    """
    where, kind = absolute_path(folder), float_dtype(dtype)
    stored = read_config(where)
    fields = read_object(where / NATIVE_FILE, "give a folder that nnxmoe.save wrote", CheckpointError)
    version = fields.get("version")
    if type(version) is not int or version != _VERSION:
        raise CheckpointError(
            f"{where / NATIVE_FILE}: version {short(version)} is not {_VERSION}: use the nnxmoe that wrote it"
        )
    found = read(where)
    config, times = fold_query_scale_if_cast(stored, found.values(), kind)
    model = abstract_model(config, strategy, mesh, mtp=any("/mtp/" in name for name in found))
    try:
        apply_quantization_record(model, fields.get(_QUANTIZED, []))
    except ValueError as error:
        raise CheckpointError(f"{where / NATIVE_FILE}: {_QUANTIZED}: {error}") from None
    scanned = any(name.startswith("stacks/") for name in found)
    leaves = layout(model, scanned, ValueChange(times=times))
    report = compare_arrays(leaves, found, LoadReport(str(where), files=str(where)), strict=True)
    load_model(model, leaves, found, kind, report, f"{where / PARAMETERS} does not fit config.json")
    model.generation_config = read_generation_config(where, config)
    return model


def read(folder: str | os.PathLike[str]) -> dict[str, LazyArray]:
    """Return the lazy arrays in a folder that `save` wrote, by name."""
    from nnxmoe.convert.maxtext import orbax_folder

    return orbax_folder.read(absolute_path(folder) / PARAMETERS, None)
