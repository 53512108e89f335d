"""The tokenizer in the metadata of a GGUF file, as the content of tokenizer.json and tokenizer_config.json.

Sources: llama.cpp's ``llama-vocab.cpp`` for what splits a text before the merges, and the tokenizer.json of the models.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from nnxmoe.config.printable import short
from nnxmoe.storage.gguf import GGUF

_UNKNOWN, _CONTROL, _OWN = 2, 3, 4  # types of tokens; _OWN is matched as a whole, and is text
_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_KEY = "tokenizer.ggml."

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = [f"{_SHORT}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}"]
_QWEN2 = [f"{_SHORT}|{_WORDS}|\\p{{N}}|{_REST}"]
_TEKKEN = [_CASED % ("", "") + rf"|\p{{N}}|{_SLASH}"]
_GPT4O = [_CASED % (f"{_SHORT}?", f"{_SHORT}?") + rf"|\p{{N}}{{1,3}}|{_SLASH}"]
_CJK = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_MARKS = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"
_DEEPSEEK = [r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", _MARKS, r"\s+$", _CJK, r"\p{N}"]
_DEEPSEEK_CODER = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"]
_DEEPSEEK3 = [
    *(r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
]
_NONE = list[str]()
_DIGITS = [r"\p{N}"]  # before GPT-2's own split
# Value of tokenizer.ggml.pre -> regular expressions that isolate parts of a text, in turn; empty: GPT-2's split.
_SPLITS: dict[str, list[str]] = {
    **dict.fromkeys(("default", "gpt-2", "olmo", "mpt", "jais", "trillion"), _NONE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2),
    **{"tekken": _TEKKEN, "gpt-4o": _GPT4O, "deepseek-v3": _DEEPSEEK3},
    **{"deepseek-llm": _DEEPSEEK, "deepseek-coder": _DEEPSEEK_CODER},
}
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word of the vocabulary is not merged from its parts


def tokenizer_files(model: GGUF) -> dict[str, dict[str, Any]]:
    """File name -> content. Raises CheckpointError for tokenizers that are not read, and for malformed ones."""
    tokens, kinds = _texts(model, "tokens"), model.fields.get(f"{_KEY}token_type", ())
    if len(kinds) not in (0, len(tokens)):
        raise model.error(f"{_KEY}token_type has {len(kinds)} entries, and there are {len(tokens)} tokens")
    kind, split = model.text(f"{_KEY}model"), model.fields.get(f"{_KEY}pre", "default")
    if kind == "gpt2":
        parts = _byte_level(model, tokens, split)
    elif kind == "llama":
        parts = _sentencepiece(model, tokens)
    else:
        raise model.error(f"{_KEY}model {short(kind)} is not read; gpt2 and llama are")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": tokens[number], **flags, "special": of != _OWN}
        for number, of in enumerate(kinds)
        if of in (_UNKNOWN, _CONTROL, _OWN) and tokens[number]
    ]
    named = {name: tokens[at] for name, key in _NAMES.items() if (at := _id(model, key, len(tokens))) is not None}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}
    adds_first = model.fields.get(f"{_KEY}add_bos_token", kind == "llama" or split in _WHOLE_WORDS)
    adds_last = model.fields.get(f"{_KEY}add_eos_token", False)
    ends = [
        named.get(name) if wanted else None for name, wanted in (("bos_token", adds_first), ("eos_token", adds_last))
    ]
    whole["post_processor"] = _with_ends(ends[0], ends[1], {text: number for number, text in enumerate(tokens)})
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    templates = {key: value for key, value in model.fields.items() if key.startswith("tokenizer.chat_template")}
    if templates:
        entries = [{"name": key.removeprefix("tokenizer.chat_template").strip(".") or "default", "template": value}
                   for key, value in templates.items() if isinstance(value, str)]  # fmt: skip
        config["chat_template"] = entries[0]["template"] if len(entries) == 1 else entries
    return {"tokenizer.json": whole, "tokenizer_config.json": config}


def _texts(model: GGUF, key: str) -> tuple[str, ...]:
    value = model.fields.get(f"{_KEY}{key}")
    if not isinstance(value, tuple) or not value or not isinstance(value[0], str):
        raise model.error(f"{_KEY}{key} must be a list of texts, got {short(value)}")
    return value


def _id(model: GGUF, key: str, count: int) -> int | None:
    value = model.fields.get(f"{_KEY}{key}_token_id")
    if value is not None and (type(value) is not int or not 0 <= value < count):
        raise model.error(f"{_KEY}{key}_token_id is {short(value)}, and there are {count} tokens")
    return value


def _vocabulary(tokens: tuple[str, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for number, text in enumerate(tokens):
        found.setdefault(text, number)
    return found


def _byte_level(model: GGUF, tokens: tuple[str, ...], split: Any) -> dict[str, Any]:
    if split not in _SPLITS:
        raise model.error(
            f"{_KEY}pre {short(split)} is not known here, and decides how texts are split: load the tokenizer of the "
            "model's original folder with nnxmoe.Tokenizer.from_pretrained"
        )
    patterns, merges = _SPLITS[split], _texts(model, "merges")
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": patterns in (_NONE, _DIGITS),
    }
    steps = [
        {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False} for text in patterns
    ]
    bpe: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    bpe |= {"ignore_merges": split in _WHOLE_WORDS, "vocab": _vocabulary(tokens), "merges": list(merges)}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, level]},
        "decoder": level,
        "model": bpe,
    }


def _sentencepiece(model: GGUF, tokens: tuple[str, ...]) -> dict[str, Any]:
    scores, vocab = model.fields.get(f"{_KEY}scores", ()), _vocabulary(tokens)
    merges: Any = model.fields.get(f"{_KEY}merges")
    if merges is None:
        if len(scores) != len(tokens):
            raise model.error(f"{_KEY}scores has {len(scores)} entries, and there are {len(tokens)} tokens")
        merges = _merges(vocab, scores)
    first = bool(model.fields.get(f"{_KEY}add_space_prefix", True))
    unknown = _id(model, "unknown", len(tokens))
    bpe = {"type": "BPE", "dropout": None, "unk_token": None if unknown is None else tokens[unknown], "fuse_unk": True}
    bpe |= {"byte_fallback": True, "ignore_merges": False, "vocab": vocab, "merges": list(merges)}
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    steps += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * first
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first" if first else "never", "split": False}
    return {
        "normalizer": None,
        "pre_tokenizer": space,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": bpe,
    }


def _merges(vocab: Mapping[str, int], scores: tuple[float, ...]) -> list[list[str]]:
    """The pairs that form tokens, best score first; among equals those with a longer first part."""
    pairs = [
        (text[:cut], text[cut:], scores[number])
        for text, number in vocab.items()
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    pairs.sort(key=lambda pair: (pair[2], len(pair[0]), len(pair[1])), reverse=True)
    return [[left, right] for left, right, _ in pairs]


def _with_ends(first: str | None, last: str | None, ids: Mapping[str, int]) -> dict[str, Any]:
    """The step that adds the first and the last token of a text."""

    def ends(parts: list[tuple[str, int]]) -> list[dict[str, Any]]:
        texts = [{"Sequence": {"id": name, "type_id": kind}} for name, kind in parts]
        before, after = ([{"SpecialToken": {"id": token, "type_id": 0}}] if token else [] for token in (first, last))
        return list(itertools.chain(before, texts, after))

    special = {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in (first, last) if token}
    pair = ends([("A", 0), ("B", 1)])
    return {"type": "TemplateProcessing", "single": ends([("A", 0)]), "pair": pair, "special_tokens": special}
