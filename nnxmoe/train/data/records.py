"""Training examples: the forms in which data sets hold them, as texts, completions and chats."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from nnxmoe.config.printable import short
from nnxmoe.runtime.progress import say

ROLES = ("system", "user", "assistant")
_SHAREGPT = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_REMEDY = "correct or remove it"
# The fields that make each form, in the order in which they are looked for; what else a record has is ignored.
FORMS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "input", "output"),
    "text": ("text",),
}


class DataError(ValueError):
    """Raised for unusable training data; the message names the file, the line and the remedy."""


Messages = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Record:
    """A text, or the messages of a chat as ``(role, content)``.

    ``prompt``: a text before the text, which is not to be learned. ``given``: how many messages of the chat are not.
    """

    text: str | None
    messages: Messages = ()
    prompt: str = ""
    given: int = 0


def record_of(value: object, where: str) -> tuple[Record, frozenset[str]]:
    """The record in a JSON object, and the names of the fields that were ignored.

    Raises DataError unless it has one of the forms ``{"text"}``, ``{"messages": [{"role", "content"}]}``, ``{"prompt",
    "completion"}`` (strings or messages), ``{"instruction", "input", "output"}`` (Alpaca's; "input" may be missing), or
    ``{"conversations": [{"from", "value"}]}`` (ShareGPT's).
    """
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: {short(value)} is not a JSON object; {_REMEDY}")
    present = sorted((name for name in FORMS if name in value), key=lambda name: value[name] is None)
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
    if form == "messages":
        return Record(None, _chat(value["messages"], f"{where}: messages")), ignored
    if form == "conversations":
        return Record(
            None, _chat(value["conversations"], f"{where}: conversations", "from", "value", _SHAREGPT)
        ), ignored
    if form == "instruction":
        asked = _text(value["instruction"], f"{where}: instruction")
        more = value.get("input")
        if more is not None and not isinstance(more, str):
            raise DataError(f"{where}: input is {short(more)}: it must be a string")
        content = f"{asked}\n\n{more}" if more and more.strip() else asked
        answer = _text(value.get("output"), f"{where}: output")
        return Record(None, (("user", content), ("assistant", answer))), ignored
    prompt, completion = value["prompt"], value.get("completion")
    if isinstance(prompt, str):
        return Record(_text(completion, f"{where}: completion"), prompt=_text(prompt, f"{where}: prompt")), ignored
    given = _messages(prompt, f"{where}: prompt")
    whole = given + _messages(completion, f"{where}: completion")
    return Record(None, _learnable(whole, where), given=len(given)), ignored


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{what} is {short(value)}: it must be a non-empty string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} is not valid Unicode: {error}; remove lone surrogates") from None
    return value


def _messages(
    value: object, what: str, by: str = "role", said: str = "content", roles: Mapping[str, str] | None = None
) -> Messages:
    roles = {role: role for role in ROLES} if roles is None else roles
    if not isinstance(value, list | tuple):
        raise DataError(f"{what} is {short(value)}: it must be a list of objects with '{by}' and '{said}'")
    found: list[tuple[str, str]] = []
    for number, message in enumerate(value):
        one = f"{what}[{number}]"
        fields = {name for name, of in message.items() if of is not None} if isinstance(message, Mapping) else set()
        if fields != {by, said}:
            raise DataError(f"{one} is {short(message)}: it must be an object with only '{by}' and '{said}'")
        if not isinstance(message[by], str) or message[by] not in roles:
            raise DataError(f"{one} has the role {short(message[by])}: use {', '.join(roles)}")
        found.append((roles[message[by]], _text(message[said], f"{one}: {said}")))
    return tuple(found)


def _chat(value: object, what: str, *names: Any) -> Messages:
    return _learnable(_messages(value, what, *names), what)


def _learnable(messages: Messages, what: str) -> Messages:
    if not any(role == "assistant" for role, _ in messages):
        raise DataError(f"{what} has no message from the assistant, hence nothing to learn: add one, or {_REMEDY}")
    if messages[0][0] == "assistant":
        raise DataError(f"{what} starts with the assistant: add the message that it answers")
    return messages


class Ignored:
    """Collects the names of ignored fields, to say so once."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def tell(self, source: object) -> None:
        """The notice, if there is something to notice."""
        if self.names:
            say("%s: these fields are ignored: %s", source, short(sorted(self.names)))


class RecordList:
    """The records of a list or of another iterable of dicts, such as a ``datasets.Dataset``, all validated.

    Raises DataError for the first invalid one. They are kept in memory.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        if isinstance(records, Mapping) or not isinstance(records, Iterable):
            raise DataError(f"{short(records)} is no training data: pass a file of JSON lines, or an iterable of dicts")
        digest, ignored, self._records = hashlib.sha256(), Ignored(), list[Record]()
        for number, value in enumerate(records):
            record, more = record_of(value, f"record {number}")
            ignored.names |= more
            digest.update(json.dumps(dataclasses.astuple(record)).encode())
            self._records.append(record)
        if not self._records:
            raise DataError("there are no records: pass at least one")
        self.size, self.digest = len(self._records), digest.hexdigest()
        ignored.tell(self)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        return self._records[index]

    def __str__(self) -> str:
        return "the records given"

    def where(self, index: int) -> str:
        """The record's index, for messages."""
        return f"record {index}"
