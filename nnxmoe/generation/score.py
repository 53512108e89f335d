"""Log-probabilities of texts under a model."""

import dataclasses
import math
import os.path
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.config.arguments import reject_unknown_arguments
from nnxmoe.config.printable import short
from nnxmoe.config.validate import check_type, iterator_of, whole_number
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

TOKENS = 4096  # Tokens per pass (rows x length), unless a single row is longer.
ROWS = (1, 8, TOKENS)  # Row counts per pass. Each count needs a separate compilation, so there are few counts.
LOGITS = 1 << 24  # Maximum number of logits in memory per device.

Text = str | Ids


@dataclasses.dataclass(frozen=True)
class Score:
    """Log-probabilities of the ids of a text, given all preceding ids.

    The first id of a text without a context has no log-probability and is omitted.

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
        """Most likely ids per position, as pairs (id, log-probability) like `Request.top`."""
        per_position = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        return [list(zip(ids, logprobs, strict=True)) for ids, logprobs in per_position]

    @property
    def total(self) -> float:
        """Sum of the log-probabilities."""
        return float(np.sum(self.logprobs, dtype=np.float64))

    @property
    def perplexity(self) -> float:
        """``exp(-total / number of ids)``, or NaN without ids."""
        return math.exp(-self.total / len(self.ids)) if self.ids else math.nan


@reject_unknown_arguments
def score(
    model: CausalLM, texts: Iterable[Text | tuple[Text, Text] | list[Text]], tokenizer: Any = None, *, top: int = 0
) -> list[Score]:
    """Compute the log-probabilities of texts or continuations, in the order of the arguments.

    Logits are computed for a few positions at a time, to limit memory. A warning reports texts with NaN
    log-probabilities.

    Args:
        texts: texts (str or token ids), or pairs ``(context, continuation)`` as tuples or lists. An
            iterator is consumed first. A pair of strings is encoded as one text, and the ids after the
            common prefix with the encoded context are scored. A token that spans both strings is
            scored.
        tokenizer: a `Tokenizer`. Defaults to the tokenizer of the checkpoint.
        top: number of most likely ids to return per position.

    Raises:
        ValueError: if a text has no ids to score. Raised before computation starts.
    """
    check_type("model", model, CausalLM, "a model, such as nnxmoe.from_pretrained(path)")
    example = 'a list of texts, such as ["Hello"]'
    if isinstance(texts, str):
        raise ValueError(f"texts={short(texts)}: pass {example}")
    vocab, listed = model.vocab_size, [*iterator_of("texts", texts, example)]
    items = map_numbered("text", listed, lambda item: _split(item, lambda: tokenizer or load_tokenizer(model), vocab))
    if (top := whole_number("top", top, 0)) > vocab:
        raise ValueError(f"top={top} is more than the {vocab} ids of the vocabulary")
    for number, (ids, start) in enumerate(items):
        if start >= len(ids):
            reason = f"its {start} ids are all context" if ids and start > 1 else "a text needs two ids, or a context"
            raise ValueError(f"text {number} has nothing to score: {reason}")
    scores: list[Score | None] = [None] * len(items)
    order = sorted(range(len(items)), key=lambda i: len(items[i][0]))
    program, num_shards = model_program(model, _score, static=(2,)), shard_count(model.mesh, batch_axes(model.mesh))
    fixed_rope_length = model.fixed_rope_length
    warn_beyond_positions(model, max((len(ids) for ids, _ in items), default=0))
    while order:
        longest = len(items[order[-1]][0])
        length = bucket_size(longest, 64)
        rows = max(1, min(TOKENS // length, next(rows for rows in ROWS if rows >= min(len(order), ROWS[-1]))))
        if fixed_rope_length is not None and longest > fixed_rope_length:
            rows = 1  # longer rows change the rotary embedding of the shorter rows
        batch, order = order[-rows:], order[:-rows]
        shape = rows + -rows % num_shards, length
        padded, valid = np.zeros(shape, np.int32), np.zeros(shape, bool)
        for row, i in enumerate(batch):
            ids, _ = items[i]
            padded[row, : len(ids)], valid[row, : len(ids)] = ids, True
        arrays = [np.asarray(a) for a in program(padded, valid, top)]
        for row, i in enumerate(batch):
            ids, start = items[i]
            scores[i] = Score(ids[start:], *(array[row, start - 1 : len(ids) - 1] for array in arrays))
    if nan_texts := [
        number for number, text_score in enumerate(scores) if text_score is not None and math.isnan(text_score.total)
    ]:
        text = "the log-probabilities of %d of %d texts (first: text %d) are NaN, because logits are NaN or infinite: "
        logger.warning(text + "%s", len(nan_texts), len(scores), nan_texts[0], unusable_logits(model))
    return [text_score for text_score in scores if text_score is not None]


def _is_text(value: Any) -> bool:
    """Return whether a value is a string, or a sequence or array of ids, but not a single id."""
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0


def _split(item: Any, tokenizer: Any, vocab: int) -> tuple[tuple[int, ...], int]:
    """Encode a text or a pair of context and continuation.

    Returns:
        The ids, and the index of the first id to score.

    Raises:
        ValueError: if the value is not a text or a pair of texts.
    """
    is_sequence = isinstance(item, tuple | list) or getattr(item, "ndim", 0) == 2
    is_pair = is_sequence and len(item) == 2 and (item[0] is None or _is_text(item[0]))
    context, text = item if is_pair else ((), item)
    if text is None or context is None:
        raise ValueError("a text to score, or its context, is None: pass a string or token ids")
    context_ids = () if isinstance(context, str) else as_token_ids(context)
    if isinstance(text, str):
        if (encode := tokenizer()) is None:
            raise ValueError("texts need a tokenizer: pass tokenizer=, or token ids")
        context_text = context if isinstance(context, str) else ""
        if context_ids:
            raise ValueError("the context is ids, but the continuation is text: pass both as text, or both as ids")
        ids = encode.encode(context_text + text)
        first_scored = len(os.path.commonprefix([encode.encode(context_text), ids])) if context_text else 1
        if not first_scored and ids:
            raise ValueError(
                f"the first token of {context_text + text!r:.60} spans the context {context_text!r:.60}, so it has no "
                "log-probability: pass a longer context"
            )
        return check_ids(tuple(ids), vocab), first_scored
    if isinstance(context, str) and context:
        raise ValueError("the context is text, but the continuation is ids: pass both as text, or both as ids")
    return check_ids((*context_ids, *as_token_ids(text)), vocab), max(1, len(context_ids))


def _score(model: CausalLM, ids: Int[Array, "B T"], valid: Bool[Array, "B T"], top: int) -> tuple[Array, ...]:
    """Score the next id at every position.

    Returns:
        Log-probability of the next id [B, T], whether it is the most likely id [B, T], the most likely
        ids [B, T, top], and the log-probabilities of these ids [B, T, top].
    """
    mesh = model.mesh
    x = model.body(shard_constraint(ids, mesh, batch_axes(mesh)), valid, request=LOGITS_ONLY).x
    kernel = model.head_weight()
    rows, length = ids.shape
    step = min(length, max(1, LOGITS // (kernel.shape[1] * -(-rows // shard_count(mesh, batch_axes(mesh))))))

    def score_chunk(chunk: tuple[Array, Array]) -> tuple[Array, ...]:
        logits, targets = kernel.matmul_f32(chunk[0]), chunk[1][..., None]
        target_logits = jnp.take_along_axis(logits, targets, axis=-1)
        log_normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        top_logits, top_ids = jax.lax.top_k(logits, top)
        return (
            (target_logits - log_normalizer)[..., 0],
            jnp.argmax(logits, axis=-1) == chunk[1],
            top_ids,
            top_logits - log_normalizer,
        )

    results = jax.lax.map(score_chunk, split_chunks(step, x, jnp.roll(ids, -1, axis=1)))
    return tuple(replicate(join_chunks(a, length), mesh) for a in results)
