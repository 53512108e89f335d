"""``nnxmoe generate``: continue one prompt, or all prompts of a file."""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm  # see runtime.progress

import nnxmoe
from nnxmoe.apps.cli import loading
from nnxmoe.apps.cli.loading import GREEDY, Speed, draft_of, sampling_of
from nnxmoe.apps.cli.options import add_draft, add_loading, add_sampling, add_slots, count, natural, nonempty
from nnxmoe.generation.ids import eos_ids
from nnxmoe.generation.sampling import effective_fields, format_fields
from nnxmoe.generation.stop_strings import StopStringFilter, split_stop_strings
from nnxmoe.runtime.progress import logger, say

EXAMPLE = """generate mistralai/Mixtral-8x7B-v0.1 'The three laws are' --mesh tensor=8
  nnxmoe generate demo --prompts questions.txt --draft prompt:4"""

OUTPUT = ("index", "prompt", "messages", "line", "text", "finish_reason", "ids", "sample", "logprobs", "top_logprobs")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``nnxmoe generate``."""
    add_loading(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue ('-' reads stdin)")
    prompt.add_argument(
        "--prompt",
        dest="prompt",
        metavar="PROMPT",
        help="the prompt, if it starts with a dash: --prompt=-5",
    )
    add_sampling(parser, 64, "0")
    add_draft(parser)
    prompt.add_argument(
        "--prompts",
        metavar="FILE",
        help='continue each prompt of a file ("-" reads stdin) and print a JSON line per sample. A prompt is a line of '
        'text or an object {"prompt": …} or {"messages": …}, one per line or in a JSON array. Other non-null '
        "fields of the object are copied to the output. In FILE.txt every line is text",
    )
    add = parser.add_argument
    add(
        "--stop",
        action="append",
        default=[],
        type=nonempty,
        metavar="TEXT",
        help="stop before this text; may be repeated",
    )
    add("--json-schema", metavar="FILE", help="constrain the output to JSON of this schema (requires the serve extra)")
    group = parser.add_argument_group("print JSON lines (always on with --prompts)")
    add = group.add_argument
    add("--samples", type=count, default=1, metavar="N", help="samples of each prompt (default 1)")
    add(
        "--logprobs",
        type=natural,
        metavar="N",
        help="output log-probabilities of sampled tokens and of the N most likely",
    )
    add_slots(add)


def run(options: argparse.Namespace) -> None:
    """Continue one prompt and stream the text, or continue a file of prompts and print JSON lines."""
    sampling = sampling_of(options)
    if options.prompts is not None:
        lines = read_prompts(options.prompts)
    else:
        lines = [PromptLine(sys.stdin.read() if options.prompt == "-" else options.prompt, 1, {})]
    if not lines or not lines[0].prompt:
        raise ValueError(f"{options.prompts} contains no prompts" if options.prompts else "the prompt is empty")
    model, tokenizer = loading.load(options)
    recommended_fields = effective_fields(model.generation_config)[0]
    if sampling == GREEDY and recommended_fields:
        fields = format_fields(recommended_fields)
        say("generation_config.json recommends %s: chat and serve apply it, generate uses only its options", fields)
    if options.prompts is not None or options.samples > 1 or options.logprobs is not None:
        for line in json_lines(model, tokenizer, lines, sampling, options):
            print(line, flush=True)
    else:
        _stream(model, tokenizer, lines[0].prompt, sampling, options)


def _stream(model: Any, tokenizer: Any, prompt: Any, sampling: nnxmoe.Sampling, options: argparse.Namespace) -> None:
    """Stream the continuation of a prompt to stdout and log why it ended."""
    stop_texts, stop_ids = split_stop_strings(options.stop, tokenizer, model.vocab_size) if options.stop else ((), ())
    stream = nnxmoe.stream(
        model,
        tokenizer,
        prompt,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        seed=options.seed,
        eos_token_id=(*eos_ids(model, ...), *stop_ids),
        draft=draft_of(options.draft, model),
        constraint=grammar_of(options, tokenizer),
    )
    speed, text = Speed(), StopStringFilter(stop_texts)
    for piece in stream:
        speed.update(stream.tokens)
        print(text.add(piece), end="", flush=True)
        if text.stopped:
            break
    print(text.flush())
    if speed.tokens > 1:
        endings = {"stop": "ended by the model", "error": "ended by an error", None: "ended by --stop"}
        ending = endings.get(None if text.stopped else stream.finish, "stopped by --max-new-tokens")
        say("%d tokens, %s%s", stream.tokens, ending, speed)
    elif stream.finish == "stop" and tokenizer.chat_template is not None:
        say("the model stopped immediately; it has a chat template, so try: nnxmoe chat %s", options.model)


class PromptLine(NamedTuple):
    """A prompt of a file.

    Attributes:
        prompt: Text, token ids or chat messages.
        number: Number of the line, or of the item in a JSON array, from 1.
        fields: Other fields of the JSON object.
    """

    prompt: Any
    number: int
    fields: dict[str, Any]


def read_prompts(path: str) -> list[PromptLine]:
    """Read the prompts of a file, or of stdin if ``path`` is "-".

    Each line is a text, or a JSON object with "prompt" (text or ids) or "messages" (a chat). The file may
    also be a JSON array of such objects. Every line of a file named .txt is text.

    Raises:
        ValueError: If a line is malformed. The message has the line number.
    """
    try:
        text = sys.stdin.read().removeprefix("\ufeff") if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): save it as UTF-8") from None
    only_text = path.endswith(".txt")
    if not only_text and re.match(r"\s*\[\s*\{", text):
        prompts = [
            _record(item, f"{path}: item {number}", number)
            for number, item in enumerate(_json(text, f"{path} begins with [{{"), 1)
        ]
    else:
        prompts = _read_lines(text, path, only_text)
    duplicates = sorted({name for prompt in prompts for name in prompt.fields} & set(OUTPUT))
    if duplicates:
        logger.warning(
            "%s: output fields replace the fields %s of the prompts: rename them in the file", path, duplicates
        )
    return prompts


def _read_lines(text: str, path: str, only_text: bool) -> list[PromptLine]:
    prompts = list[PromptLine]()
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would also split inside JSON strings
        location = f"{path}: line {number}"
        if not only_text and line.lstrip().startswith("{"):
            prompts.append(_record(_json(line, f"{location} begins with {{"), location, number))
        elif line.strip():
            prompts.append(PromptLine(line.rstrip("\r"), number, {}))
    return prompts


def _json(text: str, description: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{description} but is not JSON ({error}): if it is text, rename the file to .txt") from None


def _record(record: Any, location: str, number: int) -> PromptLine:
    if not isinstance(record, dict):
        raise ValueError(f"{location}: each item of the array must be an object, got {record!r:.60}")
    fields = {name: value for name, value in record.items() if value is not None}
    names = {"prompt", "messages"} & fields.keys()
    if len(names) != 1:
        raise ValueError(f'{location}: use exactly one of "prompt" and "messages", got {sorted(fields)}')
    name = names.pop()
    prompt = fields.pop(name)
    if name == "prompt" and prompt == "":
        raise ValueError(f"{location}: prompt is empty")
    item_type, expected_type = (int, "a text or a list of ids") if name == "prompt" else (dict, "a list of messages")
    is_list = isinstance(prompt, list) and prompt and all(isinstance(item, item_type) for item in prompt)
    if not is_list and not (name == "prompt" and isinstance(prompt, str)):
        raise ValueError(f"{location}: {name} must be {expected_type}, got {prompt!r:.60}")
    return PromptLine(prompt, number, fields)


def grammar_of(options: argparse.Namespace, tokenizer: Any) -> nnxmoe.Grammar | None:
    """Build the grammar of ``--json-schema``, if set. Raises ValueError if the schema is malformed."""
    if options.json_schema is None:
        return None
    try:
        return nnxmoe.Grammar.json_schema(Path(options.json_schema).read_text(encoding="utf-8-sig"), tokenizer)
    except ValueError as error:
        raise ValueError(f"{options.json_schema}: {error}") from None


def json_lines(
    model: Any, tokenizer: Any, lines: Sequence[PromptLine], sampling: nnxmoe.Sampling, options: argparse.Namespace
) -> Iterator[str]:
    """Yield one JSON line per completion, in the order of the prompts."""
    completions = nnxmoe.complete(
        model,
        [line.prompt for line in lines],
        tokenizer,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        n=options.samples,
        stop=options.stop,
        seed=options.seed,
        logprobs=options.logprobs,
        draft=draft_of(options.draft, model),
        constraint=grammar_of(options, tokenizer),
        slots=options.slots,
    )
    total, tokens = len(lines) * options.samples, 0
    # On a terminal, a progress bar would mix with the output lines.
    disable: Any = {"disable": True} if sys.stdout.isatty() else {}
    for completion in tqdm(completions, "generating", total, unit="answer", dynamic_ncols=True, delay=1, **disable):
        tokens += len(completion.ids)
        yield json.dumps(_fields(completion, lines[completion.prompt], tokenizer, options), ensure_ascii=False)
    say("%d prompt%s, %d new tokens", len(lines), "s" * (len(lines) != 1), tokens)


def _fields(
    completion: nnxmoe.Completion, line: PromptLine, tokenizer: Any, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the fields of an output line: the fields of the prompt, then the fields of the completion."""
    name = "messages" if isinstance(line.prompt, list) and isinstance(line.prompt[0], dict) else "prompt"
    fields = {**line.fields, "index": completion.prompt, name: line.prompt, "line": line.number}
    fields |= {"text": completion.text, "finish_reason": completion.finish, "ids": completion.ids}
    if options.samples > 1:
        fields["sample"] = completion.sample
    if options.logprobs is not None:
        fields["logprobs"] = completion.logprobs
        if options.logprobs:
            fields["top_logprobs"] = [
                [[tokenizer.decode([token]), token, value] for token, value in top] for top in completion.top
            ]
    return fields
