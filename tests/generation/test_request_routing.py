"""The routing that engines return equals the routing of one pass over the prompt and the new ids."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

import nnxmoe
from nnxmoe import Engine, EngineLimits, Prefix, PromptLookup, RequestOptions, Sampling
from nnxmoe.generation import passes
from nnxmoe.generation.draft import MTPDraft
from nnxmoe.generation.passes import CacheSize, LogitsMode
from nnxmoe.generation.request import Request
from nnxmoe.model.program import jit_function, split_for_program
from tests.support.families import load
from tests.support.mtp import with_mtp
from tests.support.tiny import build, build_tiny, stacking_of

CAPACITY, LIMITS = 256, EngineLimits(return_routing=True)
OPTIONS = RequestOptions(16, stop_ids=None, return_routing=True)


def model_of(kind: str, scan: bool = False) -> nnxmoe.CausalLM:
    strategy = nnxmoe.Strategy(stacking=stacking_of(scan))
    if kind == "mtp":
        return with_mtp()
    if kind == "qwen3_next":
        case = load(kind)
        return build(case.fields | {"max_position_embeddings": 512}, case.weights, strategy)
    layers = {"num_hidden_layers": 10} if kind == "layerwise" else {}
    kind = "mixtral" if kind == "layerwise" else kind
    return build_tiny(kind, strategy, max_position_embeddings=512, **layers)


def one_pass(model: nnxmoe.CausalLM, ids: Sequence[int]) -> np.ndarray:
    """Experts ``[tokens, L, X]`` of one pass over the ids."""
    routing = model(np.array([ids]), return_routing=True).routing
    assert routing is not None
    return np.stack([np.asarray(routing[layer].experts[0]) for layer in sorted(routing)], axis=1)


def mismatches(model: nnxmoe.CausalLM, request: Request | nnxmoe.Completion) -> int:
    """Number of ids that differ from one pass, after the shape and the dtype have been checked."""
    prompt = request.prompt if isinstance(request, Request) else request.prompt_ids
    ids, routing = [*prompt, *request.ids], request.routing
    assert routing is not None and routing.dtype == np.uint8
    wanted = one_pass(model, ids)[: len(ids) - 1]
    assert routing.shape == wanted.shape
    return int((routing != wanted).sum())


def random_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 40, count).tolist()


@pytest.mark.parametrize(
    ("kind", "scan", "draft"),
    [
        ("mixtral", False, PromptLookup(3)),
        pytest.param("deepseek_v3", True, None, marks=pytest.mark.slow),
        pytest.param("gpt_oss", False, None, marks=pytest.mark.slow),
        pytest.param("mtp", False, "mtp", marks=pytest.mark.slow),
        pytest.param("layerwise", False, None, marks=pytest.mark.slow),
        pytest.param("qwen3_next", False, PromptLookup(2), marks=pytest.mark.slow),
    ],
)
def test_routing_equals_one_pass(kind: str, scan: bool, draft: Any) -> None:
    """Prompts of several chunks and rows, cached and given prefixes, chains of prefixes, and cancelled requests."""
    model = model_of(kind, scan)
    draft = MTPDraft.of(model, 2) if draft == "mtp" else draft
    long = kind != "mtp"
    capacity = CAPACITY if long else 60
    engine = Engine(model, slots=3, capacity=capacity, limits=LIMITS, draft=draft, prefix_bytes=10**8)
    start = random_ids(70 if long else 8, 0)
    prompts = [[*start, *random_ids(n, n)] for n in (3, 9, 66 if long else 12, 1)] + [random_ids(n, n) for n in (1, 5)]
    requests = [engine.submit(prompt, OPTIONS) for prompt in prompts]
    engine.run()
    requests.append(engine.submit([*requests[0].prompt, *requests[0].ids, 7, 8], OPTIONS))  # the next turn of a chat
    prefix = Prefix((*start, 4))
    longer = Prefix((*prefix.ids, *random_ids(80 if long else 4, 5)), prefix)
    requests += [engine.submit([*prefix.ids, 5, 6], OPTIONS, prefix)]
    requests += [engine.submit([*longer.ids, *end], OPTIONS, longer) for end in ([], [9], [9, 10])]
    plain = engine.submit(prompts[0], dataclasses.replace(OPTIONS, return_routing=False))
    cancelled = engine.submit(prompts[2], OPTIONS)
    while len(cancelled.ids) < 3:
        engine.step()
    engine.cancel(cancelled)
    engine.run()
    assert kind == "mtp" or engine.prefix_cache.hits > 1
    assert plain.routing is None
    assert not sum(mismatches(model, request) for request in [*requests, cancelled])


@pytest.mark.parametrize("draft", [None, PromptLookup(3)])
def test_completions(draft: Any) -> None:
    """Samples that share their prompt, stop strings, and prompts of one id."""

    class Letters:
        all_special_ids = ()

        def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
            return [3 + ord(letter) % 50 for letter in text]

        def decode(self, ids: Sequence[int], *_: Any, **__: Any) -> str:
            return "".join(chr(97 + i % 5) for i in ids)

    model = model_of("mixtral")
    options: dict[str, Any] = {"n": 2, "sampling": Sampling(1.2), "draft": draft, "slots": 3, "stop": ["ab", "ce"]}
    prompts = [random_ids(n, n) for n in (1, 66, 9)]
    completions = list(nnxmoe.complete(model, prompts, Letters(), max_new_tokens=24, return_routing=True, **options))
    assert {done.finish for done in completions} >= {"stop"} and len(completions) == 6
    assert not sum(mismatches(model, done) for done in completions)
    whole = list(nnxmoe.complete(model, prompts, Letters(), max_new_tokens=24, eos_token_id=None))
    assert whole[0].routing is None
    options |= {"n": 1, "sampling": None, "eos_token_id": None}
    for length in (9, 10, 11, 12):  # stops between drafted ids, which are accepted because greedy ids repeat
        options["stop"] = [done.text[:length] for done in whole]
        stopped = list(nnxmoe.complete(model, prompts, Letters(), max_new_tokens=24, return_routing=True, **options))
        assert [len(done.ids) for done in stopped] == [length] * 3
        assert not sum(mismatches(model, done) for done in stopped)


def test_generate() -> None:
    """Padding on both sides and inside, and rows that end early."""
    model = model_of("deepseek_v3")
    tokens = np.array([[0, 0, 5, 6, 7], [8, 9, 10, 0, 0], [11, 0, 12, 13, 0], [1, 2, 3, 4, 5]])
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [1, 1, 1, 1, 1]])
    plain = nnxmoe.generate(model, tokens, mask, 12, eos_token_id=None)
    eos = int(plain[0, 8])
    ids, routing = nnxmoe.generate(model, tokens, mask, 12, eos_token_id=eos, return_routing=True)
    assert routing.shape == (*ids.shape, 2, 3) and routing.dtype == np.int8
    for row in range(4):
        new = ids[row, 5:].tolist()
        end = new.index(eos) + 1 if eos in new else 12
        columns = [*np.flatnonzero(mask[row]), *range(5, 5 + end - 1)]
        np.testing.assert_array_equal(routing[row, columns], one_pass(model, ids[row, [*columns, 5 + end - 1]])[:-1])
        assert (np.delete(routing[row], columns, axis=0) == -1).all()
    assert nnxmoe.generate(build_tiny("llama"), [[3, 4]], None, 3, return_routing=True)[1] is None


@pytest.mark.wrong_types
def test_routing_is_computed_on_request_only() -> None:
    """The compiled program of a pass without routing has no additional output and no array of narrow ids."""
    model = model_of("mixtral")
    structure, leaves = split_for_program(model)
    ids, texts, counts = np.ones((2, 64), np.int32), list[str](), list[int]()
    for with_routing in (False, True):
        mode = LogitsMode(last_only=True, with_routing=with_routing)
        program = structure.program(jit_function, passes._pass, (4, 5), (2,))
        lowered = program.lower(leaves, ids, ids > 0, None, np.int32(0), CacheSize(64, 0), mode)
        texts.append(lowered.compile().as_text())
        counts.append(len(jax.tree.leaves(lowered.out_info)))
    assert ["u8[" in text for text in texts] == [False, True] and counts[1] == counts[0] + 1
    engine = Engine(model, slots=2, capacity=64)
    request = engine.submit([3, 4], dataclasses.replace(OPTIONS, return_routing=False))
    engine.run()
    assert request.routing_parts == [] and request.routing is None
    with pytest.raises(ValueError, match="return_routing"):
        engine.submit([3, 4], OPTIONS)
    dense = Engine(build_tiny("llama"), slots=1, capacity=40, limits=LIMITS)
    request = dense.submit([3, 4], OPTIONS)
    dense.run()
    assert request.done and request.routing is None


def on_a_mesh() -> list[int]:
    mesh = nnxmoe.make_mesh(data=2, expert=2, tensor=2)
    dispatch, rules = nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RaggedAllToAll()), {**nnxmoe.RULES, "vocab": None}
    strategy = nnxmoe.Strategy(dispatch=dispatch, mesh=mesh, rules=rules)
    model, plain = (build_tiny("mixtral", s, max_position_embeddings=512) for s in (strategy, nnxmoe.Strategy()))
    engine = Engine(model, slots=3, capacity=128, limits=LIMITS, prefix_bytes=10**8)
    start = random_ids(70, 0)
    requests = [engine.submit([*start, *random_ids(n, n)], OPTIONS) for n in (3, 9, 20, 2)]
    engine.run()
    return [mismatches(plain, request) for request in requests]


@pytest.mark.slow
def test_on_a_mesh(eight: Any) -> None:
    assert eight(on_a_mesh) == [0] * 4


@pytest.mark.slow
def test_many_experts_need_two_bytes() -> None:
    model = build_tiny("mixtral", nnxmoe.Strategy(), num_local_experts=300, intermediate_size=4)
    ids, routing = nnxmoe.generate(model, [random_ids(20, 0)], None, 4, return_routing=True)
    np.testing.assert_array_equal(routing[0, :-1], one_pass(model, ids[0])[:-1])
    assert routing.dtype == np.int16 and routing.max() > 255
    assert next(nnxmoe.complete(model, [[3]], max_new_tokens=2, return_routing=True)).routing.dtype == np.uint16


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "draft"), [("deepseek_v3", PromptLookup(3)), ("mixtral", None)])
def test_many_requests(kind: str, draft: Any) -> None:
    """500 requests with shared and cached prefixes, samples, stop ids and cancels, submitted at random."""
    model, rng = model_of(kind), np.random.default_rng(0)
    one = passes.cache_bytes(model, 1, CacheSize(CAPACITY + 3, 3))
    engine = Engine(model, slots=4, capacity=CAPACITY, limits=LIMITS, draft=draft, prefix_bytes=6 * one)
    starts = [random_ids(count, count) for count in (0, 3, 67, 90, 130)]
    prefixes = [Prefix(tuple(start)) if start else None for start in starts]
    requests = list[Request]()
    while len(requests) < 500 or any(not request.done for request in requests):
        if len(requests) < 500 and engine.waiting < 4:
            start = int(rng.integers(len(starts)))
            prompt = [*starts[start], *random_ids(int(rng.integers(1, 30)), len(requests))]
            if rng.random() < 0.2 and requests and requests[-1].ids:
                prompt = [*requests[-1].prompt, *requests[-1].ids, 5][: CAPACITY - 40]
                start = 0
            sampling = [None, Sampling(1.1), Sampling(0.7, top_k=9)][len(requests) % 3]
            options = RequestOptions(int(rng.integers(1, 32)), 0, sampling, (5, 11), len(requests), return_routing=True)
            requests.append(engine.submit(prompt, options, prefixes[start] if rng.random() < 0.5 else None))
        if requests and rng.random() < 0.05:
            engine.cancel(requests[-int(rng.integers(1, min(7, len(requests) + 1)))])
        engine.step()
    begun = [request for request in requests if request.ids]
    assert sum(request.finish == "cancelled" for request in begun) > 5 and len(begun) > 400
    assert engine.prefix_cache.hits > 20
    assert sum(len(request.prompt) + len(request.ids) for request in begun) > 30_000
    assert not sum(mismatches(model, request) for request in begun)
