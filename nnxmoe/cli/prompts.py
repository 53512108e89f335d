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
    text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    rows = enumerate(text.split("\n"), 1)  # splitlines would also split within a JSON string
    return [_prompt(line.rstrip("\r"), f"{path}: line {number}") for number, line in rows if line.strip()]


def _prompt(line: str, where: str) -> Any:
    if not line.lstrip().startswith("{"):
        return line
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} begins with {{ and is not JSON: {error}") from None
    if len(fields) != 1 or not (known := {"prompt", "messages"} & fields.keys()):
        raise ValueError(f'{where}: give "prompt" or "messages" and no other field, got {sorted(fields)}')
    name = known.pop()
    prompt = fields[name]
    if name == "prompt" and isinstance(prompt, str):
        return prompt
    kind = int if name == "prompt" else dict
    if isinstance(prompt, list) and prompt and all(isinstance(part, kind) for part in prompt):
        return prompt
    wanted = "a text or a list of ids" if name == "prompt" else "a list of messages"
    raise ValueError(f"{where}: {name} must be {wanted}, got {prompt!r:.60}")


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
