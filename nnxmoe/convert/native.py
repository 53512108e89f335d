"""Native checkpoint format: an Orbax checkpoint of the parameters, with config.json and the tokenizer files.

A folder contains ``config.json``, ``nnxmoe.json`` (format version and list of quantized kernels) and ``parameters/``.
The parameters are a nested dict with names such as ``layers/3/attention/q/kernel``. In the scanned form, each stack
of layers is one array, such as ``stacks/0/attention/q/kernel``, with the layers on axis 0.
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
        model: Model, which may be abstract (shapes only).
        scan_layers: Whether each stack of layers is stored as one array.
        query: Change of the query projections' values, for example to fold the query scale.
    """
    layouts: dict[str, ArrayLayout] = {}
    for parameter in parameters(model, codes=True):
        name = parameter.key.replace(".", "/")
        change = query if parameter.takes_query_scalar else UNCHANGED
        for layer, part in parameter.layers():
            is_stacked = layer is not None and scan_layers
            part_shape = flax_order(parameter.variable, part.shape[len(part.at) :])
            order = flax_order(parameter.variable, range(len(part_shape)))
            array_layout = ArrayLayout(
                parameter.key, part_shape, axis=0 if is_stacked else None, order=order, change=change
            )
            prefix = f"stacks/{parameter.stack}" if is_stacked else f"layers/{layer}"
            add_part(layouts, name if layer is None else name.replace("layer", prefix, 1), array_layout, part)
    return layouts


def arrays(model: CausalLM, scan_layers: bool) -> dict[str, LazyArray]:
    """Return the lazy arrays that `save` writes, by name."""
    return model_arrays(layout(model, scan_layers))


def save(model: CausalLM, folder: str | os.PathLike[str], *, scan_layers: bool | None = None) -> None:
    """Save a model for `load`: an Orbax checkpoint of the parameters, the config and the tokenizer files.

    Each process writes its shards. The folder is created atomically.

    Args:
        model: Model to save.
        folder: New or empty folder.
        scan_layers: Whether to store each stack of layers as one array. Scanned models load this form faster. Defaults
            to True for scanned models.

    Raises:
        CheckpointError: If the folder cannot be written, or the model does not fit its config.
    """
    from nnxmoe.convert.maxtext import orbax_folder

    refuse_config_mismatch(model)
    saved_arrays = arrays(model, isinstance(model.strategy.stacking, Scanned) if scan_layers is None else scan_layers)
    with (
        shared_folder(folder) as temporary_folder,
        bytes_bar(sum(a.nbytes for a in saved_arrays.values()), "writing") as bar,
    ):
        orbax_folder.write(temporary_folder / PARAMETERS, unflatten_dict(saved_arrays, sep="/"), bar)
        if jax.process_index() == 0:
            write_auxiliary_files(temporary_folder, model, model.config)
            write_json(temporary_folder / NATIVE_FILE, {"version": _VERSION, _QUANTIZED: quantization_record(model)})


def load(
    folder: str | os.PathLike[str], dtype: Any = None, mesh: Mesh | None = None, strategy: Strategy | None = None
) -> CausalLM:
    """Load a model that `save` wrote. The saved model may have had a different mesh and stacking.

    Args:
        folder: Folder that `save` wrote.
        dtype: Dtype of the parameters. Defaults to the stored dtype.
        mesh: Mesh to shard the parameters over. Defaults to the strategy's mesh.
        strategy: Computation strategy of the model, including whether layers are scanned.

    Raises:
        CheckpointError: If the folder cannot be read, or its arrays do not fit the config. The message
            lists the arrays.
    """
    folder_path, load_dtype = absolute_path(folder), float_dtype(dtype)
    stored_config = read_config(folder_path)
    fields = read_object(folder_path / NATIVE_FILE, "pass a folder that nnxmoe.save wrote", CheckpointError)
    version = fields.get("version")
    if type(version) is not int or version != _VERSION:
        raise CheckpointError(
            f"{folder_path / NATIVE_FILE}: version {short(version)} is not {_VERSION}: "
            "load it with the nnxmoe release that saved it"
        )
    stored_arrays = read(folder_path)
    config, query_factor = fold_query_scale_if_cast(stored_config, stored_arrays.values(), load_dtype)
    model = abstract_model(config, strategy, mesh, mtp=any("/mtp/" in name for name in stored_arrays))
    try:
        apply_quantization_record(model, fields.get(_QUANTIZED, []))
    except ValueError as error:
        raise CheckpointError(f"{folder_path / NATIVE_FILE}: {_QUANTIZED}: {error}") from None
    is_scanned = any(name.startswith("stacks/") for name in stored_arrays)
    layouts = layout(model, is_scanned, ValueChange(times=query_factor))
    report = compare_arrays(layouts, stored_arrays, LoadReport(str(folder_path), files=str(folder_path)), strict=True)
    load_model(
        model, layouts, stored_arrays, load_dtype, report, f"{folder_path / PARAMETERS} does not fit config.json"
    )
    model.generation_config = read_generation_config(folder_path, config)
    return model


def read(folder: str | os.PathLike[str]) -> dict[str, LazyArray]:
    """Return the lazy arrays in a folder that `save` wrote, by name."""
    from nnxmoe.convert.maxtext import orbax_folder

    return orbax_folder.read(absolute_path(folder) / PARAMETERS, None)
