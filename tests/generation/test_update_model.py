"""`Engine.update_model`: new values in a running engine, without compilation and without stale caches."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import Engine, Prefix, PromptLookup, RequestOptions
from nnxmoe.generation.draft import MTPDraft
from nnxmoe.model.copies import on_mesh
from nnxmoe.train.loop.step import Step
from tests.support.mtp import with_mtp
from tests.support.running import compiled_in
from tests.support.tiny import build_tiny, stacking_of

CAPACITY, LONG = 256, {"max_position_embeddings": 512}


def trained(model: nnxmoe.CausalLM, rounds: int = 2) -> Iterator[nnxmoe.CausalLM]:
    """Yield the model of each state of training, merged anew as in `train.fit`. Each step donates its state."""
    step = Step(model, optax.sgd(0.5))
    state = step.init()
    for seed in range(rounds):
        yield step.model(state)
        tokens = np.random.default_rng(seed).integers(3, 40, (4, 24)).astype(np.int32)
        state = step(state, {"tokens": tokens, "loss_mask": np.ones_like(tokens)})[0]
    yield step.model(state)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    system = rng.integers(3, 40, 70).tolist()
    return [[*system, *rng.integers(3, 40, count).tolist()] for count in (9, 20, 5, 1)]


def answers(engine: Engine, prefix: Prefix | None) -> list[Any]:
    """Ids and accepted drafts of several requests that share a beginning, and of the next turn of the first."""
    options = RequestOptions(12, stop_ids=None)
    requests = [engine.submit(prompt, options, prefix) for prompt in prompts()]
    engine.run()
    requests.append(engine.submit([*requests[0].prompt, *requests[0].ids, 7, 8], options, prefix))
    engine.run()
    return [(request.ids, request.accepted) for request in requests]


def update_and_answer(engine: Engine, model: nnxmoe.CausalLM, prefix: Prefix | None, found: list[Any]) -> None:
    engine.update_model(model)
    found.append(answers(engine, prefix))


def model_of(kind: str, scan: bool = False) -> nnxmoe.CausalLM:
    if kind == "mtp":
        return nnx.merge(*nnx.split(with_mtp()))
    return build_tiny(kind, nnxmoe.Strategy(stacking=stacking_of(scan)), **LONG)


@pytest.mark.parametrize(
    ("kind", "scan", "draft", "prefixes"),
    [
        ("mixtral", True, None, True),
        pytest.param("mixtral", False, PromptLookup(3), True, marks=pytest.mark.slow),
        pytest.param("mtp", False, "mtp", True, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", True, None, False, marks=pytest.mark.slow),
        pytest.param("mistral", False, None, True, marks=pytest.mark.slow),
    ],
)
def test_ids_equal_those_of_a_fresh_engine(kind: str, scan: bool, draft: Any, prefixes: bool) -> None:
    options: dict[str, Any] = {"slots": 2, "capacity": CAPACITY, "prefix_bytes": 10**8 if prefixes else 0}
    prefix = Prefix(tuple(prompts()[0][:66])) if prefixes else None

    def engine_of(model: nnxmoe.CausalLM) -> Engine:
        return Engine(model, draft=MTPDraft.of(model, 2) if draft == "mtp" else draft, **options)

    start, found = model_of(kind, scan), list[list[Any]]()
    engine = engine_of(start)  # its arrays are uncommitted, and the arrays of training states are committed
    answers(engine, prefix)
    answers(engine, prefix)  # with cached prefixes
    for model in trained(start):
        assert compiled_in(functools.partial(update_and_answer, engine, model, prefix, found)) == 0
        fresh = engine_of(model)
        assert found[-1] == answers(fresh, prefix)
        jax.tree.map(np.testing.assert_array_equal, engine.draft, fresh.draft)
    assert found[0] != found[1] != found[2]


def on_a_mesh(scan: bool) -> list[bool]:
    """Whether updates compile nothing and give the ids of a fresh engine, on eight devices."""
    mesh = nnxmoe.make_mesh(data=2, expert=2, tensor=2)
    dispatch, rules = nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RaggedAllToAll()), {**nnxmoe.RULES, "vocab": None}
    strategy = nnxmoe.Strategy(dispatch=dispatch, mesh=mesh, rules=rules, stacking=stacking_of(scan))
    start, found, equal = build_tiny("mixtral", strategy, **LONG), list[Any](), list[bool]()
    options: dict[str, Any] = {"slots": 2, "capacity": CAPACITY, "prefix_bytes": 10**8}
    engine = Engine(start, **options)
    answers(engine, None)
    answers(engine, None)
    for model in trained(start):
        equal.append(compiled_in(functools.partial(update_and_answer, engine, model, None, found)) == 0)
        equal.append(found[-1] == answers(Engine(model, **options), None))
    return equal


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_on_a_mesh(eight: Any, scan: bool) -> None:
    assert all(eight(on_a_mesh, scan))


def test_running_and_waiting_requests() -> None:
    """Running requests keep their ids and are not cached; a prefix in prefill and waiting requests begin anew."""
    first, second = (build_tiny("mixtral", nnxmoe.Strategy(), seed, **LONG) for seed in (0, 1))
    engine = Engine(first, slots=1, capacity=CAPACITY, prefix_bytes=10**8)
    running = engine.submit(prompts()[0], RequestOptions(12, stop_ids=None))
    while len(running.ids) < 5:
        engine.step()
    before = list(running.ids)
    waiting = engine.submit(prompts()[1], RequestOptions(12, stop_ids=None))
    assert waiting.prefix is not None
    engine.update_model(second)
    engine.run()
    fresh = {model: Engine(model, slots=1, capacity=CAPACITY) for model in (first, second)}
    whole = {model: answers(one, None) for model, one in fresh.items()}
    assert running.ids[:5] == before == whole[first][0][0][:5] and len(running.ids) == 12
    assert waiting.ids == whole[second][1][0]
    assert [len(prefix) for prefix in engine.prefix_cache._prefixes] == [len(prompts()[1]) + 11]

    prefix = Prefix((5, *prompts()[2] * 2))  # several chunks
    late = engine.submit([*prefix.ids, 3], RequestOptions(40, stop_ids=None), prefix)
    engine.step()
    assert engine._prefill is not None and engine._prefill.prefix is not None
    engine.update_model(first)
    engine.run()
    request = fresh[first].submit(late.prompt, late.options)
    fresh[first].run()
    assert late.ids == request.ids


def test_the_counters_of_the_prefix_cache_keep_their_values() -> None:
    first, second = (build_tiny("mixtral", nnxmoe.Strategy(), seed, **LONG) for seed in (0, 1))
    engine = Engine(first, slots=1, capacity=CAPACITY, prefix_bytes=10**8)
    prompt = tuple(prompts()[0])
    engine.prefix_cache.insert(Prefix(prompt[:70]))
    assert engine.prefix_cache.match(prompt) is not None
    engine.update_model(second)
    assert len(engine.prefix_cache) == 0 and engine.prefix_cache.match(prompt) is None
    assert (engine.prefix_cache.hits, engine.prefix_cache.tokens) == (1, 70)


def test_other_models_are_refused() -> None:
    model = model_of("mixtral")
    engine = Engine(model, slots=1, capacity=CAPACITY)
    others: dict[str, Any] = {
        "vocab_size is 54": build_tiny("mixtral", nnxmoe.Strategy(), vocab_size=54, **LONG),
        "dtype is bfloat16": type(model)(model.config, nnxmoe.Strategy(), rngs=nnx.Rngs(0), dtype="bfloat16"),
        "mesh is Mesh": on_mesh(model, nnxmoe.make_mesh(data=1)),
        "structure": build_tiny("mixtral", nnxmoe.Strategy(), num_hidden_layers=1, **LONG),
        r"array float32 \[6, 24, 30\]": build_tiny("mixtral", nnxmoe.Strategy(), intermediate_size=30, **LONG),
        "abstract": type(model)(model.config, nnxmoe.Strategy(), rngs=None),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=message):
            engine.update_model(other)
    assert engine.model is model
    drafted = Engine(with_mtp(), slots=1, capacity=32, draft=MTPDraft.of(with_mtp()))
    plain = nnx.merge(*nnx.split(with_mtp()))
    plain.mtp = nnx.List([])
    with pytest.raises(ValueError, match="mtp=True"):
        drafted.update_model(plain)
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.update_model(model)
