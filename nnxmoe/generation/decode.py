"""Prefill and decode: ``generate`` for batches of ids, ``stream`` for text, piece by piece.

Shapes are rounded up to a few sizes and the cache is updated in place, so that new prompt lengths and new tokens seldom
recompile. Each step is one call of a jitted function over a flat list of arrays, dispatched before the previous step's
token is read.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int, Integer, Key

from nnxmoe.axes import batch_axes, constrain, everywhere, shards
from nnxmoe.generation.sampling import Knobs, Sampling, Steps, pick, prepare
from nnxmoe.generation.text import TextStream, Tokenizer
from nnxmoe.layers.cache import Cache
from nnxmoe.model.causal_lm import CausalLM, decoder_of, refuse_shapes
from nnxmoe.model.decoder import Decoder
from nnxmoe.model.stack import Body
from nnxmoe.runtime.memory import memory_bytes
from nnxmoe.runtime.processes import deadline
from nnxmoe.runtime.progress import logger, say

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
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    eos_token_id: Eos = ...,
    seed: int = 0,
) -> Iterator[str]:
    """Yields the continuation of one prompt (text or token ids) in pieces of text, without the end token.

    The prompt's text followed by the pieces is the decoded text of all ids, so the first piece may start with a space.
    """
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    eos, text = eos_ids(model, eos_token_id), TextStream(tokenizer, context=ids)
    for new in generate_tokens(model, _ids([ids]), None, max_new_tokens, sampling, seed):
        if int(new[0]) in eos:
            break
        if piece := text.put(int(new[0])):
            yield piece
    if piece := text.end():
        yield piece


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
    ids, valid = left_padded(tokens, attention_mask)
    limit = model.config.max_position_embeddings
    if int(valid.sum(axis=1).max()) + max_new_tokens > limit:
        logger.warning("prompt and new tokens exceed the %d positions (max_position_embeddings) of this model", limit)
    rows, mesh = len(ids), model.strategy.mesh
    more = -rows % shards(mesh, batch_axes(mesh))  # rows of padding that make the batch divisible by the shards
    ids, valid = (np.pad(a, ((0, more), (0, 0))) for a in (ids, valid))
    real = np.arange(rows + more) < rows if more else None
    steps, knobs = prepare(sampling, vocab)
    graph, state = nnx.split(decoder_of(model))
    leaves, tree = jax.tree.flatten(state)
    refuse_shapes(leaves)
    programs = _programs(graph, tree)
    capacity = bucket(ids.shape[1] + max_new_tokens, smallest=64)
    _check_room(model, ids.shape[0], capacity)
    programs.announce(ids.shape, capacity, steps)
    key = jax.random.key(seed)
    with deadline("compiling, and computing the first new token"):
        token, dropped, memory = programs.prefill(leaves, ids, valid, capacity, steps, knobs, key)
        new = np.asarray(token)

    def following(token: Array, count: Array, memory: Memory) -> Iterator[tuple[Array, Array]]:
        for i in range(1, max_new_tokens):
            given = token, count, real, memory
            token, count, memory = programs.decode(leaves, *given, steps, knobs, key, np.int32(i))
            yield token, count

    started = _one_ahead(following(token, dropped, memory))
    try:
        yield new[:rows]
        for _ in range(1, max_new_tokens):
            with deadline("computing a new token"):
                token, dropped = next(started)
                new = np.asarray(token)
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


def _check_room(model: CausalLM, batch: int, capacity: int) -> None:
    buffers = jax.eval_shape(lambda: jax.tree.leaves(model.empty_cache(batch, capacity).layers))
    need, (have, where) = sum(math.prod(b.shape) * b.dtype.itemsize for b in buffers), memory_bytes()
    if need > have:
        raise ValueError(
            f"a cache of {capacity} tokens for batch {batch} needs {need / 1e9:.1f} GB, "
            f"{where} is {have / 1e9:.1f} GB: "
            "use fewer max_new_tokens or a smaller batch"
        )


class Memory(NamedTuple):
    """State carried between steps: the cache and, with a repetition penalty, the mask of ids seen so far."""

    cache: Cache
    seen: Bool[Array, "B V"] | None


class _Programs:
    """The compiled prefill and decode step of one model structure; the weights are arguments of every call."""

    def __init__(self, graph: Any, tree: Any):
        self._known: set[Any] = set()

        def merge(leaves: list[Array]) -> Decoder:
            return nnx.merge(graph, jax.tree.unflatten(tree, leaves))

        def prefill(
            leaves: list[Array],
            ids: Int[Array, "B T"],
            valid: Bool[Array, "B T"],
            capacity: int,
            steps: Steps,
            knobs: Knobs,
            key: Key[Array, ""],
        ) -> tuple[Int[Array, "B"], Int[Array, ""], Memory]:
            decoder = merge(leaves)
            cache = decoder.empty_cache(ids.shape[0], capacity)
            body = decoder.body(ids, valid, cache=cache, fresh=True, last=True)
            logits = decoder.logits(body.x)[:, 0]
            rows = jnp.arange(ids.shape[0])[:, None]
            seen = jnp.zeros(logits.shape, bool).at[rows, ids].max(valid) if steps.penalty else None
            token = pick(logits, seen, steps, knobs, jax.random.fold_in(key, 0))
            assert body.cache is not None
            mesh = decoder.mesh
            return everywhere(token, mesh), everywhere(_dropped(body), mesh), Memory(body.cache, _see(seen, token))

        def decode(
            leaves: list[Array],
            token: Int[Array, "B"],
            dropped: Int[Array, ""],
            real: Bool[Array, "B"] | None,
            memory: Memory,
            steps: Steps,
            knobs: Knobs,
            key: Key[Array, ""],
            step: Int[Array, ""],
        ) -> tuple[Int[Array, "B"], Int[Array, ""], Memory]:
            decoder = merge(leaves)
            mesh = decoder.mesh
            token = constrain(token, mesh, batch_axes(mesh))
            body = decoder.body(token[:, None], None if real is None else real[:, None], cache=memory.cache)
            logits = decoder.logits(body.x)[:, 0]
            token = pick(logits, memory.seen, steps, knobs, jax.random.fold_in(key, step))
            assert body.cache is not None
            dropped = everywhere(dropped + _dropped(body), mesh)
            return everywhere(token, mesh), dropped, Memory(body.cache, _see(memory.seen, token))

        self.prefill = jax.jit(prefill, static_argnums=(3, 4))
        self.decode = jax.jit(decode, static_argnums=(5,), donate_argnums=(4,))

    def announce(self, shape: tuple[int, ...], capacity: int, steps: Steps) -> None:
        """Log that the next call will compile, if it will."""
        if (shape, capacity, steps) not in self._known:
            self._known.add((shape, capacity, steps))
            say("compiling for batch %d, prompts up to %d tokens, %d in all (once per combination)", *shape, capacity)


_programs = functools.lru_cache(maxsize=16)(_Programs)


def _dropped(body: Body) -> Int[Array, ""]:
    each: list[Array] = [info.dispatch.dropped for info in body.infos.values()]
    return sum(each, jnp.int32(0))


def _see(seen: Bool[Array, "B V"] | None, token: Int[Array, "B"]) -> Bool[Array, "B V"] | None:
    return None if seen is None else seen.at[jnp.arange(token.shape[0]), token].set(True)


def bucket(length: int, smallest: int = 16) -> int:
    """``length`` rounded up to one of 16, 24, 32, 48, 64, 96, …: at most 1.5 times ``length`` or ``smallest``."""
    size = smallest
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


def left_padded(tokens: Integer[np.ndarray, "B T"], mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """Ids and validity mask with all padding moved to the left and the length rounded up by `bucket`."""
    valid = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask) != 0
    if valid.shape != tokens.shape:
        raise ValueError(f"attention_mask must have the tokens' shape {list(tokens.shape)}, got {list(valid.shape)}")
    if not valid.any(axis=1).all():
        raise ValueError(f"row {int(np.argmin(valid.any(axis=1)))} of the prompts has no tokens")
    order = np.argsort(valid, axis=1, kind="stable")
    ids, valid = np.take_along_axis(tokens, order, axis=1), np.take_along_axis(valid, order, axis=1)
    keep = int(valid.sum(axis=1).max())
    ids, valid = ids[:, -keep:], valid[:, -keep:]
    room = ((0, 0), (bucket(keep) - keep, 0))
    return np.pad(np.where(valid, ids, 0), room).astype(np.int32), np.pad(valid, room)


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
    ids = np.asarray(tokens)
    if ids.size == 0:
        raise ValueError(f"the prompt is empty: tokens {list(ids.shape)} need at least one row and one token")
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"tokens must be integers [B, T], got {ids.dtype} {list(ids.shape)}")
    return ids
