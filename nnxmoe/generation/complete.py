"""Continue many prompts of different lengths with an `Engine`."""

import collections
import dataclasses
import os.path
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
from jaxtyping import Integer

from nnxmoe.config.arguments import reject_unknown_arguments
from nnxmoe.config.validate import as_python, check_type, whole_number
from nnxmoe.convert.files.untrusted_files import is_gguf
from nnxmoe.generation.draft_cost import DraftOption
from nnxmoe.generation.engine import Engine
from nnxmoe.generation.grammar import Constraint, Grammar
from nnxmoe.generation.grouping import SMALL, SMALLEST_CACHE
from nnxmoe.generation.ids import EosIds, Ids, as_token_ids, check_ids, eos_ids
from nnxmoe.generation.request import Finish, Prefix, Request, RequestOptions
from nnxmoe.generation.rows import LogitsProcessor
from nnxmoe.generation.sampling import Sampling, warn_of_unused
from nnxmoe.generation.stop_strings import StopStringFilter, check_stop_strings
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.program import bucket_size
from nnxmoe.tokenizer.byte_level import has_merges
from nnxmoe.tokenizer.messages import is_message
from nnxmoe.tokenizer.tokenizer import Tokenizer
from nnxmoe.tokenizer.tokenizer_files import TOKENIZER

T = TypeVar("T")
Prompt = str | Ids | Sequence[Any]  # text, token ids, or messages (dicts, dataclasses or pydantic models)


@dataclasses.dataclass(frozen=True)
class Completion:
    """Continuation of a prompt.

    Attributes:
        prompt: index of the prompt.
        sample: index of the sample among the samples of the prompt.
        prompt_ids: ids of the prompt.
        ids: new ids, including the stop id.
        text: decoded ``ids`` without special tokens, truncated before a stop string. Empty without a
            tokenizer.
        finish: "stop" for a stop id or a stop string, "length" for ``max_new_tokens``, "error" if the
            logits were NaN or infinite.
        logprobs: log-probability of each new id. See `Request`.
        top: most likely ids per position. See `Request`.
        accepted: ``accepted[n]`` is the number of steps that accepted n draft tokens.
        routing: experts of the prompt and of ``ids`` except the last. None if not requested, for dense models, or
            if there are no new ids. See `Request`.
    """

    prompt: int
    sample: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    finish: Finish
    logprobs: tuple[float, ...]
    top: tuple[list[tuple[int, float]], ...]
    accepted: Mapping[int, int]
    routing: Integer[np.ndarray, "tokens L X"] | None = None


class CompleteOptions(TypedDict, total=False):
    """Less common options of `complete`.

    Attributes:
        min_new_tokens: see `RequestOptions`.
        eos_token_id: ids that end the text. Defaults to the checkpoint's EOS tokens. If None, no id
            ends the text.
        logit_bias: see `RequestOptions`.
        logprobs: see `RequestOptions`.
        logits_processor: see `Engine`.
        draft: see `Engine`.
        constraint: see `RequestOptions`.
        schema: JSON schema that the generated text follows. Cannot be combined with ``constraint``.
        return_routing: see `RequestOptions`.
    """

    min_new_tokens: int
    eos_token_id: EosIds
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    logits_processor: LogitsProcessor | None
    draft: DraftOption
    constraint: Constraint | None
    schema: Mapping[str, Any] | bool | str | None
    return_routing: bool


@reject_unknown_arguments
def complete(
    model: CausalLM,
    prompts: Iterable[Prompt],
    tokenizer: Any = None,
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    n: int = 1,
    stop: str | Sequence[str] | None = (),
    seed: int | Sequence[int] | np.ndarray = 0,
    slots: int = 8,
    **options: Unpack[CompleteOptions],
) -> Iterator[Completion]:
    """Continue prompts and yield ``n`` samples per prompt, in the order of the prompts.

    Args:
        prompts: texts, chats (see `Tokenizer.apply_chat_template`) or token ids. An iterator is consumed before
            generation starts. A prefix of at least 64 ids that all prompts share is prefilled once.
        tokenizer: a `Tokenizer`. Defaults to the tokenizer of the checkpoint, if it has one.
        sampling: sampling options. If None, decoding is greedy.
        stop: stop strings. The text is truncated before the first stop string.
        seed: one seed, or one seed per prompt. A sample depends only on its prompt, seed and index, as in `Engine`.
        slots: maximum number of rows that are decoded together.
        options: see `CompleteOptions`.

    Raises:
        ValueError: if a prompt or an option is invalid. Raised before computation starts.
    """
    check_type("model", model, CausalLM, "a model, such as nnxmoe.from_pretrained(path)")
    prompt_list = _as_list(prompts)
    seeds, vocab, n = _seeds(seed, len(prompt_list)), model.vocab_size, whole_number("n", n, 1)
    tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
    stop_strings, stop_tokens = check_stop_strings(stop, tokenizer, vocab)
    prompt_ids = map_numbered("prompt", prompt_list, lambda prompt: check_ids(encode_prompt(prompt, tokenizer), vocab))
    base_options = RequestOptions(
        max_new_tokens,
        options.get("min_new_tokens", 0),
        sampling=sampling,
        stop_ids=(*eos_ids(model, options.get("eos_token_id", ...)), *stop_tokens),
        logit_bias={} if (biases := options.get("logit_bias")) is None else biases,
        logprobs=options.get("logprobs"),
        constraint=_constraint(options, tokenizer),
        return_routing=options.get("return_routing", False),
    )
    if not prompt_list:
        return iter(())
    warn_of_unused(model, sampling)
    slots, longest = min(whole_number("slots", slots, 1), n * len(prompt_list)), max(map(len, prompt_ids))
    engine = Engine(
        model,
        slots=slots,
        capacity=cache_capacity(model, longest + base_options.max_new_tokens, max(SMALL, SMALLEST_CACHE // slots)),
        limits=base_options.required_limits(vocab),
        logits_processor=options.get("logits_processor"),
        draft=options.get("draft"),
    )
    options_per_prompt = [dataclasses.replace(base_options, seed=prompt_seed) for prompt_seed in seeds]
    for ids, prompt_options in zip(prompt_ids, options_per_prompt, strict=True):
        engine.check(ids, prompt_options)  # once per prompt, because samples differ only in the index
    return _in_order(engine, collections.deque(_jobs(prompt_ids, options_per_prompt, n)), tokenizer, stop_strings)


def _constraint(options: CompleteOptions, tokenizer: Any) -> Constraint | None:
    """Return the constraint, or a grammar for the schema. Raises ValueError if both are set."""
    constraint, schema = options.get("constraint"), options.get("schema")
    if schema is None:
        return constraint
    if constraint is not None or tokenizer is None:
        raise ValueError("schema= needs a tokenizer and cannot be combined with constraint=")
    return Grammar.json_schema(schema, tokenizer)


def _seeds(seed: int | Sequence[int] | np.ndarray, count: int) -> list[int]:
    """Return one seed per prompt. Raises ValueError if the number of seeds differs from ``count``."""
    seed_values: Any = as_python(seed)
    is_sequence = hasattr(seed_values, "tolist") or (
        isinstance(seed_values, Sequence) and not isinstance(seed_values, str)
    )
    seeds: list[Any] = [*seed_values] if is_sequence else [seed_values] * count
    if len(seeds) != count:
        raise ValueError(f"{len(seeds)} seeds for {count} prompts: pass one seed, or one seed per prompt")
    return seeds


def cache_capacity(model: CausalLM, tokens: int, smallest: int) -> int:
    """Round ``tokens`` up to one of a few cache capacities, because each capacity needs a separate compilation.

    Rounding does not exceed the length beyond which the rotary frequencies change.
    """
    size, fixed_length = bucket_size(tokens, smallest), model.fixed_rope_length
    return size if fixed_length is None else min(size, max(tokens, fixed_length))


def _as_list(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return the prompts as a list. Raises ValueError for a single prompt that is not in a list."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) or getattr(value, "shape", None) == ()

    is_single = isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable) or is_number(prompts)
    prompt_list = [] if is_single else list(prompts)
    if is_single or any(is_number(prompt) or is_message(prompt) for prompt in prompt_list):
        raise ValueError(f"complete takes a list of prompts, got {prompts!r:.60}: pass a single prompt in a list")
    return prompt_list


def map_numbered(label: str, values: Sequence[Any], function: Callable[[Any], T]) -> list[T]:
    """Apply a function to each value. Adds the index of the value to the message of a ValueError."""
    results = list[T]()
    for number, value in enumerate(values):
        try:
            results.append(function(value))
        except ValueError as error:
            if len(values) > 1:
                error.args = (f"{label} {number}: {error}",)
            raise
    return results


# Prompt index, prompt ids, options, and the prefix shared with other prompts.
_Job = tuple[int, tuple[int, ...], RequestOptions, Prefix | None]


def _jobs(prompts: Sequence[tuple[int, ...]], options_per_prompt: Sequence[RequestOptions], n: int) -> Iterator[_Job]:
    common: Any = os.path.commonprefix(prompts) if len(prompts) > 1 else ()  # pyright: ignore
    shared = Prefix(common) if len(common) >= SMALL else None
    for number, (ids, options) in enumerate(zip(prompts, options_per_prompt, strict=True)):
        prefix = Prefix(ids, shared) if n > 1 and (shared is None or ids != shared.ids) else shared
        for sample in range(n):
            yield number, ids, dataclasses.replace(options, sample=sample), prefix


def _in_order(
    engine: Engine, waiting: collections.deque[_Job], tokenizer: Any, stop: Sequence[str]
) -> Iterator[Completion]:
    """Run the jobs and yield their completions in order.

    Submits only as many jobs as can start soon.
    """
    started = dict[Request, tuple[int, StopStringFilter]]()
    try:
        while waiting or started:
            while waiting and engine.waiting < engine.slots:
                prompt, ids, options, prefix = waiting.popleft()
                started[engine.submit(ids, options, prefix)] = prompt, StopStringFilter(stop, tokenizer, ids)
                del prefix  # lets the engine free the prefix with the last request that needs it
            for event in engine.step():
                text = started[event.request][1]
                text.add_ids(event.ids, event.finish)
                if text.stopped:
                    engine.cancel(event.request)
            while started and (oldest := next(iter(started))).done:
                yield _completion(oldest, *started.pop(oldest))
    finally:
        engine.close()


def _completion(request: Request, prompt: int, text: StopStringFilter) -> Completion:
    assert request.finish is not None
    routing = request.routing
    return Completion(
        prompt,
        request.options.sample,
        request.prompt,
        tuple(request.ids[: text.count]),
        text.text,
        "stop" if text.stopped else request.finish,
        tuple(request.logprobs[: text.count]),
        tuple(request.top[: text.count]),
        dict(request.accepted),
        None if routing is None else routing[: len(request.prompt) + text.count - 1],
    )


def encode_prompt(prompt: Prompt, tokenizer: Any) -> tuple[int, ...]:
    """Convert a text, a chat or ids to token ids. Raises ValueError if the prompt is empty."""
    if prompt is None:
        raise ValueError("a prompt is None: pass a text, a chat or token ids")
    is_text = isinstance(prompt, str)
    is_chat = not is_text and isinstance(prompt, Sequence) and len(prompt) > 0 and is_message(prompt[0])
    if (is_text or is_chat) and tokenizer is None:
        raise ValueError("text prompts need a tokenizer: pass tokenizer=, or pass token ids")
    if is_text:
        prompt = tokenizer.encode(prompt)
    elif is_chat:
        prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True)
    ids = as_token_ids(prompt)
    if not ids:
        raise ValueError("a prompt is empty: it needs at least one token")
    return ids


def load_tokenizer(model: CausalLM) -> Tokenizer | None:
    """Load the tokenizer from the model's checkpoint. Returns None if the checkpoint has no tokenizer."""
    folder = Path(model.load_report.files) if model.load_report and model.load_report.files else None
    if folder is None or not (is_gguf(folder) or os.path.exists(folder / TOKENIZER) or has_merges(folder)):
        return None
    return Tokenizer.from_pretrained(folder)
