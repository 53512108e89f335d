"""The small files of a Hugging Face folder: config.json, generation_config.json and the tokenizer's."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError, check_token_ids
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.convert.core.dtypes import matrices_dtype
from nnxmoe.convert.core.layout import parameters
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.models import config_class
from nnxmoe.runtime.progress import logger
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.files import absolute, read_bounded, read_object
from nnxmoe.storage.hub import CODE_FILES, TOKENIZER_FILES
from nnxmoe.storage.source import find_config
from nnxmoe.storage.write import write_bytes, write_json

GENERATION = "generation_config.json"
_MAX_BYTES = 100_000_000


def write_side_files(
    stage: Path,
    model: CausalLM,
    target: str | os.PathLike[str],
    config: DecoderConfig,
    dtype: Any = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and generation_config.json, and copy the tokenizer's files and Python code from where the model
    was loaded, except those that ``target`` already has. ``dtype``: that of the files, None: the model's. ``more``:
    further fields of config.json."""
    dtype = dtype or matrices_dtype(parameter.variable for parameter in parameters(model, codes=True))
    write_json(stage / "config.json", config.to_hf() | {"dtype": str(dtype)} | dict(more or {}))
    if model.generation_config:
        write_json(stage / GENERATION, model.generation_config)
    if model.load_report is None or model.load_report.files is None:
        return
    source = Path(model.load_report.files)
    if not source.is_dir():
        logger.warning("%s no longer exists: the tokenizer's files are not copied", source)
    for path in _companions(source, (*TOKENIZER_FILES, *CODE_FILES)):
        name = path.relative_to(source)
        if not os.path.lexists(absolute(target) / name):
            try:
                data = read_bounded(path, _MAX_BYTES, "it was not copied", CheckpointError)
            except CheckpointError as error:  # a missing tokenizer must not prevent saving the model
                logger.warning("%s", error)
            else:
                (stage / name).parent.mkdir(exist_ok=True)
                write_bytes(stage / name, data)


def _companions(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The files of a folder that match, broken links included."""
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if not path.is_dir()})


def has_tokenizer(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has any tokenizer file."""
    return bool(_companions(Path(folder), TOKENIZER_FILES))


def read_config(folder: Path) -> DecoderConfig:
    """The config in a folder's config.json; warns of fields that are dropped."""
    config, notes = parse_config(find_config(folder), str(folder / "config.json"))
    for note in notes:
        logger.warning("%s: %s", folder, note)
    return config


def read_generation_config(folder: Path, config: DecoderConfig) -> Mapping[str, Any]:
    """The validated generation_config.json of a folder; empty if the file is missing."""
    path = folder / GENERATION
    if not os.path.lexists(path):
        return FrozenDict({})
    fields = read_object(path, "fetch it again or remove it", CheckpointError)
    check_generation(fields, config, str(path))
    return FrozenDict(fields)


def parse_config(fields: Mapping[str, Any], where: str) -> tuple[DecoderConfig, tuple[str, ...]]:
    """The config of a parsed config.json, and what to report of it; errors name the file ``where``."""
    try:
        kind = config_class(fields)
        return kind.from_hf(fields), kind.notes(fields)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def check_generation(fields: Mapping[str, Any], config: DecoderConfig, where: str) -> None:
    """Validate the token ids of a parsed generation_config.json; errors name the file ``where``."""
    try:
        check_token_ids(fields, config.vocab_size)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
