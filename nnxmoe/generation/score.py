"""Compute log-probabilities of texts under a model."""

import dataclasses
import math
import os.path
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.config.arguments import refuses_unknown
from nnxmoe.config.validate import check_type, whole_number
from nnxmoe.generation.complete import load_tokenizer, map_numbered
from nnxmoe.generation.ids import Ids, as_token_ids, check_ids
from nnxmoe.generation.request import unusable_logits
from nnxmoe.layers.chunks import join_chunks, split_chunks
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.output import LOGITS_ONLY
from nnxmoe.model.program import bucket_size, model_program, warn_beyond_positions
from nnxmoe.runtime.progress import logger
from nnxmoe.sharding import batch_axes, replicate, shard_constraint
from nnxmoe.sharding_rules import shard_count

TOKENS = 4096  # tokens per pass (rows x length), unless a single row is longer
ROWS = (1, 8, TOKENS)  # maximum rows per pass: each size compiles a program, so there are few
LOGITS = 1 << 24  # maximum number of logits in memory per device

Text = str | Ids


@dataclasses.dataclass(frozen=True)
class Score:
    """Log-probabilities of the ids of a text, given all preceding ids.

    The first id of a text without a context has no log-probability and is left out.

    Attributes:
        ids: the scored ids.
        logprobs: log-probability per id.
        greedy: whether the id was the most likely id.
        top_ids: most likely ids per position.
        top_logprobs: log-probabilities of ``top_ids``.
    """

    ids: tuple[int, ...]
    logprobs: Float[np.ndarray, "T"]
    greedy: Bool[np.ndarray, "T"]
    top_ids: Int[np.ndarray, "T top"]
    top_logprobs: Float[np.ndarray, "T top"]

    @property
    def top(self) -> list[list[tuple[int, float]]]:
        """Pairs of the most likely ids and their log-probabilities per position, as in `Request`."""
        places = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        return [list(zip(ids, logprobs, strict=True)) for ids, logprobs in places]

    @property
    def total(self) -> float:
        """Log-probability of all ids."""
        return float(np.sum(self.logprobs, dtype=np.float64))

    @property
    def perplexity(self) -> float:
        """``exp(-total / number of ids)``, NaN without ids."""
        return math.exp(-self.total / len(self.ids)) if self.ids else math.nan


@refuses_unknown
def score(
    model: CausalLM, texts: Iterable[Text | tuple[Text, Text] | list[Text]], tokenizer: Any = None, *, top: int = 0
) -> list[Score]:
    """Compute log-probabilities of texts, or of continuations, in the given order.

    The logits of only a few positions are in memory at a time. One warning reports texts with NaN
    log-probabilities.

    Args:
        texts: texts (str or token ids), or pairs ``(context, continuation)`` as tuples or lists. An
            iterator is read to its end first. A pair of strings is encoded as one text. The scored ids
            are those after the common prefix with the encoded context. A token that spans both is
            scored.
        tokenizer: a `Tokenizer`. If None, the tokenizer of the checkpoint.
        top: number of most likely ids to return per position.

    Raises:
        ValueError: before anything is computed, if a text has no ids to score.
    """
    check_type("model", model, CausalLM, "a model, such as that of nnxmoe.from_pretrained(path)")
    if isinstance(texts, str):
        raise ValueError(f"score takes a list of texts, got {texts!r:.40}: put a single one into a list")
    vocab = model.vocab_size
    items = map_numbered("text", [*texts], lambda item: _split(item, lambda: tokenizer or load_tokenizer(model), vocab))
    if (top := whole_number("top", top, 0)) > vocab:
        raise ValueError(f"top={top} is more than the {vocab} ids of the vocabulary")
    for number, (ids, first) in enumerate(items):
        if first >= len(ids):
            why = f"its {first} ids of context are all" if ids and first > 1 else "it needs two ids, or a context"
            raise ValueError(f"text {number} has nothing to score: {why}")
    scores: list[Score | None] = [None] * len(items)
    order = sorted(range(len(items)), key=lambda i: len(items[i][0]))
    program, parts = model_program(model, _score, static=(2,)), shard_count(model.mesh, batch_axes(model.mesh))
    fixed = model.fixed_positions
    warn_beyond_positions(model, max((len(ids) for ids, _ in items), default=0))
    while order:
        longest = len(items[order[-1]][0])
        length = bucket_size(longest, 64)
        rows = max(1, min(TOKENS // length, next(rows for rows in ROWS if rows >= min(len(order), ROWS[-1]))))
        if fixed is not None and longest > fixed:
            rows = 1  # longer rows change the rotary embedding of the shorter rows
        batch, order = order[-rows:], order[:-rows]
        shape = rows + -rows % parts, length
        padded, valid = np.zeros(shape, np.int32), np.zeros(shape, bool)
        for row, i in enumerate(batch):
            ids, _ = items[i]
            padded[row, : len(ids)], valid[row, : len(ids)] = ids, True
        found = [np.asarray(a) for a in program(padded, valid, top)]
        for row, i in enumerate(batch):
            ids, first = items[i]
            scores[i] = Score(ids[first:], *(each[row, first - 1 : len(ids) - 1] for each in found))
    if broken := [number for number, one in enumerate(scores) if one is not None and math.isnan(one.total)]:
        text = (
            "the log-probabilities of %d of %d texts, of number %d first, are NaN, because logits are NaN or infinite: "
        )
        logger.warning(text + "%s", len(broken), len(scores), broken[0], unusable_logits(model))
    return [one for one in scores if one is not None]


def _is_text(value: Any) -> bool:
    """Return whether a value is a string, or a sequence or array of ids. A single id is not."""
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0


def _split(item: Any, tokenizer: Any, vocab: int) -> tuple[tuple[int, ...], int]:
    """Encode a text or a pair.

    Returns:
        The ids, and the index of the first id to score.

    Raises:
        ValueError: if the value is not a text or a pair of texts.
    """
    pair = isinstance(item, tuple | list) and len(item) == 2 and (item[0] is None or _is_text(item[0]))
    context, text = item if pair else ((), item)
    if text is None or context is None:
        raise ValueError("a text to score, or its context, is None: give a string or token ids")
    known = () if isinstance(context, str) else as_token_ids(context)
    if isinstance(text, str):
        if (encode := tokenizer()) is None:
            raise ValueError("texts need a tokenizer: pass tokenizer=, or token ids")
        before = context if isinstance(context, str) else ""
        if known:
            raise ValueError("a context of ids with a continuation of text: give both as text, or both as ids")
        ids = encode.encode(before + text)
        first = len(os.path.commonprefix([encode.encode(before), ids])) if before else 1
        if not first and ids:
            raise ValueError(
                f"the first token of {before + text!r:.60} spans the context {before!r:.60}, and has no "
                "log-probability: give a longer context"
            )
        return check_ids(tuple(ids), vocab), first
    if isinstance(context, str) and context:
        raise ValueError("a context of text with a continuation of ids: give both as text, or both as ids")
    return check_ids((*known, *as_token_ids(text)), vocab), max(1, len(known))


def _score(model: CausalLM, ids: Int[Array, "B T"], valid: Bool[Array, "B T"], top: int) -> tuple[Array, ...]:
    """Score the next id of every position.

    Returns:
        Arrays [B, T]: log-probability of the next id, and whether it is the most likely id. Arrays [B,
        T, top]: most likely ids, and their log-probabilities.
    """
    mesh = model.mesh
    x = model.body(shard_constraint(ids, mesh, batch_axes(mesh)), valid, request=LOGITS_ONLY).x
    kernel = model.head_weight()
    rows, length = ids.shape
    step = min(length, max(1, LOGITS // (kernel.shape[1] * -(-rows // shard_count(mesh, batch_axes(mesh))))))

    def some(given: tuple[Array, Array]) -> tuple[Array, ...]:
        logits, targets = kernel.matmul_f32(given[0]), given[1][..., None]
        chosen = jnp.take_along_axis(logits, targets, axis=-1)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        most, which = jax.lax.top_k(logits, top)
        return (chosen - total)[..., 0], jnp.argmax(logits, axis=-1) == given[1], which, most - total

    found = jax.lax.map(some, split_chunks(step, x, jnp.roll(ids, -1, axis=1)))
    return tuple(replicate(join_chunks(a, length), mesh) for a in found)
