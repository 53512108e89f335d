"""Checkpoints of a training run: written in the background, complete or absent, with the last few kept.

They hold a nested dict of jax arrays and a small dict of JSON values, and are independent of models and optimizers.
Orbax stores the arrays; a step is finished once ``step.json`` (see ``step_folder``) is beside them.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from nnxmoe.config.validate import is_positive
from nnxmoe.runtime.processes import deadline
from nnxmoe.storage.errors import CheckpointError, check_orbax_path
from nnxmoe.storage.files import absolute
from nnxmoe.storage.multihost import from_first, raise_in_all, spans_hosts
from nnxmoe.train.runs.lock import lock, release, remove_unfinished, tidy
from nnxmoe.train.runs.named_arrays import (
    Signature,
    differences,
    empty,
    failing,
    flat,
    is_key,
    listed,
    nested_as,
    plain,
    signature,
    stored,
)
from nnxmoe.train.runs.step_folder import ARRAYS, check_contents, finished, read_manifest, write_manifest

_ROOM = "make room, or choose another folder"


class Checkpoints:
    """The checkpoints in a folder, as a context manager: ``save`` steps, ``restore`` the ``latest`` one.

    ``keep`` is the number of finished steps that remain; ``save`` acts on multiples of ``every``. The folder must be
    new, empty, or made by this class. The first save locks it until `close`; reading takes no lock. With several
    processes, all make the same calls on a shared file system. Errors are CheckpointErrors, which are ValueErrors.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3, every: int = 1) -> None:
        for name, value in (("keep", keep), ("every", every)):
            if not is_positive(value):
                raise ValueError(f"{name}={value!r}: pass an int of at least 1")
        self.folder, self.keep, self.every = absolute(folder), keep, every
        check_orbax_path(self.folder)
        self._manager: ocp.CheckpointManager | None = None
        self._owned = False
        self._lock: int | None = None  # the lock's descriptor, in the first process
        self._last: int | None = None  # the newest step, which may still be written
        self._before: Signature | None = None  # the arrays of earlier steps
        self._writing: tuple[int, Signature, dict[str, str], dict[str, Any]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.nullcontext() if kind is None else contextlib.suppress(CheckpointError):
            self.close()

    def due(self, step: int) -> bool:
        """Whether `save` acts on this step without ``force``."""
        return step % self.every == 0

    def save(
        self, step: int, arrays: Mapping[str, Any], extra: Mapping[str, Any] | None = None, force: bool = False
    ) -> bool:
        """Start writing a step in the background, after waiting for the previous one.

        Returns False without writing if the step is not `due` (unless ``force``) or was saved already. The arrays may
        be donated or deleted when this returns. ``extra`` must consist of JSON values. Raises CheckpointError if the
        previous step could not be written, if the arrays differ from those of earlier steps, or if the step is lower.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step={step!r}: pass an int of at least 0")
        if not (force or self.due(step)):
            return False
        extra = plain(extra or {})
        leaves = flat(arrays, "arrays to save")
        self.wait()
        manager = self._open_manager()
        if step == self._last:
            return False
        self._check(step, leaves)
        found = signature(leaves)
        keys = {name: str(jax.random.key_impl(leaf)) for name, leaf in leaves.items() if is_key(leaf)}
        values = {name: jax.random.key_data(leaf) if name in keys else leaf for name, leaf in leaves.items()}
        values = {name: value for name, value in values.items() if value.size}  # Orbax stores no empty arrays
        self._writing = step, found, keys, extra
        with self._failing(step):
            manager.save(step, args=ocp.args.Composite(**{ARRAYS: ocp.args.StandardSave(values)}), force=True)
        self._last, self._before = step, found
        return True

    def wait(self) -> None:
        """Block until the step being saved is on disk. Raises CheckpointError if it could not be written."""
        if self._manager is not None:
            with self._failing(self._last):
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the step being saved, then release the folder's lock."""
        try:
            self.wait()
        finally:
            self._close_manager()
            if self._lock is not None:
                release(self._lock)
            self._owned, self._lock = False, None

    def latest(self) -> int | None:
        """The newest finished step, or None. Incomplete steps are skipped with a warning."""
        with deadline("waiting for the first process to look for checkpoints"):
            text = self._from_first(lambda: json.dumps(next(finished(self.folder), None)))
        return json.loads(text)

    def restore(self, step: int, like: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arrays of a finished step, bit for bit, and its ``extra``.

        ``like`` is a nested dict of jax.ShapeDtypeStruct or arrays, structured as it was saved. Each array gets the
        sharding given there, on any mesh; without one it is placed on the first device. Raises one CheckpointError
        that lists every array that is missing, unexpected, or of another shape or dtype.
        """
        where = self.folder / str(step)
        manifest = read_manifest(where, step)
        wanted = flat(like, "like")
        if lines := differences(signature(wanted), manifest.signature):
            raise CheckpointError(listed(f"{where} does not match the requested arrays", lines))
        self._check_contents(step, manifest.files)
        places = {name: leaf.sharding or SingleDeviceSharding(jax.local_devices()[0]) for name, leaf in wanted.items()}
        specs = {name: stored(leaf, places[name]) for name, leaf in wanted.items() if leaf.size}
        with (
            failing(f"cannot read {where}", "restore another step"),
            ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader,
        ):
            found = dict(reader.restore(where / ARRAYS, args=ocp.args.StandardRestore(specs))) if specs else {}
        for name, kind in manifest.keys.items():
            if name in found:
                found[name] = jax.random.wrap_key_data(found[name], impl=kind)
        found |= {name: empty(leaf, places[name]) for name, leaf in wanted.items() if not leaf.size}
        return nested_as(like, found), manifest.extra

    def _open_manager(self) -> ocp.CheckpointManager:
        """Orbax's manager of the folder, which the first call locks and cleans up."""
        if not self._owned:
            with deadline("waiting for the first process to open the folder of checkpoints"):
                self._from_first(self._acquire)
            self._owned = True
            self._read_latest()
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self.keep,
                async_options=ocp.options.AsyncOptions(post_finalization_callback=self._finalize),
            )
            with self._failing(None):
                logging.getLogger("absl").addFilter(_quiet)
                self._manager = ocp.CheckpointManager(self.folder, options=options)
        return self._manager

    def _read_latest(self) -> None:
        """Sets the newest step and its arrays' signature from the folder."""
        self._last = next(finished(self.folder), None)
        self._before = (
            None if self._last is None else read_manifest(self.folder / str(self._last), self._last).signature
        )

    def _acquire(self) -> str:
        descriptor = lock(self.folder)
        try:
            with failing(f"cannot write to {self.folder}", _ROOM):
                tidy(self.folder, self.keep)
        except BaseException:
            release(descriptor)
            raise
        self._lock = descriptor
        return ""

    def _check(self, step: int, leaves: Mapping[str, Any]) -> None:
        """Raises CheckpointError for a lower step, for arrays without values and for other arrays than before."""
        if self._last is not None and step < self._last:
            raise CheckpointError(
                f"{self.folder} holds step {self._last}, which is later than step {step}: resume from it, or use "
                "another folder"
            )
        if not leaves:
            raise CheckpointError("arrays to save: the dict is empty")
        for name, leaf in leaves.items():
            if not isinstance(leaf, jax.Array) or leaf.is_deleted():
                raise CheckpointError(f"arrays to save: {name} has no values: it is a shape, or was donated")
            if jax.process_count() > 1 and not spans_hosts(leaf):
                raise CheckpointError(
                    f"arrays to save: {name} is on devices of this process only: place it on the mesh of all processes "
                    "with jax.make_array_from_callback or jax.jit"
                )
        if self._before is not None and (lines := differences(self._before, signature(leaves))):
            raise CheckpointError(
                listed(
                    f"step {step} is not saved: its arrays differ from those of earlier steps in {self.folder}", lines
                )
            )

    def _finalize(self) -> None:
        """Writes the manifest. Orbax calls it once all arrays are written, before it renames the folder."""
        assert self._writing is not None
        step, found, keys, extra = self._writing
        (stage,) = self.folder.glob(f"{step}.orbax-checkpoint-tmp*")
        write_manifest(stage, step, found, keys, extra)

    def _check_contents(self, step: int, files: Mapping[str, list[int]]) -> None:
        """Verifies checksums, each process those of its share of the files. Damage raises in every process."""
        share = dict(list(files.items())[jax.process_index() :: jax.process_count()])
        failure: Exception | None = None
        try:
            check_contents(self.folder / str(step), share)
        except (CheckpointError, OSError) as error:
            failure = error
        if jax.process_count() > 1:
            raise_in_all(failure)
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def _failing(self, step: int | None) -> Iterator[None]:
        """Turns errors into CheckpointError, after removing what was written. The manager is closed too, since its
        list of steps is wrong by then; the next save opens another."""
        try:
            what = "" if step is None else f"step {step} "
            with failing(f"cannot write {what}to {self.folder}", _ROOM):
                yield
        except CheckpointError:
            self._close_manager()
            remove_unfinished(self.folder, pause=0.5)
            self._read_latest()
            raise

    def _close_manager(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            with contextlib.suppress(Exception):
                manager.close()

    @staticmethod
    def _from_first(make: Callable[[], str]) -> str:
        """The result of ``make`` in the first process, for every process."""
        return from_first(make) if jax.process_count() > 1 else make()


class _OrbaxTracebacks(logging.Filter):
    """Suppresses the tracebacks that Orbax logs for errors that it also raises; ours say the same in one line."""

    _OF = ("raised an exception", "Handler Commit operations", "Save Finalize thread")

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(part in str(record.msg) for part in self._OF)


_quiet = _OrbaxTracebacks()
