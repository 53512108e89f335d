"""Lines of text or chat as token ids, and which of them are learnt."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Bool, Int32

from nnxmoe.generation.text import Tokenizer, TokenizerError
from nnxmoe.train.data.jsonl import DataError, JsonLines, Record

_CACHE_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Document:
    """Token ids, and which of them are to be predicted: of a chat what the assistant says, of a text everything."""

    tokens: Int32[np.ndarray, " T"]
    learnt: Bool[np.ndarray, " T"]
    chat: bool


class Documents:
    """The lines of a file (see `JsonLines`) as tokens, made when they are asked for.

    A text is what ``tokenizer.encode`` makes of it, and the end-of-text token where the tokenizer has one. A chat is
    what its chat template makes of it; learnt are the assistant's messages with the token that ends them, which are
    found by rendering the chat up to each of them. Up to 256 MB of tokens are kept (5 bytes each), so that later epochs
    of small files cost nothing. Raises DataError (a ValueError) that names the line.
    """

    def __init__(self, path: str | os.PathLike[str], tokenizer: Tokenizer) -> None:
        self.lines = JsonLines(path)
        self.tokenizer = tokenizer
        self._kept: dict[int, Document] = {}
        self._room = _CACHE_BYTES

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: SupportsIndex) -> Document:
        number = range(len(self))[index]
        if (document := self._kept.get(number)) is None:
            document = self._make(self.lines[number], self.lines.where(number))
            self._room -= 5 * len(document.tokens)
            if self._room >= 0:
                self._kept[number] = document
        return document

    def check(self) -> None:
        """Make every document once: errors of the tokenizer and of the chat template come now, not hours later."""
        for index in range(len(self)):
            self[index]

    def identity(self) -> dict[str, Any]:
        """What the tokens depend on, to recognise it: small, and JSON can hold it."""
        given = [self.tokenizer.backend.to_str(), self.tokenizer.chat_templates, self.tokenizer.special_tokens]
        made = hashlib.sha256(json.dumps(given, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
        return {"file's bytes": self.lines.size, "file's sha256": self.lines.digest, "tokenizer's sha256": made}

    def _make(self, record: Record, where: str) -> Document:
        try:
            if record.text is None:
                return _chat(self.tokenizer, record.messages, where)
            ids = self.tokenizer.encode(record.text)
        except TokenizerError as error:
            raise DataError(f"{where}: {error}") from error
        end = self.tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids.append(end)
        if not ids:
            raise DataError(f"{where}: the tokenizer makes no token of it: remove the line")
        return Document(np.asarray(ids, np.int32), np.ones(len(ids), bool), False)


def _chat(tokenizer: Tokenizer, messages: Sequence[tuple[str, str]], where: str) -> Document:
    """The whole chat, of which each answer is what comes after the chat before it, rendered as when it is asked for."""
    given = [{"role": role, "content": content} for role, content in messages]

    def ids(count: int, asked: bool) -> list[int]:
        return tokenizer.apply_chat_template(given[:count], add_generation_prompt=asked, tokenize=True)

    whole = ids(len(given), False)
    learnt = np.zeros(len(whole), bool)
    for turn, (role, _) in enumerate(messages):
        if role != "assistant":
            continue
        asked, answered = ids(turn, True), ids(turn + 1, False) if turn + 1 < len(given) else whole
        if whole[: len(asked)] != asked or whole[: len(answered)] != answered or len(answered) <= len(asked):
            raise DataError(
                f"{where}: the chat template writes the chat up to messages[{turn}] in another way once it goes on, so "
                "what the assistant says in it cannot be told from the rest: use a template that only adds to what is "
                'there, or give {"text": …} written out'
            )
        learnt[len(asked) : len(answered)] = True
    return Document(np.asarray(whole, np.int32), learnt, True)
