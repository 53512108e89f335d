"""Streaming parser of tool-call arguments in tags.

The parser returns the arguments as one JSON object.
"""

import re

from nnxmoe.apps.serve.call_formats import CallFormat
from nnxmoe.apps.serve.json_stream import NOTHING, Taken, to_json
from nnxmoe.apps.serve.reasoning import held
from nnxmoe.apps.serve.tool_options import ToolOptions

QUOTE = '"'


class TaggedArguments:
    """Streaming reader of arguments in tags. Emits each argument once it is complete.

    A value ends at its closing tag. Balanced tags are part of the value. If a second closing tag follows before
    any other tag, the first closing tag is part of the value too. If the closing tag is missing, the value ends
    at the next tag of a different kind.
    """

    def __init__(self, tools: ToolOptions, tool: str):
        assert tools.format.argument is not None
        self._tools, self._format, self._tags = tools, tools.format, tools.format.argument
        self._tool, self._count = tool, 0

    def take(self, text: str, final: bool = False, cut: bool = False) -> Taken:
        """Read arguments from a text.

        Args:
            text: Unread text.
            final: Whether the text is complete.
            cut: Whether the text ended at the length limit. If so, the object is left incomplete.
        """
        form = self._format
        if head_match := self._tags.head.match(text):
            if (value := self._value(text, head_match.end(), final)) is None:
                return Taken(rest=text)
            value_text, rest, is_complete = value
            return Taken(self._member(head_match["key"].strip(), value_text, cut and not is_complete), rest=rest)
        part = next_tag(form, text)
        if part is None and not final:
            return Taken(rest=text)
        between, rest = (text, "") if part is None else (text[: part.start()], text[part.start() :])
        if not between.strip() or (not self._count and between.strip() in NOTHING):
            between = ""
        if part is not None and (between or part.lastgroup == "head"):
            return Taken(said=between.lstrip(), rest=rest)
        return Taken("" if cut and part is None else "}" if self._count else "{}", rest=between + rest, done=True)

    def _member(self, key: str, text: str, cut: bool) -> str:
        """Format an argument as a member of the object. A truncated member is left incomplete."""
        value = to_json(self._tools.value(self._tool, key, text))
        self._count += 1
        comma = ", " if self._count > 1 else "{"
        return f"{comma}{to_json(key)}: {value.removesuffix(QUOTE) if cut else value}"

    def _value(self, text: str, start: int, final: bool) -> tuple[str, str, bool] | None:
        """Find the value that starts at ``start``.

        Returns:
            The value, the text after the value, and whether the value is complete. `None` if more text is
            needed.
        """
        tag, space = self._tags.end_tag, self._tags.space
        if not final and tag not in text:
            return None
        tag_matches, depth = list(self._format.argument_tags.finditer(text, start)), 0
        for i, tag_match in enumerate(tag_matches):
            if tag_match.lastgroup != "end":
                depth += tag_match.lastgroup == "head"
            elif depth:
                depth -= 1
            elif not final and i + 1 == len(tag_matches):
                return None
            elif i + 1 == len(tag_matches) or tag_matches[i + 1].lastgroup != "end":
                return text[start : tag_match.start()].removesuffix(space), text[tag_match.end() :], True
        if not final:
            return None
        if (tag_match := next_tag(self._format, text, start)) is not None:
            return text[start : tag_match.start()].rstrip(), text[tag_match.start() :], True
        rest = text[start:]
        return rest[: len(rest) - held(rest, (tag, *self._format.stops))].rstrip(), "", False


def next_tag(form: CallFormat, text: str, start: int = 0) -> re.Match[str] | None:
    """Find the first tag from ``start`` that does not end a value."""
    return next((part for part in form.argument_tags.finditer(text, start) if part.lastgroup != "end"), None)
