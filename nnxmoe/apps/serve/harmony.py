"""Streaming parser of gpt-oss's harmony format.

An answer consists of messages in channels. The channel ``analysis`` contains the reasoning.
"""

import re
from typing import Literal

from nnxmoe.apps.serve.call_formats import NAME
from nnxmoe.apps.serve.call_split import AnswerPart, CallPiece, new_id
from nnxmoe.apps.serve.json_stream import NOTHING, JsonArguments
from nnxmoe.apps.serve.reasoning import held

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
BEGINS = ("<|start|>", "<|channel|>")
CONSTRAIN = "<|constrain|>"
ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")  # texts before and after the reasoning
_CALLED = re.compile(rf"to=functions\.{NAME}(?=\s|<\|)")
_HEADER_END = re.compile("|".join(map(re.escape, (MESSAGE, *ENDS))))
_HEADER = re.compile(
    r"(?:\s*(?:<\|start\|>\s*(?:assistant)?|<\|channel\|>\s*(?:analysis|commentary|final|\w*$)?|<\|constrain\|>\s*\w*"
    r"|to=[\w.-]*)(?:\s*(?:json|code)(?=\s*(?:\{|<\||$)))?)+\s*"
)


class HarmonySplit:
    """Streaming splitter of a harmony answer. The text must include the special tokens.

    Attributes:
        count: Number of calls so far.
    """

    def __init__(self) -> None:
        self._buffer, self.count = "", 0
        self._in: Literal["header", "reasoning", "content", "call", "arguments", "after"] = "header"
        self._seen: set[str] = set()
        self._name, self._held, self._arguments = "", "", JsonArguments(())

    def put(self, piece: str) -> AnswerPart:
        """Read a piece and return the parts that can be emitted now."""
        self._buffer += piece
        result = AnswerPart()
        while (part := self._header() if self._in == "header" else self._body()) is not None:
            result = result.followed_by(part)
        return result

    def end(self, cut: bool = False) -> AnswerPart:
        """Return the text that was held back. Completes incomplete arguments unless the text was ``cut``."""
        result = AnswerPart()
        if self._in == "header":
            header, text = _split_header(self._buffer)
            if header or self._seen:
                text = text[: len(text) - held(text, (MESSAGE, CONSTRAIN, *ENDS, *BEGINS))]
            if not text.strip() and _CALLED.search(header) is None:
                return result
            result, self._buffer = self._message(header), text
        text, self._buffer = self._buffer, ""
        return result.followed_by(self._part(text, final=True, cut=cut))

    def _header(self) -> AnswerPart | None:
        if (match := _HEADER_END.search(self._buffer)) is None:
            return None
        header, self._buffer = self._buffer[: match.start()], self._buffer[match.end() :]
        if match[0] == MESSAGE:
            known, text = _split_header(header)
            said = re.split("|".join(map(re.escape, BEGINS)), text, maxsplit=1)[0]
            following = text[len(said) :]
            # text between two headers; after <|start|> without a role, the text is the role
            if said.strip() and (following or not known) and not known.rstrip().endswith(BEGINS[0]):
                result = self._message(known).followed_by(self._part(said.rstrip(), final=True))
                self._in, self._buffer = "header", following + MESSAGE + self._buffer
                return result
            return self._message(header)
        header, text = _split_header(header)  # the model omitted the mark between the header and the message
        if not text.strip() and _CALLED.search(header + MESSAGE) is None:
            return AnswerPart()
        self._buffer = text + match[0] + self._buffer
        return self._message(header)

    def _message(self, header: str) -> AnswerPart:
        """Start a message."""
        if match := _CALLED.search(header + MESSAGE):
            self._in, self._name, self._arguments = "call", match["name"], JsonArguments(())
            return AnswerPart()
        self._in = "reasoning" if re.search(r"<\|channel\|>\s*analysis", header) else "content"
        is_repeated = self._in in self._seen
        self._seen.add(self._in)
        return self._part("\n" if is_repeated else "")

    def _body(self) -> AnswerPart | None:
        mark_positions = [(position, mark) for mark in (*ENDS, *BEGINS) if (position := self._buffer.find(mark)) >= 0]
        if mark_positions:
            position, mark = min(mark_positions)
            part = self._part(self._buffer[:position], final=True)
            self._buffer = self._buffer[position + (len(mark) if mark in ENDS else 0) :]
            self._in = "header"
            return part
        position = len(self._buffer) - held(self._buffer, (*ENDS, *BEGINS))
        text, self._buffer = self._buffer[:position], self._buffer[position:]
        return self._part(text) if text else None

    def _part(self, text: str, final: bool = False, cut: bool = False) -> AnswerPart:
        """Convert text of the current message to a part of the answer. ``final`` is True at the message's end."""
        if self._in == "call":
            text, self._held = (self._held + text).lstrip(), ""
            if not final and any(word.startswith(text) for word in NOTHING):
                self._held = text
                return AnswerPart()
            text = "" if text.rstrip() in NOTHING else text
            if text and not text.startswith("{"):  # prose instead of a JSON object
                self._in = "content"
                return AnswerPart(content=text)
            self._in = "arguments"
            return self._call(self._name).followed_by(self._part(text, final, cut))
        if self._in == "arguments":
            result = self._arguments.take(text, final, cut)
            calls = [CallPiece(self.count - 1, result.arguments)] if result.arguments else []
            self._in = "after" if result.done else "arguments"
            return AnswerPart(calls=calls).followed_by(self._part(result.rest) if result.done else AnswerPart())
        if self._in == "after":  # superfluous braces are not content
            text = text.lstrip("} \n")
            self._in = "content" if text else "after"
        return AnswerPart(reasoning=text) if self._in == "reasoning" else AnswerPart(content=text)

    def _call(self, name: str, arguments: str = "") -> AnswerPart:
        self.count += 1
        self._seen.add("call")
        return AnswerPart(calls=[CallPiece(self.count - 1, arguments, name, new_id())])


def _split_header(text: str) -> tuple[str, str]:
    """Split a text without the mark `MESSAGE` into the header and the text of the message."""
    length = match.end() if (match := _HEADER.match(text)) else 0
    return text[:length], text[length:]
