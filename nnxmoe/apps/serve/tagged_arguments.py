"""Streaming parser of tool-call arguments that are written one by one in tags.

Returns the arguments as one JSON object.
"""

import json
import re
from typing import Any

from nnxmoe.apps.serve.call_formats import CallFormat
from nnxmoe.apps.serve.json_stream import Taken
from nnxmoe.apps.serve.reasoning import held
from nnxmoe.apps.serve.tool_options import ToolOptions

QUOTE = '"'


class TaggedArguments:
    """Streaming reader of arguments in tags. Emits each argument once it is complete.

    A value ends at its closing tag. The value includes balanced tags, and a closing tag that is
    followed by a second closing tag before any other tag. If the closing tag is missing, the value ends
    at the next tag of a different kind.
    """

    def __init__(self, tools: ToolOptions, tool: str):
        assert tools.format.argument is not None
        self._tools, self._format, self._tags = tools, tools.format, tools.format.argument
        self._tool, self._count = tool, 0

    def take(self, text: str, final: bool = False, cut: bool = False) -> Taken:
        """Read a text.

        Args:
            text: the text.
            final: whether the text is complete.
            cut: whether the text ended at its length limit. The object is then left open.
        """
        form = self._format
        if found := self._tags.head.match(text):
            if (value := self._value(text, found.end(), final)) is None:
                return Taken(rest=text)
            written, rest, ended = value
            return Taken(self._member(found["key"].strip(), written, cut and not ended), rest=rest)
        part = next_tag(form, text)
        if part is not None and not text[: part.start()].strip():
            return Taken("}" if self._count else "{}", rest=text, done=True)
        if part is not None:  # text between the arguments
            return Taken(said=text[: part.start()].lstrip(), rest=text[part.start() :])
        if not final:
            return Taken(rest=text)
        return Taken("" if cut else "}" if self._count else "{}", rest=text, done=True)

    def _member(self, key: str, text: str, cut: bool) -> str:
        """Format an argument as a member of the object. A truncated member is left open."""
        value = _json(self._tools.value(self._tool, key, text))
        self._count += 1
        comma = ", " if self._count > 1 else "{"
        return f"{comma}{_json(key)}: {value.removesuffix(QUOTE) if cut else value}"

    def _value(self, text: str, start: int, final: bool) -> tuple[str, str, bool] | None:
        """Find the value that begins at ``start``.

        Returns:
            The value, the text after it, and whether it is complete. None if more text is needed.
        """
        tag, space = self._tags.end_tag, self._tags.space
        if not final and tag not in text:
            return None
        parts, depth = list(self._format.argument_tags.finditer(text, start)), 0
        for i, part in enumerate(parts):
            if part.lastgroup != "end":
                depth += part.lastgroup == "head"
            elif depth:
                depth -= 1
            elif not final and i + 1 == len(parts):
                return None
            elif i + 1 == len(parts) or parts[i + 1].lastgroup != "end":
                return text[start : part.start()].removesuffix(space), text[part.end() :], True
        if not final:
            return None
        if (part := next_tag(self._format, text, start)) is not None:
            return text[start : part.start()].rstrip(), text[part.start() :], True
        rest = text[start:]
        return rest[: len(rest) - held(rest, (tag, *self._format.stops))].rstrip(), "", False


def next_tag(form: CallFormat, text: str, start: int = 0) -> re.Match[str] | None:
    """Find the first tag after ``start`` that does not end a value."""
    return next((part for part in form.argument_tags.finditer(text, start) if part.lastgroup != "end"), None)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
