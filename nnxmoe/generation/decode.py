"""Prefill and decode: ``generate`` for batches of ids, ``stream`` for text, piece by piece.

A prompt is read in chunks of two sizes, and batches and caches are rounded up to a few sizes, so that new lengths
seldom need a new program. Each step is dispatched before the previous step's token is read: as one program, or as
calls of a few layers each (`nnxmoe.model.by_run`).
"""

import functools
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from nnxmoe.axes import batch_axes, constrain, everywhere, shards
from nnxmoe.generation.sampling import Knobs, Sampling, Steps, pick, prepare
from nnxmoe.generation.text import TextStream
from nnxmoe.layers.cache import Cache
from nnxmoe.model.by_run import RunByRun, pays
from nnxmoe.model.causal_lm import CausalLM, bucket, decoder_of, refuse_shapes, unscan
from nnxmoe.model.decoder import Decoder, Ids, TokenMask, nothing
from nnxmoe.model.stack import ScannedStack
from nnxmoe.runtime.memory import local_bytes, memory_bytes, refuse_beyond_memory
from nnxmoe.runtime.processes import deadline
from nnxmoe.runtime.progress import logger, say

SMALL, LARGE = 64, 512  # tokens per chunk of a prompt
MOST_SMALL = 6  # small chunks that are less work than a large one
SMALLEST_CACHE, SMALLEST_BATCH = 512, 8  # tokens, for up to 8 rows; rows, if there are several

Item = TypeVar("Item")
Eos = int | np.integer | Sequence[int] | None | EllipsisType


def generate(
    model: CausalLM,
    tokens: Integer[Any, "B T"] | Sequence[Sequence[int]],
    attention_mask: Any = None,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    eos_token_id: Eos = ...,
    seed: int = 0,
) -> Integer[np.ndarray, "B T_plus_new"]:
    """Prompts ``[B, T]`` followed by up to ``max_new_tokens`` new ids; stops early once every row has ended.

    ``attention_mask`` is 0 at padding, on either side. ``sampling`` None: greedy. ``eos_token_id`` default: the
    checkpoint's; None: never stop. Ended rows are padded with the checkpoint's pad id (else its eos id). Deterministic
    for a given seed. Raises ValueError for ids outside the vocabulary, empty prompts and masks of another shape.
    """
    tokens = _ids(tokens)
    eos = eos_ids(model, eos_token_id)
    pad = _pad_id(model, eos)
    columns, finished = [], np.zeros(len(tokens), bool)
    for new in generate_tokens(model, tokens, attention_mask, max_new_tokens, sampling, seed):
        columns.append(np.where(finished, pad, new))
        finished |= np.isin(new, eos)
        if eos and finished.all():
            break
    return np.concatenate([tokens, *(c[:, None].astype(tokens.dtype) for c in columns)], axis=1)


def stream(
    model: CausalLM,
    tokenizer: Any,
    prompt: str | Sequence[int],
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    eos_token_id: Eos = ...,
    seed: int = 0,
) -> "Stream":
    """Yields the continuation of one prompt (text or token ids) in pieces of text, without the end token.

    The prompt's text followed by the pieces is the decoded text of all ids, so the first piece may start with a space.
    ``tokenizer``: a `Tokenizer`, or one of transformers.
    """
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    new = generate_tokens(model, _ids([ids]), None, max_new_tokens, sampling, seed)
    return Stream(new, eos_ids(model, eos_token_id), TextStream(tokenizer, context=ids))


class Stream(Iterator[str]):
    """Pieces of text as they are generated. ``tokens``: how many new tokens there are so far; ``ended``: whether the
    last one was an end token, which has no text."""

    def __init__(self, tokens: Iterator[Any], eos: tuple[int, ...], text: TextStream) -> None:
        self.tokens, self.ended = 0, False
        self._pieces = self._decoded(tokens, eos, text)

    def _decoded(self, tokens: Iterator[Any], eos: tuple[int, ...], text: TextStream) -> Generator[str, None, None]:
        for new in tokens:
            self.tokens += 1
            self.ended = int(new[0]) in eos
            if self.ended:
                break
            if piece := text.put(int(new[0])):
                yield piece
        if piece := text.end():
            yield piece

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop generating."""
        self._pieces.close()


def generate_tokens(
    model: CausalLM,
    tokens: Integer[np.ndarray, "B T"],
    attention_mask: Any,
    max_new_tokens: int,
    sampling: Sampling | None,
    seed: int,
) -> Iterator[Int[np.ndarray, "B"]]:
    """Yields the next id of every row ``max_new_tokens`` times; does not stop at end tokens."""
    if isinstance(max_new_tokens, bool) or not float(max_new_tokens).is_integer() or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be an integer >= 0, got {max_new_tokens!r}")
    max_new_tokens = int(max_new_tokens)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must fit in 64 bits, got {seed}")
    vocab = model.embed.table.shape[0]
    if tokens.min() < 0 or tokens.max() >= vocab:
        bad = tokens.min() if tokens.min() < 0 else tokens.max()
        raise ValueError(f"token ids must lie in 0 … {vocab - 1}, got {bad}: is this the model's tokenizer?")
    if max_new_tokens == 0:
        return
    ids, valid = left_aligned(tokens, attention_mask)
    (rows, length), limit = ids.shape, model.config.max_position_embeddings
    if length + max_new_tokens > limit:
        logger.warning("prompt and new tokens exceed the %d positions (max_position_embeddings) of this model", limit)
    decoder = decoder_of(_unrolled(model))
    graph, state = nnx.split(decoder)
    leaves, tree = jax.tree.flatten(state)
    refuse_shapes(leaves)
    few = rows <= SMALLEST_BATCH  # of many rows, padding would take longer than to compile another program
    capacity = bucket(length + max_new_tokens, SMALLEST_CACHE if few else SMALL)
    batch = _batch(model, rows, capacity)
    real = None if batch == 1 else (np.arange(batch) < rows)[:, None]
    chunked = model.separates_tokens() and (few or length > LARGE)
    chunks = chunk_sizes(length) if chunked else [bucket(length, 16)]
    padding = ((0, batch - rows), (sum(chunks) - length, 0))
    ids, valid = np.pad(ids, padding), np.pad(valid, padding)
    steps, knobs = prepare(sampling, vocab)
    programs = _programs(graph, tree)
    programs.announce(batch, capacity, [*chunks, *[1] * (max_new_tokens > 1)], steps)
    run = programs.of(decoder, leaves)
    key = jax.random.key(seed)
    with deadline("compiling, and computing the first new token"):
        token: Any = None
        dropped, memory = np.int32(0), None
        for end, size in zip(np.cumsum(chunks), chunks, strict=True):
            part = ids[:, end - size : end], valid[:, end - size : end]
            token, dropped, memory = run(*part, dropped, memory, capacity, steps, knobs, key, np.int32(0))
        new = np.asarray(token)[:, 0]

    def following(token: Array, count: Any, memory: Memory | None) -> Iterator[tuple[Array, Array]]:
        for i in range(1, max_new_tokens):
            token, count, memory = run(token, real, count, memory, capacity, steps, knobs, key, np.int32(i))
            yield token, count

    started = _one_ahead(following(token, dropped, memory))
    try:
        yield new[:rows]
        for _ in range(1, max_new_tokens):
            with deadline("computing a new token"):
                token, dropped = next(started)
                new = np.asarray(token)[:, 0]
            yield new[:rows]
    finally:  # the count is not donated, so it can be read even after an interrupted step
        if count := int(dropped):
            logger.warning("%d assignments to experts were dropped: %s", count, model.strategy.dispatch)


def _one_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yields the items, computing one ahead, so that the device has its next step while Python reads the last one."""
    for now in items:
        for after in items:
            yield now
            now = after
        yield now


def _batch(model: CausalLM, rows: int, capacity: int) -> int:
    """The number of rows to compute: 1, 8, 12, 16, … and a multiple of the shards, or fewer if memory is short.

    Raises ValueError if their cache does not fit in memory.
    """
    parts, (have, _) = shards(model.strategy.mesh, batch_axes(model.strategy.mesh)), memory_bytes()
    for batch in (rows if rows == 1 else bucket(rows, SMALLEST_BATCH), rows):
        batch += -batch % parts
        buffers = jax.eval_shape(lambda batch=batch: jax.tree.leaves(model.empty_cache(batch, capacity).layers))
        need = local_bytes((b.shape, b.dtype, None) for b in buffers)
        if need <= have:
            return batch
    what = f"a cache of {capacity} tokens for batch {batch} takes"
    refuse_beyond_memory(need, what, "use fewer max_new_tokens or a smaller batch")
    return batch


# Scanned models, each with the structure and the arrays of which its unrolled copy was made, and that copy.
_copies: "weakref.WeakKeyDictionary[CausalLM, tuple[Any, list[weakref.ref[Any]], CausalLM]]"
_copies = weakref.WeakKeyDictionary()


def _unrolled(model: CausalLM) -> CausalLM:
    """The model with arrays of their own for all layers, if memory permits: a scan copies its slices in every step.

    The copy is kept as long as the model and its arrays.
    """
    scanned = [nnx.state(stack) for stack in model.stacks if isinstance(stack, ScannedStack)]
    if not scanned:
        return model
    graph, state = nnx.split(model)
    leaves, (before, arrays, copy) = jax.tree.leaves(state), _copies.pop(model, (None, [], model))
    if before == graph and all(kept() is leaf for kept, leaf in zip(arrays, leaves, strict=True)):
        _copies[model] = before, arrays, copy
        return copy
    del copy
    need = local_bytes((a.shape, a.dtype, None) for a in jax.tree.leaves(scanned))
    have, where = memory_bytes()
    if need <= have:
        _copies[model] = graph, [weakref.ref(leaf) for leaf in leaves], unscan(model)
        return _copies[model][-1]
    logger.warning(
        "the layers are scanned, which decodes slowly, and %s (%.1f GB) has no room for a copy of %.1f GB: load the "
        "model with Strategy(stacking=Unrolled())",
        where,
        have / 1e9,
        need / 1e9,
    )
    return model


class Memory(NamedTuple):
    """State carried between steps: the cache and, with a repetition penalty, the mask of ids seen so far."""

    cache: Cache
    seen: Bool[Array, "B V"] | None


def _pass(
    forward: Decoder | RunByRun,
    choose: Callable[..., Any],
    ids: Ids,
    valid: TokenMask | None,
    dropped: Any,
    memory: Memory | None,
    capacity: int,
    steps: Steps,
    knobs: Knobs,
    key: Key[Array, ""],
    step: Any,
) -> tuple[Int[Array, "B 1"], Int[Array, ""], Memory]:
    """One pass over a chunk of the prompt (``memory`` None: the first one) or over the last token: the next token,
    the assignments dropped so far, and the memory."""
    cache = forward.empty_cache(ids.shape[0], capacity) if memory is None else memory.cache
    seen = None if memory is None else memory.seen
    options: dict[str, Any] = {"fresh": memory is None, "last": ids.shape[1] > 1, "keep_hidden": False}
    body = forward.body(ids, valid, cache=cache, of_routing=nothing, **options)
    counts = [info.dispatch.dropped for info in body.infos.values()]
    logits = forward.logits(body.x)
    token, dropped, seen = choose(logits, seen, ids, valid, dropped, counts, steps, knobs, key, step)
    assert body.cache is not None
    return token, dropped, Memory(body.cache, seen)


def _choose(
    logits: Float[Array, "B 1 V"],
    seen: Bool[Array, "B V"] | None,
    ids: Ids,
    valid: TokenMask | None,
    dropped: Any,
    counts: list[Int[Array, ""]],
    steps: Steps,
    knobs: Knobs,
    key: Key[Array, ""],
    step: Any,
) -> tuple[Int[Array, "B 1"], Int[Array, ""], Bool[Array, "B V"] | None]:
    logits = logits[:, 0]
    if steps.penalty:
        seen = jnp.zeros(logits.shape, bool) if seen is None else seen
        seen = seen.at[jnp.arange(ids.shape[0])[:, None], ids].max(True if valid is None else valid)
    token = pick(logits, seen, steps, knobs, jax.random.fold_in(key, step))
    return token[:, None], sum(counts, dropped), seen


class _Programs:
    """The compiled passes of one model structure; the weights are arguments of every call."""

    def __init__(self, graph: Any, tree: Any):
        self._structure, self._known = (graph, tree), set[Any]()

        def whole(leaves: list[Array], ids: Array, *given: Any) -> tuple[Array, Array, Memory]:
            decoder = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
            ids = constrain(ids, decoder.mesh, batch_axes(decoder.mesh))
            token, dropped, memory = _pass(decoder, _choose, ids, *given)
            return everywhere(token, decoder.mesh), everywhere(dropped, decoder.mesh), memory

        self.whole = jax.jit(whole, static_argnums=(5, 6), donate_argnums=(4,))
        self.choose = jax.jit(_choose, static_argnums=(6,))

    def of(self, decoder: Decoder, leaves: list[Array]) -> Callable[..., tuple[Array, Array, Memory]]:
        """`_pass` with the decoder's arrays, as one program or several."""
        if pays(decoder):
            return functools.partial(_pass, RunByRun(decoder, *self._structure, leaves, donate=True), self.choose)
        return functools.partial(self.whole, leaves)

    def announce(self, batch: int, capacity: int, sizes: list[int], steps: Steps) -> None:
        """Log that the next calls will compile, if they will."""
        wanted = {(batch, capacity, steps, size, i == 0) for i, size in enumerate(sizes)}
        if new := wanted - self._known:
            self._known |= new
            say(
                "compiling for %d sizes of input, batch %d and up to %d tokens (once per such size)",
                len(new),
                batch,
                capacity,
            )


_programs = functools.lru_cache(maxsize=16)(_Programs)


def chunk_sizes(length: int) -> list[int]:
    """Sizes of the chunks in which a prompt is read: as many of `LARGE` as it fills, then as few of `SMALL` as hold the
    rest, or one `LARGE` where that is less work."""
    large, rest = divmod(length, LARGE)
    small = -(-rest // SMALL)
    return [LARGE] * large + ([SMALL] * small if small <= MOST_SMALL else [LARGE])


def left_aligned(tokens: Integer[np.ndarray, "B T"], mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """Ids and validity mask with all padding moved to the left, as long as the longest row."""
    valid = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask) != 0
    if valid.shape != tokens.shape:
        raise ValueError(f"attention_mask must have the tokens' shape {list(tokens.shape)}, got {list(valid.shape)}")
    if not valid.any(axis=1).all():
        raise ValueError(f"row {int(np.argmin(valid.any(axis=1)))} of the prompts has no tokens")
    order = np.argsort(valid, axis=1, kind="stable")
    ids, valid = np.take_along_axis(tokens, order, axis=1), np.take_along_axis(valid, order, axis=1)
    keep = int(valid.sum(axis=1).max())
    ids, valid = ids[:, -keep:], valid[:, -keep:]
    return np.where(valid, ids, 0).astype(np.int32), valid


def eos_ids(model: CausalLM, eos_token_id: Eos) -> tuple[int, ...]:
    """The ids that end a sequence; ``...`` reads them from generation_config.json, else config.json."""
    if eos_token_id is ...:
        eos_token_id = model.generation_config.get("eos_token_id", model.config.eos_token_id)
    if eos_token_id is None:
        return ()
    return (int(eos_token_id),) if isinstance(eos_token_id, int | np.integer) else tuple(int(i) for i in eos_token_id)  # pyright: ignore


def _pad_id(model: CausalLM, eos: tuple[int, ...]) -> int:
    pad = model.generation_config.get("pad_token_id", model.config.pad_token_id)
    return int(pad) if pad is not None and pad >= 0 else (eos[0] if eos else 0)  # -1: none, in old checkpoints


def _ids(tokens: Any) -> np.ndarray:
    if isinstance(tokens, list | tuple) and len({np.size(row) for row in tokens}) > 1:
        lengths = [np.size(row) for row in tokens]
        raise ValueError(f"the rows of tokens have lengths {lengths}: pad them to one length and give attention_mask")
    ids = np.asarray(tokens)
    if ids.size == 0:
        raise ValueError(f"the prompt is empty: tokens {list(ids.shape)} need at least one row and one token")
    if ids.dtype.kind in "US":
        raise ValueError("tokens are text: give [tokenizer.encode(text)], or use nnxmoe.stream(model, tokenizer, text)")
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"tokens must be integers [B, T], got {ids.dtype} {list(ids.shape)}; one prompt is [ids]")
    return ids
