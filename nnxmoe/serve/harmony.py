"""The harmony format of gpt-oss: an answer is messages in channels, of which ``analysis`` is reasoning."""

import re
from typing import Literal

from nnxmoe.serve.call_split import AnswerPart, CallPiece, new_id
from nnxmoe.serve.reasoning import held
from nnxmoe.serve.tools import NAME

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
BEGINS = ("<|start|>", "<|channel|>")
ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")  # what is around reasoning


class HarmonySplit:
    """Divides the text of an answer, which comes in pieces with its special tokens. ``count``: the calls so far."""

    def __init__(self) -> None:
        self._buffer, self.count = "", 0
        self._in: Literal["header", "reasoning", "content", "call"] = "header"
        self._seen: set[str] = set()

    def put(self, piece: str) -> AnswerPart:
        """The parts that are certain after this piece."""
        self._buffer += piece
        found = AnswerPart()
        while (part := self._header() if self._in == "header" else self._body()) is not None:
            found = found.followed_by(part)
        return found

    def end(self) -> AnswerPart:
        rest, self._buffer = self._buffer, ""
        if self._in == "header":  # a text without any message is said
            return AnswerPart() if self._seen else AnswerPart(content=rest)
        return self._part(rest)

    def _header(self) -> AnswerPart | None:
        head, mark, rest = self._buffer.partition(MESSAGE)
        if not mark:
            return None
        self._buffer, new = rest, self._seen
        if found := re.search(rf"to=functions\.{NAME}", head):
            self._in, self.count = "call", self.count + 1
            self._seen.add("call")
            return AnswerPart(calls=[CallPiece(self.count - 1, "", found["name"], new_id())])
        self._in = "reasoning" if re.search(r"<\|channel\|>\s*analysis", head) else "content"
        again = self._in in new
        self._seen.add(self._in)
        return self._part("\n" if again else "")

    def _body(self) -> AnswerPart | None:
        places = [(at, mark) for mark in (*ENDS, *BEGINS) if (at := self._buffer.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            part = self._part(self._buffer[:at])
            self._buffer = self._buffer[at + (len(mark) if mark in ENDS else 0) :]
            self._in = "header"
            return part
        at = len(self._buffer) - held(self._buffer, (*ENDS, *BEGINS))
        text, self._buffer = self._buffer[:at], self._buffer[at:]
        return self._part(text) if text else None

    def _part(self, text: str) -> AnswerPart:
        match self._in:
            case "call":
                return AnswerPart(calls=[CallPiece(self.count - 1, text)] if text else [])
            case "reasoning":
                return AnswerPart(reasoning=text)
            case _:
                return AnswerPart(content=text)
