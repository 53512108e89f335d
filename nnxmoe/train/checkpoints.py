"""Training checkpoints: Orbax's CheckpointManager with a lock that allows one writer per folder.

``step_12/arrays`` contains the arrays of step 12. ``step_12/run`` is a JSON object with the arrays'
shapes and dtypes and the caller's ``extra``. Orbax writes to ``step_12.orbax-checkpoint-tmp`` and
renames it, so a step is complete or absent.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, UInt32

from nnxmoe.config.arguments import reject_unknown_arguments
from nnxmoe.config.printable import short, some
from nnxmoe.config.validate import whole_number
from nnxmoe.convert.files.errors import CheckpointError, check_orbax_path, error_summary
from nnxmoe.convert.files.untrusted_files import absolute_path, read_object
from nnxmoe.convert.storage.multihost import broadcast_text
from nnxmoe.runtime.progress import logger

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

VERSION = 3
_ARRAYS, _RUN = "arrays", "run"
_MAX_EXTRA = 1_000_000  # bytes of JSON
_SHOWN = 40  # lines per error message
_STEPS = ocp.path.step.standard_name_format(step_prefix="step")
_OURS = re.compile(r"step_[0-9]+(\.orbax-checkpoint-tmp.*)?|\..*")


class Checkpoints:
    """Context manager that saves and restores the checkpoints of a training run in a folder.

    The first `save` locks the folder against other processes until `close`. Use one object per folder in a
    process. Reading needs no lock. In a multi-process run, every process must make the same calls, on a shared file
    system. Errors are CheckpointErrors, a subclass of ValueError.

    Args:
        folder: A new or empty folder, or a folder of earlier checkpoints.
        keep: Number of finished steps to retain.
        every: Interval in steps. Without ``force``, `save` writes only steps that are multiples of ``every``.
    """

    @reject_unknown_arguments
    def __init__(self, folder: str | os.PathLike[str], keep: int = 3, every: int = 100) -> None:
        self.folder = absolute_path(folder)
        self.keep, self.every = (whole_number(n, v, 1, 2**31) for n, v in (("keep", keep), ("every", every)))
        check_orbax_path(self.folder)
        self._manager: ocp.CheckpointManager | None = None
        self._lock: Any = None  # open lock file, in the first process only

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.nullcontext() if kind is None else contextlib.suppress(CheckpointError):
            self.close()

    def due(self, step: int) -> bool:
        """Check whether `save` writes this step without ``force``."""
        return step % self.every == 0

    def save(
        self, step: int, arrays: Mapping[str, Any], extra: Mapping[str, Any] | None = None, force: bool = False
    ) -> bool:
        """Start writing a step in the background, once the previous step is on disk.

        The arrays may be donated or deleted after the call. ``extra`` must consist of JSON values.
        Returns False without writing if the step is not `due` (unless ``force``) or is already saved.
        Raises CheckpointError if writing the previous step failed, or if a later step was saved.
        """
        step = whole_number("step", step, 0)
        if not (force or self.due(step)):
            return False
        leaves = named(arrays, "arrays to save")
        if not leaves:
            raise CheckpointError("arrays to save: the dict is empty")
        for name, leaf in leaves.items():
            if not isinstance(leaf, jax.Array) or leaf.is_deleted():
                raise CheckpointError(f"arrays to save: {name} has no values, because it is abstract or was donated")
        run = {"version": VERSION, "arrays": signature(leaves), "extra": plain(extra or {})}
        self.wait()
        with self._writing(step):
            manager = self._open()
            if (latest := manager.latest_step()) is not None and step <= latest:
                if step == latest:
                    return False
                raise CheckpointError(
                    f"{self.folder} contains step {latest}, which is later than step {step}: resume from it, or use "
                    "a different folder"
                )
            values = {name: leaf for name, leaf in leaves.items() if leaf.size}  # Orbax does not store empty arrays
            items = {_ARRAYS: ocp.args.StandardSave(values), _RUN: ocp.args.JsonSave(run)}
            manager.save(step, args=ocp.args.Composite(**items), force=True)
        return True

    def wait(self) -> None:
        """Block until the step being saved is on disk. Raises CheckpointError if writing failed."""
        if self._manager is not None:
            with self._writing(self._manager.latest_step()):
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the step being saved, then release the folder's lock."""
        try:
            self.wait()
        finally:
            self._release()

    def latest(self) -> int | None:
        """Return the newest finished step, or None if there is none."""
        return json.loads(broadcast_text(lambda: json.dumps(newest(self.folder))))

    def restore(self, step: int, like: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Restore the arrays of a finished step, bit for bit, and the step's ``extra``.

        ``like`` is a nested dict of jax.ShapeDtypeStruct or arrays with the saved structure. Its shardings
        may be on any mesh. An array without a sharding is placed on the first device. Raises a
        CheckpointError that lists up to 40 missing arrays, unexpected arrays, wrong shapes and wrong dtypes.
        """
        folder = self.folder / f"step_{step}"
        remedy = f"move {folder} away to resume from an earlier step"
        run = read_object(folder / _RUN / "metadata", remedy, CheckpointError, limit=1 << 30)
        if run.get("version") != VERSION:
            raise CheckpointError(
                f"{folder}: version {short(run.get('version'))} is not version {VERSION}. Continue the run with the "
                "nnxmoe release that started it, or start a new run in a new folder"
            )
        target = named(like, "like")
        if faults := differences(signature(target), run["arrays"]):
            raise CheckpointError(f"{folder} does not match the requested arrays:{faults}")
        device = SingleDeviceSharding(jax.local_devices()[0])
        specs = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding or device) for n, a in target.items()}
        restored = {name: jnp.zeros(a.shape, a.dtype, device=a.sharding) for name, a in specs.items() if not a.size}
        stored = {name: a for name, a in specs.items() if a.size}
        with (
            _failing(f"cannot read {folder}", remedy),
            ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader,
        ):
            restored |= reader.restore(folder / _ARRAYS, args=ocp.args.StandardRestore(stored)) if stored else {}
        if faults := differences(signature(target), signature(restored)):  # detects random keys whose metadata is lost
            raise CheckpointError(f"{folder} is damaged; {remedy}:{faults}")
        return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in target]), run["extra"]

    def _open(self) -> ocp.CheckpointManager:
        """Open Orbax's manager. Locks the folder and removes unfinished saves of killed processes."""
        if self._manager is None:
            broadcast_text(self._acquire)
            logging.getLogger("absl").addFilter(_without_traceback)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self.keep, step_name_format=_STEPS, cleanup_tmp_directories=True
            )
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        return self._manager

    def _acquire(self) -> str:
        """Lock the folder until release or process exit. Forked children do not inherit the lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if foreign := sorted(name for name in os.listdir(self.folder) if not _OURS.fullmatch(name)):
            raise CheckpointError(
                f"{self.folder} holds {some(foreign)}, which is not part of a training run: use a new or empty "
                "folder, or move these files away"
            )
        if self._lock is None:
            self._lock = open(self.folder / ".lock", "a")
        try:
            if fcntl is not None:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{self.folder} is locked by another process: stop that process, or use a different folder"
            ) from None
        except OSError as error:
            logger.warning("cannot lock %s (%s): make sure that no other run writes to it", self.folder, error)
        return ""

    def _release(self) -> None:
        manager, lock, self._manager, self._lock = self._manager, self._lock, None, None
        with contextlib.suppress(Exception):  # closing raises the error of a failed save again
            if manager is not None:
                manager.close()
        if lock is not None:
            lock.close()

    def _writing(self, step: int | None) -> contextlib.AbstractContextManager[None]:
        """Convert errors to CheckpointError and close the manager. The next manager removes partial output."""
        action = f"cannot write step {step} to {self.folder}"
        return _failing(action, "free disk space, or use a different folder", self._release)


def newest(folder: Path) -> int | None:
    """Return the newest finished step in a folder, as visible to this process."""
    return max((entry.step for entry in _STEPS.find_all(folder)), default=None)


@contextlib.contextmanager
def _failing(action: str, remedy: str, clean_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Convert any error to a CheckpointError, after ``clean_up``."""
    try:
        yield
    except Exception as error:
        clean_up()
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{action}: {error_summary(error)}; {remedy}") from error


def _without_traceback(record: logging.LogRecord) -> bool:
    """Remove the traceback from a log record of Orbax, because Orbax also raises the error."""
    if "orbax" in record.pathname:
        record.exc_info = None
    return True


def named(tree: Any, source: str) -> dict[str, Any]:
    """Flatten ``{"a": {"b": x}}`` to ``{"a/b": x}``. Leaves must be jax arrays or ShapeDtypeStructs."""
    arrays: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{source}: {name or 'the value'} is a {type(leaf).__name__}. Pass dicts of JAX arrays"
            )
        if name in arrays:
            raise CheckpointError(f"{source}: two arrays have the name {short(name)}. Use keys without '/'")
        arrays[name] = leaf
    return arrays


def signature(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Return the shape and dtype of each array as text."""
    return {name: f"{list(array.shape)} {array.dtype}" for name, array in arrays.items()}


def differences(expected: Mapping[str, str], actual: Mapping[str, str]) -> str:
    """Describe each array that is missing, unexpected, or of a different shape or dtype, one per line."""
    lines = []
    for name in sorted(expected.keys() | actual.keys()):
        target, stored = expected.get(name), actual.get(name)
        if stored is None:
            lines.append(f"\n  {name} {target} is missing")
        elif target is None:
            lines.append(f"\n  {name} {stored} is unexpected")
        elif target != stored:
            lines.append(f"\n  {name} is {stored}, not {target}")
    return "".join(lines[:_SHOWN]) + (f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")


def plain(extra: Mapping[str, Any], what: str = "extra") -> dict[str, Any]:
    """Round-trip ``extra`` through JSON.

    Raises CheckpointError, with ``what`` in the message, if ``extra`` cannot be stored as JSON, if the
    result differs from ``extra``, or if the JSON text is too long.
    """
    values = dict(extra)
    try:
        text = json.dumps(values, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}={short(values)} cannot be stored as JSON: {error}") from None
    if json.loads(text) != values:
        raise CheckpointError(
            f"{what}={short(values)} is not preserved by JSON: use str keys, and lists instead of tuples"
        )
    if len(text) > _MAX_EXTRA:
        raise CheckpointError(
            f"{what} has {len(text)} bytes as JSON, more than {_MAX_EXTRA}: save large values as arrays"
        )
    return json.loads(text)


def fingerprint(arrays: Mapping[str, Array]) -> str | None:
    """Return a digest of the arrays' names and bits that does not depend on the mesh, or None without arrays."""
    if not arrays:
        return None
    sums = jax.device_get(_sums(dict(arrays)))
    lines = [f"{name} {arrays[name].shape} {arrays[name].dtype} {int(sums[name])}" for name in sorted(arrays)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _sum(array: Array) -> UInt32[Array, ""]:
    """Sum the bits, weighted by position. The sum is exact, so shards may be added in any order."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    size = min(array.dtype.itemsize, 4)
    array = array.astype(np.uint8) if array.dtype == bool else array
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * size}").astype(jnp.uint32)
    weights = jnp.uint32(1)
    for axis in range(bits.ndim):  # computing flat indices would gather the shards
        weights = weights * jnp.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.sum(bits * (2 * weights + 1), dtype=jnp.uint32)


_sums = jax.jit(lambda arrays: jax.tree.map(_sum, arrays))
