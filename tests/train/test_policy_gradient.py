"""GRPO and its variants: losses against TRL and a NumPy oracle, gradients, planted mistakes, advantages, rewards."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import train
from nnxmoe.layers.linear.kernel import DenseKernel
from nnxmoe.train import lora
from nnxmoe.train.advantages import compute_advantages, weighted_sum
from nnxmoe.train.loop import policy_loss
from nnxmoe.train.loop.feed import put_batch
from nnxmoe.train.loop.loss import map_logits
from nnxmoe.train.loop.measured import metrics_of
from nnxmoe.train.loop.policy_gradient import SAMPLE_FIELDS, logps_and_entropy
from nnxmoe.train.loop.policy_loss import Answers
from nnxmoe.train.loop.step import Step
from tests.support.arrays import max_error
from tests.support.policy import CASES, FIELDS, REWARDS, WEIGHTS, frozen, packed, samples
from tests.support.tiny import build, tiny_weights

PLAIN = nnxmoe.Strategy(stacking=nnxmoe.Scanned())
Sample = dict[str, Any]


def tiny(strategy: nnxmoe.Strategy = PLAIN) -> nnxmoe.CausalLM:
    return build(FIELDS, tiny_weights(FIELDS), strategy)


def batch_of(objective: Any, **changes: Any) -> dict[str, np.ndarray]:
    """The samples that TRL had, without a reference if the objective has no KL penalty."""
    batch = packed(samples(frozen()["logps"])) | changes
    return batch if objective.kl else {name: array for name, array in batch.items() if name != "reference_logps"}


# Beside TRL


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name in ("grpo", "dr_grpo", "gspo, wide") else pytest.mark.slow) for name in CASES],
)
def test_eight_steps_equal_trl(case: str) -> None:
    """Losses, gradients and metrics of packed rows equal TRL's of padded rows."""
    _, objective, rate = CASES[case]
    step, batch = Step(tiny(), optax.sgd(rate), objective), batch_of(objective)
    gradients, state = jax.jit(step.definition.gradients), step.init()
    for wanted in frozen()["steps"][case]:
        grads, losses = gradients(state, batch, state.key)
        assert float(losses.total) == pytest.approx(wanted["loss"], abs=1e-5)
        assert float(optax.tree.norm(grads)) == pytest.approx(wanted["norm"], rel=1e-5, abs=1e-5)
        kernels = {"head": grads["head.kernel"], "router": grads["stacks.0.layer.moe.router.kernel"][0]}
        for name, corner in wanted["gradients"].items():
            assert max_error(kernels[name][:2, :2].ravel(), corner) < 1e-5, name
        for name, value in wanted["metrics"].items():
            if not (name.startswith("clipped") and "gspo" in case):  # TRL's are means over sequences there
                assert float(losses.measured[name]) == pytest.approx(value, abs=1e-5), name
        state, _ = step(state, batch)


@pytest.mark.parametrize("name", ["group_advantages", "dr_grpo", "GDPO"])
def test_advantages_equal_trl(name: str) -> None:
    function = getattr(train, name)() if name == "GDPO" else getattr(train, name)
    advantages = compute_advantages(function, np.array(REWARDS, float), WEIGHTS)
    left_out = np.isnan(advantages)
    assert left_out.sum() == 1 and max_error(np.where(left_out, 0, advantages), frozen()["advantages"][name]) < 1e-6


# Beside loops over samples and tokens


def random_samples(seed: int = 0) -> list[Sample]:
    """Samples of 1 to 7 answer tokens, and one without an answer."""
    rng, found = np.random.default_rng(seed), []
    for prompt, answer, sign in ((3, 4, 1), (2, 1, -1), (5, 0, 1), (2, 7, -1), (4, 2, 1), (1, 5, -1)):
        logps = rng.uniform(-4, -0.1, answer)
        fields = {name: logps + 0.4 * rng.standard_normal(answer) for name in SAMPLE_FIELDS[2:]}
        fields |= {"advantages": np.full(answer, sign * rng.uniform(0.2, 2)), "rewards": np.full(answer, rng.normal())}
        tokens = rng.integers(1, 50, prompt + answer)
        found.append({"prompt": prompt, "tokens": tokens, "logps": logps, **fields})
    return found


PACKED = ((0, 1, 2), (3, 4), (), (5,))


def token_loss(objective: train.GRPO, ratio: float, sample: Sample, t: int) -> float:
    """The loss of one token, before the KL penalty and importance weights."""
    clip, advantage = objective.clip, sample["advantages"][t]
    bounded = min(max(ratio, 1 - clip.low), 1 + clip.high)
    loss = -min(min(ratio, clip.delta or math.inf) * advantage, bounded * advantage)
    return min(loss, -clip.dual * advantage) if clip.dual is not None and advantage < 0 else loss


def importance_weight(objective: train.GRPO, sample: Sample, t: int, old: Any) -> float:
    sampling = objective.importance
    if sampling is None:
        return 1.0
    tokens = range(len(sample["logps"])) if sampling.per_sequence else [t]
    weight = math.exp(sum(old[i] - sample["sampler_logps"][i] for i in tokens))
    if sampling.mask:
        return weight if sampling.floor <= weight <= sampling.cap else 0.0
    return min(max(weight, sampling.floor), sampling.cap)


def oracle(objective: train.GRPO, found: list[Sample], logps: list[Any]) -> float:
    """The loss, written as loops. The importance weights are those of the samples' own log-probabilities."""
    sums, lengths = [], []
    for sample, policy in zip(found, logps, strict=True):
        if not (length := len(policy)):
            continue
        old = sample["old_logps"] if "old_logps" in sample else sample["logps"]
        total = 0.0
        for t in range(length):
            log_ratio = policy[t] - old[t]
            if objective.ratio is train.sequence_ratio:
                log_ratio = sum(policy[i] - old[i] for i in range(length)) / length
            ratio, r = math.exp(log_ratio), sample["reference_logps"][t] - policy[t]
            loss = token_loss(objective, ratio, sample, t) * importance_weight(objective, sample, t, old)
            kl = math.exp(r) - r - 1
            total += loss + objective.kl * kl * (ratio if objective.kl_estimator is train.unbiased_kl else 1)
        sums.append(total)
        lengths.append(length)
    if objective.aggregate is train.token_mean:
        return sum(sums) / sum(lengths)
    if objective.aggregate is train.sequence_mean:
        return sum(total / length for total, length in zip(sums, lengths, strict=True)) / len(sums)
    assert isinstance(objective.aggregate, train.FixedLengthMean)
    return sum(sums) / (len(sums) * objective.aggregate.length)


def ours(objective: train.GRPO, found: list[Sample]) -> tuple[Any, Any]:
    """The loss of packed samples, and its gradient with respect to the log-probabilities ``[B, T]``."""
    batch = {name: jnp.asarray(array) for name, array in packed(found, rows=PACKED).items()}
    answers = Answers.from_batch(batch)
    given = {name: answers.align(batch[name]) for name in SAMPLE_FIELDS if name in batch}

    def loss(logps: Any) -> Any:
        losses, _ = objective.token_losses(answers.align(logps), given, answers)
        return objective.aggregate(losses, answers, answers.counts())

    return jax.jit(jax.value_and_grad(loss))(batch["logps"])


OBJECTIVES = {
    "plain": train.GRPO(len),
    "clip": train.GRPO(len, clip=train.Clip(0.05, 0.5), aggregate=train.token_mean),
    "delta": train.GRPO(len, clip=train.Clip(delta=1.25), aggregate=train.FixedLengthMean(9)),
    "dual": train.GRPO(len, clip=train.Clip(dual=1.3)),
    "kl": train.GRPO(len, kl=0.3),
    "published kl": train.GRPO(len, kl=0.3, kl_estimator=train.k3_kl, aggregate=train.token_mean),
    "sequences": train.GSPO(len, kl=0.1, clip=train.Clip(0.1, 0.2)),
    "importance": train.GRPO(len, importance=train.ImportanceSampling(1.2, 0.8)),
    "masked": train.GRPO(len, kl=0.2, importance=train.ImportanceSampling(1.3, 0.8, mask=True)),
    "of sequences": train.GRPO(len, importance=train.ImportanceSampling(1.2, per_sequence=True)),
    "masked sequences": train.GSPO(len, importance=train.ImportanceSampling(1.4, 0.5, per_sequence=True, mask=True)),
}


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_equal_loops(name: str, old: bool) -> None:
    objective, found = OBJECTIVES[name], random_samples()
    if not old:
        found = [{name: array for name, array in sample.items() if name != "old_logps"} for sample in found]
    logps = [sample["logps"] for sample in found]
    loss, grads = ours(objective, found)
    assert float(loss) == pytest.approx(oracle(objective, found, logps), abs=1e-5)
    slopes = [np.zeros(len(values)) for values in logps]
    for i, values in enumerate(logps):
        for t in range(len(values)):
            moved = [[v + h * (s == i) * (np.arange(len(v)) == t) for s, v in enumerate(logps)] for h in (1e-6, -1e-6)]
            slopes[i][t] = (oracle(objective, found, moved[0]) - oracle(objective, found, moved[1])) / 2e-6
    wanted = packed([sample | {"logps": slope} for sample, slope in zip(found, slopes, strict=True)], rows=PACKED)
    assert max_error(grads, wanted["logps"]) < 1e-5


def swapped_clip(objective: train.GRPO, patch: pytest.MonkeyPatch) -> train.GRPO:
    return dataclasses.replace(objective, clip=train.Clip(objective.clip.high, objective.clip.low))


def other_kl_sign(objective: train.GRPO, patch: pytest.MonkeyPatch) -> train.GRPO:
    return dataclasses.replace(objective, kl_estimator=lambda log_ratios, ratios: ratios * policy_loss.k3(-log_ratios))


def length_bias(objective: train.GRPO, patch: pytest.MonkeyPatch) -> train.GRPO:
    return dataclasses.replace(objective, aggregate=train.token_mean)


def learned_prompts(objective: train.GRPO, patch: pytest.MonkeyPatch) -> train.GRPO:
    real = policy_loss.targets_of
    patch.setattr(policy_loss, "targets_of", lambda batch: real({n: a for n, a in batch.items() if n != "loss_mask"}))
    return objective


def counted_empty_answers(objective: train.GRPO, patch: pytest.MonkeyPatch) -> train.GRPO:
    real = Answers.counts
    patch.setattr(Answers, "counts", lambda self: real(self)._replace(samples=jnp.float32(len(random_samples()))))
    return objective


def unshifted(objective: train.GRPO, patch: pytest.MonkeyPatch) -> train.GRPO:
    patch.setattr(Answers, "align", lambda self, values: values * self.weights)
    return objective


def sums_of_rows(objective: train.GRPO, patch: pytest.MonkeyPatch) -> train.GRPO:
    real = Answers.from_batch
    patch.setattr(Answers, "from_batch", lambda batch: real({n: a for n, a in batch.items() if n != "segment_ids"}))
    return objective


def importance_after_aggregation(objective: train.GRPO, patch: pytest.MonkeyPatch) -> train.GRPO:
    weights = []

    def importance(log_ratios: Any, answers: Answers) -> Any:
        assert objective.importance is not None
        weights.append(policy_loss.token_mean(objective.importance(log_ratios, answers), answers, answers.counts()))
        return jnp.ones_like(log_ratios)

    aggregate = lambda losses, answers, counts: weights[-1] * objective.aggregate(losses, answers, counts)  # noqa: E731
    return dataclasses.replace(objective, importance=importance, aggregate=aggregate)


MISTAKES: dict[str, tuple[str, Callable[..., train.GRPO]]] = {
    "clip side": ("clip", swapped_clip),
    "KL sign": ("kl", other_kl_sign),
    "length bias": ("plain", length_bias),
    "prompts are learned": ("kl", learned_prompts),
    "empty answers count": ("plain", counted_empty_answers),
    "values of the position": ("plain", unshifted),
    "rows instead of samples": ("sequences", sums_of_rows),
    "importance weight after aggregation": ("importance", importance_after_aggregation),
    "product instead of mean": (
        "sequences",
        lambda o, _: dataclasses.replace(o, ratio=lambda r, a: jnp.exp(a.sums(r))),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_change_the_loss(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = MISTAKES[mistake]
    found = random_samples()
    wanted = oracle(OBJECTIVES[name], found, [sample["logps"] for sample in found])
    assert abs(float(ours(plant(OBJECTIVES[name], monkeypatch), found)[0]) - wanted) > 1e-3


# Whole models

TEMPERATURE = 0.7


def alone(model: nnxmoe.CausalLM, sample: Sample) -> tuple[list[float], list[float]]:
    """Log-probabilities and entropies of an answer, from all logits of the sample in a row of its own."""
    logits = np.asarray(model(sample["tokens"][None]).logits[0], np.float64) / TEMPERATURE
    logps = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    there = range(sample["prompt"], len(sample["tokens"]))
    return [logps[t - 1, sample["tokens"][t]] for t in there], [
        -(np.exp(row) @ row) for row in logps[there[0] - 1 : -1]
    ]


def test_packed_rows_of_a_model_equal_samples_alone() -> None:
    """Log-probabilities, loss and metrics, with a row of padding. Log-probabilities of the batch's own model cancel."""
    objective, model = train.GRPO(len, kl=0.1, temperature=TEMPERATURE), tiny()
    found = samples(frozen()["logps"])
    found = [
        sample | {"rewards": np.full(len(s), i)} for i, sample in enumerate(found) if len(s := sample["old_logps"])
    ]
    batch = packed(found, rows=((0, 1), (), (2, 3, 5), (4,)))
    objective.check(batch)
    logps, entropies = zip(*(alone(model, sample) for sample in found), strict=True)
    total, losses = jax.jit(lambda batch: objective(model, batch))(batch)
    assert float(total) == pytest.approx(oracle(objective, found, list(logps)), abs=1e-5)
    metrics, flat = losses.measured, lambda values: np.concatenate([np.asarray(v) for v in values])
    drift = flat([sample["old_logps"] - sample["sampler_logps"] for sample in found])
    assert metrics["entropy"] == pytest.approx(flat(entropies).mean(), abs=1e-5)
    assert metrics["kl/rollout"] == pytest.approx((np.exp(drift) - drift - 1).mean(), abs=1e-5)
    assert (
        metrics["reward"] == pytest.approx(2.5) and metrics["length"] == pytest.approx(21 / 6) and losses.tokens == 21
    )
    known = objective.logps(model, batch)
    assert (
        max_error(
            known,
            packed([s | {"l": v} for s, v in zip(found, logps, strict=True)], rows=((0, 1), (), (2, 3, 5), (4,)))["l"],
        )
        < 1e-5
    )
    own = objective(model, batch | dict.fromkeys(("old_logps", "sampler_logps", "reference_logps"), known))[1].measured
    assert own["kl"] == own["kl/rollout"] == own["clipped/low"] == own["clipped/high"] == 0


def test_replayed_routing() -> None:
    """The ids of the policy change nothing, other ids flip tokens, and the reference routes by itself."""
    objective, model = train.GRPO(len, kl=0.1, reference=lambda model: model), tiny()
    batch = {name: array for name, array in packed(samples(frozen()["logps"])).items() if name != "reference_logps"}
    inputs = [batch[name] for name in ("positions", "segment_ids")]
    ids = np.asarray(model(batch["tokens"], None, *inputs, return_routing=True).routing[0].experts)[:, :, None]
    run = jax.jit(lambda batch: objective(model, batch))
    (plain, _), (same, kept) = run(batch), run(batch | {"routing": ids})
    assert float(plain) == pytest.approx(float(same), abs=1e-6) and kept.measured["routing/flipped"] == 0
    real = batch["segment_ids"] > 0
    changed = np.where(((batch["positions"] == 3) | ~real)[:, :, None, None], (ids + 1) % 6, ids)
    objective.check(batch | {"routing": changed})
    metrics = run(batch | {"routing": changed})[1].measured
    flipped = (np.sort(changed, axis=-1) != np.sort(ids, axis=-1)).any(axis=(2, 3))
    assert float(metrics["routing/flipped"]) == pytest.approx(flipped[real].mean())
    assert metrics["kl"] > kept.measured["kl"] == 0


@functools.cache
def gradients(accumulate: int) -> Any:
    objective = train.GRPO(len, kl=0.1, clip=train.Clip(dual=1.5))
    batch = packed(samples(frozen()["logps"]), rows=((0, 1), (), (2, 3, 5), (4,)))
    step = Step(tiny(), optax.sgd(1.0), objective, accumulate=accumulate)
    state = step.init()
    return jax.jit(step.definition.gradients)(state, batch, state.key)


@pytest.mark.slow
def test_accumulated_parts_equal_the_batch() -> None:
    """The parts have different numbers of samples and tokens."""
    (grads, whole), (others, parts) = (gradients(n) for n in (1, 2))
    assert whole.tokens == parts.tokens == 21
    for name, value in whole.measured.items():
        assert float(parts.measured[name]) == pytest.approx(float(value), abs=1e-5), name
    assert float(whole.total) == pytest.approx(float(parts.total), abs=1e-5)
    assert all(max_error(grads[name], others[name]) < 1e-5 for name in grads)


def trained(mesh: dict[str, int] | None) -> list[Any]:
    """Metrics of three steps with replayed routing, and with adapters whose reference is the model without them."""
    made = None if mesh is None else nnxmoe.make_mesh(**mesh)
    dispatch = nnxmoe.Sorted() if mesh is None else nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RaggedAllToAll())
    strategy, runs = dataclasses.replace(PLAIN, mesh=made, dispatch=dispatch), []
    rows = ((0, 1), (2, 3), (4,), (5,), (0,), (1, 3), (), (2, 4))
    batch = packed(samples(frozen()["logps"]), rows=rows)
    for reference in (None, lora.without):
        model = tiny(strategy)
        if reference:
            lora.add(model, 4, rngs=nnx.Rngs(0))
        data = {name: array for name, array in batch.items() if not (reference and name == "reference_logps")}
        if not reference:
            first = np.random.default_rng(0).integers(0, 6, (*batch["tokens"].shape, 1, 1))
            data["routing"] = np.concatenate([first, (first + 1) % 6], axis=-1).astype(np.uint8)
        objective = train.GRPO(len, kl=0.1, reference=reference, importance=train.ImportanceSampling(), balance=0.1)
        step = Step(model, optax.sgd(0.02), objective, trainable=nnx.LoRAParam if reference else nnx.Param)
        state = step.init()
        for number in range(3):
            state, report = step(state, placed := put_batch(data, step))
            metrics = metrics_of(report, number, placed, 1.0)
            runs.append({name: value for name, value in metrics.items() if "second" not in name})
    return runs


@pytest.mark.slow
def test_eight_devices_equal_one(eight: Callable[..., Any]) -> None:
    one = trained(None)
    assert one[3]["kl"] == 0 < one[-1]["kl"] and one[0]["routing/flipped"] > 0.5
    for axes in ({"fsdp": 4, "expert": 2}, {"fsdp": 2, "context": 2, "expert": 2}):
        for ours, theirs in zip(one, eight(trained, axes), strict=True):
            for name in ours:
                assert theirs[name] == pytest.approx(ours[name], rel=1e-5, abs=1e-5), (axes, name)


def test_entropy_in_chunks() -> None:
    """Chunks of few logits change nothing, and the entropy of equal logits is the logarithm of their number."""
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((3, 7, 4), (4, 11)))
    targets, function = jnp.asarray(rng.integers(0, 11, (3, 7))), functools.partial(logps_and_entropy, temperature=0.5)
    whole, chunked = (map_logits(function, x, DenseKernel(kernel, True), targets, None, n) for n in (1 << 20, 70))
    logps = jax.nn.log_softmax(x @ kernel / 0.5)
    assert max_error(whole, chunked) < 1e-6
    assert max_error(whole[..., 0], jnp.take_along_axis(logps, targets[..., None], axis=-1)[..., 0]) < 1e-5
    assert max_error(whole[..., 1], -jnp.sum(jnp.exp(logps) * logps, axis=-1)) < 1e-5


# Advantages


def normalized(values: list[float]) -> list[float]:
    """Distances from the mean in standard deviations, without NaN."""
    real = [value for value in values if not math.isnan(value)]
    deviation = statistics.stdev(real) if len(real) > 1 else 0.0
    return [(value - statistics.mean(real)) / (deviation + 1e-4) if real else math.nan for value in values]


def without_the_sample(values: list[float]) -> list[float]:
    found = []
    for i, value in enumerate(values):
        others = [other for j, other in enumerate(values) if j != i and not math.isnan(other)]
        found.append(value - (statistics.mean(others) if others else value))
    return found


def gdpo_oracle(rewards: np.ndarray) -> np.ndarray:
    scaled = np.array([[normalized(group) for group in table] for table in rewards.tolist()])
    total = weighted_sum(scaled, WEIGHTS)
    return np.reshape(normalized(total.ravel().tolist()), total.shape)


NAN = math.nan
GROUPS = {
    "two functions": [[[1, 0, 0.5, 2], [0.25, 3, 0.25, 0.5]], [[0, 1, 1, 0], [0.5, 0.1, 1.5, 0]]],
    "left out": [[[1, NAN, 0, 3], [NAN, NAN, NAN, NAN], [NAN, 2, NAN, NAN]], [[0, NAN, 1, 1], [NAN] * 4, [NAN] * 4]],
    "equal": [[[0.1, 0.1, 0.1], [7, 7, 7]], [[0.3, 0.3, 0.3], [0, 0, 0]]],
    "groups of one": [[[1.0], [0.0]], [[2.0], [2.0]]],
}


@pytest.mark.parametrize("name", GROUPS)
def test_advantages_equal_loops(name: str) -> None:
    rewards = np.array(GROUPS[name], float)
    total = weighted_sum(rewards, WEIGHTS)
    oracles = {
        train.group_advantages: [normalized(group) for group in total.tolist()],
        train.dr_grpo: [
            [r - statistics.mean([x for x in group if x == x] or [0]) for r in group] for group in total.tolist()
        ],
        train.rloo: [without_the_sample(group) for group in total.tolist()],
        train.GDPO(): gdpo_oracle(rewards),
    }
    for function, wanted in oracles.items():
        advantages = compute_advantages(function, rewards, WEIGHTS)
        np.testing.assert_allclose(advantages, wanted, atol=1e-9, err_msg=str(function))
        assert (np.isnan(advantages) == np.isnan(total)).all()
        if name in ("equal", "groups of one") and not (name == "groups of one" and function == train.dr_grpo):
            assert np.abs(advantages).max() < 1e-9, function


def test_gdpo_distinguishes_rewards_with_equal_sums() -> None:
    """The example of the paper: with two rewards of 0 or 1, one of them counts less if it is rarer in the group."""
    rewards = np.array([[[1.0, 0.0, 0.0, 0.0]], [[0.0, 1.0, 1.0, 0.0]]])
    group, decoupled = (compute_advantages(f, rewards, (1.0, 1.0))[0] for f in (train.group_advantages, train.GDPO()))
    assert group[0] == group[1] and decoupled[0] > decoupled[1] + 0.1


# Rewards


def exact(completions: list[str], answer: list[str], **fields: Any) -> list[float | None]:
    return [None if a == "?" else float(c == a) for c, a in zip(completions, answer, strict=True)]


def brevity(completions: list[str]) -> Any:
    return -np.array([len(completion) for completion in completions], np.float32)


def test_rewards_of_several_functions() -> None:
    """A function gets the arguments that it names, and scores of None are NaN."""
    asked: dict[str, Any] = {"prompts": ["1+1=", "2+2="], "completions": ["2", "5!"], "fields": {"answer": ["2", "?"]}}
    rewards = train.evaluate_rewards([exact, brevity], **asked)
    np.testing.assert_array_equal(rewards, [[1, NAN], [-1, -2]])
    np.testing.assert_array_equal(weighted_sum(rewards, (1.0, 0.5)), [0.5, -1])
    np.testing.assert_array_equal(weighted_sum(train.evaluate_rewards(exact, **asked), (1.0,)), [1, NAN])


def failing(prompts: list[str], completions: list[str]) -> list[float]:
    raise KeyError("no answer")


REWARDS_REFUSED: dict[str, tuple[Any, str]] = {
    "raises": (failing, "reward function failing failed: KeyError: 'no answer'"),
    "nan": (lambda completions: [1.0, NAN], "<lambda> returned nan for sample 1: return a finite number, or None"),
    "infinite": (lambda completions: [math.inf, 0], "returned inf for sample 0"),
    "text": (lambda completions: [1, "1"], "returned '1' for sample 1"),
    "too few": (lambda completions: [1.0], "returned 1 values for 2 samples"),
    "a number": (lambda completions: 1.0, "<lambda> failed: TypeError"),
    "an unknown argument": (lambda texts: [0, 0], "<lambda> failed: TypeError: .*'texts'"),
    "none": ([], r"reward=\[\]: pass a function"),
}


@pytest.mark.parametrize("name", REWARDS_REFUSED)
def test_invalid_rewards_are_refused(name: str) -> None:
    function, message = REWARDS_REFUSED[name]
    with pytest.raises(ValueError, match=message):
        train.evaluate_rewards(function, ["a", "b"], ["c", "d"], {})


# Refusals

REFERENCE_GRPO = train.GRPO(len, reference=lora.without)
BATCHES: dict[str, tuple[train.GRPO, dict[str, Any], str]] = {
    "no advantages": (train.GRPO(len), {"advantages": None}, "a batch for GRPO needs advantages"),
    "no mask": (train.GSPO(len), {"loss_mask": None}, "a batch for GSPO needs loss_mask"),
    "no sampler": (
        train.GRPO(len, importance=train.ImportanceSampling()),
        {"sampler_logps": None},
        "needs sampler_logps",
    ),
    "no reference": (train.GRPO(len, kl=0.1), {"reference_logps": None}, r"GRPO\(kl=0.1\) needs a reference"),
    "two references": (REFERENCE_GRPO, {}, "remove one of them"),
    "a value per sample": (
        train.GRPO(len),
        {"rewards": np.zeros(3)},
        r"rewards has the shape \[3\]: it must be \[3, 22\]",
    ),
    "targets": (train.GRPO(len), {"targets": np.zeros((3, 22), np.int32)}, "targets in a batch for GRPO: remove them"),
    "unknown": (train.GRPO(len), {"logps": np.zeros((3, 22))}, "unknown field 'logps'"),
    "numbers": (train.GRPO(len), {"segment_ids": np.full((3, 22), 40, np.int32)}, "segment_ids contains 40: number"),
    "numbers in JAX": (train.GRPO(len), {"segment_ids": jnp.full((3, 22), 40)}, "segment_ids contains 40: number"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_malformed_batches_are_refused(name: str) -> None:
    objective, changes, message = BATCHES[name]
    batch = packed(samples(frozen()["logps"])) | changes
    with pytest.raises(ValueError, match=message):
        objective.check({name: array for name, array in batch.items() if array is not None})


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "kl": (lambda: train.GRPO(len, kl=-1.0), "GRPO: kl must be"),
    "temperature": (lambda: train.GSPO(len, temperature=0), "GSPO: temperature must be a finite positive number"),
    "a model": (
        lambda: train.GRPO(len, reference=tiny()),
        r"GRPO\(reference=…\) is a model: pass it as reference_model",
    ),
    "weights": (lambda: train.GRPO([len, max], reward_weights=[1]), "has 1 weights for 2 reward functions"),
    "dual": (lambda: train.Clip(dual=1.0), r"Clip\(dual=1.0\): it bounds ratios above 1"),
    "floor": (lambda: train.ImportanceSampling(1.0, 2.0), r"floor=2.0\): it must be less than cap=1.0"),
    "length": (lambda: train.FixedLengthMean(0), r"FixedLengthMean\(length=0\): pass a positive integer"),
    "shape": (lambda: compute_advantages(lambda r: r[0], np.zeros((1, 2, 3)), (1,)), r"returned the shape \[3\]"),
    "not finite": (
        lambda: compute_advantages(lambda r: r + NAN, np.zeros((1, 2, 3)), (1,)),
        "returned NaN or infinity",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_invalid_calls_are_refused(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()
