"""Stream tensors to safetensors files, with one tensor in memory at a time."""

import json
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.safetensors import DTYPES, is_size
from nnxmoe.convert.storage.find_checkpoint import INDEX_FILE, SINGLE_FILE

_PIECE = 64 << 20  # bytes per copy from an array that is not contiguous


@dataclass(frozen=True)
class _Item:
    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


# Name, dtype code, shape, and the function that computes the array.
Tensors = Iterable[tuple[str, str, Sequence[int], Callable[[], np.ndarray]]]


def write_sharded(
    folder: str | os.PathLike[str],
    shares: Iterable[tuple[int | None, Tensors]],
    max_shard_size: int,
    *,
    process: int,
    single: str = SINGLE_FILE,
) -> list[Path]:
    """Write tensors as a single safetensors file, or as shards with an index.

    Only one tensor at a time is in memory. Existing files are never overwritten. To replace a checkpoint, write into an
    `atomic_dir`. A process that fails to write still participates in the collectives, and raises at the end.

    Args:
        folder: Existing folder.
        shares: Pairs of (process, tensors that the process writes). If the process is `None`, all processes compute the
            tensors collectively and take turns in writing the files.
        max_shard_size: Maximum size of a shard in bytes.
        process: Index of this process. Process 0 also writes the index.
        single: Name of the file if the tensors fit into one shard.

    Returns:
        Paths of the weight files of all processes.

    Raises:
        CheckpointError: If a file cannot be written.
    """
    folder = Path(folder)
    plan = [(writer, shard) for writer, tensors in shares for shard in _plan(tensors, max_shard_size) if shard]
    plan = plan or [(0, [])]
    name_counts = Counter(item.name for _, shard in plan for item in shard) + Counter(["__metadata__"])
    if duplicates := [name for name, num_writers in name_counts.items() if num_writers > 1]:
        raise ValueError(f"the tensor name {duplicates[0]!r} is used twice or reserved")
    names = (
        [single] if len(plan) == 1 else [f"model-{i + 1:05}-of-{len(plan):05}.safetensors" for i in range(len(plan))]
    )
    failure: CheckpointError | None = None
    num_writers = len({writer for writer, _ in plan if writer is not None} | {0})
    for i, (name, (writer, shard)) in enumerate(zip(names, plan, strict=True)):
        active_process = i % num_writers if writer is None else writer
        if failure is None and active_process == process:
            computed_names: set[str] = set()
            try:
                _write_file(folder / name, _file_parts(shard, computed_names))
            except CheckpointError as error:
                failure = error
            shard = [item for item in shard if item.name not in computed_names]
        elif writer is not None:
            continue
        for item in shard if writer is None else []:
            item.make()
    if failure is not None:
        raise failure
    if len(plan) > 1 and process == 0:
        weight_map = {item.name: name for name, (_, shard) in zip(names, plan, strict=True) for item in shard}
        total = sum(item.nbytes for _, shard in plan for item in shard)
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return [folder / name for name in names]


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write a new JSON file and sync it to disk."""
    text = json.dumps(dict(fields), indent=2, sort_keys=True, default=_plain, allow_nan=False)
    write_bytes(path, text.encode() + b"\n")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a new file and sync it to disk."""
    _write_file(path, [data])


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)


def _plan(tensors: Tensors, max_shard_size: int) -> list[list[_Item]]:
    """Assign tensors to shards in order. Within a shard, sort tensors by descending item size to align them."""
    if max_shard_size <= 0:
        raise ValueError(f"max_shard_size must be a positive number of bytes, got {max_shard_size}")
    shards: list[list[_Item]] = [[]]
    size = 0
    for name, dtype, shape, make in tensors:
        if dtype not in DTYPES or not all(map(is_size, shape)):
            raise ValueError(f"tensor {name!r}: dtype {dtype!r} or shape {list(shape)} cannot be written")
        item = _Item(name, dtype, tuple(shape), make)
        if shards[-1] and size + item.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.nbytes
    return [sorted(shard, key=lambda item: -DTYPES[item.dtype].itemsize) for shard in shards]


def _file_parts(shard: list[_Item], computed_names: set[str]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: the header, then each tensor.

    Adds the name of a tensor to ``computed_names`` before the tensor is computed.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for item in shard:
        end = position + item.nbytes
        header[item.name] = {"dtype": item.dtype, "shape": item.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for item in shard:
        computed_names.add(item.name)
        yield from _array_parts(_make(item))


def _make(item: _Item) -> np.ndarray:
    array = np.asarray(item.make())
    if array.dtype != DTYPES[item.dtype] or array.shape != item.shape:
        raise ValueError(
            f"tensor {item.name!r} was declared as {item.dtype} {list(item.shape)}, "
            f"but is {array.dtype} {list(array.shape)}"
        )
    return array


def _array_parts(array: np.ndarray) -> Iterator[memoryview]:
    """Yield an array's bytes in row-major order. If the array is not contiguous, copy it in pieces."""
    if array.flags.c_contiguous:
        yield array.reshape(-1).view(np.uint8).data
        return
    step = max(1, _PIECE // max(1, prod(array.shape[1:]) * array.itemsize))
    for begin in range(0, len(array), step):
        yield np.ascontiguousarray(array[begin : begin + step]).reshape(-1).view(np.uint8).data


def _write_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    try:
        with open(path, "xb") as file:
            for part in parts:
                file.write(part)
                del part  # a reference would keep the tensor in memory while the next tensor is computed
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; free disk space, or choose another folder"
        ) from error
