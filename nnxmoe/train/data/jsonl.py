"""Training data as JSON lines, one object per line, or as one JSON array; `nnxmoe.train.data.records` has the forms.

The file is read once to validate every line and to index its offset. Lines are then read on access, so a file may be
larger than memory: the index takes 8 bytes per line. Compressed files and arrays are rewritten as lines in a temporary
file; arrays have to fit in memory for that.
"""

import gzip
import hashlib
import json
import os
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from nnxmoe.storage.files import absolute, parse_json, refuse_lfs_pointer, regular_file
from nnxmoe.train.data.records import DataError, Parse, record_of, tell_ignored

MAX_LINE_BYTES = 16 << 20
_BOM = b"\xef\xbb\xbf"
_WANTED = "give a file of JSON lines, or a JSON array as of Alpaca or ShareGPT"
_OTHERS = {b"PAR1": "a Parquet file", b"\x28\xb5\x2f\xfd": "compressed with zstd", b"PK\x03\x04": "a ZIP archive"}


class JsonLines:
    """The non-blank lines of a file, all validated. Raises DataError for the first invalid one."""

    def __init__(self, path: str | os.PathLike[str], parse: Parse = record_of) -> None:
        self._parse = parse
        self.path = self._lines_of = absolute(path)
        regular_file(self.path, _WANTED, DataError)
        self._unit = "line"
        if (rewritten := _as_lines(self.path)) is not None:
            self._lines_of, self._unit = rewritten
            weakref.finalize(self, _remove, self._lines_of, os.getpid())
        self._status = self._stat()
        self.size = self._status[0]
        digest, starts, numbers, ignored = hashlib.sha256(), array("q"), array("q"), set[str]()
        for number, start, line in _lines(self._lines_of, f"{self.path} {self._unit}"):
            digest.update(line)
            if line.strip():
                ignored |= self._parse(*_value(line, f"{self.path} {self._unit} {number}"))[1]
                starts.append(start)
                numbers.append(number)
        if not starts:
            raise DataError(f'{self.path} is empty: write one JSON object per line, such as {{"text": "…"}}')
        self.digest = digest.hexdigest()
        self._starts = np.frombuffer(starts, np.int64)
        whole = len(numbers) == numbers[-1]
        self._numbers = None if whole else np.frombuffer(numbers, np.int64)  # needed only if some lines are blank
        tell_ignored(ignored, self)

    def __len__(self) -> int:
        return len(self._starts)

    def __str__(self) -> str:
        return str(self.path)

    def where(self, index: int) -> str:
        """File and line number, counted from 1, for messages."""
        return f"{self.path} {self._unit} {index + 1 if self._numbers is None else self._numbers[index]}"

    def __getitem__(self, index: SupportsIndex) -> Any:
        number = range(len(self))[index]
        if self._stat() != self._status:
            raise DataError(f"{self.path} was modified after it was opened: start again, and do not edit it meanwhile")
        with self._lines_of.open("rb") as file:
            file.seek(int(self._starts[number]))
            return self._parse(*_value(file.readline(MAX_LINE_BYTES + 1), self.where(number)))[0]

    def _stat(self) -> tuple[int, int, int]:
        status = regular_file(self._lines_of, _WANTED, DataError)
        return status.st_size, status.st_mtime_ns, status.st_ino


def _as_lines(path: Path) -> tuple[Path, str] | None:
    """A temporary file with the lines of a compressed file or of a JSON array, and the name of a line; None for a file
    of lines. Raises DataError for other formats."""
    with path.open("rb") as file:
        start = file.read(4)
    opened: Any = gzip.open if start.startswith(b"\x1f\x8b") else open
    if (name := _OTHERS.get(start)) is not None:
        raise DataError(f"{path} is {name}: convert it to JSON lines, such as with datasets' Dataset.to_json")
    try:
        with opened(path, "rb") as file:
            head = file.read(1 << 16).removeprefix(_BOM).lstrip()
            file.seek(0)
            if head[:1] == b"[" and head[1:].lstrip()[:1] in (b"{", b"]"):
                data = file.read().removeprefix(_BOM)
                records: Any = parse_json(data, path, "correct the file", DataError)
                return _written(json.dumps(one).encode() + b"\n" for one in records), "item"
            if head and head[:1] not in b"{[" and path.suffix in (".txt", ".md", ".csv", ".tsv"):
                kind = "a table" if path.suffix in (".csv", ".tsv") else "plain text"
                raise DataError(f'{path} is {kind}: write JSON lines such as {{"text": "…"}}, one per document')
            return (_written(iter(lambda: file.read(1 << 20), b"")), "line") if opened is gzip.open else None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: {error}; the file is damaged: download it again") from error


def _remove(path: Path, process: int) -> None:
    """Remove a temporary file, unless in a forked worker."""
    if os.getpid() == process:
        path.unlink(missing_ok=True)


def _written(parts: Iterable[bytes]) -> Path:
    with tempfile.NamedTemporaryFile(prefix="nnxmoe-", suffix=".jsonl", delete=False) as file:
        file.writelines(parts)
    return Path(file.name)


def _lines(path: Path, where: str) -> Iterator[tuple[int, int, bytes]]:
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
                        f"{where} {number} has more than {MAX_LINE_BYTES} bytes: split it into several lines"
                    )
                yield number, start, line
                start += len(line)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; {_WANTED}") from error


def _value(line: bytes, where: str) -> tuple[Any, str]:
    """The JSON value of a line, and where it is."""
    return parse_json(line.removeprefix(_BOM), where, "correct or remove the line", DataError), where
