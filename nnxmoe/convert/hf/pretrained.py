"""Load models from Hugging Face checkpoints, and save models as folders that transformers can load.

Steps of loading: config.json -> config -> abstract model (shapes only) -> the tensor names of each parameter -> the
bytes for this process's devices -> one array per parameter on the devices. Every parameter is read from the
checkpoint. A missing tensor raises an error.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from nnxmoe.axes import keeps_dtype
from nnxmoe.config.arguments import reject_unknown_arguments
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import parse_bytes, some
from nnxmoe.convert.arrays.config_mismatch import refuse_config_mismatch
from nnxmoe.convert.arrays.dtypes import float_dtype
from nnxmoe.convert.arrays.lazy_array import LazyArray, LazyArrays
from nnxmoe.convert.arrays.load_model import load_model
from nnxmoe.convert.arrays.load_report import LoadReport
from nnxmoe.convert.arrays.model_arrays import model_arrays
from nnxmoe.convert.arrays.tensor_parts import split_tensors
from nnxmoe.convert.arrays.tensor_shards import split_shards
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.safetensors import TensorInfo, dtype_code
from nnxmoe.convert.hf.auxiliary_files import generation_fields, write_auxiliary_files
from nnxmoe.convert.hf.compressed_writer import compress_tensors
from nnxmoe.convert.hf.quantized_loading import keep_codes, quantize_while_loading
from nnxmoe.convert.hf.tensor_arrays import tensor_arrays
from nnxmoe.convert.hf.tensor_layout import (
    EMBED,
    HEAD,
    constant_tensors,
    refuse_other_constants,
    refuse_oversized_config,
    repeated_tensors,
    report_tensors,
    tensor_layout,
)
from nnxmoe.convert.storage.checkpoint import Checkpoint
from nnxmoe.convert.storage.multihost import shared_folder
from nnxmoe.convert.storage.write_safetensors import Tensors, write_sharded
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.quantization.methods import Method, Mixed, check_quantize_options
from nnxmoe.model.strategy import Strategy, with_mesh
from nnxmoe.models import family_of, parse_config, refuse_preset
from nnxmoe.moe.router_variants import TokenExpertTable
from nnxmoe.runtime.progress import bytes_bar, logger

_REMEDY = "\nCheck that config.json belongs to these files and that no file is missing."


@reject_unknown_arguments
def from_pretrained(
    path_or_hub_id: str | os.PathLike[str],
    dtype: Any = None,
    mesh: Mesh | None = None,
    strategy: Strategy | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    *,
    keep_quantized: bool = False,
    quantize: Method | Mixed | None = None,
    mtp: bool = False,
    expect: type[CausalLM] | None = None,
) -> CausalLM:
    """Load a model. ``model.load_report`` contains the status of every tensor.

    Args:
        path_or_hub_id: Folder, GGUF file, hub id, or GGUF file on the hub (``org/name/file.gguf``).
        dtype: Dtype of the parameters, except DeepSeek's correction bias (float32). Defaults to the stored dtype.
            Quantized weights default to bfloat16, and to float32 in GGUF files.
        mesh: Mesh to shard the parameters over. Defaults to the strategy's mesh.
        strategy: Computation strategy of the model. Defaults to `Strategy.auto()`.
        revision: Branch, tag or commit of a hub repository.
        local_files_only: Whether to use only files in the local hub cache.
        keep_quantized: Whether quantized weights (FP8, int8, int4, NF4, MXFP4, and GGUF's Q8_0, Q4_0 and Q4_1) stay
            quantized in memory, with identical values. By default they are dequantized.
        quantize: Quantization method to apply to kernels during loading. See `LoadReport.quantization_error`.
        mtp: Whether to load the multi-token prediction layers as ``model.mtp``. By default they are skipped.
        expect: Expected class of the model, checked before the weights are read.

    Raises:
        CheckpointError, ConfigError: If the checkpoint or its config is invalid. Both are ValueErrors.
        LoadError: If tensors are missing or have a wrong shape. A subclass of CheckpointError.
    """
    dtype, error = float_dtype(dtype), None
    check_quantize_options(quantize, keep_quantized)
    strategy = with_mesh(strategy, mesh)
    refuse_preset(path_or_hub_id)
    with Checkpoint.open(path_or_hub_id, revision=revision, local_files_only=local_files_only) as checkpoint:
        config, notes = _config(checkpoint, expect)
        family = family_of(config)
        tensors = tensor_arrays(checkpoint.tensors, checkpoint.config, checkpoint.config_file, checkpoint)
        arrays = split_tensors(family.hf_names(config), tensors)
        refuse_oversized_config(config, arrays, checkpoint.config_file)
        if constants := family.constants(config):
            refuse_other_constants(constants, arrays)
        model = family.model(config, strategy, rngs=None, mtp=mtp)
        model.generation_config, generation_notes = generation_fields(checkpoint.folder, config)
        notes += (*generation_notes, *_other_copies(model, checkpoint), *checkpoint.notes)
        if keep_quantized:
            arrays = keep_codes(model, arrays)
        elif quantize is not None:
            arrays, error = quantize_while_loading(model, arrays, quantize, dtype)
        layouts = tensor_layout(model, arrays)
        report = LoadReport(os.fspath(path_or_hub_id), notes=notes, files=str(checkpoint.folder), revision=revision)
        mismatch = f"{report.source}: the tensors do not fit config.json ({config.model_type})"
        load_model(model, layouts, arrays, dtype, report_tensors(model, layouts, arrays, report), mismatch, _REMEDY)
    if error is not None:
        model.load_report = dataclasses.replace(model.load_report, quantization_error=error.relative)
    return model


def _refuse_other_class(checkpoint: Checkpoint, config: DecoderConfig, expect: type[CausalLM] | None) -> None:
    family = family_of(config).model
    if expect is not None and not issubclass(family, expect):
        raise CheckpointError(
            f"{checkpoint.folder} contains a {config.model_type} model: use {family.__name__}.from_pretrained "
            f"or nnxmoe.from_pretrained, not {expect.__name__}.from_pretrained"
        )


def _config(checkpoint: Checkpoint, expect: type[CausalLM] | None) -> tuple[DecoderConfig, tuple[str, ...]]:
    """Return (config, notes). The config is untied if the stored head differs from the stored embedding."""
    config, notes = parse_config(checkpoint.config, checkpoint.config_file)
    _refuse_other_class(checkpoint, config, expect)  # before the comparison, which reads weights
    if untied(config, checkpoint.tensors, checkpoint.same):
        note = f"tie_word_embeddings is true but {HEAD} differs from {EMBED}: both are loaded, and not tied"
        return dataclasses.replace(config, tie_word_embeddings=False), (*notes, note)
    return config, notes


def untied(
    config: DecoderConfig, tensors: Mapping[str, TensorInfo], compare: Callable[[str, str], bool] | None = None
) -> bool:
    """Return whether the config ties head and embedding, but the checkpoint stores two different tensors.

    Args:
        config: Config of the model.
        tensors: Tensor name -> header entry.
        compare: Function that returns whether two tensors, passed by name, have equal bytes. If None, only the shapes
            are compared.
    """
    if not config.tie_word_embeddings or not {HEAD, EMBED} <= tensors.keys():
        return False
    shapes = {tensors[HEAD].shape, tensors[EMBED].shape}
    return shapes != {(config.vocab_size, config.hidden_size)} or (compare is not None and not compare(HEAD, EMBED))


def _other_copies(model: CausalLM, checkpoint: Checkpoint) -> list[str]:
    """Return a note if prediction layers store an embedding or head that differs from the main model's tensor."""
    tensors = checkpoint.tensors
    differences = [
        f"{name} differs from {original}"
        for name, original in repeated_tensors(model, tensors).items()
        if {name, original} <= tensors.keys() and not checkpoint.same(name, original)
    ]
    return [f"{some(differences)}: the main model's tensor is used"] if differences else []


@reject_unknown_arguments
def save_pretrained(
    model: CausalLM,
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    *,
    overwrite: bool = False,
    dtype: Any = None,
) -> None:
    """Save a model as safetensors files with Hugging Face tensor names.

    Also writes config.json and generation_config.json, and copies the tokenizer files from the model's source folder.
    Quantized kernels are saved in compressed-tensors formats without rounding. Only one tensor at a time is in host
    memory. Each process writes the shards of its devices. If saving fails or is interrupted, the folder is unchanged.

    Args:
        model: Model to save.
        folder: New or empty folder, unless ``overwrite`` is set.
        max_shard_size: Maximum size of a safetensors file, in bytes or as text such as ``"5GB"``.
        overwrite: Whether to replace a checkpoint in the folder, atomically, after everything is written. The folder's
            tokenizer files are replaced too if the model was loaded with a tokenizer. Other files remain, and one
            warning lists them.
        dtype: Dtype of the saved weights. Defaults to the dtypes of the parameters.

    Raises:
        CheckpointError: If the folder cannot be written, or the model does not fit its config.
    """
    try:
        shard_size = parse_bytes(max_shard_size)
    except ValueError as error:
        raise ValueError(f"max_shard_size {error}") from None
    save_dtype = float_dtype(dtype)
    refuse_config_mismatch(model)
    if model.load_report is not None and model.load_report.towers:
        tower_names = ", ".join(model.load_report.towers)
        logger.warning(
            "%s: only the text model is saved, without %s of %s", folder, tower_names, model.load_report.source
        )
    tensors, quantization = _tensors(model, save_dtype)
    num_bytes = sum(array.nbytes for array in tensors.values())
    with shared_folder(folder, overwrite) as temporary_folder, bytes_bar(num_bytes, "writing") as bar:
        if jax.process_index() == 0:
            extra_fields = {"quantization_config": quantization, "model_type": model.config.saved_type}
            extra_fields = {name: value for name, value in extra_fields.items() if value is not None}
            write_auxiliary_files(temporary_folder, model, model.config.fold_query_scale()[0], save_dtype, extra_fields)
        write_sharded(temporary_folder, _shares(tensors, bar), shard_size, process=jax.process_index())


def arrays(model: CausalLM) -> dict[str, LazyArray]:
    """Return the lazy tensors that `save_pretrained` would write, by Hugging Face name."""
    return _tensors(model, None)[0]


def _tensors(model: CausalLM, dtype: np.dtype | None) -> tuple[dict[str, LazyArray], Any]:
    """Return (tensors to save, quantization_config). Includes the copies of tensors in prediction layers."""
    layouts = tensor_layout(model, times=model.config.fold_query_scale()[1])
    layouts |= {name: layouts[original] for name, original in repeated_tensors(model, layouts).items()}
    layouts = {re.sub(r"^model\.", family_of(model).hf_root, name): layout for name, layout in layouts.items()}
    tensors = model_arrays(layouts)
    for name, layout in layouts.items():
        if isinstance(layout.parts[0].variable, TokenExpertTable):
            tensors[name] = tensors[name].astype(np.dtype(np.int64))  # torch's default integer dtype
        elif dtype is not None and not keeps_dtype(layout.parts[0].variable):
            tensors[name] = tensors[name].astype(dtype)
    tensors, quantization = compress_tensors(model, layouts, tensors)
    keys = {name: layout.key for name, layout in layouts.items()}
    tensors = split_shards(family_of(model).hf_names(model.config), keys, tensors)
    return tensors | constant_tensors(model), quantization


def _shares(tensors: LazyArrays, bar: Any) -> list[tuple[int | None, Tensors]]:
    """Assign each tensor to the least loaded of the processes that have all its values.

    Tensors that no single process has completely are assigned to None.
    """
    shares: dict[int | None, list[Any]] = {None: []} | {process: [] for process in range(jax.process_count())}
    loads = [0] * jax.process_count()
    for name, array in tensors.items():
        holders = [0] if array.holders is None else array.holders
        writer = min(holders, key=lambda process: loads[process]) if holders else None
        if writer is not None:
            loads[writer] += array.nbytes

        def compute_array(array: LazyArray = array) -> np.ndarray:
            bar.update(array.nbytes)
            return np.ascontiguousarray(array)

        shares[writer].append((name, dtype_code(array.dtype), array.shape, compute_array))
    return list(shares.items())
