"""Writing safetensors: streamed, one tensor in memory at a time."""

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from nnxmoe.convert.safetensors import DTYPES
from nnxmoe.convert.source import INDEX_FILE, SINGLE_FILE, CheckpointError, is_size

_PIECE = 64 << 20  # bytes copied at a time from an array that is not contiguous


@dataclass(frozen=True)
class _Item:
    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def write_safetensors(
    folder: str | os.PathLike[str],
    tensors: Iterable[tuple[str, str, Sequence[int], Callable[[], np.ndarray]]],
    max_shard_size: int,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Writes (name, dtype code, shape, function that makes the array) as one file or as shards with an index.

    One tensor at a time is in memory. Nothing that exists is written over: to replace a checkpoint, write into a
    `new_folder`. Returns the weight files.
    """
    folder = Path(folder)
    shards = _plan(tensors, max_shard_size)
    count = len(shards)
    names = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, _file_parts(shard, {"format": "pt"} if metadata is None else metadata))
    if count > 1:
        weight_map = {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard}
        total = sum(item.nbytes for shard in shards for item in shard)
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return [folder / name for name in names]


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """A new file with a JSON object, on the disk when this returns."""
    text = json.dumps(dict(fields), indent=2, sort_keys=True, default=_plain, allow_nan=False)
    write_bytes(path, text.encode() + b"\n")


def write_bytes(path: Path, data: bytes) -> None:
    """A new file, on the disk when this returns."""
    _write_file(path, [data])


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)


def _plan(
    tensors: Iterable[tuple[str, str, Sequence[int], Callable[[], np.ndarray]]], max_shard_size: int
) -> list[list[_Item]]:
    """Fills shards in the given order; within a shard wide dtypes come first, which keeps every tensor aligned."""
    if max_shard_size <= 0:
        raise ValueError(f"max_shard_size must be a positive number of bytes, got {max_shard_size}")
    shards: list[list[_Item]] = [[]]
    names: set[str] = set()
    size = 0
    for name, dtype, shape, make in tensors:
        if name in names or name == "__metadata__":
            raise ValueError(f"the tensor name {name!r} is used twice or reserved")
        if dtype not in DTYPES or not all(map(is_size, shape)):
            raise ValueError(f"tensor {name!r}: dtype {dtype!r} or shape {list(shape)} cannot be written")
        item = _Item(name, dtype, tuple(shape), make)
        if shards[-1] and size + item.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(item)
        names.add(name)
        size += item.nbytes
    return [sorted(shard, key=lambda item: -DTYPES[item.dtype].itemsize) for shard in shards]


def _file_parts(shard: list[_Item], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yields a safetensors file: the header, then each tensor's bytes, made when its turn comes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for item in shard:
        end = position + item.nbytes
        header[item.name] = {"dtype": item.dtype, "shape": item.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for item in shard:
        yield from _array_parts(_make(item))


def _make(item: _Item) -> np.ndarray:
    array = np.asarray(item.make())
    if array.dtype != DTYPES[item.dtype] or array.shape != item.shape:
        raise ValueError(
            f"tensor {item.name!r} was planned as {item.dtype} {list(item.shape)}, "
            f"and is {array.dtype} {list(array.shape)}"
        )
    return array


def _array_parts(array: np.ndarray) -> Iterator[memoryview]:
    """Yields an array's bytes in row-major order; one that is not contiguous is copied piece by piece."""
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
                del part  # it holds the tensor while the next one is made
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; make room, or choose another folder"
        ) from error
