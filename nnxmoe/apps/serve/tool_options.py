"""Tools of a request: the JSON schemas of their arguments, and the grammar of answers with tool calls."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nnxmoe.apps.serve.argument_values import is_text, listed, properties, resolved, value_of
from nnxmoe.apps.serve.call_formats import CallFormat

_SPACE = {"whitespace_pattern": " ?"}  # arguments are on a single line, as in the training data of all families
_NUMBERS = {"INDEX": "/[0-9]{1,3}/", "IDENTIFIER": "/[a-zA-Z0-9]{9}/"}  # Lark expressions of a call's placeholders
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclasses.dataclass(frozen=True)
class ToolOptions:
    """Tools of a request, and the grammar of their calls.

    Attributes:
        format: Format of the model's calls.
        parameters: Maps the name of a tool to the JSON schema of its arguments.
        must: Whether the answer must call a tool.
        strict: Whether the grammar enforces the schemas of the arguments.
        several: Whether more than one call is allowed.
        named: Whether the request names the tool to call.
    """

    format: CallFormat
    parameters: Mapping[str, Mapping[str, Any] | None]
    must: bool = False
    strict: bool = False
    several: bool = True
    named: bool = False

    def value(self, tool: str, key: str, text: str) -> Any:
        """Convert the text of an argument to a value. See `value_of`."""
        root = self.parameters.get(tool) or {}
        return value_of(text, properties(root).get(key), root)

    def rules(self, tokens: Mapping[str, int]) -> Iterator[str]:
        """Yield Lark rules. ``calls`` matches the calls, and ``rest`` matches what follows the first mark.

        Args:
            tokens: Maps each token that the rules refer to by id to its id.
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
        more_calls = f"({literal(form.between, tokens)} one)*" if self.several and not form.text_prefix else ""
        closing = literal(form.closing or "", tokens)
        yield f"calls: {literal(form.opening, tokens)} one {more_calls} {closing}"
        opening = literal(form.opening.removeprefix(mark), tokens)
        yield f"rest: {opening} {'one' if form.opening else 'first'} {more_calls} {closing}"

    def _tags(self, index: int, schema: Mapping[str, Any] | None, tokens: Mapping[str, int]) -> Iterator[str]:
        """Yield the rules of arguments in tags, in the order of the schema.

        Arguments that the schema does not require are optional.
        """
        tags = self.format.argument
        assert tags is not None
        expressions = []
        for j, (key, argument_schema) in enumerate(properties(schema).items()):
            head, value = literal(tags.before.replace("KEY", key), tokens), resolved(argument_schema, schema)
            if value.get("type") == "string" and not value.keys() & {"enum", "const"}:
                trailing_space = tags.after[len(tags.after.rstrip()) :]
                yield f"value_{index}_{j}[lazy]: /(.|\\n)*{escaped(tags.end_tag)}/"
                expression = f"{head} value_{index}_{j} {literal(trailing_space, tokens)}"
            else:
                texts = [literal(text, tokens) for text in listed(value) if isinstance(text, str)]
                definitions = {
                    name: expression for name, expression in (schema or {}).items() if name in ("$defs", "definitions")
                }
                full_schema = argument_schema if isinstance(argument_schema, bool) else {**definitions, **value}
                values = [*texts, *([] if is_text(value) else [_json(full_schema)])]
                expression = f"{head} ({' | '.join(values)}) {literal(tags.after, tokens)}"
            expressions.append(expression if key in (schema or {}).get("required", ()) else f"({expression})?")
        yield f"arguments_{index}: " + (" ".join(expressions) or '""')


def _head(text: str, name: str, tokens: Mapping[str, int]) -> str:
    """Return the Lark expression of the text before the arguments of a call."""
    parts = re.split("(INDEX|IDENTIFIER)", text.replace("NAME", name))
    return " ".join(_NUMBERS.get(part) or literal(part, tokens) for part in parts)


def _json(schema: Any) -> str:
    return "%json " + json.dumps({"x-guidance": _SPACE} | dict(schema) if isinstance(schema, Mapping) else schema)


def literal(text: str, tokens: Mapping[str, int]) -> str:
    """Convert a text to a Lark expression that refers to ``tokens`` by id."""
    tokens_in_text = sorted((token for token in tokens if token in text), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, tokens_in_text)) + ")", text) if tokens_in_text else [text]
    return " ".join(f"<[{tokens[part]}]>" if part in tokens_in_text else json.dumps(part) for part in parts if part)


def escaped(text: str) -> str:
    """Escape a text for a regular expression in Lark."""
    return re.escape(text).replace("/", r"\/")
