"""Add the tokens declared in files other than ``tokenizer.json``, as transformers 5 does.

``tokenizer_config.json`` declares tokens in ``added_tokens_decoder``, the ``*_token`` fields and
``extra_special_tokens``. Checkpoints without ``added_tokens_decoder`` may also have ``added_tokens.json``
and ``special_tokens_map.json``. Contradictory files raise TokenizerError.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from nnxmoe.config.printable import short
from nnxmoe.tokenizer.tokenizer_files import CONFIG, SPECIAL, TokenizerError, read_json

ADDED = "added_tokens.json"
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def read_special_tokens(folder: Path, config: Mapping[str, Any], defaults: Mapping[str, str]) -> dict[str, Any]:
    """Read the ``*_token`` fields and named extra special tokens.

    Also reads special_tokens_map.json, unless the config has ``added_tokens_decoder``.

    Args:
        folder: checkpoint folder.
        config: content of tokenizer_config.json.
        defaults: default tokens by field name.

    Returns:
        Tokens by field name, each a str or an object with flags.
    """
    tokens: dict[str, Any] = dict(defaults)
    for fields, path, extra in _special_token_files(folder, config):
        for name, value in fields.items():
            if name.endswith("_token") and (name in NAMED or isinstance(value, str | dict)):
                if value is None:
                    tokens.pop(name, None)
                elif name in NAMED or _token_text(value) is not None:
                    tokens[name] = _check_token(value, f"{path}: {name}")
        if isinstance(extra, dict):
            tokens |= {name: _check_token(value, f"{path}: extra_special_tokens") for name, value in extra.items()}
    ranks = {name: rank for rank, name in enumerate(NAMED)}  # transformers assigns new ids in this order
    return dict(sorted(tokens.items(), key=lambda item: ranks.get(item[0], len(ranks))))


def add_declared_tokens(
    backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any], named: Mapping[str, Any]
) -> None:
    """Add the declared tokens that are missing from the tokenizer.

    Raises:
        TokenizerError: if a declaration is invalid, or the id of a token differs from the declared id.
    """
    extra = [
        _check_token(token_value, f"{path}: extra_special_tokens")
        for _, path, extra_tokens in _special_token_files(folder, config)
        for token_value in (extra_tokens if isinstance(extra_tokens, list) else ())
    ]
    declared, where = config.get("added_tokens_decoder"), folder / CONFIG
    if declared is None:
        declared, where = (
            _legacy_decoder(folder, [*map(_token_text, named.values()), *map(_token_text, extra)]),
            folder / ADDED,
        )
    if not isinstance(declared, dict) or not all(str(number).isdecimal() for number in declared):
        raise TokenizerError(f"{where}: added_tokens_decoder is {short(declared)}: it must map ids to tokens")
    ids = {int(number): _as_added_token(value, f"{where}: token {number}", False) for number, value in declared.items()}
    known_tokens = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    new_tokens = [token for _, token in sorted(ids.items()) if repr(token) not in known_tokens]
    known_texts = {token.content for token in (*backend.get_added_tokens_decoder().values(), *new_tokens)}
    special_texts = {_token_text(value) for value in named.values()}
    for value in (*named.values(), *extra):
        if (text := _token_text(value)) not in known_texts:
            new_tokens.append(_as_added_token(value, f"{folder / CONFIG}: special token {short(text)}", True))
            known_texts.add(str(text))
    for token in new_tokens:
        token.special = token.special or token.content in special_texts
    backend.add_tokens(new_tokens)
    if str(config.get("tokenizer_class")).startswith("Llama"):
        _match_raw_text(backend)
    for number, token in ids.items():
        if token.content and (assigned_id := backend.token_to_id(token.content)) != number:
            raise TokenizerError(
                f"{where}: token {short(token.content)} is declared with the id {number}, but the vocabulary assigns "
                f"{assigned_id}. The files are inconsistent. Download them again"
            )


def _match_raw_text(backend: tokenizers.Tokenizer) -> None:
    """Match special tokens before the normalizer runs.

    Some files of Llama 1 and 2 have "normalized": true. With their normalizer, `tokenizers` finds only
    "▁</s>", not "</s>". transformers avoids the problem because it rebuilds these tokenizers.
    """
    for token in backend.get_added_tokens_decoder().values():
        if token.special and token.normalized:
            flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
            backend.add_tokens([tokenizers.AddedToken(token.content, normalized=False, special=True, **flags)])


def _special_token_files(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Path, Any]]:
    """Iterate over the files that declare special tokens.

    Yields:
        Fields of the file, its path, and its extra special tokens or None.
    """
    files = {CONFIG: config}
    if "added_tokens_decoder" not in config:
        files[SPECIAL] = read_json(folder / SPECIAL)
    for file, fields in files.items():
        yield fields, folder / file, next((fields[name] for name in _EXTRA if fields.get(name)), None)


def _legacy_decoder(folder: Path, special: list[str | None]) -> dict[str, Any]:
    """Convert added_tokens.json (token -> id) to the form of ``added_tokens_decoder`` (id -> token)."""
    decoder: dict[str, Any] = {}
    for text, number in read_json(folder / ADDED).items():
        if type(number) is not int or number < 0:
            raise TokenizerError(f"{folder / ADDED}: the id of {short(text)} is {short(number)}, not an integer >= 0")
        is_special = text in special
        decoder[str(number)] = {"content": text, "normalized": not is_special, "special": is_special}
    return decoder


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _check_token(value: Any, field: str) -> Any:
    """Return the value if it is a str, or an object with "content", in valid Unicode.

    Raises:
        TokenizerError: if the value is invalid.
    """
    text = _token_text(value)
    if text is None:
        raise TokenizerError(f'{field} is {short(value)}: it must be a string or {{"content": string}}')
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise TokenizerError(f"{field} {short(text)} is not valid Unicode. Download the file again")
    return value


def _as_added_token(value: Any, field: str, special: bool) -> tokenizers.AddedToken:
    """Convert a str, or an object with flags, to an `AddedToken`. A str becomes a special token."""
    text = _token_text(_check_token(value, field))
    if isinstance(value, str):
        return tokenizers.AddedToken(text, special=True)
    flags = {name: bool(value[name]) for name in _FLAGS if name in value}
    return tokenizers.AddedToken(text, special=special or bool(value.get("special", False)), **flags)
