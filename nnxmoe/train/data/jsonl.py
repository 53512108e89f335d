"""Training data as JSON lines, one object per line; see `nnxmoe.train.data.records` for its forms.

The file is read once to validate every line and to index its offset. Lines are then read on access, so a file may be
larger than memory: the index takes 8 bytes per line.
"""

import hashlib
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import SupportsIndex

import numpy as np

from nnxmoe.storage.files import absolute, parse_json, refuse_lfs_pointer, regular_file
from nnxmoe.train.data.records import DataError, Ignored, Record, record_of

MAX_LINE_BYTES = 16 << 20


class JsonLines:
    """The non-blank lines of a file, all validated. Raises DataError for the first invalid one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = absolute(path)
        self._status = self._stat()
        self.size = self._status[0]
        digest, starts, numbers, ignored = hashlib.sha256(), array("q"), array("q"), Ignored()
        for number, start, line in _lines(self.path):
            digest.update(line)
            if line.strip():
                ignored.names |= _parse(line, f"{self.path} line {number}")[1]
                starts.append(start)
                numbers.append(number)
        if not starts:
            raise DataError(f'{self.path} is empty: write one JSON object per line, such as {{"text": "…"}}')
        self.digest = digest.hexdigest()
        self._starts = np.frombuffer(starts, np.int64)
        whole = len(numbers) == numbers[-1]
        self._numbers = None if whole else np.frombuffer(numbers, np.int64)  # needed only if some lines are blank
        ignored.tell(self)

    def __len__(self) -> int:
        return len(self._starts)

    def __str__(self) -> str:
        return str(self.path)

    def number(self, index: int) -> int:
        """The line number, counted from 1."""
        return int(index + 1 if self._numbers is None else self._numbers[index])

    def where(self, index: int) -> str:
        """File and line number, for messages."""
        return f"{self.path} line {self.number(index)}"

    def __getitem__(self, index: SupportsIndex) -> Record:
        number = range(len(self))[index]
        if self._stat() != self._status:
            raise DataError(f"{self.path} was modified after it was opened: start again, and do not edit it meanwhile")
        with self.path.open("rb") as file:
            file.seek(int(self._starts[number]))
            return _parse(file.readline(MAX_LINE_BYTES + 1), self.where(number))[0]

    def _stat(self) -> tuple[int, int, int]:
        status = regular_file(self.path, "give a file of JSON lines", DataError)
        return status.st_size, status.st_mtime_ns, status.st_ino


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and bytes of each line. Raises DataError for a line that is too long, without reading it all."""
    try:
        with path.open("rb") as file:
            refuse_lfs_pointer(path, file.read(64), DataError)
            file.seek(0)
            number = start = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise DataError(
                        f"{path} line {number} has more than {MAX_LINE_BYTES} bytes: split it into several lines"
                    )
                yield number, start, line
                start += len(line)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; give a file of JSON lines") from error


def _parse(line: bytes, where: str) -> tuple[Record, frozenset[str]]:
    return record_of(
        parse_json(line.removeprefix(b"\xef\xbb\xbf"), where, "correct or remove the line", DataError), where
    )
