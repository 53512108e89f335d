"""Training data as JSON lines: one ``{"text": …}`` or ``{"messages": [{"role", "content"}]}`` per line.

The file is read once to validate every line and to index its offset. Lines are then read on access, so a file may be
larger than memory: the index takes 8 bytes per line.
"""

import dataclasses
import hashlib
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import SupportsIndex

import numpy as np

from nnxmoe.config.printable import short
from nnxmoe.storage.files import absolute, parse_json, refuse_lfs_pointer, regular_file

MAX_LINE_BYTES = 16 << 20
ROLES = ("system", "user", "assistant")
_REMEDY = "correct or remove the line"


class DataError(ValueError):
    """Raised for unusable training data; the message names the file, the line and the remedy."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One line: a text, or the messages of a chat as ``(role, content)``."""

    text: str | None
    messages: tuple[tuple[str, str], ...] = ()


class JsonLines:
    """The non-blank lines of a file, all validated. Raises DataError for the first invalid one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = absolute(path)
        self._status = self._stat()
        self.size = self._status[0]
        digest, starts, numbers = hashlib.sha256(), array("q"), array("q")
        for number, start, line in _lines(self.path):
            digest.update(line)
            if line.strip():
                _parse(line, f"{self.path} line {number}")
                starts.append(start)
                numbers.append(number)
        if not starts:
            raise DataError(f'{self.path} is empty: write one JSON object per line, such as {{"text": "…"}}')
        self.digest = digest.hexdigest()
        self._starts = np.frombuffer(starts, np.int64)
        whole = len(numbers) == numbers[-1]
        self._numbers = None if whole else np.frombuffer(numbers, np.int64)  # needed only if some lines are blank

    def __len__(self) -> int:
        return len(self._starts)

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
            return _parse(file.readline(MAX_LINE_BYTES + 1), self.where(number))

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


def _parse(line: bytes, where: str) -> Record:
    value = parse_json(line.removeprefix(b"\xef\xbb\xbf"), where, _REMEDY, DataError)
    if not isinstance(value, dict):
        raise DataError(f"{where}: {short(value)} is not a JSON object; {_REMEDY}")
    if value.keys() == {"text"}:
        return Record(_text(value["text"], f"{where}: text"))
    if value.keys() == {"messages"}:
        return Record(None, _messages(value["messages"], where))
    raise DataError(
        f"{where} has the fields {short(sorted(value))}: write either 'text' (a string) or 'messages' (a list of "
        "objects with 'role' and 'content')"
    )


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{what} is {short(value)}: it must be a non-empty string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} is not valid Unicode: {error}; remove lone surrogates") from None
    return value


def _messages(value: object, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list):
        raise DataError(f"{where}: messages is {short(value)}: it must be a list of objects with 'role' and 'content'")
    found: list[tuple[str, str]] = []
    for number, message in enumerate(value):
        what = f"{where}: messages[{number}]"
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise DataError(f"{what} is {short(message)}: it must be an object with only 'role' and 'content'")
        if message["role"] not in ROLES:
            raise DataError(f"{what} has the role {short(message['role'])}: use {', '.join(ROLES)}")
        found.append((message["role"], _text(message["content"], f"{what}: content")))
    if not any(role == "assistant" for role, _ in found):
        raise DataError(f"{where} has no message from the assistant, hence nothing to learn: add one, or {_REMEDY}")
    if found[0][0] == "assistant":
        raise DataError(f"{where} starts with the assistant: add the message that it answers")
    return tuple(found)
