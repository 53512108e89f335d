"""Streaming parser of tool-call arguments that are one JSON object.

Valid JSON is returned unchanged. Invalid JSON is repaired so that clients can always parse the result.
"""

import copy
import json
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

NOTHING = ("", "null", "None", '""', "[]")  # models write these in place of an empty object
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NAMES = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_OPENERS = {"}": "{", "]": "["}
_CLOSERS = {"{": "}", "[": "]"}


class JsonObject:
    """Streaming reader of a JSON object, character by character from the opening brace.

    Attributes:
        done: Whether the closing brace was read.
        repaired: Whether the text was invalid JSON, for example because of missing or superfluous quotes, commas
            or brackets, single quotes, line breaks in strings, or Python literals such as ``True``.
    """

    def __init__(self) -> None:
        self.done = self.repaired = False
        self._stack, self._mode = "", "value"  # the open brackets, and the state of the parser
        self._is_key, self._quote, self._escape = False, "", ""
        self._pending = ""  # an unquoted word, or a comma with white space, held back until the next character

    @property
    def in_string(self) -> bool:
        """Whether the next character is inside a string."""
        return self._mode == "string"

    def put(self, letter: str) -> str:
        """Read one character and return the JSON that can be emitted now."""
        if self._mode == "string":
            return self._string(letter)
        if self._mode == "quote":
            return self._quoted(letter)
        if self._mode == "word":
            if letter not in (":,}]\n" if self._is_key else ",}]\n"):
                self._pending += letter
                return ""
            return self._word() + self.put(letter)
        if letter in " \t\n\r":
            if not self._pending:
                return letter
            self._pending += letter
            return ""
        if letter in "}]":
            return self._close(letter)
        return self._comma() if letter == "," else self._start(letter)

    def completion(self) -> str:
        """Return the text that completes the JSON emitted so far."""
        if not self._stack:
            return "" if self.done else "{}"
        text = ""
        if self._mode in ("string", "quote"):
            text = ("\\" + self._escape if self._escape else "") + '"'
            self._escape = self._pending = ""
            self._mode = "colon" if self._is_key else "comma"
        elif self._mode == "word":
            text = self._word(cut=True)
        while self._stack:
            text += self._close(_CLOSERS[self._stack[-1]])
        return text

    def rest(self) -> str:
        """Return the text that was held back, without completing the object."""
        return self._pending + self._escape

    def _start(self, letter: str) -> str:
        """Read the first character of a key or of a value."""
        text, self._pending = self._pending, ""
        if self._mode == "colon":
            self._mode = "value"
            if letter == ":":
                return ":"
            text, self.repaired = ": ", True
        elif self._mode == "comma":  # the comma is missing
            text, self.repaired = ", ", True
            self._mode = self._member
        self._is_key = self._mode == "key"
        if letter in "{[" and not self._is_key:
            self._stack += letter
            self._mode = self._member
            return text + letter
        if letter in "{[:":  # neither a key nor a value starts with this character
            self.repaired, self._pending = True, text
            return ""
        if letter in "\"'":
            self._mode, self._quote = "string", letter
            self.repaired |= letter == "'"
            return text + '"'
        self._mode, self._pending = "word", letter
        return text

    @property
    def _member(self) -> Literal["key", "value"]:
        return "key" if self._stack[-1] == "{" else "value"

    def _string(self, letter: str) -> str:
        if self._escape:
            return self._escaped(letter)
        if letter == "\\":
            self._escape = letter
            return ""
        if letter == self._quote:
            self._mode, self._pending = "quote", '"'
            return ""
        if letter == '"' or letter < " ":
            self.repaired = True
            return json.dumps(letter)[1:-1]
        return letter

    def _quoted(self, letter: str) -> str:
        """Read the character after a quote in a string.

        The quote is part of the string unless this character can follow a string.
        """
        if letter in " \t\n\r":
            self._pending += letter
            return ""
        text, self._pending = self._pending, ""
        if letter in (":" if self._is_key else ",}]"):
            self._mode = "colon" if self._is_key else "comma"
            return text + self.put(letter)
        self._mode, self.repaired = "string", True
        return json.dumps(self._quote + text[1:])[1:-1] + self.put(letter)

    def _escaped(self, letter: str) -> str:
        """Read a character of an escape sequence. Sequences that JSON does not define become text."""
        escape, text = self._escape, self._escape + letter
        is_first = len(text) == 2
        if (is_first and letter == "u") or (not is_first and letter in "0123456789abcdefABCDEF"):
            self._escape = text if len(text) < 6 else ""
            return "" if self._escape else text
        self._escape = ""
        if is_first and letter in '"\\/bfnrt':
            return text
        self.repaired = True
        return letter if is_first and letter == "'" else "\\" + escape + self._string(letter)

    def _word(self, cut: bool = False) -> str:
        """Emit the unquoted key or value that was read. ``cut`` is True if the word may be incomplete."""
        text, self._pending = self._pending, ""
        word = text.rstrip()
        space = text[len(word) :]
        self._mode = "colon" if self._is_key else "comma"
        if (not self._is_key and word in ("true", "false", "null")) or (not self._is_key and _NUMBER.fullmatch(word)):
            return text
        self.repaired = True
        if not self._is_key and cut:
            names = [value for name, value in _NAMES.items() if name.startswith(word)]
            if names or _NUMBER.fullmatch(word + "0"):
                return names[0] if names else word + "0"
        return (_NAMES.get(word) if not self._is_key else None) or json.dumps(word, ensure_ascii=False) + space

    def _value(self) -> str:
        """Emit null for a key without a value."""
        if self._mode == "colon":
            self._mode, self.repaired = "comma", True
            return ": null"
        if self._mode == "value" and self._stack[-1] == "{":
            self._mode, self.repaired = "comma", True
            return "null"
        return ""

    def _comma(self) -> str:
        text = self._value()
        self.repaired |= self._mode != "comma"
        if self._mode == "comma":
            self._pending, self._mode = ",", self._member
        return text

    def _close(self, letter: str) -> str:
        """Close the innermost object or list that this bracket matches, and all objects and lists inside it."""
        if _OPENERS[letter] not in self._stack:
            self.repaired = True
            return ""
        self.repaired |= self._pending != ""
        text, self._pending = self._value() + self._pending.removeprefix(","), ""
        while (opener := self._stack[-1]) != _OPENERS[letter]:
            text, self._stack, self.repaired = text + _CLOSERS[opener], self._stack[:-1], True
        # The closed object or list is a complete value of the enclosing object or list.
        self._stack, self._mode, self.done = self._stack[:-1], "comma", len(self._stack) == 1
        return text + letter


class Taken(NamedTuple):
    """Result of reading a piece of text.

    Attributes:
        arguments: Arguments as JSON.
        said: Text between the arguments.
        rest: Unread text.
        done: Whether the arguments end before ``rest``.
    """

    arguments: str = ""
    said: str = ""
    rest: str = ""
    done: bool = False


class JsonArguments:
    """Streaming reader of arguments that are one JSON object.

    The arguments end at the closing brace, or at one of ``stops`` outside a string. A stop inside a string ends
    the arguments only if the object would otherwise be invalid. In this case, the model omitted the end of the
    object.
    """

    def __init__(self, stops: Sequence[str]):
        self._object, self._stops = JsonObject(), stops
        self._letters, self._longest = {stop[0] for stop in stops}, max(map(len, stops), default=0)

    def take(self, text: str, final: bool = False, cut: bool = False) -> Taken:
        """Read arguments from a text.

        Args:
            text: Unread text.
            final: Whether the text is complete.
            cut: Whether the text ended at the length limit. If so, the object is left incomplete.
        """
        pieces = list[str]()
        for position, letter in enumerate(text):
            if letter in self._letters:
                if not final and len(text) - position < self._longest and self._is_start(text[position:]):
                    return Taken("".join(pieces), rest=text[position:])
                if text.startswith(self._stops, position):  # pyright: ignore[reportArgumentType]
                    ends_object = self._ends(text[position:], final, cut)
                    if ends_object is None:
                        return Taken("".join(pieces), rest=text[position:])
                    if ends_object:
                        return Taken("".join([*pieces, self._object.completion()]), rest=text[position:], done=True)
            pieces.append(self._object.put(letter))
            if self._object.done:
                return Taken("".join(pieces), rest=text[position + 1 :], done=True)
        if final:
            pieces.append(self._object.rest() if cut else self._object.completion())
        return Taken("".join(pieces), done=final)

    def _is_start(self, text: str) -> bool:
        return any(stop != text and stop.startswith(text) for stop in self._stops)

    def _ends(self, text: str, final: bool, cut: bool) -> bool | None:
        """Return whether the stop at the start of ``text`` ends the object, or `None` if more text is needed."""
        if not self._object.in_string:
            return True
        trial = copy.copy(self._object)
        trial.repaired = False
        for letter in text:
            trial.put(letter)
            if trial.repaired or trial.done:
                return trial.repaired
        return not cut if final else None


def json_object(text: str) -> str:
    """Repair a text that starts with a brace, so that it is a valid JSON object."""
    return JsonArguments(()).take(text, final=True).arguments


def to_json(value: Any) -> str:
    """Serialize a value as JSON. Lone surrogates are escaped, because UTF-8 cannot encode them."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
