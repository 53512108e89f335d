"""Continuous batching: requests of any lengths share the rows of one batch, and a row that ends is used again at once.

A waiting prompt is read in chunks, alone or with others of its size, between the steps of the rows that are continued;
then its cache is moved into a free row. The programs are few and fixed: passes of a few sizes, one step of all rows,
and the moves. Everything runs in the caller's thread, and with the same calls in every process of a job.
"""

import collections
import dataclasses
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from nnxmoe.config.validate import check_object, check_type, whole_number
from nnxmoe.generation import draft_cost, passes
from nnxmoe.generation.draft import ModelBasedDraft
from nnxmoe.generation.grammar import empty_masks
from nnxmoe.generation.grouping import (
    LARGE,
    MOST_SMALL,
    SMALL,
    Grouping,
    PrefillGroup,
    PrefixCache,
    as_one_large_chunk,
    chunk_sizes,
    one_by_one,
)
from nnxmoe.generation.ids import Ids, as_token_ids, check_ids, eos_ids
from nnxmoe.generation.passes import CacheSize, LogitsMode, PassResult, cache_bytes
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
from nnxmoe.generation.rows import History, LogitsProcessor, RowReport, StepOptions, empty_rows, start_rows, step_rows
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.program import warn_beyond_positions
from nnxmoe.runtime.memory import refuse_beyond_memory
from nnxmoe.runtime.progress import logger
from nnxmoe.sharding import batch_axes
from nnxmoe.sharding_rules import shard_count


@dataclasses.dataclass(eq=False)
class _Reading:
    """A prefill in progress, of prompts or a prefix: the chunks that remain, and the results so far. ``shared``: the
    results are also those of a prefix."""

    requests: list[Request]
    prefix: Prefix | None
    chunks: collections.deque[tuple[np.ndarray, np.ndarray]]
    passed: PassResult | None
    shared: bool


def _check_types(model: Any, limits: Any, **functions: Any) -> None:
    """Raise ValueError for arguments of `Engine` of a wrong type."""
    check_type("model", model, CausalLM, "a model, such as that of nnxmoe.from_pretrained(path)")
    check_type("limits", limits, EngineLimits | None, "nnxmoe.EngineLimits(…), or None")
    for name, function in functions.items():
        if function is not None:
            check_object("Engine", name, function, "a function")


class Engine:
    """Requests in, ids out, with ``slots`` rows of ``capacity`` tokens each, prompt and new ones together.

        engine = Engine(model, slots=8, capacity=1024)
        requests = [engine.submit(ids, RequestOptions(max_new_tokens=100)) for ids in prompts]
        engine.run()

    ``logits_processor``: a JAX function ``(logits [B, V], History) -> logits``, applied in every step after biases and
    before sampling. ``draft``: proposes ids to verify, which changes the speed only; ``"auto"``: multi-token prediction
    if the model has layers for it, else prompt lookup. ``ahead``: how many steps the device may be ahead of what this
    process has read. ``prefix_bytes``: room for the caches of prompts' beginnings, which later prompts that begin so
    do not read again: what several prompts share, and the prompts and answers of ended requests. ``grouping``: which
    waiting prompts are read together; None: `as_one_large_chunk`, and with a draft `one_by_one`, so that drafts do not
    change a bit.

    The ids of a request are those it would get alone, up to rounding, unless tokens compete for experts (`Capacity`).
    Raises ValueError if the caches do not fit in memory, for a draft where tokens compete, for ``"auto"`` where drafts
    cannot pay, and for dynamic rotary embeddings beyond the length of the training, which depend on the longest row.
    """

    _warned = False  # whether NaN or infinite logits were reported

    def __init__(
        self,
        model: CausalLM,
        *,
        slots: int = 8,
        capacity: int = 2048,
        limits: EngineLimits | None = None,
        logits_processor: LogitsProcessor | None = None,
        draft: draft_cost.DraftOption = None,
        ahead: int = 1,
        prefix_bytes: int = 0,
        grouping: Grouping | None = None,
    ):
        _check_types(model, limits, logits_processor=logits_processor, grouping=grouping)
        model, limits = passes.unroll_for_decoding(model), limits or EngineLimits()
        limits = dataclasses.replace(limits, max_stop_ids=max(limits.max_stop_ids, len(eos_ids(model, ...))))
        self.model, self.limits = model, limits
        self.capacity, self._ahead = whole_number("capacity", capacity, 1), whole_number("ahead", ahead, 0)
        if draft is not None and not model.token_independent():
            raise ValueError(
                f"draft={draft}: with {model.strategy.dispatch} drafts would take the room of real tokens, and change "
                "what follows: use Strategy(dispatch=nnxmoe.Sorted())"
            )
        self._mesh = model.strategy.mesh
        self._parts = shard_count(self._mesh, batch_axes(self._mesh))
        self.slots = (count := whole_number("slots", slots, 1)) + -count % self._parts
        self.draft = draft = draft_cost.resolve(model, draft, self.slots, self.capacity)
        lookahead = 0 if draft is None else draft.count
        fixed = model.fixed_positions
        if grouping is None and fixed is not None and self.capacity > fixed:
            raise ValueError(
                f"capacity={self.capacity}: the rotary embedding of this model changes with the longest row beyond "
                f"{fixed} tokens, so requests would change each other: use at most that, or generate()"
            )
        self._grouping = grouping or (as_one_large_chunk if draft is None else one_by_one)
        self._begun = weakref.WeakKeyDictionary[Prefix, PassResult]()  # prefixes that were read
        self._options = StepOptions(limits.sampling, limits.max_logprobs, logits_processor, self._mesh)
        self._room, self._vocab = CacheSize(self.capacity + lookahead, lookahead), model.vocab_size
        if isinstance(draft, ModelBasedDraft) and draft.vocab_size != self._vocab:
            raise ValueError(
                f"draft={draft}: its vocabulary has {draft.vocab_size} ids and the model's {self._vocab}: give a model "
                "with the same tokenizer and vocab_size"
            )
        one = cache_bytes(model, self._parts, self._room)
        self.prefix_cache = PrefixCache(whole_number("prefix_bytes", prefix_bytes, 0) // max(one, 1))
        self._refuse_beyond_memory(self.prefix_cache.max_prefixes * one)
        self._pass, self._axes = passes.passes(model), passes.cache_batch_axes(model, self._room)
        self._step = self._pass
        if draft is not None:
            self._step = passes.passes(passes.deterministic_blocks(model, self.slots * (1 + lookahead)))
        memory = None if draft is None else draft.empty(self.slots, self._room.tokens)
        # Whether nothing may be added to a row that has ended: there are others, drafts, or its cache may be kept.
        self._stays = self.slots > 1 or lookahead > 0 or self.prefix_cache.max_prefixes > 0
        self._nothing = RequestOptions(stop_ids=None).row_params(limits, self._vocab)  # for rows without a request
        self._rows: Any = empty_rows(self._nothing, self.slots, self._room.tokens, 1 + lookahead, memory, self._mesh)
        self._cache: Any = None
        self._dropped: Any = np.int32(0)
        self._slots: list[Request | None] = [None] * self.slots
        self._keep = np.zeros(self.slots, bool)
        self._waiting: collections.deque[Request] = collections.deque()
        self._reading: _Reading | None = None
        self._reports: collections.deque[tuple[RowReport, list[Request | None]]] = collections.deque()

    def _refuse_beyond_memory(self, kept: int) -> None:
        """Raise ValueError if the caches, ``kept`` bytes of prefixes among them, and the draft's do not fit."""
        draft, arguments = self.draft, (self.slots, self._room.tokens)
        parts = [] if draft is None else jax.eval_shape(lambda: jax.tree.leaves(draft.empty(*arguments)))
        drafting = sum(part.size * part.dtype.itemsize for part in parts)
        reading = 0
        if self.slots > 1 and self._grouping in (as_one_large_chunk, one_by_one):  # prompts read while other rows run
            rows = self._grouping([SMALL] * self.slots, self.slots).rows
            reading = cache_bytes(self.model, rows + -rows % self._parts, self._room)
        what = f"a cache of {self._room.tokens} tokens for batch {self.slots} takes"
        remedy = "use fewer max_new_tokens, a smaller capacity, or a smaller batch"
        refuse_beyond_memory(self.cache_bytes + reading + drafting + kept, what, remedy)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache of all slots that this process holds. Prompts that are being read take up to 8
        slots' more, and each `Prefix` in use takes one slot's."""
        return cache_bytes(self.model, self.slots, self._room)

    @property
    def dropped(self) -> int:
        """How many assignments to experts were dropped so far."""
        return int(self._dropped)

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of occupied slots."""
        return sum(request is not None for request in self._slots)

    def submit(self, ids: Ids, options: RequestOptions | None = None, prefix: Prefix | None = None) -> Request:
        """Append a request to the queue. ``prefix``: common first ids, read once for all requests with the same object.
        Raises ValueError if the request does not fit in this engine."""
        request = self._request(ids, options, prefix)
        if self.prefix_cache.max_prefixes and prefix is None:
            request.prefix = self.prefix_cache.match(request.prompt)
        elif self.prefix_cache.max_prefixes and prefix is not None and prefix not in self._begun:
            self.prefix_cache.link(prefix)
        warn_beyond_positions(self.model, len(request.prompt) + request.options.max_new_tokens)
        if request.options.max_new_tokens == 0:
            request.finish = "length"
        else:
            self._waiting.append(request)
        return request

    def check(self, ids: Ids, options: RequestOptions | None = None) -> None:
        """Validate arguments like `submit`, without appending a request. Raises ValueError."""
        self._request(ids, options, None)

    def _request(self, ids: Ids, options: RequestOptions | None, prefix: Prefix | None) -> Request:
        """Create a request. Raises ValueError if it is invalid or does not fit in this engine."""
        check_type("options", options, RequestOptions | None, "nnxmoe.RequestOptions(…), or None")
        check_type("prefix", prefix, Prefix | None, "a nnxmoe.Prefix, or None")
        prompt, options = as_token_ids(ids), options or RequestOptions()
        if options.stop_ids is ...:
            options = dataclasses.replace(options, stop_ids=eos_ids(self.model, ...))
        if self._rows is None:
            raise ValueError("the engine is closed")
        if not prompt:
            raise ValueError("the prompt is empty: it needs at least one id")
        check_ids(prompt, self._vocab)
        asked = options.row_params(self.limits, self._vocab, len(prompt))
        if len(prompt) + options.max_new_tokens > self.capacity:
            raise ValueError(
                f"a prompt of {len(prompt)} ids and {options.max_new_tokens} new ones do not fit in the "
                f"{self.capacity} of a slot: ask for fewer max_new_tokens, or make an engine of a larger capacity"
            )
        if prefix is not None and prompt[: len(prefix.ids)] != prefix.ids:
            raise ValueError(f"the prompt does not begin with the {len(prefix.ids)} ids of its prefix")
        return Request(prompt, options, asked, prefix, progress=options.start_constraint(self._vocab))

    def step(self) -> list[Event]:
        """Read a chunk of waiting prompts if a slot is free, start a step of all rows, and return what earlier steps
        have made, all but the newest ``ahead``. Without requests it does nothing."""
        if self._rows is None:
            raise ValueError("the engine is closed")
        if self._reading is None:
            self._reading = self._next_reading()
        if (reading := self._reading) is not None:
            if reading.prefix is None and all(request.done for request in reading.requests):
                self._reading = None  # all were cancelled
            else:
                self._read(reading)
        events = list[Event]()
        if going := any(r.steps < r.options.max_new_tokens for r in self._going()):
            events += self._advance()
        while len(self._reports) > (self._ahead if going else 0):
            events += self._look()
        return events

    def run(self) -> None:
        """StaticSampling until all requests are done."""
        while self._waiting or self.running or self._reports:
            self.step()

    def warm_up(self) -> None:
        """Compile all programs for requests without a prefix, so that none has to wait for one later."""
        most, kept, self.prefix_cache = (
            RequestOptions(max_new_tokens=2, stop_ids=None),
            self.prefix_cache,
            PrefixCache(0),
        )
        room = min(self.capacity, self.model.config.max_position_embeddings)
        for length in (1, SMALL + 1, MOST_SMALL * SMALL + 1, LARGE + 1):
            if length + most.max_new_tokens <= room:
                for count in (1, self.slots):
                    # One row is running while others are read, if that leaves more than one slot.
                    occupied = [self.submit([0], most)] if count > 2 else []
                    while any(request.steps == 0 for request in occupied):
                        self.step()
                    for _ in range(count):
                        self.submit([0] * length, most)
                    self.run()
        self.prefix_cache = kept

    def cancel(self, request: Request) -> None:
        """End a request, and free its slot; without effect once it is done."""
        if not request.done:
            if request in self._waiting:
                self._waiting.remove(request)
            self._end(request, "cancelled")

    def close(self) -> None:
        """End all requests, and free the cache."""
        for request in [*self._waiting, *filter(None, self._slots)]:
            self.cancel(request)
        self._rows = self._cache = self._reading = None
        self._reports.clear()

    def _end(self, request: Request, finish: Finish) -> None:
        request.finish, request.prefix = finish, None
        if request in self._slots:
            slot = self._slots.index(request)
            self._slots[slot], self._keep[slot] = None, False

    def _keep_row(self, request: Request) -> None:
        """Keep the cache of a request that has just ended: that of its prompt and of all its ids but the last."""
        ids = (*request.prompt, *request.ids[:-1])
        if not self.prefix_cache.max_prefixes or len(ids) < SMALL or self._rows.memory is not None:
            return
        cache = passes.broadcast_row(self._cache, self._parts, self._axes, self._slots.index(request))
        prefix = self.prefix_cache.insert(Prefix(ids))
        self._begun[prefix] = PassResult(None, None, cache, self._dropped)  # pyright: ignore[reportArgumentType]

    def _going(self) -> Iterator[Request]:
        """The requests that are being continued, as far as this process has seen."""
        return (r for r, keep in zip(self._slots, self._keep, strict=True) if r is not None and keep)

    def _next_reading(self) -> _Reading | None:
        """The next prompts to read, with slots for them, or a prefix of theirs that has not been read: their chunks,
        padded on the left, and a copy of what was read before them."""
        free = [i for i, occupant in enumerate(self._slots) if occupant is None]
        if not self._waiting or not free:
            return None
        start, target, requests = self._waiting[0].prefix, None, list[Request]()
        if start is not None and start not in self._begun:
            while start is not None and start not in self._begun:
                target, start = start, self.prefix_cache.starts.get(start, start.start)
            assert target is not None
            rests = [target.ids[len(start.ids) if start else 0 :]]
            group = PrefillGroup(1, self._parts, chunk_sizes(len(rests[0])))
        else:
            alike = itertools.takewhile(lambda r: r.prefix is start, itertools.islice(self._waiting, len(free)))
            rests = [r.prompt[len(start.ids) if start else 0 :] for r in alike]
            if rests[0]:
                group = self._grouping([len(rest) for rest in itertools.takewhile(bool, rests)], self.slots)
            else:  # the prefix is all of the prompt
                group = PrefillGroup(1, self._parts, [])
            requests = [self._waiting.popleft() for _ in range(group.count)]
            for slot, request in zip(free, requests, strict=False):
                self._slots[slot] = request
        length, rows = sum(group.sizes), group.rows + -group.rows % self._parts
        ids, valid = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
        for row, rest in enumerate(rests[: group.count]):
            ids[row, length - len(rest) :], valid[row, length - len(rest) :] = rest, True
        ends = list(itertools.accumulate(group.sizes))
        chunks = [(ids[:, e - n : e], valid[:, e - n : e]) for e, n in zip(ends, group.sizes, strict=True)]
        passed = None if start is None else self._begun[start]
        if passed is not None and chunks:
            cache, memory = (
                passes.broadcast_row(passed.cache, rows, self._axes),
                passes.broadcast_memory(passed.memory, rows),
            )
            passed = passed._replace(cache=cache, memory=memory)
        return _Reading(requests, target, collections.deque(chunks), passed, start is not None and not chunks)

    def _read(self, reading: _Reading) -> None:
        """One chunk; after the last one the prompts' rows begin."""
        if reading.chunks:
            ids, valid = reading.chunks.popleft()
            before, part = reading.passed, LogitsMode(True, self.draft is not None)
            cache, memory = (None, None) if before is None else (before.cache, before.memory)
            passed = self._pass(ids, valid, cache, self._dropped, self._room, part)
            if self.draft is not None:
                memory = self.draft.empty(len(ids), self._room.tokens) if memory is None else memory
                memory = passes.read(self.draft, memory, ids, valid, passed.states)
            self._dropped, reading.passed = passed.dropped, passed._replace(memory=memory)
        if reading.chunks:
            return
        self._reading = None
        if reading.prefix is not None:
            assert reading.passed is not None
            self._begun[reading.prefix] = reading.passed
            self.prefix_cache.starts.pop(reading.prefix, None)  # its cache is no longer needed
        else:
            self._begin(reading)

    def _begin(self, reading: _Reading) -> None:
        """Move the caches of prompts into free slots, and draw their first ids."""
        passed = reading.passed
        assert passed is not None
        rows, requests = passed.logits.shape[0], reading.requests
        at = np.full(rows, self.slots, np.int32)  # none
        prompts, lengths = np.zeros((rows, self._room.tokens), np.int32), np.ones(rows, np.int32)
        asked = [self._nothing] * rows
        for row, request in enumerate(requests):
            if request.done:  # cancelled
                continue
            at[row] = self._slots.index(request)
            prompts[row, : len(request.prompt)], lengths[row] = request.prompt, len(request.prompt)
            asked[row] = request.row_params
        together = jax.tree.map(lambda *parts: np.stack(parts), *asked)
        in_place = all(slot in (row, self.slots) for row, slot in enumerate(at))
        if rows == self.slots and in_place and not self._keep.any() and not reading.shared:
            self._cache = passed.cache
        else:
            if self._cache is None:
                self._cache = passes.empty_like(passed.cache, self.slots, self._axes)
            self._cache = passes.scatter_rows(self._cache, passed.cache, at, self._axes)
        kept = self._keep.copy()  # what a program is given may be read later
        known: Any = prompts, lengths, np.zeros_like(lengths)
        given = together, History(*known), passed.logits, passed.memory, kept, self._masks(requests, rows, 1)
        self._rows, report = start_rows(self._rows, at, *given, self._options, self.draft)
        here: list[Request | None] = [None] * rows
        for row, request in enumerate(requests):
            if not request.done:
                here[row], self._keep[at[row]], request.steps = request, True, 1
            request.prefix = None
        self._reports.append((report, here))

    def _masks(self, requests: Sequence[Request | None], rows: int, width: int) -> np.ndarray | None:
        """The ids that may follow in each row; None if no row has a constraint."""
        found = None
        for row, request in enumerate(requests):
            if request is not None and request.progress is not None and not request.done:
                found = empty_masks(rows, width, self._vocab) if found is None else found
                request.progress.masks(request.drafts[: width - 1], found[row])
        return found

    def _advance(self) -> list[Event]:
        """Start a step of all rows. Where one follows a constraint, the ids of the step before are read, and returned,
        and what may follow is computed, while the device computes the pass."""
        state = self._rows
        valid = state.active if self._stays else None
        passed = self._step(state.ids, valid, self._cache, self._dropped, self._room, LogitsMode(False))
        self._cache, self._dropped = passed.cache, passed.dropped
        events = list[Event]()
        if any(request.progress is not None for request in self._going()):
            while self._reports:
                events += self._look()
        here = [request if keep else None for request, keep in zip(self._slots, self._keep, strict=True)]
        masks = self._masks(here, self.slots, state.ids.shape[1])
        after = passed.logits, passed.states, passed.cache.length, self._keep.copy(), masks
        self._rows, length, report = step_rows(state, *after, self._options, self.draft)
        self._cache = dataclasses.replace(passed.cache, length=length)
        for request in self._going():
            request.steps += 1
        self._reports.append((report, here))
        return events

    def _look(self) -> list[Event]:
        """Read the oldest report."""
        report, requests = self._reports.popleft()
        found = jax.tree.map(np.asarray, report)
        events = []
        for row, request in enumerate(requests):
            count, why = int(found.count[row]), FINISH_REASONS[int(found.end[row])]
            if request is None or request.done or not (count or why == "error"):
                continue
            new = found.ids[row, :count].tolist()
            request.ids += new
            if request.progress is not None:
                request.progress.advance(new)
                request.drafts = found.drafts[row].tolist()
            if found.ids.shape[1] > 1 and count:
                request.accepted[count - 1] += 1
            if (options := request.options.logprobs) is not None:
                request.logprobs += found.logprobs[row, :count].tolist()
                pairs = zip(found.top_ids[row, :count], found.top_logprobs[row, :count], strict=True)
                request.top += [list(zip(i[:options].tolist(), p[:options].tolist(), strict=True)) for i, p in pairs]
            if why == "error":
                self._warn_of_logits(request)
            elif why is not None:
                self._keep_row(request)
            if why is not None:
                self._end(request, why)
            events.append(Event(request, new, why))
        return events

    def _warn_of_logits(self, request: Request) -> None:
        """Log a warning, once per engine, about a request that ended because of NaN or infinite logits."""
        if not self._warned:
            self._warned = True
            text = "the logits after %d ids of a prompt and %d new ones are NaN or infinite, so that it ends with "
            text += "finish='error' (further ones do so without a warning): %s"
            logger.warning(text, len(request.prompt), len(request.ids), unusable_logits(self.model))
