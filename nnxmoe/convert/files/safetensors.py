"""Read tensor locations from safetensors headers. The safetensors library parses and validates the headers.

`nnxmoe.convert.storage.checkpoint` reads the data instead of the library, for two reasons. The library uses a memory
map, so that truncation of a file during reading causes SIGBUS. It also does not return FP8 as NumPy arrays
(safetensors 0.8).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from nnxmoe.config.printable import short
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.untrusted_files import refuse_lfs_pointer, stat_regular_file

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
MAX_HEADER = 32_000_000  # bytes; twice the header size of one file with the 90,000 tensors of DeepSeek-V3
_MAX_RANK = 32
_DAMAGED = "the file is damaged or incomplete: download or write it again"


@dataclass(frozen=True)
class TensorInfo:
    """Location of a tensor in a file.

    Attributes:
        name: Name of the tensor.
        file: Path of the file.
        dtype: Dtype code in the file, such as ``BF16``.
        shape: Shape of the tensor.
        begin: Offset of the first byte in the file.
        end: Offset after the last byte.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor in the file, in bytes."""
        return self.end - self.begin

    @property
    def numpy_dtype(self) -> np.dtype:
        """Stored dtype as a NumPy dtype. BF16 and FP8 are ml_dtypes dtypes."""
        return DTYPES[self.dtype]

    def at(self, index: int) -> Self:
        """Return the location of one slice along the first dimension."""
        size = self.nbytes // self.shape[0]
        begin = self.begin + index * size
        return replace(self, shape=self.shape[1:], begin=begin, end=begin + size)


def is_size(value: object) -> bool:
    """Return whether a value from JSON is an int >= 0 (bool, float and str excluded)."""
    return type(value) is int and value >= 0


def dtype_code(dtype: Any) -> str:
    """Return the safetensors code of a NumPy dtype or JAX scalar type, such as 'BF16'."""
    numpy_dtype = np.dtype(dtype)
    code = next((code for code, candidate in DTYPES.items() if candidate == numpy_dtype), None)
    if code is None:
        raise CheckpointError(f"safetensors does not support dtype {numpy_dtype}; cast to one of {', '.join(DTYPES)}")
    return code


def header_length(path: Path) -> int:
    """Return the length of a safetensors file's header in bytes. Raises CheckpointError if it is out of range."""
    size = stat_regular_file(path, "download it again", CheckpointError).st_size
    try:
        with open(path, "rb") as file:
            head = file.read(128)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; make the file readable") from error
    refuse_lfs_pointer(path, head, CheckpointError)
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        raise CheckpointError(
            f"{path}: the header's length is {length}, but the file has {size} bytes and the limit is {MAX_HEADER}; "
            f"not a safetensors file, or {_DAMAGED}"
        )
    return length


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and validate the header of a safetensors file, and return the tensors' locations by name.

    Format: https://huggingface.co/docs/safetensors/index#format
    """
    begin, tensors = 8 + header_length(path), dict[str, TensorInfo]()
    try:
        with safe_open(path, framework="np") as file:
            # Valid files have no gaps. The order and sizes of the tensors therefore determine the offsets.
            for name in file.offset_keys():
                view = file.get_slice(name)
                tensors[name] = _info(path, name, view.get_dtype(), tuple(view.get_shape()), begin)
                begin = tensors[name].end
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}; {_DAMAGED}") from error
    except MemoryError as error:  # the library maps the file into memory, which can exceed an address space limit
        raise CheckpointError(
            f"{path}: not enough address space to read the header: {error}; raise the limit (ulimit -v)"
        ) from error
    return tensors


def _info(path: Path, name: str, dtype: str, shape: tuple[int, ...], begin: int) -> TensorInfo:
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {short(name)}: dtype {short(dtype)} is not supported; convert it to {', '.join(DTYPES)}"
        )
    if len(shape) > _MAX_RANK or prod(max(dim, 1) for dim in shape) * DTYPES[dtype].itemsize >= 2**63:
        raise CheckpointError(
            f"{path}: tensor {short(name)}: shape {short(list(shape))} has more than {_MAX_RANK} dimensions or 2**63 "
            "bytes"
        )
    return TensorInfo(name, path, dtype, shape, begin, begin + prod(shape) * DTYPES[dtype].itemsize)
