"""Read and write the config.json, generation_config.json and tokenizer files of a Hugging Face folder."""

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.printable import short
from nnxmoe.convert.arrays.array_layout import parameters
from nnxmoe.convert.arrays.dtypes import matrix_dtype
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.hub import CODE_FILES, TOKENIZER_FILES
from nnxmoe.convert.files.untrusted_files import is_gguf, read_bounded, read_object
from nnxmoe.convert.gguf import gguf_config
from nnxmoe.convert.gguf.gguf_file import GGUF
from nnxmoe.convert.gguf.gguf_tokenizer import tokenizer_files
from nnxmoe.convert.storage.find_checkpoint import read_config_fields
from nnxmoe.convert.storage.write_safetensors import write_bytes, write_json
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.models import parse_config
from nnxmoe.runtime.progress import logger

GENERATION = "generation_config.json"
_MAX_BYTES = 100_000_000


def write_auxiliary_files(
    stage: Path,
    model: CausalLM,
    config: DecoderConfig,
    dtype: Any = None,
    extra_fields: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and generation_config.json, and copy tokenizer and Python files from the model's source folder.

    Args:
        stage: Folder to write to.
        model: Model to save.
        config: Config to write.
        dtype: Dtype of the saved weights. Defaults to the dtype of the model's matrices.
        extra_fields: Additional fields of config.json.
    """
    dtype = dtype or matrix_dtype(parameter.variable for parameter in parameters(model, codes=True))
    write_json(stage / "config.json", config.to_hf() | {"dtype": str(dtype)} | dict(extra_fields or {}))
    if model.generation_config:
        write_json(stage / GENERATION, model.generation_config)
    if model.load_report is None or model.load_report.files is None:
        return
    source = Path(model.load_report.files)
    if is_gguf(source):
        try:
            files = tokenizer_files(GGUF.open(source))
        except CheckpointError as error:  # a missing tokenizer must not prevent saving the model
            logger.warning("%s; no tokenizer is written", error)
            files = {}
        for name, content in files.items():
            write_json(stage / name, content)
        return
    if not source.is_dir():
        logger.warning("%s no longer exists: the tokenizer files are not copied", source)
    for path in _companions(source, (*TOKENIZER_FILES, *CODE_FILES)):
        try:
            data = read_bounded(path, _MAX_BYTES, "it was not copied", CheckpointError)
        except CheckpointError as error:  # a missing tokenizer must not prevent saving the model
            logger.warning("%s", error)
        else:
            target = stage / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            write_bytes(target, data)


def _companions(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Return the files in a folder that match a pattern, including broken links."""
    paths = {folder / name for pattern in patterns for name in glob.glob(pattern, root_dir=folder)}
    return sorted(path for path in paths if not path.is_dir())


def has_tokenizer(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder has any tokenizer file. True for GGUF files."""
    return is_gguf(folder) or bool(_companions(Path(folder), TOKENIZER_FILES))


def read_config(folder: Path) -> DecoderConfig:
    """Read a folder's config.json. Logs a warning for each dropped field."""
    config, notes = parse_config(read_config_fields(folder), str(folder / "config.json"))
    for note in notes:
        logger.warning("%s: %s", folder, note)
    return config


def read_generation_config(folder: Path, config: DecoderConfig) -> Mapping[str, Any]:
    """Read a folder's generation_config.json. Logs a warning for each note of `generation_fields`."""
    fields, notes = generation_fields(folder, config)
    for note in notes:
        logger.warning("%s: %s", folder, note)
    return fields


def generation_fields(folder: Path, config: DecoderConfig) -> tuple[FrozenDict, tuple[str, ...]]:
    """Read generation_config.json of a folder, or the equivalent fields of a GGUF file.

    Returns:
        Tuple of the fields and notes. As in transformers, an unreadable file and ids outside the vocabulary are
        ignored, with a note. The fields are empty if the file is missing or unreadable.

    Raises:
        CheckpointError: If a token id is not an integer.
    """
    if is_gguf(folder):
        gguf_fields, gguf_notes = gguf_config.generation_fields(GGUF.open(folder))
        return FrozenDict(gguf_fields), gguf_notes
    path = folder / GENERATION
    if not os.path.lexists(path):
        return FrozenDict({}), ()
    try:
        fields = read_object(path, "it is ignored", CheckpointError)
    except CheckpointError as error:
        return FrozenDict({}), (str(error),)
    notes = []
    for name in ("eos_token_id", "pad_token_id"):
        value = fields.get(name)
        ids = value if isinstance(value, list) and value and name == "eos_token_id" else [value]
        for token_id in ids if value is not None else ():
            if isinstance(token_id, bool) or not isinstance(token_id, int | float) or token_id != int(token_id):
                raise CheckpointError(f"{path}: {name} is {short(value)}: it must be a token id, or null")
            if not 0 <= token_id < config.vocab_size and (name, token_id) != ("pad_token_id", -1):
                notes.append(f"{GENERATION}: {name} {short(token_id)} is not in the vocabulary and is ignored")
    return FrozenDict(fields), tuple(notes)
