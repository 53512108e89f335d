"""Generate ids for a batch of prompts (``generate``), or stream the text of one prompt (``stream``).

Both use an `Engine`. Batch and cache sizes are rounded up to a few sizes, so new lengths rarely trigger
a compilation.
"""

import dataclasses
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Integer

from nnxmoe.config.arguments import reject_unknown_arguments
from nnxmoe.config.printable import short
from nnxmoe.config.validate import check_type
from nnxmoe.generation.complete import Prompt, cache_capacity, encode_prompt
from nnxmoe.generation.draft_cost import DraftOption
from nnxmoe.generation.engine import Engine
from nnxmoe.generation.grammar import Constraint
from nnxmoe.generation.grouping import LARGE, MIN_ROWS, SMALL, SMALL_BATCH, SMALLEST_CACHE, PrefillGroup, chunk_sizes
from nnxmoe.generation.ids import EosIds, as_token_ids, check_ids, eos_ids
from nnxmoe.generation.passes import CacheSize, cache_bytes, fits
from nnxmoe.generation.request import Finish, Request, RequestOptions
from nnxmoe.generation.request_routing import pad_routing
from nnxmoe.generation.sampling import Sampling, warn_of_unused
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.program import bucket_size
from nnxmoe.runtime.progress import logger
from nnxmoe.tokenizer.tokenizer import TextStream


@reject_unknown_arguments
def generate(
    model: CausalLM,
    tokens: Integer[Any, "B T"] | Sequence[Sequence[int]],
    attention_mask: Any = None,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    eos_token_id: EosIds = ...,
    seed: int = 0,
    draft: DraftOption = None,
    return_routing: bool = False,
) -> Integer[np.ndarray, "B T_plus_new"] | Any:
    """Continue a batch of prompts until all rows have ended.

    Deterministic for a given seed. A row ends early, with a warning, if its logits are NaN or infinite.

    Args:
        tokens: prompts, [B, T].
        attention_mask: 0 for padding, on either side.
        sampling: sampling options. If None, decoding is greedy.
        eos_token_id: ids that end a row. Defaults to the checkpoint's EOS tokens. If None, no id ends a
            row.
        draft: see `Engine`.
        return_routing: whether to also return the experts of each token.

    Returns:
        Prompts followed by up to ``max_new_tokens`` ids. Ended rows are padded with the checkpoint's
        pad id, or with its EOS id if there is no pad id. The dtype is the dtype of the prompts, or int32 if the prompts
        have a narrower dtype. With ``return_routing``, a tuple ``(ids, routing)``. ``routing [B, T_plus_new, L, X]``
        has the X experts of each token in the L MoE layers, in the smallest signed dtype. It is -1 for padding and for
        the last id of a row, which was never an input. It is None for dense models, or if there are no new ids.

    Raises:
        ValueError: if ids are outside the vocabulary, a prompt is empty, or the mask and ``tokens`` differ in
            shape. Raised before computation starts.
    """
    check_type("model", model, CausalLM, "a model, such as nnxmoe.from_pretrained(path)")
    tokens, eos = _ids(tokens), eos_ids(model, eos_token_id)
    warn_of_unused(model, sampling)
    options = RequestOptions(max_new_tokens, 0, sampling, eos, seed, return_routing=return_routing)
    # Dynamic NTK scaling depends on the longest row of the batch. transformers keeps extending finished rows. With
    # dynamic scaling, finished rows are therefore extended here too.
    end_ids = set(eos) if model.has_dynamic_rope and len(tokens) > 1 else set[int]()
    if end_ids and sampling is not None and sampling.min_new_tokens_after(0):
        raise ValueError(
            f"{sampling}: with dynamic rotary embeddings, finished rows keep growing, so min_new_tokens and "
            "min_length are not supported for several rows. Generate one row at a time"
        )
    engine_options = dataclasses.replace(options, stop_ids=None) if end_ids else options
    engine, requests = _requests(model, tokens, attention_mask, engine_options, draft)
    new_ids = _run(engine, requests, end_ids)
    padded_ids = np.full((len(tokens), max(map(len, new_ids))), _pad_id(model, eos), tokens.dtype)
    for row, ids in zip(padded_ids, new_ids, strict=True):
        row[: len(ids)] = ids
    output_ids = np.concatenate([tokens, padded_ids], axis=1)
    if not return_routing:
        return output_ids
    mask = np.ones(tokens.shape) if attention_mask is None else np.asarray(attention_mask)
    is_input = np.concatenate([mask != 0, np.ones(padded_ids.shape, bool)], axis=1)
    counts = [len(request.prompt) + len(ids) - 1 for request, ids in zip(requests, new_ids, strict=True)]
    return output_ids, pad_routing([request.routing for request in requests], counts, is_input, model.config.experts)


def _run(engine: Engine, requests: Sequence[Request], end_ids: set[int]) -> list[list[int]]:
    """Run the engine until all requests have ended. Returns the new ids up to and including the first end id."""
    try:
        while not all(request.done or not end_ids.isdisjoint(request.ids) for request in requests):
            engine.step()
    finally:
        _report_dropped(engine)
    new_ids = list[list[int]]()
    for request in requests:
        through_end = next((i + 1 for i, token_id in enumerate(request.ids) if token_id in end_ids), None)
        new_ids.append(request.ids[:through_end])
    return new_ids


@reject_unknown_arguments
def stream(
    model: CausalLM,
    tokenizer: Any,
    prompt: Prompt,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    eos_token_id: EosIds = ...,
    seed: int = 0,
    draft: DraftOption = None,
    constraint: Constraint | None = None,
) -> "Stream":
    """Stream the continuation of one prompt in pieces of text, without the EOS token.

    The text of the prompt plus all pieces equals the decoded text of all ids, so the first piece may
    start with a space. Computation starts when the first piece is read.

    Args:
        tokenizer: a `Tokenizer`, or a tokenizer of transformers.
        prompt: text, chat or token ids.
        draft: see `Engine`.
        constraint: restricts the text, for example a `Grammar`.

    Raises:
        ValueError: if an argument is invalid. Raised before the first piece is read.
    """
    check_type("model", model, CausalLM, "a model, such as nnxmoe.from_pretrained(path)")
    ids, eos = encode_prompt(prompt, tokenizer), eos_ids(model, eos_token_id)
    warn_of_unused(model, sampling)
    options = RequestOptions(max_new_tokens, 0, sampling, eos, seed, constraint=constraint)
    engine, (request,) = _requests(model, np.array([ids]), None, options, draft)
    return Stream(engine, request, eos, TextStream(tokenizer, context=ids))


class Stream(Iterator[str]):
    """Iterator over generated pieces of text.

    Attributes:
        tokens: number of new tokens so far.
        finish: None until generation ends, then the reason as in `Request`: "stop" (an EOS token that
            the text does not include), "length", "error" or "cancelled".
    """

    def __init__(self, engine: Engine, request: Request, eos: tuple[int, ...], text: TextStream) -> None:
        self.tokens: int = 0
        self.finish: Finish | None = None
        self._pieces = self._decoded(engine, request, eos, text)

    def _decoded(
        self, engine: Engine, request: Request, eos: tuple[int, ...], text: TextStream
    ) -> Generator[str, None, None]:
        try:
            while not request.done:
                for event in engine.step():
                    for token_id in event.ids:
                        self.tokens += 1
                        if token_id not in eos and (piece := text.put(token_id)):
                            yield piece
        finally:
            _report_dropped(engine)
        self.finish = request.finish
        if piece := text.end():
            yield piece

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop generation. Sets ``finish`` to "cancelled" unless generation has already ended."""
        self._pieces.close()
        self.finish = self.finish or "cancelled"


def _requests(
    model: CausalLM, tokens: np.ndarray, attention_mask: Any, options: RequestOptions, draft: DraftOption = None
) -> tuple[Engine, list[Request]]:
    """Create an engine with one request per row. All rows are prefilled and decoded together."""
    vocab = model.vocab_size
    check_ids(tokens.reshape(-1), vocab)
    ids, valid = left_pad(tokens, attention_mask)
    rows, length = ids.shape
    is_small_batch = rows <= SMALL_BATCH  # with more rows, padding costs more time than compiling a program
    capacity = cache_capacity(model, length + options.max_new_tokens, SMALLEST_CACHE if is_small_batch else SMALL)
    chunked = model.token_independent() and (is_small_batch or length > LARGE)
    sizes = chunk_sizes(length) if chunked else [bucket_size(length, 16)]
    engine = Engine(
        model,
        slots=_batch(model, rows, capacity),
        capacity=capacity,
        limits=options.required_limits(vocab),
        draft=draft,
        grouping=lambda lengths, slots: PrefillGroup(len(lengths), slots, sizes),
    )
    row_options = (dataclasses.replace(options, sample=row) for row in range(rows))
    return engine, [
        engine.submit(ids[row, valid[row]].tolist(), request_options) for row, request_options in enumerate(row_options)
    ]


def _report_dropped(engine: Engine) -> None:
    if count := engine.dropped:
        logger.warning("%d expert assignments were dropped by %s", count, engine.model.strategy.dispatch)


def _batch(model: CausalLM, rows: int, capacity: int) -> int:
    """Round the number of rows up to 1, 4, 6, 8, 12, …, or return ``rows`` if memory does not suffice."""
    batch = rows if rows == 1 else bucket_size(rows, MIN_ROWS)
    return batch if fits(model, cache_bytes(model, batch, CacheSize(capacity, 0))) else rows


def left_pad(tokens: Integer[np.ndarray, "B T"], mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """Move all padding to the left. Returns ids and the validity mask, trimmed to the longest row."""
    mask_array = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask)
    if not (mask_array.dtype == bool or jnp.issubdtype(mask_array.dtype, jnp.number)) or mask_array.dtype.kind == "c":
        raise ValueError(f"attention_mask must contain numbers or booleans, got {short(mask, 60)}")
    valid = mask_array != 0
    if valid.shape != tokens.shape:
        raise ValueError(f"attention_mask must have the tokens' shape {list(tokens.shape)}, got {list(valid.shape)}")
    if not valid.any(axis=1).all():
        raise ValueError(f"row {int(np.argmin(valid.any(axis=1)))} of the prompts has no tokens")
    order = np.argsort(valid, axis=1, kind="stable")
    ids, valid = np.take_along_axis(tokens, order, axis=1), np.take_along_axis(valid, order, axis=1)
    width = int(valid.sum(axis=1).max())
    ids, valid = ids[:, -width:], valid[:, -width:]
    return np.where(valid, ids, 0).astype(np.int32), valid


def _pad_id(model: CausalLM, eos: tuple[int, ...]) -> int:
    """Return the checkpoint's pad id, or the first EOS id if the pad id is not in the vocabulary."""
    pad = model.generation_config.get("pad_token_id", model.config.pad_token_id)
    return int(pad) if pad is not None and 0 <= pad < model.config.vocab_size else (eos[0] if eos else 0)


def _ids(tokens: Any) -> np.ndarray:
    if isinstance(tokens, list | tuple) and len({np.size(row) for row in tokens}) > 1:
        lengths = [np.size(row) for row in tokens]
        raise ValueError(
            f"the rows of tokens have lengths {lengths}: pad them to the same length and pass attention_mask"
        )
    ids = np.asarray(tokens)
    if ids.size == 0:
        raise ValueError(f"the prompt is empty: tokens of shape {list(ids.shape)} need at least one row and one token")
    if ids.dtype.kind in "US":
        raise ValueError("tokens are text: pass [tokenizer.encode(text)], or use nnxmoe.stream(model, tokenizer, text)")
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"tokens must be integers [B, T], got {ids.dtype} {list(ids.shape)}. Pass a single prompt as [ids]"
        )
    for row in tokens if isinstance(tokens, list | tuple) else ():
        if isinstance(row, list | tuple):  # NumPy would convert a bool in a list of integers to an integer
            as_token_ids(row, least=-(2**63))
    return ids if ids.dtype.itemsize >= 4 else ids.astype(np.int32)
