"""Read the headers of GGUF files (llama.cpp's format): the metadata and the location of each tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. This module checks all sizes against the file size
before it allocates memory. The ``gguf`` library supplies only the tensor types and the dequantization. Its own reader
memory-maps the file and does not terminate if a count is wrong (gguf 0.19).
"""

import functools
import importlib.metadata
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from nnxmoe.config.printable import short
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.safetensors import DTYPES, TensorInfo
from nnxmoe.convert.files.untrusted_files import GGUF_MAGIC, refuse_lfs_pointer, stat_regular_file
from nnxmoe.runtime.extras import install_command

MAX_HEADER = 256_000_000  # bytes; Gemma's vocabulary takes 6 MB
_MAX_TENSORS = 250_000
_MAX_FIELDS = 65_536
_MAX_NAME = 1_024  # bytes in a metadata key or a tensor name
_MAX_RANK = 4
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # type -> struct format
_STRING, _ARRAY = 8, 9
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class GGUFInfo(TensorInfo):
    """Location of a tensor in a GGUF file.

    For types without a NumPy or ml_dtypes dtype, ``dtype`` is ``U8`` and the last dimension of ``shape`` counts bytes.

    Attributes:
        kind: GGML type of the tensor, such as ``Q4_K``.
        values: Shape of the dequantized tensor.
    """

    kind: str = ""
    values: tuple[int, ...] = ()

    def at(self, index: int) -> Self:
        """Return the location of one slice along the first dimension."""
        return replace(super().at(index), values=self.values[1:])


@dataclass(frozen=True)
class GGUF:
    """Merged headers of a model stored in one or several GGUF files.

    Attributes:
        file: Path that was opened.
        files: Paths of all splits, in order.
        fields: Metadata by key.
        tensors: Tensor locations by llama.cpp name.
    """

    file: Path
    files: tuple[Path, ...]
    fields: Mapping[str, Any]
    tensors: Mapping[str, GGUFInfo]

    @classmethod
    def open(cls, file: Path) -> "GGUF":
        """Read the header of a file. If the file is one of several splits, also read the headers of the other splits.

        Raises CheckpointError if a file is malformed or missing.
        """
        files = _splits(file)
        headers = [_header(path, path.stat().st_mtime_ns) for path in files]
        fields, tensors = headers[0][0], dict[str, GGUFInfo]()
        for number, (path, (header, infos)) in enumerate(zip(files, headers, strict=True)):
            if (header.get("split.no", 0), header.get("split.count", 1) or 1) != (number, len(files)):
                text = f"split.no {short(header.get('split.no', 0))}, split.count {short(header.get('split.count', 1))}"
                raise CheckpointError(
                    f"{path}: {text}, but its name implies split.no {number} of {len(files)}: restore the original name"
                )
            if duplicates := sorted(tensors.keys() & infos.keys()):
                raise _damaged(path, f"tensor {short(duplicates[0])} is also in another split")
            tensors |= infos
        expected_count = fields.get("split.tensors.count", len(tensors))
        if expected_count != len(tensors):
            raise CheckpointError(
                f"{file}: split.tensors.count is {short(expected_count)}, but the splits contain {len(tensors)}"
            )
        return cls(file, tuple(files), fields, tensors)

    def error(self, message: str) -> CheckpointError:
        """Return a CheckpointError whose message starts with the path of the file."""
        return CheckpointError(f"{self.file}: {message}")

    def text(self, key: str) -> str:
        """Return a metadata string. Raises CheckpointError if the key is missing or its value is not a string."""
        value = self.fields.get(key)
        if not isinstance(value, str):
            raise _damaged(self.file, f"{key} must be a string, got {short(value)}")
        return value


def _damaged(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{file}: {problem}; the file is damaged or incomplete: download or write it again")


def library() -> Any:
    """Import the ``gguf`` library. Raises CheckpointError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(f"GGUF files require the gguf library: {install_command('gguf')}") from error
    return gguf


def _splits(file: Path) -> list[Path]:
    match = _SPLIT.search(file.name)
    if match is None:
        return [file]
    count, stem = int(match[2]), file.name[: match.start()]
    if not 1 <= count <= _MAX_FIELDS:
        raise CheckpointError(f"{file}: its name specifies an unsupported split into {count} files")
    files = [file.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    if missing_names := [path.name for path in files if not os.path.lexists(path)]:
        raise CheckpointError(
            f"{file} is one of {count} files, but {missing_names[0]} is not in the folder: download it"
        )
    return files


class _Reader:
    """Sequential reader of the numbers and strings in a GGUF header.

    Reading beyond the end of the file or beyond MAX_HEADER bytes raises CheckpointError.
    """

    def __init__(self, path: Path, size: int, file: Any) -> None:
        self.path, self.size, self.file, self.at = path, min(size, MAX_HEADER), file, 0

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            request = f"{what} at byte {self.at} takes {count} bytes"
            raise _damaged(self.path, f"{request}, but the header can have at most {self.size - self.at} more")
        data = self.file.read(count)
        if len(data) < count:
            raise _damaged(self.path, f"it ends at byte {self.at + len(data)}, within {what}")
        self.at += count
        return data

    def numbers(self, code: str, count: int, what: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}"), what))

    def string(self, what: str, most: int = MAX_HEADER) -> str:
        (length,) = self.numbers("Q", 1, what)
        if length > most:
            raise _damaged(self.path, f"{what} has a length of {length}, but at most {most} bytes are allowed")
        return self.take(length, what).decode("utf-8", errors="replace")

    def value(self, kind: int, what: str, inside: bool = False) -> Any:
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind], 1, what)[0]
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY or inside:
            context = " in an array" if inside else ""
            raise _damaged(self.path, f"{what} has the unknown type {kind}{context}")
        (element_type,), (count,) = self.numbers("I", 1, what), self.numbers("Q", 1, what)
        if element_type in _NUMBERS:
            return self.numbers(_NUMBERS[element_type], count, what) if count else ()
        if 8 * count > self.size - self.at:  # a string takes at least 8 bytes
            raise _damaged(self.path, f"{what} is an array of {count}, more than the file can contain")
        return tuple(self.value(element_type, what, inside=True) for _ in range(count))


@functools.lru_cache(maxsize=4)
def _header(path: Path, _modified: int) -> tuple[Mapping[str, Any], Mapping[str, GGUFInfo]]:
    size = stat_regular_file(path, "download it again", CheckpointError).st_size
    try:
        with open(path, "rb") as file:
            refuse_lfs_pointer(path, file.read(128), CheckpointError)
            file.seek(0)
            return _parse(_Reader(path, size, file), path, size)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; make the file readable") from error


def _parse(reader: _Reader, path: Path, size: int) -> tuple[Mapping[str, Any], Mapping[str, GGUFInfo]]:
    if reader.take(4, "the magic number") != GGUF_MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it does not start with the bytes GGUF")
    (version,) = reader.numbers("I", 1, "the version")
    if version not in (2, 3):
        is_big_endian = version and version & 0xFFFF == 0
        reason = "it is big-endian" if is_big_endian else f"version {version} is not supported, only 2 and 3"
        raise CheckpointError(f"{path}: {reason}: convert the model again with a current llama.cpp")
    num_tensors, num_fields = reader.numbers("Q", 2, "the counts")
    if num_tensors > _MAX_TENSORS or num_fields > _MAX_FIELDS:
        raise CheckpointError(
            f"{path}: {num_tensors} tensors and {num_fields} fields; at most {_MAX_TENSORS}, {_MAX_FIELDS}"
        )
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        key = reader.string("a key", _MAX_NAME)
        if key in fields:
            raise _damaged(path, f"the key {short(key)} occurs twice")
        fields[key] = reader.value(reader.numbers("I", 1, short(key))[0], short(key))
    entries = []  # name, shape (rows first), type and offset
    for _ in range(num_tensors):
        name = reader.string("the name of a tensor", _MAX_NAME)
        (rank,) = reader.numbers("I", 1, short(name))
        if rank > _MAX_RANK:
            raise CheckpointError(f"{path}: tensor {short(name)} has {rank} dimensions, more than {_MAX_RANK}")
        shape = reader.numbers("Q", rank, short(name))[::-1]
        entries.append((name, shape, *reader.numbers("I", 1, short(name)), *reader.numbers("Q", 1, short(name))))
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & alignment - 1:
        raise CheckpointError(f"{path}: general.alignment must be a power of two, got {short(alignment)}")
    return fields, _located(path, entries, -(-reader.at // alignment) * alignment, alignment, size)


def _located(
    path: Path, entries: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int, size: int
) -> dict[str, GGUFInfo]:
    """Compute the tensor locations. As in llama.cpp, the data must be in header order, without gaps except padding."""
    types, sizes = library().GGMLQuantizationType, library().GGML_QUANT_SIZES
    tensors, position = dict[str, GGUFInfo](), 0
    for name, shape, type_number, offset in entries:
        tensor = f"tensor {short(name)}"
        if name in tensors:
            raise _damaged(path, f"{tensor} occurs twice")
        if type_number not in set(types) or types(type_number) not in sizes:
            remedy = f"which gguf {importlib.metadata.version('gguf')} does not support: update gguf"
            raise CheckpointError(f"{path}: {tensor} has the type {type_number}, {remedy}")
        tensor_type, (group, width) = types(type_number).name, sizes[types(type_number)]
        if math.prod(max(1, length) for length in shape) >= 2**60:
            raise _damaged(path, f"{tensor}: shape {short(list(shape))} is too large")
        row_length = shape[-1] if shape else 1
        if row_length % group:
            raise _damaged(
                path, f"{tensor}: rows of {row_length} cannot be divided into {tensor_type} blocks of {group}"
            )
        octets = math.prod(shape[:-1]) * (row_length // group) * width
        if offset != position or start + offset + octets > size:
            reason = (
                f"starts at {offset} instead of {position}"
                if offset != position
                else f"ends beyond the file's {size} bytes"
            )
            raise _damaged(path, f"{tensor} {reason}")
        position = -(-(offset + octets) // alignment) * alignment
        is_plain = tensor_type in DTYPES
        rows = shape if is_plain else (*shape[:-1], row_length // group * width)
        span = start + offset, start + offset + octets
        tensors[name] = GGUFInfo(
            name, path, tensor_type if is_plain else "U8", rows, *span, kind=tensor_type, values=shape
        )
    return tensors
