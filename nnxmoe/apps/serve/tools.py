"""Calls of tools: how each family writes them in its answers, and the grammars of answers that must call.

A row of `FORMATS` is the text of a call with placeholders. The parser (`CallSplit`) and the grammar are made from it.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nnxmoe.apps.serve.argument_values import is_text, listed, properties, resolved, value_of

NAME = r"(?P<name>[\w.-]+)"
_SPACES = r"\s*+"  # possessive: long runs of white space take linear time
_SPACE = {"whitespace_pattern": " ?"}  # in arguments: in one line, as all families were trained
_NUMBERS = {"INDEX": "/[0-9]{1,3}/", "IDENTIFIER": "/[a-zA-Z0-9]{9}/"}  # of calls, in Lark
_TAG = re.compile(r'</?[\w:]+>|<[\w:]+=|<\w+ name="|<[|\uff5c].*?[|\uff5c]>|\[[A-Z_]+\]')
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """How a family writes calls: ``opening``, one ``call`` or several with ``between``, and ``closing`` (None: the end
    of the text).

    ``words``: what a chat template of the family has in it, all of them. ``marks``: with which calls begin (``first``:
    only at the beginning of the answer). ``argument``: how each argument is written where the arguments are not one
    JSON object. ``final``: what comes before an answer without calls.
    """

    words: tuple[str, ...]
    marks: tuple[str, ...]
    call: str
    opening: str = ""
    between: str = "\n"
    closing: str | None = ""
    argument: str | None = None
    first: bool = False
    final: str = ""

    @property
    def single(self) -> bool:
        """Whether an answer has one call at most."""
        return bool(self.final)

    @functools.cached_property
    def head(self) -> re.Pattern[str]:
        """What comes before the arguments of a call, with what is left of the call before it."""
        return re.compile(self._lead + _pattern(self._sides[0]) + _SPACES)

    @functools.cached_property
    def object_lead(self) -> re.Pattern[str]:
        """Pattern of the text before a call that is one JSON object; models of all families may write such calls."""
        before, brace, _ = self._sides[0].partition('{"name"')
        start = _pattern(before) if brace else f"(?:{'|'.join(map(re.escape, self.marks))})?"
        return re.compile(self._lead + start + r"\s*+(?=\{)")

    @functools.cached_property
    def tail(self) -> re.Pattern[str]:
        """What comes after the arguments of a call. Further fields of the call are skipped, and models may write the
        last brace twice or not at all."""
        after = self._sides[1]
        fields = r"(?:\s*+,(?:[^{}]|\{[^{}]*\})*+\})?[\s}]*+" if after.startswith("}") else r"\s*+"
        return re.compile(fields + _pattern(after.removeprefix("}")))

    @functools.cached_property
    def end(self) -> re.Pattern[str] | None:
        """Pattern of the text that ends the last call; None if the format has none that differs from the start of
        another call."""
        if not self.closing:
            return None if self.closing is None else self.tail
        closing = rf"\s*+{_pattern(self.closing).removesuffix(_SPACES)}"  # white space that follows is said
        return re.compile(f"(?:{self.tail.pattern})?{closing}")

    @functools.cached_property
    def stops(self) -> tuple[str, ...]:
        """Tags around calls: arguments without an end of their own end at them."""
        after = self._sides[1].removeprefix("}").strip()
        around = " ".join((self.opening, self.call, self.closing or "", *self.marks))
        return tuple(dict.fromkeys([*_TAG.findall(around), *(["```"] if after.startswith("```") else [])]))

    @functools.cached_property
    def leftover(self) -> re.Pattern[str]:
        """Pattern of the remainder of a call's end, at the beginning of a text."""
        tags = "|".join(map(re.escape, _TAG.findall(self._sides[1] + (self.closing or "")))) or "$."
        brace = r"\s}" if self.has_object else r"\s"
        return re.compile(rf"^(?:{self.tail.pattern})?(?:[{brace}]*+(?:{tags}))*+{'[}]*+' if self.has_object else ''}")

    @property
    def has_object(self) -> bool:
        """Whether a call is one JSON object."""
        return self._sides[1].startswith("}")

    @functools.cached_property
    def argument_ends(self) -> tuple[str, str]:
        """For arguments in tags: the tag after a value, and the white space before that tag."""
        after = (self.argument or "").partition("VALUE")[2]
        tag = after.strip()
        return tag, after[: after.index(tag)]

    @functools.cached_property
    def argument_head(self) -> re.Pattern[str]:
        """For arguments in tags: pattern of the text before a value. Models leave out tags after the name."""
        before, after = (self.argument or "").partition("VALUE")[0].split("KEY")
        if len(tags := [re.escape(tag) for tag in _TAG.findall(after)]) == 2:
            tail = rf"(?:\s*{tags[0]}\s*(?:{tags[1]})?|\s*{tags[1]})"
        else:
            tail = _pattern(after, r"\n?")
        return re.compile(rf"\s*{_pattern(before)}(?P<key>[^<>\"]+){tail}")

    @functools.cached_property
    def parts(self) -> re.Pattern[str]:
        """For arguments in tags: pattern of all tags among them."""
        head = self.argument_head.pattern.removeprefix(r"\s*").replace("?P<key>", "?:")
        stops = "|".join(map(re.escape, self.stops))
        return re.compile(rf"(?P<head>{head})|(?P<end>{re.escape(self.argument_ends[0])})|(?P<stop>{stops})")

    @property
    def _lead(self) -> str:
        between = _pattern(self.between.strip())
        return rf"(?:{self.tail.pattern})?\s*+(?:{between})?\s*+(?:{_pattern(self.opening)})?\s*+"

    @property
    def _sides(self) -> tuple[str, str]:
        before, _, after = self.call.partition("ARGUMENTS")
        return before, after


def _pattern(text: str, newline: str = _SPACES) -> str:
    """A regular expression of a written form, in which white space may differ, also around special tokens."""
    parts = re.split(r"(\s+|NAME|INDEX|IDENTIFIER|functions\.|<[|\uff5c].*?[|\uff5c]>|\[[A-Z_]+\])", text)
    known = {"NAME": NAME, "INDEX": r"(?P<index>\d+)", "IDENTIFIER": r"(?P<id>\w+)", "functions.": r"(?:functions\.)?"}
    found = ""
    for part in parts:
        around = _SPACES if re.match(r"<[|\uff5c]|\[[A-Z]", part) else ""
        space = newline if "\n" in part else _SPACES
        found += space if part.isspace() else around + (known.get(part) or re.escape(part)) + around
    return found


def _deepseek(call: str, between: str, *words: str) -> CallFormat:
    """A format of DeepSeek, whose special tokens have a wide vertical bar."""
    wide = str.maketrans("|", "\uff5c")
    begin, one, end, last = (
        f"<|tool▁{name}|>".translate(wide) for name in ("calls▁begin", "call▁begin", "call▁end", "calls▁end")
    )
    return CallFormat((begin, *words), (begin, one), one + call.translate(wide) + end, begin, between, last)


FORMATS: Mapping[str, CallFormat] = {
    "kimi": CallFormat(
        ("<|tool_calls_section_begin|>",),
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "deepseek v3": _deepseek("function<|tool▁sep|>NAME\n```json\nARGUMENTS\n```", "\n", "```json"),
    "deepseek v3.1": _deepseek("NAME<|tool▁sep|>ARGUMENTS", ""),
    "mistral v11": CallFormat(
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]NAME[CALL_ID]IDENTIFIER[ARGS]ARGUMENTS",
        between="",
        closing=None,
    ),
    "mistral": CallFormat(
        ("[TOOL_CALLS]", "[ARGS]"), ("[TOOL_CALLS]",), "[TOOL_CALLS]NAME[ARGS]ARGUMENTS", between="", closing=None
    ),
    "mistral json": CallFormat(
        ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), '{"name": "NAME", "arguments": ARGUMENTS}', "[TOOL_CALLS] [", ", ", "]"
    ),
    "harmony": CallFormat(
        ("<|channel|>", "<|message|>"),
        ("<|channel|>commentary",),
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
        closing=None,
        final="<|channel|>final<|message|>",
    ),
    "glm": CallFormat(
        ("<tool_call>", "<arg_key>"),
        ("<tool_call>",),
        "<tool_call>NAME\nARGUMENTS</tool_call>",
        argument="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    ),
    "qwen xml": CallFormat(
        ("<tool_call>", "<function="),
        ("<tool_call>", "<function="),  # models leave out the first
        "<function=NAME>\nARGUMENTS</function>",
        "<tool_call>\n",
        "\n</tool_call>\n<tool_call>\n",
        "\n</tool_call>",
        argument="<parameter=KEY>\nVALUE\n</parameter>\n",
    ),
    "minimax": CallFormat(
        ("minimax:tool_call", "<invoke"),
        ("<minimax:tool_call>",),
        '<invoke name="NAME">\nARGUMENTS</invoke>',
        "<minimax:tool_call>\n",
        "\n",
        "\n</minimax:tool_call>",
        argument='<parameter name="KEY">VALUE</parameter>\n',
    ),
    "hermes": CallFormat(
        ("<tool_call>",), ("<tool_call>",), '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'
    ),
    "llama": CallFormat(
        ('{"name": function name, "parameters":',),
        ("{",),
        '{"name": "NAME", "parameters": ARGUMENTS}',
        between="; ",
        closing=None,
        first=True,
    ),
}


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template teaches; None if it is none of `FORMATS`."""
    return next((form for form in FORMATS.values() if all(word in template for word in form.words)), None)


@dataclasses.dataclass(frozen=True)
class Calls:
    """What a request says of its tools: the ``parameters`` (JSON schemas) by name. ``must``: the answer calls one.
    ``strict``: arguments follow the schemas in any case. ``several``: more than one call is allowed. ``named``: the
    request names the tool to call."""

    format: CallFormat
    parameters: Mapping[str, Mapping[str, Any] | None]
    must: bool = False
    strict: bool = False
    several: bool = True
    named: bool = False

    def value(self, tool: str, key: str, text: str) -> Any:
        """The value of an argument that is written apart: a text where its schema wants one, else what is read."""
        root = self.parameters.get(tool) or {}
        return value_of(text, properties(root).get(key), root)

    def rules(self, tokens: Mapping[str, int]) -> Iterator[str]:
        """Rules of Lark: ``calls``, and ``rest``, calls after the first mark. ``tokens``: those that are no text."""
        form, mark = self.format, self.format.marks[0]
        before, after = form.call.split("ARGUMENTS")
        one, rest = list[str](), list[str]()
        for i, (name, schema) in enumerate(self.parameters.items()):
            for heads, written in ((one, before), (rest, before.removeprefix(mark))):
                parts = re.split("(INDEX|IDENTIFIER)", written.replace("NAME", name))
                head = " ".join(_NUMBERS.get(part) or literal(part, tokens) for part in parts)
                heads.append(f"{head} arguments_{i} {literal(after, tokens)}")
            if form.argument is None:
                yield f"arguments_{i}: {_json({'type': 'object', **schema} if schema else _NO_ARGUMENTS)}"
            else:
                yield from self._tags(i, schema, tokens)
        yield "one: " + " | ".join(one)
        yield "first: " + " | ".join(rest)
        more = f"({literal(form.between, tokens)} one)*" if self.several and not form.single else ""
        closing = literal(form.closing or "", tokens)
        yield f"calls: {literal(form.opening, tokens)} one {more} {closing}"
        opening = literal(form.opening.removeprefix(mark), tokens)
        yield f"rest: {opening} {'one' if form.opening else 'first'} {more} {closing}"

    def _tags(self, index: int, schema: Mapping[str, Any] | None, tokens: Mapping[str, int]) -> Iterator[str]:
        """Arguments one by one: those that are required, and any of the others, in the order of the schema."""
        assert self.format.argument is not None
        before, after = self.format.argument.split("VALUE")
        parts = []
        for j, (key, written) in enumerate(properties(schema).items()):
            head, one = literal(before.replace("KEY", key), tokens), resolved(written, schema)
            if one.get("type") == "string" and not one.keys() & {"enum", "const"}:
                tag, rest = after.strip(), after[len(after.rstrip()) :]  # which no value has in it
                yield f"value_{index}_{j}[lazy]: /(.|\\n)*{escaped(tag)}/"
                part = f"{head} value_{index}_{j} {literal(rest, tokens)}"
            else:
                texts = [literal(text, tokens) for text in listed(one) if isinstance(text, str)]
                shared = {name: value for name, value in (schema or {}).items() if name in ("$defs", "definitions")}
                whole = written if isinstance(written, bool) else {**shared, **one}
                values = [*texts, *([] if is_text(one) else [_json(whole)])]
                part = f"{head} ({' | '.join(values)}) {literal(after, tokens)}"
            parts.append(part if key in (schema or {}).get("required", ()) else f"({part})?")
        yield f"arguments_{index}: " + (" ".join(parts) or '""')


def _json(schema: Any) -> str:
    return "%json " + json.dumps({"x-guidance": _SPACE} | dict(schema) if isinstance(schema, Mapping) else schema)


def literal(text: str, tokens: Mapping[str, int]) -> str:
    """A text as a Lark terminal; special tokens in it, ``tokens``, are written as their ids."""
    found = sorted((token for token in tokens if token in text), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, found)) + ")", text) if found else [text]
    return " ".join(f"<[{tokens[part]}]>" if part in found else json.dumps(part) for part in parts if part)


def escaped(text: str) -> str:
    """A text in a regular expression of Lark."""
    return re.escape(text).replace("/", r"\/")
