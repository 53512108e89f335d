"""Prompts for reinforcement learning.

prompts = prompts("questions.jsonl", tokenizer, batch_size=8, seq_len=256)
next(prompts)  # 8 records, such as {"prompt": "12 + 30 =", "answer": 42}
"""

import dataclasses
from typing import Any

import numpy as np

from nnxmoe.config.arguments import reject_unknown_arguments
from nnxmoe.generation.complete import encode_prompt
from nnxmoe.tokenizer.chat_template import to_json_types
from nnxmoe.tokenizer.tokenizer import Tokenizer
from nnxmoe.train.data.bad_records import MAX_BAD_FRACTION, RecordError
from nnxmoe.train.data.batches import Batches
from nnxmoe.train.data.documents import Data, Document, Documents
from nnxmoe.train.data.records import fields_of

PromptRecord = dict[str, Any]  # JSON object with "prompt" and any other fields


@reject_unknown_arguments
def prompts(
    data: Data,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    max_bad_fraction: float = MAX_BAD_FRACTION,
) -> Batches:
    """Create an iterator over lists of ``batch_size`` prompt records, for `GRPO`.

    Each record has the field "prompt", a text or a chat (a list of messages). The other fields are passed to the reward
    functions. Prompts with more than ``seq_len`` tokens are skipped with a warning. In a job of several processes,
    every process reads all prompts. `Batches` documents the other arguments.

    Raises:
        DataError: If more than ``max_bad_fraction`` of all records are unusable.
    """
    documents = Prompts(data, tokenizer, max_bad_fraction)
    options: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "epochs": epochs, "share": (0, 1)}
    return Batches(documents, batch_size, seq_len, **options)


@dataclasses.dataclass(frozen=True)
class Prompt(Document):
    """Token ids of a prompt, and its record. The mask of the answer marks only the last token."""

    record: PromptRecord

    def pieces(self, length: int) -> list[Document]:
        """Return the prompt if it has at most ``length`` tokens, or an empty list."""
        return [self] if 0 < len(self.tokens) <= length else []


def prompt_of(value: object) -> tuple[PromptRecord, frozenset[str]]:
    """Parse a JSON object with the field "prompt".

    Returns the record and the names of ignored fields, which is always empty. Raises RecordError without a prompt.
    """
    record = to_json_types(fields_of(value))
    if not isinstance(record.get("prompt"), str | list) or not record["prompt"]:
        raise RecordError("write 'prompt', a text or a list of messages", "no prompt")
    return record, frozenset()


class Prompts(Documents):
    """Prompts from a JSONL file or an iterable of dicts (see `prompt_of`)."""

    unit = "prompt"
    may_share_rows = False
    parse = staticmethod(prompt_of)
    empty = Prompt(**vars(Documents.empty), record={})

    def _make(self, record: Any, location: str) -> Prompt:
        try:
            tokens = np.asarray(encode_prompt(record["prompt"], self.tokenizer), np.int32)
        except ValueError as error:
            raise RecordError(str(error)) from error
        return Prompt(tokens, np.arange(len(tokens)) == len(tokens) - 1, True, record)

    def batch(self, rows: Any, length: int) -> list[PromptRecord]:
        """Return the records of the prompts."""
        return [document.record for row in rows for document in row]
