"""Write a folder atomically, so that it appears complete or not at all. All checkpoints are written this way."""

import contextlib
import filecmp
import fnmatch
import glob
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from nnxmoe.config.printable import some
from nnxmoe.config.validate import path_text
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.hub import CODE_FILES, TOKENIZER_FILES
from nnxmoe.convert.files.untrusted_files import absolute_path, is_gguf, refuse_url
from nnxmoe.convert.storage.find_checkpoint import NATIVE_FILE, holds_orbax
from nnxmoe.runtime.progress import logger

# Names of the checkpoint files that saving replaces.
MODEL_FILES = re.compile(
    r"(generation_)?config\.json|model\.safetensors(\.index\.json)?|model-[0-9]+-of-[0-9]+\.safetensors"
)
ADAPTER_FILES = re.compile(r"adapter_(config\.json|model\.(safetensors|bin))")


@contextlib.contextmanager
def atomic_dir(
    folder: str | os.PathLike[str], overwrite: bool | None = None, replaced: re.Pattern[str] = MODEL_FILES
) -> Iterator[Path]:
    """Yield a hidden folder to write a checkpoint into, and rename it to ``folder`` on exit.

    Until exit, and after an error, ``folder`` is unchanged. If ``folder`` itself cannot be renamed, for example because
    it is a mount point, the files are moved into it one by one. A killed process leaves a hidden folder behind. Hidden
    folders that end in ``.tmp`` may be deleted. Hidden folders that end in ``.old`` contain files of the replaced
    folder that were not moved yet.

    Args:
        folder: New or empty folder, unless ``overwrite`` is True.
        overwrite: Whether to replace a checkpoint in the folder. Other files remain, unless the new checkpoint has a
            file with the same name. One warning lists the remaining files if a checkpoint was replaced or if tokenizer
            or code files remain. `None` is like False, but the error message does not mention ``overwrite``.
        replaced: Pattern of the file names that are replaced.

    Raises:
        CheckpointError: If the folder cannot be written or replaced.
    """
    target = _target(folder)
    existing_names = _present(target, overwrite, replaced)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if stale_folders := [path.name for path in target.parent.glob(f".{glob.escape(target.name[:50])}.*-*.*")]:
            logger.warning(
                "%s contains folders of running or interrupted saves: %s", target.parent, some(stale_folders)
            )
        rename_obstacle = os.path.isdir(target) and _must_stay(target)
        if rename_obstacle and any(map(replaced.fullmatch, existing_names)):
            raise CheckpointError(f"{target} cannot be replaced atomically: {rename_obstacle}; save to a new folder")
        name = f".{target.name[:50]}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        stage = (target if rename_obstacle else target.parent) / name
        stage.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot write to {target}: {error}; nothing was changed") from error
    old_folder, state = stage.with_suffix(".old"), "it is unchanged"
    try:
        yield stage
        _sync_folder(stage)
        remaining_names, replaced_names = existing_names, list[str]()
        if rename_obstacle:
            _move_in(stage, target)
        elif existing_names:
            _replace(stage, target, old_folder)
            state = f"it was replaced, and its other files are in {old_folder}"
            other_names = [name for name in existing_names if not replaced.fullmatch(name)]
            replaced_names = [name for name in other_names if _differs(old_folder / name, target / name)]
            remaining_names = _carry_over(old_folder, target, replaced)
        else:
            os.rename(stage, target)
        if replaced_names:
            logger.warning("%s: files of the saved model replace %s", target, some(replaced_names, 10))
        _warn_of_kept(remaining_names, target, replaced, replaces=any(map(replaced.fullmatch, existing_names)))
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint to {target}: {error}; {state}") from error
    finally:
        _remove(stage)  # The save has failed, or `_move_in` has emptied the folder.
    with contextlib.suppress(OSError):  # Some file systems cannot sync folders.
        _sync_folder(target.parent)


def _remove(folder: Path) -> None:
    """Delete a folder. After an error, delete it twice, because writer threads may still create files in it."""
    shutil.rmtree(folder, ignore_errors=True)
    if sys.exc_info()[0] is not None:
        time.sleep(0.2)
        shutil.rmtree(folder, ignore_errors=True)


def refuse_unless_empty(folder: str | os.PathLike[str]) -> None:
    """Raise CheckpointError unless ``folder`` is new or empty."""
    _present(_target(folder), overwrite=None)


def refuse_unless_writable(folder: str | os.PathLike[str]) -> None:
    """Raise CheckpointError unless files can be written to ``folder``. The folder need not exist.

    Creates a test file and missing folders, and removes them again.
    """
    target = ancestor = _target(folder)
    path = absolute_path(folder)
    missing_folders: list[Path] = []
    while not os.path.lexists(ancestor):
        missing_folders.append(ancestor)
        ancestor = ancestor.parent
    try:
        for part in (path, *path.parents):
            if part.is_symlink() and not part.exists():
                link = f"{part} is a link to {os.path.realpath(part)}, which does not exist"
                raise CheckpointError(f"cannot write to {path}: {link}; create that folder")
        target.mkdir(parents=True, exist_ok=True)
        probe = target / f".{os.getpid()}-{secrets.token_hex(4)}.tmp"
        probe.write_bytes(b"\0")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(f"cannot write to {target}: {error.strerror or error}; use another folder") from error
    finally:
        for path in missing_folders:
            with contextlib.suppress(OSError):  # the folder was not created, or another process has written to it
                path.rmdir()


def _target(folder: str | os.PathLike[str]) -> Path:
    name = path_text(folder, CheckpointError)
    refuse_url(name, CheckpointError)
    return Path(os.path.realpath(os.path.expanduser(name)))


def _present(target: Path, overwrite: bool | None, replaced: re.Pattern[str] = MODEL_FILES) -> list[str]:
    """Return the file names in the target folder. Raises CheckpointError if the folder must not be written to."""
    if not os.path.lexists(target):
        return []
    if not os.path.isdir(target):
        raise CheckpointError(f"{target} is not a folder: save to a new folder")
    try:
        names = sorted(os.listdir(target))
    except OSError as error:
        raise CheckpointError(f"{target}: {error.strerror or error}; save to another folder") from error
    if names and not overwrite:
        hint = "" if overwrite is None else ", or pass overwrite=True to replace the checkpoint in it"
        raise CheckpointError(f"{target} is not an empty folder, it contains {some(names)}: save to a new folder{hint}")
    if NATIVE_FILE in names or (names and holds_orbax(target)):
        raise CheckpointError(
            f"{target} contains an Orbax checkpoint, which would remain next to the new one: save to a new folder"
        )
    _refuse_both(target, names, replaced)
    checkpoint_names = [name for name in names if replaced.fullmatch(name)]
    if links := [name for name in checkpoint_names if (target / name).is_symlink()]:
        raise CheckpointError(f"{target}: {some(links)} is a symlink, as in the hub's cache: save to a new folder")
    if folders := [name for name in checkpoint_names if (target / name).is_dir()]:
        raise CheckpointError(
            f"{target}: {some(folders)} is a folder, but a checkpoint has a file with this name: move the folder"
        )
    return names


def _refuse_both(target: Path, names: list[str], replaced: re.Pattern[str]) -> None:
    """Raise CheckpointError if the folder would contain both a model and an adapter.

    Some programs would then read the model and some the adapter.
    """
    content, pattern = ("an adapter", ADAPTER_FILES) if replaced is MODEL_FILES else ("a model", MODEL_FILES)
    if conflicts := [name for name in names if pattern.fullmatch(name)]:
        raise CheckpointError(
            f"{target} contains {content} ({some(conflicts)}), which some programs would read instead of the saved "
            "files: save to a new folder"
        )


def _must_stay(target: Path) -> str | None:
    """Return the reason why a folder cannot be renamed. `None` if it can be renamed."""
    if os.path.ismount(target):
        return "it is a mount point"
    if not os.access(target.parent, os.W_OK):
        return f"{target.parent} is not writable"
    with contextlib.suppress(OSError):
        if Path(os.getcwd()).is_relative_to(target):
            return "it is the current working directory of this process"
    return None


def _replace(stage: Path, target: Path, old_folder: Path) -> None:
    """Swap the folders by renaming. The new folder gets the mode and, if permitted, the owner of the old folder."""
    shutil.copymode(target, stage)
    with contextlib.suppress(PermissionError):
        os.chown(stage, target.stat().st_uid, target.stat().st_gid)
    os.rename(target, old_folder)
    try:
        os.rename(stage, target)
    except BaseException:
        os.rename(old_folder, target)
        raise


def _carry_over(old_folder: Path, new_folder: Path, replaced: re.Pattern[str] = MODEL_FILES) -> list[str]:
    """Move the other files of the old folder to the new folder, delete the old folder and return the moved names.

    A file is not moved if its name matches ``replaced`` or exists in the new folder.
    """
    moved_names = [
        name
        for name in os.listdir(old_folder)
        if not replaced.fullmatch(name) and not os.path.lexists(new_folder / name)
    ]
    for name in moved_names:
        os.rename(old_folder / name, new_folder / name)
    _remove(old_folder)
    return moved_names


def _differs(old_path: Path, new_path: Path) -> bool:
    """Return whether both paths exist and differ. Folders always count as different."""
    exist = os.path.lexists(old_path) and os.path.lexists(new_path)
    return exist and not (old_path.is_file() and new_path.is_file() and filecmp.cmp(old_path, new_path, shallow=False))


def _warn_of_kept(names: list[str], target: Path, replaced: re.Pattern[str], *, replaces: bool) -> None:
    """Log one warning about remaining files, if a checkpoint was replaced or if GGUF, tokenizer or code files remain.

    Tokenizer and code files that remain are loaded with the new model.
    """
    patterns = [pattern.split("/")[0] for pattern in TOKENIZER_FILES + CODE_FILES] if replaced is MODEL_FILES else []
    loaded = sorted(name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
    hint = f". {some(loaded)} will be loaded with the new model: delete the files that belong to the old model"
    if names and (replaces or loaded or any(is_gguf(target / name) for name in names)):
        listed = f"{some(sorted(names), 10)}{hint if loaded else ''}"
        logger.warning("%s: files already in the folder are kept: %s", target, listed)


def _move_in(stage: Path, target: Path) -> None:
    """Move the files one by one, config.json last, because a folder without config.json is not a checkpoint."""
    moved_paths: list[Path] = []
    names = sorted(os.listdir(stage), key=lambda name: name == "config.json")
    if conflicts := [name for name in names if os.path.lexists(target / name)]:
        raise CheckpointError(
            f"{target} cannot be renamed, and {some(conflicts)} in it cannot be replaced together with the other "
            "files: move the existing files, or save to a new folder"
        )
    try:
        for name in names:
            moved_paths.append(target / name)
            os.rename(stage / name, target / name)
    except BaseException:
        for path in moved_paths:
            path.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
