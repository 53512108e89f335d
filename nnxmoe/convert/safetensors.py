"""Checkpoints in Hugging Face's layout as byte ranges: validated headers, exact reads, FP8 blocks, atomic writes.

This layer knows files and numpy arrays, no models. Headers are checked twice (the safetensors library and the rules
below); data is read with pread, never mapped, so that a file cut short under us is an error and not a signal.
"""

import json
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from nnxmoe.convert import source
from nnxmoe.convert.source import INDEX_FILE, SINGLE_FILE, CheckpointError, Source, short

__all__ = [
    "DTYPES",
    "Checkpoint",
    "CheckpointError",
    "TensorInfo",
    "check_scale_grid",
    "dequantize_blocks",
    "dtype_code",
    "hub_headers",
    "read_header",
    "write_safetensors",
]

DTYPES: Mapping[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    **{f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for kind in "IU" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "C64": np.dtype(np.complex64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_FP8 = [dtype for code, dtype in DTYPES.items() if code.startswith("F8_")]
_MAX_HEADER = 100_000_000  # the safetensors library's own cap
_EXPLAINED_HEADER = 8_000_000  # a larger header that the library refuses is not parsed again for a better message
_MAX_RANK = 32
_DAMAGED = "the file is damaged or incomplete: download or write it again"
_PIECE = 64 << 20  # bytes per system call and per piece of iter_rows
_PAGE = 4096  # rows up to a page are read whole: the kernel fetches the page anyway


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `begin` and `end` are byte offsets from the start of `file`; `dtype` is the file's code."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in the file, in bytes."""
        return self.end - self.begin

    @property
    def numpy_dtype(self) -> np.dtype:
        """The stored dtype; BF16 and FP8 are those of ml_dtypes."""
        return DTYPES[self.dtype]


def dtype_code(dtype: Any) -> str:
    """Returns the safetensors code of a numpy dtype (also jnp's scalar types), for instance 'BF16'."""
    wanted = np.dtype(dtype)
    code = next((code for code, known in DTYPES.items() if known == wanted), None)
    if code is None:
        raise CheckpointError(f"safetensors cannot hold dtype {wanted}; cast to one of {', '.join(DTYPES)}")
    return code


# Headers


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Validates a safetensors file and returns its tensors; reads no tensor data and nothing the file does not hold.

    Format: https://huggingface.co/docs/safetensors/index#format
    """
    size = source.regular_file(path, "download it again").st_size
    try:
        with open(path, "rb") as file:
            head = file.read(128)
            source.refuse_lfs_pointer(path, head)
            length = _header_length(path, head, size)
            file.seek(8)
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; make the file readable") from error
    fault = _library_fault(path)
    if fault and length > _EXPLAINED_HEADER:
        raise CheckpointError(f"{path}: {fault}; {_DAMAGED}")
    entries = source.parse_json(header, f"{path}: the header", _DAMAGED)
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header must be a JSON object, got {short(entries)}; {_DAMAGED}")
    _check_metadata(path, entries.pop("__metadata__", None))
    start = 8 + length
    tensors = {name: _parse_entry(path, name, entry, start, size) for name, entry in entries.items()}
    _check_coverage(path, tensors.values(), start, size)
    if fault:
        raise CheckpointError(f"{path}: {fault}; {_DAMAGED}")
    return tensors


def _header_length(path: Path, head: bytes, size: int) -> int:
    if len(head) < 8:
        raise CheckpointError(f"{path} has only {size} bytes, not even a header's length; {_DAMAGED}")
    (length,) = struct.unpack("<Q", head[:8])
    if not 2 <= length <= min(_MAX_HEADER, size - 8):
        limit = f"the file has {size} bytes" if length > size - 8 else f"allowed are 2 to {_MAX_HEADER}"
        raise CheckpointError(
            f"{path}: the header's length is {length}, and {limit}; not a safetensors file, or {_DAMAGED}"
        )
    return length


def _library_fault(path: Path) -> str | None:
    """Asks the safetensors library, whose validation is independent of ours; returns its complaint."""
    try:
        with safe_open(path, framework="np"):
            return None
    except (SafetensorError, OSError) as error:
        return str(error)


def _check_metadata(path: Path, metadata: object) -> None:
    valid = metadata is None or (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values()))
    if not valid:
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings, got {short(metadata)}; {_DAMAGED}")


def _parse_entry(path: Path, name: str, entry: object, start: int, size: int) -> TensorInfo:
    """Checks one tensor's dtype, shape and byte range; `start` is where the data begins in a file of `size` bytes."""

    def refuse(field: str, value: object, why: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {short(name)}: {field} {short(value)} {why}; {_DAMAGED}")

    if not isinstance(entry, dict):
        raise refuse("entry", entry, "is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise CheckpointError(f"{path}: tensor {short(name)}: dtype {short(dtype)} is not read; convert it to {known}")
    if not (isinstance(shape, list) and all(map(source.is_size, shape))):
        raise refuse("shape", shape, "is not a list of non-negative integers")
    if len(shape) > _MAX_RANK or prod(max(dim, 1) for dim in shape) * DTYPES[dtype].itemsize >= 2**63:
        raise refuse("shape", shape, f"has more than {_MAX_RANK} dimensions or 2**63 bytes")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(source.is_size, offsets))):
        raise refuse("data_offsets", offsets, "are not two non-negative integers")
    begin, end = offsets
    if begin > end or start + end > size:
        raise refuse("data_offsets", offsets, f"do not lie within the {size - start} bytes of data")
    wanted = prod(shape) * DTYPES[dtype].itemsize
    if end - begin != wanted:
        raise refuse("data_offsets", offsets, f"span {end - begin} bytes, but {dtype} {shape} takes {wanted}")
    return TensorInfo(name, path, dtype, tuple(shape), start + begin, start + end)


def _check_coverage(path: Path, tensors: Iterable[TensorInfo], start: int, size: int) -> None:
    """Tensors must follow one another from the first byte of data to the last: no overlap, no hole, nothing after."""
    position, previous = start, "the header"
    for info in sorted(tensors, key=lambda info: (info.begin, info.end)):
        if info.begin != position:
            relation = "overlaps" if info.begin < position else f"leaves {info.begin - position} unused bytes after"
            offsets = [info.begin - start, info.end - start]
            raise CheckpointError(
                f"{path}: tensor {short(info.name)} with data_offsets {offsets} {relation} {previous}; {_DAMAGED}"
            )
        position, previous = info.end, f"tensor {short(info.name)}"
    if position != size:
        raise CheckpointError(f"{path}: {size - position} bytes follow {previous}, and no tensor has them; {_DAMAGED}")


# Reading


class Checkpoint:
    """An opened checkpoint: config, headers of all its weight files, and exact reads of rows and columns.

    Reads are thread-safe. Files stay open until `close`, which no read may overlap.
    """

    def __init__(self, found: Source) -> None:
        """Reads and checks the headers of the files that were found; use `Checkpoint.open`."""
        self.folder = found.folder
        self.config = found.config
        self.generation_config = found.generation_config
        self.files: list[Path] = list(found.files)
        self.tensors: dict[str, TensorInfo] = {}
        self._bytes_read = 0
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._sizes: dict[Path, int] = {}
        try:
            self._collect(found.weight_map)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls, path_or_hub_id: str | os.PathLike[str], *, revision: str | None = None, local_files_only: bool = False
    ) -> Self:
        """Opens a local folder, or a hub id such as 'org/name' after downloading what the cache lacks."""
        return cls(source.find(path_or_hub_id, revision, local_files_only))

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data handed out so far; of column ranges only the columns."""
        return self._bytes_read

    def _collect(self, weight_map: dict[str, str]) -> None:
        """Merges the files' headers and holds them against the index."""
        for file in self.files:
            header = read_header(file)
            self._sizes[file] = file.stat().st_size
            for name, info in header.items():
                known = self.tensors.setdefault(name, info)
                if known is not info and not self._equal(known, info):
                    raise CheckpointError(
                        f"tensor {short(name)} is in {known.file} ({known.dtype} {list(known.shape)}) and in {file} "
                        f"({info.dtype} {list(info.shape)}) with different contents; download the model again"
                    )
                if weight_map.get(name) == file.name:
                    self.tensors[name] = info
        for name, promised in weight_map.items():
            info = self.tensors.get(name)
            if info is None or info.file.name != promised:
                place = "no listed file has it" if info is None else f"it is in {info.file}"
                raise CheckpointError(
                    f"{self.folder / INDEX_FILE} promises tensor {short(name)} in {self.folder / promised}, "
                    f"and {place}; download the model again"
                )

    def _equal(self, one: TensorInfo, other: TensorInfo) -> bool:
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        step = 4 << 20
        left, right = bytearray(step), bytearray(step)
        for offset in range(0, one.nbytes, step):
            count = min(step, one.nbytes - offset)
            self._fill(one, one.begin + offset, memoryview(left)[:count])
            self._fill(other, other.begin + offset, memoryview(right)[:count])
            if left[:count] != right[:count]:
                return False
        return True

    def info(self, name: str) -> TensorInfo:
        """Returns where a tensor lies; a name the checkpoint lacks is refused."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} has no tensor {short(name)} (it has {len(self.tensors)} others)")
        return self.tensors[name]

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None) -> np.ndarray:
        """Reads a tensor, or a range `rows` of its first and `cols` of its last dimension, in its stored dtype."""
        info = self.info(name)
        out = np.empty(_window(info, rows, cols)[0], info.numpy_dtype)
        self.read_into(name, out, rows, cols)
        return out

    def read_into(self, name: str, out: np.ndarray, rows: slice | None = None, cols: slice | None = None) -> None:
        """Like `read`, into a C-contiguous array of the stored dtype and the range's shape."""
        info = self.info(name)
        shape, (first, last), (left, right) = _window(info, rows, cols)
        if out.dtype != info.numpy_dtype or out.shape != shape or not out.flags.c_contiguous:
            raise ValueError(f"out must be a C-contiguous {info.numpy_dtype} array of shape {list(shape)}")
        if out.size == 0:
            return
        item, inner = info.numpy_dtype.itemsize, prod(info.shape[1:-1])
        width = info.shape[-1] if len(info.shape) > 1 else 1
        target = out.reshape(-1).view(np.uint8).reshape((last - first) * inner, (right - left) * item)
        start = info.begin + first * inner * width * item
        if right - left == width:
            self._fill(info, start, target.reshape(-1).data)
        else:
            self._fill_columns(info, start, width * item, left * item, target)
        with self._lock:
            self._bytes_read += out.nbytes

    def iter_rows(
        self, name: str, rows: slice | None = None, max_bytes: int = _PIECE
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields (slice of the first dimension, its rows) in pieces of at most `max_bytes`, or one row if larger."""
        info = self.info(name)
        if not info.shape:
            raise CheckpointError(f"{info.file}: tensor {short(name)} is a scalar and has no rows; use read")
        _, (first, last), _ = _window(info, rows, None)
        step = max(1, max_bytes // max(1, prod(info.shape[1:]) * info.numpy_dtype.itemsize))
        for begin in range(first, last, step):
            piece = slice(begin, min(begin + step, last))
            yield piece, self.read(name, piece)

    def _fill_columns(self, info: TensorInfo, start: int, row_bytes: int, left: int, target: np.ndarray) -> None:
        """Reads the same byte range of consecutive rows: one by one, or whole rows in blocks where they are short."""
        count, segment = target.shape
        if row_bytes > _PAGE:
            for row in range(count):
                self._fill(info, start + row * row_bytes + left, target[row].data)
            return
        step = (1 << 20) // row_bytes
        scratch = np.empty((min(step, count), row_bytes), np.uint8)
        for row in range(0, count, step):
            block = scratch[: min(step, count - row)]
            self._fill(info, start + row * row_bytes, block.reshape(-1).data)
            target[row : row + len(block)] = block[:, left : left + segment]

    def _fill(self, info: TensorInfo, offset: int, buffer: memoryview) -> None:
        descriptor = self._descriptor(info.file)
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(descriptor, [buffer[done : done + _PIECE]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{info.file}: reading tensor {short(info.name)}: {error}") from error
            if count == 0:
                raise CheckpointError(
                    f"{info.file} ends at byte {offset + done}, within tensor {short(info.name)}: it was cut "
                    "short after it was opened; do not write to a checkpoint while it is read"
                )
            done += count

    def _descriptor(self, file: Path) -> int:
        """Opens a file at its first read and keeps it open; it must still be the one whose header was checked."""
        descriptor = self._descriptors.get(file)
        if descriptor is not None:
            return descriptor
        with self._lock:
            if self._closed:
                raise ValueError(f"the checkpoint {self.folder} is closed")
            if file not in self._descriptors:
                try:
                    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise CheckpointError(f"{file}: {error.strerror or error}; was it moved while in use?") from error
                self._descriptors[file] = descriptor
                if os.fstat(descriptor).st_size != self._sizes[file]:
                    raise CheckpointError(f"{file} changed its size after its header was read; open it again")
            return self._descriptors[file]

    def close(self) -> None:
        """Closes the files; later reads are refused."""
        with self._lock:
            self._closed = True
            descriptors, self._descriptors = self._descriptors, {}
        for descriptor in descriptors.values():
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()


_Range = tuple[int, int]


def _window(info: TensorInfo, rows: slice | None, cols: slice | None) -> tuple[tuple[int, ...], _Range, _Range]:
    """Resolves slices to (result shape, range of rows, range of columns); clips nothing.

    A vector has one element per row and one column, whichever slice was given; a scalar is one such row.
    """
    shape = info.shape
    if len(shape) < 2:
        if not shape and (rows or cols):
            raise CheckpointError(f"{info.file}: tensor {short(info.name)} is a scalar and cannot be sliced")
        if rows and cols:
            raise CheckpointError(f"{info.file}: tensor {short(info.name)} has one dimension: give rows or cols")
        first_last = _range(info, rows or cols, shape[0] if shape else 1)
        return ((first_last[1] - first_last[0],) if shape else ()), first_last, (0, 1)
    (first, last), (left, right) = _range(info, rows, shape[0]), _range(info, cols, shape[-1])
    return (last - first, *shape[1:-1], right - left), (first, last), (left, right)


def _range(info: TensorInfo, part: slice | None, size: int) -> _Range:
    if part is None:
        return 0, size
    begin, end = 0 if part.start is None else part.start, size if part.stop is None else part.stop
    if part.step not in (None, 1) or not 0 <= begin <= end <= size:
        raise CheckpointError(
            f"{info.file}: tensor {short(info.name)} {list(info.shape)} has no range {part} of {size}"
        )
    return begin, end


def hub_headers(
    repo_id: str, *, revision: str | None = None, local_files_only: bool = False
) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """Returns (config, {tensor: (dtype code, shape)}) of a hub repository without downloading its weights.

    Without the hub, the headers of a snapshot in the local cache are used.
    """
    failure: CheckpointError | None = None
    if not local_files_only:
        try:
            return source.remote_headers(repo_id, revision)
        except CheckpointError as error:
            failure = error
    try:
        folder = source.download(repo_id, revision, local_files_only=True)
        with Checkpoint(source.find_in_folder(folder)) as checkpoint:
            tensors = {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
            return checkpoint.config, tensors
    except CheckpointError as error:
        raise failure or error from error


# FP8 blocks


def check_scale_grid(
    name: str, shape: Sequence[int], scale_shape: Sequence[int], block: Sequence[int], file: str | os.PathLike[str]
) -> None:
    """Refuses a scale_inv whose shape is not one scale per (started) block of the weight."""
    if len(shape) != 2 or len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise CheckpointError(
            f"{os.fspath(file)}: tensor {short(name)}: FP8 blocks need a weight of two dimensions and a "
            f"weight_block_size of two positive integers, got {list(shape)} and {list(block)}"
        )
    wanted = [-(-size // step) for size, step in zip(shape, block, strict=True)]
    if list(scale_shape) != wanted:
        raise CheckpointError(
            f"{os.fspath(file)}: the scales of tensor {short(name)} have shape {list(scale_shape)}, but "
            f"{list(shape)} in blocks of {list(block)} needs {wanted}; check weight_block_size in config.json"
        )


def dequantize_blocks(
    weight: np.ndarray, scale_inv: np.ndarray, block: tuple[int, int], row_start: int = 0, col_start: int = 0
) -> np.ndarray:
    """Returns float32(weight[i, j]) * float32(scale_inv[i // block rows, j // block columns]), DeepSeek-V3's rule.

    `weight` is the part of the full FP8 tensor that starts at (row_start, col_start); `scale_inv` is the full grid.
    Extra memory stays near a megabyte.
    """
    if weight.dtype not in _FP8:
        raise ValueError(f"FP8 blocks hold 8-bit floats, got {weight.dtype}")
    rows, cols = weight.shape
    starts, steps = (row_start, col_start), block
    grid = [-(-(start + size) // step) for start, size, step in zip(starts, weight.shape, steps, strict=True)]
    if scale_inv.ndim != 2 or any(have < need for have, need in zip(scale_inv.shape, grid, strict=True)):
        raise ValueError(f"scales of shape {list(scale_inv.shape)} do not cover the {grid} blocks of the weight")
    codes = np.arange(256, dtype=np.uint8).view(weight.dtype).astype(np.float32)
    columns = (col_start + np.arange(cols)) // block[1]
    piece = max(1, (1 << 17) // max(cols, 1))
    out = np.empty((rows, cols), np.float32)
    row = 0
    with np.errstate(over="ignore", invalid="ignore"):
        while row < rows:
            line = (row_start + row) // block[0]
            scales = scale_inv[line].astype(np.float32)[columns]
            end = min(rows, (line + 1) * block[0] - row_start)
            for begin in range(row, end, piece):
                part = slice(begin, min(begin + piece, end))
                np.take(codes, weight[part].view(np.uint8), out=out[part], mode="clip")
                out[part] *= scales
            row = end
    return out


# Writing


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

    One tensor at a time is in memory. Nothing under a final name changes before every byte is on the disk; a single
    file or index that would contradict the new one is then removed. Returns the weight files.
    """
    folder = Path(folder)
    shards = _plan(tensors, max_shard_size)
    count = len(shards)
    names = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    pending: list[tuple[Path, Path]] = []

    def temporary(name: str) -> Path:
        pending.append((folder / f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp", folder / name))
        return pending[-1][0]

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, shard in zip(names, shards, strict=True):
            _write_file(temporary(name), _file_parts(shard, {"format": "pt"} if metadata is None else metadata))
        if count > 1:
            weight_map = {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard}
            total = sum(item.nbytes for shard in shards for item in shard)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            _write_file(temporary(INDEX_FILE), [json.dumps(index, indent=2).encode() + b"\n"])
        for path, final in pending:
            os.replace(path, final)
        (folder / (INDEX_FILE if count == 1 else SINGLE_FILE)).unlink(missing_ok=True)
        _sync_folder(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint to {folder}: {error}") from error
    finally:
        for path, _ in pending:
            path.unlink(missing_ok=True)
    return [folder / name for name in names]


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
        if dtype not in DTYPES or not all(map(source.is_size, shape)):
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
    with open(path, "xb") as file:
        for part in parts:
            file.write(part)
            del part  # it holds the tensor while the next one is made
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
