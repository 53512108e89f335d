"""State of a batch of requests on the device, and the decoding step that updates it.

Rows are independent. The ids of a row depend on its prompt, its options and its random key (seed, sample
index, number of new ids). They do not depend on the index of the row or on other rows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from nnxmoe.axes import AnyMesh
from nnxmoe.generation.sampling import DynamicSampling, StaticSampling, generated_counts, sample_ids
from nnxmoe.layers.cache_buffer import write_slots
from nnxmoe.sharding import replicate

# State of a row: still running, or ended by a stop id, the limit of new ids, or NaN or infinite logits.
RUNNING, STOPPED, FULL, BROKEN = 0, 1, 2, 3


class RowParams(NamedTuple):
    """Options of the requests as arrays, one row per request.

    Attributes:
        dynamic: values of the sampling options.
        key: data of a random key.
        sample: index of the sample among the samples of one prompt.
        max_new_tokens: maximum number of new ids.
        min_new_tokens: minimum number of new ids before a stop id can be sampled.
        stop_ids: ids that end the row, padded with -1.
        biased: ids whose logits are biased, padded with the vocabulary size.
        biases: values that are added to the logits of ``biased``.
        logprobs: number of most likely ids to report, -1 for no log-probabilities.
    """

    dynamic: DynamicSampling
    key: Any
    sample: Any
    max_new_tokens: Any
    min_new_tokens: Any
    stop_ids: Any
    biased: Any
    biases: Any
    logprobs: Any


class History(NamedTuple):
    """Prompt ids and new ids of every row.

    Attributes:
        ids: ``ids[b, i]`` is valid for ``i < length[b]``.
        length: number of ids per row.
        new_count: number of new ids per row.
    """

    ids: Int[Array, "B C"]
    length: Int[Array, "B"]
    new_count: Int[Array, "B"]


Masks = UInt32[Array, "B W words"]  # Bit v % 32 of word v // 32 is set if id v is allowed, as in llguidance.
LogitsProcessor = Callable[[Float[Array, "B V"], History], Float[Array, "B V"]]  # Logits -> logits.


class StepOptions(NamedTuple):
    """Static options of the compiled step.

    Attributes:
        sampling: sampling operations that any row needs.
        max_logprobs: number of most likely ids whose log-probabilities are reported. If None, no
            log-probabilities are computed.
        tempered_logprobs: whether the logits are divided by the temperature before log-probabilities are computed.
        logits_processor: applied to the logits, or None.
        mesh: mesh of the model, or None.
    """

    sampling: StaticSampling
    max_logprobs: int | None
    tempered_logprobs: bool
    logits_processor: LogitsProcessor | None
    mesh: AnyMesh | None


class RowStates(NamedTuple):
    """State of all rows between two steps.

    Attributes:
        params: options of the rows.
        history: prompt and new ids.
        ids: input of the next pass: the last id of the history and its drafts. The last id is not in
            the cache yet.
        active: whether the row is running.
        memory: memory of the draft, or None.
    """

    params: RowParams
    history: History
    ids: Int[Array, "B W"]
    active: Bool[Array, "B W"]
    memory: Any


class RowReport(NamedTuple):
    """Result of a step.

    Attributes:
        ids: new ids, of which the first ``new_count`` are valid.
        new_count: number of new ids per row. 0 if the logits are NaN or infinite.
        end: why the row ended, or `RUNNING`.
        drafts: drafts of the next step.
        logprobs: log-probabilities of ``ids`` under the model's distribution, before options other than
            ``tempered_logprobs`` are applied.
        top_ids: most likely ids per position.
        top_logprobs: log-probabilities of ``top_ids``.
    """

    ids: Int[Array, "B W"]
    new_count: Int[Array, "B"]
    end: Int[Array, "B"]
    drafts: Int[Array, "B K"]
    logprobs: Float[Array, "B W"] | None
    top_ids: Int[Array, "B W top"] | None
    top_logprobs: Float[Array, "B W top"] | None


class StepInputs(NamedTuple):
    """Inputs of sampling other than the logits.

    Attributes:
        params: options of the rows.
        history: prompt and new ids.
        options: static options of the compiled step.
    """

    params: RowParams
    history: History
    options: StepOptions

    def sample(
        self,
        logits: Float[Array, "B V"],
        drafts: Int[Array, "B K"],
        allowed: UInt32[Array, "B words"] | None = None,
    ) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
        """Sample the id after the drafts, assuming that all drafts are accepted.

        A step without drafts samples the same ids.

        Args:
            logits: logits after the drafts.
            drafts: ids that follow the history.
            allowed: bit masks of the allowed ids, or None.

        Returns:
            The ids, and whether the largest logit of each row is finite.
        """
        params, static = self.params, self.options.sampling
        row = jnp.arange(logits.shape[0])[:, None]
        history = _append_drafts(self.history, drafts)
        scores = _process_logits(logits, history, params, self.options)
        if allowed is not None:
            scores = _masked(scores, logits, allowed)
        seen = counts = None
        if static.penalty:
            is_id = jnp.arange(history.ids.shape[1])[None] < history.length[:, None]
            seen = jnp.zeros(scores.shape, bool).at[row, history.ids].max(is_id)
        if static.counts:
            counts = generated_counts(*history, params.dynamic, scores.shape[1])
        sample_keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(params.key), params.sample)
        keys = jax.vmap(jax.random.fold_in)(sample_keys, history.new_count)
        ids = sample_ids(scores, seen, static, params.dynamic, keys, counts)
        # XLA fuses this maximum with `argmax`. Gathering the id's logit would take 0.1 ms (151,936 ids, XLA:CPU).
        return ids, jnp.isfinite(jnp.max(scores, axis=-1))


def _append_drafts(history: History, drafts: Int[Array, "B K"]) -> History:
    row, offsets = jnp.arange(drafts.shape[0])[:, None], jnp.arange(drafts.shape[1])[None]
    ids = history.ids.at[row, history.length[:, None] + offsets].set(drafts, mode="drop")
    return History(ids, history.length + drafts.shape[1], history.new_count + drafts.shape[1])


def _process_logits(
    logits: Float[Array, "B V"], history: History, params: RowParams, options: StepOptions
) -> Float[Array, "B V"]:
    """Apply logit biases, ``min_new_tokens``, the request's `Rules` and the logits processor."""
    row = jnp.arange(logits.shape[0])[:, None]
    scores = logits.at[row, params.biased].add(params.biases, mode="drop")
    too_early = history.new_count < params.min_new_tokens
    stop_ids = jnp.where((params.stop_ids >= 0) & too_early[:, None], params.stop_ids, scores.shape[1])
    scores = scores.at[row, stop_ids].set(-jnp.inf, mode="drop")
    for number, rules in enumerate(options.sampling.rules):
        restricted = rules(scores, *history, params.max_new_tokens)
        scores = jnp.where((params.dynamic.rules == number)[:, None], restricted, scores)
    return scores if options.logits_processor is None else options.logits_processor(scores, history)


class Draft(Protocol):
    """Source of proposed ids for the model to verify. Changes the speed of generation, never the ids.

    A pytree whose arrays are arguments of the compiled programs. The memory of a draft is a pytree with a
    leading row dimension.
    """

    @property
    def count(self) -> int:
        """Number of proposed ids per step."""
        ...

    def empty(self, rows: int, capacity: int) -> Any:
        """Create empty memory for ``rows`` rows of ``capacity`` tokens.

        Returns None if the draft has no memory.
        """
        ...

    def read(
        self, memory: Any, ids: Int[Array, "B T"], valid: Bool[Array, "B T"], states: Float[Array, "B T S"]
    ) -> Any:
        """Update the memory after a chunk of the prompts.

        ``states`` are the tokens' hidden states from `CausalLM.mtp_hidden`.
        """
        ...

    def propose(
        self,
        memory: Any,
        inputs: StepInputs,
        ids: Int[Array, "B W"],
        states: Float[Array, "B W S"] | None,
        count: Int[Array, "B"],
    ) -> tuple[Int[Array, "B K"], Any]:
        """Propose ids that follow the histories.

        Args:
            memory: memory of the rows.
            inputs: the histories. ``inputs.sample`` samples in the same way as the main model.
            ids: newest ids, of which the first ``count`` are valid.
            states: main-model state that precedes each of ``ids``. If None, the last state that was
                passed to `read`.
            count: number of new ids per row.

        Returns:
            Proposed ids and the new memory.
        """
        ...


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 5))
def empty_rows(
    like: RowParams, count: int, capacity: int, width: int, memory: Any, mesh: AnyMesh | None
) -> tuple[RowStates, Int[Array, ""]]:
    """Create inactive rows, and a counter of dropped expert assignments.

    ``like`` has the shapes and dtypes of one row's parameters.
    """
    params = jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype), like)
    zeros = jnp.zeros((count,), jnp.int32)
    history = History(jnp.zeros((count, capacity), jnp.int32), zeros, zeros)
    ids = jnp.zeros((count, width), jnp.int32)
    return replicate((RowStates(params, history, ids, ids > 0, memory), jnp.int32(0)), mesh)


@functools.partial(jax.jit, static_argnums=(8,), donate_argnums=(0,))
def start_rows(
    rows: RowStates,
    at: Int[Array, "R"],
    params: RowParams,
    prompts: History,
    logits: Float[Array, "R 1 V"],
    memory: Any,
    keep: Bool[Array, "B"],
    masks: UInt32[Array, "R 1 words"] | None,
    options: StepOptions,
    draft: Any,
) -> tuple[RowStates, RowReport]:
    """Start rows after prefill, and sample their first ids.

    Args:
        rows: state of all rows. Donated.
        at: row index of each prompt. Out-of-range indices are skipped.
        params: options of the prompts.
        prompts: ids of the prompts.
        logits: logits after the prompts.
        memory: memory of the draft for the prompts.
        keep: mask of the running rows that stay active.
        masks: bit masks of the allowed ids, or None.
        options: static options of the compiled step.
        draft: proposes ids to verify, or None.
    """

    def put(array: Array, values: Array) -> Array:
        return array.at[at].set(values.astype(array.dtype), mode="drop")

    report = _accept(StepInputs(params, prompts, options), logits, jnp.zeros((len(at), 0), jnp.int32), masks)
    first_ids = report.ids[:, 0]
    ids = put(rows.history.ids, prompts.ids).at[at, prompts.length].set(first_ids, mode="drop")
    history = History(
        ids, put(rows.history.length, prompts.length + 1), put(rows.history.new_count, prompts.new_count + 1)
    )
    active = (rows.active[:, 0] & keep).at[at].set(report.end == RUNNING, mode="drop")
    last_ids, started = put(rows.ids[:, 0], first_ids), jnp.zeros_like(rows.history.length).at[at].set(1, mode="drop")
    memory = jax.tree.map(put, rows.memory, memory)
    new_rows = rows._replace(params=jax.tree.map(put, rows.params, params), history=history, memory=memory)
    new_rows = _next(new_rows, last_ids, active, last_ids[:, None], None, started, options, draft)
    report = report._replace(drafts=jnp.take(new_rows.ids[:, 1:], at, axis=0, mode="clip"))
    return replicate((new_rows, report), options.mesh)


@functools.partial(jax.jit, static_argnums=(6,), donate_argnums=(0,))
def step_rows(
    rows: RowStates,
    logits: Float[Array, "B W V"],
    states: Float[Array, "B W S"],
    length: Int[Array, "B"],
    keep: Bool[Array, "B"],
    masks: Masks | None,
    options: StepOptions,
    draft: Any,
) -> tuple[RowStates, Int[Array, "B"], RowReport]:
    """Sample the ids of all rows after a pass over ``rows.ids``.

    Args:
        rows: state of all rows. Donated.
        logits: logits of the pass.
        states: states of the pass, read by the draft.
        length: lengths of the cache after the pass.
        keep: mask of the rows that continue. Other rows end.
        masks: bit masks of the allowed ids after each of ``rows.ids``, or None.
        options: static options of the compiled step.
        draft: proposes ids to verify, or None.

    Returns:
        The rows, the lengths of the cache without rejected drafts, and the report.
    """
    running = rows.active[:, 0] & keep
    report = _accept(StepInputs(rows.params, rows.history, options), logits, rows.ids[:, 1:], masks)
    count = jnp.where(running, report.new_count, 0)
    report = report._replace(new_count=count, end=jnp.where(running, report.end, FULL))
    history, width = rows.history, rows.ids.shape[1]
    offsets = jnp.arange(width, dtype=jnp.int32)[None]
    slots = jnp.where(offsets < count[:, None], history.length[:, None] + offsets, history.ids.shape[1])
    ids = write_slots(history.ids, report.ids, slots, 1)
    new_rows = rows._replace(history=History(ids, history.length + count, history.new_count + count))
    last_ids = jnp.take_along_axis(report.ids, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    length = length - jnp.where(rows.active[:, 0], width - count, 0)
    active = running & (report.end == RUNNING)
    new_rows = _next(new_rows, last_ids, active, report.ids, states, count, options, draft)
    report = report._replace(drafts=new_rows.ids[:, 1:])
    return replicate((new_rows, length, report), options.mesh)


def _next(
    rows: RowStates,
    last_ids: Int[Array, "B"],
    active: Bool[Array, "B"],
    ids: Int[Array, "B W"],
    states: Float[Array, "B W S"] | None,
    count: Int[Array, "B"],
    options: StepOptions,
    draft: Any,
) -> RowStates:
    """Set the inputs of the next pass. Rows without new ids retain their drafts."""
    next_ids, memory = last_ids[:, None], rows.memory
    if draft is not None:
        inputs = StepInputs(rows.params, rows.history, options)
        drafts, memory = draft.propose(memory, inputs, ids, states, count)
        drafts = jnp.where(count[:, None] > 0, drafts.astype(jnp.int32), rows.ids[:, 1:])
        next_ids = jnp.concatenate([next_ids, drafts], axis=1)
    return rows._replace(ids=next_ids, active=jnp.broadcast_to(active[:, None], next_ids.shape), memory=memory)


def _accept(
    inputs: StepInputs, logits: Float[Array, "B W V"], drafts: Int[Array, "B K"], masks: Masks | None
) -> RowReport:
    """Sample the next ids, up to the first id that differs from its draft or ends the row.

    The random key of an id does not depend on the drafts, so drafts change only the speed (Daliri,
    Musco and Suresh 2024). A row ends before an id if a logit is NaN, if no logit is finite, or if the
    log-probability of the id is not finite.
    """
    params, width = inputs.params, logits.shape[1]
    ids, finite = list[Array](), list[Array]()
    for w in range(width):
        allowed = None if masks is None else masks[:, w]
        next_ids, is_finite = inputs.sample(logits[:, w], drafts[:, :w], allowed)
        ids.append(next_ids)
        finite.append(is_finite)
    report_ids, valid = jnp.stack(ids, axis=1), jnp.stack(finite, axis=1)
    temperature = params.dynamic.temperature if inputs.options.tempered_logprobs else None
    logprobs = _logprobs(logits, report_ids, params.logprobs, inputs.options.max_logprobs, temperature)
    if inputs.options.max_logprobs is not None:
        valid &= jnp.isfinite(logprobs[0])
    accepted = jnp.cumprod(drafts == report_ids[:, :-1], axis=1)
    count = 1 + jnp.sum(accepted, axis=1, dtype=jnp.int32)
    new_count = inputs.history.new_count[:, None] + 1 + jnp.arange(width, dtype=jnp.int32)[None]
    stopped = jnp.any(report_ids[:, :, None] == params.stop_ids[:, None, :], axis=-1)
    is_end = stopped | ~valid | (new_count >= params.max_new_tokens[:, None])
    count = jnp.minimum(count, jnp.where(jnp.any(is_end, axis=1), jnp.argmax(is_end, axis=1) + 1, width))
    last_index = (count - 1)[:, None]
    stopped, broken, is_end = (jnp.take_along_axis(a, last_index, axis=1)[:, 0] for a in (stopped, ~valid, is_end))
    state = jnp.where(broken, BROKEN, jnp.where(stopped, STOPPED, jnp.where(is_end, FULL, RUNNING))).astype(jnp.int32)
    return RowReport(report_ids, count - broken, state, drafts, *logprobs)


def _masked(scores: Float[Array, "B V"], logits: Float[Array, "B V"], allowed: UInt32[Array, "B words"]) -> Array:
    """Set the scores of disallowed ids to -inf.

    If the options of a row exclude all allowed ids, the row uses the model's logits instead of the scores.
    """
    bits = allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    is_allowed = bits.reshape(len(scores), -1)[:, : scores.shape[1]] > 0
    has_choice = jnp.any(is_allowed & (scores > -jnp.inf), axis=1, keepdims=True)
    return jnp.where(is_allowed, jnp.where(has_choice, scores, logits), -jnp.inf)


def _logprobs(
    logits: Float[Array, "B W V"],
    ids: Int[Array, "B W"],
    num_requested: Int[Array, "B"],
    top: int | None,
    temperature: Float[Array, "B"] | None,
) -> tuple[Any, Any, Any]:
    """Compute log-probabilities of ``ids`` and of the ``top`` most likely ids, if a row requests them.

    If ``temperature`` is set, the logits of each row are first divided by it, unless it is 0 (greedy).
    """
    if top is None:
        return None, None, None

    def compute() -> tuple[Array, Array, Array]:
        scaled = logits
        if temperature is not None:
            scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None, None]
        all_logprobs = jax.nn.log_softmax(scaled, axis=-1)
        top_logprobs, top_ids = jax.lax.top_k(all_logprobs, max(top, 1))
        return (
            jnp.take_along_axis(all_logprobs, ids[..., None], axis=-1)[..., 0],
            top_ids.astype(jnp.int32),
            top_logprobs,
        )

    def skip() -> tuple[Array, Array, Array]:
        return tuple(jnp.zeros(a.shape, a.dtype) for a in jax.eval_shape(compute))  # pyright: ignore

    return jax.lax.cond(jnp.any(num_requested >= 0), compute, skip)
