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

    A URL such as ``gs://bucket/run`` would otherwise be interpreted as a relative path.
    """
    if "://" in (text := path_text(path, error, name)):
        raise error(f"{text} is a URL: pass a local path, and copy the files from or to the URL yourself")


def absolute_path(path: str | os.PathLike[str], name: str = "folder") -> Path:
    """Return the absolute path. ``~`` expands to the home folder.

    Raises ValueError for a URL, an empty string and a value that is not a path. The message calls the argument
    ``name``.
    """
    refuse_url(path, name=name)
    return Path(os.path.abspath(os.path.expanduser(path)))


def stat_regular_file(path: Path, remedy: str, error: type[ValueError]) -> os.stat_result:
    """Return a regular file's status. Raises ``error`` for a missing file, a broken link, a folder or a device."""
    try:
        status = path.stat()
    except OSError as failure:
        if path.is_symlink():
            raise error(f"{path} links to {os.readlink(path)}, which cannot be opened; {remedy}") from failure
        raise error(f"{path}: {failure.strerror or failure}; {remedy}") from failure
    if not stat.S_ISREG(status.st_mode):
        description = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise error(f"{path} is {description}; {remedy}")
    return status


def refuse_lfs_pointer(path: Path, head: bytes, error: type[ValueError]) -> None:
    """Raise ``error`` for a Git LFS pointer, the text file that replaces a large file until it is downloaded."""
    if head.startswith(_LFS_MAGIC):
        raise error(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")


def read_bounded(path: Path, limit: int, remedy: str, error: type[ValueError]) -> bytes:
    """Read a regular file. Raises ``error`` if more than ``limit`` bytes can be read."""
    stat_regular_file(path, remedy, error)
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as failure:
        raise error(f"{path}: {failure.strerror or failure}; {remedy}") from failure
    if len(data) > limit:
        raise error(f"{path} exceeds the limit of {limit} bytes for this type of file; {remedy}")
    refuse_lfs_pointer(path, data, error)
    return data


def read_object(
    path: Path, remedy: str, error: type[ValueError], limit: int = MAX_JSON_BYTES, *, strict: bool = True
) -> dict[str, Any]:
    """Read a JSON object from a file. See `parse_json` for ``strict``."""
    data = read_bounded(path, limit, remedy, error)
    value = parse_json(data.removeprefix(b"\xef\xbb\xbf"), path, remedy, error, strict=strict)
    if not isinstance(value, dict):
        raise error(f"{path} must contain a JSON object, got {short(value)}; {remedy}")
    return value


def parse_json(data: bytes, source: str | Path, remedy: str, error: type[ValueError], *, strict: bool = True) -> object:
    """Parse JSON. Raises ``error`` for a duplicate name in an object and, if ``strict``, for NaN and Infinity."""

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names: set[str] = set()
            duplicate = next(name for name, _ in pairs if name in names or names.add(name))
            raise error(f"{source}: the name {short(duplicate)} occurs twice in one object; {remedy}")
        return result

    def reject(constant: str) -> NoReturn:
        raise error(f"{source} is not valid JSON: {constant} is not a JSON number; {remedy}")

    def parse_finite(text: str) -> float:
        return float(text) if math.isfinite(float(text)) else reject(short(text))

    try:
        parse_options = {"parse_constant": reject, "parse_float": parse_finite} if strict else {}
        return json.loads(data.decode("utf-8"), object_pairs_hook=reject_duplicates, **parse_options)
    except error:
        raise
    except (ValueError, RecursionError) as failure:
        raise error(f"{source} is not valid JSON: {failure}; {remedy}") from failure


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a GGUF file, by its suffix or first bytes (Ollama's blobs have no suffix)."""
    if not os.path.isfile(path):
        return False
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return os.fspath(path).lower().endswith(GGUF_SUFFIX) or file.read(4) == GGUF_MAGIC
    return os.fspath(path).lower().endswith(GGUF_SUFFIX)  # the reader reports files that cannot be opened
