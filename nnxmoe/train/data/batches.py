"""Training batches from texts and chats: packed, shuffled and resumable.

    data = batches("chats.jsonl", tokenizer, batch_size=8, seq_len=512)
    next(data)  # {"tokens", "loss_mask", "segment_ids", "positions"}: int32 [8, 512]
    pairs = preferences("pairs.jsonl", tokenizer, batch_size=8, seq_len=512)
    next(pairs)  # {"tokens", "loss_mask", "attention_mask"}: int32 [8, 2, 512]

For grain's workers and transformations, use
``grain.MapDataset.source(Rows(documents, 512)).shuffle(…).batch(8)``.
"""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, SupportsIndex

import jax
import numpy as np

from nnxmoe.config.arguments import reject_unknown_arguments
from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_integer, as_python
from nnxmoe.tokenizer.tokenizer import Tokenizer
from nnxmoe.train.data.bad_records import MAX_BAD_FRACTION, DataError
from nnxmoe.train.data.documents import Data, Document, Documents, Pairs, Row

_VERSION, _POSITION = 1, ("epoch", "document", "row")
LEAST = {"batch_size": 1, "seq_len": 2, "seed": 0, "epochs": 1}  # minimum value of each option
Batch = dict[str, np.ndarray]


@reject_unknown_arguments
def batches(
    data: Data,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    shuffle: bool = True,
    pack: bool = True,
    epochs: int | None = None,
    share: tuple[int, int] | None = None,
    max_bad_fraction: float = MAX_BAD_FRACTION,
) -> "Batches":
    """Create `Batches` from a JSONL file or an iterable of dicts, such as a ``datasets.Dataset``.

    A record is a text, a prompt with a completion, or a chat (see `nnxmoe.train.data.records` for the
    formats). Unusable records are skipped with a warning. `Batches` documents the other arguments.

    Raises:
        DataError: If more than ``max_bad_fraction`` of all records are unusable. The message counts
            these records by reason and lists the first lines. DataError is a ValueError.
    """
    documents = Documents(data, tokenizer, max_bad_fraction)
    return Batches(documents, batch_size, seq_len, seed=seed, shuffle=shuffle, pack=pack, epochs=epochs, share=share)


@reject_unknown_arguments
def preferences(
    data: Data,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    share: tuple[int, int] | None = None,
    max_bad_fraction: float = MAX_BAD_FRACTION,
) -> "Batches":
    """Create `Batches` of preference pairs, int32 ``[B, 2, T]``; see `batches` for the arguments.

    Each record has the fields "prompt", "chosen" and "rejected", or whole chats as "chosen" and
    "rejected" (see `nnxmoe.train.data.records.pair_of`). See also `Pairs`.
    """
    documents = Pairs(data, tokenizer, max_bad_fraction)
    return Batches(documents, batch_size, seq_len, seed=seed, shuffle=shuffle, epochs=epochs, share=share)


class Batches(Iterator[Batch]):
    """Iterator over batches of int32 ``[B, T]`` arrays, deterministic for a given seed and data.

    The documents of an epoch are shuffled by ``seed`` and packed into 8 to 64 rows at a time. Texts
    longer than ``seq_len`` are split, and longer chats are truncated (see `Document.pieces`). A batch
    may contain the end of one epoch and the start of the next. Only the very last batch is padded.
    `get_state` and `set_state` have the signatures of grain's iterators.

    Args:
        batch_size: Rows per batch, summed over all processes.
        seq_len: Tokens per row.
        pack: Whether to pack several documents into a row. Pairs are never packed.
        epochs: Number of epochs. If None, the iterator is infinite.
        share: (index of this process, number of processes). Defaults to JAX's values. Each process
            returns its share of the rows of every batch. All processes must make the same calls.
    """

    def __init__(
        self,
        documents: Documents,
        batch_size: int,
        seq_len: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        pack: bool = True,
        epochs: int | None = None,
        share: tuple[int, int] | None = None,
    ) -> None:
        share = (jax.process_index(), jax.process_count()) if share is None else share

        def integer(name: str, value: Any) -> int:
            if (number := as_integer(value, LEAST[name])) is None:
                raise ValueError(f"{name}={short(value)}: pass an int of at least {LEAST[name]} and less than 2**32")
            return number

        batch_size, seq_len = integer("batch_size", batch_size), integer("seq_len", seq_len)
        seed, epochs = integer("seed", seed), None if epochs is None else integer("epochs", epochs)
        counts = [as_integer(number, -(2**31)) for number in share] if isinstance(share, tuple | list) else []
        if len(counts) != 2 or None in counts:
            raise ValueError(f"share={short(share)}: pass the index and the number of processes, such as (0, 4)")
        index, processes = (count for count in counts if count is not None)
        if not 0 <= index < processes or batch_size % processes:
            raise ValueError(
                f"batch_size={batch_size} cannot be split as share={share}: use a multiple of the number of processes"
            )
        shuffle, pack = as_python(shuffle), as_python(pack)
        for name, value in (("shuffle", shuffle), ("pack", pack)):
            if not isinstance(value, bool):
                raise ValueError(f"{name}={short(value)}: use True or False")
        self.documents, self.batch_size, self.seq_len = documents, batch_size, seq_len
        self.seed, self.shuffle, self.epochs, self.share = seed, shuffle, epochs, (index, processes)
        self.pack = pack and documents.may_share_rows
        self._position, self._rows = (0, 0, 0), self._rows_from(0, 0, 0)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            packed = list(itertools.islice(self._rows, self.batch_size))
        except BaseException:  # after an interrupt, such as Ctrl-C in a notebook, yield these rows again
            self._rows = self._rows_from(*self._position)
            raise
        if not packed:
            raise StopIteration
        self._position = packed[-1][1]
        rows = [row for row, _ in packed] + [[]] * (self.batch_size - len(packed))
        local_rows = self.batch_size // self.share[1]
        return self.documents.batch(rows[self.share[0] * local_rows :][:local_rows], self.seq_len)

    def count(self) -> int:
        """Count the batches of all epochs by packing every document.

        Raises ValueError if ``epochs`` is None.
        """
        if self.epochs is None:
            raise ValueError("without epochs the number of batches is infinite: pass a number of epochs")
        return -(-sum(1 for _ in self._rows_from(0, 0, 0)) // self.batch_size)

    def get_state(self) -> dict[str, Any]:
        """Return the position of the next batch and checksums of the data, as a small JSON value.

        The state is equal in all processes.
        """
        position = dict(zip(_POSITION, self._position, strict=True))
        return {"version": _VERSION, "data": self._settings(), "position": position}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `get_state`, bit for bit. Raises DataError if the data or settings differ."""
        if state.get("version") != _VERSION or not isinstance(state.get("data"), Mapping):
            raise DataError(f"{short(dict(state))} is not a state of Batches: pass the result of get_state")
        saved, current = state["data"], self._settings()
        mismatches = [name for name in sorted(current.keys() | saved.keys()) if current.get(name) != saved.get(name)]
        if mismatches:
            changes = ", ".join(
                f"{name} was {short(saved.get(name))}, is {short(current.get(name))}" for name in mismatches
            )
            raise DataError(
                f"{self.documents.lines}: the state is from different data or settings ({changes}). Use the "
                "original data and settings, or start a new run"
            )
        position: Any = state.get("position")
        is_position = isinstance(position, Mapping) and position.keys() == set(_POSITION)
        if not is_position or not all(type(number) is int and number >= 0 for number in position.values()):
            raise DataError(f"{short(position)} is not a position of Batches: pass the result of get_state")
        self._position = position["epoch"], position["document"], position["row"]
        self._rows = self._rows_from(*self._position)

    def _settings(self) -> dict[str, Any]:
        names = ("batch_size", "seq_len", "seed", "shuffle", "pack")
        return self.documents.identity | {name: getattr(self, name) for name in names}

    def _rows_from(self, epoch: int, start: int, row: int) -> Iterator[tuple[list[Document], tuple[int, int, int]]]:
        """Yield the documents of each row, and the position after the row.

        A position has the epoch, the first document of the window that contains the next row, and the index
        of the row in the window.
        """
        while self.epochs is None or epoch < self.epochs:
            order = self._order(epoch)
            while start < len(order):
                window, stop = self._packed(order, start)
                for number in range(row, len(window)):
                    yield window[number], (epoch, start, number + 1)
                if not window and start == 0 and stop == len(order):
                    raise DataError(
                        f"{self.documents.lines}: no {self.documents.unit} has an answer within its first "
                        f"{self.seq_len} tokens. Increase seq_len, up to the model's context length, or shorten the "
                        "prompts"
                    )
                start, row = stop, 0
            epoch, start = epoch + 1, 0
            self.documents.tell_cut(self.seq_len, ended=True)

    def _order(self, epoch: int) -> Sequence[int] | np.ndarray:
        """Return the order of the documents. RandomState is stable across versions of NumPy."""
        count = len(self.documents)
        return np.random.RandomState([self.seed, epoch]).permutation(count) if self.shuffle else range(count)

    def _packed(self, order: Sequence[int] | np.ndarray, start: int) -> tuple[list[list[Document]], int]:
        """Pack the window that starts at a document. Returns its rows and the start of the next window."""
        pieces: list[Document] = []
        tokens, stop = 0, start
        while stop < len(order) and tokens < _window(self.seq_len):
            document = self.documents[order[stop]]
            parts = document.pieces(self.seq_len)
            tokens, stop = tokens + sum(len(part.tokens) for part in parts), stop + 1
            pieces += parts
            if document.chat and max(len(part.tokens) for part in document.parts) > self.seq_len:
                self.documents.tell_cut(self.seq_len, ended=False)
        if not self.pack:
            return [[part] for part in pieces], stop
        rows = place([len(part.tokens) for part in pieces], self.seq_len)
        return [[pieces[i] for i in row] for row in rows], stop


def _window(seq_len: int) -> int:
    """Return the tokens per packing window: 64 rows, limited to 131,072 tokens or 8 rows, whichever is larger."""
    return max(8 * seq_len, min(64 * seq_len, 1 << 17))


def place(sizes: Iterable[int], length: int) -> list[list[int]]:
    """Pack pieces into rows by best fit, and return each row as a list of piece indices.

    Pieces are processed in order. Each piece goes into the fullest row that has enough room.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # sorted (room, row) of rows that are not full
    for number, size in enumerate(sizes):
        index = bisect.bisect_left(rooms, (size, -1))
        room, row = rooms.pop(index) if index < len(rooms) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        if room > size:
            bisect.insort(rooms, (room - size, row))
    return rows


class Rows:
    """Random-access source for ``grain.MapDataset``: one document per row, as int32 [T] arrays.

    Documents longer than a row are truncated. A chat without an answer within the row becomes a row of
    padding.
    """

    def __init__(self, documents: Documents, seq_len: int) -> None:
        self.documents, self.seq_len = documents, seq_len

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: SupportsIndex) -> Row:
        return self.documents.row(self.documents[index].pieces(self.seq_len)[:1], self.seq_len)
