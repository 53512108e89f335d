"""Split streamed text into content and tool calls, and stream the arguments of the tool calls."""

import json
import math
import re
import secrets
import string
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from nnxmoe.apps.serve.call_formats import NAME
from nnxmoe.apps.serve.json_stream import NOTHING, JsonArguments, json_object, to_json
from nnxmoe.apps.serve.reasoning import held
from nnxmoe.apps.serve.tagged_arguments import TaggedArguments, next_tag
from nnxmoe.apps.serve.tool_options import ToolOptions

_LETTERS = string.ascii_letters + string.digits
_NOTHING = re.compile(rf"(?:\s*(?:{'|'.join(map(re.escape, NOTHING[1:]))})(?![\w\"]))?\s*")
_FIELDS = frozenset(("name", "arguments", "parameters", "id", "type"))  # fields of a call that is one JSON object


class CallPiece(NamedTuple):
    """Piece of a tool call.

    Attributes:
        call_index: Index of the call in the answer.
        arguments: Next piece of the arguments.
        name: Name of the tool in the first piece, else `None`.
        id: Id of the call in the first piece, else `None`.
    """

    call_index: int
    arguments: str = ""
    name: str | None = None
    id: str | None = None


class AnswerPart(NamedTuple):
    """Reasoning, content and tool calls of an answer, or of a piece of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: Sequence[CallPiece] = ()

    def followed_by(self, other: "AnswerPart") -> "AnswerPart":
        """Append the next part."""
        texts = (self.reasoning + other.reasoning, self.content + other.content)
        return AnswerPart(*texts, (*self.calls, *other.calls))


def new_id() -> str:
    """Create the id of a call: nine letters or digits, as Mistral's templates require."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class CallSplit:
    """Streaming splitter of text into content and tool calls.

    At the end, text that is not a valid call becomes content. The result does not depend on how the text is
    split into pieces.

    Attributes:
        count: Number of calls so far.
    """

    def __init__(self, tools: ToolOptions):
        self._tools, self._format = tools, tools.format
        self._state: Literal["text", "calls", "arguments"] = "text"
        self._buffer, self.count, self._said = "", 0, False
        self._space = ""  # white space before text that may be a call
        self._arguments: JsonArguments | TaggedArguments = JsonArguments(())

    def put(self, piece: str, final: bool = False, cut: bool = False) -> AnswerPart:
        """Read a piece and return the parts that can be emitted now.

        Args:
            piece: The next piece of text.
            final: Whether the text ends with this piece.
            cut: See `end`.
        """
        self._buffer += piece
        result = AnswerPart()
        while (part := self._next(final, cut)) is not None:
            result = result.followed_by(part)
        return result

    def end(self, cut: bool = False) -> AnswerPart:
        """Return the text that was held back, and complete the arguments of an unterminated call.

        Args:
            cut: Whether the answer was truncated at the length limit. If so, arguments stay incomplete, so that
                clients notice the truncation.
        """
        result = self.put("", final=True, cut=cut)
        rest, self._buffer = self._buffer, ""
        return result.followed_by(self._left(rest))

    def _left(self, text: str) -> AnswerPart:
        """Return text without a call as content, after removing the remainder of the previous call."""
        text, self._space = self._space + text, ""
        if self._state == "calls" and self.count:
            text = "" if self._is_rest(text) else self._format.leftover.sub("", text, count=1)
        return AnswerPart(content="" if self.count and text.isspace() else text)

    def _is_rest(self, text: str) -> bool:
        """Return whether a text is the end of a call, or only the tags before the next call.

        Models may omit part of a call's end, or reach the length limit within it.
        """
        form, letters = self._format, "".join(text.split()).removesuffix(self._format.between.strip()).lstrip("}]")
        suffix = form.after_arguments + (form.closing or "")
        opening = "" if form.argument is None else form.argument.opening
        endings = ["".join(part.split()).lstrip("}]") for part in (suffix, opening)]
        is_end = any(ending.startswith(letters) for ending in endings) or form.tail.fullmatch(text.rstrip())
        return bool(is_end or form.between_calls.fullmatch(text))

    def _next(self, final: bool, cut: bool) -> AnswerPart | None:
        """Return the next part, or None if more text is needed."""
        match self._state:
            case "text":
                return self._text()
            case "calls":
                return (
                    self._call(final)
                    or self._whole(final and not cut)
                    or self._last(final)
                    or (self._skip() if final else None)
                )
            case "arguments":
                result = self._arguments.take(self._buffer, final, cut)
                has_progress = result.done or result.rest != self._buffer
                self._buffer, self._state = result.rest, "calls" if result.done else "arguments"
                calls = [CallPiece(self.count - 1, result.arguments)] if result.arguments else []
                return AnswerPart(content=result.said, calls=calls) if has_progress else None

    def _text(self) -> AnswerPart | None:
        text, marks = self._buffer, self._format.marks
        if self._format.only_at_start:
            if self._said:
                self._buffer = ""
                return AnswerPart(content=text) if text else None
            letters = "".join(text.split())
            if any(mark != letters and mark.startswith(letters) for mark in marks):
                return None
            mark_positions = [len(text) - len(text.lstrip())] if letters.startswith(marks) else []
            num_held = 0
        else:
            mark_positions = [position for position in map(text.find, marks) if position >= 0]
            num_held = held(text, marks)
        if mark_positions:
            content, self._buffer = text[: min(mark_positions)].rstrip(), text[min(mark_positions) :]
            self._state, self._space = "calls", text[len(content) : min(mark_positions)]
            return AnswerPart(content=content)
        content, self._buffer = text[: len(text) - num_held], text[len(text) - num_held :]
        self._said = self._said or bool(content)
        return AnswerPart(content=content) if content else None

    def _call(self, final: bool) -> AnswerPart | None:
        """Read the start of a call. At the end of the text, a call without arguments needs only a known name."""
        form = self._format
        if (match := form.head.match(self._buffer)) is None:
            return None
        rest, is_tool = self._buffer[match.end() :], match["name"] in self._tools.parameters
        is_end = final and is_tool and _NOTHING.fullmatch(rest) is not None
        if rest.startswith("{"):
            self._arguments = JsonArguments(form.stops)
        elif form.argument is not None:
            tag = form.before_arguments.strip().replace("NAME", match["name"])
            if tag.endswith(">"):  # models may repeat the tag; otherwise `tag` ends with the name, as in GLM's format
                rest = re.sub(rf"^(?:{re.escape(tag)}\s*+)++", "", rest)
                if rest and tag.startswith(rest) and not final:
                    return None
            part = next_tag(form, rest)
            is_tag_first = part is not None and part.start() == 0 and not rest.startswith(form.marks)
            has_arguments = is_tag_first or form.argument.head.match(rest) is not None
            if not (is_end or has_arguments or (is_tool and (part is not None or (final and rest.startswith("<"))))):
                return None
            self._arguments = TaggedArguments(self._tools, match["name"])
        elif is_end or _NOTHING.sub("", rest, count=1).startswith(form.stops):
            self._arguments, rest = JsonArguments(form.stops), _NOTHING.sub("", rest, count=1)
        else:
            return None
        self._state, self._buffer = "arguments", rest
        parts = match.groupdict()
        if (index := parts.get("index")) is not None:  # Kimi's templates require ids in Kimi's format
            return self._new(match["name"], f"functions.{match['name']}:{index}")
        return self._new(match["name"], parts.get("id"))

    def _new(self, name: str, id: str | None = None, arguments: str = "") -> AnswerPart:
        self.count, self._space = self.count + 1, ""
        return AnswerPart(calls=[CallPiece(self.count - 1, arguments, name, id or new_id())])

    def _whole(self, final: bool) -> AnswerPart | None:
        """Read a call that is one JSON object, even if its fields differ from the format in order or name.

        At the end of the text, the object may be incomplete if it names one of the request's tools.
        """
        form = self._format
        if (match := form.object_head.match(self._buffer)) is None:
            return None
        text = self._buffer[match.end() :]
        try:
            body, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            if not final:
                return None
            result = JsonArguments(form.stops).take(text, final=True)
            body, end = _loaded(result.arguments), len(text) - len(result.rest)
            if body is None or not isinstance(name := body.get("name"), str) or not body.keys() <= _FIELDS:
                return None
            if name not in self._tools.parameters:
                return None
        others = [value for key, value in body.items() if key not in _FIELDS]
        if not body.keys() & {"arguments", "parameters"} and any(map(_holds_arguments, others)):
            return None  # the arguments are in a field with a different name
        arguments = body.get("arguments", body.get("parameters")) or {}
        if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
            arguments = _loaded(json_object(arguments.lstrip()))
        name = body.get("name")
        if not isinstance(name, str) or not re.fullmatch(NAME, name) or not isinstance(arguments, dict):
            return None
        brace = "}" if form.is_object else ""  # `tail` expects the brace that `JsonArguments` leaves in the buffer
        self._buffer = brace + text[end:]
        return self._new(name, None, to_json(arguments))

    def _last(self, final: bool) -> AnswerPart | None:
        end_pattern = self._format.end
        if not self.count or end_pattern is None or (match := end_pattern.match(self._buffer)) is None:
            return None
        rest = self._buffer[match.end() :]
        if not final and held(rest, self._format.closing_tags) == len(rest):  # may continue with a repeated tag
            return None
        self._state, self._buffer = "text", rest
        return AnswerPart()

    def _skip(self) -> AnswerPart | None:
        """At the end of the answer, return the text before the next tag of a call as content."""
        form, text = self._format, self._buffer
        tags = () if form.only_at_start else form.stops if self.count else form.marks
        start = max(1, match.end() if self.count and (match := form.leftover.match(text)) else 1)
        tag_positions = [position for tag in tags if (position := text.find(tag, start)) > 0]
        if not tag_positions:
            return None
        text, self._buffer = self._buffer[: min(tag_positions)], self._buffer[min(tag_positions) :]
        return self._left(text)


def _number(text: str) -> float | str:
    """Parse a JSON number, or return the text if the number is too large for a float."""
    return value if math.isfinite(value := float(text)) else text


_DECODER = json.JSONDecoder(parse_constant=str, parse_float=_number)


def _holds_arguments(value: Any) -> bool:
    return bool(value) if isinstance(value, dict) else isinstance(value, str) and value.lstrip().startswith("{")


def _loaded(text: str) -> dict[str, Any] | None:
    """Parse a JSON object, or return `None` if it is nested too deeply."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        return None
