"""The lock on a folder of checkpoints, for one run at a time, and the removal of what killed runs left there."""

import json
import os
import re
import shutil
import time
from pathlib import Path

from nnxmoe.config.printable import some
from nnxmoe.runtime.progress import logger
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.train.runs.step_folder import MARKER, VERSION, finished, steps_in

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_OURS = re.compile(r"(0|[1-9][0-9]*)(\.orbax-checkpoint-tmp.*|\.damaged(-[0-9]+)?)?")


_held: set[int] = set()


def lock(folder: Path) -> int:
    """Lock a folder for writing until the returned descriptor is released.

    Raises CheckpointError if the folder holds other files, or another run holds the lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = [name for name in os.listdir(folder) if not name.startswith(".")]
        own = [name for name in names if _OURS.fullmatch(name) and (folder / name).is_dir()]
        others = [name for name in names if name != MARKER and (name not in own or (folder / name).is_symlink())]
        if others or (own and MARKER not in names):
            raise CheckpointError(
                f"{folder} holds {some(sorted(others or own))}, which is not from a run with checkpoints: use a new or "
                "empty folder, or move it away"
            )
        descriptor = os.open(folder / MARKER, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _flock(descriptor, folder)
            if os.fstat(descriptor).st_size == 0:
                os.write(descriptor, json.dumps({"version": VERSION}).encode() + b"\n")
            _held.add(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error}; make room, or choose another folder") from error
    return descriptor


def release(descriptor: int) -> None:
    """Release a folder's lock."""
    _held.discard(descriptor)
    os.close(descriptor)


def _release_in_child() -> None:
    """Closes the inherited descriptors, so that a forked worker that outlives its parent holds no lock."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


def _flock(descriptor: int, folder: Path) -> None:
    """Takes a lock that the system releases when the process ends, even if it is killed."""
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"{folder} is locked by another process, or by another Checkpoints in this one: end it, or use another "
            "folder"
        ) from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s): make sure that no other run saves there", folder, error)


def tidy(folder: Path, keep: int) -> None:
    """Removes unfinished saves and half-deleted steps of killed processes. Damaged steps are renamed and kept."""
    remove_unfinished(folder)
    whole = set(finished(folder))
    for step in steps_in(folder):
        path = folder / str(step)
        if step in whole:
            continue
        if sum(other > step for other in whole) >= keep:
            shutil.rmtree(path)
        else:
            aside = next(name for i in range(10**6) if not (name := _damaged_name(path, i)).exists())
            path.rename(aside)
            logger.warning("%s is damaged and was renamed to %s: inspect or delete it", path, aside.name)


def remove_unfinished(folder: Path, pause: float = 0) -> None:
    """Removes unfinished saves; again after ``pause`` seconds, as threads of a failed save may still create files."""
    for seconds in (0, pause) if pause else (0,):
        time.sleep(seconds)
        for path in folder.glob("*.orbax-checkpoint-tmp*"):
            if _OURS.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def _damaged_name(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.damaged" + (f"-{number}" if number else ""))
