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
MAX_BYTES = 100_000_000  # for comparison: Gemma's tokenizer.json has 33 MB
MAX_TEMPLATE_BYTES = 16_000_000
MAX_GROWTH = 1000
EXPLAINED_BYTES = 16_000_000  # a rejected tokenizer.json up to this size is parsed again for a clearer error


class TokenizerError(ValueError):
    """Error for an invalid tokenizer file, chat template or input.

    The message states the file and the remedy.

    Attributes:
        public: the message without ``folder``, for clients of a server.
    """

    def __init__(self, message: str, folder: str = "") -> None:
        super().__init__(message)
        self.public = message.replace(f"{folder}{os.sep}", "").replace(folder, "the tokenizer") if folder else message


def find_folder(path_or_hub_id: str | Path, revision: str | None, local_files_only: bool) -> Path:
    """Return the local folder or GGUF file, or download the tokenizer files of a Hugging Face repository.

    Returns:
        The local path, or the folder in the hub's cache.
    """
    folder = local_folder(path_or_hub_id, TokenizerError)
    if folder is not None:
        return folder
    return snapshot(str(path_or_hub_id), revision, local_files_only, TOKENIZER_FILES, [], TokenizerError)


def read_backend(folder: Path) -> tokenizers.Tokenizer:
    """Read the tokenizer from tokenizer.json or a GGUF file. Raises TokenizerError."""
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
        what = f"{path} is not a tokenizer that 'tokenizers' {tokenizers.__version__} reads"
        raise backend_failure(error, what) from None
    _check_growth(path, backend)
    _check_added_tokens(path, data, backend)
    return backend


def read_config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, or the equivalent fields of a GGUF file.

    Returns {} if the file is missing.
    """
    return tokenizer_files(GGUF.open(folder))[CONFIG] if is_gguf(folder) else read_json(folder / CONFIG)


def _describe_folder(folder: Path) -> str:
    """Describe the content of a folder without tokenizer.json, with a remedy if one is known."""
    names = sorted(path.name for path in folder.iterdir())
    tiktoken = next((name for name in names if name.endswith((".tiktoken", "tiktoken.model"))), None)
    model = next((name for name in names if name.startswith("tokenizer.model")), None)
    if model and not tiktoken:
        with (folder / model).open("rb") as file:
            tiktoken = model if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", file.read(400)) else None
    if tiktoken:
        return f"{tiktoken} is tiktoken's format, which is not read here"
    if tekken := next((name for name in names if name.startswith("tekken")), None):
        return f"{tekken} is mistral-common's format, which is not read here"
    if model:
        how = "load and save it once with transformers.AutoTokenizer (and sentencepiece), which writes tokenizer.json"
        return f"{model} is SentencePiece's format, which is not read here: {how}"
    if found := [name for name in names if name in (VOCAB, MERGES)]:
        return f"{found[0]} needs {MERGES if found[0] == VOCAB else VOCAB} beside it: fetch that file too"
    if "vocab.txt" in names:
        return "vocab.txt is WordPiece's format, which is not read here"
    return "The folder has no file of a tokenizer: fetch the model's tokenizer.json"


def _check_precompiled(path: Path, data: bytes) -> None:
    """Raise TokenizerError for a truncated character map, for which ``tokenizers`` aborts the process."""
    if b"recompiled" not in data and not re.search(
        rb"\\u00[4-7]", data
    ):  # the field name, possibly with escaped letters
        return
    found: Any = parse_json(data, path, REMEDY, TokenizerError)
    for step in _steps(found.get("normalizer") if isinstance(found, dict) else None):
        text = step.get("precompiled_charsmap")
        with contextlib.suppress(binascii.Error):
            raw = base64.b64decode(text) if isinstance(text, str) else b""
            if len(raw) >= 4 and int.from_bytes(raw[:4], "little") > len(raw) - 4:
                raise TokenizerError(f"{path}: normalizer: precompiled_charsmap is cut short. {REMEDY}")


def _check_growth(path: Path, backend: tokenizers.Tokenizer) -> None:
    """Raise TokenizerError for Replace steps that multiply the length of a text beyond MAX_GROWTH.

    ``tokenizers`` runs out of memory on such steps and aborts.
    """
    for name in ("normalizer", "decoder"):
        part, growth = getattr(backend, name), 1.0
        for step in _steps(json.loads(part.__getstate__()) if part is not None else None):
            pattern, content = step.get("pattern"), step.get("content")
            if isinstance(pattern, dict) and isinstance(content, str):
                growth *= max(1.0, len(content) / max(1, len(pattern.get("String") or "")))
        if growth > MAX_GROWTH:
            raise TokenizerError(
                f"{path}: {name}: its Replace steps can make a text {growth:.0f} times as long. {REMEDY}"
            )


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Iterate over the steps of a normalizer or decoder, with sequences flattened."""
    if isinstance(part, dict):
        yield part
        for name in ("normalizers", "decoders"):
            for step in part.get(name) or ():
                yield from _steps(step)


def _check_added_tokens(path: Path, data: bytes, backend: tokenizers.Tokenizer) -> None:
    """Raise TokenizerError if ids of added tokens are in use or leave a gap.

    ``tokenizers`` would assign different ids.
    """
    match = re.search(rb'"added_tokens"\s*:\s*', data)
    try:
        tokens = json.JSONDecoder().raw_decode(data[match.end() :].decode(errors="replace"))[0] if match else []
    except (ValueError, RecursionError):
        return
    for token in tokens if isinstance(tokens, list) else []:
        if isinstance(token, dict) and isinstance(content := token.get("content"), str):
            known = backend.token_to_id(content)
            if known is not None and known != token.get("id"):
                raise TokenizerError(
                    f"{path}: added_tokens: {short(content)} has the id {short(token.get('id'))}, but the vocabulary "
                    f"assigns it {known}. {REMEDY}"
                )


def _explain(path: Path) -> None:
    """Raise a clearer error than the library's for invalid JSON and for unknown models."""
    model = read_json(path).get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    if kind not in (None, "BPE", "Unigram", "WordPiece", "WordLevel"):
        raise TokenizerError(f"{path}: unknown tokenizer model {kind!r:.60}. Try a newer 'tokenizers'") from None


def backend_failure(error: BaseException, what: str, folder: str = "") -> BaseException:
    """Convert an exception of ``tokenizers`` to a TokenizerError. Returns interrupts unchanged.

    Rust panics are BaseExceptions.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        return error
    why = f"{what}: {error}. Download the file again, or save it with a current 'tokenizers'"
    return TokenizerError(why, folder)


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Returns {} if the file is missing."""
    return read_object(path, REMEDY, TokenizerError) if os.path.lexists(path) else {}


def read_chat_templates(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, str], Path]:
    """Read the chat templates.

    Reads chat_template.jinja and additional_chat_templates/NAME.jinja. Without these files, reads
    tokenizer_config.json, else chat_template.json.

    Returns:
        Templates by name, and their file.
    """
    found = sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))
    files = {path.stem: path for path in found} | {"default": folder / TEMPLATE}
    read = {name: _read_template(path) for name, path in files.items() if os.path.lexists(path)}
    if read:
        return read, files["default"] if "default" in read else folder / ADDITIONAL_TEMPLATES
    where, found = folder / CONFIG, config.get("chat_template")
    if found is None:
        where = folder / LEGACY_TEMPLATE
        found = read_json(where).get("chat_template")
    if found is None:
        return {}, where
    entries = found if isinstance(found, list) else [{"name": "default", "template": found}]
    templates: dict[str, str] = {}
    for entry in entries:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise TokenizerError(f"{where}: 'chat_template' must be a string or a list of {{name, template}}")
        templates[name] = template
    return templates, where


def _read_template(path: Path) -> str:
    data = read_bounded(path, MAX_TEMPLATE_BYTES, REMEDY, TokenizerError)
    try:
        return data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text ({error}). {REMEDY}") from None
