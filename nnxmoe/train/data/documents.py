"""Encode texts and chats as token ids, with a mask of the tokens to learn."""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, SupportsIndex

import numpy as np
from jaxtyping import Bool, Int32

from nnxmoe.runtime.progress import logger
from nnxmoe.tokenizer.tokenizer import Tokenizer, TokenizerError
from nnxmoe.train.data.answers import chat_tokens
from nnxmoe.train.data.bad_records import MAX_BAD_FRACTION, BadRecords, RecordError
from nnxmoe.train.data.jsonl import JsonLines
from nnxmoe.train.data.record_list import RecordList
from nnxmoe.train.data.records import Parse, pair_of, record_of

_CACHE_BYTES, _COUNTED_RECORDS = 256 << 20, 100_000
Row = dict[str, np.ndarray]
Data = str | os.PathLike[str] | Iterable[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Document:
    """Token ids with a mask of the tokens to predict.

    These are all tokens of a text, and the tokens of the assistant's messages of a chat.
    """

    tokens: Int32[np.ndarray, " T"]
    learnt: Bool[np.ndarray, " T"]
    chat: bool

    @property
    def parts(self) -> "tuple[Document, ...]":
        """The documents that each fill a row: the document itself, or both completions of a `Pair`."""
        return (self,)

    def pieces(self, length: int) -> "list[Document]":
        """Split a text into pieces of at most ``length`` tokens, or truncate a chat to one piece.

        The rest of a chat would be learned without its context. Pieces without a token to predict are left
        out: the beginning of a chat without an answer, and a single token at the end of a text.
        """
        starts = range(0, length if self.chat else len(self.tokens), length)
        parts = [slice(start, start + length) for start in starts]
        # The first token of a piece is not predicted.
        return [Document(self.tokens[at], self.learnt[at], self.chat) for at in parts if self.learnt[at][1:].any()]


@dataclasses.dataclass(frozen=True)
class Pair(Document):
    """A preference: the chosen document, with the rejected document."""

    rejected: Document

    @property
    def parts(self) -> tuple[Document, ...]:
        """The chosen and the rejected document."""
        return Document(self.tokens, self.learnt, self.chat), self.rejected

    def pieces(self, length: int) -> list[Document]:
        """Return the pair of truncated documents, or nothing if no token of a completion remains."""
        halves = [half for part in self.parts for half in part.pieces(length)]
        return [Pair(**vars(halves[0]), rejected=halves[1])] if len(halves) == 2 else []


def fill(documents: Sequence[Document], length: int, pad: int) -> Row:
    """Pack documents into one row ``[T]`` of every array of a batch.

    ``segment_ids`` count from 1, and 0 is padding. ``positions`` restart at 0 in each document.
    """
    names = ("tokens", "loss_mask", "segment_ids", "positions")
    row = {name: np.full(length, pad if name == "tokens" else 0, np.int32) for name in names}
    start = 0
    for number, document in enumerate(documents, 1):
        span = slice(start, start + len(document.tokens))
        row["tokens"][span], row["loss_mask"][span] = document.tokens, document.learnt
        row["segment_ids"][span], row["positions"][span] = number, np.arange(len(document.tokens))
        start = span.stop
    return row


class Documents:
    """The records of a JSONL file (see `JsonLines`) or an iterable of dicts, encoded on access.

    `nnxmoe.train.data.records` lists the forms of records. A text is encoded with ``tokenizer.encode``
    and ends with the tokenizer's end-of-text token, if there is one. The prompt before a completion is
    not learned. A chat is rendered with the chat template. Its tokens to learn are the assistant's
    messages, each with its end token (see `chat_tokens`). Up to 256 MB of tokens are cached (5 bytes
    per token), so that later epochs of small files need no encoding.

    Unusable records, including chats that the template rejects, are skipped with a warning that counts
    them by reason. Only the data and the tokenizer determine which records are skipped, so a resumed
    run and all processes skip the same records. Raises DataError, a ValueError with the counts and the
    first lines, if more than ``max_bad_fraction`` of all records are unusable.
    """

    unit: ClassVar[str] = "chat"
    may_share_rows: ClassVar[bool] = True
    parse: ClassVar[Parse] = staticmethod(record_of)
    empty: ClassVar[Document] = Document(np.zeros(0, np.int32), np.zeros(0, bool), chat=True)

    def __init__(self, data: Data, tokenizer: Tokenizer, max_bad_fraction: float = MAX_BAD_FRACTION) -> None:
        source = JsonLines if isinstance(data, str | os.PathLike) else RecordList
        self.bad = BadRecords(max_bad_fraction)
        self.lines: JsonLines | RecordList = source(data, self.parse, self.bad)  # pyright: ignore[reportArgumentType]
        self.tokenizer = tokenizer
        self._kept: dict[int, Document] = {}
        self._room, self._noted = _CACHE_BYTES, set[str]()
        self._chats = np.zeros((len(self), 2), np.int32)  # per chat: its tokens, and its tokens up to the first answer
        self._encoded = np.zeros(len(self), bool)
        self._counting = False  # if True, unusable records are only counted
        self._told: dict[int, str] = {}  # row length -> last warning of `tell_cut`

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: SupportsIndex) -> Document:
        number = range(len(self))[index]
        if (document := self._kept.get(number)) is None:
            record = self.lines[number]
            try:
                document = self._make(record, self.lines.where(number))
            except RecordError as error:
                document = self._skip(number, error)
            self._encoded[number] = True
            if document.chat and len(document.tokens):
                each = [(len(part.tokens), int(np.argmax(part.learnt)) + 1) for part in document.parts]
                self._chats[number] = np.max(each, axis=0)
            self._room -= 5 * sum(len(part.tokens) for part in document.parts)
            if self._room >= 0:
                self._kept[number] = document
        return document

    def check(self) -> None:
        """Encode every document once, so that errors of tokenizer and template appear before training."""
        self._encode(range(len(self)))
        self._settle()

    def _encode(self, indices: Iterable[SupportsIndex]) -> None:
        """Encode documents. Unusable records are counted and raise no error."""
        self._counting = True
        try:
            for index in indices:
                self[index]
        finally:
            self._counting = False

    def _skip(self, number: int, error: RecordError) -> Document:
        """Count an unusable record and return an empty document in its place. Raises DataError above the limit."""
        if not self._encoded[number]:
            self.bad.add(self.lines.number(number), error)
            self._encoded[number] = True
        if not self._counting:
            if self.bad.exceeds(self.lines.total):  # the error also counts records not encoded yet
                self._encode(np.flatnonzero(~self._encoded)[:_COUNTED_RECORDS])
            self._settle()
        return self.empty

    def _settle(self) -> None:
        self.bad.settle(self.lines, self.lines.unit, self.lines.total, final=bool(self._encoded.all()))

    def row(self, documents: Sequence[Document], length: int) -> Row:
        """Return the arrays ``[T]`` of a row of documents."""
        return fill(documents, length, self.tokenizer.pad_token_id or 0)

    def tell_cut(self, length: int, *, ended: bool) -> None:
        """Warn about chats that are truncated or left out in rows of ``length`` tokens.

        Warns once at the first such chat. Warns again with final counts at the end of an epoch, once all
        documents have been encoded.
        """
        tokens, answer = self._chats.T
        cut, out = np.sum((tokens > length) & (answer <= length)), np.sum(answer > length)
        parts = [f"{cut} of {len(self)} are truncated"] if cut else []
        parts += [f"{out} of {len(self)} are left out, since no answer begins within the row"] if out else []
        text = f"{self.lines}: {self.unit}s longer than seq_len={length}: {', '.join(parts)}"
        final, told = bool(self._encoded.all()), self._told.get(length)
        if (told or not ended) and text != told and (final or not told):
            logger.warning("%s%s", text, "" if final else " so far")
            self._told[length] = text
        if ended and final:
            self._settle()

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Checksums of the file and the tokenizer, a small JSON value that identifies the tokens."""
        given = [self.tokenizer.backend.to_str(), self.tokenizer.chat_templates, self.tokenizer.special_tokens]
        made = hashlib.sha256(json.dumps(given, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
        return {"file's bytes": self.lines.size, "file's sha256": self.lines.digest, "tokenizer's sha256": made}

    def _note(self, where: str, why: str) -> None:
        """Warn about the first chat that is not learned completely, once per reason."""
        if why not in self._noted:
            self._noted.add(why)
            logger.warning("%s: %s. Further chats like this are not reported", where, why)

    def _make(self, record: Any, where: str) -> Document:
        try:
            if record.text is None:
                note = functools.partial(self._note, where)
                return Document(*chat_tokens(self.tokenizer, record.messages, record.answers, note, record.tools), True)
            prompt = self.tokenizer.encode(record.prompt) if record.prompt else []
            ids = self.tokenizer.encode(record.prompt + record.text)
        except TokenizerError as error:
            raise RecordError(str(error)) from error
        end = self.tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids.append(end)
        if not ids:
            raise RecordError("the tokenizer returns no tokens for this record")
        given = len(os.path.commonprefix([prompt, ids]))  # a token that overlaps the end of the prompt is learned
        return Document(np.asarray(ids, np.int32), np.arange(len(ids)) >= given, bool(prompt))


class Pairs(Documents):
    """Preferences of a JSONL file or an iterable of dicts (see `pair_of`), each as two documents.

    Rows are int32 ``[2, T]`` arrays. Each half has the first tokens of the prompt with one completion.
    A pair is left out if no token of a completion remains. The warning of `tell_cut` counts truncated
    and omitted pairs.
    """

    unit = "pair"
    may_share_rows = False
    parse = staticmethod(pair_of)
    empty = Pair(**vars(Documents.empty), rejected=Documents.empty)

    def _make(self, record: Any, where: str) -> Pair:
        chosen, rejected = (super(Pairs, self)._make(one, where) for one in record)
        return Pair(**vars(chosen), rejected=rejected)

    def row(self, documents: Sequence[Document], length: int) -> Row:
        """Return the arrays ``[2, T]`` of a pair, or of padding if there are no documents."""
        halves = [[half] for half in documents[0].parts] if documents else [[], []]
        rows = [super(Pairs, self).row(half, length) for half in halves]
        names = {"tokens": "tokens", "loss_mask": "loss_mask", "attention_mask": "segment_ids"}
        return {name: np.stack([row[of] for row in rows]) for name, of in names.items()}
