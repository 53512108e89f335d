"""Packing documents of different lengths into rows of one length."""

import bisect
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from nnxmoe.train.data.documents import Document

Row = dict[str, np.ndarray]


def pieces(document: Document, length: int) -> Iterator[Document]:
    """The pieces of a document of at most ``length`` tokens: all of a text, the beginning of a chat.

    The rest of a chat would be learnt without its context. Pieces in which nothing is to be predicted are left out: the
    beginning of a chat without an answer, and a single token at the end of a text.
    """
    for start in range(0, length if document.chat else len(document.tokens), length):
        part = slice(start, start + length)
        if document.learnt[part][1:].any():  # the first token of a piece is not predicted
            yield Document(document.tokens[part], document.learnt[part], document.chat)


def place(sizes: Iterable[int], length: int) -> list[list[int]]:
    """Rows as lists of piece indices. Best fit: each piece, in order, goes into the fullest row with room for it."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, row) of each row that is not full, sorted
    for number, size in enumerate(sizes):
        at = bisect.bisect_left(rooms, (size, -1))
        room, row = rooms.pop(at) if at < len(rooms) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        if room > size:
            bisect.insort(rooms, (room - size, row))
    return rows


def fill(documents: Sequence[Document], length: int, pad: int) -> Row:
    """One row [T] of every array of a batch. ``segment_ids`` count from 1, 0 is padding; ``positions`` restart at 0 in
    each document."""
    names = ("tokens", "loss_mask", "segment_ids", "positions")
    row = {name: np.full(length, pad if name == "tokens" else 0, np.int32) for name in names}
    start = 0
    for number, document in enumerate(documents, 1):
        span = slice(start, start + len(document.tokens))
        row["tokens"][span], row["loss_mask"][span] = document.tokens, document.learnt
        row["segment_ids"][span], row["positions"][span] = number, np.arange(len(document.tokens))
        start = span.stop
    return row
