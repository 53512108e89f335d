"""Distinguish local folders from Hugging Face hub ids, and download from the hub.

Callers pass the error class to raise, a subclass of ValueError. Error messages include the remedy.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from nnxmoe.config.printable import did_you_mean
from nnxmoe.config.validate import path_text
from nnxmoe.convert.files.untrusted_files import is_gguf, refuse_url

T = TypeVar("T")

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"  # checkpoint shipped in this package

# Patterns of tokenizer files in every format, and of a checkpoint's Python code. Loading downloads these files, and
# saving copies them from the model's source folder. The code is never run.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model*"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja", "vocab.*", "merges.txt"),
    *("tekken*.json", "*.tiktoken", "tiktoken.model", "spiece.model", "sentencepiece*.model"),
)
CODE_FILES = ("*.py",)

_HUB_FILE = re.compile(r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)/([A-Za-z0-9_][\w./-]*\.gguf)", re.ASCII)
_SPLIT = re.compile(r"-\d{5}(-of-\d{5}\.gguf)$")
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_REMEDIES: tuple[tuple[str, str], ...] = (
    ("GatedRepoError", "access is gated: accept its terms at https://huggingface.co/{id} and run `hf auth login`"),
    ("RevisionNotFoundError", "the repository has no revision {revision!r}: pass an existing branch, tag or commit"),
    ("RepositoryNotFoundError", "no such local folder, and the hub repository does not exist or is private: check the "
     "spelling or run `hf auth login`"),
    ("IncompleteSnapshotError", "the cached copy is incomplete and the hub cannot be reached: load it again online"),
    ("LocalEntryNotFoundError", "no such local folder, and not in the local cache: {online}"),
    ("OfflineModeIsEnabled", "offline mode is on: unset HF_HUB_OFFLINE or pass a local folder"),
    ("EntryNotFoundError", "a file is missing in the repository: check that it is a Hugging Face checkpoint"),
    ("NotASafetensorsRepoError", "it has no model.safetensors and no index: convert the weights to safetensors"),
    ("SafetensorsParsingError", "the header of a safetensors file is corrupt: report this to the model's authors"),
    ("HFValidationError", "this is not a valid hub id: use 'org/name' or an existing folder"),
    ("HfHubHTTPError", "the hub returned an error: try again later"),
    ("OSError", "the files could not be downloaded or written: check the network, the disk and the cache folder"),
)  # fmt: skip


def local_folder(path_or_hub_id: str | os.PathLike[str], error: type[ValueError]) -> Path | None:
    """Return the path of a local folder or GGUF file, or `None` for a hub id.

    Args:
        path_or_hub_id: Folder, GGUF file, hub id, or GGUF file in a hub repository (``org/name/file.gguf``). ``demo``
            is the checkpoint shipped in this package, and ``./demo`` is a folder.
        error: Error class to raise if the argument is neither a path nor a hub id.
    """
    text = path_text(path_or_hub_id, error, "path_or_hub_id")
    if path_or_hub_id == "demo":
        return DEMO
    if "://huggingface.co/" in text:
        raise error(f"{text} is a URL: pass the repository's id, such as 'org/name'")
    refuse_url(text, error)
    path = Path(os.path.expanduser(text))
    if os.path.isdir(path) or is_gguf(path):
        return path
    if os.path.lexists(path):
        raise error(f"{path} is not a folder; pass the folder that contains the checkpoint")
    if isinstance(path_or_hub_id, str) and _HUB_FILE.fullmatch(text) and ".." not in text:
        return None
    looks_like_path = text[0] in "./~" or path.is_absolute() or text.count(os.sep) >= 2
    if looks_like_path or not isinstance(path_or_hub_id, str):
        raise error(f"no such folder: {text}{_close_to(path)}")
    if not _HUB_ID.fullmatch(text) or ".." in text or "--" in text:
        raise error(f"{text!r} is neither an existing folder nor a hub id such as 'org/name'")
    return None


def _close_to(path: Path) -> str:
    """Suggest a folder with a similar name, for an error message about a missing folder."""
    try:
        names = [entry.name for entry in os.scandir(path.parent) if entry.is_dir()]
    except (OSError, ValueError):
        return ""
    is_relative = path.parent == Path()
    return did_you_mean(str(path), ["demo"] * is_relative + [str(path.parent / name) for name in names])


def check_hub_id(repo_id: str, error: type[ValueError]) -> None:
    """Raise ``error`` unless the text is a valid repository id."""
    if not _HUB_ID.fullmatch(repo_id):
        raise error(f"{repo_id!a:.160} is not a hub id such as 'org/name'")


def snapshot(
    repo_id: str,
    revision: str | None,
    local_files_only: bool,
    patterns: Sequence[str],
    skip: Sequence[str],
    error: type[ValueError],
) -> Path:
    """Download the files of a hub repository that the hub cache lacks, and return the folder in the cache.

    Args:
        repo_id: Hub id, or ``org/name/file.gguf`` to download this file with its other splits and return its path.
        revision: Branch, tag or commit.
        local_files_only: Whether to use only files in the cache.
        patterns: Patterns of the files to download.
        skip: Patterns of files to skip.
        error: Error class to raise if the download fails or the file is missing.
    """
    import huggingface_hub

    file = ""
    if match := _HUB_FILE.fullmatch(repo_id):
        repo_id, file = match.groups()
        patterns, skip = [_SPLIT.sub(r"-*\1", file)], []

    def fetch() -> str:
        return huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            local_files_only=local_files_only,
            allow_patterns=list(patterns),
            ignore_patterns=list(skip),
        )

    folder = Path(hub_call(repo_id, revision, fetch, error))
    if file and not os.path.lexists(folder / file):
        raise error(f"{repo_id} has no file {file} at this revision: pass the name of a GGUF file in the repository")
    return folder / file


def _online(failure: Exception) -> str:
    """Return the remedy for a LocalEntryNotFoundError."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "unset HF_HUB_OFFLINE to download from the hub"
    return (
        "the hub cannot be reached, check the network"
        if failure.__cause__
        else "omit local_files_only=True to download from the hub"
    )


def hub_call(repo_id: str, revision: str | None, call: Callable[[], T], error: type[ValueError]) -> T:
    """Return ``call()``. Exceptions of the hub library are raised as ``error`` with a remedy in the message."""
    try:
        return call()
    except Exception as failure:
        class_names = {class_name.__name__ for class_name in type(failure).__mro__}
        is_network_error = type(failure).__module__.split(".")[0] in (
            "httpx",
            "httpx2",
            "httpcore",
            "requests",
            "urllib3",
        )
        remedy = next((text for class_name, text in _REMEDIES if class_name in class_names), None)
        if isinstance(failure, error) or (remedy is None and not is_network_error):
            raise
        remedy = remedy or "the hub cannot be reached: check the network"
        remedy = remedy.format(id=repo_id, revision=revision, online=_online(failure))
        cause = failure.__cause__ if "LocalEntryNotFoundError" in class_names else failure
        reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
        reason = f" ({type(cause).__name__}: {reason[:300]})" if cause and "HF_HUB_OFFLINE" not in remedy else ""
        suggestion = _close_to(Path(repo_id)) if "no such local folder" in remedy else ""
        raise error(f"{repo_id}: {remedy}{reason}{suggestion}") from failure
