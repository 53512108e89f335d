"""Reads untrusted files: regular files only, of bounded size, parsed strictly.

Callers pass the class of error to raise, a ValueError; its message names the file, what is wrong with it, and the
remedy.
"""

import contextlib
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from nnxmoe.config.printable import short
from nnxmoe.config.validate import path_text

MAX_JSON_BYTES = 16_000_000  # parsed, a hostile file of this size takes up to 400 MB
GGUF_SUFFIX, GGUF_MAGIC = ".gguf", b"GGUF"
_LFS_MAGIC = b"version https://git-lfs"


def refuse_url(path: str | os.PathLike[str], error: type[ValueError] = ValueError, name: str = "folder") -> None:
    """Raise for URLs such as ``gs://bucket/run``, which would be taken as relative paths, and for non-path values."""
    if "://" in (text := path_text(path, error, name)):
        raise error(f"{text} is a URL: give a path of this machine, and copy the files from or to the URL yourself")


def absolute_path(path: str | os.PathLike[str], name: str = "folder") -> Path:
    """The absolute path of the argument ``name``; ``~`` is the home folder, as in a shell. Raises ValueError for a URL,
    empty text and values that are not paths."""
    refuse_url(path, name=name)
    return Path(os.path.abspath(os.path.expanduser(path)))


def stat_regular_file(path: Path, remedy: str, error: type[ValueError]) -> os.stat_result:
    """The status of a regular file; raises for a missing file, a broken link, a folder or a device."""
    try:
        status = path.stat()
    except OSError as failure:
        if path.is_symlink():
            raise error(f"{path} is a link to {os.readlink(path)}, which cannot be opened; {remedy}") from failure
        raise error(f"{path}: {failure.strerror or failure}; {remedy}") from failure
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise error(f"{path} is {kind}; {remedy}")
    return status


def refuse_lfs_pointer(path: Path, head: bytes, error: type[ValueError]) -> None:
    """Raise for the text file that git leaves in place of a large file that was not fetched."""
    if head.startswith(_LFS_MAGIC):
        raise error(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")


def read_bounded(path: Path, limit: int, remedy: str, error: type[ValueError]) -> bytes:
    """Content of a regular file of at most ``limit`` bytes, counted while reading."""
    stat_regular_file(path, remedy, error)
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as failure:
        raise error(f"{path}: {failure.strerror or failure}; {remedy}") from failure
    if len(data) > limit:
        raise error(f"{path} exceeds the limit of {limit} bytes for such a file; {remedy}")
    refuse_lfs_pointer(path, data, error)
    return data


def read_object(
    path: Path, remedy: str, error: type[ValueError], limit: int = MAX_JSON_BYTES, *, strict: bool = True
) -> dict[str, Any]:
    """The JSON object that a file holds. ``strict``: as in `parse_json`."""
    data = read_bounded(path, limit, remedy, error)
    value = parse_json(data.removeprefix(b"\xef\xbb\xbf"), path, remedy, error, strict=strict)
    if not isinstance(value, dict):
        raise error(f"{path} must hold a JSON object, got {short(value)}; {remedy}")
    return value


def parse_json(data: bytes, where: str | Path, remedy: str, error: type[ValueError], *, strict: bool = True) -> object:
    """Parse JSON, in which names must be unique within their object. ``strict``: refuse NaN and Infinity."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise error(f"{where}: the name {short(twice)} occurs twice in one object; {remedy}")
        return result

    def refuse(constant: str) -> NoReturn:
        raise error(f"{where} is not valid JSON: {constant} is not a JSON number; {remedy}")

    def finite(text: str) -> float:
        return float(text) if math.isfinite(float(text)) else refuse(short(text))

    try:
        numbers = {"parse_constant": refuse, "parse_float": finite} if strict else {}
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, **numbers)
    except error:
        raise
    except (ValueError, RecursionError) as failure:
        raise error(f"{where} is not valid JSON: {failure}; {remedy}") from failure


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a GGUF file, by its suffix or its first bytes (Ollama's blobs have no suffix)."""
    if not os.path.isfile(path):
        return False
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return os.fspath(path).lower().endswith(GGUF_SUFFIX) or file.read(4) == GGUF_MAGIC
    return os.fspath(path).lower().endswith(GGUF_SUFFIX)  # the reader reports files that cannot be opened
