"""Build tokenizers from vocab.json and merges.txt, as transformers does for GPT-2 and Qwen2."""

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
    """Return whether a folder has vocab.json and merges.txt, but no tokenizer.json."""
    return not os.path.lexists(folder / TOKENIZER) and all(os.path.lexists(folder / name) for name in (VOCAB, MERGES))


def build_byte_level_bpe(folder: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Build the tokenizer of a folder with vocab.json and merges.txt.

    Returns:
        The tokenizer, and the default special tokens of its class.

    Raises:
        TokenizerError: if the files are invalid or the class is not supported.
    """
    model_class, space = _model_class(folder, config), bool(config.get("add_prefix_space", False))
    for name in (VOCAB, MERGES):
        read_bounded(folder / name, MAX_BYTES, REMEDY, TokenizerError)
    try:
        backend = tokenizers.Tokenizer(models.BPE.from_file(str(folder / VOCAB), str(folder / MERGES)))
    except BaseException as error:
        raise backend_failure(error, f"{folder}: {VOCAB} and {MERGES} are not a vocabulary of byte-level BPE") from None
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    if model_class == "Qwen2":
        backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(tokenizers.Regex(_QWEN), behavior="isolated", invert=False)
        plain = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    return backend, dict.fromkeys(_DEFAULTS[model_class], _END)


def add_bos_and_eos(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], ends: tuple[str | None, str | None]
) -> None:
    """Configure the tokenizer to add BOS and EOS if the config sets ``add_bos_token`` and ``add_eos_token``.

    Args:
        backend: the tokenizer.
        config: content of tokenizer_config.json.
        ends: the BOS and EOS tokens.
    """
    before, after = (
        token if config.get(name) else None
        for name, token in zip(("add_bos_token", "add_eos_token"), ends, strict=True)
    )
    parts = [f"{before}:0" if before else "", "$A:0", f"{after}:0" if after else ""]
    special = [(token, backend.token_to_id(token)) for token in {before, after} if token]
    backend.post_processor = processors.TemplateProcessing(
        single=" ".join(filter(None, parts)), pair="$A:0 $B:1", special_tokens=special
    )


def _model_class(folder: Path, config: Mapping[str, Any]) -> str:
    """Return "GPT2" or "Qwen2", from tokenizer_class if set, else from the model type."""
    named, fields = config.get("tokenizer_class"), text_fields(read_json(folder / "config.json"))
    if named is None and str(fields.get("model_type", "")).startswith("qwen"):
        return "Qwen2"
    model_class = str(named).removesuffix("Fast").removesuffix("Tokenizer")
    if model_class not in _DEFAULTS:
        raise TokenizerError(
            f"{folder / CONFIG}: tokenizer_class is {short(named)}, and of folders with {VOCAB} and {MERGES} only "
            "GPT2Tokenizer and Qwen2Tokenizer are read"
        )
    return model_class
