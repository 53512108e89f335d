"""Read and write Orbax checkpoints with lazy arrays. Arrays are computed, written and read one at a time."""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import type_handlers
from orbax.checkpoint.metadata import StringMetadata

from nnxmoe.config.printable import some
from nnxmoe.convert.arrays.boxes import Box, sizes
from nnxmoe.convert.arrays.lazy_array import Empty, LazyArray
from nnxmoe.convert.files.errors import CheckpointError, check_orbax_path, error_summary
from nnxmoe.runtime.memory import give_back

_CHUNK_BYTES = 64 << 20  # Maximum size of a chunk, the unit of compression.
_BLOCK_BYTES = 32 << 20  # Minimum size of a read.


@dataclasses.dataclass(frozen=True)
class _Spread:
    """Array sharded over several processes. ``make`` computes the array on the devices."""

    array: LazyArray
    make: Callable[[], jax.Array]


class _Writer:
    """Base class of handlers that compute each array just before writing it, and free it once it is on disk.

    Errors are stored and raised at the end. If a process raised immediately, the other processes would wait forever.
    """

    def __init__(self, bar: Any, **options: Any):
        super().__init__(**options)
        self.bar = bar
        self.failure: BaseException | None = None

    async def serialize(self, values: Sequence[Any], infos: Any, args: Any = None) -> list[Any]:
        args = args or [ocp.SaveArgs()] * len(values)
        for value, info, save_args in zip(values, infos, args, strict=True):
            value = value.make() if isinstance(value, _Spread) else value  # collective
            if self.failure is None:
                try:
                    for future in await super().serialize([value], [info], [save_args]):  # pyright: ignore
                        future.result()
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
        """Cancel further writes, and wait for the current write."""
        self.failure = failure
        with self._busy:
            return

    async def _open_and_write(self, value: Any, tspec: Any, ts_context: Any) -> None:
        """Write one chunk of rows at a time. Orbax would need memory for the whole array and a compressed copy."""
        with self._busy:
            try:
                if self.failure is None:
                    await self._write(value, tspec, ts_context)
            except Exception as error:
                self.failure = error

    async def _write(self, value: LazyArray, tspec: Any, ts_context: Any) -> None:
        store = await tensorstore.open(tensorstore.Spec(tspec), create=True, open=True, context=ts_context)
        chunk: Any = store.chunk_layout.write_chunk.shape
        for start in range(0, value.shape[0], chunk[0]):
            if self.failure is not None:
                return
            rows = slice(start, start + chunk[0])
            await store[rows].write(value.rows(rows), can_reference_source_data_indefinitely=True)


class _SpreadWriter(_Writer, type_handlers.ArrayHandler):
    """Handler for arrays that span processes. Each process writes the shards of its devices."""


def handler(*kinds: tuple[type, Any]) -> Any:
    """Return Orbax's tree handler for the format of MaxText's converter (OCDBT, Zarr 3).

    ``kinds`` are additional pairs of (leaf type, handler). Integers, strings and JAX arrays always have handlers.
    """
    default_handlers = [
        (int, type_handlers.ScalarHandler()),
        (str, type_handlers.StringHandler()),
        (jax.Array, type_handlers.ArrayHandler()),
    ]
    registry = type_handlers.create_type_handler_registry(*default_handlers, *kinds)
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, type_handler_registry=registry)


@contextlib.contextmanager
def _writer(folder: Path, bar: Any) -> Iterator[Any]:
    """Yield a handler for writing. On exit, raise CheckpointError if a write failed."""
    check_orbax_path(folder)
    writers = _HostWriter(bar), _SpreadWriter(bar, enable_write_sharding_file=False)
    failure: BaseException | None = None
    try:
        yield handler((LazyArray, writers[0]), (_Spread, writers[1]))
    except (OSError, ValueError, RuntimeError) as error:  # possibly caused by an earlier failed write
        failure = error
    except BaseException as error:
        writers[0].stop(error)
        raise
    if failure := writers[0].failure or writers[1].failure or failure:
        raise CheckpointError(
            f"cannot write: {error_summary(failure)}; free disk space, or choose another folder"
        ) from failure


def write(folder: Path, tree: Mapping[str, Any], bar: Any, *, step: bool = False) -> None:
    """Write a tree of `LazyArray` leaves to a folder. If ``step``, write it as step 0, to ``0/items``."""
    leaves = jax.tree.map(
        lambda leaf: _Spread(leaf, leaf.global_array) if isinstance(leaf, LazyArray) and leaf.global_array else leaf,
        tree,
    )
    args = ocp.args.PyTreeSave(leaves, save_args=jax.tree.map(_chunks, leaves))
    with _writer(folder, bar) as writer:
        if step:
            with ocp.CheckpointManager(folder, item_handlers={"items": writer}) as manager:
                manager.save(0, args=ocp.args.Composite(items=args))
        else:
            with ocp.Checkpointer(writer) as checkpointer:
                checkpointer.save(folder, args=args, force=True)


def _chunks(leaf: Any) -> ocp.SaveArgs:
    """Return options that write large arrays in chunks of at most _CHUNK_BYTES, split along axis 0 if rows are long."""
    array: Any = leaf.array if isinstance(leaf, _Spread) else leaf
    if isinstance(array, int) or array.nbytes <= _CHUNK_BYTES:
        return ocp.SaveArgs()
    has_long_rows = array.nbytes // array.shape[0] > _CHUNK_BYTES // 64
    return ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,) if has_long_rows else ())


class _Opener(type_handlers.NumpyHandler):
    """Handler that opens arrays without reading them."""

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        stores = []
        for info in infos:
            spec = type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
            stores.append(await tensorstore.open(tensorstore.Spec(spec), open=True, context=info.ts_context))
        return stores


def top_level_names(folder: Path) -> list[str]:
    """Return the top-level names of the tree in a folder, without empty branches."""
    return [name for name, branch in _stored(folder)[1].items() if jax.tree.leaves(branch)]


def _stored(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the read handler and the tree's metadata. Strings in the metadata are replaced with None."""
    if not (folder / "_METADATA").is_file():
        raise CheckpointError(f"{folder} contains no Orbax checkpoint: _METADATA is missing")
    check_orbax_path(folder)
    reader = handler((np.ndarray, _Opener()))
    with _readable(folder):
        tree = dict(reader.metadata(folder).tree)
    return reader, jax.tree.map(lambda leaf: None if isinstance(leaf, StringMetadata) else leaf, tree)


def read(folder: Path, tops: Sequence[str] | None) -> dict[str, LazyArray]:
    """Return the lazy arrays of the tree in a folder, by name.

    ``tops`` are the top-level names to read, at least one of which must exist. If None, read the whole tree.
    Raises CheckpointError if the folder is not a readable Orbax checkpoint.
    """
    reader, metadata = _stored(folder)
    items = metadata if tops is None else {name: metadata[name] for name in tops if name in metadata}
    if tops is not None and not items:
        raise CheckpointError(
            f"{folder} has no {tops[0]!r}, only {some(list(map(repr, metadata))) or 'nothing'}: pass the folder of "
            "a MaxText checkpoint, or call nnxmoe.load with the folder that contains nnxmoe.json"
        )
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), items)
    args = ocp.args.PyTreeRestore(item=items, restore_args=restore_args, partial_restore=True)
    arrays, lock = dict[str, LazyArray](), threading.Lock()
    with _readable(folder):
        for path, store in jax.tree_util.tree_flatten_with_path(reader.restore(folder, args=args))[0]:
            name = "/".join(str(getattr(component, "key", getattr(component, "idx", component))) for component in path)
            read_box = functools.partial(_read, folder, store, lock)
            arrays[name] = LazyArray(tuple(store.shape), store.dtype.numpy_dtype, read_box, _read_bytes(store))
    return arrays


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Convert any exception that Orbax raises for a damaged checkpoint to CheckpointError."""
    try:
        yield
    except Exception as error:
        text = f"{folder} is damaged, or not an Orbax checkpoint: {error_summary(error)}; copy it again"
        raise CheckpointError(text) from error


def _read_bytes(store: Any) -> int:
    """Return the bytes per read, at least one chunk, because a chunk can only be decompressed as a whole."""
    chunk = math.prod(store.chunk_layout.read_chunk.shape or ()) * store.dtype.numpy_dtype.itemsize
    return max(_BLOCK_BYTES, chunk)


def _read(folder: Path, store: Any, lock: threading.Lock, box: Box, _: Empty) -> np.ndarray:
    """Read a box. Reads are serialized, because tensorstore has its own threads and each chunk needs memory."""
    with _readable(folder), lock:
        give_back()
        values = store[box].read().result()
    assert values.shape == sizes(box)
    return values
