"""The demo's tokenizer: byte-level BPE, digits one by one, and documents packed into rows."""

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.demo.corpus import ASSISTANT, BOS, END, EOS, PAD, SPECIAL_TOKENS, USER, Document

_PIECE = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Packed(NamedTuple):
    """Rows of documents: tokens and their document's number (0 is padding), [rows, length]; `learn` marks targets."""

    tokens: np.ndarray
    segments: np.ndarray
    learn: np.ndarray


def train_tokenizer(documents: Iterator[Document], vocab_size: int, count: int = 20_000) -> Tokenizer:
    """A byte-level BPE (no text is unknown to it) from the first `count` documents; special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(_PIECE), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    special = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    texts = (part for document in islice(documents, count) for part in special.split(document.text) if part)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the special tokens, which a trained tokenizer has."""
    found = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    return {token: number for token, number in found.items() if number is not None}


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json as Hugging Face names them."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": max_length,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    ids = special_ids(tokenizer)
    generation = {"bos_token_id": ids[BOS], "eos_token_id": [ids[END], ids[EOS]], "pad_token_id": ids[PAD]}
    for name, content in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def targets(tokens: list[int], user: int, assistant: int) -> list[bool]:
    """Which tokens of a document are learnt: the answers of a chat, all of a plain text but its first token."""
    if user not in tokens:
        return [False] + [True] * (len(tokens) - 1)
    learn, answering = [], False
    for token in tokens:
        learn.append(answering)
        answering = token == assistant or (answering and token != user)
    return learn


def pack(tokenizer: Tokenizer, documents: Iterator[Document], rows: int, length: int, open_rows: int = 64) -> Packed:
    """Fill `rows` rows of `length` tokens with whole documents, each into the fullest open row that has room."""
    ids = special_ids(tokenizer)
    user, assistant, pad = ids[USER], ids[ASSISTANT], ids[PAD]
    full = Packed(*(np.full((rows, length), fill, kind) for fill, kind in ((pad, np.int32), (0, np.int32), (0, bool))))
    used, count = [0] * rows, [0] * rows
    first = 0
    while first < rows:
        for encoding in tokenizer.encode_batch([document.text for document in islice(documents, 1000)]):
            tokens = encoding.ids
            room = [row for row in range(first, min(first + open_rows, rows)) if used[row] + len(tokens) <= length]
            if len(tokens) > length or first >= rows:
                continue
            if not room:
                first += 1
                continue
            row = max(room, key=used.__getitem__)
            span = slice(used[row], used[row] + len(tokens))
            used[row], count[row] = span.stop, count[row] + 1
            full.tokens[row, span], full.segments[row, span] = tokens, count[row]
            full.learn[row, span] = targets(tokens, user, assistant)
    return full
