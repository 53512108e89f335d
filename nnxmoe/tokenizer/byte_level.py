"""Build byte-level BPE tokenizers from vocab.json and merges.txt, like transformers for GPT-2 and Qwen2."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from nnxmoe.config.config_json import text_fields
from nnxmoe.config.printable import short
from nnxmoe.convert.files.untrusted_files import read_bounded
from nnxmoe.tokenizer.tokenizer_files import (
    CONFIG,
    MAX_BYTES,
    MERGES,
    REMEDY,
    TOKENIZER,
    VOCAB,
    TokenizerError,
    backend_failure,
    read_json,
)

_END = "<|endoftext|>"
_DEFAULTS = {"GPT2": ("unk_token", "bos_token", "eos_token"), "Qwen2": ("unk_token", "eos_token", "pad_token")}
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def has_merges(folder: Path) -> bool:
    """Return whether a folder has vocab.json and merges.txt but no tokenizer.json."""
    return not os.path.lexists(folder / TOKENIZER) and all(os.path.lexists(folder / name) for name in (VOCAB, MERGES))


def build_byte_level_bpe(folder: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Build the tokenizer for a folder with vocab.json and merges.txt.

    Returns:
        The tokenizer, and the default special tokens of its class.

    Raises:
        TokenizerError: if the files are invalid or the tokenizer class is not supported.
    """
    model_class, prefix_space = _model_class(folder, config), bool(config.get("add_prefix_space", False))
    for name in (VOCAB, MERGES):
        read_bounded(folder / name, MAX_BYTES, REMEDY, TokenizerError)
    try:
        backend = tokenizers.Tokenizer(models.BPE.from_file(str(folder / VOCAB), str(folder / MERGES)))
    except BaseException as error:
        raise backend_failure(error, f"{folder}: {VOCAB} and {MERGES} are not a byte-level BPE vocabulary") from None
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    if model_class == "Qwen2":
        backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(tokenizers.Regex(_QWEN), behavior="isolated", invert=False)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return backend, dict.fromkeys(_DEFAULTS[model_class], _END)


def add_bos_and_eos(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], ends: tuple[str | None, str | None]
) -> None:
    """Configure the tokenizer to add BOS if ``add_bos_token`` is set and EOS if ``add_eos_token`` is set.

    Args:
        backend: tokenizer to configure.
        config: content of tokenizer_config.json.
        ends: the BOS and EOS tokens.
    """
    bos, eos = (
        token if config.get(name) else None
        for name, token in zip(("add_bos_token", "add_eos_token"), ends, strict=True)
    )
    pieces = [f"{bos}:0" if bos else "", "$A:0", f"{eos}:0" if eos else ""]
    special = [(token, backend.token_to_id(token)) for token in {bos, eos} if token]
    backend.post_processor = processors.TemplateProcessing(
        single=" ".join(filter(None, pieces)), pair="$A:0 $B:1", special_tokens=special
    )


def _model_class(folder: Path, config: Mapping[str, Any]) -> str:
    """Return "GPT2" or "Qwen2", from tokenizer_class if it is set, else from the model type."""
    tokenizer_class, fields = config.get("tokenizer_class"), text_fields(read_json(folder / "config.json"))
    if tokenizer_class is None and str(fields.get("model_type", "")).startswith("qwen"):
        return "Qwen2"
    model_class = str(tokenizer_class).removesuffix("Fast").removesuffix("Tokenizer")
    if model_class not in _DEFAULTS:
        raise TokenizerError(
            f"{folder / CONFIG}: tokenizer_class is {short(tokenizer_class)}. With {VOCAB} and {MERGES}, only "
            "GPT2Tokenizer and Qwen2Tokenizer are supported"
        )
    return model_class
