"""Training data from JSON lines or a JSON array; see `nnxmoe.train.data.records` for the formats.

The file is read once to validate every line and to index the line offsets. Lines are then read on
access, so a file may be larger than memory. The index takes 8 bytes per line. Compressed files and
arrays are first converted to a temporary file of lines. Arrays must fit in memory.
"""

import gzip
import hashlib
import json
import os
import re
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from nnxmoe.convert.files.untrusted_files import absolute_path, parse_json, refuse_lfs_pointer, stat_regular_file
from nnxmoe.train.data.bad_records import BadRecords, DataError, RecordError
from nnxmoe.train.data.records import Parse, record_of, tell_ignored

MAX_LINE_BYTES = 16 << 20
_BOM = b"\xef\xbb\xbf"
_WANTED = "pass a file of JSON lines, or a JSON array such as Alpaca's or ShareGPT's"
_OTHERS = {b"PAR1": "a Parquet file", b"ARRO": "an Arrow file", b"PK\x03\x04": "a ZIP archive"}
_OTHERS |= {b"\x28\xb5\x2f\xfd": "compressed with zstd", b"\xfd7zX": "compressed with xz"}


class JsonLines:
    """Usable records of a file. Blank lines do not count as records.

    The constructor validates the whole file. It raises DataError if more records are unusable than
    ``bad`` allows.
    """

    def __init__(self, path: str | os.PathLike[str], parse: Parse = record_of, bad: BadRecords | None = None) -> None:
        self._parse = parse
        self.path = self._lines_of = absolute_path(path, "path")
        stat_regular_file(self.path, _WANTED, DataError)
        self.unit = "line"
        if (rewritten := _as_lines(self.path)) is not None:
            self._lines_of, self.unit = rewritten
            weakref.finalize(self, _remove, self._lines_of, os.getpid())
        self._status = self._stat()
        self.size = self._status[0]
        self._index(BadRecords() if bad is None else bad)

    def _index(self, bad: BadRecords) -> None:
        """Validate every record, and store the offsets and line numbers of usable records."""
        digest, starts, numbers, ignored, self.total = hashlib.sha256(), array("q"), array("q"), set[str](), 0
        for number, start, line in _lines(self._lines_of, digest.update):
            if line is not None and not line.removeprefix(_BOM).strip():
                continue
            self.total += 1
            try:
                ignored |= self._parse(_value(line))[1]
            except RecordError as error:
                bad.add(number, error)
                continue
            starts.append(start)
            numbers.append(number)
        if not self.total:
            raise DataError(f'{self.path} is empty: write one JSON object per line, such as {{"text": "…"}}')
        bad.settle(self.path, self.unit, self.total)
        self.digest = digest.hexdigest()
        self._starts = np.frombuffer(starts, np.int64)
        all_usable = len(numbers) == numbers[-1]
        self._numbers = None if all_usable else np.frombuffer(numbers, np.int64)  # None if all lines are usable records
        tell_ignored(ignored, self)

    def __len__(self) -> int:
        return len(self._starts)

    def __str__(self) -> str:
        return str(self.path)

    def number(self, index: int) -> int:
        """Return the 1-based line number of a usable record."""
        return index + 1 if self._numbers is None else int(self._numbers[index])

    def where(self, index: int) -> str:
        """Return the location of a record for messages: file and line number."""
        return f"{self.path} {self.unit} {self.number(index)}"

    def __getitem__(self, index: SupportsIndex) -> Any:
        number = range(len(self))[index]
        if self._stat() != self._status:
            raise DataError(
                f"{self.path} was modified after it was opened: start again, and do not edit it during the run"
            )
        with self._lines_of.open("rb") as file:
            file.seek(int(self._starts[number]))
            return self._parse(_value(file.readline(MAX_LINE_BYTES + 1)))[0]

    def _stat(self) -> tuple[int, int, int]:
        status = stat_regular_file(self._lines_of, _WANTED, DataError)
        return status.st_size, status.st_mtime_ns, status.st_ino


def _as_lines(path: Path) -> tuple[Path, str] | None:
    """Convert a compressed file or a JSON array to a temporary file of lines.

    Returns the temporary file and the unit of its records in messages. Returns None if the file
    already contains plain JSON lines. Raises DataError for other formats.
    """
    with path.open("rb") as file:
        start = file.read(4)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is UTF-16 text: save it as UTF-8")
    open_file: Any = gzip.open if start.startswith(b"\x1f\x8b") else open
    if (format_name := _OTHERS.get(start)) is not None:
        raise DataError(f"{path} is {format_name}: convert it to JSON lines, such as with datasets' Dataset.to_json")
    try:
        with open_file(path, "rb") as file:
            head = file.read(1 << 16).removeprefix(_BOM).lstrip()
            file.seek(0)
            if head[:1] == b"[" and head[1:].lstrip()[:1] in (b"{", b"]"):
                return _written(_items(file.read().removeprefix(_BOM), path)), "item"
            if head and head[:1] not in b"{[" and path.suffix in (".txt", ".md", ".csv", ".tsv"):
                content = "a table" if path.suffix in (".csv", ".tsv") else "plain text"
                raise DataError(f'{path} is {content}: write JSON lines such as {{"text": "…"}}, one per document')
            return (_written(iter(lambda: file.read(1 << 20), b"")), "line") if open_file is gzip.open else None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: {error}. The file is damaged, so download it again") from error


def _items(data: bytes, path: Path) -> Iterator[bytes]:
    """Yield the items of a JSON array as lines. Raises DataError if the array is not valid JSON."""
    decode, space = json.JSONDecoder().raw_decode, re.compile(r"[ \t\r\n]*")
    number = 0
    try:
        text = data.decode()
        position = _skip_space(space, text, text.index("[") + 1)
        while text[position : position + 1] != "]":
            number += 1
            end = decode(text, position)[1]
            # JSON strings contain no raw newlines, so each newline here is whitespace.
            yield text[position:end].replace("\n", " ").encode() + b"\n"
            position = _skip_space(space, text, end)
            if text[position : position + 1] == ",":
                position = _skip_space(space, text, position + 1)
                if text[position : position + 1] == "]":
                    raise json.JSONDecodeError("Illegal trailing comma before the end of the array", text, position)
            elif text[position : position + 1] != "]":
                raise json.JSONDecodeError("Expecting ',' or ']'", text, position)
        if text[position + 1 :].strip():
            raise json.JSONDecodeError("Extra data", text, position + 1)
    except (ValueError, RecursionError) as error:
        location = "" if isinstance(error, UnicodeDecodeError) else f" item {number}"
        raise DataError(f"{path}{location} is not valid JSON: {error}. Correct the file") from error


def _skip_space(space: re.Pattern[str], text: str, position: int) -> int:
    match = space.match(text, position)
    return match.end() if match else position


def _remove(path: Path, process: int) -> None:
    """Remove a temporary file, except in forked worker processes."""
    if os.getpid() == process:
        path.unlink(missing_ok=True)


def _written(parts: Iterable[bytes]) -> Path:
    with tempfile.NamedTemporaryFile(prefix="nnxmoe-", suffix=".jsonl", delete=False) as file:
        try:
            file.writelines(parts)
        except BaseException:
            os.unlink(file.name)
            raise
    return Path(file.name)


def _lines(path: Path, on_bytes: Callable[[bytes], Any]) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield the number, offset and bytes of each line, and pass all bytes to ``on_bytes``.

    The yielded bytes are None if the line is too long.
    """
    try:
        with path.open("rb") as file:
            refuse_lfs_pointer(path, file.read(64), DataError)
            file.seek(0)
            number = start = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                on_bytes(line)
                number, size, part = number + 1, len(line), line
                while len(part) > MAX_LINE_BYTES and not part.endswith(b"\n"):
                    part = file.readline(MAX_LINE_BYTES + 1)
                    on_bytes(part)
                    size += len(part)
                yield number, start, line if size <= MAX_LINE_BYTES else None
                start += size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; {_WANTED}") from error


def _value(line: bytes | None) -> Any:
    """Parse the JSON value of a line. Raises RecordError if it is too long or not valid JSON."""
    if line is None:
        raise RecordError(f"the record has more than {MAX_LINE_BYTES} bytes: split it into several records")
    line = line.removeprefix(_BOM).strip()
    remedy = "correct the JSON" if line.endswith(b"}") else "write one object per line"
    remedy = "remove the comma at its end" if line.endswith(b"},") else remedy
    return parse_json(line, "the record", remedy, RecordError)
