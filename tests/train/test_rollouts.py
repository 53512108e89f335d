"""Rollouts in ``fit``: the sampler equals the trained model, runs resume, and bad prompts and rewards are refused."""

import dataclasses
import functools
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import train
from nnxmoe.model.program import model_program
from nnxmoe.runtime.interrupts import Interrupted
from nnxmoe.train.loop.rollouts import Rollouts
from nnxmoe.train.loop.sample_rows import ScoredSample, stack_samples
from tests.support.families import load
from tests.support.running import compiled_in
from tests.support.tiny import TINY, build, build_tiny, tiny_weights

PROMPTS = [[{"prompt": [5, 9, 11, i], "wish": i} for i in (3, 4, 7)]]


def wishes(completions: Sequence[Sequence[int]], wish: Sequence[int], **fields: Any) -> list[float]:
    """The share of ids that are even, minus a tenth of the record's number."""
    return [float(np.mean(np.asarray(ids) % 2 == 0)) - 0.1 * w for ids, w in zip(completions, wish, strict=True)]


OPTIONS: dict[str, Any] = {"group_size": 4, "max_new_tokens": 6, "seq_len": 12, "eos_token_id": None}


def objective(**options: Any) -> train.GRPO:
    return train.GRPO(wishes, **OPTIONS | options)


def run(model: Any, steps: int, grpo: Any = None, **options: Any) -> Any:
    grpo = grpo or objective()
    return train.fit(model, PROMPTS, objective=grpo, optimizer=optax.adam(0.02), steps=steps, **options)


def tiny(kind: str) -> nnxmoe.CausalLM:
    if kind in ("mixtral", "deepseek_v3", "gpt_oss"):
        return build_tiny(kind)
    case = load(kind)
    return build(case.fields, case.weights)


def rollouts(model: nnxmoe.CausalLM, grpo: train.GRPO, prompts: Any = PROMPTS, seed: int = 0) -> Rollouts:
    found = Rollouts(prompts, grpo, seed, 1)
    found.current_model = lambda: model
    return found


def mismatch(model: nnxmoe.CausalLM, grpo: train.GRPO, seed: int = 0) -> tuple[float, float]:
    """Largest difference of log-probabilities between sampler and trainer, and the share of flipped tokens."""
    batch = next(rollouts(model, grpo, seed=seed))
    answers = batch["loss_mask"] > 0
    logps, metrics = model_program(model, evaluate, static=(0,))(grpo, {n: jnp.asarray(a) for n, a in batch.items()})
    error = np.abs(np.asarray(logps) - batch["sampler_logps"])[answers].max()
    return float(error), float(metrics.get("routing/flipped", 0))


def evaluate(model: nnxmoe.CausalLM, grpo: train.GRPO, batch: Any) -> Any:
    return grpo.logps(model, batch), grpo(model, batch)[1].measured


@pytest.mark.every_set
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "qwen3_moe", "gpt_oss", "qwen3_5_moe_text"])
def test_sampler_equals_trainer_in_float32(kind: str) -> None:
    """With replay, probability ratios are 1 within 1e-5 after 0, 1 and 5 updates.

    Recurrent layers amplify rounding errors: with other seeds they reach 3e-5, even if both compute token by token.
    """
    model, grpo = tiny(kind), objective()
    tolerance = 5e-5 if kind == "qwen3_5_moe_text" else 1e-5
    for steps in (0, 1, 5):
        trained = model if steps == 0 else run(model, steps, grpo).model
        error, flipped = mismatch(trained, grpo, seed=steps)
        assert error < tolerance, (kind, steps, error)
        assert flipped == 0


def test_runs_resume_to_the_bit(tmp_path: Path) -> None:
    """A run that stops after a rollout and resumes has the metrics and parameters of an uninterrupted run."""
    model, grpo = build_tiny("mixtral"), objective(minibatches=2)
    whole = run(model, 6, grpo, seed=3)
    options = {"seed": 3, "checkpoint": train.Checkpoints(tmp_path / "run", every=2)}
    first = run(model, 6, grpo, callbacks=[lambda progress: progress.step == 1], **options)
    assert len(first.history) == 2  # the callback's request is granted when the samples are used
    second = run(model, 6, grpo, **options)
    assert [m["step"] for m in second.history] == [3, 4, 5, 6]
    for mine, other in zip([*first.history, *second.history], whole.history, strict=True):
        assert {n: v for n, v in mine.items() if "second" not in n} == {
            n: v for n, v in other.items() if "second" not in n
        }
    jax.tree.map(np.testing.assert_array_equal, nnx.state(second.model), nnx.state(whole.model))
    assert run(model, 6, grpo, seed=4).history[0] != whole.history[0]


def killed(folder: Path) -> None:
    """A run that is killed between two minibatches."""

    def kill(progress: train.Progress) -> None:
        if progress.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoints = train.Checkpoints(folder, every=2)
    run(build_tiny("mixtral"), 8, objective(minibatches=2), seed=3, callbacks=[kill], checkpoint=checkpoints)


@pytest.mark.slow
def test_killed_runs_resume_to_the_bit(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(tmp_path / "run",))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    model, grpo = build_tiny("mixtral"), objective(minibatches=2)
    resumed = run(model, 8, grpo, seed=3, checkpoint=train.Checkpoints(tmp_path / "run", every=2))
    assert resumed.history[0]["step"] in (1, 3, 5)  # step 4 may not be on disk
    whole = run(model, 8, grpo, seed=3)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(resumed.model), nnx.state(whole.model))


def interrupted(place: str, folder: Path) -> tuple[list[Any], list[Any]]:
    """The metrics of a run with Ctrl-C in the second rollout or between minibatches and of an uninterrupted run."""
    rollouts_seen = list[int]()

    def rewards(completions: Sequence[Any]) -> list[float]:
        rollouts_seen.append(1)
        if place == "rollout" and len(rollouts_seen) == 2:
            signal.raise_signal(signal.SIGINT)
        return [float(len(set(ids))) for ids in completions]

    def press(progress: train.Progress) -> None:
        if place == "minibatch" and progress.step == 3 and len(rollouts_seen) == 2:
            signal.raise_signal(signal.SIGINT)

    model, grpo = build_tiny("mixtral"), train.GRPO(rewards, **OPTIONS, minibatches=2)
    options: dict[str, Any] = {"checkpoint": folder / "run", "callbacks": [press]}
    with pytest.raises(Interrupted, match="interrupted at step 4 of 8") as stop:
        run(model, 8, grpo, **options)
    found = [*stop.value.fitted.history, *run(model, 8, grpo, **options).history]
    return found, run(model, 8, grpo).history


@pytest.mark.parametrize("place", ["rollout", "minibatch"])
def test_interrupted_runs_use_all_samples(place: str, tmp_path: Path) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        pytest.skip("SIGINT is ignored here, as in background jobs")
    found, wanted = interrupted(place, tmp_path)
    assert [m["loss"] for m in found] == [m["loss"] for m in wanted]


@pytest.mark.wrong_types  # checked functions are different objects, which the cache of programs cannot compare
def test_second_rollout_compiles_nothing() -> None:
    model, grpo = build_tiny("mixtral"), objective(minibatches=2)
    run(model, 2, grpo)
    other = dataclasses.replace(grpo, reward=lambda completions: [float(len(ids)) for ids in completions])
    assert [compiled_in(lambda: run(model, 6, grpo)), compiled_in(lambda: run(model, 2, other))] == [0, 0]


def test_earlier_models_are_released() -> None:
    """The number of arrays does not grow with the rollouts."""
    counts = list[int]()

    def count(progress: train.Progress) -> None:
        gc.collect()
        counts.append(len(jax.live_arrays()))

    run(build_tiny("mixtral"), 6, callbacks=[count])
    assert counts[1] == counts[-1]


def test_training_increases_the_reward() -> None:
    """The reward after 15 steps is higher, for GRPO and GSPO, with and without replay and packing."""
    for grpo in (objective(), objective(replay=False, pack=True), train.GSPO(**vars_of(objective(minibatches=3)))):
        history = run(build_tiny("mixtral"), 15, grpo).history
        assert np.mean([m["reward"] for m in history[-3:]]) > history[0]["reward"] + 0.1


def vars_of(grpo: train.GRPO) -> dict[str, Any]:
    fields = {f.name: getattr(grpo, f.name) for f in dataclasses.fields(grpo)}
    return {
        name: fields[name]
        for name in ("reward", "group_size", "max_new_tokens", "seq_len", "eos_token_id", "minibatches")
    }


def sample(prompt: int, answer: int, seed: int, routed: bool = True) -> ScoredSample:
    rng = np.random.RandomState(seed)
    ids = tuple(map(int, rng.randint(0, 53, prompt + answer)))
    routing = rng.rand(prompt + answer - 1, 2, 9).argsort(-1)[..., :3].astype(np.uint8) if routed else None
    return ScoredSample(
        ids[:prompt], ids[prompt:], tuple(-rng.rand(answer)), routing, float(rng.randn()), float(rng.rand())
    )


def test_packed_samples_equal_separate_rows() -> None:
    """Loss, metrics and gradients do not depend on the rows that hold the samples. None is an empty row."""
    model, grpo = build_tiny("deepseek_v3"), objective()
    samples = [sample(3, 4, 0), sample(2, 9, 1), None, sample(5, 1, 2), sample(1, 3, 3)]
    batches = [stack_samples(samples, 12, 2, pack=pack) for pack in (False, True)]
    assert [len(batch["tokens"]) for batch in batches] == [6, 4]
    packed = batches[1]["segment_ids"].max(axis=1)
    assert sorted(packed) == [0, 1, 1, 2] and batches[1]["routing"].min() == -1

    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, batch: Any) -> Any:
        return grpo(nnx.merge(graph, params, rest), batch)

    (a, b) = (jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch) for batch in batches)
    assert abs(float(a[0][0] - b[0][0])) < 1e-5
    for name, value in a[0][1].measured.items():
        assert abs(float(value - b[0][1].measured[name])) < 1e-5, name
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), a[1], b[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 12}, "max_new_tokens=12 leaves no room"),
        ({"group_size": 0}, "group_size"),
        ({"minibatches": 13}, "0 of 12 samples have no reward .* cannot be divided into minibatches=13"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"max_new_tokens": 9}, "prompt 0: the prompt has 4 tokens, but seq_len=12 and max_new_tokens=9 leave 3"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(build_tiny("mixtral"), 13, objective(**options))


@pytest.mark.parametrize("data", [[[]], [5], ["text"], [{"tokens": np.ones((2, 8), np.int32)}], [["text"]]])
def test_data_that_are_not_prompts(data: Any) -> None:
    with pytest.raises(ValueError, match=r"pass lists of (records|dicts) with 'prompt', see train.prompts"):
        next(rollouts(build_tiny("mixtral"), objective(), data))


def test_long_prompts_are_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = nnxmoe.Tokenizer.from_pretrained("demo")
    records = [{"prompt": "Hi"}, {"prompt": "a small cat " * 20}]
    batches = train.prompts(records, tokenizer, batch_size=1, seq_len=12, epochs=1, shuffle=False)
    assert list(batches) == [[{"prompt": "Hi"}]]
    assert "1 of 2 are skipped" in caplog.text


def test_samples_are_dealt_to_minibatches() -> None:
    """All minibatches have the same number of rows, and a sample with a reward."""
    few = train.GRPO(lambda completions, **_: [i if i < 5 else None for i in range(len(completions))], **OPTIONS)
    for grpo, counts in ((objective(), [2, 2, 2, 3, 3]), (few, [1] * 5)):
        grpo = dataclasses.replace(grpo, minibatches=5, eos_token_id=[1, 2])  # a list, although objectives are hashed
        batches = rollouts(build_tiny("mixtral"), grpo)
        found = [next(batches)["loss_mask"].max(axis=1) for _ in range(5)]
        assert {len(rows) for rows in found} == {3} and sorted(int(rows.sum()) for rows in found) == counts


def test_held_out_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="evaluate: GRPO has no loss of held-out batches"):
        run(build_tiny("mixtral"), 1, evaluate=[{"tokens": np.ones((2, 8), np.int32)}])


def test_runs_end_with_a_rollout(tmp_path: Path) -> None:
    model, grpo = build_tiny("mixtral"), objective(minibatches=2)
    with pytest.raises(ValueError, match=r"steps is 3: use a multiple of minibatches=2"):
        run(model, 3, grpo)
    with pytest.raises(ValueError, match=r"every=….* is 3: use a multiple of minibatches=2"):
        run(model, 4, grpo, checkpoint=train.Checkpoints(tmp_path / "run", every=3))
    with pytest.raises(ValueError, match="steps is 4"):  # not the interval, which is 102
        run(model, 4, objective(minibatches=3), checkpoint=tmp_path / "run")


def history_on(sizes: Any) -> list[dict[str, float]]:
    """Metrics of packed minibatches in microbatches, on a mesh or on one device."""
    dispatch = nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RingOfExperts()) if sizes else nnxmoe.Sorted()
    strategy = nnxmoe.Strategy(dispatch=dispatch, stacking=nnxmoe.Scanned())
    fields = TINY["mixtral"] | {"vocab_size": 56}
    model = build(fields, tiny_weights(fields), strategy)
    options = {"mesh": nnxmoe.make_mesh(**sizes)} if sizes else {}
    return run(model, 4, objective(minibatches=2, pack=True, seq_len=24), accumulate=2, **options).history


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 2, "expert": 2}, {"fsdp": 4, "context": 2}])
def test_eight_devices_equal_one(eight: Callable[..., Any], sizes: dict[str, int]) -> None:
    for found, wanted in zip(eight(history_on, sizes), history_on(None), strict=True):
        for name in wanted.keys() - {"seconds", "tokens_per_second", "data_seconds", "device_seconds"}:
            assert abs(found[name] - wanted[name]) < 1e-5, name


def failing(**_: Any) -> list[float]:
    raise KeyError("gold")


def picky(completions: Sequence[Any], **_: Any) -> list[float | None]:
    return [None if i == 2 else float(i) for i in range(len(completions))]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (failing, "reward function failing failed: KeyError: 'gold'"),
        (lambda completions, **_: [float("nan")] * len(completions), "returned nan for sample 0"),
        (lambda completions, **_: [1.0], "returned 1 values for 12 samples"),
    ],
)
def test_rewards_that_fail(reward: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(build_tiny("mixtral"), 1, train.GRPO(reward, group_size=4, max_new_tokens=6, seq_len=12))


def test_samples_without_reward_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    fitted = run(build_tiny("mixtral"), 1, train.GRPO(picky, **OPTIONS))
    assert "1 of 12 samples have no reward" in caplog.text
    assert fitted.history[0]["samples"] == 11


def test_groups_of_one_and_equal_rewards_do_not_train() -> None:
    """Zero advantages leave the parameters as they are, and give no NaN."""
    model = build_tiny("mixtral")
    equal = functools.partial(train.GRPO, lambda completions, **_: [1.0] * len(completions))
    for grpo in (objective(group_size=1), equal(group_size=4, max_new_tokens=6, seq_len=12)):
        fitted = run(model, 2, grpo)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(fitted.model, nnx.Param), nnx.state(model, nnx.Param))


def test_a_reference_model() -> None:
    """The KL divergence to the initial model is 0 at first. Its weight changes the loss later."""
    model = build_tiny("mixtral")
    histories = [run(model, 3, objective(kl=kl, reference_model=model)).history for kl in (0.5, 0.0)]
    for history in histories:
        assert abs(history[0]["kl"]) < 1e-6 < history[2]["kl"]
    assert abs(histories[0][2]["loss"] - histories[1][2]["loss"]) > 1e-6
    with pytest.raises(ValueError, match="reference_model"):
        objective(reference=model)
    with pytest.raises(ValueError, match="both reference and reference_model"):
        objective(reference=train.lora.without, reference_model=model)
    with pytest.raises(ValueError, match="needs a reference"):
        run(model, 1, objective(kl=0.5))
