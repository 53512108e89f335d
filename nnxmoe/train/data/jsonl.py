"""Training data as people write it, a JSON object a line: ``{"text": …}`` or ``{"messages": [{"role", "content"}]}``.

The file is read once to check every line and to note where it begins; after that a line is read when it is asked for,
so a file may be larger than memory: the index takes 8 bytes a line.
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
    """Training data is at fault; the message names the file, the line and what to do."""


@dataclasses.dataclass(frozen=True)
class Record:
    """A line: a text, or the messages of a chat, ``(role, content)``."""

    text: str | None
    messages: tuple[tuple[str, str], ...] = ()


class JsonLines:
    """The lines of a file that are not blank, all of them sound. Raises DataError for the first that is not."""

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
            raise DataError(f'{self.path} is empty: give a JSON object a line, like {{"text": "…"}}')
        self.digest = digest.hexdigest()
        self._starts = np.frombuffer(starts, np.int64)
        whole = len(numbers) == numbers[-1]
        self._numbers = None if whole else np.frombuffer(numbers, np.int64)  # only where some lines are blank

    def __len__(self) -> int:
        return len(self._starts)

    def number(self, index: int) -> int:
        """The line, counted from 1."""
        return int(index + 1 if self._numbers is None else self._numbers[index])

    def where(self, index: int) -> str:
        """The file and line, for messages."""
        return f"{self.path} line {self.number(index)}"

    def __getitem__(self, index: SupportsIndex) -> Record:
        number = range(len(self))[index]
        if self._stat() != self._status:
            raise DataError(f"{self.path} was changed while it is being read: leave it as it is, and start again")
        with self.path.open("rb") as file:
            file.seek(int(self._starts[number]))
            return _parse(file.readline(MAX_LINE_BYTES + 1), self.where(number))

    def _stat(self) -> tuple[int, int, int]:
        status = regular_file(self.path, "give a file of JSON lines", DataError)
        return status.st_size, status.st_mtime_ns, status.st_ino


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and bytes of every line; none is read that is too long."""
    try:
        with path.open("rb") as file:
            refuse_lfs_pointer(path, file.read(64), DataError)
            file.seek(0)
            number = start = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise DataError(
                        f"{path} line {number} has more than {MAX_LINE_BYTES} bytes: divide it into several"
                    )
                yield number, start, line
                start += len(line)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; give a file of JSON lines") from error


def _parse(line: bytes, where: str) -> Record:
    value = parse_json(line.removeprefix(b"\xef\xbb\xbf"), where, _REMEDY, DataError)
    if not isinstance(value, dict):
        raise DataError(f"{where}: {short(value)} is no JSON object; {_REMEDY}")
    if value.keys() == {"text"}:
        return Record(_text(value["text"], f"{where}: text"))
    if value.keys() == {"messages"}:
        return Record(None, _messages(value["messages"], where))
    raise DataError(
        f"{where} has the fields {short(sorted(value))}: give 'text' (a string) or 'messages' (a list of objects with "
        "'role' and 'content'), and nothing else"
    )


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{what} is {short(value)}: give a string that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} is not valid Unicode: {error}; remove lone surrogates") from None
    return value


def _messages(value: object, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list):
        raise DataError(f"{where}: messages is {short(value)}: give a list of objects with 'role' and 'content'")
    found: list[tuple[str, str]] = []
    for number, message in enumerate(value):
        what = f"{where}: messages[{number}]"
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise DataError(f"{what} is {short(message)}: give an object with 'role' and 'content', and nothing else")
        if message["role"] not in ROLES:
            raise DataError(f"{what} has the role {short(message['role'])}: use {', '.join(ROLES)}")
        found.append((message["role"], _text(message["content"], f"{what}: content")))
    if not any(role == "assistant" for role, _ in found):
        raise DataError(f"{where} has no message of the assistant, so there is nothing to learn: add it, or {_REMEDY}")
    if found[0][0] == "assistant":
        raise DataError(f"{where} begins with the assistant: put before it what is answered")
    return tuple(found)
