"""Faults of tokenizers and chat templates."""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from tests.corpus.case import Case, Draft, Verdict, rotate

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
WORDS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "hello", "you"]
SOUND: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "<unk>"},
}


def cases() -> Iterator[Case]:
    """All of them, each for one family in turn."""
    family = rotate()
    for fault, make, names in FILES:
        yield Case(next(family), f"tokenizer, {fault}", "refuse", make, names, "chat")
    for fault, make, names in RUNS:
        yield Case(next(family), f"tokenizer, {fault}", "refuse", make, names, "generate")
    yield Case(next(family), "tokenizer, as it should be", "accept", _files(), (), "generate")
    for fault, template, names in TEMPLATES:
        verdict: Verdict = "refuse" if names else "accept"
        yield Case(
            next(family),
            f"template, {fault}",
            verdict,
            _files(template=template),
            (TEMPLATE, *names) if names else (),
            "chat",
        )


def write(
    draft: Draft,
    tokenizer: Any = SOUND,
    settings: Any = None,
    template: str | bytes | None = "{{ messages[0].content }}",
) -> None:
    """A sound checkpoint with these tokenizer files; None: the file is not there."""
    draft.write()
    for name, content in ((TOKENIZER, tokenizer), (SETTINGS, settings), (TEMPLATE, template)):
        if content is not None:
            text = content if isinstance(content, str | bytes) else json.dumps(content)
            (draft.folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


def _files(**files: Any) -> Callable[[Draft], None]:
    return lambda draft: write(draft, **files)


def _instead(name: str, put: Callable[[Any], Any]) -> Callable[[Draft], None]:
    def make(draft: Draft) -> None:
        _files(settings={})(draft)
        (draft.folder / name).unlink(missing_ok=True)
        put(draft.folder / name)

    return make


def _added(content: str, number: int) -> dict[str, Any]:
    return {"id": number, "content": content, "special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )


def _model(**changes: Any) -> dict[str, Any]:
    return SOUND | {"model": SOUND["model"] | changes}


FILES: list[tuple[str, Callable[[Draft], None], tuple[str, ...]]] = [
    ("missing", _files(tokenizer=None), (TOKENIZER, "missing")),
    ("SentencePiece only", _instead(TOKENIZER, lambda path: path.with_suffix(".model").touch()), (TOKENIZER, "SentencePiece")),
    ("empty", _files(tokenizer=b""), (TOKENIZER, "JSON")),
    ("no JSON", _files(tokenizer="{"), (TOKENIZER, "JSON")),
    ("no UTF-8", _files(tokenizer=b'{"a": "\xff"}'), (TOKENIZER, "JSON")),
    ("a list", _files(tokenizer=[]), (TOKENIZER, "object")),
    ("nested 100,000 deep", _files(tokenizer="[" * 100_000), (TOKENIZER, "JSON")),
    ("without a model", _files(tokenizer={"version": "1.0"}), (TOKENIZER,)),
    ("an unknown model", _files(tokenizer=_model(type="Magic")), (TOKENIZER, "Magic")),
    ("an unknown pre-tokenizer", _files(tokenizer=SOUND | {"pre_tokenizer": {"type": "Magic"}}), (TOKENIZER,)),
    ("a vocabulary of texts", _files(tokenizer=_model(vocab={"a": "b"})), (TOKENIZER,)),
    ("a negative id", _files(tokenizer=_model(vocab={"a": -1})), (TOKENIZER,)),
    ("an unknown token that is not there", _files(tokenizer=_model(unk_token="<none>")), (TOKENIZER,)),
    ("a broken regex", _files(tokenizer=SOUND | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}}), (TOKENIZER,)),
    ("a Git LFS pointer", _files(tokenizer=b"version https://git-lfs.github.com/spec/v1\n"), (TOKENIZER,)),
    ("a folder", _instead(TOKENIZER, lambda path: path.mkdir()), (TOKENIZER, "folder")),
    ("a link to itself", _instead(TOKENIZER, lambda path: path.symlink_to(TOKENIZER)), (TOKENIZER, "link")),
    ("a pipe", _instead(TOKENIZER, os.mkfifo), (TOKENIZER, "regular")),
    ("a device without end", _instead(TOKENIZER, lambda path: path.symlink_to("/dev/zero")), (TOKENIZER, "regular")),
    ("a map of characters that is cut", _files(tokenizer=SOUND | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAAAAAA"}}), (TOKENIZER, "precompiled_charsmap")),
    ("a map in disguise", _files(tokenizer=json.dumps(SOUND | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAAAAAA"}}).replace("Precompiled", "\\u0050recompiled").replace("precompiled_", "\\u0070recompiled_")), (TOKENIZER, "precompiled_charsmap")),
    ("a text that doubles 30 times", _files(tokenizer=SOUND | {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "h"}, "content": "hh"}] * 30}}), (TOKENIZER, "normalizer", "Replace")),
    ("a decoder that doubles 30 times", _files(tokenizer=SOUND | {"decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "h"}, "content": "hh"}] * 30}}), (TOKENIZER, "decoder", "Replace")),
    ("an added token with an id of its own", _files(tokenizer=SOUND | {"added_tokens": [_added("<x>", 999)]}), (TOKENIZER, "added_tokens", "<x>", "999")),
    ("an added token with another's id", _files(tokenizer=SOUND | {"added_tokens": [_added("hello", 0)]}), (TOKENIZER, "added_tokens", "hello")),
    ("a table of the kernel", _instead(TOKENIZER, lambda path: path.symlink_to("/proc/self/pagemap")), (TOKENIZER, "bytes")),
    ("an eos token that is no Unicode", _files(settings={"eos_token": "\ud800"}), (SETTINGS, "eos_token")),
    ("an old map with a number for a token", _instead("special_tokens_map.json", lambda path: path.write_text('{"eos_token": 2}')), ("special_tokens_map.json", "eos_token")),
    ("settings that are no JSON", _files(settings="no"), (SETTINGS, "JSON")),
    ("settings that are a number", _files(settings="3"), (SETTINGS, "object")),
    ("settings nested deeply", _files(settings='{"a":' * 100_000), (SETTINGS, "JSON")),
    ("settings of 3 million values", _files(settings="[" + "0," * 3_000_000 + "0]"), (SETTINGS, "object")),
    ("settings that are a folder", _instead(SETTINGS, lambda path: path.mkdir()), (SETTINGS, "folder")),
    ("an eos token that is a number", _files(settings={"eos_token": 2}), (SETTINGS, "eos_token")),
    ("a bos token that is a list", _files(settings={"bos_token": ["<s>"]}), (SETTINGS, "bos_token")),
    ("a template that is a number", _files(settings={"chat_template": 3}, template=None), (SETTINGS, "chat_template")),
    ("a token declared with another id", _files(settings={"added_tokens_decoder": {"999": {"content": "<x>"}}}), (SETTINGS, "<x>", "999")),
    ("a named template that is no UTF-8", _instead("additional_chat_templates", lambda path: [path.mkdir(), (path / "tool_use.jinja").write_bytes(b"\xff")]), ("tool_use.jinja", "UTF-8")),
    ("templates without names", _files(settings={"chat_template": [{"template": "x"}]}, template=None), (SETTINGS, "chat_template")),
    ("no template", _files(template=None), (TEMPLATE, "chat template")),
]  # fmt: skip

RUNS: list[tuple[str, Callable[[Draft], None], tuple[str, ...]]] = [
    ("ids beyond the embedding", _files(tokenizer=_model(vocab={word: i + 40 for i, word in enumerate(WORDS)})), ("0 … 52",)),
    ("ids near 2**31", _files(tokenizer=_model(vocab={word: i + 2**31 - 100 for i, word in enumerate(WORDS)})), ("0 … 52",)),
    ("ids near 2**32", _files(tokenizer=_model(vocab={word: i + 2**32 - 100 for i, word in enumerate(WORDS)})), ("0 … 52",)),
    ("that gives no ids", _files(tokenizer=SOUND | {"normalizer": {"type": "Replace", "pattern": {"Regex": "."}, "content": ""}}), ("empty",)),
]  # fmt: skip

_LIMITS = ("chat template",)
TEMPLATES: list[tuple[str, str | bytes, tuple[str, ...]]] = [
    ("as it should be", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ()),
    ("no UTF-8", b"\xff\xfe", ("UTF-8",)),
    ("a Git LFS pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ("git lfs pull",)),
    ("a syntax error", "{% for m in messages", ("syntax",)),
    ("an unknown filter", "{{ messages | nosuch }}", ("nosuch",)),
    ("an unknown tag", "{% magic %}", ("magic",)),
    ("something undefined", "{{ x.y }}", ("undefined",)),
    ("a message that is not there", "{{ messages[7].role }}", ("undefined",)),
    ("raise_exception", "{{ raise_exception('roles must alternate') }}", ("roles must alternate",)),
    ("a division by zero", "{{ 1 / 0 }}", ("ZeroDivisionError",)),
    ("an escape by __class__", "{{ ''.__class__.__mro__[1].__subclasses__() }}", ("not allowed",)),
    ("an escape by attr", "{{ ()|attr('__class__')|attr('__base__')|attr('__subclasses__')() }}", _LIMITS),
    ("an escape by cycler", "{{ cycler.__init__.__globals__.os.popen('id').read() }}", ("not allowed",)),
    ("an escape by lipsum", "{{ lipsum.__globals__['os'].environ }}", ("not allowed",)),
    ("an escape by namespace", "{{ namespace.__init__.__globals__ }}", ("not allowed",)),
    ("an escape by format", "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}{{ x.y }}", _LIMITS),
    ("an include", "{% include '/etc/passwd' %}", ("no loader",)),
    ("an import", "{% import 'os' as os %}", ("no loader",)),
    ("an extends", "{% extends '../config.json' %}", ("no loader",)),
    ("a message appended", "{{ messages.append(1) }}", ("not allowed",)),
    ("a message changed", "{{ messages[0].update(role='x') }}", ("not allowed",)),
    ("messages cleared", "{{ messages.clear() }}", ("not allowed",)),
    ("a range of 10**9", "{{ range(10**9) | list }}", ("Range too big",)),
    ("endless recursion", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", ("deeply",)),
    ("too deep a nesting", "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", ("deeply",)),
]  # fmt: skip
