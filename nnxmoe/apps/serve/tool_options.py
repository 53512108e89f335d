"""Tools of a request: JSON schemas, and grammars of answers with tool calls."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nnxmoe.apps.serve.argument_values import is_text, listed, properties, resolved, value_of
from nnxmoe.apps.serve.call_formats import CallFormat

_SPACE = {
    "whitespace_pattern": " ?"
}  # white space in arguments: a single line, as in the training data of all families
_NUMBERS = {"INDEX": "/[0-9]{1,3}/", "IDENTIFIER": "/[a-zA-Z0-9]{9}/"}  # placeholders of a call, in Lark
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclasses.dataclass(frozen=True)
class ToolOptions:
    """Tools of a request, and the grammar of their calls.

    Attributes:
        format: format of the model's calls.
        parameters: JSON schema of the arguments per tool.
        must: whether the answer must call a tool.
        strict: whether the grammar enforces the schemas of the arguments.
        several: whether more than one call is allowed.
        named: whether the request names the tool to call.
    """

    format: CallFormat
    parameters: Mapping[str, Mapping[str, Any] | None]
    must: bool = False
    strict: bool = False
    several: bool = True
    named: bool = False

    def value(self, tool: str, key: str, text: str) -> Any:
        """Read the text of an argument in tags. See `value_of`."""
        root = self.parameters.get(tool) or {}
        return value_of(text, properties(root).get(key), root)

    def rules(self, tokens: Mapping[str, int]) -> Iterator[str]:
        """Yield Lark rules. ``calls`` matches the calls, and ``rest`` the calls without their first mark.

        Args:
            tokens: ids of tokens that are symbols in grammars.
        """
        form, mark = self.format, self.format.marks[0]
        before, after = form.before_arguments, literal(form.after_arguments, tokens)
        calls, rests = list[str](), list[str]()
        for i, (name, schema) in enumerate(self.parameters.items()):
            calls.append(f"{_head(before, name, tokens)} arguments_{i} {after}")
            rests.append(f"{_head(before.removeprefix(mark), name, tokens)} arguments_{i} {after}")
            if form.argument is None:
                yield f"arguments_{i}: {_json({'type': 'object', **schema} if schema else _NO_ARGUMENTS)}"
            else:
                yield from self._tags(i, schema, tokens)
        yield "one: " + " | ".join(calls)
        yield "first: " + " | ".join(rests)
        more = f"({literal(form.between, tokens)} one)*" if self.several and not form.text_prefix else ""
        closing = literal(form.closing or "", tokens)
        yield f"calls: {literal(form.opening, tokens)} one {more} {closing}"
        opening = literal(form.opening.removeprefix(mark), tokens)
        yield f"rest: {opening} {'one' if form.opening else 'first'} {more} {closing}"

    def _tags(self, index: int, schema: Mapping[str, Any] | None, tokens: Mapping[str, int]) -> Iterator[str]:
        """Yield the rules of arguments in tags, in the order of the schema.

        Required arguments must occur. The other arguments are optional.
        """
        tags = self.format.argument
        assert tags is not None
        parts = []
        for j, (key, written) in enumerate(properties(schema).items()):
            head, value = literal(tags.before.replace("KEY", key), tokens), resolved(written, schema)
            if value.get("type") == "string" and not value.keys() & {"enum", "const"}:
                rest = tags.after[len(tags.after.rstrip()) :]
                yield f"value_{index}_{j}[lazy]: /(.|\\n)*{escaped(tags.end_tag)}/"
                part = f"{head} value_{index}_{j} {literal(rest, tokens)}"
            else:
                texts = [literal(text, tokens) for text in listed(value) if isinstance(text, str)]
                definitions = {name: part for name, part in (schema or {}).items() if name in ("$defs", "definitions")}
                whole = written if isinstance(written, bool) else {**definitions, **value}
                values = [*texts, *([] if is_text(value) else [_json(whole)])]
                part = f"{head} ({' | '.join(values)}) {literal(tags.after, tokens)}"
            parts.append(part if key in (schema or {}).get("required", ()) else f"({part})?")
        yield f"arguments_{index}: " + (" ".join(parts) or '""')


def _head(text: str, name: str, tokens: Mapping[str, int]) -> str:
    """Return the Lark expression of the text before the arguments of a call."""
    parts = re.split("(INDEX|IDENTIFIER)", text.replace("NAME", name))
    return " ".join(_NUMBERS.get(part) or literal(part, tokens) for part in parts)


def _json(schema: Any) -> str:
    return "%json " + json.dumps({"x-guidance": _SPACE} | dict(schema) if isinstance(schema, Mapping) else schema)


def literal(text: str, tokens: Mapping[str, int]) -> str:
    """Convert a text to Lark. Each of the ``tokens`` in the text becomes its id."""
    special = sorted((token for token in tokens if token in text), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    return " ".join(f"<[{tokens[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def escaped(text: str) -> str:
    """Escape a text for a regular expression in Lark."""
    return re.escape(text).replace("/", r"\/")
