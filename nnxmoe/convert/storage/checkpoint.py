"""Reader of checkpoints in the Hugging Face layout: config, tensor headers, and ranges of rows and columns.

This module returns NumPy arrays and does not depend on models. It reads data with pread instead of a memory map, so
that a file that is truncated during reading causes an error instead of SIGBUS.
"""

import os
import threading
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np

from nnxmoe.config.printable import short, some
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.safetensors import DTYPES, MAX_HEADER, TensorInfo, header_length, read_header
from nnxmoe.convert.files.untrusted_files import is_gguf
from nnxmoe.convert.gguf.gguf_file import GGUF
from nnxmoe.convert.storage import find_checkpoint
from nnxmoe.convert.storage.find_checkpoint import INDEX_FILE, CheckpointFiles, normalize_prefixes

_PIECE = 64 << 20  # Bytes per system call.
_PAGE = 4096  # Rows of at most one page are read whole, because the operating system reads whole pages.


class Checkpoint:
    """Open checkpoint. Provides the config, the headers of all weight files, and reads of row and column ranges.

    Reads are thread-safe. Files stay open until `close`. Do not call `close` while a read is running.
    """

    def __init__(self, found: CheckpointFiles) -> None:
        """Read and check the headers of the files. Callers normally use `Checkpoint.open`."""
        self.folder = found.folder
        self.config_file = str(found.folder if is_gguf(found.folder) else found.folder / "config.json")
        self.config = found.config
        self.files: list[Path] = list(found.files)
        self.notes: list[str] = list(found.notes)
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
        """Open a local folder, or a hub id such as 'org/name'. Downloads the files that the hub cache lacks."""
        return cls(find_checkpoint.find_checkpoint(path_or_hub_id, revision, local_files_only))

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data returned so far. A read of a column range counts only the bytes of the range."""
        return self._bytes_read

    def _collect(self, weight_map: dict[str, str]) -> None:
        """Merge the headers of the files, and compare them with the index."""
        if is_gguf(self.folder):
            self.tensors |= GGUF.open(self.folder).tensors
            self._sizes = {file: file.stat().st_size for file in self.files}
            return
        header_bytes, missing_names, names_by_file = 0, list[str](), dict[str, list[str]]()
        for file in self.files:
            header_bytes += header_length(file)
            if header_bytes > MAX_HEADER:
                raise CheckpointError(
                    f"{file}: the headers up to this file exceed {MAX_HEADER} bytes in total; use larger shards"
                )
            header = read_header(file)
            self._sizes[file] = file.stat().st_size
            for name, info in header.items():
                existing = self.tensors.setdefault(name, info)
                if existing is info:
                    continue
                listed_file = self.folder / weight_map.get(name, "")
                chosen_info = next((candidate for candidate in (info, existing) if candidate.file == listed_file), None)
                if not self._equal(existing, info):
                    if chosen_info is None:
                        raise CheckpointError(
                            f"tensor {short(name)} is in {existing.file} ({existing.dtype} {list(existing.shape)}) and "
                            f"in {file} ({info.dtype} {list(info.shape)}) with different contents, and {INDEX_FILE} "
                            "does not specify which to use: correct the index"
                        )
                    names_by_file.setdefault(chosen_info.file.name, []).append(name)
                self.tensors[name] = chosen_info or existing
        for name, listed_name in weight_map.items():
            info = self.tensors.get(name)
            if info is None:
                missing_names.append(name)
            elif info.file != self.folder / listed_name:
                raise CheckpointError(
                    f"{self.folder / INDEX_FILE} lists tensor {short(name)} in {self.folder / listed_name}, "
                    f"but it is in {info.file}; correct the index"
                )
        self.notes += [
            f"{some(names)} of {file} replaces a tensor with the same name in another file, as {INDEX_FILE} says"
            for file, names in names_by_file.items()
        ]
        if missing_names := [name for name in missing_names if not name.endswith("rotary_emb.inv_freq")]:
            self.notes.append(f"{INDEX_FILE} lists {some(missing_names)}, which no file contains")
        self.tensors = {name: replace(info, name=name) for name, info in normalize_prefixes(self.tensors).items()}

    def _equal(self, first: TensorInfo, second: TensorInfo) -> bool:
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        step = min(4 << 20, first.nbytes)
        first_bytes, second_bytes = bytearray(step), bytearray(step)
        for offset in range(0, first.nbytes, max(1, step)):
            count = min(step, first.nbytes - offset)
            self._fill(first, first.begin + offset, memoryview(first_bytes)[:count])
            self._fill(second, second.begin + offset, memoryview(second_bytes)[:count])
            if first_bytes[:count] != second_bytes[:count]:
                return False
        return True

    def same(self, name: str, other: str) -> bool:
        """Return whether two tensors have the same dtype, shape and bytes."""
        return self._equal(self.info(name), self.info(other))

    def info(self, name: str) -> TensorInfo:
        """Return the location of a tensor. Raises CheckpointError if the name is unknown."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} has no tensor {short(name)} (it has {len(self.tensors)} others)")
        return self.tensors[name]

    def read(self, name: str, rows: slice | None = None, cols: slice | None = None) -> np.ndarray:
        """Read a tensor, or ``rows`` of its first and ``cols`` of its last dimension, in the stored dtype."""
        info = self.info(name)
        out = np.empty(_window(info, rows, cols)[0], info.numpy_dtype)
        self.read_into(info, out, rows, cols)
        return out

    def read_into(
        self, tensor: str | TensorInfo, out: np.ndarray, rows: slice | None = None, cols: slice | None = None
    ) -> None:
        """Read into ``out``, a C-contiguous array with the stored dtype and the shape of the range. See `read`."""
        info = self.info(tensor) if isinstance(tensor, str) else tensor
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

    def _fill_columns(self, info: TensorInfo, start: int, row_bytes: int, left: int, target: np.ndarray) -> None:
        """Read the same byte range of consecutive rows. Short rows are read in blocks of whole rows."""
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
        num_bytes = 0
        while num_bytes < len(buffer):
            try:
                count = self._read_at(descriptor, buffer[num_bytes : num_bytes + _PIECE], offset + num_bytes)
            except OSError as error:
                raise CheckpointError(f"{info.file}: reading tensor {short(info.name)}: {error}") from error
            if count == 0:
                raise CheckpointError(
                    f"{info.file} ends at byte {offset + num_bytes}, within tensor {short(info.name)}: it was "
                    "truncated after it was opened; do not write to a checkpoint while it is read"
                )
            num_bytes += count

    def _read_at(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(descriptor, [buffer], offset)
        with self._lock:  # without preadv (Windows, older macOS), all threads share the file position
            os.lseek(descriptor, offset, os.SEEK_SET)
            data = os.read(descriptor, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _descriptor(self, file: Path) -> int:
        """Open a file on the first read. Raises CheckpointError if the size changed after the header was checked."""
        descriptor = self._descriptors.get(file)
        if descriptor is not None:
            return descriptor
        with self._lock:
            if self._closed:
                raise ValueError(f"the checkpoint {self.folder} is closed")
            if file not in self._descriptors:
                try:
                    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
                except OSError as error:
                    raise CheckpointError(f"{file}: {error.strerror or error}; open the checkpoint again") from error
                self._descriptors[file] = descriptor
                if os.fstat(descriptor).st_size != self._sizes[file]:
                    raise CheckpointError(f"{file}: its size changed after its header was read; open it again")
            return self._descriptors[file]

    def close(self) -> None:
        """Close the files. Later reads raise ValueError."""
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
    """Resolve slices to (result shape, range of rows, range of columns), without clipping.

    A vector has a single column, and either slice selects its rows. A scalar has a single row and column.
    """
    shape = info.shape
    if len(shape) < 2:
        if not shape and (rows or cols):
            raise CheckpointError(f"{info.file}: tensor {short(info.name)} is a scalar and cannot be sliced")
        if rows and cols:
            raise CheckpointError(f"{info.file}: tensor {short(info.name)} has one dimension: pass either rows or cols")
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
            f"{info.file}: tensor {short(info.name)} {list(info.shape)}: invalid range {part} of {size}"
        )
    return begin, end


def hub_headers(
    repo_id: str, *, revision: str | None = None, local_files_only: bool = False
) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """Return (config, {tensor: (dtype code, shape)}) of a hub repository without downloading its weights.

    If the hub cannot be reached, read the headers of the snapshot in the local cache.
    """
    if repo_id.endswith(".gguf"):
        remedy = "download the file (hf download) and pass its path"
        raise CheckpointError(f"{repo_id}: the header of a GGUF file on the hub cannot be read separately: {remedy}")
    failure: CheckpointError | None = None
    if not local_files_only:
        try:
            config, tensors = find_checkpoint.remote_headers(repo_id, revision)
            for name, (dtype, _) in tensors.items():
                if dtype not in DTYPES:
                    raise CheckpointError(f"{repo_id}: tensor {short(name)}: dtype {short(dtype)} is not supported")
            return config, normalize_prefixes(tensors)
        except CheckpointError as error:
            failure = error
    try:
        folder = find_checkpoint.download(repo_id, revision, local_files_only=True)
        with Checkpoint(find_checkpoint.find_in_folder(folder)) as checkpoint:
            tensors = {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
            return checkpoint.config, tensors
    except CheckpointError as error:
        raise failure or error from error
