"""Convert the tokenizer in a GGUF file's metadata to the content of tokenizer.json and tokenizer_config.json.

Sources: llama.cpp's ``llama-vocab.cpp`` for the regular expressions of the pre-tokenizers, and the models'
tokenizer.json files.
"""

import itertools
import logging
from collections.abc import Mapping
from typing import Any

from nnxmoe.config.printable import short
from nnxmoe.convert.gguf.gguf_file import GGUF

logger = logging.getLogger(__name__)

_UNKNOWN, _CONTROL, _OWN = 2, 3, 4  # token types; user-defined (_OWN) tokens are not special
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
_DEEPSEEK = [r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", _MARKS, r"\s+$", _CJK, r"\p{N}+"]
_DEEPSEEK_CODER = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"]
_DEEPSEEK3 = [
    *(r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
]
_GPT2 = [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"]
_DIGITS = [r"\p{N}", *_GPT2]
_DEFAULT = [r"[\p{P}$+<=>^~|]+", *_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]  # for files without tokenizer.ggml.pre
_SENTENCES = [r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"]
_QWEN35 = [
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
]
_SEED = [rf"{_SHORT}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"]
_BAILING = [rf"'(?i:[sdmt]|ll|ve|re)|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"]
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = [
    rf"\p{{Han}}+|{_CASED % (f'{_SHORT}?', f'{_SHORT}?')}|\p{{N}}{{1,3}}|{_REST}".replace(
        r"\p{M}]", r"\p{M}" + _NOT_HAN
    )
]
# Value of tokenizer.ggml.pre -> regular expressions of the pre-tokenizer, applied in order.
_SPLITS: dict[str, list[str]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "jais", "trillion", "phi-2", "exaone4", "gigachat", "mellum"), _GPT2),
    **dict.fromkeys(("a.x-4.0", "modern-bert", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "kormo", "f2llmv2", "hunyuan"), _QWEN2),
    **dict.fromkeys(("solar-open", "grok-2"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _SENTENCES),
    **{"tekken": _TEKKEN, "deepseek-llm": _DEEPSEEK, "deepseek-coder": _DEEPSEEK_CODER, "kimi-k2": _KIMI},
    **{"qwen35": _QWEN35, "seed-coder": _SEED, "viking": [*_SENTENCES, r"\p{N}"]},
}
# Tokenizers that map a word in the vocabulary directly to its token (ignore_merges), and that prepend the BOS token
# unless the file disables it.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
# Value of tokenizer.ggml.model -> default ids of special tokens.
_DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": {"bos": 11, "eos": 11}}
# End-of-generation tokens, recognized by their text and regardless of their type, because a file's metadata may not
# list all of them.
_ENDS = {
    *("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>"),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>"),
    *(
        "[EOT]",
        "[EOS]",
        "<turn|>",
        "<|tool_response>",
        "<{0}end▁of▁sentence{0}>".format("\N{FULLWIDTH VERTICAL LINE}"),
        "[e~[",
    ),
}
# Keys of a fill-in-the-middle (FIM) token -> known texts. If the file has no id under these keys, the tokens are
# control tokens regardless of their type, as in llama.cpp.
_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_FIM: dict[tuple[str, ...], set[str]] = {
    (f"fim_{part[:3]}", part): {f"<|fim_{part}|>", f"<fim-{part}>", f"<fim_{part}>", f"<|code_{part}|>", f"<|{part}|>"}
    | {f"<{part[:3].upper()}>", f"▁<{part[:3].upper()}>", f"<{_BAR}fim▁{deepseek}{_BAR}>"}
    for part, deepseek in (("prefix", "begin"), ("suffix", "hole"), ("middle", "end"))
}
_FIM |= {
    ("fim_pad",): {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"},
    ("fim_rep",): {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"},
    ("fim_sep",): {"<|file_sep|>"},
}


def tokenizer_files(model: GGUF) -> dict[str, dict[str, Any]]:
    """Return the content of the tokenizer files by file name.

    Raises CheckpointError if the tokenizer is not supported or malformed.
    """
    tokens, token_types = _texts(model, "tokens"), model.fields.get(f"{_KEY}token_type", ())
    if len(token_types) not in (0, len(tokens)):
        raise model.error(f"{_KEY}token_type has {len(token_types)} entries, but there are {len(tokens)} tokens")
    tokenizer_type, split = model.text(f"{_KEY}model"), model.fields.get(f"{_KEY}pre", "default")
    if tokenizer_type == "gpt2":
        if f"{_KEY}pre" not in model.fields:
            logger.warning("%s has no tokenizer.ggml.pre: using llama.cpp's default pre-tokenizer", model.file)
        components = _byte_level(model, tokens, split)
    elif tokenizer_type == "llama":
        components = _sentencepiece(model, tokens)
    else:
        raise model.error(f"{_KEY}model {short(tokenizer_type)} is not supported; supported: gpt2 and llama")
    ids = special_ids(model)
    special_tokens = {name: tokens[ids[key]] for name, key in _NAMES.items() if key in ids}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(model, tokens, token_types),
        **components,
    }
    adds_bos = model.fields.get(f"{_KEY}add_bos_token", tokenizer_type == "llama" or split in _WHOLE_WORDS)
    adds_eos = model.fields.get(f"{_KEY}add_eos_token", False)
    ends = [_end(model, tokens, key) if add else None for key, add in (("bos", adds_bos), ("eos", adds_eos))]
    tokenizer["post_processor"] = _with_ends(ends[0], ends[1], {text: number for number, text in enumerate(tokens)})
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens}
    templates = {key: value for key, value in model.fields.items() if key.startswith("tokenizer.chat_template")}
    if templates:
        entries = [{"name": key.removeprefix("tokenizer.chat_template").strip(".") or "default", "template": value}
                   for key, value in templates.items() if isinstance(value, str)]  # fmt: skip
        config["chat_template"] = entries[0]["template"] if len(entries) == 1 else entries
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _texts(model: GGUF, key: str) -> tuple[str, ...]:
    value = model.fields.get(f"{_KEY}{key}")
    if not isinstance(value, tuple) or not value or not isinstance(value[0], str):
        raise model.error(f"{_KEY}{key} must be a list of strings, got {short(value)}")
    return value


def special_ids(model: GGUF) -> dict[str, int]:
    """Return the special token ids in the metadata, with the defaults of the tokenizer type.

    The keys are ``bos``, ``eos``, ``eot``, ``eom``, ``unknown`` and ``padding``. The default ids of byte-level
    vocabularies are Falcon's. They apply only if the token is a control token.
    """
    tokens, token_types = model.fields.get(f"{_KEY}tokens") or (), model.fields.get(f"{_KEY}token_type") or ()
    tokenizer_type = model.fields.get(f"{_KEY}model")
    defaults = {
        key: number
        for key, number in _DEFAULT_IDS.get(tokenizer_type if isinstance(tokenizer_type, str) else "", {}).items()
        if number < len(tokens)
        and (tokenizer_type == "llama" or (number < len(token_types) and token_types[number] == _CONTROL))
    }
    if model.fields.get(f"{_KEY}pre") in ("glm4", "chatglm-bpe"):
        defaults.pop("bos", None)
    file_ids = {key: _id(model, key, len(tokens)) for key in (*_NAMES.values(), "eot", "eom")}
    return defaults | {key: number for key, number in file_ids.items() if number is not None}


def end_ids(model: GGUF) -> list[int]:
    """Return the token ids that end generation: the ids in the metadata, then the ids of well-known tokens.

    As in llama.cpp, the padding, repository and file-separator tokens of fill-in-the-middle prompts also end
    generation.
    """
    tokens, ids = model.fields.get(f"{_KEY}tokens") or (), special_ids(model)
    ends = [ids[key] for key in ("eos", "eot", "eom") if key in ids]
    texts = _ENDS & set(tokens)
    if texts >= {"<|call|>", "<|return|>"} or texts >= {"<|calls|>", "<|flush|>"}:
        texts -= {"<|end|>"}  # in these formats, <|end|> ends a message but not the turn
    if "<|tool_response>" in texts:
        texts -= {"</s>"}
    for key in ("fim_pad", "fim_rep", "fim_sep"):
        number = _id(model, key, len(tokens))
        ends += [i for i, text in enumerate(tokens) if text in _FIM[(key,)]] if number is None else [number]
    return list(dict.fromkeys([*ends, *(number for number, text in enumerate(tokens) if text in texts)]))


def _added(model: GGUF, tokens: tuple[str, ...], token_types: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the ``added_tokens``, which are matched before pre-tokenization. Phi-3's also match trailing spaces."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    phi3 = any(part in str(model.fields.get("general.name", "")).lower() for part in ("phi-3", "phi3"))
    ends, types = set(end_ids(model)), token_types or (1,) * len(tokens)
    absent = [keys for keys in _FIM if not any(f"{_KEY}{key}_token_id" in model.fields for key in keys)]
    fim = {text for keys in absent for text in _FIM[keys]}
    return [
        {
            **flags,
            **{"id": number, "content": text, "special": token_type != _OWN or text in _ENDS | fim},
            "rstrip": phi3 and text not in ("<unk>", "<s>", "<|endoftext|>"),
        }
        for number, (text, token_type) in enumerate(zip(tokens, types, strict=True))
        if text and (token_type in (_UNKNOWN, _CONTROL, _OWN) or text in fim or (number in ends and text in _ENDS))
    ]


def _end(model: GGUF, tokens: tuple[str, ...], key: str) -> str:
    """Return the ``bos`` or ``eos`` token. Raises CheckpointError if no id is defined, not even by default."""
    default = _DEFAULT_IDS[model.text(f"{_KEY}model")][key]
    if (number := special_ids(model).get(key)) is None:
        if model.fields.get(f"{_KEY}pre") in ("glm4", "chatglm-bpe") or default >= len(tokens):
            raise model.error(f"{_KEY}add_{key}_token is true, but {_KEY}{key}_token_id is missing")
        number = default
        logger.warning("%s has no %s%s_token_id: using %d, %r", model.file, _KEY, key, number, tokens[number])
    return tokens[number]


def _id(model: GGUF, key: str, count: int) -> int | None:
    value = model.fields.get(f"{_KEY}{key}_token_id")
    if value is not None and (type(value) is not int or not 0 <= value < (count or 1 << 31)):
        raise model.error(f"{_KEY}{key}_token_id is {short(value)}, but there are {count} tokens")
    return value


def _vocabulary(tokens: tuple[str, ...]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for number, text in enumerate(tokens):
        vocabulary.setdefault(text, number)
    return vocabulary


def _byte_level(model: GGUF, tokens: tuple[str, ...], split: Any) -> dict[str, Any]:
    if split not in _SPLITS:
        raise model.error(
            f"{_KEY}pre {short(split)}, the pre-tokenizer, is not supported: load the tokenizer from the "
            "model's original folder with nnxmoe.Tokenizer.from_pretrained"
        )
    patterns, merges = _SPLITS[split], _texts(model, "merges")
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    splits = [
        {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False} for text in patterns
    ]
    bpe: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    bpe |= {"ignore_merges": split in _WHOLE_WORDS, "vocab": _vocabulary(tokens), "merges": list(merges)}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": bpe,
    }


def _sentencepiece(model: GGUF, tokens: tuple[str, ...]) -> dict[str, Any]:
    scores, vocab = model.fields.get(f"{_KEY}scores", ()), _vocabulary(tokens)
    if len(scores) != len(tokens):
        raise model.error(f"{_KEY}scores has {len(scores)} entries, but there are {len(tokens)} tokens")
    has_prefix = bool(model.fields.get(f"{_KEY}add_space_prefix", True))
    unk_id = special_ids(model).get("unknown")
    bpe = {"type": "BPE", "dropout": None, "unk_token": None if unk_id is None else tokens[unk_id], "fuse_unk": True}
    bpe |= {"byte_fallback": True, "ignore_merges": False, "vocab": vocab, "merges": _merges(vocab, scores)}
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * has_prefix
    # A space is prepended to every text between special tokens, even if the text begins with a space.
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] * has_prefix
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": bpe,
    }


def _merges(vocab: Mapping[str, int], scores: tuple[float, ...]) -> list[list[str]]:
    """Return the BPE merges by descending score of the merged token. Among equal scores, longer tokens come first.

    llama.cpp merges the leftmost of several pairs with equal scores, which ``tokenizers`` does not support.
    SentencePiece assigns distinct scores.
    """
    pairs = [
        (text[:position], text[position:], scores[number])
        for text, number in vocab.items()
        for position in range(1, len(text))
        if text[:position] in vocab and text[position:] in vocab
    ]
    texts = {prefix + suffix for prefix, suffix, _ in pairs}
    if len({scores[vocab[text]] for text in texts}) < len(texts):
        logger.warning("tokenizer.ggml.scores has equal scores: longer tokens with equal scores are merged first")
    pairs.sort(key=lambda pair: (pair[2], len(pair[0]), len(pair[1])), reverse=True)
    return [[prefix, suffix] for prefix, suffix, _ in pairs]


def _with_ends(bos: str | None, eos: str | None, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the post-processor that adds the BOS and EOS tokens, if set, to a text or a pair of texts."""

    def template(sequence_ids: list[tuple[str, int]]) -> list[dict[str, Any]]:
        sequences = [{"Sequence": {"id": name, "type_id": type_id}} for name, type_id in sequence_ids]
        prefix, suffix = ([{"SpecialToken": {"id": token, "type_id": 0}}] if token else [] for token in (bos, eos))
        return list(itertools.chain(prefix, sequences, suffix))

    entries = {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in (bos, eos) if token}
    pair = template([("A", 0), ("B", 1)])
    return {"type": "TemplateProcessing", "single": template([("A", 0)]), "pair": pair, "special_tokens": entries}
