"""Read untrusted files: regular files only, with bounded size and strict parsing.

Callers pass the error class to raise, a subclass of ValueError. The message names the file, the problem and the remedy.
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

MAX_JSON_BYTES = 16_000_000  # parsing a malicious file of this size takes up to 400 MB of memory
GGUF_SUFFIX, GGUF_MAGIC = ".gguf", b"GGUF"
_LFS_MAGIC = b"version https://git-lfs"


def refuse_url(path: str | os.PathLike[str], error: type[ValueError] = ValueError, name: str = "folder") -> None:
    """Raise ``error`` for URLs and for values that are not paths.

    A URL such as ``gs://bucket/run`` would otherwise count as a relative path.
    """
    if "://" in (text := path_text(path, error, name)):
        raise error(f"{text} is a URL: give a path of this machine, and copy the files from or to the URL yourself")


def absolute_path(path: str | os.PathLike[str], name: str = "folder") -> Path:
    """Return the absolute path. ``~`` expands to the home folder.

    Raises ValueError for a URL, an empty text and a value that is not a path. ``name`` is the name of the argument in
    the message.
    """
    refuse_url(path, name=name)
    return Path(os.path.abspath(os.path.expanduser(path)))


def stat_regular_file(path: Path, remedy: str, error: type[ValueError]) -> os.stat_result:
    """Return the status of a regular file. Raises ``error`` for a missing file, a broken link, a folder or a device."""
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
    """Raise ``error`` for a Git LFS pointer, the text file in place of a large file that was not fetched."""
    if head.startswith(_LFS_MAGIC):
        raise error(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")


def read_bounded(path: Path, limit: int, remedy: str, error: type[ValueError]) -> bytes:
    """Read a regular file. Raises ``error`` if it has more than ``limit`` bytes, counted during reading."""
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
    """Read a JSON object from a file. See `parse_json` for ``strict``."""
    data = read_bounded(path, limit, remedy, error)
    value = parse_json(data.removeprefix(b"\xef\xbb\xbf"), path, remedy, error, strict=strict)
    if not isinstance(value, dict):
        raise error(f"{path} must hold a JSON object, got {short(value)}; {remedy}")
    return value


def parse_json(data: bytes, where: str | Path, remedy: str, error: type[ValueError], *, strict: bool = True) -> object:
    """Parse JSON. Raises ``error`` if a name occurs twice in an object and, if ``strict``, for NaN and Infinity."""

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
    """Return whether a path is a GGUF file, by its suffix or first bytes (Ollama's blobs have no suffix)."""
    if not os.path.isfile(path):
        return False
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return os.fspath(path).lower().endswith(GGUF_SUFFIX) or file.read(4) == GGUF_MAGIC
    return os.fspath(path).lower().endswith(GGUF_SUFFIX)  # the reader reports files that cannot be opened
