"""``nnxmoe generate --prompts FILE``: many prompts in, JSON lines out."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nnxmoe
from nnxmoe.cli import drafts
from nnxmoe.runtime.progress import say


def read(path: str) -> list[Any]:
    """The prompts of a file, or of stdin for "-": one per line, as text, or as a JSON object with "prompt" (text or
    ids) or "messages" (a chat). Raises ValueError that names the line."""
    text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    return [_prompt(line, f"{path}: line {number}") for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _prompt(line: str, where: str) -> Any:
    if not line.lstrip().startswith("{"):
        return line
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} begins with {{ and is not JSON: {error}") from None
    if len(known := {"prompt", "messages"} & fields.keys()) != 1:
        raise ValueError(f'{where}: give one of "prompt" and "messages", got {sorted(fields)}')
    prompt = fields[known.pop()]
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt):
        return prompt
    raise ValueError(f"{where}: {prompt!r:.60} is neither text nor a list of ids or messages")


def lines(
    model: Any, tokenizer: Any, prompts: list[Any], sampling: nnxmoe.Sampling, options: argparse.Namespace
) -> Iterator[str]:
    """A JSON line for each completion, in the order of the prompts."""
    made = 0
    for one in nnxmoe.complete(
        model,
        prompts,
        tokenizer,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        n=options.samples,
        stop=options.stop or (),
        seed=options.seed,
        logprobs=options.logprobs,
        draft=drafts.draft_of(options.draft, model),
        slots=options.slots,
    ):
        made += len(one.ids)
        fields: dict[str, Any] = {"prompt": one.prompt, "text": one.text, "finish_reason": one.finish, "ids": one.ids}
        fields |= {"sample": one.sample} if options.samples > 1 else {}
        fields |= {"logprobs": one.logprobs} if options.logprobs is not None else {}
        fields |= {"top_logprobs": one.top} if options.logprobs else {}
        yield json.dumps(fields, ensure_ascii=False)
    say("%d prompts, %d new tokens", len(prompts), made)
