"""Batches of preferences: a chosen and a rejected completion of each prompt, for `nnxmoe.train.DPO`.

data = preferences("pairs.jsonl", tokenizer, batch_size=8, seq_len=512)
next(data)  # {"tokens", "loss_mask", "attention_mask"}: int32 [8, 2, 512]
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from nnxmoe.generation.text import Tokenizer
from nnxmoe.train.data.batches import Batches
from nnxmoe.train.data.documents import Data, Document, Pair, Pairs
from nnxmoe.train.data.packing import Row, pieces


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
) -> "PreferenceBatches":
    """`PreferenceBatches` from a file of JSON lines, a list of dicts, or another iterable of them.

    Each has the fields "prompt", "chosen" and "rejected", or whole chats as "chosen" and "rejected" (see
    `nnxmoe.train.data.records.pair_of`). Raises DataError, a ValueError that names the line, for unusable data.
    """
    documents = Pairs(data, tokenizer)
    return PreferenceBatches(documents, batch_size, seq_len, seed=seed, shuffle=shuffle, epochs=epochs, share=share)


class PreferenceBatches(Batches):
    """An iterator over batches of pairs, int32 [B, 2, T] arrays, each row one completion after its prompt.

    Rows keep their first ``seq_len`` tokens; a pair of which a completion then has no token left is left out, and a
    warning counts both kinds. The rest is as in `Batches`; the last batch of all is filled with empty pairs.
    """

    def __init__(self, documents: Pairs, batch_size: int, seq_len: int, **options: Any) -> None:
        super().__init__(documents, batch_size, seq_len, pack=False, **options)

    def _pieces(self, document: Document) -> Iterator[Document]:
        halves = [half for part in document.parts for half in pieces(part, self.seq_len)]
        if len(halves) == 2:
            chosen, rejected = halves
            yield Pair(chosen.tokens, chosen.learnt, chosen.chat, rejected)

    def _filled(self, row: list[Document]) -> Row:
        halves = row[0].parts if row else ((), ())
        fields = [super(PreferenceBatches, self)._filled([half] if half else []) for half in halves]
        names = {"tokens": "tokens", "loss_mask": "loss_mask", "attention_mask": "segment_ids"}
        return {name: np.stack([each[of] for each in fields]) for name, of in names.items()}
