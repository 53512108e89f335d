"""Continuous batching: requests of different lengths share the rows of a batch.

A row is reused as soon as its request ends. The prompts of waiting requests are prefilled in chunks
between decoding steps, alone or with prompts of similar length. After prefill, the cache of a prompt is
copied into a free row. The number of compiled programs is fixed: passes of a few sizes, a step of all
rows, and copies between caches. All work runs in the caller's thread. In a multi-process job, every
process must make the same calls.
"""

import collections
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nnxmoe.config.arguments import reject_unknown_arguments
from nnxmoe.config.validate import check_type, whole_number
from nnxmoe.generation import passes
from nnxmoe.generation.draft_cost import DraftOption
from nnxmoe.generation.engine_plan import EnginePlan, plan_engine
from nnxmoe.generation.grammar import empty_masks
from nnxmoe.generation.grouping import LARGE, MAX_SMALL, SMALL, Grouping, PrefixCache
from nnxmoe.generation.ids import Ids, as_token_ids, check_ids, eos_ids
from nnxmoe.generation.passes import LogitsMode, PassResult
from nnxmoe.generation.prefill import Prefill, Prefilled, Prefiller
from nnxmoe.generation.request import (
    FINISH_REASONS,
    EngineLimits,
    Event,
    Finish,
    Prefix,
    Request,
    RequestOptions,
    unusable_logits,
)
from nnxmoe.generation.request_routing import PassRouting
from nnxmoe.generation.rows import History, LogitsProcessor, RowReport, empty_rows, start_rows, step_rows
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.program import commit_arrays, warn_beyond_positions
from nnxmoe.runtime.progress import logger


class _Report(NamedTuple):
    """Report on the device, the requests of its rows, and the routing of the passes before it."""

    report: RowReport
    requests: list[Request | None]
    routing: tuple[PassRouting, ...]


class Engine:
    """Continuous-batching engine that generates ids for requests in a shared batch of ``slots`` rows.

        engine = Engine(model, slots=8, capacity=1024)
        requests = [engine.submit(ids, RequestOptions(max_new_tokens=100)) for ids in prompts]
        engine.run()

    The ids of a request do not depend on other requests, up to rounding, unless tokens compete for
    experts (`Capacity`).

    Args:
        model: model that generates the ids.
        slots: number of rows.
        capacity: tokens per row, including the prompt and the new ids.
        limits: maximum sizes of request options. Defaults to `EngineLimits()`.
        logits_processor: JAX function ``(logits [B, V], History) -> logits``, applied in every step
            after biases and before sampling.
        draft: proposes ids to verify. Changes only the speed, up to rounding. ``"auto"`` uses the model's multi-token
            prediction layers if it has them, else prompt lookup.
        ahead: number of steps that the device may run ahead of the results that this process has read.
        prefix_bytes: memory for the caches of prefixes, in bytes. Prompts that start with a cached prefix
            skip the prefill of the prefix. The engine caches the first ids that several prompts share,
            and the prompts and answers of ended requests.
        grouping: chooses which waiting prompts are prefilled together. Defaults to `as_one_large_chunk`
            without a draft, and to `one_by_one` with a draft. `one_by_one` makes the results bitwise
            independent of the drafts.

    Raises:
        ValueError: if the caches do not fit in memory, if a draft is used although tokens compete for
            experts, if no draft is expected to be faster for ``"auto"``, or if ``capacity`` exceeds the
            length beyond which dynamic rotary embeddings depend on the longest row.
    """

    _warned = False  # whether NaN or infinite logits have been reported

    @reject_unknown_arguments
    def __init__(
        self,
        model: CausalLM,
        *,
        slots: int = 8,
        capacity: int = 2048,
        limits: EngineLimits | None = None,
        logits_processor: LogitsProcessor | None = None,
        draft: DraftOption = None,
        ahead: int = 1,
        prefix_bytes: int = 0,
        grouping: Grouping | None = None,
    ):
        self._ahead = whole_number("ahead", ahead, 0)
        plan = plan_engine(model, slots, capacity, limits, logits_processor, draft, prefix_bytes, grouping)
        self.limits, self.slots, self.capacity = plan.limits, plan.slots, plan.capacity
        self._vocab = plan.model.vocab_size
        self._stale_requests = weakref.WeakSet[Request]()  # requests whose caches contain keys of a previous model
        self._cache_axes = passes.cache_batch_axes(plan.model, plan.cache_size)
        self._prefiller = Prefiller(plan.max_prefixes, self._cache_axes)
        self._set_plan(plan)
        memory = None if self.draft is None else self.draft.empty(self.slots, plan.cache_size.tokens)

        self._unused_row = RequestOptions(stop_ids=None).row_params(self.limits, self._vocab)
        mesh, tokens = plan.step_options.mesh, plan.cache_size.tokens
        initial_state = empty_rows(self._unused_row, self.slots, tokens, plan.step_width, memory, mesh)
        self._rows: Any  # None after the engine is closed
        self._rows, self._dropped = commit_arrays(initial_state, plan.place)
        self._cache: Any = None
        self._slots: list[Request | None] = [None] * self.slots
        self._active = np.zeros(self.slots, bool)  # slots whose rows are running, according to the reports read so far
        self._waiting: collections.deque[Request] = collections.deque()
        self._prefill: Prefill | None = None
        self._reports: collections.deque[_Report] = collections.deque()

    def _set_plan(self, plan: EnginePlan) -> None:
        """Set the model and the draft, and bind the compiled passes to their arrays."""
        self.plan, self.model, self.draft = plan, plan.model, plan.draft
        self._prefiller.use(plan)
        self._step = self._prefiller.run_pass
        if plan.draft is not None:
            self._step = passes.passes(passes.deterministic_blocks(plan.model, plan.slots * plan.step_width))

    def update_model(self, model: CausalLM) -> None:
        """Replace the model by a model of the same structure with different values, without compilation.

        Later passes use the new model. The prefix cache and all prefilled prefixes are dropped. Requests that
        occupy a slot continue with the keys and values that the previous model cached. Cancel and resubmit them
        if all their ids must come from one model. An `MTPDraft` is replaced by a draft of the new model. Scanned
        layers are unrolled into a copy, so the old and the new copy both need memory during the call.

        Raises:
            ValueError: if the structure, vocabulary, mesh, dtype, shapes or shardings of the model differ from
                the engine's model, or if the engine is closed. The engine is then unchanged.
        """
        self._check_open()
        self._set_plan(self.plan.with_model(model))
        self._stale_requests.update(filter(None, self._slots))
        if self._prefill is not None and self._prefill.prefix is not None:
            self._prefill = None  # the next step plans the prefill of this prefix again

    def _check_open(self) -> None:
        if self._rows is None:
            raise ValueError("the engine is closed")

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache of all slots in this process.

        Prefill needs additional memory for up to 8 slots. Each `Prefix` in use needs memory for one
        slot.
        """
        return self.plan.cache_bytes(self.slots)

    @property
    def prefix_cache(self) -> PrefixCache:
        """Prefixes that this engine caches."""
        return self._prefiller.prefix_cache

    @property
    def dropped(self) -> int:
        """Number of expert assignments dropped so far."""
        return int(self._dropped)

    @property
    def waiting(self) -> int:
        """Number of requests that are waiting for a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of occupied slots."""
        return sum(request is not None for request in self._slots)

    def submit(self, ids: Ids, options: RequestOptions | None = None, prefix: Prefix | None = None) -> Request:
        """Append a request to the queue.

        Args:
            ids: ids of the prompt.
            options: options of the request. Defaults to `RequestOptions()`.
            prefix: first ids of the prompt. They are prefilled once for all requests with the same
                object.

        Raises:
            ValueError: if the request is invalid or does not fit in this engine.
        """
        request = self._request(ids, options, prefix)
        if self.prefix_cache.max_prefixes and prefix is None:
            request.prefix = self.prefix_cache.match(request.prompt)
        elif self.prefix_cache.max_prefixes and prefix is not None and prefix not in self._prefiller.prefixes:
            self.prefix_cache.link(prefix)
        warn_beyond_positions(self.model, len(request.prompt) + request.options.max_new_tokens)
        if request.options.max_new_tokens == 0:
            request.finish = "length"
        else:
            self._waiting.append(request)
        return request

    def check(self, ids: Ids, options: RequestOptions | None = None) -> None:
        """Validate the arguments of `submit` without appending a request. Raises ValueError."""
        self._request(ids, options, None)

    def _request(self, ids: Ids, options: RequestOptions | None, prefix: Prefix | None) -> Request:
        """Create a request. Raises ValueError if it is invalid or does not fit in this engine."""
        check_type("options", options, RequestOptions | None, "nnxmoe.RequestOptions(…), or None")
        check_type("prefix", prefix, Prefix | None, "a nnxmoe.Prefix, or None")
        prompt, options = as_token_ids(ids), options or RequestOptions()
        if options.stop_ids is ...:
            options = dataclasses.replace(options, stop_ids=eos_ids(self.model, ...))
        self._check_open()
        if not prompt:
            raise ValueError("the prompt is empty: it needs at least one id")
        check_ids(prompt, self._vocab)
        row_params = options.row_params(self.limits, self._vocab, len(prompt))
        if len(prompt) + options.max_new_tokens > self.capacity:
            raise ValueError(
                f"a prompt of {len(prompt)} ids and {options.max_new_tokens} new ids exceed the capacity of "
                f"{self.capacity} tokens per slot: reduce max_new_tokens, or create an engine with a larger capacity"
            )
        if prefix is not None and prompt[: len(prefix.ids)] != prefix.ids:
            raise ValueError(f"the prompt does not start with the {len(prefix.ids)} ids of its prefix")
        return Request(prompt, options, row_params, prefix, progress=options.start_constraint(self._vocab))

    def step(self) -> list[Event]:
        """Prefill a chunk of waiting prompts if a slot is free, and start a step of all rows.

        No-op if there are no requests.

        Returns:
            Events with the token ids that earlier steps generated. While requests are running, the ``ahead`` most
            recent steps are still in flight and are not included.
        """
        self._check_open()
        self._prefill_chunk()
        events = list[Event]()
        is_running = any(request.steps < request.options.max_new_tokens for request in self._active_requests())
        if is_running:
            events += self._start_step()
        while len(self._reports) > (self._ahead if is_running else 0):
            events += self._read_report()
        return events

    def run(self) -> None:
        """Run steps until all requests are done."""
        while self._waiting or self.running or self._reports:
            self.step()

    def warm_up(self) -> None:
        """Compile the programs of requests without a prefix or constraint, so that they do not wait for compilation."""
        prefix_cache, self._prefiller.prefix_cache = self.prefix_cache, PrefixCache(0)
        try:
            self._run_sizes()
        finally:
            self._prefiller.prefix_cache = prefix_cache

    def _run_sizes(self) -> None:
        """Run requests of each prompt size and batch size that has a program."""
        options = RequestOptions(max_new_tokens=2, stop_ids=None)
        longest = min(self.capacity, self.model.config.max_position_embeddings) - options.max_new_tokens
        for length in (1, SMALL + 1, MAX_SMALL * SMALL + 1, LARGE + 1):
            if length > longest:
                continue
            for count in (1, self.slots):
                if count > 2:  # prefills the other prompts while one row decodes
                    running = self.submit([0], options)
                    while running.steps == 0:
                        self.step()
                for _ in range(count):
                    self.submit([0] * length, options)
                self.run()

    def cancel(self, request: Request) -> None:
        """End a request and free its slot. No-op if the request has already ended."""
        if not request.done:
            if request in self._waiting:
                self._waiting.remove(request)
            self._end(request, "cancelled")

    def close(self) -> None:
        """End all requests and free the cache."""
        for request in [*self._waiting, *filter(None, self._slots)]:
            self.cancel(request)
        self._rows = self._cache = self._prefill = None
        self._reports.clear()

    def _end(self, request: Request, finish: Finish) -> None:
        request.finish, request.prefix = finish, None
        if request in self._slots:
            slot = self._slots.index(request)
            self._slots[slot], self._active[slot] = None, False

    def _active_requests(self) -> Iterator[Request]:
        for request, is_active in zip(self._slots, self._active, strict=True):
            if request is not None and is_active:
                yield request

    # Prefill

    def _prefill_chunk(self) -> None:
        """Prefill a chunk. Prompts that are prefilled prefixes start before it, because they need no pass."""
        runs_pass = False
        while not runs_pass:
            if self._prefill is None:
                self._plan_prefill()
            if self._prefill is None:
                return
            runs_pass = bool(self._prefill.chunks)
            self._advance_prefill(self._prefill)

    def _plan_prefill(self) -> None:
        """Plan the next prefill if a slot is free and a request is waiting, and assign slots to its requests."""
        free_slots = [slot for slot, request in enumerate(self._slots) if request is None]
        if self._waiting and free_slots:
            self._prefill = self._prefiller.plan_next(self._waiting, len(free_slots))
            for slot, request in zip(free_slots, self._prefill.requests, strict=False):
                self._slots[slot] = request

    def _advance_prefill(self, prefill: Prefill) -> None:
        """Prefill one chunk. After the last chunk, start the rows of the prompts, or store the prefix."""
        if prefill.is_cancelled:
            self._prefill = None
            return
        if prefill.chunks:
            self._dropped = self._prefiller.run_chunk(prefill, self._dropped)
        if prefill.chunks:
            return
        self._prefill = None
        if prefill.prefix is None:
            self._start_requests(prefill)
        else:
            self._prefiller.store(prefill)

    def _start_requests(self, prefill: Prefill) -> None:
        """Copy the caches of prompts into their slots and sample the first ids."""
        assert prefill.prefilled is not None
        result, routing = prefill.prefilled
        rows = result.logits.shape[0]
        slots = np.full(rows, self.slots, np.int32)  # out-of-range index for rows without a slot
        ids, lengths = np.zeros((rows, self.plan.cache_size.tokens), np.int32), np.ones(rows, np.int32)
        row_params = [self._unused_row] * rows
        row_requests: list[Request | None] = [None] * rows
        for row, request in enumerate(prefill.requests):
            request.prefix = None
            if request.done:  # cancelled
                continue
            slots[row], row_requests[row] = self._slots.index(request), request
            ids[row, : len(request.prompt)], lengths[row] = request.prompt, len(request.prompt)
            row_params[row] = request.row_params
        self._store_rows(result.cache, slots, prefill.shares_result)
        prompts: Any = History(ids, lengths, np.zeros_like(lengths))  # pyright: ignore[reportArgumentType]
        self._rows, report = start_rows(
            self._rows,
            slots,
            jax.tree.map(lambda *values: np.stack(values), *row_params),
            prompts,
            result.logits,
            result.memory,
            self._active.copy(),  # a copy, because JAX may read the array after this call
            self._masks(row_requests, rows, 1),
            self.plan.step_options,
            self.draft,
        )
        for row, request in enumerate(row_requests):
            if request is not None:
                self._active[slots[row]], request.steps = True, 1
        self._reports.append(_Report(report, row_requests, routing))

    def _store_rows(self, cache: Any, slots: np.ndarray, is_shared: bool) -> None:
        """Copy rows of a cache into slots, or use the cache itself if its rows are already in place."""
        in_place = all(slot in (row, self.slots) for row, slot in enumerate(slots))
        if len(slots) == self.slots and in_place and not self._active.any() and not is_shared:
            self._cache = cache
            return
        if self._cache is None:
            self._cache = passes.empty_like(cache, self.slots, self._cache_axes)
        self._cache = passes.scatter_rows(self._cache, cache, slots, self._cache_axes)

    # Decoding

    def _masks(self, requests: Sequence[Request | None], rows: int, width: int) -> np.ndarray | None:
        """Compute bit masks of the allowed next ids in each row. Returns None if no row has a constraint."""
        masks = None
        for row, request in enumerate(requests):
            if request is not None and request.progress is not None and not request.done:
                masks = empty_masks(rows, width, self._vocab) if masks is None else masks
                request.progress.masks(request.drafts[: width - 1], masks[row])
        return masks

    def _start_step(self) -> list[Event]:
        """Start a step of all rows.

        If a row has a constraint, reads all earlier reports and computes the masks while the device runs
        the pass.

        Returns:
            Events of the reports that were read.
        """
        rows, plan = self._rows, self.plan
        valid = rows.active if plan.masks_ended_rows else None
        mode = LogitsMode(last_only=False, with_routing=self.limits.return_routing)
        result = self._step(rows.ids, valid, self._cache, self._dropped, plan.cache_size, mode)
        self._cache, self._dropped = result.cache, result.dropped
        events = list[Event]()
        if any(request.progress is not None for request in self._active_requests()):
            while self._reports:
                events += self._read_report()
        requests = [request if active else None for request, active in zip(self._slots, self._active, strict=True)]
        masks = self._masks(requests, self.slots, rows.ids.shape[1])
        outputs = result.logits, result.states, result.cache.length
        self._rows, length, report = step_rows(
            rows, *outputs, self._active.copy(), masks, plan.step_options, self.draft
        )
        self._cache = dataclasses.replace(result.cache, length=length)
        for request in self._active_requests():
            request.steps += 1
        routing = () if result.routing is None else (PassRouting(result.routing, valid=None),)
        self._reports.append(_Report(report, requests, routing))
        return events

    def _read_report(self) -> list[Event]:
        """Read the oldest report, update its requests and end finished requests."""
        device_report, requests, routing = self._reports.popleft()
        report = jax.tree.map(np.asarray, device_report)
        events = list[Event]()
        for row, request in enumerate(requests):
            count, finish = int(report.new_count[row]), FINISH_REASONS[int(report.end[row])]
            if request is None or request.done or not (count or finish == "error"):
                continue
            new_ids = report.ids[row, :count].tolist()
            _update_request(request, report, row, new_ids)
            request.routing_parts += [part.read(row, count) for part in routing]
            if finish == "error":
                self._warn_of_logits(request)
            elif finish is not None:
                self._cache_prefix(request)
            if finish is not None:
                self._end(request, finish)
            events.append(Event(request, new_ids, finish))
        return events

    def _cache_prefix(self, request: Request) -> None:
        """Cache the prompt and the new ids of a request that has just ended, except the last id."""
        ids = (*request.prompt, *request.ids[:-1])
        is_reusable = request not in self._stale_requests and self._rows.memory is None
        if not self.prefix_cache.max_prefixes or len(ids) < SMALL or not is_reusable:
            return
        slot = self._slots.index(request)
        cache = passes.broadcast_row(self._cache, self.plan.batch_shards, self._cache_axes, slot)
        result: Any = PassResult(None, None, cache, self._dropped)  # pyright: ignore[reportArgumentType]
        parts = request.routing_parts
        routing = (PassRouting.from_tokens(np.concatenate(parts)),) if parts else ()
        self._prefiller.prefixes[self.prefix_cache.insert(Prefix(ids))] = Prefilled(result, routing)

    def _warn_of_logits(self, request: Request) -> None:
        """Warn once per engine that a request ended because its logits are NaN or infinite."""
        if not self._warned:
            self._warned = True
            text = "the logits after %d prompt ids and %d new ids are NaN or infinite, so the request ends with "
            text += "finish='error' (further such requests are not reported): %s"
            logger.warning(text, len(request.prompt), len(request.ids), unusable_logits(self.model))


def _update_request(request: Request, report: RowReport, row: int, new_ids: list[int]) -> None:
    """Append one row of a report to the results of its request."""
    count = len(new_ids)
    request.ids += new_ids
    if request.progress is not None:
        request.progress.advance(new_ids)
        request.drafts = report.drafts[row].tolist()
    if report.ids.shape[1] > 1 and count:
        request.accepted[count - 1] += 1
    top = request.options.logprobs
    if top is not None:
        assert report.logprobs is not None and report.top_ids is not None and report.top_logprobs is not None
        request.logprobs += report.logprobs[row, :count].tolist()
        for ids, logprobs in zip(report.top_ids[row, :count], report.top_logprobs[row, :count], strict=True):
            request.top.append(list(zip(ids[:top].tolist(), logprobs[:top].tolist(), strict=True)))
