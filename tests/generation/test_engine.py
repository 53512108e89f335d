"""The engine: requests that share a batch get what each would get alone; drafts change nothing but the speed."""

import dataclasses
import functools
import json
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxmoe
from nnxmoe import Engine, EngineLimits, Prefix, PromptLookup, RequestOptions, Sampling
from nnxmoe.generation.complete import complete
from nnxmoe.generation.draft import ModelDraft, MTPDraft
from nnxmoe.generation.engine import Request
from nnxmoe.generation.grouping import one_by_one
from nnxmoe.generation.rows import History, StepInputs
from nnxmoe.generation.stop_strings import StopStringFilter
from tests.support.cases import HF_CASES, load_case_model
from tests.support.mtp import ahead, with_mtp
from tests.support.running import compiled_in
from tests.support.tiny import build_tiny

VOCAB, CAPACITY = 53, 60
EVERYTHING = EngineLimits(max_stop_ids=4, max_logit_biases=3, max_logprobs=2)
WILD = Sampling(1.3, 20, 0.95, 0.01, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=-0.3)
WILD_STEPS = RequestOptions(sampling=WILD).required_limits(VOCAB).sampling


@functools.cache
def tiny(kind: str = "mistral", dtype: str = "float32", **changes: Any) -> nnxmoe.CausalLM:
    """One small model of a kind, to limit compilation; a window shorter than the prompts."""
    changes |= {"sliding_window": 12} if kind == "mistral" else {}
    return build_tiny(kind, nnxmoe.Strategy(), dtype=dtype, num_hidden_layers=2, **changes)


class Words:
    """A tokenizer of words with the space before them, with ids around every text."""

    all_special_ids = ()

    def __init__(self, *end: int) -> None:
        self.end = end

    def encode(self, text: str) -> list[int]:
        return [1, *(3 + sum(map(ord, word)) % 50 for word in re.findall(r" ?\w+|.", text)), *self.end]

    def decode(self, ids: Sequence[int], *_: Any, **__: Any) -> str:
        return " ".join(map(str, ids))


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in rng.integers(1, longest, count)]


def alone(model: nnxmoe.CausalLM, prompt: Sequence[int], wanted: RequestOptions) -> tuple[list[int], np.ndarray]:
    """New ids by `generate`, and the log-probability of each by one pass over all of them."""
    options = {"sampling": wanted.sampling, "seed": wanted.seed, "eos_token_id": wanted.stop_ids}
    ids = nnxmoe.generate(model, [list(prompt)], None, wanted.max_new_tokens, **options)[0]  # type: ignore[arg-type]
    logprobs = jax.nn.log_softmax(model(ids[None]).logits[0])
    return ids[len(prompt) :].tolist(), np.asarray(logprobs)[np.arange(len(prompt), len(ids)) - 1, ids[len(prompt) :]]


def run(engine: Engine, jobs: Sequence[tuple[Sequence[int], RequestOptions]]) -> list[Request]:
    requests = [engine.submit(prompt, wanted) for prompt, wanted in jobs]
    engine.run()
    assert all(request.done for request in requests) and (engine.running, engine.waiting) == (0, 0)
    return requests


@pytest.mark.parametrize("kind", ["mistral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_requests_get_what_they_would_get_alone(kind: str) -> None:
    """Prompts of one to several chunks, more of them than slots; ids, ends and log-probabilities."""
    model, rng = tiny(kind), np.random.default_rng(1)
    given = [*prompts(9), rng.integers(0, VOCAB, 70).tolist(), rng.integers(0, VOCAB, 131).tolist()]
    jobs = [
        (prompt, RequestOptions(int(rng.integers(1, 12)), 0, [None, WILD][i % 2], [5, 11], seed=i, logprobs=2))
        for i, prompt in enumerate(given)
    ]
    for slots in (1, 3):
        engine = Engine(model, slots=slots, capacity=150, limits=EVERYTHING)
        for (prompt, wanted), request in zip(jobs, run(engine, jobs), strict=True):
            ids, logprobs = alone(model, prompt, wanted)
            assert request.ids == ids and request.finish == ("stop" if ids[-1] in (5, 11) else "length")
            np.testing.assert_allclose(request.logprobs, logprobs, atol=2e-5)
            greedy = [id for id, one in zip(ids, request.top, strict=True) if one[0][0] == id]
            assert all(len(one) == 2 and one[0][1] >= one[1][1] for one in request.top)
            assert wanted.sampling is not None or greedy == ids


@pytest.mark.slow
def test_penalties_count_generated_ids_only() -> None:
    """Greedy ids by NumPy from the logits of whole passes: in a batch, alone, and with drafts."""
    model, penalties = tiny(), [(2, 0), (0, 1.1), (-1.5, 0.2), (0, 0)]
    jobs = [
        (
            prompt,
            RequestOptions(14, sampling=Sampling(0.0, presence_penalty=one, frequency_penalty=other), stop_ids=None),
        )
        for prompt, (one, other) in zip(prompts(4, seed=6, longest=16), penalties, strict=True)
    ]

    def oracle(prompt: list[int], presence: float, frequency: float) -> list[int]:
        ids = list(prompt)
        for end in range(len(prompt), len(prompt) + 14):
            counts = np.bincount(ids[len(prompt) :], minlength=VOCAB)
            logits = np.asarray(model(np.array([ids + [0] * (32 - end)])).logits[0, end - 1], np.float64)
            ids.append(int((logits - frequency * counts - presence * (counts > 0)).argmax()))
        return ids[len(prompt) :]

    expected = [oracle(prompt, *penalty) for (prompt, _), penalty in zip(jobs, penalties, strict=True)]
    assert all(oracle(prompt, 0, 0) != ids for (prompt, _), ids in zip(jobs[:3], expected, strict=False))
    engine = Engine(model, slots=4, capacity=CAPACITY, limits=EngineLimits(max_logprobs=0))
    for batch in (jobs, jobs[1:2]):
        assert [request.ids for request in run(engine, batch)] == expected[jobs.index(batch[0]) :][: len(batch)]
    drafted = Engine(model, slots=4, capacity=CAPACITY, draft=PromptLookup(3))
    assert [request.ids for request in run(drafted, jobs)] == expected
    # A row without penalties beside rows that have them is equal to the bit, if both prompts are prefilled one by one.
    # The default prefills four prompts by another program than one prompt, whose logits may be rounded differently.
    job = [1, *jobs[3][0]], RequestOptions(12, sampling=Sampling(0.8), stop_ids=None, seed=3, logprobs=0)
    engine = Engine(model, slots=4, capacity=CAPACITY, limits=EngineLimits(max_logprobs=0), grouping=one_by_one)
    beside, without = run(engine, [job, *jobs[:3]])[0], run(engine, [job])[0]
    assert (beside.ids, beside.logprobs) == (without.ids, without.logprobs)


@pytest.mark.slow
def test_rows_are_used_again_at_once() -> None:
    """A short request next to a long one is done after two steps, however many were started before."""
    engine = Engine(tiny(), slots=2, capacity=CAPACITY)
    engine.submit([1], RequestOptions(50))
    for _ in range(8):
        request, steps = engine.submit([2], RequestOptions(2)), 0
        while not request.done:
            engine.step()
            steps += 1
        assert steps <= 3
    engine.close()


@pytest.mark.slow
def test_cancelled_prompts_are_not_read() -> None:
    engine = Engine(tiny(), slots=1, capacity=300)
    for _ in range(3):
        request = engine.submit([1] * 250, RequestOptions(2))
        engine.step()
        engine.cancel(request)
    request, steps = engine.submit([2], RequestOptions(1)), 0
    while not request.done:
        engine.step()
        steps += 1
    assert steps <= 3


@pytest.mark.slow
def test_end_states_are_equal_in_all_doors() -> None:
    """By default the checkpoint's end tokens end a row, as the last id of it; None: nothing does."""
    model, prompt = build_tiny("mistral", nnxmoe.Strategy()), [3, 4, 5]
    free = nnxmoe.generate(model, [prompt], max_new_tokens=8, eos_token_id=None)[0, 3:].tolist()
    end = free[3]
    cut = free[: free.index(end) + 1]
    model.generation_config = {"eos_token_id": [50 if end != 50 else 49, end]}
    for asked, wanted, finish in ((..., cut, "stop"), (None, free, "length"), (end, cut, "stop")):
        engine = Engine(model, slots=1, capacity=CAPACITY, limits=EngineLimits(max_stop_ids=1))
        (request,) = run(engine, [(prompt, RequestOptions(8, stop_ids=asked))])
        assert (request.ids, request.finish) == (wanted, finish)
        (done,) = complete(model, [prompt], max_new_tokens=8, eos_token_id=asked)
        assert (list(done.ids), done.finish) == (wanted, finish)
        assert nnxmoe.generate(model, [prompt], max_new_tokens=8, eos_token_id=asked)[0, 3:].tolist() == wanted
        pieces = nnxmoe.stream(model, Words(), prompt, max_new_tokens=8, eos_token_id=asked)
        assert pieces.finish is None and isinstance(list(pieces), list)
        assert (pieces.tokens, pieces.finish) == (len(wanted), finish)
        assert Engine(model, slots=1, capacity=CAPACITY).submit(prompt, RequestOptions(0)).finish == "length"


@pytest.mark.slow
def test_rows_beyond_the_positions_are_reported_once_per_model(caplog: pytest.LogCaptureFixture) -> None:
    """By whichever door they come; texts, prompts and caches within the positions are not."""

    def rows(length: int) -> dict[str, Callable[[nnxmoe.CausalLM], Any]]:
        ids, short = [3] * length, [3] * (length - 4)
        return {
            "model": lambda model: model([ids]),
            "cache": lambda model: model([[3]], cache=model([ids[1:]], cache=model.empty_cache(1, 80)).cache),
            "generate": lambda model: nnxmoe.generate(model, [short], max_new_tokens=4),
            "complete": lambda model: list(complete(model, [short], max_new_tokens=4)),
            "stream": lambda model: list(nnxmoe.stream(model, Words(), short, max_new_tokens=4)),
            "engine": lambda model: Engine(model, capacity=80, slots=1).submit(short, RequestOptions(4)),
            "score": lambda model: nnxmoe.score(model, [ids]),
        }

    for name, within in rows(64).items():
        model = build_tiny("mistral", nnxmoe.Strategy())
        within(model)
        assert "positions" not in caplog.text, name
        for _ in range(2):
            rows(65)[name](model)
        assert caplog.text.count("a row of up to 65 tokens is longer than the 64 positions") == 1, name
        caplog.clear()


def test_steps_without_requests_and_cancels_of_ended_requests_do_nothing() -> None:
    engine = Engine(tiny(), slots=1, capacity=CAPACITY)
    assert compiled_in(lambda: engine.step()) == 0 and engine.step() == []
    ended = engine.submit([1], RequestOptions(0))
    engine.cancel(ended)
    assert ended.finish == "length" and (engine.running, engine.waiting) == (0, 0)


@pytest.mark.slow
def test_prefixes_belong_to_an_engine() -> None:
    """The same object in engines of two models; what cannot be a prefix is refused."""
    prefix, ids = Prefix((5, 6, 7)), [5, 6, 7, 8]
    for model in (tiny(), tiny("llama")):
        engine = Engine(model, slots=1, capacity=CAPACITY)
        request = engine.submit(ids, RequestOptions(4), prefix)
        engine.run()
        assert request.ids == alone(model, ids, RequestOptions(4))[0] and request.prefix is None
    with pytest.raises(ValueError, match="at least one id"):
        Prefix(())
    with pytest.raises(ValueError, match="does not start with the 3 ids of its start"):
        Prefix((5, 6, 8, 9), prefix)


@pytest.mark.wrong_types
def test_prefixes_and_seeds_of_wrong_types() -> None:
    with pytest.raises(ValueError, match="is a text"):
        Prefix("abc")  # type: ignore[arg-type]
    for bad in (1.5, True, "1"):
        with pytest.raises(ValueError, match="seed"):
            RequestOptions(seed=bad)  # type: ignore[arg-type]
    assert RequestOptions(seed=np.int64(1)) == RequestOptions(seed=1)  # type: ignore[arg-type]


@pytest.mark.slow
def test_seeds_have_64_bits() -> None:
    made = []
    for seed in (1, 1 + 2**32, -1, 2**32 - 1):
        engine = Engine(tiny(), slots=1, capacity=CAPACITY, limits=EngineLimits(sampling=WILD_STEPS))
        made.append(run(engine, [([3], RequestOptions(12, sampling=WILD, seed=seed))])[0].ids)
    assert len({tuple(ids) for ids in made}) == 4
    with pytest.raises(ValueError, match="seed must be a 64-bit integer"):
        RequestOptions(seed=2**63)


@pytest.mark.slow
def test_dynamic_rotary_embeddings_do_not_count_padding() -> None:
    """11 ids, which are padded to 64; an engine whose requests would change each other is refused."""
    rope = {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 8}
    model, ids = build_tiny("llama", nnxmoe.Strategy(), dtype="float32", num_hidden_layers=2, **rope), [list(range(11))]
    logits = jax.jit(model)(jnp.array(ids)).logits
    np.testing.assert_allclose(model(jnp.array(ids)).logits, logits, atol=1e-5)
    (score,) = nnxmoe.score(model, ids)
    expected = jax.nn.log_softmax(logits[0])[jnp.arange(10), jnp.array(ids[0][1:])]
    np.testing.assert_allclose(score.logprobs[-10:], expected, atol=1e-5)
    Engine(model, slots=2, capacity=8)
    assert [len(done.ids) for done in complete(model, [[1, 2], [3]], max_new_tokens=6, eos_token_id=None)] == [6, 6]
    with pytest.raises(ValueError, match=r"capacity=9.*Reduce capacity .* or use generate"):
        Engine(model, slots=2, capacity=9)


@pytest.mark.wrong_types
@pytest.mark.parametrize("given", ["Hello", [{"role": "user", "content": "Hello"}], [1, 2, 3]])
def test_single_prompts_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="takes a list of prompts"):
        nnxmoe.complete(tiny(), given)


@pytest.mark.slow
def test_programs_are_few_and_no_slot_is_lost() -> None:
    """Random submits, cancels and steps: no compilation after the first requests, and every result is right."""
    _storm(1500)


@pytest.mark.slow
def test_two_slots_are_warm_for_two_prompts() -> None:
    engine = Engine(tiny(), slots=2, capacity=CAPACITY)
    engine.warm_up()

    def both() -> None:
        for prompt in prompts(2, seed=4):
            engine.submit(prompt, RequestOptions(4))
        engine.run()

    assert compiled_in(both) == 0


@pytest.mark.slow
def test_programs_are_few_and_no_slot_is_lost_for_long() -> None:
    _storm(10_000)


def _storm(events: int) -> None:
    model, rng = tiny(), np.random.default_rng(3)
    jobs = []
    for i, prompt in enumerate(prompts(24, seed=4)):
        sampling = [None, WILD, Sampling(temperature=0.8)][i % 3]
        jobs.append((prompt, RequestOptions(int(rng.integers(1, 9)), 0, sampling, [7], seed=i)))
    wanted = [alone(model, *job)[0] for job in jobs]
    engine = Engine(model, slots=3, capacity=CAPACITY)
    engine.warm_up()
    live: list[tuple[int, Request]] = []
    done = [0, 0]

    def storm() -> None:
        for _ in range(events):
            kind = rng.random()
            if kind < 0.25 and len(live) < 9:
                number = int(rng.integers(len(jobs)))
                live.append((number, engine.submit(*jobs[number])))
            elif kind < 0.3 and live:
                engine.cancel(live[int(rng.integers(len(live)))][1])
            else:
                engine.step()
            assert engine.running <= 3 and engine.waiting <= 9 and len(engine._reports) <= 1
            for number, request in [pair for pair in live if pair[1].done]:
                live.remove((number, request))
                whole = request.finish != "cancelled"
                assert request.ids == wanted[number] if whole else request.ids == wanted[number][: len(request.ids)]
                done[whole] += 1

    assert compiled_in(storm) == 0
    engine.run()
    assert engine.running == engine.waiting == 0 and all(request.done for _, request in live)
    assert done[0] > events / 100 and done[1] > events / 20
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.step()
    with pytest.raises(ValueError, match="closed"):
        engine.submit([1])


@pytest.mark.slow
def test_a_prefix_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of one prompt, a shared beginning, a prefix of a prefix, and a prompt that is its prefix."""
    model, engine = tiny(), Engine(tiny(), slots=3, capacity=150)
    beginning, read, plain = prompts(1, seed=9, longest=2)[0] * 66, [], engine._prefiller.run_pass
    beginning = [(7 * i) % VOCAB for i in range(66)]
    counted = functools.partial(_counted, read, plain)
    monkeypatch.setattr(engine._prefiller, "run_pass", counted)
    first = Prefix(tuple(beginning))
    second = Prefix((*beginning, 1, 2, 3), first)
    ends = [([], first), ([4], first), ([1, 2, 3], second), ([1, 2, 3], second), ([1, 2, 3, 9, 9], second)]
    sampling = Sampling(temperature=1.1)
    requests = [
        engine.submit([*beginning, *end], RequestOptions(4, sampling=sampling, seed=8, sample=i), prefix)
        for i, (end, prefix) in enumerate(ends)
    ]
    engine.run()
    assert sum(read) == 66 + 1 + 3 + 2
    for i, ((end, _), request) in enumerate(zip(ends, requests, strict=True)):
        lone = Engine(model, slots=1, capacity=150)
        wanted = dataclasses.replace(request.options, sample=i)
        assert run(lone, [([*beginning, *end], wanted)])[0].ids == request.ids
    assert len({tuple(request.ids) for request in requests[2:4]}) == 2, "samples differ"
    with pytest.raises(ValueError, match="does not start with the 66 ids"):
        engine.submit([1, 2], prefix=first)


def _counted(read: list[int], plain: Any, ids: Any, valid: Any, *rest: Any) -> Any:
    read.append(int(np.sum(valid)) if isinstance(valid, np.ndarray) else 0)
    return plain(ids, valid, *rest)


@pytest.mark.slow
def test_logits_are_changed_by_what_is_asked() -> None:
    """Biases, ids that may not stop too early, and a function of the user's."""
    model, prompt = tiny(), [3, 1, 4, 1, 5]
    free = run(Engine(model, slots=1, capacity=CAPACITY), [(prompt, RequestOptions(8))])[0].ids
    limits = EngineLimits(max_stop_ids=2, max_logit_biases=3, max_logprobs=0)
    engine = Engine(model, slots=2, capacity=CAPACITY, limits=limits)
    forced, banned, late, free_again = run(
        engine,
        [
            (prompt, RequestOptions(6, logit_bias={9: 1e4})),
            (prompt, RequestOptions(6, logit_bias={free[0]: -1e9})),
            (prompt, RequestOptions(8, 5, stop_ids=[free[0], free[2]])),
            (prompt, RequestOptions(8, logprobs=0)),
        ],
    )
    assert forced.ids == [9] * 6 and free[0] not in banned.ids and free_again.ids == free
    assert len(late.ids) >= 5 and not {free[0], free[2]} & set(late.ids[:5])
    assert free_again.top == [[]] * 8 and len(free_again.logprobs) == 8

    def even(logits: jax.Array, history: History) -> jax.Array:
        """Only even ids after an odd number of ids, and odd ones after an even number."""
        ids = jnp.arange(logits.shape[1])
        return jnp.where((ids[None] + history.length[:, None]) % 2 == 1, logits, -jnp.inf)

    one = run(Engine(model, slots=1, capacity=CAPACITY, logits_processor=even), [(prompt, RequestOptions(8))])[0].ids
    assert [id % 2 for id in one] == [0, 1] * 4


# Drafts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scripted:
    """Drafts from a table by the prompt's first id and the place, so that all scripts share one program."""

    table: jax.Array  # [V, tokens]
    count: int = dataclasses.field(default=3, metadata={"static": True})

    def empty(self, rows: int, capacity: int) -> None:
        pass

    def read(self, memory: None, *chunk: jax.Array) -> None:
        pass

    def propose(self, memory: None, inputs: StepInputs, *rest: Any) -> tuple[jax.Array, None]:
        history = inputs.history
        at = history.new_count[:, None] + jnp.arange(self.count)[None]
        return jnp.take_along_axis(self.table[history.ids[:, 0]], at, axis=1, mode="clip"), None


def scripts(truth: dict[int, list[int]]) -> dict[str, Scripted]:
    """The true continuations, what is always wrong, and what is right now and then."""
    right = np.zeros((VOCAB, 40), np.int32)
    for first, ids in truth.items():
        right[first, : len(ids)] = ids
    mixed = np.where(np.random.default_rng(0).random(right.shape) < 0.6, right, (right + 7) % VOCAB)
    return {
        name: Scripted(jnp.asarray(a))
        for name, a in (("right", right), ("wrong", (right + 1) % VOCAB), ("mixed", mixed))
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("mistral", "float32"),
        pytest.param("mistral", "bfloat16", marks=pytest.mark.slow),
        pytest.param("mixtral", "bfloat16", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "float32", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "float32", marks=pytest.mark.slow),
    ],
)
def test_drafts_change_nothing(kind: str, dtype: str) -> None:
    """One program, other drafts: the same ids and log-probabilities to the bit; greedy and with every option, rows that
    accept other numbers, a stop id and the last id inside a draft, a full cache, and a ring that wraps."""
    model, limits = tiny(kind, dtype), EVERYTHING
    jobs = []
    for i, prompt in enumerate(prompts(6, seed=11, longest=16)):
        prompt = [i, *prompt]
        sampling = [None, WILD, Sampling(temperature=0.9, frequency_penalty=1.5)][i % 3]
        most = 20 if i else 40 - len(prompt)  # the first one fills its slot
        jobs.append((prompt, RequestOptions(most, 2, sampling, [7, 8] if i == 4 else [], 5, i, {3: 0.5}, 2)))

    def results(draft: Any) -> list[Request]:
        return run(Engine(model, slots=4, capacity=40, limits=limits, draft=draft), jobs)

    plain = results(scripts({})["wrong"])
    truth = {prompt[0]: request.ids for (prompt, _), request in zip(jobs, plain, strict=True)}
    for name, script in scripts(truth).items():
        for (_, wanted), one, other in zip(jobs, plain, results(script), strict=True):
            assert (one.ids, one.logprobs, one.top, one.finish) == (other.ids, other.logprobs, other.top, other.finish)
            steps, made = sum(other.accepted.values()), len(other.ids) - 1
            assert sum((n + 1) * times for n, times in other.accepted.items()) == made
            if name == "right" and wanted.max_new_tokens == 20:
                assert steps == -(-made // 4), "every draft was accepted"
            if name == "wrong":
                assert steps == made and set(other.accepted) <= {0}
    if dtype == "float32":
        for (prompt, wanted), request in zip(jobs[:1], plain[:1], strict=True):
            assert run(Engine(model, slots=1, capacity=40, limits=limits), [(prompt, wanted)])[0].ids == request.ids


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mistral", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_prompt_lookup_gives_the_same_ids_in_fewer_steps(kind: str) -> None:
    """A prompt that repeats itself, and one that does not."""
    model, copied = tiny(kind), [3, 9, 14, 21, 30, 2, 8] * 4
    jobs = [
        (copied, RequestOptions(12, logit_bias={})),
        *((prompt, RequestOptions(12)) for prompt in prompts(3, seed=2)),
    ]
    plain = run(Engine(model, slots=4, capacity=CAPACITY), jobs)
    for draft in (PromptLookup(3), PromptLookup(5, ngram=2)):
        for one, other in zip(plain, run(Engine(model, slots=4, capacity=CAPACITY, draft=draft), jobs), strict=True):
            assert one.ids == other.ids


@pytest.mark.slow
def test_prompt_lookup_finds_the_longest_and_latest_run() -> None:
    draft = PromptLookup(3)

    def after(*ids: int) -> list[int]:
        padded = np.zeros(20, np.int32)
        padded[: len(ids)] = ids
        return draft._after(jnp.asarray(padded), jnp.int32(len(ids))).tolist()

    assert after(1, 2, 3, 4, 5, 6, 1, 2, 3) == [4, 5, 6]
    assert after(1, 2, 3, 9, 7, 2, 3, 8, 7, 7, 1, 2, 3) == [9, 7, 2], "three ids rather than the later two"
    assert after(2, 3, 9, 4, 2, 3, 8, 5, 2, 3) == [8, 5, 2], "the later of two"
    assert after(5, 6, 5, 6) == [5, 6, 5], "a run goes on"
    assert after(4, 4) == [4, 4, 4] and after(4) == [4, 4, 4]
    assert after(1, 2, 3) == [3, 3, 3], "nothing occurred before"
    assert after(0, 0, 5) == [5, 5, 5], "places that hold no id do not count"
    with pytest.raises(ValueError, match="PromptLookup"):
        PromptLookup(0)


@pytest.mark.slow
def test_drafts_of_models_change_nothing() -> None:
    """The ids and log-probabilities of steps of one width; a model that drafts for itself is always right when greedy,
    and nearly always when it draws with the same keys."""
    model, limits = with_mtp(), EngineLimits(max_stop_ids=1, max_logprobs=0)
    jobs = []
    for i, prompt in enumerate(prompts(5, seed=5, longest=16)):
        jobs.append((prompt, RequestOptions(17, 0, [None, WILD][i % 2], stop_ids=None, seed=i, logprobs=0)))

    def results(draft: Any) -> list[Request]:
        return run(Engine(model, slots=3, capacity=120, limits=limits, draft=draft), jobs)

    plain = results(scripts({})["wrong"])
    for draft in (PromptLookup(3), MTPDraft.of(model, 3), ModelDraft.of(model, 3)):
        for one, other in zip(plain, found := results(draft), strict=True):
            assert (one.ids, one.logprobs) == (other.ids, other.logprobs), draft
    assert all(sum(request.accepted.values()) == 4 for request in found[::2]), "16 ids after the first, 4 a step"
    assert sum(sum(request.accepted.values()) for request in found) < 32


@pytest.mark.slow
def test_multi_token_prediction_drafts_what_its_layer_predicts() -> None:
    """After every step, from a prompt of two chunks."""
    model, prompt, seen = with_mtp(), [(3 * i) % VOCAB for i in range(70)], []
    engine = Engine(model, slots=1, capacity=120, draft=MTPDraft.of(model), ahead=0)
    request = engine.submit(prompt, RequestOptions(8))
    while not request.done:
        engine.step()
        while engine._reports:
            engine._read_report()
        if request.ids and not request.done:
            seen.append((len(request.ids), int(engine._rows.ids[0, 1])))
    predicted = ahead(model, jnp.asarray([[*prompt, *request.ids]]))[1][0].argmax(axis=-1)
    assert len(seen) >= 4 and [draft for _, draft in seen] == [int(predicted[70 + n - 2]) for n, _ in seen]
    with pytest.raises(ValueError, match="load it with mtp=True"):
        MTPDraft.of(tiny())


def test_drafts_are_refused_where_tokens_compete() -> None:
    model = build_tiny("mixtral", nnxmoe.Strategy(dispatch=nnxmoe.Capacity(1.0)))
    with pytest.raises(ValueError, match=r"draft=PromptLookup.*Capacity.*Sorted"):
        Engine(model, draft=PromptLookup())


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    other = build_tiny("llama", vocab_size=VOCAB + 3)
    with pytest.raises(ValueError, match=rf"ModelDraft.*has {VOCAB + 3} ids, but the model's has {VOCAB}"):
        Engine(tiny(), draft=ModelDraft.of(other))


# What is refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([], RequestOptions()), "the prompt is empty"),
        (([53], RequestOptions()), "token ids must be in 0 … 52, got 53"),
        (([1] * 50, RequestOptions(11)), "50 ids and 11 new ids exceed the capacity of 60"),
        (([1], RequestOptions(stop_ids=range(5))), "stop_ids: 5 exceeds the maximum of 4"),
        (([1], RequestOptions(logit_bias={0: 1, 1: 1, 2: 1, 3: 1})), "logit_bias: 4 exceeds the maximum of 3"),
        (([1], RequestOptions(logit_bias={99: 1})), "got 99"),
        (([1], RequestOptions(logprobs=3)), "logprobs: 3 exceeds the maximum of 2"),
    ],
)
def test_requests_that_do_not_fit_are_refused_and_harm_no_other(given: Any, message: str) -> None:
    engine = _shared()
    other = engine.submit([1, 2, 3], RequestOptions(3))
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.submit(*given)
    engine.run()
    assert other.finish == "length" and engine.waiting == 0


@functools.cache
def _shared() -> Engine:
    return Engine(tiny(), slots=3, capacity=CAPACITY, limits=EVERYTHING)


@pytest.mark.wrong_types
def test_options_that_the_engine_was_not_compiled_with_are_refused() -> None:
    engine = Engine(
        tiny(),
        slots=1,
        capacity=CAPACITY,
        limits=EngineLimits(sampling=RequestOptions().required_limits(VOCAB).sampling),
    )
    with pytest.raises(ValueError, match=r"Sampling\(temperature=1.0.*random=False"):
        engine.submit([1], RequestOptions(sampling=Sampling()))
    for fields, message in (
        ({"max_new_tokens": -1}, "max_new_tokens must be a 64-bit integer >= 0, got -1"),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens=4 is more than max_new_tokens=3"),
        ({"seed": 2**63}, "seed must be a 64-bit integer"),
        ({"logit_bias": {3: float("nan")}}, r"logit_bias\[3\]=nan: pass a finite number"),
        ({"logit_bias": {3: float("inf")}}, r"logit_bias\[3\]=inf"),
        ({"logit_bias": {"3": 1.0}}, "an id of logit_bias must be"),
        ({"logprobs": 1.5}, "logprobs must be a 64-bit integer >= 0, got 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            RequestOptions(**fields)
    for options in ({"slots": 0}, {"capacity": 1.5}, {"ahead": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Engine(tiny(), **options)


# Text


class Letters:
    """A tokenizer of one letter per id."""

    all_special_ids = (0,)

    def decode(self, ids: Sequence[int], skip: bool) -> str:
        return "".join(chr(96 + i) for i in ids if i)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 96 for letter in text]


@pytest.mark.parametrize(
    ("text", "stop", "wanted", "pieces"),
    [
        ("hello", [], "hello", ["h", "e", "l", "l", "o", ""]),
        ("hello", ["lo"], "hel", ["h", "e", "", "l", "", ""]),
        ("hello", ["ll", "el"], "h", ["h", "", "", "", "", ""]),
        ("aabaac", ["aac"], "aab", ["", "", "aab", "", "", ""]),
        ("abcab", ["abd", "bce"], "abcab", ["", "", "a", "bc", "", "ab"]),
    ],
)
def test_text_ends_before_a_stop_string(text: str, stop: list[str], wanted: str, pieces: list[str]) -> None:
    """What may begin a stop string is held back; no piece is ever taken back."""
    tokenizer = Letters()
    continuation = StopStringFilter(stop, tokenizer)
    found = [*(continuation.add_ids([i], None) for i in tokenizer.encode(text)), continuation.add_ids([], "stop")]
    assert continuation.text == "".join(found) == wanted
    assert continuation.stopped == any(one in text for one in stop)
    assert stop == ["aac"] or found[: len(pieces)] == pieces


@pytest.mark.slow
def test_complete_yields_samples_in_order() -> None:
    """Any lengths, text and ids, seeds per prompt; neither slots nor neighbours nor a shared beginning matter."""
    model = tiny()
    given = prompts(5, seed=6)
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None, "sampling": WILD, "n": 2, "logprobs": 0}
    all_ = list(complete(model, given, slots=3, seed=[4, 5, 6, 7, 8], **options))
    assert [(c.prompt, c.sample) for c in all_] == [(p, s) for p in range(5) for s in range(2)]
    assert all(c.text == "" and c.finish == "length" and len(c.ids) == len(c.logprobs) == 6 for c in all_)
    for c in all_[2:4]:
        same = list(complete(model, [given[1]], slots=1, seed=5, **options))[c.sample]
        assert (same.ids, same.prompt_ids) == (c.ids, c.prompt_ids)
    shared = [(9 * i) % VOCAB for i in range(64)]
    long = list(complete(model, [[*shared, *p] for p in given], slots=2, seed=3, **options))
    for c in long[:4]:
        assert list(complete(model, [c.prompt_ids], slots=2, seed=3, **options))[c.sample].ids == c.ids
    assert list(complete(model, [])) == []


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_prompts_and_texts_may_be_arrays_of_ids(array: Any) -> None:
    model, ids = tiny(), [3, 1, 4]
    prompt, options = array(ids), {"max_new_tokens": 2, "eos_token_id": None}
    (one,) = complete(model, [prompt], **options)
    assert one == next(complete(model, [ids], **options)) and one.prompt_ids == tuple(ids)
    assert Engine(model, slots=1, capacity=96).submit(prompt).prompt == tuple(ids)
    for text in (prompt, (prompt[:1], prompt[1:])):
        assert nnxmoe.score(model, [text])[0].total == nnxmoe.score(model, [ids])[0].total


def test_iterators_are_consumed_before_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """`complete` consumes its prompts in the call itself, and `score` consumes its texts before its first program."""
    left = [[1, 2], [3, 4]]
    one_at_a_time = (left.pop() for _ in range(2))
    complete(tiny(), one_at_a_time)
    assert not left

    def no_program(*_: Any, **__: Any) -> None:
        raise InterruptedError

    left += [[1, 2], [3, 4]]
    monkeypatch.setattr("nnxmoe.generation.score.model_program", no_program)
    with pytest.raises(InterruptedError):
        nnxmoe.score(tiny(), (left.pop() for _ in range(2)))
    assert not left


def test_the_perplexity_of_no_ids_is_nan() -> None:
    empty, flags, ids = np.zeros(0, np.float32), np.zeros(0, bool), np.zeros((0, 1), np.int32)
    found = nnxmoe.Score((), empty, flags, ids, ids.astype(np.float32))
    assert found.total == 0 and np.isnan(found.perplexity)


@pytest.mark.slow
def test_complete_reads_and_writes_text() -> None:
    """The checkpoint's tokenizer by default; chats; stop strings cut text and ids alike, with drafts too."""
    model = load_case_model("llama_basic", nnxmoe.Strategy())
    tokenizer = nnxmoe.Tokenizer.from_pretrained(HF_CASES / "llama_basic" / "model")
    whole = next(complete(model, ["The quick brown fox"], max_new_tokens=24, eos_token_id=None))
    assert whole.text == "".join(
        nnxmoe.stream(model, tokenizer, "The quick brown fox", max_new_tokens=24, eos_token_id=None)
    )
    assert whole.text is not None
    stop = whole.text[1]
    for draft in (None, PromptLookup(3)):
        one = next(
            complete(
                model, ["The quick brown fox"], tokenizer, max_new_tokens=24, stop=stop, draft=draft, eos_token_id=None
            )
        )
        assert one.finish == "stop" and one.text == whole.text[: whole.text.index(stop)]
        assert one.ids == whole.ids[: len(one.ids)] and len(one.ids) < 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": ["text"]}, "need a tokenizer"),
        ({"prompts": [[1]], "stop": ["x"]}, "need a tokenizer"),
        ({"prompts": [[1]], "stop": [""]}, "pass non-empty strings"),
        ({"prompts": [[1], [2]], "seed": [1]}, "1 seeds for 2 prompts"),
        ({"prompts": [[]]}, "a prompt is empty"),
        ({"prompts": [[1]], "n": 0}, "n must be a 64-bit integer >= 1, got 0"),
        ({"prompts": [[1]], "min_new_tokens": 65}, "min_new_tokens=65 is more"),
    ],
)
def test_complete_refuses_before_it_computes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        complete(tiny(), **options)


@pytest.mark.wrong_types
def test_texts_that_are_none() -> None:
    with pytest.raises(ValueError, match="is None"):
        nnxmoe.score(tiny(), [None])  # type: ignore[list-item] # pyright: ignore
    with pytest.raises(ValueError, match="a prompt is None"):
        list(nnxmoe.complete(tiny(), [None]))  # type: ignore[list-item] # pyright: ignore
    with pytest.raises(ValueError, match="top=54 is more than the 53 ids"):
        nnxmoe.score(tiny(), [[1, 2]], top=54)


@pytest.mark.slow
def test_scores_are_those_of_teacher_forcing() -> None:
    """Texts of any lengths, with and without a context; greedy marks; perplexity."""
    model, given = tiny(), prompts(7, seed=8, longest=90)
    given = [ids if len(ids) > 1 else [*ids, 3] for ids in given]
    pairs = [(ids[: len(ids) // 2], ids[len(ids) // 2 :]) for ids in given]
    mixed = [[list(a), np.array(b, np.uint8)] for a, b in pairs]  # as from JSON, and narrow arrays
    for found, other in zip(nnxmoe.score(model, mixed), nnxmoe.score(model, pairs), strict=True):
        assert found.ids == other.ids and found.logprobs.tolist() == other.logprobs.tolist()
    arrays, lists = (nnxmoe.score(model, make([[[1, 2], [3, 4]]])) for make in (np.array, list))
    assert arrays[0].ids == lists[0].ids == (3, 4)
    for found, ids, first in [
        *((s, ids, 1) for s, ids in zip(nnxmoe.score(model, given), given, strict=True)),
        *((s, ids, max(1, len(ids) // 2)) for s, ids in zip(nnxmoe.score(model, pairs), given, strict=True)),
    ]:
        logprobs = np.asarray(jax.nn.log_softmax(model(np.array([ids])).logits[0]))[first - 1 : -1]
        wanted = logprobs[np.arange(len(logprobs)), ids[first:]]
        np.testing.assert_allclose(found.logprobs, wanted, atol=2e-5)
        assert found.ids == tuple(ids[first:]) and found.greedy.tolist() == (logprobs.argmax(1) == ids[first:]).tolist()
        assert found.perplexity == pytest.approx(np.exp(-wanted.mean()), rel=1e-4)
    with pytest.raises(ValueError, match="text 1 has nothing to score: a text needs two ids"):
        nnxmoe.score(model, [[1, 2], [1]])
    with pytest.raises(ValueError, match="text 0 has nothing to score: its 2 ids are all context"):
        nnxmoe.score(model, [([1, 2], [])])
    with pytest.raises(ValueError, match="texts='one': pass a list of texts, such as"):
        nnxmoe.score(model, "one")
    assert [one.ids for one in nnxmoe.complete(model, [[1, 2]], max_new_tokens=2, stop=None)]
    with pytest.raises(ValueError, match="got 53"):
        nnxmoe.score(model, [[1, 53]])
    with pytest.raises(ValueError, match="need a tokenizer"):
        nnxmoe.score(model, ["text"])
    (two,) = nnxmoe.score(model, [[1, 2]])  # a list of two ids is no pair
    assert two.ids == (2,)


@pytest.mark.parametrize("end", [(), (2,)])
def test_tokens_that_span_the_end_of_a_context_are_scored(end: tuple[int, ...]) -> None:
    words, model = Words(*end), tiny()
    whole = words.encode("one two three")
    for context, count in (("one two", 1), ("one two ", 1), ("one tw", 2), ("one ", 2)):
        (found,) = nnxmoe.score(model, [(context, "one two three"[len(context) :])], words)
        assert found.ids == tuple(whole[-count - len(end) :]), context
        (listed,) = nnxmoe.score(model, json.loads(json.dumps([(context, "one two three"[len(context) :])])), words)
        assert listed.ids == found.ids
    bare = types.SimpleNamespace(encode=lambda text: words.encode(text)[1:])
    with pytest.raises(ValueError, match="spans the context 'on', so it has no log-probability"):
        nnxmoe.score(model, [("on", "e two")], bare)


def test_scores_do_not_depend_on_longer_texts() -> None:
    """Dynamic rotary embeddings change with the longest row of a batch beyond the length of the training."""
    rope: dict[str, Any] = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32}
    model = build_tiny("llama", nnxmoe.Strategy(), **rope)
    texts = [
        ids[: 20 + 30 * (i % 2)] for i, ids in enumerate(np.random.default_rng(3).integers(3, VOCAB, (4, 60)).tolist())
    ]
    for found, text in zip(nnxmoe.score(model, texts), texts, strict=True):
        np.testing.assert_allclose(found.logprobs, nnxmoe.score(model, [text])[0].logprobs, atol=1e-6)


@pytest.mark.slow
def test_capacities_are_not_rounded_beyond_the_fixed_rope_length() -> None:
    """37 tokens fit in the 40 positions of a dynamic rotary embedding, and the 64 that would be allotted do not."""
    rope: dict[str, Any] = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 40}
    model, prompt = build_tiny("llama", nnxmoe.Strategy(), **rope), list(range(3, 28))
    (found,) = nnxmoe.complete(model, [prompt], max_new_tokens=12, eos_token_id=None)
    assert found.ids == tuple(nnxmoe.generate(model, [prompt], max_new_tokens=12, eos_token_id=None)[0, 25:].tolist())


LONG_ROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}


@pytest.mark.slow
def test_long_rope_follows_the_capacity_of_a_cache() -> None:
    """Steps with a cache equal one pass over a row that is, or is not, longer than the original context."""
    rope = LONG_ROPE | {"original_max_position_embeddings": 16}
    model = build_tiny("llama", nnxmoe.Strategy(), dtype="float32", head_dim=8, rope_scaling=rope)
    ids = np.random.default_rng(0).integers(3, VOCAB, (1, 20))
    for length, capacity in ((16, 16), (20, 20)):
        cache, rows = model.empty_cache(1, capacity), []
        for i in range(length):
            out = model(ids[:, i : i + 1], cache=cache)
            cache = out.cache
            rows.append(np.asarray(out.logits[:, 0]))
        np.testing.assert_allclose(np.stack(rows, axis=1), model(ids[:, :length]).logits, atol=2e-5)
    assert np.abs(model(ids).logits[:, :16] - model(ids[:, :16]).logits).max() > 1e-3
    for length in (16, 20):  # an engine of that capacity, and generation
        (found,) = [run(Engine(model, slots=2, capacity=length), [(ids[0, :9].tolist(), RequestOptions(length - 9))])]
        expected = nnxmoe.generate(model, ids[:, :9], max_new_tokens=length - 9, eos_token_id=None)
        assert list(found[0].ids) == expected[0, 9:].tolist()
        if length == 20:
            continue
        greedy = ids[:, :9]
        while greedy.shape[1] < length:
            greedy = np.concatenate([greedy, np.asarray(model(greedy).logits[:, -1:].argmax(-1))], axis=1)
        assert np.array_equal(greedy, expected)
    with pytest.raises(ValueError, match=r"capacity=15: with 4 draft tokens, the cache exceeds the 16 positions"):
        Engine(model, slots=1, capacity=15, draft=nnxmoe.PromptLookup(4))


# A mesh


def on_a_mesh(dispatch: Any, draft: Any) -> tuple[list[list[int]], list[list[int]]]:
    """New ids of requests on eight devices, and on one."""
    mesh = nnxmoe.make_mesh(data=2, expert=2, tensor=2)
    found, rules = [], {**nnxmoe.RULES, "vocab": None}
    for strategy in (nnxmoe.Strategy(dispatch=dispatch, mesh=mesh, rules=rules), nnxmoe.Strategy()):
        engine = Engine(build_tiny("mixtral", strategy), slots=3, capacity=CAPACITY, draft=draft)
        shared = Prefix((5, 6, 7))
        requests = [engine.submit(prompt, RequestOptions(5 + i % 3)) for i, prompt in enumerate(prompts(6, seed=1))]
        requests += [engine.submit([5, 6, 7, i], RequestOptions(4), shared) for i in range(2)]
        engine.run()
        found.append([request.ids for request in requests])
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, PromptLookup(2)], ids=["plain", "draft"])
def test_requests_on_a_mesh(eight: Any, draft: Any) -> None:
    """Three slots become four; experts, heads and rows are split."""
    ours, wanted = eight(on_a_mesh, nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RaggedAllToAll()), draft)
    assert ours == wanted
