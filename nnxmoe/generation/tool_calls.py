"""Tool calls in messages: validation, and the form that a chat template reads.

Data sets and clients write a call's arguments as an object or, as OpenAI does, as JSON text. A template reads one of
the two; some also need a call's "type", a flat call, or null content beside calls. `in_template_form` tries each form
with a marker as the arguments, and takes the first whose rendering shows every marker as JSON: neither encoded twice
nor as Python's repr.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nnxmoe.config.printable import short
from nnxmoe.generation.tokenizer_files import TokenizerError
from nnxmoe.storage.files import parse_json

Messages = list[dict[str, Any]]
_Mark = tuple[int, int, str]  # message, call, and the marker among its arguments
_OTHER_NAMES = ("parameters", "args", "input", "kwargs")  # of arguments, in formats that are not OpenAI's


class _CallForm(NamedTuple):
    """A way to write the calls of messages."""

    shape: str  # "" | "typed": calls without a type get "function" | "flat": name and arguments beside the id
    content: dict[str, Any]  # replaces the empty content of messages with calls
    text: bool  # arguments are JSON text, otherwise objects


_CONTENTS: tuple[dict[str, Any], ...] = ({}, {"content": ""}, {"content": None})
_FORMS = [_CallForm(*options) for options in itertools.product(("", "typed", "flat"), _CONTENTS, (False, True))]


def tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Validate the calls of a message, a list or its JSON text, in OpenAI's form or flat: ``{"name", "arguments"}``.

    Returns them in OpenAI's form. Arguments that are absent, null or "" become ``{}``; others stay an object or its
    JSON text. Raises TokenizerError that names the call.
    """
    if isinstance(value, str):
        value = parse_json(value.encode("utf-8", "replace"), where, "correct the text", TokenizerError)
    if not isinstance(value, list | tuple):
        raise TokenizerError(f"{where} is {short(value)}: it must be a list of calls of functions")
    return [_call(call, f"{where}[{number}]") for number, call in enumerate(value)]


def _call(call: Any, where: str) -> dict[str, Any]:
    fields = {name: value for name, value in call.items() if value is not None} if isinstance(call, Mapping) else {}
    function = fields.get("function", fields if "name" in fields else None)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        example = '{"type": "function", "function": {"name": …, "arguments": …}}'
        raise TokenizerError(f"{where} is {short(call)}: it must be a call of a function, {example}")
    arguments = function.get("arguments")
    other = [name for name in _OTHER_NAMES if name in function]
    if arguments is None and other:
        raise TokenizerError(f"{where} has {other[0]!r} but no 'arguments': rename that field")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    elif _object(arguments, where) is None:  # JSON's null
        arguments = {}
    if function is fields:
        more = {name: value for name, value in fields.items() if name not in ("name", "arguments", "type")}
        return {**more, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**fields, "function": {**function, "arguments": arguments}}


def _object(arguments: Any, where: str) -> dict[str, Any] | None:
    """Arguments as an object; None for JSON's null. Raises TokenizerError."""
    value, why = arguments, ""
    if isinstance(arguments, str):
        try:
            data = arguments.encode("utf-8", "replace")
            value = parse_json(data, "the text", "was the answer cut?", TokenizerError)
        except TokenizerError as error:
            why = f": {error}"
        if value is None:
            return None
    if not isinstance(value, dict):
        raise TokenizerError(f"{where}: the arguments {short(arguments)} are not a JSON object{why}")
    return value


def in_template_form(render: Callable[[Messages], Any], messages: Messages) -> Messages:
    """The messages with their calls in the form that the chat template reads.

    ``render`` renders messages of plain JSON values, with text as its result's ``text``. Raises TokenizerError if the
    template fails, or leaves out a call in every form.
    """
    marks = [
        (number, at, f"marker{number}x{at}end")
        for number, message in enumerate(messages)
        for at in range(len(message.get("tool_calls", ())))
    ]
    if not marks:
        return messages
    probe = _with_markers(messages, marks)
    complete, failed = list[_CallForm](), list[_CallForm]()  # forms with all markers, and those that do not render
    lost = list[_Mark]()
    for form in _FORMS:
        try:
            text = render(_in_form(probe, form)).text
        except TokenizerError:
            failed.append(form)
            continue
        if missing := [mark for mark in marks if mark[2] not in text]:
            lost = lost or missing
        elif any(odd in text for *_, mark in marks for odd in (f"': '{mark}'", f'\\"{mark}\\"')):
            complete.append(form)
        else:
            return _in_form(messages, form)
    if complete:
        return _in_form(messages, complete[0])
    return _first_that_renders(render, messages, failed, lost)


def _with_markers(messages: Messages, marks: list[_Mark]) -> Messages:
    probe = [dict(message) for message in messages]
    for number, at, mark in marks:
        calls = list(probe[number]["tool_calls"])
        calls[at] = calls[at] | {"function": calls[at]["function"] | {"arguments": {"marked": mark}}}
        probe[number]["tool_calls"] = calls
    return probe


def _first_that_renders(
    render: Callable[[Messages], Any], messages: Messages, forms: list[_CallForm], lost: list[_Mark]
) -> Messages:
    """The messages in the first form that the template accepts with the arguments themselves, whose names it may look
    up. Raises TokenizerError if there is none: the first of the ``lost`` calls, or the template's failure."""
    failure: TokenizerError | None = None
    for form in forms:
        written = _in_form(messages, form)
        try:
            render(written)
        except TokenizerError as error:
            failure = failure or error
        else:
            return written
    if lost or failure is None:
        number, at, _ = lost[0]
        raise TokenizerError(
            f"the chat template leaves out messages[{number}].tool_calls[{at}] or its arguments: remove that call, or "
            "use a template that reads it"
        )
    raise failure


def _in_form(messages: Messages, form: _CallForm) -> Messages:
    written = []
    for message in messages:
        if calls := message.get("tool_calls"):
            content = {} if message.get("content") else form.content
            message = message | content | {"tool_calls": [_call_in_form(call, form) for call in calls]}
        written.append(message)
    return written


def _call_in_form(call: dict[str, Any], form: _CallForm) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if form.text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not form.text and isinstance(arguments, str):
        arguments = json.loads(arguments)
    function = call["function"] | {"arguments": arguments}
    if form.shape == "flat":
        return {name: value for name, value in call.items() if name != "function"} | function
    kind = {"type": "function"} if form.shape == "typed" and "type" not in call else {}
    return call | kind | {"function": function}
