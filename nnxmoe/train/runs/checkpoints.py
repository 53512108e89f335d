"""Checkpoints of a training run: every few steps, in the background, whole or not at all, the last few kept.

They hold a nested dict of jax arrays and a small dict of plain values, and know nothing of models or optimizers. Orbax
keeps the arrays; ``step.json`` beside them (see ``step_folder``) makes a step a finished one.
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
from nnxmoe.train.runs.lock import claim, release, remove_unfinished, tidy
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
    """The checkpoints in a folder: ``save`` every so many steps, ``restore`` the ``latest``; a context manager.

    ``keep``: how many finished steps remain; ``every``: ``save`` acts on multiples of this step. The folder has to be
    new, empty, or one that this class made; the first save takes it for this run alone, reading takes nothing. With
    several processes all of them make the same calls, on a file system that they share. Errors are CheckpointErrors
    (ValueErrors).
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3, every: int = 1) -> None:
        for name, value in (("keep", keep), ("every", every)):
            if not is_positive(value):
                raise ValueError(f"{name}={value!r}: give a whole number from 1")
        self.folder, self.keep, self.every = absolute(folder), keep, every
        check_orbax_path(self.folder)
        self._manager: ocp.CheckpointManager | None = None
        self._claimed = False
        self._lock: int | None = None  # held by the first process
        self._last: int | None = None  # the newest step in the folder, perhaps still being written
        self._before: Signature | None = None  # what steps here hold
        self._writing: tuple[int, Signature, dict[str, str], dict[str, Any]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.nullcontext() if kind is None else contextlib.suppress(CheckpointError):
            self.close()

    def due(self, step: int) -> bool:
        """Whether `save` acts on this step."""
        return step % self.every == 0

    def save(
        self, step: int, arrays: Mapping[str, Any], extra: Mapping[str, Any] | None = None, force: bool = False
    ) -> bool:
        """Begin to write a step, once the one before is written; whether it did: not where the step is not `due`
        (``force``: still), or is there already.

        The arrays may be donated or deleted when this returns. ``extra`` is what JSON can hold. Raises for what went
        wrong with the step before; for arrays other than those of the steps before; for steps out of order.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step={step!r}: give a whole number from 0")
        if not (force or self.due(step)):
            return False
        extra = plain(extra or {})
        leaves = flat(arrays, "arrays to save")
        self.wait()
        manager = self._writer()
        if step == self._last:
            return False
        self._check(step, leaves)
        found = signature(leaves)
        keys = {name: str(jax.random.key_impl(leaf)) for name, leaf in leaves.items() if is_key(leaf)}
        values = {name: jax.random.key_data(leaf) if name in keys else leaf for name, leaf in leaves.items()}
        values = {name: value for name, value in values.items() if value.size}  # Orbax keeps no empty ones
        self._writing = step, found, keys, extra
        with self._failing(step):
            manager.save(step, args=ocp.args.Composite(**{ARRAYS: ocp.args.StandardSave(values)}), force=True)
        self._last, self._before = step, found
        return True

    def wait(self) -> None:
        """Until what `save` began is on the disk; raises where it could not be written."""
        if self._manager is not None:
            with self._failing(self._last):
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and leave the folder to others."""
        try:
            self.wait()
        finally:
            self._let_go()
            if self._lock is not None:
                release(self._lock)
            self._claimed, self._lock = False, None

    def latest(self) -> int | None:
        """The newest finished step. One that is not whole is passed over, which is told."""
        with deadline("waiting for the first process to look for checkpoints"):
            text = self._shared(lambda: json.dumps(next(finished(self.folder), None)))
        return json.loads(text)

    def restore(self, step: int, like: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arrays of a finished step, bit for bit, and its extra.

        ``like``: nested dicts of jax.ShapeDtypeStruct, or of arrays, as saved; each array is placed as the sharding
        there says, on whatever mesh (without one: on the first device). Raises one error that lists every array that
        is missing, too much, or of another shape or dtype.
        """
        where = self.folder / str(step)
        manifest = read_manifest(where, step)
        wanted = flat(like, "like")
        if lines := differences(signature(wanted), manifest.signature):
            raise CheckpointError(listed(f"{where} does not hold what is asked for", lines))
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

    def _writer(self) -> ocp.CheckpointManager:
        """What writes, from the first save on."""
        if not self._claimed:
            with deadline("waiting for the first process to open the folder of checkpoints"):
                self._shared(self._claim)
            self._claimed = True
            self._look()
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self.keep,
                async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
            )
            with self._failing(None):
                logging.getLogger("absl").addFilter(_told)
                self._manager = ocp.CheckpointManager(self.folder, options=options)
        return self._manager

    def _look(self) -> None:
        """What the folder holds, as far as a save has to know."""
        self._last = next(finished(self.folder), None)
        self._before = (
            None if self._last is None else read_manifest(self.folder / str(self._last), self._last).signature
        )

    def _claim(self) -> str:
        lock = claim(self.folder)
        try:
            with failing(f"cannot write to {self.folder}", _ROOM):
                tidy(self.folder, self.keep)
        except BaseException:
            release(lock)
            raise
        self._lock = lock
        return ""

    def _check(self, step: int, leaves: Mapping[str, Any]) -> None:
        """What may be saved: later than before, of the same arrays as before, with values."""
        if self._last is not None and step < self._last:
            raise CheckpointError(
                f"{self.folder} holds step {self._last}, and step {step} comes before it: resume from there, or give "
                "another folder"
            )
        if not leaves:
            raise CheckpointError("arrays to save: there are none")
        for name, leaf in leaves.items():
            if not isinstance(leaf, jax.Array) or leaf.is_deleted():
                raise CheckpointError(f"arrays to save: {name} has no values (only a shape, or it was donated)")
            if jax.process_count() > 1 and not spans_hosts(leaf):
                raise CheckpointError(
                    f"arrays to save: {name} lies on devices of this process only: place it on the mesh of all, "
                    "with jax.make_array_from_callback or as a result of jax.jit"
                )
        if self._before is not None and (lines := differences(self._before, signature(leaves))):
            raise CheckpointError(
                listed(f"step {step} is not saved: {self.folder} has steps with other arrays, and this one", lines)
            )

    def _seal(self) -> None:
        """Called by Orbax when everything is written, before the folder gets its name."""
        assert self._writing is not None
        step, found, keys, extra = self._writing
        (stage,) = self.folder.glob(f"{step}.orbax-checkpoint-tmp*")
        write_manifest(stage, step, found, keys, extra)

    def _check_contents(self, step: int, files: Mapping[str, list[int]]) -> None:
        """Each process reads its share of the files; damage is an error of all."""
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
        """After an error what was written is removed; the next save starts anew, as Orbax's list of steps is wrong."""
        try:
            what = "" if step is None else f"step {step} "
            with failing(f"cannot write {what}to {self.folder}", _ROOM):
                yield
        except CheckpointError:
            self._let_go()
            remove_unfinished(self.folder, pause=0.5)
            self._look()
            raise

    def _let_go(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            with contextlib.suppress(Exception):
                manager.close()

    @staticmethod
    def _shared(make: Callable[[], str]) -> str:
        """What the first process makes, for all."""
        return from_first(make) if jax.process_count() > 1 else make()


class _Told(logging.Filter):
    """Orbax logs a traceback of every error that it raises as well; ours says the same in a line."""

    _OF = ("raised an exception", "Handler Commit operations", "Save Finalize thread")

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(part in str(record.msg) for part in self._OF)


_told = _Told()
