"""Find the JSON files and weight files of a checkpoint, in a local folder or on the hub.

This module does not open weight files. It validates every path in a checkpoint's JSON files before use.
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
NATIVE_FILE = "nnxmoe.json"  # File in every folder that nnxmoe.save writes.
MAX_TENSORS = 250_000  # Maximum number of tensors in all files. DeepSeek-V3 has 92,000.
_MAX_INDEX_BYTES = 32_000_000  # Maximum size of an index. DeepSeek-V3's index is 9 MB.
_SHARD_NAME = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")
_OTHER_FORMATS = {".bin", ".pth", ".pt", ".ckpt", ".gguf", ".h5", ".msgpack", ".pkl"}
_GPTQ_FILE = "quantize_config.json"  # Quantization settings in old AutoGPTQ checkpoints.
_MODELOPT_FILE = "hf_quant_config.json"  # Quantization settings in old ModelOpt checkpoints.
_PREFIXES = {name: f"model.{name}" for name in ("embed_tokens.", "embed.", "layers.", "norm.", "hc_head_")} | {
    "model.model.": "model.",
    "backbone.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.": "model.",
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
}
# Prefixes of the text model in checkpoints that also contain other models, mostly multimodal checkpoints.
WRAPPERS = [old for old, new in _PREFIXES.items() if new == "model." and old != "model.model."]
_TOWER = re.compile(
    r"(?:thinker\.)?(?:model\.)?("
    r"(?:vision|image|audio|speech)_(?:tower|model|encoder|embed_tokens)|visual|vision|vit|mlp1|image_newline"
    r"|(?:multi_modal|multimodal|mm|vision|audio|patch_merger)_?(?:projector|projection|adapter|connector)|connector"
    r"|embed_(?:vision|audio)|patch_merge(?:r|_mlp)|vit_large_projector|aligner"
    r"|resampler_model|talker|code2wav)(?=\.|$)"
)
_ADAPTER = "adapter_config.json"
_TO_ADAPT = "call nnxmoe.train.lora.load(model, folder) with this folder, or pass it to a command as --adapter"
_DOWNLOAD = ["config.json", _GPTQ_FILE, _MODELOPT_FILE, _ADAPTER, "generation_config.json", "*.safetensors", INDEX_FILE]
_DOWNLOAD += [*TOKENIZER_FILES, *CODE_FILES]
_SKIP = ["consolidated*", "original/*", "*/*.safetensors"]  # weights in the original layout, or weights of other models


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint's folder, parsed config and weight files. Without an index, ``weight_map`` is empty."""

    folder: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    weight_map: dict[str, str]
    notes: tuple[str, ...] = ()


def find_checkpoint(
    path_or_hub_id: str | os.PathLike[str], revision: str | None, local_files_only: bool
) -> CheckpointFiles:
    """Find a checkpoint's files in a local folder, or in the hub's cache after downloading missing files."""
    folder = local_folder(path_or_hub_id, CheckpointError)
    if folder is not None:
        return find_in_folder(folder)
    repo_id = os.fspath(path_or_hub_id)
    folder = download(repo_id, revision, local_files_only)
    try:
        listed_names = set[str]()
        if os.path.lexists(folder / INDEX_FILE) and not os.path.lexists(folder / SINGLE_FILE):
            listed_names = set(_read_weight_map(folder / INDEX_FILE).values())
        # `download` skips subfolders. Download the weight files in subfolders that the index lists.
        if missing_names := sorted(name for name in listed_names if "/" in name and not os.path.lexists(folder / name)):
            snapshot(repo_id, revision, local_files_only, list(map(glob.escape, missing_names)), [], CheckpointError)
        return find_in_folder(folder)
    except CheckpointError as error:
        hint = f"this is the cached copy of {repo_id!r}: if it is incomplete, load it again online"
        raise CheckpointError(f"{error} ({hint})") from error


def find_in_folder(folder: Path) -> CheckpointFiles:
    """Read the JSON files of a local folder, or the metadata of a GGUF file, and choose the weight files."""
    if is_gguf(folder):
        model = GGUF.open(folder)
        fields, notes = config_fields(model)
        return CheckpointFiles(folder, fields, model.files, {}, notes)
    if not os.path.isdir(folder):
        raise CheckpointError(f"no such folder: {folder}; pass the folder that contains config.json and the weights")
    config = read_config_fields(folder)
    files, weight_map = _weight_files(folder)
    notes = ()
    if os.path.lexists(folder / _ADAPTER):
        notes = (f"{_ADAPTER} is next to the model. To apply it, {_TO_ADAPT}. Loading the model does not apply it",)
    return CheckpointFiles(folder, config, tuple(files), weight_map, notes)


def read_config_fields(folder: Path) -> dict[str, Any]:
    """Parse config.json. For a multimodal model, return only the text model's fields.

    In old GPTQ and ModelOpt checkpoints, ``quantization_config`` is read from a separate file.
    """
    if is_gguf(folder):
        return config_fields(GGUF.open(folder))[0]
    path = folder / "config.json"
    if not os.path.lexists(path):
        remedy = _adapter_in(folder) or gguf_in(folder) or "copy it from the source of the weights"
        raise CheckpointError(f"{folder} has no config.json: {remedy}")
    # Not strict, because Nemotron-H has Infinity in an unused field. The validation of used fields rejects Infinity.
    fields = read_object(path, "a checkpoint requires a readable config.json", CheckpointError, strict=False)
    if "quantization_config" not in fields and os.path.lexists(folder / _GPTQ_FILE):
        settings = read_object(folder / _GPTQ_FILE, "fetch it again", CheckpointError)
        fields["quantization_config"] = {"quant_method": "gptq", **settings}
    if "quantization_config" not in fields and os.path.lexists(folder / _MODELOPT_FILE):
        settings = read_object(folder / _MODELOPT_FILE, "fetch it again", CheckpointError).get("quantization")
        if not isinstance(settings, dict):
            raise CheckpointError(f"{folder / _MODELOPT_FILE}: quantization must be an object, got {short(settings)}")
        fields["quantization_config"] = {"quant_method": "modelopt", **settings}
    return text_fields(fields)


def _adapter_in(folder: Path) -> str | None:
    """Return the remedy for a folder with an adapter instead of a model. `None` for other folders."""
    if not os.path.lexists(folder / _ADAPTER):
        return None
    base = read_object(folder / _ADAPTER, "fetch it again", CheckpointError).get("base_model_name_or_path")
    model = short(base) if base else "an unnamed model"
    return f"it contains an adapter of {model}: load that model, and {_TO_ADAPT}"


def gguf_in(folder: Path) -> str | None:
    """Return the remedy for a folder with GGUF files instead of a checkpoint. `None` for other folders."""
    names = [name for name in _names(folder) if name.endswith(GGUF_SUFFIX) or is_gguf(folder / name)]
    return f"{some(names)} is a complete model: pass the path of the file instead of the folder" if names else None


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
    """Choose the weight files: model.safetensors, else the files in the index, else a single safetensors file."""
    single_file, index_file = folder / SINGLE_FILE, folder / INDEX_FILE
    if os.path.lexists(single_file):
        return [single_file], {}
    if os.path.lexists(index_file):
        weight_map = _read_weight_map(index_file)
        listed_names = sorted(set(weight_map.values()))
        if missing_names := [name for name in listed_names if not os.path.lexists(folder / name)]:
            raise CheckpointError(f"{folder}: {some(missing_names)} is listed in {INDEX_FILE} but missing: download it")
        return [folder / name for name in listed_names], weight_map
    names = _names(folder)
    safetensors_names = [name for name in names if name.endswith(".safetensors")]
    usable_names = [name for name in safetensors_names if not name.startswith(("consolidated", "adapter_model"))]
    shard_names = [name for name in usable_names if (match := _SHARD_NAME.search(name)) and int(match[2]) != 1]
    if shard_names or len(usable_names) > 1:
        raise CheckpointError(f"{folder}: {some(shard_names or usable_names)} without {INDEX_FILE}; download the index")
    if usable_names:
        logger.warning("%s has no %s: reading %s, its only weight file", folder, SINGLE_FILE, usable_names[0])
        return [folder / usable_names[0]], {}
    raise CheckpointError(_no_weights(folder, sorted({*safetensors_names} - {*usable_names}), names))


def holds_orbax(folder: Path) -> bool:
    """Return whether a folder is an Orbax checkpoint or contains one, as an item (``items``) or an item of a step."""
    return any(next(folder.glob(f"{prefix}_METADATA"), None) for prefix in ("", "*/", "[0-9]*/*/"))


def _no_weights(folder: Path, consolidated_names: list[str], names: list[str]) -> str:
    message = f"no weights in {folder}: neither {SINGLE_FILE} nor {INDEX_FILE}"
    other_names = [name for name in names if Path(name).suffix in _OTHER_FORMATS]
    if adapter_remedy := _adapter_in(folder):
        return f"{message}; {adapter_remedy}"
    if NATIVE_FILE in names:
        return f"{message}; nnxmoe.save wrote this folder: use nnxmoe.load, or convert it with `nnxmoe convert`"
    if holds_orbax(folder):
        return f"{message}; this looks like an Orbax checkpoint: use nnxmoe.convert.maxtext.load if MaxText wrote it"
    if consolidated_names:
        return f"{message}; {some(consolidated_names)} has the original layout: download the Hugging Face version"
    if gguf_remedy := gguf_in(folder):
        return f"{message}; {gguf_remedy}"
    if other_names:
        return f"{message}; {some(other_names)} is not opened, because it can run code: convert it to safetensors first"
    return f"{message}; download the model's safetensors files into this folder"


def _read_weight_map(index: Path) -> dict[str, str]:
    """Read the index's weight_map. The values must be paths of safetensors files in the folder or its subfolders."""
    weight_map = read_object(index, "fetch it again", CheckpointError, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: 'weight_map' must map tensors to files, got {short(weight_map)}; download the index again"
        )
    if len(weight_map) > MAX_TENSORS:
        raise CheckpointError(f"{index}: 'weight_map' has {len(weight_map)} tensors, more than {MAX_TENSORS}")
    for name, value in weight_map.items():
        parts = Path(value).parts if isinstance(value, str) else ()
        if not parts or not all(map(_is_plain_name, parts)):
            raise CheckpointError(
                f"{index}: weight_map[{short(name)}] is {short(value)}, not the name of a file in this folder or "
                "a subfolder: correct the index, or do not trust this checkpoint"
            )
        if not value.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: weight_map[{short(name)}] is {short(value)}: only .safetensors files are read; "
                "convert the checkpoint to safetensors"
            )
    return {name: Path(value).as_posix() for name, value in weight_map.items()}


def _is_plain_name(value: str) -> bool:
    is_name = value not in ("", ".", "..") and len(value) <= 255 and value.isprintable() and Path(value).name == value
    return is_name and "\\" not in value and ":" not in value


def normalize_prefixes(tensors: dict[str, T]) -> dict[str, T]:
    """Rename the tensors of base models and multimodal models to their names in a causal LM, as transformers does."""
    renamed_tensors = {}
    for name, info in tensors.items():
        full_name = next((new + name[len(old) :] for old, new in _PREFIXES.items() if name.startswith(old)), name)
        renamed_tensors[name if full_name in tensors else full_name] = info
    return renamed_tensors


def module_spellings(module: str) -> list[str]:
    """Return the possible names of a text model's module in multimodal models, starting with ``module`` itself."""
    return [module, *(prefix + module.removeprefix("model.") for prefix in WRAPPERS if module.startswith("model."))]


def group_towers(names: Iterable[str]) -> dict[str, list[str]]:
    """Group a multimodal checkpoint's tensors outside the text model by component, such as ``vision_tower``."""
    towers: dict[str, list[str]] = {}
    for name in names:
        if match := _TOWER.match(name):
            towers.setdefault(match[1], []).append(name)
    return towers


def download(repo_id: str, revision: str | None, local_files_only: bool) -> Path:
    """Download config, tokenizer and safetensors files of a hub repository, and return the snapshot folder."""
    return snapshot(repo_id, revision, local_files_only, _DOWNLOAD, _SKIP, CheckpointError)


def remote_headers(repo_id: str, revision: str | None) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """Download a hub repository's config.json and the headers of its safetensors files, but not the weights."""
    import huggingface_hub

    check_hub_id(repo_id, CheckpointError)

    def config_file() -> str:
        huggingface_hub.HfApi().model_info(repo_id, revision=revision)  # fails immediately, unlike the download
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
    locations = list(metadata.weight_map.items())
    locations += [(name, file) for file, header in sorted(metadata.files_metadata.items()) for name in header.tensors]
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, file in locations:
        info = metadata.files_metadata[file].tensors.get(name)
        if info is None:
            raise CheckpointError(f"{repo_id}: the index lists {short(name)} in {short(file)}, but the file lacks it")
        if not isinstance(info.dtype, str) or not isinstance(info.shape, list) or not all(map(is_size, info.shape)):
            raise CheckpointError(f"{repo_id}: {short(file)}: tensor {short(name)} is malformed: {short(info)}")
        tensors.setdefault(name, (info.dtype, tuple(info.shape)))
    return tensors
