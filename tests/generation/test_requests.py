"""Requests: every argument is validated by kind before anything is computed, and logits without a meaning end a row."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import Engine, EngineLimits, Prefix, PromptLookup, RequestOptions, Sampling
from nnxmoe.generation.draft import ModelDraft
from nnxmoe.generation.engine import Request
from nnxmoe.generation.rules import Rules
from tests.support.running import compiled_in
from tests.support.tiny import TINY, build, build_tiny, tiny_weights

VOCAB, BAD = 53, 7  # the id whose embedding is NaN
WILD = Sampling(temperature=1.3, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2)


@functools.cache
def tiny(dtype: str = "float32") -> nnxmoe.CausalLM:
    """One small model for all tests here, to limit compilation; must not be modified."""
    fields = TINY["llama"] | {"num_hidden_layers": 1}
    return build(fields, tiny_weights(fields, 0), nnxmoe.Strategy(), dtype=dtype)


@functools.cache
def poisoned(dtype: str = "float32") -> nnxmoe.CausalLM:
    """The same model, but with NaN as the embedding of one id."""
    model = nnx.merge(*nnx.split(tiny(dtype)), copy=True)
    model.embed.table.set_value(model.embed.table.get_value().at[BAD].set(jnp.nan))
    return model


class Numbers:
    """A tokenizer of ids as text, of which the last is a special token that the model does not have."""

    all_special_ids = (VOCAB + 3,)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], *_: Any, **__: Any) -> str:
        return " ".join(map(str, ids))


# Ids

IDS: list[Any] = [(3, 4), [3, 4], np.array([3, 4], np.uint8), jnp.array([3, 4]), [np.int16(3), jnp.int32(4)], [3.0, 4]]
NOT_IDS: list[Any] = [[1.7], ["a"], [True], [-1], "ab", b"ab", np.array([1.5]), np.ones(1, bool), [[1]], {1: 2}, {1}]
PLACES: dict[str, Callable[[Any], Any]] = {
    "stop_ids": lambda ids: RequestOptions(stop_ids=ids).stop_ids,
    "prefix": lambda ids: Prefix(ids).ids,
    "suppressed": lambda ids: Rules(suppressed=ids).suppressed,
    "forced": lambda ids: Rules(forced_end=ids).forced_end,
    "biases": lambda ids: Rules(biases=((ids, 1),)).biases[0][0],
    "submit": lambda ids: Engine(tiny(), slots=1, capacity=80).submit(ids).prompt,
    "complete": lambda ids: next(nnxmoe.complete(tiny(), [ids], max_new_tokens=0)).prompt_ids,
    "score": lambda ids: nnxmoe.score(tiny(), [ids])[0].ids[-2:],
    "context": lambda ids: (3, *nnxmoe.score(tiny(), [([3], ids)])[0].ids)[-2:],
}


@pytest.mark.wrong_types
@pytest.mark.parametrize("place", PLACES)
def test_ids_are_read_alike_everywhere(place: str) -> None:
    for ids in IDS:
        found = PLACES[place](ids)
        assert found[-1] == 4 and all(type(i) is int for i in found), ids
    for ids in NOT_IDS:
        with pytest.raises(ValueError, match=r"integer|text|list|tokenizer"):
            PLACES[place](ids)


@pytest.mark.wrong_types
@pytest.mark.parametrize("end", [[1.7], [2**40], ["a"], True, -1, VOCAB, [3, VOCAB], "</s>", {3}, np.float32(0.5)])
def test_ends_that_are_not_ids_of_the_model_are_refused(end: Any) -> None:
    model = tiny()
    with pytest.raises(ValueError, match=r"stop_ids|eos_token_id"):
        Engine(model, slots=1, capacity=80).submit([1], RequestOptions(stop_ids=end))
    for door in (
        lambda: nnxmoe.generate(model, [[1]], eos_token_id=end),
        lambda: nnxmoe.complete(model, [[1]], eos_token_id=end),
        lambda: nnxmoe.stream(model, Numbers(), [1], eos_token_id=end),
    ):
        with pytest.raises(ValueError, match=r"stop_ids|eos_token_id"):
            door()


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    "end", [5, np.int8(5), np.array(5), jnp.int32(5), [5], np.array([5], np.uint8), jnp.array([5])]
)
def test_ends_of_any_array_library(end: Any) -> None:
    assert RequestOptions(stop_ids=end).stop_ids == (5,) and RequestOptions(stop_ids=end) == RequestOptions(stop_ids=5)
    model = build_tiny("llama", None, num_hidden_layers=1)
    model.generation_config = {"eos_token_id": [5.0, -1, 10**9]}
    assert Engine(model, slots=1, capacity=80).submit([1]).options.stop_ids == (5,)


@pytest.mark.wrong_types
def test_ends_in_files_that_are_not_ids_are_named() -> None:
    model = build_tiny("llama", None, num_hidden_layers=1)
    for bad in ([1.5], "x", [True]):
        model.generation_config = {"eos_token_id": bad}
        with pytest.raises(ValueError, match=r"eos_token_id in generation_config\.json"):
            nnxmoe.generate(model, [[1]])
    for name in ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id"):
        model.generation_config = {name: [[1.7]] if name == "bad_words_ids" else [1.7]}
        with pytest.raises(ValueError, match=rf"generation_config\.json: {name}=.*1\.7"):
            Sampling.from_checkpoint(model)


def test_a_special_token_that_the_model_does_not_have_may_be_a_stop_string() -> None:
    (done,) = nnxmoe.complete(tiny(), [[1]], Numbers(), stop=str(VOCAB + 3), max_new_tokens=2, eos_token_id=None)
    assert len(done.ids) == 2


# Options

WRONG: list[tuple[Any, str, list[Any]]] = [
    (Sampling, "temperature", ["1", True, None, [1], jnp.ones(1), -1, float("nan")]),
    (Sampling, "top_k", [2.5, "3", True, jnp.array(True), -1]),
    (Sampling, "top_p", [0, None, "x"]),
    (Sampling, "min_p", [2, jnp.float32(1.5)]),
    (Sampling, "repetition_penalty", [0, "x", None]),
    (Sampling, "min_new_tokens", [-1, 1.5, None]),
    (Sampling, "min_length", [-1, "1"]),
    (Sampling, "rules", [5, "x", Rules, [], len]),
    (Rules, "ngram", [1.5, True, "2", -1]),
    (Rules, "biases", [5, {(1,): 2.0}, "ab", [1], [([], 1)], [([1], "x")], [([1], float("nan"))], [([1], True)]]),
    (EngineLimits, "max_stop_ids", [1.5, True, -1, None]),
    (EngineLimits, "max_logit_biases", ["x", -1]),
    (EngineLimits, "max_logprobs", [-1, 2.5]),
    (EngineLimits, "sampling", [None, 5, Sampling(), (True, True, True, ())]),
    (RequestOptions, "max_new_tokens", [None, "3", True, 1.5]),
    (RequestOptions, "min_new_tokens", [None, -1]),
    (RequestOptions, "sampling", [5, Sampling, EngineLimits(), {"temperature": 1}]),
    (RequestOptions, "seed", [1.5, None, "a", True, jax.random.key(0)]),
    (RequestOptions, "sample", [-1, 2**31, None]),
    (
        RequestOptions,
        "logit_bias",
        [None, [(1, 2)], 5, {1.5: 1}, {True: 1}, {1: True}, {1: "x"}, {1: 1e39}, {1: 10**400}],
    ),
    (RequestOptions, "logprobs", [True, -1, "a"]),
    (RequestOptions, "constraint", [5, "x", nnxmoe.Grammar]),
    (Prefix, "start", [5, (1,)]),
    (PromptLookup, "count", [2.5, True, 0, "2", None]),
    (PromptLookup, "ngram", [1.5, -1]),
    (Engine, "slots", [0, "2", None, True]),
    (Engine, "capacity", [0, 1.5, None]),
    (Engine, "ahead", [-1, "1"]),
    (Engine, "prefix_bytes", [-1, None]),
    (Engine, "limits", [5, Sampling()]),
    (Engine, "logits_processor", [5, "x", dict]),
    (Engine, "grouping", [5]),
    (Engine, "draft", [5, "on", PromptLookup]),
]
FIRST: dict[Any, tuple[Any, ...]] = {Prefix: ((1, 2),)}


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("made", "name", "values"), WRONG, ids=lambda value: getattr(value, "__name__", str(value)[:20])
)
def test_options_of_wrong_types_are_refused_by_name(made: Any, name: str, values: list[Any]) -> None:
    first = (tiny(),) if made is Engine else FIRST.get(made, ())
    for value in values:
        with pytest.raises(ValueError, match="bias" if name in ("biases", "logit_bias") else name):
            made(*first, **{name: value})


@pytest.mark.slow
@pytest.mark.wrong_types
def test_scalars_of_array_libraries_are_numbers() -> None:
    """They become numbers of Python, with which records can be compared and hashed."""
    for one in (np.asarray, jnp.asarray, np.float32, lambda value: np.asarray(value)[()]):
        sampling = Sampling(one(0.5), one(3), one(1.0), one(0.25), one(2.0), one(1), one(2))
        assert sampling == Sampling(0.5, 3, 1.0, 0.25, 2.0, 1, 2) and hash(sampling)
        assert EngineLimits(one(2), one(3), one(1)) == EngineLimits(2, 3, 1) and hash(EngineLimits(one(2)))
        given = RequestOptions(one(3), one(1), seed=one(4), sample=one(1), logit_bias={5: one(0.5)}, logprobs=one(2))
        assert given == RequestOptions(3, 1, seed=4, sample=1, logit_bias={5: 0.5}, logprobs=2)
    for one in (np.asarray, jnp.asarray, np.int64):
        assert PromptLookup(one(2), one(1)) == PromptLookup(2, 1) and hash(PromptLookup(one(2)))
        assert Engine(tiny(), slots=one(2), capacity=one(80), ahead=one(1), prefix_bytes=one(0)).slots == 2
        found = list(nnxmoe.complete(tiny(), [[1], [2]], n=one(1), slots=one(1), seed=one(2), max_new_tokens=one(1)))
        assert len(found) == 2
        several = nnxmoe.complete(tiny(), [[1], [2]], seed=one([3, 4]), max_new_tokens=1, sampling=WILD)
        expected = nnxmoe.complete(tiny(), [[1], [2]], seed=[3, 4], max_new_tokens=1, sampling=WILD)
        assert [done.ids for done in several] == [done.ids for done in expected]


@pytest.mark.wrong_types
def test_things_that_are_not_models_are_refused() -> None:
    for door in (
        lambda: nnxmoe.generate("demo", [[1]]),  # type: ignore[arg-type]
        lambda: nnxmoe.complete("demo", [[1]]),  # type: ignore[arg-type]
        lambda: nnxmoe.stream("demo", Numbers(), [1]),  # type: ignore[arg-type]
        lambda: nnxmoe.score("demo", [[1, 2]]),  # type: ignore[arg-type]
        lambda: Engine("demo"),  # type: ignore[arg-type]
        lambda: ModelDraft.of("demo"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="model='demo': pass a model"):
            door()


def test_the_caller_may_change_what_was_passed() -> None:
    """A request keeps no reference to a dict or list of the caller."""
    bias, ends = {3: 100.0}, [5]
    wanted = RequestOptions(1, logit_bias=bias, stop_ids=ends)
    bias[3], ends[0] = -100.0, 3
    assert wanted.logit_bias == {3: 100.0} and wanted.stop_ids == (5,)


# Before anything is computed


@pytest.fixture
def no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(_: Any) -> Any:
        raise AssertionError("a step was computed")

    monkeypatch.setattr(Engine, "step", step)


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"prompts": [[1, 2], [3, 4], [5, 99999]]}, r"prompt 2: token ids must be in 0 … 52, got 99999"),
    ({"prompts": [[1], [2], []]}, "prompt 2: a prompt is empty"),
    ({"prompts": [[1], [2.5]]}, r"prompt 1: .*2\.5"),
    ({"prompts": [[1], None]}, "prompt 1: a prompt is None"),
    ({"prompts": [[1], {2, 3}]}, "prompt 1: "),
    ({"prompts": ["1 2", "3 60"]}, "prompt 1: token ids must be in 0 … 52, got 60"),
    ({"prompts": iter([[1], [-2]])}, "prompt 1: .*-2"),
    ({"prompts": (ids for ids in ([1], [53]))}, "prompt 1: token ids must be in 0 … 52, got 53"),
    ({"logprobs": VOCAB + 1}, "logprobs=54 is more than the 53 ids"),
    ({"logit_bias": {VOCAB: 1.0}}, "ids of logit_bias must be in 0 … 52, got 53"),
    ({"logit_bias": []}, "logit_bias"),
    ({"eos_token_id": VOCAB}, "stop_ids must be in 0 … 52, got 53"),
    ({"constraint": nnxmoe.Grammar("", None), "eos_token_id": None}, "needs ids that end the text"),
    ({"seed": [1, 2.5, 3]}, r"seed .*2\.5"),
    ({"seed": "abc"}, "seed"),
    ({"stop": 5}, "stop=5"),
    ({"stop": ["x", 5]}, "stop="),
    ({"draft": "on"}, "draft"),
    ({"sampling": 5}, "sampling=5"),
    ({"logits_processor": 5}, "logits_processor"),
    ({"n": 1.5}, "n must be"),
    ({"slots": 0}, "slots must be"),
    ({"prompts": 5}, "complete takes a list of prompts"),
    ({"prompts": None}, "complete takes a list of prompts"),
    ({"prompts": jnp.array([1, 2])}, "complete takes a list of prompts"),
]


@pytest.mark.wrong_types
@pytest.mark.parametrize(("options", "message"), FAULTS)
def test_complete_checks_every_prompt_and_option_first(options: dict[str, Any], message: str, no_step: None) -> None:
    with pytest.raises(ValueError, match=message):
        nnxmoe.complete(tiny(), **{"prompts": [[1], [2], [3]], "tokenizer": Numbers(), "slots": 1} | options)


@pytest.mark.wrong_types
def test_generate_stream_and_score_check_everything_first(no_step: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    monkeypatch.setattr("nnxmoe.generation.score.model_program", lambda *_, **__: pytest.fail("a pass was computed"))
    for door, message in (
        (lambda: nnxmoe.generate(model, [[1, 2], [3, 99]]), "got 99"),
        (lambda: nnxmoe.generate(model, [[1]], max_new_tokens=10**15), "takes"),
        (lambda: nnxmoe.stream(model, Numbers(), "1 99"), "got 99"),
        (lambda: nnxmoe.stream(model, Numbers(), [1], draft="on"), "draft"),
        (lambda: nnxmoe.stream(model, Numbers(), [1], constraint=5), "constraint"),  # type: ignore[arg-type]
        (lambda: nnxmoe.stream(model, Numbers(), [1], max_new_tokens=10**15), "takes"),
        (lambda: nnxmoe.score(model, [[1, 2], [3, 99]]), "text 1: token ids must be in 0 … 52, got 99"),
        (lambda: nnxmoe.score(model, iter([[1, 2], [3]])), "text 1 has nothing to score"),
        (lambda: nnxmoe.score(model, [[1, 2], [1.5, 2]]), "text 1: "),
        (lambda: nnxmoe.score(model, [[1, 2]], top=1.5), "top"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            door()


# Prefixes


@pytest.mark.slow
def test_a_prefix_may_be_shared_by_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that keeps prefixes links them by itself; the caller's object stays as it is."""
    beginning = tuple((7 * i) % VOCAB for i in range(80))
    whole = (*beginning, *((5 * i) % VOCAB for i in range(70)))
    prefix, made = Prefix(whole), list[tuple[int, ...]]()
    for kept in (10**9, 0, 10**9):
        engine = Engine(tiny(), slots=1, capacity=240, prefix_bytes=kept)
        if kept:
            engine.submit(beginning, RequestOptions(2, stop_ids=None))
            engine.run()
        request = engine.submit([*whole, 1], RequestOptions(4, stop_ids=None), prefix)
        assert prefix.start is None and bool(engine.prefix_cache.starts) == bool(kept)
        engine.run()
        assert prefix.start is None and not engine.prefix_cache.starts
        made.append(tuple(request.ids))
    assert len(set(made)) == 1
    first = Prefix(beginning)
    second = Prefix(whole, first)
    for _ in range(2):
        engine = Engine(tiny(), slots=1, capacity=240)
        request = engine.submit([*whole, 1], RequestOptions(4, stop_ids=None), second)
        engine.run()
        assert tuple(request.ids) == made[0] and second.start is first


# Logits that are NaN


class Odd:
    """A constraint: odd ids, of which the logits of others must not matter."""

    def start(self, vocab: int, stop_ids: Sequence[int]) -> "Odd":
        return self

    def advance(self, ids: Sequence[int]) -> None:
        assert all(i % 2 for i in ids)

    def masks(self, drafts: Sequence[int], out: np.ndarray) -> None:
        out[:] = 0xAAAAAAAA


def rows(model: nnxmoe.CausalLM, prompts: Sequence[Sequence[int]], draft: Any = None, **options: Any) -> list[Request]:
    """Requests that share an engine; the id without an embedding is excluded unless ``logit_bias`` says otherwise."""
    given: dict[str, Any] = {"stop_ids": None, "logit_bias": {BAD: -jnp.inf}, "logprobs": 1} | options
    wanted = [RequestOptions(6, seed=i, **given) for i in range(len(prompts))]
    engine = Engine(model, slots=len(prompts), capacity=80, limits=wanted[0].required_limits(VOCAB), draft=draft)
    requests = [engine.submit(prompt, one) for prompt, one in zip(prompts, wanted, strict=True)]
    engine.run()
    return requests


DRAFTS = [None, PromptLookup(3)]


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"sampling": WILD}, {"constraint": Odd()}, {"logprobs": None}], ids=lambda options: str(*options)
)
def test_a_row_of_nan_logits_ends_and_harms_no_other(
    options: dict[str, Any], draft: Any, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = [3, 1, 4, 1, 3, 1, 4], [3, BAD, 4]
    alone = rows(tiny(), [good, good], draft, **options)[1]
    with caplog.at_level(logging.WARNING):
        broken, fine, *_ = rows(poisoned(), [bad, good, bad], draft, **options)
    assert (broken.finish, broken.ids, broken.logprobs) == ("error", [], [])
    assert (fine.finish, fine.ids) == ("length", alone.ids) and np.isfinite(fine.logprobs).all()
    (record,) = caplog.records
    assert "NaN or infinite" in record.getMessage() and "float16" not in record.getMessage()


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_nan_after_some_ids_ends_a_row_there(draft: Any) -> None:
    """The ids before are kept; the caches of such a row are not kept for later prompts."""
    prompt = [3, 1, 4] * 22
    (request,) = rows(poisoned(), [prompt[:5]], draft, logit_bias={BAD: 1000.0})
    assert request.finish == "error" and request.ids == [BAD] and len(request.logprobs) == len(request.top) == 1
    engine = Engine(
        poisoned(), slots=1, capacity=80, limits=EngineLimits(max_logit_biases=1), draft=draft, prefix_bytes=10**9
    )
    request = engine.submit(prompt, RequestOptions(6, stop_ids=None, logit_bias={BAD: 1000.0}))
    engine.run()
    assert request.finish == "error" and request.ids == [BAD] and len(engine.prefix_cache) == 0 and engine.running == 0


@pytest.mark.slow
@pytest.mark.parametrize("value", [jnp.nan, -jnp.inf, jnp.inf])
def test_logits_without_a_finite_choice(value: float, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tiny(), slots=1, capacity=80, logits_processor=lambda logits, history: jnp.full_like(logits, value))
    for sampling in (None, Sampling(top_k=5, temperature=0.7)):
        request = engine.submit([1, 2], RequestOptions(3, stop_ids=None, sampling=sampling))
        engine.run()
        assert (request.finish, request.ids) == ("error", [])
    assert len(caplog.records) == 1 and "process" in caplog.text


@pytest.mark.slow
def test_nan_is_named_by_every_door(caplog: pytest.LogCaptureFixture) -> None:
    """One warning per call; in float16 with the remedy."""
    model, prompts = poisoned("float16"), [[3, 4], [3, BAD]]
    remedy = "float16 overflows beyond 65504: load the model with dtype=jnp.bfloat16 or jnp.float32"

    def named(run: Callable[[], Any]) -> Any:
        caplog.clear()
        found = run()
        assert len(caplog.records) == 1 and remedy in caplog.text
        return found

    options: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": None}
    ids = named(lambda: nnxmoe.generate(model, prompts, **options))
    alone = nnxmoe.generate(model, prompts[:1], **options)
    assert ids.shape == (2, 5) and (ids[0] == alone[0]).all() and (ids[1, 2:] == 0).all()
    assert named(lambda: nnxmoe.generate(model, prompts[1:], **options)).tolist() == prompts[1:]
    done = named(lambda: list(nnxmoe.complete(model, prompts, logprobs=0, **options)))
    assert [one.finish for one in done] == ["length", "error"] and done[1].ids == done[1].logprobs == ()
    pieces = nnxmoe.stream(model, Numbers(), prompts[1], **options)
    assert named(lambda: list(pieces)) == [] and (pieces.finish, pieces.tokens) == ("error", 0)
    scores = named(lambda: nnxmoe.score(model, [*prompts, [BAD, 3]]))
    assert [bool(np.isnan(one.total)) for one in scores] == [False, True, True]
    assert "2 of 3 texts (first: text 1)" in caplog.text


# Compiled programs


@pytest.mark.program
@pytest.mark.parametrize("door", ["generate", "complete"])
def test_fifty_lengths_compile_few_programs(door: str) -> None:
    """Passes of one or two sizes, a step, and the moves between caches, whatever the prompts' lengths."""
    model = build_tiny("llama", nnxmoe.Strategy(), num_hidden_layers=1, max_position_embeddings=512)

    def run() -> None:
        for length in range(1, 351, 7):
            prompt = [[i % VOCAB for i in range(length)]]
            if door == "generate":
                nnxmoe.generate(model, prompt, max_new_tokens=2, eos_token_id=None)
            else:
                list(nnxmoe.complete(model, prompt, max_new_tokens=2, eos_token_id=None))

    assert compiled_in(run) <= 12


@pytest.mark.parametrize("draft", [None, pytest.param(PromptLookup(2), marks=pytest.mark.slow)])
def test_log_probabilities_after_temperature(draft: Any) -> None:
    """Logits are divided by the temperature of the row, before penalties; greedy rows and all ids stay the same."""
    model, prompt = tiny(), [5, 6, 7, 5, 6]
    samplings = [None, Sampling(0.5), Sampling(1.7, top_k=9, repetition_penalty=1.3)]
    results = []
    for tempered in (False, True):
        limits = EngineLimits(max_logprobs=2, tempered_logprobs=tempered)
        engine = Engine(model, slots=3, capacity=40, limits=limits, draft=draft)
        jobs = [RequestOptions(9, sampling=one, stop_ids=None, seed=4, logprobs=2) for one in samplings]
        results.append([engine.submit(prompt, options) for options in jobs])
        engine.run()
    for raw, request, temperature in zip(*results, (1, 0.5, 1.7), strict=True):
        assert raw.ids == request.ids
        logits = model(np.array([[*prompt, *request.ids]])).logits[0, len(prompt) - 1 : -1]
        for one, scale in ((raw, 1), (request, temperature)):
            wanted = np.asarray(jax.nn.log_softmax(logits / scale))
            np.testing.assert_allclose(one.logprobs, wanted[np.arange(9), one.ids], atol=2e-5)
            top = [[logprob for _, logprob in pairs] for pairs in one.top]
            np.testing.assert_allclose(top, np.sort(wanted)[:, :-3:-1], atol=2e-5)
