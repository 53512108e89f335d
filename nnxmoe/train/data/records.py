"""Formats of training records: texts, completions, chats and preferences."""

import dataclasses
import os.path
from collections.abc import Callable, Mapping
from typing import Any

from nnxmoe.config.printable import short
from nnxmoe.convert.files.untrusted_files import parse_json
from nnxmoe.runtime.progress import say
from nnxmoe.tokenizer.tokenizer_files import TokenizerError
from nnxmoe.tokenizer.tool_calls import pop_tool_calls
from nnxmoe.train.data.bad_records import RecordError

# Role in a record (including ShareGPT's names) -> role in chat templates.
ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool", "function", "ipython")}
ROLES |= {"human": "user", "gpt": "assistant", "observation": "tool"}
_TEXTS = ("text", "input_text", "output_text")  # types of content parts
# Fields of each format, in order of precedence. Other fields of a record are ignored.
FORMS = {
    "messages": ("messages", "tools"),
    "conversations": ("conversations", "system", "tools"),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "input", "output"),
    "text": ("text",),
}


PAIR = ("chosen", "rejected")  # the fields of a preference
_QUESTIONS = ("instruction", "question", "query", "input")  # names of the prompt field in other preference formats
_CHATS = ("messages", "conversations", "prompt", "completion", *PAIR)  # fields that may contain messages


Messages = tuple[dict[str, Any], ...]
Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Record:
    """Text, or messages of a chat as dicts with role, content and other fields for the template.

    Attributes:
        prompt: Text before ``text`` that is excluded from the loss.
        answers: Indices of the messages to train on.
        tools: JSON schemas of the tools.
    """

    text: str | None
    messages: Messages = ()
    prompt: str = ""
    answers: tuple[int, ...] = ()
    tools: Messages = ()


def record_of(value: object) -> tuple[Record, frozenset[str]]:
    """Parse a JSON object as a record. Returns the record and the names of ignored fields.

    Raises RecordError unless the object has one of these formats:

    - ``{"text"}``
    - ``{"messages": [{"role", "content"}]}``
    - ``{"prompt", "completion"}``, strings or messages. The completion may be a whole chat that begins
      with the prompt.
    - ``{"instruction", "input", "output"}`` (Alpaca). "input" is optional.
    - ``{"conversations": [{"from", "value"}], "system"}`` (ShareGPT). "system" is optional.

    The field "tools" and other fields of messages are passed to the chat template. "tool_calls" are
    validated (see `pop_tool_calls`). As in OpenAI's format, answers with weight 0 are not trained on.
    """
    fields = fields_of(value)
    pair = fields.keys() >= set(PAIR)
    present = sorted((name for name in FORMS if name in fields), key=lambda name: fields[name] is None)
    if pair and (not present or (present[0] == "prompt" and "completion" not in fields)):
        raise RecordError(
            "the record is a preference (a chosen and a rejected completion): train with --preferences, or with "
            "nnxmoe.train.preferences and train.DPO"
        )
    if not present:
        raise RecordError(
            f"{_field_names(fields)}: write 'text' (a string), 'messages' (objects with 'role' and 'content'), "
            "'prompt' and 'completion', 'instruction', 'input' and 'output', or 'conversations'",
            "no form",
        )
    form = present[0]
    ignored = frozenset(str(name) for name in fields if name not in FORMS[form])
    match form:
        case "text":
            record = Record(_text(fields, "text"))
        case "instruction":
            record = _instruction(fields)
        case "prompt":
            record = _completion(fields)
        case _:
            record = _conversation(fields, form)
    return record, ignored


def _conversation(fields: Fields, form: str) -> Record:
    system = fields.get("system") if form == "conversations" else None
    system_messages = _messages([{"role": "system", "content": system}], "system") if system else []
    record = _chat([*system_messages, *_messages(fields[form], form)])
    return dataclasses.replace(record, tools=_tools(fields.get("tools")))


def _instruction(fields: Fields) -> Record:
    instruction, context = _text(fields, "instruction"), fields.get("input")
    if context is not None and not isinstance(context, str):
        raise _wrong("input", context, "it must be a string")
    content = f"{instruction}\n\n{context}" if context and context.strip() else instruction
    answer = _text(fields, "output")
    return _chat([{"role": "user", "content": content}, {"role": "assistant", "content": answer}])


def _completion(fields: Fields) -> Record:
    if isinstance(fields["prompt"], str):
        completion = _text(fields, "completion")
        return Record(completion, prompt=_text(fields, "prompt"))
    prompt, completion = _list(fields["prompt"], "prompt"), _list(_required(fields, "completion"), "completion")
    if completion[: len(prompt)] == prompt:  # the completion is the whole chat
        completion = completion[len(prompt) :]
    return _chat([*_messages(prompt, "prompt"), *_messages(completion, "completion")], len(prompt))


def pair_of(value: object) -> tuple[tuple[Record, Record], frozenset[str]]:
    """Parse a JSON object as a preference pair in one of TRL's formats.

    Returns the chosen and the rejected record, and the names of ignored fields. In ``{"prompt", "chosen", "rejected"}``
    all fields are strings or all are messages. In ``{"chosen", "rejected"}`` both fields are whole chats or texts, and
    the prompt is their longest common prefix. A string prompt next to whole chats is ignored. "tools" are passed to
    the chat template.

    Raises:
        RecordError: If the object has a different format, if both completions are equal, or if there is no prompt
            and a field such as ``question`` is not part of the common prefix.
    """
    fields = fields_of(value)
    both: list[Any] = [_required(fields, name) for name in PAIR]
    chats, texts = (all(isinstance(field, types) for field in both) for types in ((list, tuple), str))
    if not (chats or texts):
        rule = (
            "write 'prompt', 'chosen' and 'rejected' (all strings or all messages), or 'chosen' and "
            "'rejected' as whole chats"
        )
        index = int(isinstance(both[0], list | tuple | str))
        raise _wrong(PAIR[index], both[index], rule)
    prompt: Any = fields.get("prompt")
    if prompt is None and texts:
        prefix = os.path.commonprefix(both)
        names = [name for name in _QUESTIONS if isinstance(text := fields.get(name), str) and text not in prefix]
        if names:
            hint = f"rename {names[0]!r} to 'prompt'"
            raise RecordError(f"there is no prompt: {_field_names(fields)}; {hint}", "no prompt")
    if both[0] == both[1]:
        raise RecordError("chosen and rejected are equal, so there is no preference to learn")
    if prompt is None or (chats and isinstance(prompt, str)):
        shared = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
        shared -= texts and both[0][:shared].endswith(" ")  # tokenizers merge the space into the next token
        prompt, both = both[0][:shared], [field[shared:] for field in both]
    if not prompt:
        hint = ' of messages: write it as [{"role": "user", "content": …}]' if chats else f": {_field_names(fields)}"
        raise RecordError(f"chosen and rejected have no common prefix, and there is no prompt{hint}", "no prompt")
    records = []
    for name, completion in zip(PAIR, both, strict=True):
        try:
            records.append(record_of({"prompt": prompt, "completion": completion})[0])
        except RecordError as error:
            raise RecordError(f"{name}: {error}", f"{name}: {error.reason}") from None
    tools = _tools(fields.get("tools"))
    chosen, rejected = (dataclasses.replace(record, tools=tools) for record in records)
    return (chosen, rejected), frozenset(str(name) for name in fields if name not in ("prompt", *PAIR, "tools"))


def fields_of(value: object) -> Fields:
    if not isinstance(value, Mapping):
        hint = ': write {"text": …}' if isinstance(value, str) else ""
        raise RecordError(f"{short(value)} is not a JSON object{hint}", "not a JSON object")
    chats = [chat for name in _CHATS if isinstance(chat := value.get(name), list | tuple)]
    return without_nulls(value) if _is_null_filled([message for chat in chats for message in chat]) else value


def _is_null_filled(messages: list[Any]) -> bool:
    """Check whether all messages have the same fields and some fields are null.

    Files written from typed columns, such as by ``Dataset.to_json``, contain such nulls. They mark absent
    fields, even inside the arguments of tool calls.
    """
    if len(messages) < 2 or not all(isinstance(message, Mapping) for message in messages):
        return False
    same_fields = all(message.keys() == messages[0].keys() for message in messages)
    return same_fields and any(field is None for message in messages for field in message.values())


def without_nulls(value: Any) -> Any:
    """Remove null fields from the objects in a value, recursively."""
    if isinstance(value, Mapping):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _field_names(fields: Fields) -> str:
    return f"the record has the fields {short(sorted(map(str, fields)))}"


def _required(fields: Fields, name: str) -> Any:
    if name not in fields:
        raise RecordError(f"the field {name!r} is missing: {_field_names(fields)}", f"{name!r} is missing")
    return fields[name]


def _wrong(path: str, value: object, rule: str) -> RecordError:
    """Build the error for a value that violates a rule. Its reason contains the type instead of the value."""
    if value is None:
        return RecordError(f"{path} is null: {rule}")
    type_name = f"an empty {type(value).__name__}" if value in ("", []) else type(value).__name__
    return RecordError(f"{path} is {short(value)}: {rule}", f"{path} is {type_name}: {rule}")


def _text(fields: Fields, name: str, parent_path: str = "", *, empty: bool = False) -> str:
    """Return the text in a field. Messages name the field by ``parent_path`` and ``name``."""
    value, path = _required(fields, name), f"{parent_path}{name}"
    if not isinstance(value, str) or not (value.strip() or empty):
        raise _wrong(path, value, f"it must be a {'' if empty else 'non-empty '}string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"{path} is not valid Unicode: {error}; remove lone surrogates", path) from None
    return value


def _list(value: object, path: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _wrong(path, value, "it must be a list of objects with 'role' and 'content'")
    return list(value)


def _tools(value: object) -> Messages:
    """Validate tool schemas: a list, or JSON text as in data sets with typed columns."""
    schemas = value
    if isinstance(value, str) and value:
        schemas = parse_json(value.encode("utf-8", "replace"), "tools", "correct the JSON", RecordError)
    schemas = schemas or []
    if not isinstance(schemas, list | tuple) or not all(isinstance(schema, Mapping) for schema in schemas):
        raise _wrong("tools", value, "it must be a list of JSON schemas")
    return tuple(schemas)


def _messages(values: object, path: str) -> list[dict[str, Any]]:
    return [_message(value, f"{path}[{number}]") for number, value in enumerate(_list(values, path))]


def _message(value: Any, path: str) -> dict[str, Any]:
    """Validate a message, and rename its fields to role and content."""
    if not isinstance(value, Mapping):
        raise _wrong(path, value, "it must be an object with 'role' and 'content', or 'from' and 'value'")
    fields = {name: field for name, field in value.items() if field is not None}
    share_gpt = "from" in fields and "role" not in fields
    role_field, content_field = ("from", "value") if share_gpt else ("role", "content")
    if share_gpt and fields["from"] == "function_call":
        fields = _with_tool_calls(fields, path)
    if calls := _calls(fields, path):
        fields = {content_field: "", **fields, "tool_calls": calls}
    if absent := next((name for name in (role_field, content_field) if name not in fields), None):
        state = "is null" if absent in value else "is missing"
        names = short(sorted(map(str, value)))
        raise RecordError(f"{path}: {absent!r} {state}; its fields are {names}", f"{path}: {absent!r} {state}")
    role, content = fields.pop(role_field), fields.pop(content_field)
    if not isinstance(role, str) or role not in ROLES:
        raise RecordError(f"{path} has the role {short(role)}: use {', '.join(ROLES)}")
    if isinstance(content, list | tuple):
        content = "".join(_part(part, f"{path}: {content_field}") for part in content)
    role, may_be_empty = ROLES[role], ROLES[role] not in ("user", "assistant") or "tool_calls" in fields
    text = _text({content_field: content}, content_field, f"{path}: ", empty=may_be_empty)
    return {"role": role, "content": text, **fields}


def _with_tool_calls(fields: dict[str, Any], path: str) -> dict[str, Any]:
    """Convert LLaMA-Factory's message ``function_call``. Its value is the JSON text of one call or a list of calls."""
    calls = fields.get("value")
    if not calls:
        raise _wrong(f"{path}: value", calls, "it must be the JSON text of a tool call, or of a list of tool calls")
    if isinstance(calls, str) and calls.lstrip().startswith("{"):
        calls = f"[{calls}]"
    return {**fields, "from": "gpt", "value": "", "tool_calls": calls}


def _part(part: Any, path: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") in _TEXTS else None
    if not isinstance(text, str):
        part_type = short(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
        rule = 'only {"type": "text", "text": …} is supported'
        raise RecordError(f"{path} has {short(part)}: {rule}", f"{path} has {part_type}: {rule}")
    return text


def _calls(message: dict[str, Any], path: str) -> list[dict[str, Any]]:
    try:
        return pop_tool_calls(message, path)
    except TokenizerError as error:
        name = "function_call" if message.get("function_call") else "tool_calls"
        raise RecordError(str(error), f"{path}.{name} is invalid") from None


def _chat(messages: list[dict[str, Any]], prompt_length: int = 0) -> Record:
    weights = [message.pop("weight", 1) for message in messages]
    if invalid := [weight for weight in weights if weight not in (0, 1)]:
        raise RecordError(f"a message has weight {short(invalid[0])}: use 1, or 0 to exclude an answer from the loss")
    roles = [message["role"] for message in messages]
    answers = [i for i, role in enumerate(roles) if role == "assistant" and i >= prompt_length and weights[i]]
    if not answers:
        raise RecordError("the chat has no message from the assistant, so there is nothing to train on: add an answer")
    if roles[0] == "assistant":
        raise RecordError("the chat starts with an assistant message: add the user message before it")
    return Record(None, tuple(messages), answers=tuple(answers))


Parse = Callable[[object], tuple[Any, frozenset[str]]]
"""`record_of` or `pair_of`."""


def tell_ignored(names: set[str], source: object) -> None:
    """Report the ignored fields of records, if any."""
    if names:
        say("%s: these fields are ignored: %s", source, short(sorted(names)))
