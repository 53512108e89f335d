"""The headers of safetensors files: the location of each tensor, validated before any data is read.

Every header is checked twice: by the rules below, and by the safetensors library.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from nnxmoe.config.printable import short
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.files import parse_json, refuse_lfs_pointer, regular_file
from nnxmoe.storage.source import is_size

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
MAX_HEADER = 32_000_000  # bytes; twice the size for the 90,000 tensors of DeepSeek-V3 in one file
_MAX_RANK = 32
_DAMAGED = "the file is damaged or incomplete: download or write it again"


@dataclass(frozen=True)
class TensorInfo:
    """Location of a tensor: `begin` and `end` are byte offsets in `file`; `dtype` is the file's code."""

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

    def at(self, index: int) -> "TensorInfo":
        """The part at an index of the first dimension."""
        size = self.nbytes // self.shape[0]
        begin = self.begin + index * size
        return replace(self, shape=self.shape[1:], begin=begin, end=begin + size)


def dtype_code(dtype: Any) -> str:
    """Returns the safetensors code of a numpy dtype (also jnp's scalar types), for instance 'BF16'."""
    wanted = np.dtype(dtype)
    code = next((code for code, known in DTYPES.items() if known == wanted), None)
    if code is None:
        raise CheckpointError(f"safetensors cannot hold dtype {wanted}; cast to one of {', '.join(DTYPES)}")
    return code


# Headers


def header_length(path: Path) -> int:
    """Length of a safetensors file's header in bytes, checked against the file's size."""
    size = regular_file(path, "download it again", CheckpointError).st_size
    head = _read(path, 0, 128)
    refuse_lfs_pointer(path, head, CheckpointError)
    return _header_length(path, head, size)


def _read(path: Path, offset: int, count: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(count)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; make the file readable") from error


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Validates a safetensors file and returns its tensors; reads the header only.

    Format: https://huggingface.co/docs/safetensors/index#format
    """
    length, size = header_length(path), path.stat().st_size
    header = _read(path, 8, length)
    entries = parse_json(header, f"{path}: the header", _DAMAGED, CheckpointError)
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header must be a JSON object, got {short(entries)}; {_DAMAGED}")
    _check_metadata(path, entries.pop("__metadata__", {}))
    start = 8 + length
    tensors = {name: _parse_entry(path, name, entry, start, size) for name, entry in entries.items()}
    _check_coverage(path, tensors.values(), start, size)
    _check_by_the_library(path)
    return tensors


def _header_length(path: Path, head: bytes, size: int) -> int:
    if len(head) < 8:
        raise CheckpointError(f"{path} has only {size} bytes, too few for a header; {_DAMAGED}")
    (length,) = struct.unpack("<Q", head[:8])
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        limit = f"the file has {size} bytes" if length > size - 8 else f"allowed are 2 to {MAX_HEADER}"
        raise CheckpointError(
            f"{path}: the header's length is {length}, and {limit}; not a safetensors file, or {_DAMAGED}"
        )
    return length


def _check_by_the_library(path: Path) -> None:
    """The safetensors library's validation, which is independent of ours."""
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}; {_DAMAGED}") from error
    except MemoryError as error:  # the library maps the file; a limit on the address space may forbid it
        raise CheckpointError(
            f"{path}: not enough address space to check it: {error}; raise the limit (ulimit -v)"
        ) from error


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
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
        raise CheckpointError(
            f"{path}: tensor {short(name)}: dtype {short(dtype)} is not supported; convert it to {known}"
        )
    if not (isinstance(shape, list) and all(map(is_size, shape))):
        raise refuse("shape", shape, "is not a list of non-negative integers")
    if len(shape) > _MAX_RANK or prod(max(dim, 1) for dim in shape) * DTYPES[dtype].itemsize >= 2**63:
        raise refuse("shape", shape, f"has more than {_MAX_RANK} dimensions or 2**63 bytes")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(is_size, offsets))):
        raise refuse("data_offsets", offsets, "are not two non-negative integers")
    begin, end = offsets
    if begin > end or start + end > size:
        raise refuse("data_offsets", offsets, f"do not lie within the {size - start} bytes of data")
    wanted = prod(shape) * DTYPES[dtype].itemsize
    if end - begin != wanted:
        raise refuse("data_offsets", offsets, f"span {end - begin} bytes, but {dtype} {shape} takes {wanted}")
    return TensorInfo(name, path, dtype, tuple(shape), start + begin, start + end)


def _check_coverage(path: Path, tensors: Iterable[TensorInfo], start: int, size: int) -> None:
    """Checks that the tensors cover the data exactly: no overlap, no gap, nothing after the last."""
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
        raise CheckpointError(f"{path}: {size - position} bytes follow {previous}, and belong to no tensor; {_DAMAGED}")
