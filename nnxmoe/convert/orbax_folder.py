"""Orbax checkpoints as the layouts here need them: arrays are made, written and read one at a time."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from orbax.checkpoint import type_handlers

from nnxmoe.convert.leaves import Later
from nnxmoe.convert.source import CheckpointError

_CHUNK_BYTES = 64 << 20  # what is compressed, or read, at a time


@dataclasses.dataclass(frozen=True)
class _Spread:
    """A `Later` whose array lies on the devices of several processes."""

    later: Later


class _Writer:
    """Makes an array when its turn comes, and lets go of it once it is on the disk."""

    bar: Any

    async def serialize(self, values: Sequence[Any], infos: Any, args: Any = None) -> list[Any]:
        args = args or [ocp.SaveArgs()] * len(values)
        for value, info, arg in zip(values, infos, args, strict=True):
            later = value.later if isinstance(value, _Spread) else value
            for future in await super().serialize([later.make(None)], [info], [arg]):  # pyright: ignore
                future.result()
            self.bar.update(later.nbytes)
        return []


class _HostWriter(_Writer, type_handlers.NumpyHandler):
    def __init__(self, bar: Any):
        super().__init__(deepcopy_host_arrays=False)
        self.bar = bar


class _SpreadWriter(_Writer, type_handlers.ArrayHandler):
    def __init__(self, bar: Any):
        super().__init__()
        self.bar = bar


def handler(bar: Any = None) -> Any:
    """Orbax's handler of trees in the form that MaxText's converter writes; with a bar it writes `Later` arrays."""
    form: dict[str, Any] = {"use_ocdbt": True, "use_zarr3": True}
    if bar is not None:
        writers = (
            (int, type_handlers.ScalarHandler()),
            (jax.Array, type_handlers.ArrayHandler()),
            (Later, _HostWriter(bar)),
            (_Spread, _SpreadWriter(bar)),
        )
        form["type_handler_registry"] = type_handlers.create_type_handler_registry(*writers)
    return ocp.PyTreeCheckpointHandler(**form)


def write(folder: Path, tree: Mapping[str, Any], bar: Any) -> None:
    """A tree of `Later` arrays into a folder."""
    with ocp.Checkpointer(handler(bar)) as checkpointer:
        checkpointer.save(folder, args=_save_args(tree), force=True)


def write_step(folder: Path, tree: Mapping[str, Any], bar: Any) -> None:
    """The same as step 0 of a folder of steps, in its item ``items``."""
    with ocp.CheckpointManager(folder, item_handlers={"items": handler(bar)}) as manager:
        manager.save(0, args=ocp.args.Composite(items=_save_args(tree)))


def _save_args(tree: Mapping[str, Any]) -> Any:
    if jax.process_count() > 1:
        tree = jax.tree.map(lambda x: _Spread(x) if isinstance(x, Later) else x, tree)
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    return ocp.args.PyTreeSave(tree, save_args=chunks)


def read(folder: Path, tops: Sequence[str] | None) -> dict[str, Later]:
    """Name -> array of the tree in a folder; of the branches ``tops`` only, the first of which must be there."""
    if not (folder / "_METADATA").is_file():
        raise CheckpointError(f"{folder} holds no Orbax checkpoint: it has no _METADATA")
    stored: dict[str, Any] = handler().metadata(folder).tree
    wanted = stored if tops is None else {top: stored[top] for top in tops if top in stored}
    if tops is not None and tops[0] not in wanted:
        raise CheckpointError(f"{folder} has no {tops[0]!r}, only {', '.join(map(repr, stored)) or 'nothing'}")
    found: dict[str, Later] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(wanted)[0]:
        names = [str(getattr(step, "key", getattr(step, "idx", step))) for step in path]
        make = functools.partial(_read, folder, names, leaf)
        found["/".join(names)] = Later(tuple(leaf.shape), np.dtype(leaf.dtype), make)
    return found


def _read(folder: Path, names: list[str], leaf: Any, place: NamedSharding | None) -> Any:
    """One array: of NumPy, or as a sharding says, each process reading its share."""
    args: Any = ocp.RestoreArgs(restore_type=np.ndarray)
    if place is not None:
        args = ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=place, strict=True)
    item, restore = leaf, args
    for name in reversed(names):
        item, restore = {name: item}, {name: restore}
    given = ocp.args.PyTreeRestore(item=item, restore_args=restore, partial_restore=True)
    with ocp.Checkpointer(handler()) as checkpointer:
        found = checkpointer.restore(folder, args=given)
    for name in names:
        found = found[name]
    return found
