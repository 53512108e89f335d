"""Write one checkpoint from several processes. Each process writes its shards. If one fails, every process raises."""

import contextlib
import functools
import math
import operator
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.storage.atomic_dir import MODEL_FILES, atomic_dir
from nnxmoe.sharding import spans_hosts

AnyArray = Any  # NumPy or JAX array.
_MESSAGE = 4000  # Maximum size of a broadcast text in bytes.


@contextlib.contextmanager
def shared_folder(
    folder: str | os.PathLike[str], overwrite: bool | None = None, replaced: re.Pattern[str] = MODEL_FILES
) -> Iterator[Path]:
    """Collective `atomic_dir` on a shared file system. The folder appears after all processes have written.

    If one process raises, every process raises and the folder is unchanged.
    """
    if jax.process_count() == 1:
        with atomic_dir(folder, overwrite, replaced) as stage:
            yield stage
        return
    with contextlib.ExitStack() as stack:
        stage = Path(broadcast_text(lambda: str(stack.enter_context(atomic_dir(folder, overwrite, replaced)))))
        failure: Exception | None = None
        try:
            if not stage.is_dir():
                raise CheckpointError(
                    f"{folder}: process {jax.process_index()} does not see {stage}: save to a shared file system"
                )
            yield stage
        except Exception as error:
            failure = error
        raise_in_all(failure)
        broadcast_text(lambda: str(stack.close()))


def broadcast_text(compute_text: Callable[[], str]) -> str:
    """Collective: compute a text in process 0, and return the text in every process.

    If ``compute_text`` raises, every process raises. With several processes, the text is truncated to 4000 bytes.
    """
    if jax.process_count() == 1:
        return compute_text()
    text, failure = "", None
    if jax.process_index() == 0:
        try:
            text = compute_text()
        except Exception as error:
            text, failure = str(error), error
    data = np.zeros(_MESSAGE + 1, np.uint8)
    text_bytes = text.encode()[:_MESSAGE]
    data[: len(text_bytes)], data[-1] = np.frombuffer(text_bytes, np.uint8), failure is not None
    data = np.asarray(multihost_utils.broadcast_one_to_all(data))
    text = bytes(data[:-1]).rstrip(b"\0").decode(errors="replace")
    if data[-1]:
        raise failure or CheckpointError(text)
    return text


def gather_texts(text: str) -> list[str]:
    """Collective: return the texts of all processes, ordered by process index."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.asarray([data.size])))
    padded_data = np.pad(data, (0, int(sizes.max()) - data.size))
    gathered = multihost_utils.process_allgather(padded_data)
    return [bytes(row[:size]).decode() for row, size in zip(gathered, sizes, strict=True)]


def any_process(flag: Callable[[], bool], mesh: Mesh | None) -> Callable[[], bool]:
    """Collective over the processes of a mesh: start computing whether a flag is set in any process.

    Returns a function that waits for the result, which is the same in all processes. The caller can enqueue more work
    on the devices before calling the function. With a single process, returns ``flag`` itself.
    """
    if mesh is None or not mesh.is_multi_process:
        return flag
    local_flag, sharding = np.asarray([flag()]), NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    any_flag = _everywhere(jnp.any, mesh)(
        jax.make_array_from_callback((mesh.size,), sharding, lambda index: local_flag)
    )
    return lambda: bool(any_flag)


@functools.lru_cache(maxsize=16)
def _everywhere(function: Callable[..., Array], mesh: Mesh | AbstractMesh) -> Callable[..., Array]:
    """Compile a function whose result is replicated on every device of the mesh."""
    return jax.jit(function, out_shardings=NamedSharding(mesh, PartitionSpec()))


def raise_in_all(failure: Exception | None) -> None:
    """Collective: raise in every process if one process failed.

    A failed process raises its failure. The other processes raise a CheckpointError with the index of a failed process.
    """
    has_failed = np.ravel(multihost_utils.process_allgather(np.asarray([failure is not None])))
    if failure is not None:
        raise failure
    if has_failed.any():
        raise CheckpointError(
            f"process {int(np.argmax(has_failed))} could not write its shards (see its error); nothing was saved"
        )


def hosts_holding(value: AnyArray, slice_index: tuple[int, ...]) -> list[int]:
    """Return the processes whose shards contain all of ``value[slice_index]``."""
    if not spans_hosts(value):
        return [0]
    slice_shape = value.shape[len(slice_index) :]
    boxes: dict[int, set[tuple[tuple[int, int], ...]]] = {}
    index: Any
    for device, index in value.sharding.devices_indices_map(value.shape).items():
        box = tuple(part.indices(size)[:2] for part, size in zip(index, value.shape, strict=True))
        if all(lower <= i < upper for i, (lower, upper) in zip(slice_index, box, strict=False)):
            boxes.setdefault(device.process_index, set()).add(box[len(slice_index) :])
    size = math.prod(slice_shape)
    return [
        process
        for process, host_boxes in boxes.items()
        if sum(math.prod(stop - start for start, stop in box) for box in host_boxes) == size
    ]


def local_value(value: AnyArray, slice_index: tuple[int, ...]) -> np.ndarray:
    """Return ``value[slice_index]`` from this process's shards. The shards must contain the whole slice."""
    if not spans_hosts(value):
        return np.asarray(value[slice_index])
    out = np.empty(value.shape[len(slice_index) :], value.dtype)
    for shard in value.addressable_shards:
        box = [part.indices(size)[:2] for part, size in zip(shard.index, value.shape, strict=True)]
        if all(lower <= i < upper for i, (lower, upper) in zip(slice_index, box, strict=False)):
            local_index = tuple(i - lower for i, (lower, _) in zip(slice_index, box, strict=False))
            out[tuple(slice(*extent) for extent in box[len(slice_index) :])] = np.asarray(shard.data[local_index])
    return out


def gather(value: Array, slice_index: tuple[int, ...]) -> np.ndarray:
    """Collective: return ``value[slice_index]`` on the host of every process. Every process must call this function."""
    assert isinstance(value.sharding, NamedSharding)
    return np.asarray(_everywhere(operator.getitem, value.sharding.mesh)(value, slice_index))
