"""Writes a folder atomically: it appears complete or not at all. Every checkpoint is written this way."""

import contextlib
import ctypes
import errno
import glob
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from nnxmoe.config.printable import short, some
from nnxmoe.runtime.progress import logger
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.source import NATIVE_FILE

_CHECKPOINT_FILE = re.compile(
    r"(generation_)?config\.json|model\.safetensors(\.index\.json)?|model-[0-9]+-of-[0-9]+\.safetensors"
)


@contextlib.contextmanager
def atomic_dir(folder: str | os.PathLike[str], overwrite: bool | None = None) -> Iterator[Path]:
    """Yields a hidden folder to write a checkpoint into; on exit it becomes ``folder`` in one step.

    ``folder`` must be new or empty. With ``overwrite=True`` a checkpoint in it is replaced: the two folders are
    swapped, and other files and subfolders are carried over, as hard links where possible. (None: like False, for
    callers that do not offer to overwrite.) Until the last step ``folder`` is unchanged. A killed process leaves
    the hidden folder behind, which may be deleted. Raises CheckpointError.
    """
    target = _target(folder)
    present = _present(target, overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _warn_of_leftovers(target)
        inside = os.path.isdir(target) and _must_stay(target)
        if inside and any(map(_CHECKPOINT_FILE.fullmatch, present)):
            raise CheckpointError(
                f"{target} cannot be replaced in one step where it is: {inside}; save to a new folder"
            )
        name = f".{target.name[:50]}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        stage = (target if inside else target.parent) / name
        stage.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot write to {target}: {error}; nothing was changed") from error
    replaced = False
    try:
        yield stage
        if os.path.isdir(target) and not inside:
            _look_alike(target, stage)
            _carry_over(target, stage)
        _sync_folder(stage)
        if inside:
            _move_in(stage, target)
        elif present:
            _exchange(stage, target)
            replaced = True
            _carry_over(stage, target)  # files added to the old folder in the meantime
        else:
            os.rename(stage, target)
    except OSError as error:
        state = "it was replaced" if replaced else "it is unchanged"
        raise CheckpointError(f"cannot write the checkpoint to {target}: {error}; {state}") from error
    finally:
        _remove(stage)  # after a failure: what was written; after a swap: the replaced checkpoint
    with contextlib.suppress(OSError):  # some file systems cannot sync folders
        _sync_folder(target.parent)


def _remove(folder: Path) -> None:
    """Deletes a folder; after an error again, since writer threads may still have created files in it."""
    shutil.rmtree(folder, ignore_errors=True)
    if sys.exc_info()[0] is not None:
        time.sleep(0.2)
        shutil.rmtree(folder, ignore_errors=True)


def refuse_unless_empty(folder: str | os.PathLike[str]) -> None:
    """Raises CheckpointError unless ``folder`` is new or empty."""
    _present(_target(folder), overwrite=None)


def _target(folder: str | os.PathLike[str]) -> Path:
    name = os.fspath(folder)
    if not name or "\0" in name:
        raise CheckpointError(
            f"{short(name)} cannot name a folder: {'it has a NUL character' if name else 'it is empty'}"
        )
    return Path(os.path.realpath(os.path.expanduser(name)))


def _present(target: Path, overwrite: bool | None) -> list[str]:
    """Names in the target folder; raises CheckpointError if it must not be written to."""
    if not os.path.lexists(target):
        return []
    if not os.path.isdir(target):
        raise CheckpointError(f"{target} is not a folder: save to a new one")
    try:
        names = sorted(os.listdir(target))
    except OSError as error:
        raise CheckpointError(f"{target}: {error.strerror or error}; save to another folder") from error
    if names and not overwrite:
        way = "" if overwrite is None else ", or pass overwrite=True to replace the checkpoint in it"
        raise CheckpointError(f"{target} is not an empty folder, it holds {some(names)}: save to a new one{way}")
    if NATIVE_FILE in names or "_METADATA" in names or (target / "0" / "items").is_dir():
        raise CheckpointError(
            f"{target} holds an Orbax checkpoint, which would remain beside this one: save to a new folder"
        )
    ours = [name for name in names if _CHECKPOINT_FILE.fullmatch(name)]
    if links := [name for name in ours if (target / name).is_symlink()]:
        raise CheckpointError(
            f"{target}: {some(links)} is a link, as in the hub's cache: save to a new folder, not over it"
        )
    if folders := [name for name in ours if (target / name).is_dir()]:
        raise CheckpointError(
            f"{target}: {some(folders)} is a folder, but a checkpoint has a file of that name: move it away"
        )
    if any(os.path.ismount(path) for path, _, _ in os.walk(target) if path != str(target)):
        raise CheckpointError(f"{target} has other disks mounted in it: save to a new folder")
    return names


def _must_stay(target: Path) -> str | None:
    """The reason that a folder cannot be renamed; None if it can."""
    if os.path.ismount(target):
        return "something is mounted there"
    if not os.access(target.parent, os.W_OK):
        return f"{target.parent} is not writable"
    with contextlib.suppress(OSError):
        if Path(os.getcwd()).is_relative_to(target):
            return "it is the current folder of this process"
    return None


def _look_alike(target: Path, stage: Path) -> None:
    """Copies the old folder's mode and, if permitted, its owner to the new one."""
    status = target.stat()
    os.chmod(stage, stat.S_IMODE(status.st_mode))
    if (status.st_uid, status.st_gid) != (stage.stat().st_uid, stage.stat().st_gid):
        with contextlib.suppress(PermissionError):
            os.chown(stage, status.st_uid, status.st_gid)


def _warn_of_leftovers(target: Path) -> None:
    left = [path.name for path in target.parent.glob(f".{glob.escape(target.name[:50])}.*-*.tmp")]
    if left:
        logger.warning("%s has folders of saves that are running or were killed: %s", target.parent, some(left))


def _carry_over(old: Path, new: Path) -> None:
    """Links everything that is no checkpoint file, and not yet in the new folder, from the old one."""
    for name in os.listdir(old):
        one, other = old / name, new / name
        if _CHECKPOINT_FILE.fullmatch(name) or os.path.lexists(other):
            continue
        if one.is_dir() and not one.is_symlink():
            shutil.copytree(one, other, symlinks=True, copy_function=_link)
        else:
            _link(one, other)


def _link(old: str | Path, new: str | Path) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copy2(old, new, follow_symlinks=False)


def _move_in(stage: Path, target: Path) -> None:
    """Moves the files one by one, config.json last: without it the folder is not a checkpoint."""
    moved: list[Path] = []
    names = sorted(os.listdir(stage), key=lambda name: name == "config.json")
    if there := [name for name in names if os.path.lexists(target / name)]:
        raise CheckpointError(
            f"{target} cannot be renamed, and {some(there)} in it cannot be replaced together with the other files: "
            "move it away, or save to a new folder"
        )
    try:
        for name in names:
            os.rename(stage / name, target / name)
            moved.append(target / name)
    except OSError:
        for path in moved:
            path.unlink(missing_ok=True)
        raise


def _exchange(one: Path, other: Path) -> None:
    """Swaps two folders in one system call, for which Python's library has no function."""
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
