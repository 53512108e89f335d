"""Orbax checkpoints as the layouts here need them: arrays are made, written and read one at a time."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.sharding import NamedSharding
from orbax.checkpoint import type_handlers

from nnxmoe.convert.leaves import Later
from nnxmoe.runtime.memory import give_back
from nnxmoe.storage.errors import CheckpointError

_CHUNK_BYTES = 64 << 20  # what is compressed, or read, at a time


@dataclasses.dataclass(frozen=True)
class _Spread:
    """A `Later` whose array lies on the devices of several processes."""

    later: Later


class _Writer:
    """Makes an array when its turn comes, and lets go of it once it is on the disk.

    An error is kept for the end: the other processes would wait for this one.
    """

    def __init__(self, bar: Any, **options: Any):
        super().__init__(**options)
        self.bar = bar
        self.failure: BaseException | None = None

    async def serialize(self, values: Sequence[Any], infos: Any, args: Any = None) -> list[Any]:
        args = args or [ocp.SaveArgs()] * len(values)
        for value, info, arg in zip(values, infos, args, strict=True):
            value = value.later.make(None) if isinstance(value, _Spread) else value  # all processes together
            if self.failure is None:
                try:
                    for written in await super().serialize([value], [info], [arg]):  # pyright: ignore
                        written.result()
                except Exception as error:
                    self.failure = error
            self.bar.update(value.nbytes)
            del value
            give_back()
        return []


class _HostWriter(_Writer, type_handlers.NumpyHandler):
    def __init__(self, bar: Any):
        super().__init__(bar, deepcopy_host_arrays=False)
        self._busy = threading.Lock()

    def stop(self, failure: BaseException) -> None:
        """Write nothing more; returns when the thread that writes is done."""
        self.failure = failure
        with self._busy:
            return

    async def _open_and_write(self, value: Later, tspec: Any, ts_context: Any) -> None:
        """Some rows at a time: Orbax would ask for the whole array, and keep all of it compressed as well."""
        with self._busy:
            try:
                if self.failure is None:
                    await self._write(value, tspec, ts_context)
            except Exception as error:
                self.failure = error

    async def _write(self, value: Later, tspec: Any, ts_context: Any) -> None:
        store = await tensorstore.open(tensorstore.Spec(tspec), create=True, open=True, context=ts_context)
        chunk: Any = store.chunk_layout.write_chunk.shape
        for start in range(0, value.shape[0], chunk[0]):
            if self.failure is not None:
                return
            rows = slice(start, start + chunk[0])
            await store[rows].write(value.rows(rows), can_reference_source_data_indefinitely=True)


class _SpreadWriter(_Writer, type_handlers.ArrayHandler):
    """Each process writes what its devices hold."""


def handler(*kinds: tuple[type, Any]) -> Any:
    """Orbax's handler of trees in the form that MaxText's converter writes, with what else is done to some leaves."""
    usual = [(int, type_handlers.ScalarHandler()), (jax.Array, type_handlers.ArrayHandler())]
    registry = type_handlers.create_type_handler_registry(*usual, *kinds)
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, type_handler_registry=registry)


@contextlib.contextmanager
def _writer(folder: Path, bar: Any) -> Iterator[Any]:
    """A handler that writes; at the end CheckpointError where it could not."""
    check_name(folder)
    writers = _HostWriter(bar), _SpreadWriter(bar, enable_write_sharding_file=False)
    failure: BaseException | None = None
    try:
        yield handler((Later, writers[0]), (_Spread, writers[1]))
    except (OSError, ValueError, RuntimeError) as error:  # perhaps for want of what could not be written
        failure = error
    except BaseException as error:
        writers[0].stop(error)
        raise
    if failure := writers[0].failure or writers[1].failure or failure:
        raise CheckpointError(f"cannot write: {gist(failure)}; make room, or choose another folder") from failure


def gist(error: BaseException) -> str:
    """The beginning and the end of what may be long."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) < 400 else f"{text[:150]} … {text[-200:]}"


def check_name(folder: Path) -> None:
    """The library below cannot name every file that Python can."""
    if "\\" in str(folder) or not str(folder).isprintable():
        raise CheckpointError(
            f"{str(folder)!a}: Orbax cannot use paths with backslashes or control characters: rename it"
        )


def write(folder: Path, tree: Mapping[str, Any], bar: Any) -> None:
    """A tree of `Later` arrays into a folder."""
    with _writer(folder, bar) as writer, ocp.Checkpointer(writer) as checkpointer:
        checkpointer.save(folder, args=_save_args(tree), force=True)


def write_step(folder: Path, tree: Mapping[str, Any], bar: Any) -> None:
    """The same as step 0 of a folder of steps, in its item ``items``."""
    with _writer(folder, bar) as writer, ocp.CheckpointManager(folder, item_handlers={"items": writer}) as manager:
        manager.save(0, args=ocp.args.Composite(items=_save_args(tree)))


def _save_args(tree: Mapping[str, Any]) -> Any:
    tree = jax.tree.map(lambda x: _Spread(x) if isinstance(x, Later) and x.spread else x, tree)
    chunks = jax.tree.map(_chunks, tree)
    return ocp.args.PyTreeSave(tree, save_args=chunks)


def _chunks(leaf: Any) -> ocp.SaveArgs:
    """Large arrays in chunks: of one row where rows are long, else as Orbax cuts them."""
    array: Any = leaf.later if isinstance(leaf, _Spread) else leaf
    if isinstance(array, int) or array.nbytes <= _CHUNK_BYTES:
        return ocp.SaveArgs()
    long = array.nbytes // array.shape[0] > _CHUNK_BYTES // 64
    return ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,) if long else ())


class _Opener(type_handlers.NumpyHandler):
    """Opens the arrays that Orbax is asked to restore, and leaves reading them for later."""

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        found = []
        for info in infos:
            spec = type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
            found.append(await tensorstore.open(tensorstore.Spec(spec), open=True, context=info.ts_context))
        return found


def read(folder: Path, tops: Sequence[str] | None) -> dict[str, Later]:
    """Name -> array of the tree in a folder; of the branches ``tops`` only, the first of which must be there."""
    if not (folder / "_METADATA").is_file():
        raise CheckpointError(f"{folder} holds no Orbax checkpoint: it has no _METADATA")
    check_name(folder)
    reader = handler((np.ndarray, _Opener()))
    with _readable(folder):
        stored: dict[str, Any] = dict(reader.metadata(folder).tree)
    wanted = stored if tops is None else {top: stored[top] for top in tops if top in stored}
    if tops is not None and tops[0] not in wanted:
        raise CheckpointError(f"{folder} has no {tops[0]!r}, only {', '.join(map(repr, stored)) or 'nothing'}")
    given = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
    args = ocp.args.PyTreeRestore(item=wanted, restore_args=given, partial_restore=True)
    found: dict[str, Later] = {}
    with _readable(folder):
        for path, store in jax.tree_util.tree_flatten_with_path(reader.restore(folder, args=args))[0]:
            name = "/".join(str(getattr(step, "key", getattr(step, "idx", step))) for step in path)
            rows = functools.partial(_rows, folder, store)
            make = functools.partial(_placed, tuple(store.shape), rows)
            found[name] = Later(tuple(store.shape), store.dtype.numpy_dtype, make, rows)
    return found


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Whatever Orbax makes of a damaged checkpoint is a CheckpointError."""
    try:
        yield
    except Exception as error:
        text = f"{folder} is damaged, or no checkpoint that Orbax reads: {gist(error)}; copy it again"
        raise CheckpointError(text) from error


def _rows(folder: Path, store: Any, rows: Any) -> np.ndarray:
    with _readable(folder):
        return store[rows].read().result()


def _placed(shape: tuple[int, ...], rows: Callable[[Any], np.ndarray], place: NamedSharding | None) -> Any:
    """One array: of NumPy, or as a sharding says, each process reading its share."""
    return rows(...) if place is None else jax.make_array_from_callback(shape, place, rows)
