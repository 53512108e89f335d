"""Read the config of a model and the headers of its tensors."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import did_you_mean
from nnxmoe.convert.arrays.lazy_array import LazyArrays
from nnxmoe.convert.arrays.tensor_parts import split_tensors
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.hub import local_folder
from nnxmoe.convert.files.safetensors import TensorInfo
from nnxmoe.convert.files.untrusted_files import is_gguf
from nnxmoe.convert.formats.scheme import QuantizationScheme
from nnxmoe.convert.hf.auxiliary_files import generation_fields
from nnxmoe.convert.hf.pretrained import untied
from nnxmoe.convert.hf.tensor_arrays import tensor_arrays
from nnxmoe.convert.storage.checkpoint import Checkpoint, hub_headers
from nnxmoe.convert.storage.find_checkpoint import has_weights, read_config_fields
from nnxmoe.models import PRESETS, family_of, near_presets, parse_config, preset
from nnxmoe.runtime.progress import logger


def read_headers(
    name: str | os.PathLike[str], revision: str | None, local_files_only: bool
) -> tuple[DecoderConfig, LazyArrays]:
    """Read the config of a model, and the names and shapes of its tensors.

    Returns:
        The config, and lazy arrays without values. Presets and folders without weights have no arrays.
    """
    config = preset(name)
    if config is not None:
        return config, {}
    folder = local_folder(name, CheckpointError)
    if folder is not None:
        return _read_folder(folder, str(name) if is_gguf(folder) else f"{name}/config.json")
    try:
        fields, headers = hub_headers(str(name), revision=revision, local_files_only=local_files_only)
    except CheckpointError as error:
        suggestion = did_you_mean(str(name), PRESETS, 3)
        message = f"{name} is not a preset{suggestion} ({error})" if suggestion else f"{error}{near_presets(name)}"
        raise CheckpointError(message) from None
    tensors = {key: TensorInfo(key, Path(), dtype, shape, 0, 0) for key, (dtype, shape) in headers.items()}
    return _checked(fields, tensors, f"{name}/config.json")


def _read_folder(folder: Path, source: str) -> tuple[DecoderConfig, LazyArrays]:
    if has_weights(folder):
        with Checkpoint.open(folder) as checkpoint:
            config, arrays = _checked(checkpoint.config, checkpoint.tensors, source, checkpoint)
            _warn([*generation_fields(checkpoint.folder, config)[1], *checkpoint.notes], source)
            return config, arrays
    fields = read_config_fields(folder)
    config = _config(fields, source)
    try:
        QuantizationScheme.from_config(fields, source)
    except CheckpointError as error:
        logger.warning("%s. The sizes below are for the model without quantization", error)
    return config, {}


def _checked(
    fields: Mapping[str, Any], tensors: Mapping[str, TensorInfo], source: str, checkpoint: Checkpoint | None = None
) -> tuple[DecoderConfig, LazyArrays]:
    """Return the config that loading would use, and the tensors.

    Raises CheckpointError if the quantization is not supported.
    """
    config = _config(fields, source)
    is_tied = config.tie_word_embeddings and not untied(config, tensors)
    table = family_of(config).hf_names(config)
    arrays = split_tensors(table, tensor_arrays(dict(tensors), fields, source, checkpoint))
    return dataclasses.replace(config, tie_word_embeddings=is_tied), arrays


def _config(fields: Mapping[str, Any], source: str) -> DecoderConfig:
    config, notes = parse_config(fields, source)
    _warn(notes, source)
    return config


def _warn(notes: Iterable[str], source: str) -> None:
    for note in notes:
        logger.warning("%s: %s", source.removesuffix("/config.json"), note)
