"""Calls of tools in a text that comes in pieces: what is said, and the calls, whose arguments are handed on as they
come."""

import json
import re
import secrets
import string
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from nnxmoe.serve.reasoning import held
from nnxmoe.serve.tools import NAME, Calls

_LETTERS = string.ascii_letters + string.digits


class CallPiece(NamedTuple):
    """A part of the call with this number. The first one has its ``name`` and ``id``."""

    index: int
    arguments: str = ""
    name: str | None = None
    id: str | None = None


class AnswerPart(NamedTuple):
    """Parts of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: Sequence[CallPiece] = ()

    def followed_by(self, other: "AnswerPart") -> "AnswerPart":
        """This part and the next one."""
        joined = (self.reasoning + other.reasoning, self.content + other.content)
        return AnswerPart(*joined, (*self.calls, *other.calls))


def new_id() -> str:
    """An id of a call: nine letters and digits, as templates of Mistral demand."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class CallSplit:
    """Divides a text into what is said and the calls of a `Calls`. What is not a call after all is said, at the end.

    ``count``: the calls so far.
    """

    def __init__(self, calls: Calls):
        self._calls, self._format = calls, calls.format
        self._state: Literal["text", "calls", "arguments"] = "text"
        self._buffer, self.count, self._said = "", 0, False
        self._space = ""  # before a call that may be none
        self._value, self._tool, self._keys = _Value(), "", 0

    def put(self, piece: str) -> AnswerPart:
        """The parts that are certain after this piece."""
        self._buffer += piece
        found = AnswerPart()
        while (part := self._next()) is not None:
            found = found.followed_by(part)
        return found

    def end(self) -> AnswerPart:
        """What was held back, at the end of the text, and the calls that come after what is none."""
        found = AnswerPart()
        while self._state == "calls" and not self._format.first:
            if not (places := [at for mark in self._format.marks if (at := self._buffer.find(mark, 1)) > 0]):
                break
            text, self._buffer = self._buffer[: min(places)], self._buffer[min(places) :]
            found = found.followed_by(self._left(text)).followed_by(self.put(""))
        rest, self._buffer = self._buffer, ""
        return found if self._state == "arguments" else found.followed_by(self._left(rest))

    def _left(self, text: str) -> AnswerPart:
        """What is said in a text that has no call, without the end of the call before it."""
        text, self._space = self._space + text, ""
        if self._state == "calls" and self.count:
            tail = self._format.tail.match(text)
            text = "" if self._is_rest(text) else text[tail.end() :] if tail else text
        return AnswerPart(content="" if self.count and text.isspace() else text)

    def _is_rest(self, text: str) -> bool:
        """Whether a text belongs to the end of a call. Models leave out a part of it, or are cut there."""
        form, got = self._format, "".join(text.split()).removesuffix(self._format.between.strip())
        whole = "".join((form.call.partition("ARGUMENTS")[2] + (form.closing or "")).split())
        return self.count > 0 and (whole.startswith(got) or form.tail.fullmatch(text.rstrip()) is not None)

    def _next(self) -> AnswerPart | None:
        """The next part; None if it needs more text."""
        match self._state:
            case "text":
                return self._text()
            case "calls":
                return self._call() or self._whole() or self._last()
            case "arguments":
                return self._arguments() if self._format.argument is None else self._tags()

    def _text(self) -> AnswerPart | None:
        text, marks = self._buffer, self._format.marks
        if self._format.first:
            if self._said:
                self._buffer = ""
                return AnswerPart(content=text) if text else None
            if not text.strip():
                return None
            places = [len(text) - len(text.lstrip())] if text.lstrip().startswith(marks) else []
            keep = 0
        else:
            places = [at for at in map(text.find, marks) if at >= 0]
            keep = held(text, marks)
        if places:
            said, self._buffer = text[: min(places)].rstrip(), text[min(places) :]
            self._state, self._space = "calls", text[len(said) : min(places)]
            return AnswerPart(content=said)
        said, self._buffer = text[: len(text) - keep], text[len(text) - keep :]
        self._said = self._said or bool(said)
        return AnswerPart(content=said) if said else None

    def _call(self) -> AnswerPart | None:
        if (found := self._format.head.match(self._buffer)) is None:
            return None
        self._state, self._buffer = "arguments", self._buffer[found.end() :]
        self._value, self._keys = _Value(), 0
        given = found.groupdict()
        if (index := given.get("index")) is not None:  # Kimi's templates need its own ids
            return self._new(found["name"], f"functions.{found['name']}:{index}")
        return self._new(found["name"], given.get("id"))

    def _new(self, name: str, id: str | None = None, arguments: str = "") -> AnswerPart:
        self._tool, self.count, self._space = name, self.count + 1, ""
        return AnswerPart(calls=[CallPiece(self.count - 1, arguments, name, id or new_id())])

    def _whole(self) -> AnswerPart | None:
        """A call as one JSON object whose fields are in another order, or have other names."""
        lead = self._format.object_lead
        if lead is None or (found := lead.match(self._buffer)) is None:
            return None
        try:
            body, end = json.JSONDecoder().raw_decode(self._buffer, found.end())
        except (ValueError, RecursionError):
            return None
        arguments = body.get("arguments", body.get("parameters")) or {}
        if not isinstance(name := body.get("name"), str) or not re.fullmatch(NAME, name):
            return None
        self._buffer = "}" + self._buffer[end:]  # as after the arguments of other calls
        return self._new(name, None, arguments if isinstance(arguments, str) else _json(arguments))

    def _last(self) -> AnswerPart | None:
        end = self._format.end
        if not self.count or end is None or (found := end.match(self._buffer)) is None:
            return None
        self._state, self._buffer = "text", self._buffer[found.end() :]
        return AnswerPart()

    def _arguments(self) -> AnswerPart | None:
        """Arguments that are JSON."""
        size = self._value.size(self._buffer)
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        if self._value.done:
            self._state = "calls"
        elif not text:
            return None
        return AnswerPart(calls=[CallPiece(self.count - 1, text)])

    def _tags(self) -> AnswerPart | None:
        """Arguments in tags, as JSON: each when it is complete."""
        if found := self._format.parameter.match(self._buffer):
            key, value = found["key"].strip(), found["value"]
            text = f"{', ' if self._keys else '{'}{_json(key)}: {_json(self._calls.value(self._tool, key, value))}"
            self._keys += 1
        elif found := self._format.last.match(self._buffer):
            text = "}" if self._keys else "{}"
            self._state = "calls"
        else:
            return None
        self._buffer = self._buffer[found.end() :]
        return AnswerPart(calls=[CallPiece(self.count - 1, text)])


class _Value:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.done = False
        self._depth, self._quoted, self._escaped = 0, False, False

    def size(self, text: str) -> int:
        """How many characters of the next piece belong to the object."""
        for i, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._quoted, self._escaped = letter != '"', letter == "\\"
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.done = True
                    return i + 1
        return len(text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
