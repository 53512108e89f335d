"""Find the JSON files and weight files of a checkpoint, in a local folder or on the hub.

This module does not open weight files. It validates every path in a checkpoint's JSON files before using the path.
"""

import glob
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nnxmoe.config.config_json import text_fields
from nnxmoe.config.printable import short, some
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.hub import CODE_FILES, TOKENIZER_FILES, check_hub_id, hub_call, local_folder, snapshot
from nnxmoe.convert.files.safetensors import is_size
from nnxmoe.convert.files.untrusted_files import GGUF_SUFFIX, is_gguf, read_object
from nnxmoe.convert.gguf.gguf_config import config_fields
from nnxmoe.convert.gguf.gguf_file import GGUF

T = TypeVar("T")
logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NATIVE_FILE = "nnxmoe.json"  # marks a folder written by nnxmoe.save
MAX_TENSORS = 250_000  # in all files together; DeepSeek-V3 has 92,000
_MAX_INDEX_BYTES = 32_000_000  # the index of DeepSeek-V3 has 9 MB
_SHARD_NAME = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")
_OTHER_FORMATS = {".bin", ".pth", ".pt", ".ckpt", ".gguf", ".h5", ".msgpack", ".pkl"}
_GPTQ_FILE = "quantize_config.json"  # AutoGPTQ's settings, in checkpoints older than quantization_config
_MODELOPT_FILE = "hf_quant_config.json"  # ModelOpt's settings, in checkpoints older than quantization_config
_PREFIXES = {f"{name}.": f"model.{name}." for name in ("embed_tokens", "layers", "norm")} | {
    "model.model.": "model.",
    "backbone.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.": "model.",
}
# Prefixes of the text model in checkpoints that contain more than the text model, mostly multimodal models.
WRAPPERS = [old for old, new in _PREFIXES.items() if new == "model." and old != "model.model."]
_TOWER = re.compile(
    r"(?:model\.)?((?:vision|image|audio|speech)_(?:tower|model|encoder|embed_tokens)|visual|vit|mlp1|image_newline"
    r"|(?:multi_modal|multimodal|mm|vision|audio|patch_merger)_?(?:projector|projection|adapter|connector)|connector"
    r"|embed_(?:vision|audio)|patch_merge(?:r|_mlp)|vit_large_projector|aligner)(?=\.|$)"
)
_ADAPTER = "adapter_config.json"
_TO_ADAPT = "call nnxmoe.train.lora.load(model, folder) with this folder, or give it to a command as --adapter"
_DOWNLOAD = ["config.json", _GPTQ_FILE, _MODELOPT_FILE, _ADAPTER, "generation_config.json", "*.safetensors", INDEX_FILE]
_DOWNLOAD += [*TOKENIZER_FILES, *CODE_FILES]
_SKIP = ["consolidated*", "original/*", "*/*.safetensors"]  # weights in the original layout or of other models


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint's folder, parsed config and weight files. ``weight_map`` is empty if there is no index."""

    folder: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    weight_map: dict[str, str]
    notes: tuple[str, ...] = ()


def find_checkpoint(
    path_or_hub_id: str | os.PathLike[str], revision: str | None, local_files_only: bool
) -> CheckpointFiles:
    """Find a checkpoint's files in a local folder, or on the hub after downloading missing files."""
    folder = local_folder(path_or_hub_id, CheckpointError)
    if folder is not None:
        return find_in_folder(folder)
    repo_id = os.fspath(path_or_hub_id)
    folder = download(repo_id, revision, local_files_only)
    try:
        listed = set[str]()
        if os.path.lexists(folder / INDEX_FILE) and not os.path.lexists(folder / SINGLE_FILE):
            listed = set(_read_weight_map(folder / INDEX_FILE).values())
        # `download` skips weight files in subfolders. Fetch the weight files that the index lists there.
        if lost := sorted(name for name in listed if "/" in name and not os.path.lexists(folder / name)):
            snapshot(repo_id, revision, local_files_only, list(map(glob.escape, lost)), [], CheckpointError)
        return find_in_folder(folder)
    except CheckpointError as error:
        hint = f"this is the cached copy of {repo_id!r}: if it is incomplete, load it again while online"
        raise CheckpointError(f"{error} ({hint})") from error


def find_in_folder(folder: Path) -> CheckpointFiles:
    """Read the JSON files of a local folder and choose the weight files.

    If ``folder`` is a GGUF file, read the config from its metadata."""
    if is_gguf(folder):
        model = GGUF.open(folder)
        fields, notes = config_fields(model)
        return CheckpointFiles(folder, fields, model.files, {}, notes)
    if not os.path.isdir(folder):
        raise CheckpointError(f"no such folder: {folder}; give the folder that holds config.json and the weights")
    config = read_config_fields(folder)
    files, weight_map = _weight_files(folder)
    notes = ()
    if os.path.lexists(folder / _ADAPTER):
        notes = (f"{_ADAPTER} is beside the model: {_TO_ADAPT}; loading the model does not apply it",)
    return CheckpointFiles(folder, config, tuple(files), weight_map, notes)


def read_config_fields(folder: Path) -> dict[str, Any]:
    """Parse config.json, for a multimodal model the part of the text model. Settings in a separate file of an old GPTQ
    or ModelOpt checkpoint become ``quantization_config``."""
    if is_gguf(folder):
        return config_fields(GGUF.open(folder))[0]
    path = folder / "config.json"
    if not os.path.lexists(path):
        other = _adapter_in(folder) or gguf_in(folder) or "copy it here from where the weights come from"
        raise CheckpointError(f"{folder} has no config.json: {other}")
    # Not strict, because Nemotron-H has Infinity in an unused field. The checks of the used fields reject Infinity.
    found = read_object(path, "a checkpoint needs a readable config.json", CheckpointError, strict=False)
    if "quantization_config" not in found and os.path.lexists(folder / _GPTQ_FILE):
        settings = read_object(folder / _GPTQ_FILE, "fetch it again", CheckpointError)
        found["quantization_config"] = {"quant_method": "gptq", **settings}
    if "quantization_config" not in found and os.path.lexists(folder / _MODELOPT_FILE):
        settings = read_object(folder / _MODELOPT_FILE, "fetch it again", CheckpointError).get("quantization")
        if not isinstance(settings, dict):
            raise CheckpointError(f"{folder / _MODELOPT_FILE}: quantization must be an object, got {short(settings)}")
        found["quantization_config"] = {"quant_method": "modelopt", **settings}
    return text_fields(found)


def _adapter_in(folder: Path) -> str | None:
    """Return the remedy for a folder with an adapter instead of a model, or None for other folders."""
    if not os.path.lexists(folder / _ADAPTER):
        return None
    base = read_object(folder / _ADAPTER, "fetch it again", CheckpointError).get("base_model_name_or_path")
    model = short(base) if base else "a model that it does not name"
    return f"it holds an adapter of {model}: load that model, and {_TO_ADAPT}"


def gguf_in(folder: Path) -> str | None:
    """Return the remedy for a folder with GGUF files instead of a checkpoint, or None for other folders."""
    found = [name for name in _names(folder) if name.endswith(GGUF_SUFFIX) or is_gguf(folder / name)]
    return f"{some(found)} is a model of its own: give the path of the file instead of the folder" if found else None


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weight files of any format."""
    if is_gguf(folder):
        return True
    return any(".safetensors" in name or Path(name).suffix in _OTHER_FORMATS for name in _names(folder))


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror or error}; make the folder readable") from error


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Choose the weight files: model.safetensors, else the files in the index, else the only safetensors file."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if os.path.lexists(single):
        return [single], {}
    if os.path.lexists(index):
        weight_map = _read_weight_map(index)
        listed = sorted(set(weight_map.values()))
        if missing := [name for name in listed if not os.path.lexists(folder / name)]:
            raise CheckpointError(f"{folder}: {some(missing)} is listed in {INDEX_FILE} but missing: fetch it")
        return [folder / name for name in listed], weight_map
    names = _names(folder)
    found = [name for name in names if name.endswith(".safetensors")]
    usable = [name for name in found if not name.startswith(("consolidated", "adapter_model"))]
    parts = [name for name in usable if (match := _SHARD_NAME.search(name)) and int(match[2]) != 1]
    if parts or len(usable) > 1:
        raise CheckpointError(
            f"{folder}: {some(parts or usable)} without {INDEX_FILE}; fetch the index: it maps tensors to files"
        )
    if usable:
        logger.warning("%s has no %s: reading %s, its only weight file", folder, SINGLE_FILE, usable[0])
        return [folder / usable[0]], {}
    raise CheckpointError(_no_weights(folder, sorted({*found} - {*usable}), names))


def holds_orbax(folder: Path) -> bool:
    """Return whether the folder, an item in it (such as ``items``) or an item of a step is an Orbax checkpoint."""
    return any(next(folder.glob(f"{where}_METADATA"), None) for where in ("", "*/", "[0-9]*/*/"))


def _no_weights(folder: Path, consolidated: list[str], names: list[str]) -> str:
    message = f"no weights in {folder}: neither {SINGLE_FILE} nor {INDEX_FILE}"
    other = [name for name in names if Path(name).suffix in _OTHER_FORMATS]
    if adapter := _adapter_in(folder):
        return f"{message}; {adapter}"
    if NATIVE_FILE in names:
        return f"{message}; nnxmoe.save wrote this folder: use nnxmoe.load, or convert it with `nnxmoe convert`"
    if holds_orbax(folder):
        return f"{message}; this looks like an Orbax checkpoint: use nnxmoe.convert.maxtext.load if MaxText wrote it"
    if consolidated:
        return f"{message}; {some(consolidated)} is the original layout: get the model in Hugging Face's layout"
    if inside := gguf_in(folder):
        return f"{message}; {inside}"
    if other:
        return f"{message}; {some(other)} is never opened (such files can run code): convert it to safetensors first"
    return f"{message}; fetch the model's safetensors files into this folder"


def _read_weight_map(index: Path) -> dict[str, str]:
    """Read the index's weight_map. The values must be paths of safetensors files in the folder or below it."""
    weight_map = read_object(index, "fetch it again", CheckpointError, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: 'weight_map' must map tensors to files, got {short(weight_map)}; fetch it again"
        )
    if len(weight_map) > MAX_TENSORS:
        raise CheckpointError(f"{index}: 'weight_map' has {len(weight_map)} tensors, more than {MAX_TENSORS}")
    for name, value in weight_map.items():
        parts = Path(value).parts if isinstance(value, str) else ()
        if not parts or not all(map(_is_plain_name, parts)):
            raise CheckpointError(
                f"{index}: weight_map[{short(name)}] is {short(value)}, not the name of a file in this folder or "
                "below it: correct the index, or do not trust this checkpoint"
            )
        if not value.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: weight_map[{short(name)}] is {short(value)}: only .safetensors files are read; "
                "convert the checkpoint to safetensors"
            )
    return {name: Path(value).as_posix() for name, value in weight_map.items()}


def _is_plain_name(value: str) -> bool:
    plain = value not in ("", ".", "..") and len(value) <= 255 and value.isprintable() and Path(value).name == value
    return plain and "\\" not in value and ":" not in value


def normalize_prefixes(tensors: dict[str, T]) -> dict[str, T]:
    """Rename tensors as in a text model with a head, as transformers does. Names lack ``model.`` in a ``LlamaModel``,
    have it twice in a wrapped model, and have a different prefix in a multimodal model."""
    found = {}
    for name, info in tensors.items():
        full = next((new + name[len(old) :] for old, new in _PREFIXES.items() if name.startswith(old)), name)
        found[name if full in tensors else full] = info
    return found


def module_spellings(module: str) -> list[str]:
    """Return the names of a text model's module in multimodal models, with ``module`` itself first."""
    return [module, *(old + module.removeprefix("model.") for old in WRAPPERS if module.startswith("model."))]


def group_towers(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the tensors outside the text model of a multimodal checkpoint by the part that they belong to."""
    found: dict[str, list[str]] = {}
    for name in names:
        if match := _TOWER.match(name):
            found.setdefault(match[1], []).append(name)
    return found


def download(repo_id: str, revision: str | None, local_files_only: bool) -> Path:
    """Download config, tokenizer and safetensors files of a hub repository, and return the snapshot folder."""
    return snapshot(repo_id, revision, local_files_only, _DOWNLOAD, _SKIP, CheckpointError)


def remote_headers(repo_id: str, revision: str | None) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """Fetch a hub repository's config.json and the headers of its safetensors files, without the weights."""
    import huggingface_hub

    check_hub_id(repo_id, CheckpointError)

    def config_file() -> str:
        huggingface_hub.HfApi().model_info(repo_id, revision=revision)  # fails at once, the download would retry
        return huggingface_hub.hf_hub_download(repo_id, "config.json", revision=revision)

    config = hub_call(repo_id, revision, config_file, CheckpointError)
    tensors = hub_call(repo_id, revision, lambda: _fetch_headers(repo_id, revision), CheckpointError)
    return text_fields(read_object(Path(config), "fetch it again", CheckpointError, strict=False)), tensors


def _fetch_headers(repo_id: str, revision: str | None) -> dict[str, tuple[str, tuple[int, ...]]]:
    import huggingface_hub

    try:
        metadata = huggingface_hub.get_safetensors_metadata(repo_id, revision=revision)
    except (AttributeError, KeyError, TypeError) as error:  # the library does not validate the index and the headers
        raise CheckpointError(f"{repo_id}: the index or a header is malformed ({error}); do not use it") from error
    places = list(metadata.weight_map.items())
    places += [(name, file) for file, held in sorted(metadata.files_metadata.items()) for name in held.tensors]
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, file in places:
        info = metadata.files_metadata[file].tensors.get(name)
        if info is None:
            raise CheckpointError(f"{repo_id}: the index lists {short(name)} in {short(file)}, which lacks it")
        if not isinstance(info.dtype, str) or not isinstance(info.shape, list) or not all(map(is_size, info.shape)):
            raise CheckpointError(f"{repo_id}: {short(file)}: tensor {short(name)} is malformed: {short(info)}")
        tensors.setdefault(name, (info.dtype, tuple(info.shape)))
    return tensors
