"""A folder that appears whole or not at all: where every checkpoint is written."""

import contextlib
import ctypes
import errno
import glob
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from nnxmoe.convert.source import CheckpointError
from nnxmoe.files import some
from nnxmoe.progress import logger

_CHECKPOINT_FILE = re.compile(
    r"(generation_)?config\.json|model\.safetensors(\.index\.json)?|model-\d+-of-\d+\.safetensors"
)


@contextlib.contextmanager
def new_folder(folder: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Yields a hidden folder to write a checkpoint into, which at the end becomes ``folder`` in one step.

    ``folder`` must be new or empty. With ``overwrite`` a checkpoint in it is replaced: the two folders change places,
    and other files and sub-folders are carried over (as hard links where possible). Until that step ``folder`` is as
    it was, whatever happens; a killed process leaves the hidden folder behind, which may be deleted.
    Raises CheckpointError.
    """
    target = Path(os.path.realpath(folder))
    present = _present(target, overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _warn_of_leftovers(target)
        # A mounted folder cannot be renamed, nor one whose parent may not be written.
        inside = os.path.isdir(target) and (os.path.ismount(target) or not os.access(target.parent, os.W_OK))
        if inside and present:
            raise CheckpointError(f"{target} cannot be replaced in one step where it is: save to a new folder")
        name = f".{target.name[:50]}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        stage = (target if inside else target.parent) / name
        stage.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot write to {target}: {error}; nothing was changed") from error
    try:
        yield stage
        _carry_over(target, stage)
        _sync_folder(stage)
        if inside:
            _move_in(stage, target)
        elif present:
            _exchange(stage, target)
        else:
            os.rename(stage, target)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint to {target}: {error}; what was there is as before"
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)  # what is left of it, or the checkpoint that was replaced
    with contextlib.suppress(OSError):  # not every file system does this for folders
        _sync_folder(target.parent)


def _present(target: Path, overwrite: bool) -> list[str]:
    """The names in a folder that may be written to; refuses what may not be."""
    if not os.path.lexists(target):
        return []
    if not os.path.isdir(target):
        raise CheckpointError(f"{target} is not a folder: save to a new one")
    try:
        names = sorted(os.listdir(target))
    except OSError as error:
        raise CheckpointError(f"{target}: {error.strerror or error}; save to another folder") from error
    if names and not overwrite:
        raise CheckpointError(
            f"{target} is not an empty folder, it holds {some(names)}: save to a new one, or pass overwrite=True to "
            "replace the checkpoint in it"
        )
    links = [name for name in names if _CHECKPOINT_FILE.fullmatch(name) and (target / name).is_symlink()]
    if links:
        raise CheckpointError(
            f"{target}: {some(links)} is a link, as in the hub's cache: save to a new folder, not over it"
        )
    return names


def _warn_of_leftovers(target: Path) -> None:
    left = [path.name for path in target.parent.glob(f".{glob.escape(target.name[:50])}.*-*.tmp")]
    if left:
        logger.warning("%s has folders of saves that are running or were killed: %s", target.parent, some(left))


def _carry_over(target: Path, stage: Path) -> None:
    """What is in the old folder and no part of its checkpoint, into the new one."""
    for name in os.listdir(target) if os.path.isdir(target) else []:
        old, new = target / name, stage / name
        if _CHECKPOINT_FILE.fullmatch(name) or os.path.lexists(new) or old == stage:
            continue
        if old.is_dir() and not old.is_symlink():
            shutil.copytree(old, new, symlinks=True, copy_function=_link)
        else:
            _link(old, new)


def _link(old: str | Path, new: str | Path) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copy2(old, new, follow_symlinks=False)


def _move_in(stage: Path, target: Path) -> None:
    """File by file; without config.json, which comes last, the folder holds no checkpoint."""
    moved: list[Path] = []
    try:
        for name in sorted(os.listdir(stage), key=lambda name: name == "config.json"):
            os.rename(stage / name, target / name)
            moved.append(target / name)
    except OSError:
        for path in moved:
            path.unlink(missing_ok=True)
        raise


def _exchange(one: Path, other: Path) -> None:
    """Two folders change places in one step, which Python's library has no call for."""
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(one), os.fsencode(other)
    if sys.platform == "darwin":
        failed = libc.renamex_np(*paths, 2)  # RENAME_SWAP
    elif hasattr(libc, "renameat2"):
        failed = libc.renameat2(-100, paths[0], -100, paths[1], 2)  # AT_FDCWD, RENAME_EXCHANGE
    else:
        failed = True
    if failed:
        code = ctypes.get_errno() or errno.ENOSYS
        raise OSError(code, f"two folders cannot change places here ({os.strerror(code)}), save to a new folder")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
