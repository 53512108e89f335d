"""Learning from preferences: losses against TRL, gradients, references, meshes, resumed runs, and the data."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator
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
from nnxmoe.apps import cli
from nnxmoe.layers.linear.kernel import DenseKernel
from nnxmoe.moe.balance import switch_loss, z_loss
from nnxmoe.train import DataError, lora
from nnxmoe.train.loop.loss import log_probabilities
from nnxmoe.train.loop.preference import DPO, PairLoss
from nnxmoe.train.loop.step import Step
from tests.support.arrays import max_error
from tests.support.mtp import tiny_mtp
from tests.support.tiny import ORACLE, build, build_tiny, random_tokens

PLAIN = nnxmoe.Strategy(stacking=nnxmoe.Scanned())
BETA, NOISE, ADAM = 0.3, 0.1, optax.adam(5e-2)


@functools.cache
def tokenizer() -> nnxmoe.Tokenizer:
    return nnxmoe.Tokenizer.from_pretrained("demo")


# Losses of log-probabilities


def robust_loss(ratios: Any, tokens: Any, beta: float) -> Any:
    """TRL's robust loss, as a loss of one's own (Chowdhury et al. 2024)."""
    right, wrong = (
        train.sigmoid_loss(ratios[:, order], tokens, beta) for order in (slice(None), slice(None, None, -1))
    )
    return ((1 - NOISE) * right - NOISE * wrong) / (1 - 2 * NOISE)


LOGPS = np.array([[-11.5, -9.25], [-3.0, -4.5], [-20.0, -19.0]], np.float32)
KNOWN = np.array([[-12.0, -8.0], [-3.5, -3.75], [-18.5, -21.0]], np.float32)
COUNTS = np.array([[4, 3], [1, 2], [6, 5]], np.float32)
# Mean loss and its gradient with respect to LOGPS, computed by DPOTrainer of TRL 1.16 with beta 0.3.
TRL: dict[PairLoss, tuple[float, list[float]]] = {
    train.sigmoid_loss: (0.7792978, [-0.0371684, 0.0371684, -0.0407333, 0.0407333, -0.0740775, 0.0740775]),
    train.hinge_loss: (1.05, [-0.1, 0.1, -0.1, 0.1, -0.1, 0.1]),
    train.ipo_loss: (2.4197686, [-0.1875, 0.25, -0.5277778, 0.2638889, -0.2574074, 0.3088889]),
    robust_loss: (0.7855479, [-0.0496684, 0.0496684, -0.0532333, 0.0532333, -0.0865775, 0.0865775]),
}


@pytest.mark.parametrize("loss", TRL)
def test_losses_equal_trl(loss: PairLoss) -> None:
    wanted, slope = TRL[loss]
    found = jax.value_and_grad(lambda logps: jnp.mean(loss(logps - KNOWN, jnp.asarray(COUNTS), BETA)))(
        jnp.asarray(LOGPS)
    )
    assert abs(found[0] - wanted) < 1e-6 and max_error(found[1].ravel(), slope) < 1e-6


# Whole models

KEPT = np.array([0, 1, 3])  # pairs that count
LENGTHS = [
    [(3, 7), (3, 9)],
    [(1, 2), (1, 6)],
    [(0, 0), (0, 0)],
    [(5, 9), (5, 6)],
]  # of prompts and rows; one is padding


def pairs(seed: int = 0) -> dict[str, np.ndarray]:
    """Four pairs of 9 tokens, one of them padding; what is padded has arbitrary tokens."""
    tokens = random_tokens(8, 9, seed=seed).reshape(4, 2, 9)
    places, ends = np.arange(9), np.array(LENGTHS)[..., None, :]
    real = (places < ends[..., 1]).astype(np.int32)
    return {"tokens": tokens, "attention_mask": real, "loss_mask": real * (places >= ends[..., 0])}


@functools.cache
def tiny(seed: int = 0) -> nnxmoe.CausalLM:
    return build_tiny("mixtral", PLAIN, seed, num_hidden_layers=1)


def alone(model: nnxmoe.CausalLM, batch: dict[str, Any]) -> Any:
    """The log-probabilities of the completions, each row for itself, without padding, from all logits at once."""
    found = []
    for pair, lengths in zip(batch["tokens"], LENGTHS, strict=True):
        for ids, (first, end) in zip(pair, lengths, strict=True):
            each = jax.nn.log_softmax(model(ids[None, :end]).logits[0]) if end else None
            found.append(0.0 if each is None else sum(each[i - 1, ids[i]] for i in range(first, end)))
    return jnp.stack([jnp.asarray(one) for one in found]).reshape(-1, 2)


def reference_loss(model: Any, known: np.ndarray) -> Any:
    """DPO's loss with noisy labels and the routers' losses, written down for the three pairs that count."""
    rows = {name: array.reshape(8, 9) for name, array in pairs().items()}
    out = model(rows["tokens"], attention_mask=rows["attention_mask"], return_routing=True)
    each = jnp.take_along_axis(jax.nn.log_softmax(out.logits[:, :-1]), rows["tokens"][:, 1:, None], axis=-1)[..., 0]
    ratios = jnp.sum(each * rows["loss_mask"][:, 1:], axis=1).reshape(4, 2)[KEPT] - known[KEPT]
    margins = BETA * (ratios[:, 0] - ratios[:, 1])
    right, wrong = -jax.nn.log_sigmoid(margins), -jax.nn.log_sigmoid(-margins)
    routers = 0.5 * switch_loss(out.routing[0]) + 0.25 * z_loss(out.routing[0])
    return jnp.mean((1 - NOISE) * right + NOISE * wrong) + routers


@functools.cache
def with_known() -> dict[str, np.ndarray]:
    (batch,) = train.with_reference([pairs()], tiny(1))
    return dict(batch)


@functools.cache
def gradients(accumulate: int = 1, **options: Any) -> Any:
    """Losses and gradients of the batch."""
    step = Step(tiny(), optax.sgd(1.0), DPO(beta=BETA, **options), accumulate=accumulate)
    state = step.init()
    grads, losses = jax.jit(step.definition.gradients)(state, jax.tree.map(jnp.asarray, with_known()), state.key)
    return losses, grads


def test_references_are_computed_when_a_batch_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, read = list[int](), list[int]()

    def program(batch: Any) -> Any:
        computed.append(1)
        return jnp.zeros((len(batch["tokens"]), 2))

    def source() -> Iterator[Any]:
        for number in range(2):
            read.append(number)
            yield pairs()

    monkeypatch.setattr("nnxmoe.train.loop.preference.model_program", lambda *_: program)
    batches = iter(train.with_reference(source(), tiny(1)))
    assert not read and not computed
    assert next(batches)["reference_logps"].shape[1] == 2
    assert read == [0] and computed == [1]


@pytest.mark.slow
def test_references_are_those_of_rows_alone() -> None:
    """Also of one that is read again, and with everything of the batch kept."""
    known = alone(tiny(1), pairs())
    assert max_error(with_known()["reference_logps"], known) < 1e-5
    again = train.with_reference([pairs(), pairs(3)], tiny(1))
    for _ in range(2):
        found = list(again)
        assert (found[0]["reference_logps"] == with_known()["reference_logps"]).all() and len(found) == 2
    assert set(found[1]) == {*pairs(), "reference_logps"}


@pytest.mark.slow
def test_loss_gradients_and_metrics() -> None:
    """The routers' losses are those of both rows of all pairs."""
    losses, grads = gradients(label_smoothing=NOISE, balance=0.5, router_z_loss=0.25)
    known = with_known()["reference_logps"]
    graph, params, rest = nnx.split(tiny(), nnx.Param, ...)
    wanted, slopes = jax.jit(jax.value_and_grad(lambda p: reference_loss(nnx.merge(graph, p, rest), known)))(params)
    assert abs(losses.total - wanted) < 1e-5 and losses.tokens == 3 and losses.cross_entropy is None
    slopes = {".".join(map(str, path)): value.get_value() for path, value in nnx.to_flat_state(slopes)}
    assert slopes.keys() == grads.keys()
    for name, slope in slopes.items():
        assert max_error(grads[name], slope) < 1e-5, name
    logps = np.asarray(alone(tiny(), pairs()))[KEPT]
    rewards = BETA * (logps - known[KEPT])
    means = {"rewards/chosen": rewards[:, 0], "rewards/rejected": rewards[:, 1]}
    means |= {"rewards/margins": rewards[:, 0] - rewards[:, 1], "rewards/accuracies": rewards[:, 0] > rewards[:, 1]}
    means |= {"logps/chosen": logps[:, 0], "logps/rejected": logps[:, 1]}
    assert losses.measured.keys() == means.keys() and 0 < losses.measured["rewards/accuracies"] < 1
    for name, values in means.items():
        assert abs(losses.measured[name] - np.mean(values)) < 1e-5 * max(1, abs(np.mean(values))), name
    assert losses.load.sum() == 2 * pairs()["attention_mask"].sum()  # two experts per token


@pytest.mark.slow
@pytest.mark.parametrize("loss", [train.sigmoid_loss, train.ipo_loss])
def test_accumulated_parts_equal_the_batch(loss: PairLoss) -> None:
    """With a part of which a half is padding."""
    (whole, grads), (parts, others) = gradients(loss=loss), gradients(2, loss=loss)
    assert abs(whole.total - parts.total) < 1e-5 and whole.tokens == parts.tokens
    for name, value in whole.measured.items():
        assert abs(value - parts.measured[name]) < 1e-4, name
    assert all(max_error(grads[name], others[name]) < 1e-5 for name in grads)


def ready(strategy: nnxmoe.Strategy = PLAIN, seed: int = 0) -> nnxmoe.CausalLM:
    """A model with adapters that start at zero."""
    model = build_tiny("mixtral", strategy, seed, num_hidden_layers=1)
    lora.add(model, lora.split_ranks(model, 4), rngs=nnx.Rngs(0))
    return model


def fitted(model: nnxmoe.CausalLM, data: Any, objective: Any, **options: Any) -> Any:
    return train.fit(model, data, objective=objective, optimizer=ADAM, **{"steps": 3} | options)


@pytest.mark.slow
def test_the_reference_of_adapters_is_the_model_without_them() -> None:
    """The margin begins at 0 and grows."""
    ours = fitted(ready(), [pairs()], DPO(lora.without))
    first, last = ours.history[0], ours.history[-1]
    assert first["rewards/margins"] == 0 and first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert last["rewards/margins"] > 0.1 and last["rewards/accuracies"] == 1 and last["loss"] < 0.6
    assert {"balance", "busiest_expert"} < set(last) and "cross_entropy" not in last


@pytest.mark.slow
def test_stored_log_probabilities_equal_adapters_left_out() -> None:
    ours = fitted(ready(), [pairs()], DPO(lora.without))
    stored = fitted(ready(), train.with_reference([pairs()], tiny()), DPO())
    for name in ("loss", "rewards/margins", "gradient_norm", "logps/rejected"):
        assert ours.history[-1][name] == pytest.approx(stored.history[-1][name], rel=1e-4), name


def on_meshes(mesh: dict[str, int] | None) -> list[Any]:
    """Metrics of three steps: of adapters, and of all parameters beside a reference."""
    made = None if mesh is None else nnxmoe.make_mesh(**mesh)
    dispatch = nnxmoe.Sorted() if mesh is None else nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RaggedAllToAll())
    strategy = dataclasses.replace(PLAIN, mesh=made, dispatch=dispatch)
    batch = {name: np.concatenate([pairs()[name], pairs(5)[name]]) for name in pairs()}
    data, runs = [batch], []
    adapters = fitted(ready(strategy), data, DPO(lora.without), accumulate=1)
    model, other = (build_tiny("mixtral", strategy, seed, num_hidden_layers=1) for seed in (0, 1))
    whole = train.fit(
        model, train.with_reference(data, other), objective=DPO(balance=0.1), optimizer=optax.sgd(0.1), steps=3
    )
    for run in (adapters, whole):
        runs += [{name: value for name, value in metrics.items() if "second" not in name} for metrics in run.history]
    return runs


@pytest.mark.slow
def test_eight_devices_equal_one(eight: Callable[..., Any]) -> None:
    alone = on_meshes(None)
    for axes in ({"fsdp": 4, "expert": 2}, {"fsdp": 2, "context": 2, "expert": 2}):
        for ours, theirs in zip(alone, eight(on_meshes, axes), strict=True):
            unknown = {"rewards/accuracies"} if ours["step"] == 1 else set()  # rewards are rounding errors of 0
            for name in ours.keys() - unknown:
                assert theirs[name] == pytest.approx(ours[name], rel=1e-5, abs=1e-5), (axes, name)


def test_prediction_layers_are_not_trained() -> None:
    """They have no gradient, as with `Objective()`."""
    model = build(*tiny_mtp(1, num_hidden_layers=1, first_k_dense_replace=0), ORACLE, mtp=True)
    assert not any("mtp" in name for name in Step(model, optax.sgd(0.1), DPO()).names)


@pytest.mark.program
def test_not_all_logits_are_in_memory() -> None:
    """A backward pass in chunks takes less than half of the logits of all tokens."""
    x, targets = jnp.zeros((4, 64, 8)), jnp.zeros((4, 64), jnp.int32)
    kernel, needs = jnp.zeros((8, 4096)), []
    for logits in (1 << 30, 4 * 4 * 4096):
        total = lambda x, k, n=logits: log_probabilities(x, DenseKernel(k, True), targets, None, n).sum()  # noqa: E731
        made = jax.jit(jax.grad(total, argnums=(0, 1))).lower(x, kernel).compile()
        needs.append(made.memory_analysis().temp_size_in_bytes)
    assert needs[1] < 4 * 4 * 64 * 4096 / 2 < needs[0]


# Data

USER, ASSISTANT = "user", "assistant"


def messages(*turns: str) -> list[dict[str, str]]:
    return [{"role": (USER, ASSISTANT)[i % 2], "content": turn} for i, turn in enumerate(turns)]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": ASSISTANT, "content": text}]


def write(path: Path, *objects: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in objects), encoding="utf-8")
    return path


def numbers(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": messages(f"What is {i} + 1?"), "chosen": answer(str(i + 1)), "rejected": answer(f"No, not {i}.")}
        for i in range(count)
    ]


def batches_of(data: Any, **options: Any) -> Any:
    return train.preferences(data, tokenizer(), **{"batch_size": 1, "seq_len": 40, "epochs": 1} | options)


def learned(batch: dict[str, np.ndarray]) -> list[list[tuple[str, str]]]:
    """What comes before the learned tokens, and these, of the pairs of a batch."""
    found = []
    for ids, learnt, real in zip(batch["tokens"], batch["loss_mask"], batch["attention_mask"], strict=True):
        rows = [(i[r == 1], m[r == 1] == 1) for i, m, r in zip(ids, learnt, real, strict=True)]
        found.append([tuple(tokenizer().decode(i[at].tolist()) for at in (~m, m)) for i, m in rows])
    return found


CHAT = ("<|bos|><|user|>Hi!<|end|><|assistant|>", "Yes.<|end|>", "No.<|end|>")
TEXT = ("The sky is", " blue.<|eos|>", " green.<|eos|>")
FORMS: dict[str, tuple[Any, tuple[str, str, str]]] = {
    "messages": ({"prompt": messages("Hi!"), "chosen": answer("Yes."), "rejected": answer("No.")}, CHAT),
    "whole chats": ({"chosen": messages("Hi!", "Yes."), "rejected": messages("Hi!", "No."), "score": 1}, CHAT),
    "whole chats beside a text": (
        {"prompt": "Hi!", "chosen": messages("Hi!", "Yes."), "rejected": messages("Hi!", "No.")},
        CHAT,
    ),
    "whole chats beside their beginning": (
        {"prompt": messages("Hi!"), "chosen": messages("Hi!", "Yes."), "rejected": messages("Hi!", "No.")},
        CHAT,
    ),
    "texts": ({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, TEXT),
    "whole texts": ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, TEXT),
    "question": (
        {"question": "The sky", "chosen": "The sky is blue.", "rejected": "The sky is green.", "query": ""},
        TEXT,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_preferences(form: str, tmp_path: Path) -> None:
    """Only tokens of the completions are learned; files and lists give the same batches."""
    value, (prompt, chosen, rejected) = FORMS[form]
    (batch,) = batches_of([value])
    assert learned(batch) == [[(prompt, chosen), (prompt, rejected)]]
    assert {(array.shape, array.dtype.name) for array in batch.values()} == {((1, 2, 40), "int32")}
    (again,) = batches_of(write(tmp_path / "pairs.jsonl", value))
    assert all((batch[name] == again[name]).all() for name in batch)


def test_rows_are_truncated_and_pairs_without_a_completion_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Rows keep their beginning. A prompt fills the row of 12 tokens; the last batch is filled with padding."""
    long = {"prompt": messages("Hi! " * 20), "chosen": answer("Yes."), "rejected": answer("No.")}
    cut = {"prompt": messages("Hi!"), "chosen": answer("Yes. " * 20), "rejected": answer("No.")}
    (batch,) = batches_of(
        [cut, long, numbers(1)[0] | {"prompt": messages("Hi!")}], batch_size=4, seq_len=12, shuffle=False
    )
    first, second, *empty = learned(batch)
    assert first[0][1].startswith("Yes. Yes.") and "end" not in first[0][1] and first[1][1] == "No.<|end|>"
    assert second[0][1] == "1<|end|>" and empty == [[("", ""), ("", "")]] * 2
    assert "pairs longer than seq_len=12: 2 of 3 are truncated, 1 of 3 are skipped" in caplog.text
    with pytest.raises(DataError, match="no pair has an answer within its first 8 tokens"):
        next(batches_of([long], seq_len=8))
    caplog.clear()
    next(batches_of([cut | {"chosen": cut["rejected"], "rejected": cut["chosen"]}], seq_len=12))
    assert "pairs longer than seq_len=12: 1 of 1 are truncated" in caplog.text


def test_batches_resume_count_and_are_split_over_processes() -> None:
    options = {"batch_size": 4, "epochs": 2, "seed": 3}
    data = batches_of(numbers(7), **options)
    whole = list(batches_of(numbers(7), **options))
    assert data.count() == len(whole) == 4
    next(data)
    other = batches_of(numbers(7), **options)
    other.set_state(json.loads(json.dumps(data.get_state())))
    rest = list(other)
    shares = [list(batches_of(numbers(7), **options, share=(i, 2))) for i in range(2)]
    for name in whole[0]:
        assert all((a[name] == b[name]).all() for a, b in zip(whole[1:], rest, strict=True))
        assert all(
            (w[name] == np.concatenate([a[name], b[name]])).all() for w, a, b in zip(whole, *shares, strict=True)
        )
    rows = np.concatenate([batch["tokens"][:, 0] for batch in whole])
    assert len(np.unique(rows[:7], axis=0)) == 7 and (np.sort(rows[:7], axis=0) == np.sort(rows[7:14], axis=0)).all()
    with pytest.raises(DataError, match="seed was 3, is 4"):
        batches_of(numbers(7), **options | {"seed": 4}).set_state(data.get_state())


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [True, False])
def test_resumed_run_equals_an_uninterrupted_one(adapters: bool, tmp_path: Path) -> None:
    """Bitwise, with pairs read from where the run stopped, and references computed anew."""
    small = {"vocab_size": 512, "num_hidden_layers": 1, "max_position_embeddings": 64}

    def run(**options: Any) -> Any:
        data: Any = train.preferences(numbers(12), tokenizer(), batch_size=2, seq_len=24)
        model = build_tiny("mixtral", PLAIN, **small)
        lora.add(model, 2, rngs=nnx.Rngs(0)) if adapters else None
        data = data if adapters else train.with_reference(data, build_tiny("mixtral", PLAIN, **small))
        return fitted(model, data, DPO(lora.without if adapters else None), **{"steps": 4} | options)

    straight = run()
    run(checkpoint=tmp_path / "c", callbacks=[lambda progress: progress.step == 2])
    resumed = run(checkpoint=tmp_path / "c")
    assert [metrics["step"] for metrics in resumed.history] == [3, 4]
    for ours, theirs in zip(*map(jax.tree.leaves, (straight.state.params, resumed.state.params)), strict=True):
        assert (np.asarray(ours) == np.asarray(theirs)).all()
    assert straight.history[-1]["loss"] == resumed.history[-1]["loss"]


# Refusals


def changed(**arrays: Any) -> dict[str, Any]:
    found = with_known() | arrays
    return {name: array for name, array in found.items() if array is not None}


BATCHES: dict[str, tuple[Any, Any, str]] = {
    "no reference": (DPO(), lambda: pairs(), r"no reference_logps: .*with_reference.*train.DPO\(train.lora.without\)"),
    "two references": (DPO(lora.without), lambda: changed(), "remove one of them"),
    "a reference per token": (
        DPO(),
        lambda: changed(reference_logps=np.zeros((4, 2, 9))),
        r"reference_logps has the shape \[4, 2, 9\]: it must be \[B, 2\], \[4, 2\]",
    ),
    "no mask": (DPO(), lambda: changed(loss_mask=None), "a batch of pairs needs loss_mask"),
    "rows": (
        DPO(),
        lambda: changed(tokens=random_tokens(4, 9)),
        r"tokens has the shape \[4, 9\]: pairs are \[B, 2, T\]",
    ),
    "lengths": (DPO(), lambda: changed(loss_mask=np.ones((4, 2, 8), np.int32)), "loss_mask has the shape"),
    "packed": (
        DPO(),
        lambda: changed(segment_ids=pairs()["tokens"]),
        "unknown field 'segment_ids' in a batch of pairs",
    ),
    "weights": (DPO(), lambda: changed(loss_mask=np.full((4, 2, 9), 0.5)), "loss_mask contains 0.5: use 1, or 0"),
    "floats": (DPO(), lambda: changed(tokens=np.zeros((4, 2, 9))), "tokens has the dtype float64"),
}


@pytest.mark.parametrize("what", BATCHES)
def test_malformed_batches_are_refused(what: str) -> None:
    objective, batch, message = BATCHES[what]
    with pytest.raises(ValueError, match=message):
        objective.check(batch())


OBJECTIVES: dict[str, tuple[Callable[[], Any], str]] = {
    "beta": (lambda: DPO(beta=0.0), "DPO: beta must be a finite positive number .*, got 0.0"),
    "nan": (lambda: DPO(beta=float("nan")), "beta must be .*, got nan"),
    "smoothing": (lambda: DPO(label_smoothing=0.5), "at least 0 and less than 0.5"),
    "a model": (lambda: DPO(tiny()), r"is a model: pass the batches through train.with_reference\(batches, model\)"),
    "no adapters": (lambda: fitted(tiny(), [pairs()], DPO(lora.without)), "the model has no adapters"),
    "ids": (
        lambda: list(train.with_reference([pairs() | {"tokens": pairs()["tokens"] + 50}], tiny())),
        "outside the model's vocabulary",
    ),
    "padding alone": (
        lambda: fitted(ready(), [pairs() | {"loss_mask": np.zeros((4, 2, 9), np.int32)}], DPO(lora.without)),
        "the batch has no token to predict",
    ),
}


@pytest.mark.parametrize("what", OBJECTIVES)
def test_invalid_calls_are_refused(what: str) -> None:
    act, message = OBJECTIVES[what]
    with pytest.raises(ValueError, match=message):
        act()


LINES: dict[str, tuple[Any, str]] = {
    "no pair": ({"prompt": "a", "chosen": "b"}, "record 0: the field 'rejected' is missing: .*'chosen', 'prompt'"),
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
    "mixed": ({"prompt": "a", "chosen": "b", "rejected": answer("c")}, "rejected is .*all strings or all messages"),
    "no prompt": ({"chosen": "a", "rejected": "b"}, "have no common prefix, and there is no prompt"),
    "other names": (
        {"question": "q", "chosen": "a", "rejected": "b"},
        r"no prompt: the record has the fields \['chosen', 'question', 'rejected'\]",
    ),
    "other names and a common prefix": (
        {"question": "q", "chosen": "The a", "rejected": "The b"},
        "there is no prompt: .*; rename 'question' to 'prompt'",
    ),
    "a question in one text": (
        {"question": "Paris", "chosen": "It is Paris.", "rejected": "It is Rome."},
        "there is no prompt: .*; rename 'question' to 'prompt'",
    ),
    "other chats": ({"chosen": messages("a", "b"), "rejected": messages("c", "d")}, "have no common prefix"),
    "text before messages": (
        {"prompt": "a", "chosen": answer("b"), "rejected": answer("c")},
        r"there is no prompt of messages: write it as \[\{",
    ),
    "nothing more": ({"chosen": "The sky", "rejected": "The sky is green."}, "chosen: completion is ''"),
    "no answer": (
        {"prompt": messages("a"), "chosen": messages("b"), "rejected": answer("c")},
        "record 0: chosen: .* no message from the assistant",
    ),
}


@pytest.mark.parametrize("what", LINES)
def test_unusable_preferences_are_refused(what: str) -> None:
    value, message = LINES[what]
    with pytest.raises(DataError, match=message):
        batches_of([value])


@pytest.mark.parametrize("value", [numbers(1)[0], {"chosen": "The sky is blue.", "rejected": "The sky is green."}])
def test_other_training_names_preferences(value: Any) -> None:
    with pytest.raises(DataError, match=r"is a preference .*--preferences.* nnxmoe\.train\.preferences"):
        train.batches([value], tokenizer(), batch_size=1, seq_len=8)
    some = train.batches([value | {"messages": messages("a", "b")}], tokenizer(), batch_size=1, seq_len=12, epochs=1)
    assert len(list(some)) == 1


# The command


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["--lora", "8", "--split-rank", "--learning-rate", "3e-3"], ["--learning-rate", "1e-4"]]
)
def test_finetune_learns_preferences(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Held-out pairs are measured with the same reference; the command extends a finished run."""
    held = write(tmp_path / "held.jsonl", *numbers(5))
    data, out = write(tmp_path / "pairs.jsonl", *numbers(24)), tmp_path / "out"
    line = ["finetune", "demo", str(data), "--out", str(out), "--preferences", "--seq-len", "32", *more]
    line += ["--eval", str(held), "--batch-size", "4", "--accumulate", "2", "--steps"]
    assert cli.main([*line, "8"]) == 0
    assert "steps 1 to 8: loss 0.6931 ->" in capsys.readouterr().out
    assert cli.main([*line, "10"]) == 0
    assert "steps 9 to 10: loss" in capsys.readouterr().out
    told = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    assert told[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert told[-1]["rewards/accuracies"] == 1 and told[-1]["eval_loss"] < 0.6 > told[-1]["loss"]
    nnxmoe.from_pretrained(out)


def test_wrong_commands_of_preferences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = write(tmp_path / "chats.jsonl", {"messages": messages("a", "b")})
    pair = write(tmp_path / "pairs.jsonl", *numbers(1))
    tried = [
        ([str(pair)], "pairs.jsonl .* line 1: .* is a preference .*--preferences"),
        ([str(chats), "--preferences"], "chats.jsonl .* line 1: the field 'chosen' is missing"),
        ([str(pair), "--beta", "0.2"], "--beta 0.2 requires preferences: pass --preferences, or omit it"),
        ([str(pair), "--preferences", "--beta", "0"], "--beta 0.0: it must be a number"),
        ([str(pair), "--split-rank"], "--split-rank requires adapters"),
        ([str(pair), "--preferences", "--lora", "3", "--split-rank"], "rank 3 cannot be split over the 2 experts"),
    ]
    for line, message in tried:
        assert cli.main(["finetune", "demo", *line, "--out", str(tmp_path / "out")]) == 1
        assert (last := capsys.readouterr().err.splitlines()[-1]) and re.search(message, last), last
        assert not (tmp_path / "out").exists()
