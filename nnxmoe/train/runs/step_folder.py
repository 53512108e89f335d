"""The layout of a folder of checkpoints, and whether a step in it is complete.

``checkpoints.json`` marks the folder. ``12/`` is step 12, ``12/arrays/`` its arrays in Orbax's format, ``12/step.json``
the list of its arrays and files. ``12.orbax-checkpoint-tmp/`` is being written or was left by a killed process,
``12.damaged/`` was renamed when it was found damaged.
"""

import dataclasses
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nnxmoe.config.printable import short, some
from nnxmoe.runtime.progress import logger
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.files import read_object
from nnxmoe.train.runs.named_arrays import Signature

MARKER = "checkpoints.json"
MANIFEST = "step.json"
ARRAYS = "arrays"
VERSION = 2  # in version 1 kernels were stored [*ins, *outs]
_STEP = re.compile(r"0|[1-9][0-9]*")
_BLOCK = 16 << 20


class OtherVersion(CheckpointError):
    """The step is whole, but another release of nnxmoe wrote it."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a step's ``step.json``."""

    signature: Signature
    keys: dict[str, str]  # name -> implementation, of arrays of random keys
    extra: dict[str, Any]
    files: dict[str, list[int]]  # path -> size and checksum


def write_manifest(folder: Path, step: int, signature: Signature, keys: Mapping[str, str], extra: Any) -> None:
    """Writes the manifest into the folder of a step whose arrays are written, and syncs all of its files to disk."""
    paths = sorted(path for path in (folder / ARRAYS).rglob("*") if path.is_file())  # Orbax changes the others later
    with ThreadPoolExecutor(8) as pool:
        files = dict(
            zip((str(path.relative_to(folder)) for path in paths), pool.map(_size_and_checksum, paths), strict=True)
        )
    content = {"version": VERSION, "step": step, "arrays": signature, "keys": dict(keys), "extra": extra}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(content | {"files": files}, file)
        file.flush()
        os.fsync(file.fileno())


def _size_and_checksum(path: Path) -> list[int]:
    """Size and checksum of a file, after syncing it to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return [path.stat().st_size, _checksum(path)]


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def read_manifest(folder: Path, step: int) -> Manifest:
    """The manifest of a finished step. Raises CheckpointError if a file is missing or has another size, OtherVersion if
    another version of this module wrote it."""
    remedy = "the step is incomplete: use another one"
    content = read_object(folder / MANIFEST, remedy, CheckpointError, limit=1 << 30)
    if content.get("version") != VERSION:
        raise OtherVersion(
            f"{folder / MANIFEST}: version {short(content.get('version'))} is not version {VERSION}: continue the run "
            "with the release of nnxmoe that began it, or begin another one in a new folder"
        )
    if content.get("step") != step:
        raise CheckpointError(f"{folder / MANIFEST}: step {short(content.get('step'))} is not step {step}; {remedy}")
    try:
        manifest = Manifest(
            {str(name): (tuple(map(int, shape)), str(dtype)) for name, (shape, dtype) in content["arrays"].items()},
            {str(name): str(kind) for name, kind in content["keys"].items()},
            dict(content["extra"]),
            {str(name): [int(size), int(checksum)] for name, (size, checksum) in content["files"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: {type(error).__name__}: {error}; {remedy}") from error
    for name, (size, _) in manifest.files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise CheckpointError(f"{folder / name} {what}; {remedy}")
    return manifest


def check_contents(folder: Path, files: Mapping[str, Sequence[int]]) -> None:
    """Raises CheckpointError with the names of the files whose checksums differ."""
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda name: _checksum(folder / name), files)
        damaged = [name for name, value in zip(files, found, strict=True) if value != files[name][1]]
    if damaged:
        raise CheckpointError(
            f"{folder}: the content of {some(damaged)} has changed since it was written, by the disk or in copying: "
            "restore another step"
        )


def finished(folder: Path) -> Iterator[int]:
    """The finished steps in a folder, newest first. Warns of newer, incomplete steps. Raises OtherVersion."""
    any_yet = False
    for step in steps_in(folder):
        try:
            read_manifest(folder / str(step), step)
        except OtherVersion:
            raise
        except CheckpointError as error:
            if not any_yet:
                logger.warning("skipping step %d: %s", step, error)
            continue
        any_yet = True
        yield step


def steps_in(folder: Path) -> list[int]:
    """All steps with a folder, complete or not, newest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    found = [int(name) for name in names if _STEP.fullmatch(name) and (folder / name).is_dir()]
    return sorted(found, reverse=True)
