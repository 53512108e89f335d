"""Prompts of ``nnxmoe generate``: a file of them in, JSON lines out; and the speed of a stream."""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm  # see runtime.progress

import nnxmoe
from nnxmoe.apps.cli import drafts
from nnxmoe.runtime.progress import logger, say

OUTPUT = ("index", "prompt", "messages", "line", "text", "finish_reason", "ids", "sample", "logprobs", "top_logprobs")


class Line(NamedTuple):
    """A line of a prompt file: the prompt (text, ids or a chat), its number (of the line, or of the item of a JSON
    array), and its other fields."""

    prompt: Any
    number: int
    fields: dict[str, Any]


def read(path: str) -> list[Line]:
    """The prompts of a file, or of stdin for "-": one per line, as text, or as a JSON object with "prompt" (text or
    ids) or "messages" (a chat), or a JSON array of such objects. In a file named .txt every line is text. Raises
    ValueError that names the line."""
    try:
        text = sys.stdin.read().removeprefix("\ufeff") if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): save it as UTF-8") from None
    plain, kind, found = path.endswith(".txt"), "line", list[Line]()
    given: list[Any] = text.split("\n")  # splitlines would also split within a JSON string
    if not plain and re.match(r"\s*\[\s*\{", text):
        given, kind = _json(text, f"{path} begins with [{{"), "item"
    for number, one in enumerate(given, 1):
        where = f"{path}: {kind} {number}"
        if kind == "line" and not plain and one.lstrip().startswith("{"):
            one = _json(one, f"{where} begins with {{")
        if isinstance(one, dict):
            found.append(_record(one, where, number))
        elif kind == "item":
            raise ValueError(f"{where} of the array must be an object, got {one!r:.60}")
        elif one.strip():
            found.append(Line(one.rstrip("\r"), number, {}))
    if lost := sorted({name for one in found for name in one.fields.keys() & set(OUTPUT)}):
        logger.warning("%s: the output has its own fields %s, which replace those of the prompts", path, lost)
    return found


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} and is not JSON ({error}); if it is text, name the file .txt") from None


def _record(one: dict[str, Any], where: str, number: int) -> Line:
    fields = {name: value for name, value in one.items() if value is not None}
    if len(known := {"prompt", "messages"} & fields.keys()) != 1:
        raise ValueError(f'{where}: give "prompt" or "messages", one of them, got {sorted(fields)}')
    prompt = fields.pop(name := known.pop())
    if name == "prompt" and prompt == "":
        raise ValueError(f"{where}: prompt is empty")
    kind, wanted = (int, "a text or a list of ids") if name == "prompt" else (dict, "a list of messages")
    several = isinstance(prompt, list) and prompt and all(isinstance(part, kind) for part in prompt)
    if not several and not (name == "prompt" and isinstance(prompt, str)):
        raise ValueError(f"{where}: {name} must be {wanted}, got {prompt!r:.60}")
    return Line(prompt, number, fields)


def grammar_of(options: argparse.Namespace, tokenizer: Any) -> nnxmoe.Grammar | None:
    """What ``--json-schema`` asks every text to follow. Raises ValueError."""
    if options.json_schema is None:
        return None
    try:
        return nnxmoe.Grammar.json_schema(Path(options.json_schema).read_text(encoding="utf-8-sig"), tokenizer)
    except ValueError as error:
        raise ValueError(f"{options.json_schema}: {error}") from None


def lines(
    model: Any, tokenizer: Any, given: Sequence[Line], sampling: nnxmoe.Sampling, options: argparse.Namespace
) -> Iterator[str]:
    """A JSON line for each completion, in the order of the prompts."""
    completions = nnxmoe.complete(
        model,
        [line.prompt for line in given],
        tokenizer,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        n=options.samples,
        stop=options.stop,
        seed=options.seed,
        logprobs=options.logprobs,
        draft=drafts.draft_of(options.draft, model),
        constraint=grammar_of(options, tokenizer),
        slots=options.slots,
    )
    total, made = len(given) * options.samples, 0
    torn: Any = {"disable": True} if sys.stdout.isatty() else {}  # a bar among lines on the same terminal
    for one in tqdm(completions, "generating", total, unit="answer", dynamic_ncols=True, delay=1, **torn):
        made += len(one.ids)
        yield json.dumps(_fields(one, given[one.prompt], tokenizer, options), ensure_ascii=False)
    say("%d prompt%s, %d new tokens", len(given), "s" * (len(given) != 1), made)


def _fields(one: nnxmoe.Completion, line: Line, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a line of output, those of the prompt's line first."""
    kind = "messages" if isinstance(line.prompt, list) and isinstance(line.prompt[0], dict) else "prompt"
    fields = {**line.fields, "index": one.prompt, kind: line.prompt, "line": line.number, "text": one.text}
    fields |= {"finish_reason": one.finish, "ids": one.ids}
    fields |= {"sample": one.sample} if options.samples > 1 else {}
    if options.logprobs is not None:
        fields["logprobs"] = one.logprobs
        if options.logprobs:
            fields["top_logprobs"] = [[[tokenizer.decode([i]), i, value] for i, value in top] for top in one.top]
    return fields


class Speed:
    """The speed of a stream as the end of a message; empty before the second token."""

    def __init__(self) -> None:
        self.tokens, self._first, self._since = 0, 0, 0.0

    def note(self, tokens: int) -> None:
        """``tokens`` were made so far."""
        self._since = self._since or time.perf_counter()
        self._first, self.tokens = self._first or tokens, tokens

    def __str__(self) -> str:
        seconds, made = time.perf_counter() - self._since, self.tokens - self._first
        return f"; {made / seconds:.1f} tokens per second after the first" if made and self._since else ""
