"""Tool-call formats of the model families.

`FORMATS` contains a template of a call per family. The patterns of the parser (`CallSplit`) and the grammar
(`ToolOptions`) are derived from these templates.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

NAME = r"(?P<name>[\w.-]+)"
_SPACES = r"\s*+"  # possessive, so that matching long white space takes linear time
_TAG = re.compile(r'</?[\w:]+>|<[\w:]+=|<\w+ name="|<[|\uff5c].*?[|\uff5c]>|\[[A-Z_]+\]')


class ArgumentTags:
    """Tags around each argument, for families that write arguments one by one.

    Args:
        template: The tags, with the placeholders ``KEY`` and ``VALUE``.

    Attributes:
        before: The template up to the value.
        after: The template after the value.
        opening: The template up to the key.
        end_tag: The tag after a value.
        space: White space between a value and ``end_tag``.
        tag: Pattern of an opening tag, its key and the tags before the value. Models may omit a tag after the key.
        head: Pattern of the text before a value. Models may repeat the opening tag.
    """

    def __init__(self, template: str):
        self.before, _, self.after = template.partition("VALUE")
        self.opening, after_key = self.before.split("KEY")
        self.end_tag = self.after.strip()
        self.space = self.after[: self.after.index(self.end_tag)]
        tags = [re.escape(tag) for tag in _TAG.findall(after_key)]
        if len(tags) == 2:
            value_tags = rf"(?:{tags[1]}\s*+(?={tags[1]}))*+{tags[1]}"  # white space after the last tag is content
            tail = rf"(?:(?:{tags[0]}\s*+)++(?:{value_tags})?|{value_tags})"
        else:
            tail = _pattern(after_key, r"\n?")
        self.tag = rf"{_pattern(self.opening)}\s*+(?P<key>[^<>\"]++){tail}"
        self.head = re.compile(rf"\s*+(?:{_pattern(self.opening)}\s*+(?=<))*+{self.tag}")


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """Tool-call format of a family: ``opening``, the calls separated by ``between``, and ``closing``.

    Attributes:
        template_words: Words that identify a chat template of the family.
        marks: Texts that start a call.
        call: Template of a call. The placeholders are ``NAME``, ``ARGUMENTS`` and, for some families, ``INDEX``
            and ``IDENTIFIER``.
        opening: Text before the first call.
        between: Text between two calls.
        closing: Text after the last call, or `None` if the answer ends after the last call.
        argument: Tags of each argument, or `None` if the arguments are one JSON object.
        only_at_start: Whether calls must be at the start of the answer.
        text_prefix: Prefix of an answer without calls. Formats with this prefix allow one call per answer.
    """

    template_words: tuple[str, ...]
    marks: tuple[str, ...]
    call: str
    opening: str = ""
    between: str = "\n"
    closing: str | None = ""
    argument: ArgumentTags | None = None
    only_at_start: bool = False
    text_prefix: str = ""

    @property
    def before_arguments(self) -> str:
        """Template of a call up to the arguments."""
        return self.call.partition("ARGUMENTS")[0]

    @property
    def after_arguments(self) -> str:
        """Template of a call after the arguments."""
        return self.call.partition("ARGUMENTS")[2]

    @property
    def is_object(self) -> bool:
        """Whether a call is one JSON object."""
        return self.after_arguments.startswith("}")

    @functools.cached_property
    def head(self) -> re.Pattern[str]:
        """Pattern of the text from the end of the previous call to the arguments of the next call."""
        return re.compile(self.between_calls.pattern + _pattern(self.before_arguments) + _SPACES)

    @functools.cached_property
    def object_head(self) -> re.Pattern[str]:
        """Pattern of the text before a call that is one JSON object.

        Models of any family may write calls as JSON objects. One opening tag may precede several objects or a list.
        """
        # If `closing` is empty, `tail` includes the tag after the last call. An object after this tag is content.
        end_of_call = self._brackets if self.closing == "" else f"(?:{self.tail.pattern})?{self._brackets}"
        return re.compile(rf"(?:{self._between('+')}|{end_of_call}[,;]?\s*+)(?:\[\s*+)?(?=\{{)")

    @functools.cached_property
    def tail(self) -> re.Pattern[str]:
        """Pattern of the text after the arguments of a call.

        The pattern skips further fields of the call. Models may write the last brace twice or not at all, or close
        a list.
        """
        return re.compile(self._brackets + _pattern(self.after_arguments.removeprefix("}")))

    @property
    def _brackets(self) -> str:
        """Pattern of the further fields and closing brackets after the arguments."""
        return (r"(?:\s*+,(?:[^{}]|\{[^{}]*\})*+\})?" if self.is_object else "") + rf"[\s{self._closers}]*+"

    @property
    def _closers(self) -> str:
        """Closing brackets of a call, for a character class."""
        return ("}" if self.is_object else "") + ("" if self.closing == "]" else r"\]")

    @functools.cached_property
    def end(self) -> re.Pattern[str] | None:
        """Pattern of the text after the last call, or `None` if the answer ends after the last call."""
        if self.closing is None:
            return None
        repeated_tags = rf"(?:\s*+(?:{_any_of(self.closing_tags)}))*+"
        if not self.closing:
            return re.compile(self.tail.pattern + repeated_tags)
        # White space after the closing text is content.
        closing = _pattern(self.closing).removesuffix(_SPACES)
        return re.compile(f"(?:{self.tail.pattern})?{self._brackets}{closing}{repeated_tags}")

    @property
    def closing_tags(self) -> list[str]:
        """Tags after the arguments of a call, and after the last call."""
        return _TAG.findall(self.after_arguments + (self.closing or ""))

    @functools.cached_property
    def stops(self) -> tuple[str, ...]:
        """Tags around calls. A tag also ends arguments that the model did not terminate."""
        around = " ".join((self.opening, self.call, self.closing or "", *self.marks))
        suffix = self.after_arguments.removeprefix("}").strip()
        return tuple(dict.fromkeys([*_TAG.findall(around), *(["```"] if suffix.startswith("```") else [])]))

    @functools.cached_property
    def leftover(self) -> re.Pattern[str]:
        """Pattern that matches the remainder of a call's end at the start of a text."""
        tags, closers = _any_of(self.closing_tags), self._closers
        return re.compile(rf"^(?:{self.tail.pattern})?(?:[\s{closers}]*+(?:{tags}))*+(?:\s*+[{closers}])*+")

    @functools.cached_property
    def argument_tags(self) -> re.Pattern[str]:
        """Pattern of the tags of arguments, with the groups head, end and stop."""
        assert self.argument is not None
        head = self.argument.tag.replace("?P<key>", "?:")
        stops = "|".join(map(re.escape, self.stops))
        return re.compile(rf"(?P<head>{head})|(?P<end>{re.escape(self.argument.end_tag)})|(?P<stop>{stops})")

    @functools.cached_property
    def between_calls(self) -> re.Pattern[str]:
        """Pattern of the text between the arguments of a call and the next call."""
        return re.compile(self._between("*"))

    def _between(self, quantifier: str) -> str:
        """Pattern of the text between two calls. ``quantifier`` (``*`` or ``+``) applies to the opening tags."""
        between = _pattern(self.between.strip())
        marks = () if self.only_at_start else self.marks
        texts = dict.fromkeys(text.strip() for text in (self.opening, *marks))  # equal texts would match in many ways
        openings = "|".join(map(_pattern, filter(None, texts))) or "$."  # models may repeat them
        return rf"(?:{self.tail.pattern})?\s*+(?:{between})?\s*+(?:(?:{openings})\s*+){quantifier}"


def _any_of(texts: Sequence[str]) -> str:
    """Return a regular expression that matches any of the texts, and nothing if there are none."""
    return "|".join(map(re.escape, texts)) or "$."


def _pattern(text: str, newline: str = _SPACES) -> str:
    """Convert a template to a regular expression. White space may differ from the template, and tags may repeat."""
    pieces = re.split(r"(\s+|NAME|INDEX|IDENTIFIER|functions\.|<[|\uff5c].*?[|\uff5c]>|\[[A-Z_]+\])", text)
    regex = {"NAME": NAME, "INDEX": r"(?P<index>\d+)", "IDENTIFIER": r"(?P<id>\w+)", "functions.": r"(?:functions\.)?"}
    pattern = ""
    for piece in pieces:
        space = newline if "\n" in piece else _SPACES
        if re.match(r"<[|\uff5c]|\[[A-Z]", piece):
            pattern += f"(?:{_SPACES}{re.escape(piece)})++{_SPACES}"
        else:
            pattern += space if piece.isspace() else regex.get(piece) or re.escape(piece)
    return pattern


def _deepseek(call: str, between: str, *words: str) -> CallFormat:
    """Create a DeepSeek format. DeepSeek's special tokens contain a fullwidth vertical bar (U+FF5C)."""
    to_fullwidth = str.maketrans("|", "\uff5c")
    calls_begin, call_begin, call_end, calls_end = (
        f"<|tool▁{name}|>".translate(to_fullwidth) for name in ("calls▁begin", "call▁begin", "call▁end", "calls▁end")
    )
    return CallFormat(
        (calls_begin, *words),
        (calls_begin, call_begin),
        call_begin + call.translate(to_fullwidth) + call_end,
        calls_begin,
        between,
        calls_end,
    )


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
        text_prefix="<|channel|>final<|message|>",
    ),
    "glm": CallFormat(
        ("<tool_call>", "<arg_key>"),
        ("<tool_call>",),
        "<tool_call>NAME\nARGUMENTS</tool_call>",
        argument=ArgumentTags("<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"),
    ),
    "qwen xml": CallFormat(
        ("<tool_call>", "<function="),
        ("<tool_call>", "<function="),  # models may omit the first mark
        "<function=NAME>\nARGUMENTS</function>",
        "<tool_call>\n",
        "\n</tool_call>\n<tool_call>\n",
        "\n</tool_call>",
        argument=ArgumentTags("<parameter=KEY>\nVALUE\n</parameter>\n"),
    ),
    "minimax": CallFormat(
        ("minimax:tool_call", "<invoke"),
        ("<minimax:tool_call>",),
        '<invoke name="NAME">\nARGUMENTS</invoke>',
        "<minimax:tool_call>\n",
        "\n",
        "\n</minimax:tool_call>",
        argument=ArgumentTags('<parameter name="KEY">VALUE</parameter>\n'),
    ),
    "hermes": CallFormat(
        ("<tool_call>",), ("<tool_call>",), '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'
    ),
    "llama": CallFormat(
        ('{"name": function name, "parameters":',),
        ("{", "[{"),
        '{"name": "NAME", "parameters": ARGUMENTS}',
        between="; ",
        closing=None,
        only_at_start=True,
    ),
}


def format_of(template: str) -> CallFormat | None:
    """Return the format that a chat template uses, or `None` if `FORMATS` does not contain the format."""
    for form in FORMATS.values():
        if all(word in template for word in form.template_words):
            return form
    return None
