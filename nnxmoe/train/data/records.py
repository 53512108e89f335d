"""Training examples: the forms in which data sets hold them, as texts, completions and chats."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nnxmoe.config.printable import short
from nnxmoe.runtime.progress import say
from nnxmoe.storage.files import parse_json

# Role, also as ShareGPT spells it -> role in templates.
ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool", "function", "ipython")}
ROLES |= {"human": "user", "gpt": "assistant", "observation": "tool"}
_TEXTS = ("text", "input_text", "output_text")  # types of parts
_REMEDY = "correct or remove it"
# The fields that make each form, in the order in which they are looked for; what else a record has is ignored.
FORMS = {
    "messages": ("messages", "tools"),
    "conversations": ("conversations", "system", "tools"),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "input", "output"),
    "text": ("text",),
}


PAIR = ("chosen", "rejected")  # the fields of a preference


class DataError(ValueError):
    """Raised for unusable training data; the message names the file, the line and the remedy."""


Messages = tuple[dict[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Record:
    """A text, or the messages of a chat, dicts with role, content and what else templates read.

    ``prompt``: a text before the text, which is not to be learned. ``answers``: indices of the messages to learn.
    ``tools``: their JSON schemas.
    """

    text: str | None
    messages: Messages = ()
    prompt: str = ""
    answers: tuple[int, ...] = ()
    tools: Messages = ()


def record_of(value: object, where: str) -> tuple[Record, frozenset[str]]:
    """Parse a JSON object as a record. Returns the record and the names of the ignored fields.

    Raises DataError unless it has one of the forms ``{"text"}``, ``{"messages": [{"role", "content"}]}``, ``{"prompt",
    "completion"}`` (strings or messages; the completion may be a whole chat that begins with the prompt),
    ``{"instruction", "input", "output"}`` (Alpaca; "input" is optional), or ``{"conversations": [{"from", "value"}],
    "system"}`` (ShareGPT; "system" is optional). Chat templates also get "tools" beside a chat, and other
    fields of messages, such as tool_calls. Answers with weight 0 are not trained on, as in
    OpenAI's files.
    """
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: {short(value)} is not a JSON object; {_REMEDY}")
    pair = value.keys() >= set(PAIR)
    present = sorted((name for name in FORMS if name in value), key=lambda name: value[name] is None)
    if pair and (not present or (present[0] == "prompt" and "completion" not in value)):
        raise DataError(
            f"{where} is a preference, a chosen and a rejected completion: train on it with --preferences, or with "
            "nnxmoe.train.preferences and train.DPO"
        )
    if not present:
        raise DataError(
            f"{where} has the fields {short(sorted(map(str, value)))}: write 'text' (a string), 'messages' (a list of "
            "objects with 'role' and 'content'), 'prompt' and 'completion', 'instruction', 'input' and 'output', or "
            "'conversations'"
        )
    form = present[0]
    ignored = frozenset(str(name) for name in value if name not in FORMS[form])
    if form == "text":
        return Record(_text(value["text"], f"{where}: text")), ignored
    if form in ("messages", "conversations"):
        system = value.get("system") if form == "conversations" else None
        before = [{"role": "system", "content": system}] if system else []
        record = _chat([*before, *_list(value[form], f"{where}: {form}")], f"{where}: {form}")
        return dataclasses.replace(record, tools=_tools(value.get("tools"), f"{where}: tools")), ignored
    if form == "instruction":
        asked = _text(value["instruction"], f"{where}: instruction")
        more = value.get("input")
        if more is not None and not isinstance(more, str):
            raise DataError(f"{where}: input is {short(more)}: it must be a string")
        content = f"{asked}\n\n{more}" if more and more.strip() else asked
        answer = _text(value.get("output"), f"{where}: output")
        return _chat([{"role": "user", "content": content}, {"role": "assistant", "content": answer}], where), ignored
    prompt, completion = value["prompt"], value.get("completion")
    if isinstance(prompt, str):
        return Record(_text(completion, f"{where}: completion"), prompt=_text(prompt, f"{where}: prompt")), ignored
    given, more = _list(prompt, f"{where}: prompt"), _list(completion, f"{where}: completion")
    more = more[len(given) :] if more[: len(given)] == given else more  # a whole chat
    return _chat([*given, *more], where, len(given)), ignored


def pair_of(value: object, where: str) -> tuple[tuple[Record, Record], frozenset[str]]:
    """Parse a JSON object as a preference. Returns the records of the chosen and of the rejected completion, and the
    names of the ignored fields.

    The forms are TRL's: ``{"prompt", "chosen", "rejected"}``, all strings or all messages, and ``{"chosen",
    "rejected"}``, whole chats or texts, whose prompt is the longest beginning that they share; a prompt that is a
    string beside whole chats is ignored. Chat templates also get "tools". Raises DataError for other objects, and if
    the two are equal.
    """
    both: list[Any] = [value.get(name) for name in PAIR] if isinstance(value, Mapping) else [None]
    chats, texts = (all(isinstance(one, kind) for one in both) for kind in ((list, tuple), str))
    if not isinstance(value, Mapping) or not (chats or texts):
        raise DataError(
            f"{where}: {short(value)} is no preference: write 'prompt', 'chosen' and 'rejected' (strings or messages), "
            "or 'chosen' and 'rejected' (whole chats)"
        )
    prompt: Any = value.get("prompt")
    if both[0] == both[1]:
        raise DataError(f"{where}: chosen and rejected are equal, so there is no preference to learn; {_REMEDY}")
    if prompt is None or (chats and isinstance(prompt, str)):
        shared = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
        shared -= texts and both[0][:shared].endswith(" ")  # the space belongs to the next token
        prompt, both = both[0][:shared], [one[shared:] for one in both]
    if not prompt:
        kind = ' of messages: write it as [{"role": "user", "content": …}]' if chats else ""
        raise DataError(f"{where}: chosen and rejected do not begin alike, and there is no prompt{kind}; {_REMEDY}")
    given = [{"prompt": prompt, "completion": one} for one in both]
    found = [record_of(one, f"{where}: {name}")[0] for name, one in zip(PAIR, given, strict=True)]
    tools = _tools(value.get("tools"), f"{where}: tools")
    chosen, rejected = (dataclasses.replace(record, tools=tools) for record in found)
    return (chosen, rejected), frozenset(str(name) for name in value if name not in ("prompt", *PAIR, "tools"))


def _text(value: object, what: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value.strip() or empty):
        raise DataError(f"{what} is {short(value)}: it must be a {'' if empty else 'non-empty '}string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} is not valid Unicode: {error}; remove lone surrogates") from None
    return value


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise DataError(f"{what} is {short(value)}: it must be a list of objects with 'role' and 'content'")
    return list(value)


def _tools(value: object, what: str) -> Messages:
    """The schemas, which data sets with one type per column hold as a text."""
    found = parse_json(value.encode(), what, _REMEDY, DataError) if isinstance(value, str) and value else value
    found = found or []
    if not isinstance(found, list | tuple) or not all(isinstance(one, Mapping) for one in found):
        raise DataError(f"{what} is {short(value)}: it must be a list of JSON schemas")
    return tuple(found)


def _message(value: Any, what: str) -> dict[str, Any]:
    """A message with its role and content under the names that templates read."""
    fields = {name: of for name, of in value.items() if of is not None} if isinstance(value, Mapping) else {}
    by, said = ("role", "content") if "role" in fields else ("from", "value")
    if by not in fields or (said not in fields and "tool_calls" not in fields):
        raise DataError(
            f"{what} is {short(value)}: it must be an object with 'role' and 'content', or 'from' and 'value'"
        )
    role, content = fields.pop(by), fields.pop(said, "")
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"{what} has the role {short(role)}: use {', '.join(ROLES)}")
    if isinstance(content, list | tuple):
        texts = [isinstance(part, Mapping) and part.get("type", "text") in _TEXTS for part in content]
        odd = [
            p for p, is_text in zip(content, texts, strict=True) if not is_text or not isinstance(p.get("text"), str)
        ]
        if odd:
            raise DataError(f'{what}: content has {short(odd[0])}: only {{"type": "text", "text": …}} is supported')
        content = "".join(part["text"] for part in content)
    role, may_be_empty = ROLES[role], ROLES[role] not in ("user", "assistant") or "tool_calls" in fields
    return {"role": role, "content": _text(content, f"{what}: {said}", empty=may_be_empty), **fields}


def _chat(values: list[Any], what: str, given: int = 0) -> Record:
    messages = tuple(_message(value, f"{what}[{number}]") for number, value in enumerate(values))
    weights = [message.pop("weight", 1) for message in messages]
    if odd := [weight for weight in weights if weight not in (0, 1)]:
        raise DataError(f"{what} has a message of weight {short(odd[0])}: use 1, or 0 for answers that are not learned")
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= given and weights[i]]
    if not answers:
        raise DataError(f"{what} has no message from the assistant, hence nothing to learn: add one, or {_REMEDY}")
    if messages[0]["role"] == "assistant":
        raise DataError(f"{what} starts with the assistant: add the message that it answers")
    return Record(None, messages, answers=tuple(answers))


Parse = Callable[[object, str], tuple[Any, frozenset[str]]]
"""`record_of` or `pair_of`."""


def _plain(value: object) -> Any:
    return dataclasses.astuple(value) if isinstance(value, Record) else str(value)


def tell_ignored(names: set[str], source: object) -> None:
    """Report the fields of records that are ignored, if there are any."""
    if names:
        say("%s: these fields are ignored: %s", source, short(sorted(names)))


class RecordList:
    """The records of a list or of another iterable of dicts, such as a ``datasets.Dataset``, all validated.

    Raises DataError for the first invalid one. They are kept in memory.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]], parse: Parse = record_of) -> None:
        if isinstance(records, Mapping) or not isinstance(records, Iterable):
            raise DataError(f"{short(records)} is no training data: pass a file of JSON lines, or an iterable of dicts")
        digest, ignored, self._records = hashlib.sha256(), set[str](), list[Any]()
        for number, value in enumerate(records):
            record, more = parse(value, f"record {number}")
            ignored |= more
            digest.update(json.dumps(record, default=_plain).encode())
            self._records.append(record)
        if not self._records:
            raise DataError("there are no records: pass at least one")
        self.size, self.digest = len(self._records), digest.hexdigest()
        tell_ignored(ignored, self)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Any:
        return self._records[index]

    def __str__(self) -> str:
        return "the records given"

    def where(self, index: int) -> str:
        """The record's index, for messages."""
        return f"record {index}"
