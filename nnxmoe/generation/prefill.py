"""Chunked prefill of prompts and of their shared prefixes."""

import collections
import dataclasses
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nnxmoe.generation import passes
from nnxmoe.generation.engine_plan import EnginePlan
from nnxmoe.generation.grouping import PrefillGroup, PrefixCache, chunk_sizes, left_padded_chunks
from nnxmoe.generation.passes import LogitsMode, PassResult
from nnxmoe.generation.request import Prefix, Request
from nnxmoe.generation.request_routing import PassRouting


class Prefilled(NamedTuple):
    """Result of prefilling tokens.

    Attributes:
        result: result of the last pass.
        routing: experts of all tokens, per chunk. Empty if the engine does not return routing.
    """

    result: PassResult
    routing: tuple[PassRouting, ...] = ()


@dataclasses.dataclass(eq=False)
class Prefill:
    """Prefill in progress.

    Attributes:
        requests: requests whose prompts are prefilled. Empty for the prefill of a prefix.
        prefix: the prefix that is prefilled, or None.
        chunks: ids and validity masks of the remaining chunks, each [rows, chunk size].
        prefilled: result of the preceding prefix and the chunks so far, or None.
        shares_result: True if ``prefilled`` belongs to a prefix, so its cache must not be donated.
    """

    requests: list[Request]
    prefix: Prefix | None
    chunks: collections.deque[tuple[np.ndarray, np.ndarray]]
    prefilled: Prefilled | None
    shares_result: bool

    @property
    def is_cancelled(self) -> bool:
        """Whether all requests of the prefilled prompts have ended. False for the prefill of a prefix."""
        return self.prefix is None and all(request.done for request in self.requests)


class Prefiller:
    """Plans prefills and runs their chunks. Call `use` first.

    Attributes:
        prefix_cache: chooses the prefixes that are cached.
        prefixes: prefixes that have been prefilled.
        run_pass: compiled pass of the model, see `passes.passes`.
    """

    def __init__(self, max_prefixes: int, cache_axes: tuple[int, ...]):
        self._cache_axes = cache_axes
        self.prefix_cache = PrefixCache(max_prefixes)
        self.prefixes = weakref.WeakKeyDictionary[Prefix, Prefilled]()

    def use(self, plan: EnginePlan) -> None:
        """Use the model and the draft of a plan, and drop all prefixes."""
        self._plan, self.run_pass = plan, passes.passes(plan.model)
        self.prefix_cache.clear()
        self.prefixes.clear()

    def plan_next(self, waiting: collections.deque[Request], free_slots: int) -> Prefill:
        """Plan the next prefill: a prefix that waiting prompts need, or else up to ``free_slots`` prompts.

        Removes the requests of the planned prompts from ``waiting``.
        """
        prefix = waiting[0].prefix
        if prefix is not None and prefix not in self.prefixes:
            return self._plan_prefix(prefix)
        prompts = list[tuple[int, ...]]()  # without the prefix
        for request in itertools.islice(waiting, free_slots):
            if request.prefix is not prefix:
                break
            prompts.append(request.prompt[_prefix_length(prefix) :])
        if prompts[0]:
            group = self._plan.grouping([len(ids) for ids in itertools.takewhile(bool, prompts)], self._plan.slots)
        else:  # the prefix is the whole prompt
            group = PrefillGroup(1, self._plan.batch_shards, [])
        requests = [waiting.popleft() for _ in range(group.prompts)]
        return self._plan_chunks(prompts[: group.prompts], group, prefix, requests, None)

    def _plan_prefix(self, prefix: Prefix) -> Prefill:
        """Plan the prefill of the shortest prefix of ``prefix`` that has not been prefilled."""
        start: Prefix | None = prefix
        while start is not None and start not in self.prefixes:
            prefix, start = start, self.prefix_cache.starts.get(start, start.start)
        ids = prefix.ids[_prefix_length(start) :]
        group = PrefillGroup(1, self._plan.batch_shards, chunk_sizes(len(ids)))
        return self._plan_chunks([ids], group, start, [], prefix)

    def _plan_chunks(
        self,
        prompts: Sequence[tuple[int, ...]],
        group: PrefillGroup,
        start: Prefix | None,
        requests: list[Request],
        prefix: Prefix | None,
    ) -> Prefill:
        """Split prompts into chunks. Prefill appends the chunks to a copy of the cache of ``start``."""
        rows = self._plan.pad_rows(group.rows)
        chunks = left_padded_chunks(prompts, rows, group.sizes)
        prefilled = None if start is None else self.prefixes[start]
        if prefilled is not None and chunks:
            result = prefilled.result
            cache = passes.broadcast_row(result.cache, rows, self._cache_axes)
            result = result._replace(cache=cache, memory=passes.broadcast_memory(result.memory, rows))
            prefilled = prefilled._replace(result=result)
        return Prefill(requests, prefix, collections.deque(chunks), prefilled, start is not None and not chunks)

    def run_chunk(self, prefill: Prefill, dropped: Any) -> Any:
        """Prefill the next chunk. Returns the number of expert assignments dropped so far."""
        ids, valid = prefill.chunks.popleft()
        draft, size = self._plan.draft, self._plan.cache_size
        cache, memory, routing = None, None, ()
        if prefill.prefilled is not None:
            previous, routing = prefill.prefilled
            cache, memory = previous.cache, previous.memory
        mode = LogitsMode(last_only=True, with_states=draft is not None, with_routing=self._plan.limits.return_routing)
        result = self.run_pass(ids, valid, cache, dropped, size, mode)
        if result.routing is not None:
            routing = (*routing, PassRouting(result.routing, valid))
        if draft is not None:
            memory = draft.empty(len(ids), size.tokens) if memory is None else memory
            memory = passes.draft_prefill(draft, memory, ids, valid, result.states)
        prefill.prefilled = Prefilled(result._replace(memory=memory), routing)
        return result.dropped

    def store(self, prefill: Prefill) -> None:
        """Store a prefix whose chunks have all been prefilled."""
        assert prefill.prefix is not None and prefill.prefilled is not None
        result, routing = prefill.prefilled
        self.prefixes[prefill.prefix] = Prefilled(result, tuple(part.first_row() for part in routing))
        self.prefix_cache.starts.pop(prefill.prefix, None)  # the cache of the start prefix is no longer needed


def _prefix_length(prefix: Prefix | None) -> int:
    return 0 if prefix is None else len(prefix.ids)
