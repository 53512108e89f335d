"""Beginnings of prompts that an engine keeps: later prompts do not read them again, and get what they would get."""

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import nnxmoe
from nnxmoe import Engine, Prefix, PromptLookup, RequestOptions
from nnxmoe.generation.grouping import PrefixCache
from nnxmoe.generation.passes import CacheSize, cache_bytes
from tests.support.families import load
from tests.support.tiny import build, build_tiny

CAPACITY = 256


def model_of(kind: str) -> nnxmoe.CausalLM:
    """A tiny model with room for long prompts: attention with a window, or recurrent layers."""
    if kind == "qwen3_next":
        case = load(kind)
        return build(case.fields | {"max_position_embeddings": 512}, case.weights, nnxmoe.Strategy())
    return build_tiny(kind, nnxmoe.Strategy(), max_position_embeddings=512, sliding_window=40)


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 40, count).tolist()


def run(engine: Engine, prompt: list[int], new: int = 12, prefix: Prefix | None = None) -> list[int]:
    request = engine.submit(prompt, RequestOptions(new, stop_ids=None), prefix)
    engine.run()
    return request.ids


@pytest.mark.parametrize(
    ("kind", "slots", "draft"),
    [("mistral", 1, None), ("mistral", 3, PromptLookup(3)), ("qwen3_next", 2, None)],
)
def test_prompts_that_begin_alike_get_what_they_would_get(kind: str, slots: int, draft: Any) -> None:
    """A shared system prompt, found with the second request, and two turns of a chat after one another."""
    model = model_of(kind)
    one = cache_bytes(model, 1, CacheSize(CAPACITY + (3 if draft else 0), 3 if draft else 0))
    plain, kept = (
        Engine(model, slots=slots, capacity=CAPACITY, draft=draft, prefix_bytes=size) for size in (0, 4 * one)
    )
    system = ids(70, 0)
    prompts = [[*system, *ids(9, 1)], [*system, *ids(20, 2)], [*system, *ids(5, 3)]]
    for prompt in prompts:
        assert run(kept, prompt) == run(plain, prompt)
    assert (
        kept.prefix_cache.hits == 1 and kept.prefix_cache.tokens == 70
    )  # the third: the second has found what they share
    turn = [*prompts[2], *run(kept, prompts[2]), *ids(8, 4)]
    before = kept.prefix_cache.tokens
    answer = run(kept, turn)
    assert answer == run(plain, turn)
    assert kept.prefix_cache.tokens - before == len(turn) - 8 - 1  # all but the last id of the first answer
    gc.collect()
    assert len(kept.prefix_cache) <= kept.prefix_cache.max_prefixes == 4 and len(kept._prefiller.prefixes) <= 4
    together = [kept.submit([*system, *ids(7, 10 + i)], RequestOptions(6, stop_ids=None)) for i in range(5)]
    kept.run()
    for i, request in enumerate(together):
        assert request.ids == run(plain, [*system, *ids(7, 10 + i)], 6)


class Odd:
    """A constraint: ids are odd."""

    def start(self, vocab: int, stop_ids: Sequence[int]) -> "Odd":
        return self

    def advance(self, ids: Sequence[int]) -> None:
        assert all(i % 2 for i in ids)

    def masks(self, drafts: Sequence[int], out: np.ndarray) -> None:
        out[: 1 + len(drafts)] = 0xAAAAAAAA


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("draft", [None, PromptLookup(3)])
def test_chats_with_a_constraint(slots: int, draft: Any) -> None:
    """Their ids are read while the device computes the next pass: what has ended is kept all the same."""
    model = model_of("mistral")
    plain, kept = (Engine(model, slots=slots, capacity=CAPACITY, draft=draft, prefix_bytes=n) for n in (0, 10**9))
    chat = ids(70, 1)
    for turn, new in enumerate((7, 12, 9)):
        found = []
        for engine in (kept, plain):
            other = engine.submit(ids(9, turn), RequestOptions(15, stop_ids=None)) if slots > 1 else None
            request = engine.submit(chat, RequestOptions(new, stop_ids=None, constraint=Odd()))
            engine.run()
            found.append((request.ids, None if other is None else other.ids))
        assert found[0] == found[1] and len(found[0][0]) == new
        chat = [*chat, *found[0][0], *ids(5, 100 + turn)]
    assert kept.prefix_cache.hits >= 2


@pytest.mark.slow
def test_prefixes_of_requests_begin_with_kept_ones() -> None:
    """Samples of one prompt share a prefix of their own, which need not be read whole."""
    model = model_of("mistral")
    engine = Engine(model, slots=2, capacity=CAPACITY, prefix_bytes=10**9)
    plain = Engine(model, slots=2, capacity=CAPACITY)
    prompt = ids(90, 0)
    run(engine, prompt)
    longer = [*prompt, *ids(70, 1)]
    prefix = Prefix(tuple(longer))
    assert run(engine, longer, 8, prefix) == run(plain, longer, 8)
    assert prefix.start is None and engine.prefix_cache.match((*prompt, 50)).ids == tuple(prompt)  # type: ignore[union-attr]


def test_the_least_recently_used_is_left_out() -> None:
    kept = PrefixCache(2)
    first, second, third = (tuple(ids(80, seed)) for seed in range(3))
    assert kept.match(first) is None and kept.match(second) is None and len(kept) == 0
    kept.insert(Prefix(first))
    kept.insert(Prefix(second))
    found = kept.match((*first, 7))
    assert found is not None and found.ids == first
    kept.insert(Prefix(third))
    assert len(kept) == kept.max_prefixes == 2 and kept.hits == 1
    assert kept.match((*third, 7)).ids == third and kept.hits == 2  # type: ignore[union-attr]
    shared = kept.match((*second, 7))  # left out before; with a recent prompt it has all of itself in common
    assert shared is not None and shared.ids == second and kept.hits == 2
    same = kept.match(third)  # shorter than the prompt, of which an id is left to read
    assert same is not None and len(same.ids) == 79


@pytest.mark.slow
def test_memory_is_bounded_and_warming_up_leaves_nothing() -> None:
    model = model_of("mistral")
    engine = Engine(model, slots=2, capacity=CAPACITY, prefix_bytes=0)
    assert engine.prefix_cache.max_prefixes == 0
    one = cache_bytes(model, 1, CacheSize(CAPACITY, 0))
    engine = Engine(model, slots=2, capacity=CAPACITY, prefix_bytes=3 * one + 1)
    engine.warm_up()
    assert (engine.prefix_cache.max_prefixes, len(engine.prefix_cache), engine.prefix_cache.hits) == (3, 0, 0)
    for seed in range(6):
        run(engine, ids(66, seed), 2)
    gc.collect()
    assert len(engine.prefix_cache) == 3 == len(engine._prefiller.prefixes)
    with pytest.raises(ValueError, match="takes"):
        Engine(model, slots=2, capacity=CAPACITY, prefix_bytes=10**15)


def test_samples_start_together() -> None:
    """Eight samples of a prefilled prompt start in one step, because they need no pass."""
    engine = Engine(build_tiny("mixtral"), slots=8, capacity=16)
    prefix = Prefix((5, 9, 11))
    requests = [engine.submit([5, 9, 11], RequestOptions(4, stop_ids=None), prefix) for _ in range(8)]
    engine.step()  # prefills the prefix
    engine.step()
    assert engine.waiting == 0 and engine.running == 8
    engine.run()
    assert {tuple(request.ids) for request in requests} == {tuple(requests[0].ids)}
