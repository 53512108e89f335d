"""Read tokenizer files from a local folder or a Hugging Face repository."""

import base64
import binascii
import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from nnxmoe.config.printable import short
from nnxmoe.convert.files.hub import TOKENIZER_FILES, local_folder, snapshot
from nnxmoe.convert.files.untrusted_files import is_gguf, parse_json, read_bounded, read_object
from nnxmoe.convert.gguf.gguf_file import GGUF
from nnxmoe.convert.gguf.gguf_tokenizer import tokenizer_files

TOKENIZER, CONFIG, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
VOCAB, MERGES = "vocab.json", "merges.txt"
TEMPLATE, LEGACY_TEMPLATE = "chat_template.jinja", "chat_template.json"
ADDITIONAL_TEMPLATES = "additional_chat_templates"
REMEDY = "Download the file again"
MAX_BYTES = 100_000_000  # Gemma's tokenizer.json is 33 MB
MAX_TEMPLATE_BYTES = 16_000_000
MAX_GROWTH = 1000
EXPLAINED_BYTES = 16_000_000  # rejected tokenizer.json files up to this size are parsed again for a clearer error


class TokenizerError(ValueError):
    """Raised for an invalid tokenizer file, chat template or input.

    Attributes:
        public: the message without ``folder``, for clients of a server.
    """

    def __init__(self, message: str, folder: str = "") -> None:
        super().__init__(message)
        self.public = message.replace(f"{folder}{os.sep}", "").replace(folder, "the tokenizer") if folder else message


def find_folder(path_or_hub_id: str | Path, revision: str | None, local_files_only: bool) -> Path:
    """Locate the tokenizer files of a checkpoint, and download them if it is a Hugging Face repository.

    Returns:
        The local folder or GGUF file, or the folder in the hub's cache.
    """
    folder = local_folder(path_or_hub_id, TokenizerError)
    if folder is not None:
        return folder
    return snapshot(str(path_or_hub_id), revision, local_files_only, TOKENIZER_FILES, [], TokenizerError)


def read_backend(folder: Path) -> tokenizers.Tokenizer:
    """Read the tokenizer from tokenizer.json or a GGUF file. Raises TokenizerError if it is missing or invalid."""
    path = folder / TOKENIZER
    if is_gguf(folder):
        data = json.dumps(tokenizer_files(GGUF.open(folder))[TOKENIZER]).encode()
    elif os.path.lexists(path):
        data = read_bounded(path, MAX_BYTES, REMEDY, TokenizerError)
    else:
        raise TokenizerError(f"{path} is missing. {_describe_folder(folder)}")
    _check_precompiled(path, data)
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except BaseException as error:
        if len(data) < EXPLAINED_BYTES and os.path.lexists(path):
            _explain(path)
        problem = f"{path} is not in a format that 'tokenizers' {tokenizers.__version__} reads"
        raise backend_failure(error, problem) from None
    _check_growth(path, backend)
    _check_added_tokens(path, data, backend)
    return backend


def read_config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, or the equivalent fields of a GGUF file. Returns {} if the file is missing."""
    return tokenizer_files(GGUF.open(folder))[CONFIG] if is_gguf(folder) else read_json(folder / CONFIG)


def _describe_folder(folder: Path) -> str:
    """Describe the content of a folder without tokenizer.json, with a remedy if possible."""
    names = sorted(path.name for path in folder.iterdir())
    tiktoken = next((name for name in names if name.endswith((".tiktoken", "tiktoken.model"))), None)
    model = next((name for name in names if name.startswith("tokenizer.model")), None)
    if model and not tiktoken:
        with (folder / model).open("rb") as file:
            tiktoken = model if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", file.read(400)) else None
    if tiktoken:
        return f"{tiktoken} is in tiktoken's format, which is not supported"
    if tekken := next((name for name in names if name.startswith("tekken")), None):
        return f"{tekken} is in mistral-common's format, which is not supported"
    if model:
        remedy = "load and save it with transformers.AutoTokenizer (and sentencepiece) to create tokenizer.json"
        return f"{model} is in SentencePiece's format, which is not supported: {remedy}"
    if bpe_files := [name for name in names if name in (VOCAB, MERGES)]:
        return f"{bpe_files[0]} needs {MERGES if bpe_files[0] == VOCAB else VOCAB} in the same folder: download it too"
    if "vocab.txt" in names:
        return "vocab.txt is in WordPiece's format, which is not supported"
    return "The folder has no tokenizer files: download the model's tokenizer.json"


def _check_precompiled(path: Path, data: bytes) -> None:
    """Raise TokenizerError for a truncated character map, because ``tokenizers`` aborts the process on it."""
    # The pattern matches escaped letters, which the name of the field may contain.
    if b"recompiled" not in data and not re.search(rb"\\u00[4-7]", data):
        return
    fields: Any = parse_json(data, path, REMEDY, TokenizerError)
    for step in _steps(fields.get("normalizer") if isinstance(fields, dict) else None):
        text = step.get("precompiled_charsmap")
        with contextlib.suppress(binascii.Error):
            charsmap = base64.b64decode(text) if isinstance(text, str) else b""
            if len(charsmap) >= 4 and int.from_bytes(charsmap[:4], "little") > len(charsmap) - 4:
                raise TokenizerError(f"{path}: normalizer: precompiled_charsmap is truncated. {REMEDY}")


def _check_growth(path: Path, backend: tokenizers.Tokenizer) -> None:
    """Raise TokenizerError if Replace steps can multiply the length of a text by more than MAX_GROWTH.

    ``tokenizers`` runs out of memory on such steps and aborts the process.
    """
    for name in ("normalizer", "decoder"):
        component, growth = getattr(backend, name), 1.0
        for step in _steps(json.loads(component.__getstate__()) if component is not None else None):
            pattern, content = step.get("pattern"), step.get("content")
            if isinstance(pattern, dict) and isinstance(content, str):
                growth *= max(1.0, len(content) / max(1, len(pattern.get("String") or "")))
        if growth > MAX_GROWTH:
            raise TokenizerError(
                f"{path}: {name}: its Replace steps can multiply the length of a text by {growth:.0f}. {REMEDY}"
            )


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """Iterate over the steps of a normalizer or decoder, with sequences flattened."""
    if isinstance(component, dict):
        yield component
        for name in ("normalizers", "decoders"):
            for step in component.get(name) or ():
                yield from _steps(step)


def _check_added_tokens(path: Path, data: bytes, backend: tokenizers.Tokenizer) -> None:
    """Raise TokenizerError if ``tokenizers`` assigned added tokens ids that differ from the file.

    This happens if the ids of the file are already in use or leave a gap.
    """
    match = re.search(rb'"added_tokens"\s*:\s*', data)
    try:
        tokens = json.JSONDecoder().raw_decode(data[match.end() :].decode(errors="replace"))[0] if match else []
    except (ValueError, RecursionError):
        return
    for token in tokens if isinstance(tokens, list) else []:
        if isinstance(token, dict) and isinstance(content := token.get("content"), str):
            assigned_id = backend.token_to_id(content)
            if assigned_id is not None and assigned_id != token.get("id"):
                raise TokenizerError(
                    f"{path}: added_tokens: {short(content)} has the id {short(token.get('id'))}, but the vocabulary "
                    f"assigns it {assigned_id}. {REMEDY}"
                )


def _explain(path: Path) -> None:
    """Raise a clearer error than ``tokenizers`` for invalid JSON and unknown models."""
    model = read_json(path).get("model")
    algorithm = model.get("type") if isinstance(model, dict) else None
    if algorithm not in (None, "BPE", "Unigram", "WordPiece", "WordLevel"):
        raise TokenizerError(f"{path}: unknown tokenizer model {algorithm!r:.60}. Try a newer 'tokenizers'") from None


def backend_failure(error: BaseException, problem: str, folder: str = "") -> BaseException:
    """Convert an exception from ``tokenizers`` to a TokenizerError. Returns interrupts unchanged.

    Rust panics derive from BaseException.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        return error
    message = f"{problem}: {error}. Download the file again, or save it with a current 'tokenizers'"
    return TokenizerError(message, folder)


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Returns {} if the file is missing."""
    return read_object(path, REMEDY, TokenizerError) if os.path.lexists(path) else {}


def read_chat_templates(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, str], Path]:
    """Read the chat templates of a checkpoint.

    Reads chat_template.jinja and additional_chat_templates/NAME.jinja. If these files do not exist, reads
    tokenizer_config.json, or else chat_template.json.

    Returns:
        Templates by name, and the path of their file or folder.
    """
    candidates = sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))
    files = {path.stem: path for path in candidates} | {"default": folder / TEMPLATE}
    jinja_templates = {name: _read_template(path) for name, path in files.items() if os.path.lexists(path)}
    if jinja_templates:
        return jinja_templates, files["default"] if "default" in jinja_templates else folder / ADDITIONAL_TEMPLATES
    where, candidates = folder / CONFIG, config.get("chat_template")
    if candidates is None:
        where = folder / LEGACY_TEMPLATE
        candidates = read_json(where).get("chat_template")
    if candidates is None:
        return {}, where
    entries = candidates if isinstance(candidates, list) else [{"name": "default", "template": candidates}]
    templates: dict[str, str] = {}
    for entry in entries:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise TokenizerError(f"{where}: 'chat_template' must be a string or a list of {{name, template}} objects")
        templates[name] = template
    return templates, where


def _read_template(path: Path) -> str:
    data = read_bounded(path, MAX_TEMPLATE_BYTES, REMEDY, TokenizerError)
    try:
        return data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text ({error}). {REMEDY}") from None
