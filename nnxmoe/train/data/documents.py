"""Encode texts and chats as token ids with a loss mask."""

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

    The mask covers all tokens of a text. In a chat it covers the tokens of the assistant's messages.
    """

    tokens: Int32[np.ndarray, " T"]
    learnt: Bool[np.ndarray, " T"]
    chat: bool

    @property
    def parts(self) -> "tuple[Document, ...]":
        """The document itself, or the two documents of a `Pair`. Each part fills a separate row."""
        return (self,)

    def pieces(self, length: int) -> "list[Document]":
        """Split a text into pieces of at most ``length`` tokens, or truncate a chat to one piece.

        A chat is not split, since its later pieces would lack their context. Drops pieces without a token
        to predict, such as a truncated chat without an answer, or a last piece of a single token.
        """
        starts = range(0, length if self.chat else len(self.tokens), length)
        spans = [slice(start, start + length) for start in starts]
        # The first token of a piece is not predicted.
        return [
            Document(self.tokens[span], self.learnt[span], self.chat) for span in spans if self.learnt[span][1:].any()
        ]


@dataclasses.dataclass(frozen=True)
class Pair(Document):
    """Preference pair: the chosen document, with the rejected document as an attribute."""

    rejected: Document

    @property
    def parts(self) -> tuple[Document, ...]:
        """The chosen and the rejected document."""
        return Document(self.tokens, self.learnt, self.chat), self.rejected

    def pieces(self, length: int) -> list[Document]:
        """Truncate both documents. Returns an empty list if no token of a completion remains."""
        halves = [half for part in self.parts for half in part.pieces(length)]
        return [Pair(**vars(halves[0]), rejected=halves[1])] if len(halves) == 2 else []


def fill(documents: Sequence[Document], length: int, pad: int) -> Row:
    """Pack documents into one row: an array ``[T]`` for each field of a batch.

    ``segment_ids`` start at 1, and 0 is padding. ``positions`` restart at 0 in each document.
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
    """Records of a JSONL file (see `JsonLines`) or an iterable of dicts, encoded on access.

    `nnxmoe.train.data.records` lists the formats of records. A text is encoded with
    ``tokenizer.encode`` and ends with the tokenizer's end-of-text token, if there is one. The prompt
    before a completion is excluded from the loss. A chat is rendered with the chat template. The loss
    of a chat includes the assistant's messages, each with its end token (see `chat_tokens`). Up to
    256 MB of tokens are cached (5 bytes per token), so that later epochs of small files need no
    encoding.

    Unusable records, including chats that the template rejects, are skipped. A warning counts them by
    reason. Only the data and the tokenizer determine which records are skipped, so a resumed run and
    all processes skip the same records. Raises DataError, a ValueError with the counts and the first
    lines, if more than ``max_bad_fraction`` of all records are unusable.
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
        self._chats = np.zeros((len(self), 2), np.int32)  # [chat, 2]: all tokens, tokens up to the first answer
        self._encoded = np.zeros(len(self), bool)
        self._counting = False  # if True, unusable records are only counted
        self._told: dict[int, str] = {}  # row length -> last text logged by `tell_cut`

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
                lengths = [(len(part.tokens), int(np.argmax(part.learnt)) + 1) for part in document.parts]
                self._chats[number] = np.max(lengths, axis=0)
            self._room -= 5 * sum(len(part.tokens) for part in document.parts)
            if self._room >= 0:
                self._kept[number] = document
        return document

    def check(self) -> None:
        """Encode every document once, so that errors of the tokenizer or template appear before training."""
        self._encode(range(len(self)))
        self._settle()

    def _encode(self, indices: Iterable[SupportsIndex]) -> None:
        """Encode documents. Counts unusable records without raising an error."""
        self._counting = True
        try:
            for index in indices:
                self[index]
        finally:
            self._counting = False

    def _skip(self, number: int, error: RecordError) -> Document:
        """Count an unusable record and return an empty document. Raises DataError if the limit is exceeded."""
        if not self._encoded[number]:
            self.bad.add(self.lines.number(number), error)
            self._encoded[number] = True
        if not self._counting:
            if self.bad.exceeds(self.lines.total):  # the error also counts records that are not encoded yet
                self._encode(np.flatnonzero(~self._encoded)[:_COUNTED_RECORDS])
            self._settle()
        return self.empty

    def _settle(self) -> None:
        self.bad.settle(self.lines, self.lines.unit, self.lines.total, final=bool(self._encoded.all()))

    def row(self, documents: Sequence[Document], length: int) -> Row:
        """Pack documents into one row, as arrays ``[T]``."""
        return fill(documents, length, self.tokenizer.pad_token_id or 0)

    def batch(self, rows: Sequence[Sequence[Document]], length: int) -> Any:
        """Pack the documents of each row, and stack the rows into a batch of arrays ``[B, T]``."""
        arrays = [self.row(row, length) for row in rows]
        return {name: np.stack([row[name] for row in arrays]) for name in arrays[0]}

    def tell_cut(self, length: int, *, ended: bool) -> None:
        """Warn about chats that are truncated or skipped because they exceed ``length`` tokens.

        The first such chat triggers a warning. At the end of an epoch (``ended``), a second warning has the
        final counts, once all documents have been encoded.
        """
        tokens, answer = self._chats.T
        truncated, skipped = np.sum((tokens > length) & (answer <= length)), np.sum(answer > length)
        parts = [f"{truncated} of {len(self)} are truncated"] if truncated else []
        parts += [f"{skipped} of {len(self)} are skipped, since no answer begins within the row"] if skipped else []
        text = f"{self.lines}: {self.unit}s longer than seq_len={length}: {', '.join(parts)}"
        final, logged = bool(self._encoded.all()), self._told.get(length)
        if (logged or not ended) and text != logged and (final or not logged):
            logger.warning("%s%s", text, "" if final else " so far")
            self._told[length] = text
        if ended and final:
            self._settle()

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Checksums of the data and the tokenizer, as a small JSON value that identifies the tokens."""
        tokenizer_parts = [
            self.tokenizer.backend.to_str(),
            self.tokenizer.chat_templates,
            self.tokenizer.special_tokens,
        ]
        tokenizer_digest = hashlib.sha256(
            json.dumps(tokenizer_parts, sort_keys=True).encode("utf-8", "surrogatepass")
        ).hexdigest()
        return {
            "file's bytes": self.lines.size,
            "file's sha256": self.lines.digest,
            "tokenizer's sha256": tokenizer_digest,
        }

    def _note(self, location: str, reason: str) -> None:
        """Warn about a chat that is only partly trained on, once per reason."""
        if reason not in self._noted:
            self._noted.add(reason)
            logger.warning("%s: %s. Further chats with this problem are not reported", location, reason)

    def _make(self, record: Any, location: str) -> Document:
        try:
            if record.text is None:
                note = functools.partial(self._note, location)
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
        num_prompt_tokens = len(
            os.path.commonprefix([prompt, ids])
        )  # train on a token that overlaps the end of the prompt
        return Document(np.asarray(ids, np.int32), np.arange(len(ids)) >= num_prompt_tokens, bool(prompt))


class Pairs(Documents):
    """Preference pairs from a JSONL file or an iterable of dicts (see `pair_of`).

    Rows are int32 ``[2, T]`` arrays: the prompt with the chosen completion, and the prompt with the
    rejected completion, each truncated to T tokens. A pair is skipped if no token of a completion
    remains. The warning of `tell_cut` counts truncated and skipped pairs.
    """

    unit = "pair"
    may_share_rows = False
    parse = staticmethod(pair_of)
    empty = Pair(**vars(Documents.empty), rejected=Documents.empty)

    def _make(self, record: Any, location: str) -> Pair:
        chosen, rejected = (super(Pairs, self)._make(part, location) for part in record)
        return Pair(**vars(chosen), rejected=rejected)

    def row(self, documents: Sequence[Document], length: int) -> Row:
        """Return a pair as arrays ``[2, T]``, or padding if there are no documents."""
        halves = [[half] for half in documents[0].parts] if documents else [[], []]
        rows = [super(Pairs, self).row(half, length) for half in halves]
        names = {"tokens": "tokens", "loss_mask": "loss_mask", "attention_mask": "segment_ids"}
        return {name: np.stack([row[field] for row in rows]) for name, field in names.items()}
