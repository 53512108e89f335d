"""Validate tool calls in messages, and convert them to the form that a chat template reads.

Data sets and clients write the arguments of a call as an object or, like OpenAI, as JSON text. A
template supports only one of these two forms. Some templates also require the "type" of the call, a flat
call, or null content in messages with calls. `convert_tool_calls` renders each form with markers as
arguments. It selects the first form in which every marker is rendered as JSON, and not as JSON in a
JSON string or as Python's repr.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nnxmoe.config.printable import short
from nnxmoe.convert.files.untrusted_files import parse_json
from nnxmoe.tokenizer.tokenizer_files import TokenizerError

Messages = list[dict[str, Any]]
_Mark = tuple[int, int, str]  # Index of the message, index of the call, marker in its arguments.
_ARGUMENT_ALIASES = ("parameters", "args", "input", "kwargs")  # Names of "arguments" in other formats.


class _CallForm(NamedTuple):
    """Form of tool calls that a chat template may expect.

    Attributes:
        shape: "" for OpenAI's form. "typed" adds the type "function" if it is missing. "flat" moves
            name and arguments to the level of the id.
        content: the "content" field of messages that have calls but no text.
        text: True if arguments are JSON text, False if they are objects.
    """

    shape: str
    content: dict[str, Any]
    text: bool


_CONTENTS: tuple[dict[str, Any], ...] = ({}, {"content": ""}, {"content": None})
_FORMS = [_CallForm(*options) for options in itertools.product(("", "typed", "flat"), _CONTENTS, (False, True))]


def pop_tool_calls(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Remove the tool calls from a message, and validate them.

    Args:
        message: the message. "tool_calls" is a list of calls or its JSON text, in OpenAI's form or flat
            (``{"name", "arguments"}``).
        where: path of the message, for error messages.

    Returns:
        Calls in OpenAI's form. Arguments that are absent, null or "" become ``{}``. Other arguments
        are unchanged. Empty if the message has no calls.

    Raises:
        TokenizerError: if a call is invalid. The message has the index of the call.
    """
    if message.get("function_call"):
        raise TokenizerError(
            f"{where}.function_call is not supported: write it as "
            '"tool_calls": [{"type": "function", "function": …}], and its result with the role tool'
        )
    value, where = message.pop("tool_calls", []), f"{where}.tool_calls"
    if isinstance(value, str):  # in columns of text, "" marks messages without calls
        data = value.strip().encode("utf-8", "replace") or b"[]"
        value = parse_json(data, where, "correct the JSON", TokenizerError)
    if not isinstance(value, list | tuple):
        raise TokenizerError(f"{where} is {short(value)}: it must be a list of function calls")
    return [_call(call, f"{where}[{number}]") for number, call in enumerate(value)]


def _call(call: Any, where: str) -> dict[str, Any]:
    fields = {name: value for name, value in call.items() if value is not None} if isinstance(call, Mapping) else {}
    function = fields.get("function", fields if "name" in fields else None)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        example = '{"type": "function", "function": {"name": …, "arguments": …}}'
        raise TokenizerError(f"{where} is {short(call)}: it must be a function call, {example}")
    arguments = function.get("arguments")
    aliases = [name for name in _ARGUMENT_ALIASES if name in function]
    if arguments is None and aliases:
        raise TokenizerError(f"{where} has {aliases[0]!r} but no 'arguments': rename that field")
    is_empty = arguments is None or (isinstance(arguments, str) and not arguments.strip())
    if is_empty or _object(arguments, where) is None:
        arguments = {}
    if function is fields:
        other_fields = {name: value for name, value in fields.items() if name not in ("name", "arguments", "type")}
        return {**other_fields, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**fields, "function": {**function, "arguments": arguments}}


def _object(arguments: Any, where: str) -> dict[str, Any] | None:
    """Parse arguments to a dict. Returns None for the JSON text "null". Raises TokenizerError for other values."""
    value, reason = arguments, ""
    if isinstance(arguments, str):
        try:
            data = arguments.encode("utf-8", "replace")
            value = parse_json(data, "the text", "was the answer truncated?", TokenizerError)
        except TokenizerError as error:
            reason = f": {error}"
        if value is None:
            return None
    if not isinstance(value, dict):
        raise TokenizerError(f"{where}: the arguments {short(arguments)} are not a JSON object{reason}")
    return value


def convert_tool_calls(render: Callable[[Messages], Any], messages: Messages) -> Messages:
    """Convert the tool calls in messages to the form that the chat template supports.

    Args:
        render: function that renders messages of JSON types and returns an object with the attribute
            ``text``.
        messages: messages with calls in OpenAI's form.

    Raises:
        TokenizerError: if the template fails or omits a call in every form.
    """
    marks = [
        (number, index, f"marker{number}x{index}end")
        for number, message in enumerate(messages)
        for index in range(len(message.get("tool_calls", ())))
    ]
    if not marks:
        return messages
    probe = _with_markers(messages, marks)
    complete, failed = list[_CallForm](), list[_CallForm]()  # forms that render all markers, forms that raise
    omitted = list[_Mark]()
    for form in _FORMS:
        try:
            text = render(_in_form(probe, form)).text
        except TokenizerError:
            failed.append(form)
            continue
        if missing := [mark for mark in marks if mark[2] not in text]:
            omitted = omitted or missing
        elif any(spelling in text for *_, mark in marks for spelling in (f"': '{mark}'", f'\\"{mark}\\"')):
            complete.append(form)
        else:
            return _in_form(messages, form)
    if complete:
        return _in_form(messages, complete[0])
    return _first_rendered(render, messages, failed, omitted)


def _with_markers(messages: Messages, marks: list[_Mark]) -> Messages:
    probe = [dict(message) for message in messages]
    for number, index, mark in marks:
        calls = list(probe[number]["tool_calls"])
        calls[index] = calls[index] | {"function": calls[index]["function"] | {"arguments": {"marked": mark}}}
        probe[number]["tool_calls"] = calls
    return probe


def _first_rendered(
    render: Callable[[Messages], Any], messages: Messages, forms: list[_CallForm], omitted: list[_Mark]
) -> Messages:
    """Convert messages to the first form that the template renders without an error.

    Templates that look up argument names can fail with markers but succeed with the real arguments.

    Raises:
        TokenizerError: if no form renders. Reports the first of the ``omitted`` calls, or else the
            error of the template.
    """
    failure: TokenizerError | None = None
    for form in forms:
        converted = _in_form(messages, form)
        try:
            render(converted)
        except TokenizerError as error:
            failure = failure or error
        else:
            return converted
    if omitted or failure is None:
        number, index, _ = omitted[0]
        raise TokenizerError(
            f"the chat template omits messages[{number}].tool_calls[{index}] or its arguments: remove that call, or "
            "use a template that renders it"
        )
    raise failure


def _in_form(messages: Messages, form: _CallForm) -> Messages:
    converted = []
    for message in messages:
        if calls := message.get("tool_calls"):
            content = {} if message.get("content") else form.content
            message = message | content | {"tool_calls": [_call_in_form(call, form) for call in calls]}
        converted.append(message)
    return converted


def _call_in_form(call: dict[str, Any], form: _CallForm) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if form.text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not form.text and isinstance(arguments, str):
        arguments = json.loads(arguments)
    function = call["function"] | {"arguments": arguments}
    if form.shape == "flat":
        return {name: value for name, value in call.items() if name != "function"} | function
    call_type = {"type": "function"} if form.shape == "typed" and "type" not in call else {}
    return call | call_type | {"function": function}
