"""``fit``: its result, bitwise resumption from a checkpoint, and errors."""

import dataclasses
import functools
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import nnxmoe
from nnxmoe import train
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.runtime import programs
from nnxmoe.runtime.interrupts import Interrupted
from nnxmoe.runtime.static_key import static_key
from nnxmoe.train import lora
from nnxmoe.train.checkpoints import Checkpoints
from nnxmoe.train.loop.fit import fit
from nnxmoe.train.loop.interface import NotFinite
from nnxmoe.train.loop.loss import ChunkedLoss
from nnxmoe.train.loop.measured import Evaluation
from nnxmoe.train.loop.memory_limit import BatchLimit, refuse_state
from nnxmoe.train.loop.objective import Objective
from nnxmoe.train.loop.step import Step
from tests.support.tiny import build_tiny, random_tokens

ROOT = Path(__file__).resolve().parents[2]
PLAIN = nnxmoe.Strategy(stacking=nnxmoe.Scanned())


class Draws:
    """Resumable batches, each drawn from a seed that is its number."""

    def __init__(self, rows: int = 4, length: int = 9) -> None:
        self.rows, self.length, self.at = rows, length, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.at += 1
        return {"tokens": random_tokens(self.rows, self.length, seed=self.at)}

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def settings(save_every: int = 2, evaluate_every: int | None = None, **changes: Any) -> dict[str, Any]:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 0.0, 20)))
    if "checkpoint" in changes:
        changes["checkpoint"] = Checkpoints(changes["checkpoint"], every=save_every)
    if "evaluate" in changes:
        changes["evaluate"] = Evaluation(changes["evaluate"], evaluate_every)
    return {"optimizer": optimizer, "steps": 6, "bias_rate": 0.01} | changes


def state_of(fitted: Any) -> dict[str, np.ndarray]:
    """Every array of the state by name, PRNG keys as their key data."""
    leaves = jax.tree_util.tree_leaves_with_path(fitted.state)
    plain = lambda a: jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a  # noqa: E731
    return {jax.tree_util.keystr(path): np.asarray(plain(leaf)) for path, leaf in leaves}


def same_bits(one: Any, other: Any) -> None:
    first, second = state_of(one), state_of(other)
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


@pytest.mark.slow
def test_fit_lowers_the_loss_and_keeps_the_given_model(capsys: pytest.CaptureFixture[str]) -> None:
    model, told = build_tiny("mixtral", PLAIN), []
    before = jax.tree.map(np.asarray, nnx.state(model))
    batch = {"tokens": random_tokens(2, 8)}
    done = fit(model, [batch], **settings(steps=30, evaluate=[batch], evaluate_every=10), callbacks=[told.append])
    losses = [metrics["loss"] for metrics in done.history]
    assert losses[-1] < 0.5 * losses[0] and [metrics["step"] for metrics in done.history] == list(range(1, 31))
    evaluations = {m["step"]: m["eval_loss"] for m in done.history if "eval_loss" in m}
    assert list(evaluations) == [10, 20, 30] and evaluations[30] < evaluations[10]
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, nnx.state(model)))
    assert len(told) == 30 and told[-1].load.shape == (2, 6)
    np.testing.assert_allclose(told[-1].load.sum(axis=-1), 1)
    targets = jax.nn.log_softmax(done.model(batch["tokens"]).logits[:, :-1])
    chosen = -np.take_along_axis(np.asarray(targets), batch["tokens"][:, 1:, None], -1).mean()
    assert chosen == pytest.approx(evaluations[30], rel=1e-5)
    assert "training" not in capsys.readouterr().err  # the tests set TQDM_DISABLE


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("resumes", [True, False])
def test_resumed_run_equals_an_uninterrupted_one(adapters: bool, resumes: bool, tmp_path: Path) -> None:
    """Compares parameters, moments, step, key and bias after 10 + 10 steps with those after 20."""

    def model() -> nnxmoe.CausalLM:
        made = build_tiny("deepseek_v3", PLAIN)
        if adapters:
            lora.add(made, 2, rngs=nnx.Rngs(3))
        return made

    def data() -> Any:
        return Draws() if resumes else [{"tokens": random_tokens(4, 9, seed=i)} for i in range(7)]

    straight = fit(model(), data(), **settings(steps=20))
    fit(model(), data(), **settings(steps=20, checkpoint=tmp_path / "c"), callbacks=[lambda told: told.step == 10])
    whole = fit(model(), data(), **settings(steps=20, checkpoint=tmp_path / "c"))
    assert [metrics["step"] for metrics in whole.history] == list(range(11, 21))
    same_bits(straight, whole)
    if adapters:
        assert all("lora" in name for name in whole.state.params)
    kept = (tmp_path / "c" / "step_20").stat()
    again = fit(model(), data(), **settings(steps=20, checkpoint=tmp_path / "c"))
    assert again.history == whole.history[-1:] and (tmp_path / "c" / "step_20").stat().st_mtime_ns == kept.st_mtime_ns
    same_bits(straight, again)


@pytest.mark.grain
def test_grain_iterator_resumes(tmp_path: Path) -> None:
    import grain

    rows = [{"tokens": row} for row in random_tokens(12, 9, seed=5)]

    def data() -> Any:
        return grain.MapDataset.source(rows).shuffle(seed=1).repeat(2).batch(4).to_iter_dataset()

    straight = fit(build_tiny("llama", PLAIN), data(), **settings(steps=6))
    stop, run = [lambda told: told.step == 3], settings(steps=6, checkpoint=tmp_path / "c")
    fit(build_tiny("llama", PLAIN), data(), **run, callbacks=stop)
    done = fit(build_tiny("llama", PLAIN), data(), **run)
    assert [metrics["step"] for metrics in done.history] == [4, 5, 6]
    same_bits(straight, done)


@pytest.mark.slow
def test_resume_on_another_mesh(eight: Callable[..., Any], tmp_path: Path) -> None:
    eight(on_another_mesh, str(tmp_path))


def on_another_mesh(folder: str) -> None:
    straight = fit(build_tiny("mixtral", PLAIN), Draws(8), **settings())
    one, other = nnxmoe.make_mesh(fsdp=4, expert=2), nnxmoe.make_mesh(data=2, expert=2, devices=jax.devices()[:4])
    stop = [lambda told: told.step == 3]
    fit(build_tiny("mixtral", PLAIN), Draws(8), **settings(mesh=one, checkpoint=folder + "/c"), callbacks=stop)
    there = build_tiny("mixtral", dataclasses.replace(PLAIN, mesh=one))  # a model that lies on other devices
    done = fit(there, Draws(8), **settings(mesh=other, checkpoint=folder + "/c"))
    assert done.history[0]["step"] == 4
    for name, array in state_of(straight).items():
        apart = np.abs(array.astype(np.float64) - state_of(done)[name])
        assert np.mean(apart < 1e-4) >= 0.99, name  # Adam divides near-zero gradients by their own magnitude
    assert {len(a.sharding.device_set) for a in done.state.params.values()} == {4}


def test_restored_states_hold_the_arrays_of_the_checkpoint() -> None:
    """Resuming needs no more memory than starting, because no array of the checkpoint is copied."""
    step = Step(build_tiny("llama", PLAIN), optax.adam(0.1))
    state = step.init()
    arrays = step.saved(state)
    restored = step.restored(arrays)
    assert all(restored.params[name] is array for name, array in arrays["params"].items())
    kept = {id(leaf) for leaf in jax.tree.leaves(arrays["moments"])}
    assert kept and {id(leaf) for leaf in jax.tree.leaves(restored.moments)} == kept
    assert restored.step is arrays["step"] and restored.key is arrays["key"]


@pytest.mark.slow
def test_kills_lose_at_most_one_save_interval(tmp_path: Path, count: int = 6) -> None:
    """Runs the same command repeatedly, with SIGKILL at a random moment; each run resumes."""
    rng, steps, last = np.random.default_rng(0), 5 * count, 0
    command = [sys.executable, "-c", RUN, str(tmp_path), str(steps)]
    for _ in range(count):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as run:
            assert run.stdout is not None
            first = int(run.stdout.readline())
            assert first >= last - 1, "never more than the interval is lost"
            for _ in range(int(rng.integers(1, 5))):
                line = run.stdout.readline()
                last = int(line) if line else last
            time.sleep(rng.uniform(0, 0.05))
            os.kill(run.pid, signal.SIGKILL)
            for line in run.stdout:
                last = int(line)
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    done = fit(build_tiny("llama", PLAIN), Draws(), **settings(steps=steps, checkpoint=tmp_path / "c", save_every=1))
    assert [metrics["step"] for metrics in done.history] == [steps]
    same_bits(fit(build_tiny("llama", PLAIN), Draws(), **settings(steps=steps)), done)


RUN = """
import sys
from nnxmoe.train.checkpoints import Checkpoints
from nnxmoe.train.loop.fit import fit
from tests.support.tiny import build_tiny
from tests.train.test_fit import PLAIN, Draws, settings
folder, steps = sys.argv[1] + "/c", int(sys.argv[2])
print(Checkpoints(folder).latest() or 0, flush=True)
tell = lambda told: print(told.step, flush=True)
fit(build_tiny("llama", PLAIN), Draws(), **settings(steps=steps, checkpoint=folder, save_every=1), callbacks=[tell])
"""


CAPTURED = """
import jax.numpy as jnp, numpy as np, optax
from nnxmoe.train import fit
from tests.support.tiny import build_tiny

def loss(factor):
    weights = jnp.array(np.full((2, 6, 53), factor, np.float32))
    objective = lambda model, batch: jnp.mean(model(batch["tokens"]).logits * weights)
    batch = {"tokens": np.arange(12).reshape(2, 6)}
    return fit(build_tiny("llama"), [batch], objective=objective, steps=1, optimizer=optax.sgd(0.1)).history[0]["loss"]

print(loss(100.0) / loss(1.0))
"""


@pytest.mark.commands
def test_objectives_may_capture_arrays() -> None:
    """A cell that is run again with other arrays trains by these, also where JAX makes arguments of captured arrays, so
    that the text of both programs is the same."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CAPTURED], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == pytest.approx(100, rel=1e-4)


# Errors


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_objective_may_be_a_function(accumulate: int) -> None:
    """Batches with fields of their own; with accumulation its mean over the parts; evaluated as it is trained."""
    model = build_tiny("llama", PLAIN)
    batch = {"liked": random_tokens(4, 6), "disliked": random_tokens(4, 6, seed=9), "weight": np.arange(4.0)}

    def difference(model: nnxmoe.CausalLM, batch: Any) -> Any:
        good, bad = (
            jax.nn.log_softmax(model(batch[name]).logits)[..., 0].mean(axis=1) for name in ("liked", "disliked")
        )
        return jnp.mean(batch["weight"] * (bad - good))

    options = settings(bias_rate=0.0, steps=5, accumulate=accumulate, evaluate=[batch], optimizer=optax.sgd(0.1))
    done = fit(model, [batch], objective=difference, **options)
    assert done.history[0]["loss"] == pytest.approx(float(difference(model, batch)), rel=1e-5)
    assert done.history[-1]["eval_loss"] == pytest.approx(float(difference(done.model, batch)), rel=1e-4)
    assert done.history[-1]["loss"] < done.history[0]["loss"] and "cross_entropy" not in done.history[0]
    assert done.history[0]["gradient_norm"] == pytest.approx(
        fit(model, [batch], objective=difference, **options | {"accumulate": 1}).history[0]["gradient_norm"], rel=1e-4
    )


@pytest.mark.slow
def test_distillation_as_the_guide_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code, on packed rows: the loss is the divergence from the teacher over the whole vocabulary, and falls."""
    text = (ROOT / "nnxmoe" / "train" / "README.md").read_text()
    code = textwrap.dedent(text[text.index("  def of_teacher") :].split("  ```")[0]).replace("count=64", "count=53")
    student, teacher = build_tiny("llama", PLAIN), build_tiny("llama", PLAIN, seed=1)
    batch = {
        "tokens": random_tokens(2, 6),
        "positions": np.array([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 0]], np.int32),
        "segment_ids": np.array([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0]], np.int32),
    }
    theirs, ours = (
        np.asarray(jax.nn.log_softmax(model(**batch).logits), np.float64)[batch["segment_ids"] > 0]
        for model in (teacher, student)
    )
    wanted = np.mean(np.sum(np.exp(theirs) * (theirs - ours), axis=-1))
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "train": nnxmoe.train}
    exec(code, names | {"student": student, "teacher": teacher, "data": [batch] * 200}, found := dict(names))
    history = found["fitted"].history
    assert history[0]["loss"] == pytest.approx(wanted, rel=1e-4) and history[-1]["loss"] < 0.05 * wanted


@pytest.mark.wrong_types
def test_unusable_objectives_and_optimizers() -> None:
    model, batch = build_tiny("llama", PLAIN), {"tokens": random_tokens(2, 5)}
    wrong: list[tuple[dict[str, Any], Any, str]] = [
        ({"objective": 3}, batch, "objective=3: pass train.Objective"),
        (
            {"objective": lambda model, batch: model(batch["tokens"]).logits},
            batch,
            r"float32 \[2, 5, 53\] as the loss: return a sc",
        ),
        ({"objective": lambda model, batch: 1.0}, {"a": np.ones(3), "b": np.ones(2)}, "different numbers of rows"),
        ({"objective": lambda model, batch: 1.0}, [1], "a batch must be a dict of arrays, got list"),
        ({"objective": lambda model, batch: 1.0, "bias_rate": 0.1}, batch, "but a function objective does not report"),
        ({"optimizer": "adam"}, batch, "optimizer='adam': pass an optax"),
        ({"trainable": 5}, batch, "trainable=5: pass an NNX filter"),
        ({"evaluate": lambda: [batch]}, batch, "evaluate=<function.*: pass a list of batches"),
        ({"callbacks": 3}, batch, "callbacks=3: pass a list of functions"),
        ({"callbacks": [3]}, batch, r"callbacks=\[3\]: pass a list of functions"),
        ({"checkpoint": 3}, batch, "folder is 3: pass a path"),
    ]
    told = list[Any]()
    fit(model, [batch], **settings(steps=1, bias_rate=0.0, callbacks=(call for call in [told.append])))
    assert len(told) == 1, "a generator of callbacks is not exhausted by the check"
    for other in (None, 5, jnp.float32(1)):
        with pytest.raises(ValueError, match=r"data=.*: pass an iterable of batches"):
            fit(model, other, **settings())
    for options, data, message in wrong:
        with pytest.raises(ValueError, match=message):
            fit(model, [data], **settings(**{"bias_rate": 0.0} | options))


@pytest.mark.slow
def test_an_objective_may_return_metrics() -> None:
    """With accumulation, returns their means. The objective decides what the fields of a batch mean."""
    batch = {"tokens": random_tokens(4, 6), "weight": np.arange(4.0), "targets": np.full((4, 6), -100)}

    def weighted(model: nnxmoe.CausalLM, batch: Any) -> Any:
        each = model(batch["tokens"]).logits[..., 0].mean(axis=1)
        return jnp.mean(each * batch["weight"]), {"first": jnp.mean(each), "rows": 4}

    options = settings(bias_rate=0.0, steps=1, optimizer=optax.sgd(0.1))
    model, told = build_tiny("llama", PLAIN), []
    done = fit(model, [batch], objective=weighted, accumulate=2, **options, callbacks=[told.append])
    loss, more = weighted(model, batch)
    assert done.history[0]["loss"] == pytest.approx(float(loss), rel=1e-4)
    assert done.history[0]["first"] == pytest.approx(float(more["first"]), rel=1e-4)
    assert told[0].metrics["rows"] == 4
    for more, message in (
        ({"loss": 1.0}, "the objective's metric 'loss' has the name of a built-in metric"),
        ({"all": np.ones(3)}, r"returned float32 \[3\] as all: return a scalar"),
        ({"text": "x"}, "returned a str as text: return a scalar"),
        ([1.0], "returned list in addition to the loss: return a dict"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(model, [batch], objective=lambda model, batch, more=more: (jnp.float32(1.0), more), **options)


@pytest.mark.slow
def test_preference_loss_with_the_base_model_as_reference() -> None:
    """DPO before its first step: the model equals the reference, so the loss is log 2; then the margin grows."""
    model = build_tiny("llama", PLAIN)
    lora.add(model, 2, rngs=nnx.Rngs(0))
    batch = {"liked": random_tokens(4, 6), "disliked": random_tokens(4, 6, seed=9)}

    def dpo(model: nnxmoe.CausalLM, batch: Any) -> Any:
        def score(model: nnxmoe.CausalLM, tokens: Any) -> Any:
            each = jax.nn.log_softmax(model(tokens[:, :-1]).logits)
            return jnp.take_along_axis(each, tokens[:, 1:, None], axis=-1).sum(axis=(1, 2))

        reference = lora.without(model)
        gains = [score(model, batch[name]) - score(reference, batch[name]) for name in ("liked", "disliked")]
        return -jnp.mean(jax.nn.log_sigmoid(0.5 * (gains[0] - gains[1])))

    before = model(batch["liked"]).logits
    done = fit(model, [batch], objective=dpo, **settings(bias_rate=0.0, optimizer=optax.adam(1e-2), steps=8))
    losses = [metrics["loss"] for metrics in done.history]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6) and losses[-1] < 0.5 * losses[0]
    np.testing.assert_array_equal(lora.without(done.model)(batch["liked"]).logits, before)


@pytest.mark.slow
def test_non_finite_gradients_raise_with_the_parameter_name(tmp_path: Path) -> None:
    model = build_tiny("llama", PLAIN)

    def head(x: Any, kernel: Any, targets: Any, weights: Any, z: float, mesh: Any) -> Any:
        total, entropy = ChunkedLoss()(x, kernel, targets, weights, z, mesh)
        return total * jnp.where(jnp.any(targets == 7), jnp.inf, 1.0), entropy

    good, bad = {"tokens": np.ones((2, 5), np.int32)}, {"tokens": np.full((2, 5), 7, np.int32)}
    with pytest.raises(NotFinite, match=r"step 3: the gradients of .*embed.table.* The last checkpoint is from step 2"):
        fit(model, [good, good, bad], **settings(checkpoint=tmp_path / "c", objective=Objective(head=head)))


@pytest.mark.slow
def test_non_finite_parameters_are_not_saved(tmp_path: Path) -> None:
    """The gradients are finite, but no run could continue from such a checkpoint."""
    with pytest.raises(
        NotFinite, match=r"step 4: the new values of .*embed.table.* The last checkpoint is from step 2"
    ):
        spoilt = optax.sgd(lambda step: jnp.where(step == 3, jnp.nan, 0.1))
        batch = {"tokens": np.ones((2, 5), np.int32)}
        fit(build_tiny("llama", PLAIN), [batch], **settings(checkpoint=tmp_path / "c", optimizer=spoilt))
    assert Checkpoints(tmp_path / "c").latest() == 2


@pytest.mark.slow
def test_exhausted_data_and_invalid_settings(tmp_path: Path) -> None:
    model, batch = build_tiny("llama", PLAIN), {"tokens": random_tokens(2, 5)}
    with pytest.raises(ValueError, match="the data ended after 3 batches: pass more data, or fewer steps"):
        fit(model, iter([batch] * 3), **settings())
    with pytest.raises(ValueError, match="the data ended after 0 batches"):
        fit(model, [], **settings())
    with pytest.raises(ValueError, match="steps must be a 32-bit integer >= 1, got 0"):
        fit(model, [batch], **settings(steps=0))
    for wrong, message in (
        ({"evaluate": [batch], "evaluate_every": 0}, "every=0.: pass a positive integer"),
        ({"evaluate": iter([batch])}, "evaluate is an iterator"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(model, [batch], **settings(**wrong))
    with pytest.raises(ValueError, match="no token to predict"):
        silent = {"tokens": random_tokens(2, 5), "loss_mask": np.zeros((2, 5), np.int32)}
        fit(model, [batch], **settings(steps=1, evaluate=[silent]))
    merged = build_tiny("llama", PLAIN)
    lora.add(merged, 2, rngs=nnx.Rngs(3))
    lora.merge(merged)
    with pytest.raises(ValueError, match="has merged adapters"):
        fit(merged, [batch], **settings())
    fit(model, [batch], **settings(steps=2, checkpoint=tmp_path / "c"))
    with pytest.raises(ValueError, match="is at step 2, beyond the total of steps=1"):
        fit(model, [batch], **settings(steps=1, checkpoint=tmp_path / "c"))
    with pytest.raises(CheckpointError, match="does not match the requested arrays"):
        fit(model, [batch], **settings(steps=4, checkpoint=tmp_path / "c", optimizer=optax.sgd(0.1)))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": np.full((2, 5), 53)}, "tokens contains the id 53, outside the model's vocabulary 0 to 52"),
        ({"tokens": np.ones((2, 5), int), "targets": np.full((2, 5), -100)}, "targets contains the id -100"),
        (
            {"tokens": np.ones((2, 5), int), "segment_ids": np.zeros((2, 5), int)},
            "step 1: the batch has no token to predict. Tokens with segment id 0",
        ),
        ({"tokens": np.ones((2, 1), int)}, "step 1: the batch has no token to predict"),
        ({"tokens": np.ones((2, 5))}, "tokens has the dtype float64: use an integer"),
        ({"tokens": np.ones((2, 5), int), "segment_ids": np.ones((2, 5))}, "segment_ids has the dtype float64"),
        (
            {"tokens": np.ones((2, 5), int), "loss_mask": np.full((2, 5), 0.5)},
            "loss_mask contains 0.5: use 1, or 0 to exclude",
        ),
        (
            {"tokens": np.ones((1, 5), int), "attention_mask": [[1, 1, 2, 2, 0]]},
            "attention_mask contains 2: .* segment_ids",
        ),
        (
            {"tokens": np.ones((0, 5), int)},
            r"tokens has the shape \[0, 5\]: it must be \[B, T\], with at least one row",
        ),
        ({"tokens": [[1, 2], [3]]}, "tokens in a batch is not an array: its rows have different lengths: pad them"),
        ({"tokens": [[None]]}, r"tokens in a batch is \[\[None\]\]: pass an array of numbers"),
        ({"input_ids": np.ones((2, 5), int)}, "unknown field 'input_ids' .* Rename input_ids to tokens"),
        pytest.param("tokens", "a batch must be a dict of arrays, got str", marks=pytest.mark.wrong_types),
    ],
)
def test_invalid_batches(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(build_tiny("llama", PLAIN), [batch], **settings())


@pytest.mark.wrong_types
def test_non_integer_steps_and_accumulate() -> None:
    for name in ("steps", "accumulate"):
        with pytest.raises(ValueError, match=rf"{name} must be a 32-bit integer >= 1, got 2\.5"):
            fit(build_tiny("llama", PLAIN), [], **settings(**{name: 2.5}))


class Told:
    """A callback, by default one that looks at metrics only; notes its calls beside those of the steps."""

    def __init__(self, events: list[str], late: bool = True, answer: Callable[[Any], Any] = lambda progress: None):
        self.events, self.late, self.answer = events, late, answer

    def __call__(self, progress: Any) -> Any:
        self.events.append(f"told {progress.step}")
        return self.answer(progress)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in `fit`, in order."""
    found, run = list[str](), Step.run

    def noted(step: Step, *given: Any) -> Any:
        found.append(f"step {1 + sum(event.startswith('step') for event in found)}")
        return run(step, *given)

    monkeypatch.setattr(Step, "run", noted)
    return found


@pytest.mark.program
def test_reports_are_read_while_the_next_step_is_computed(events: list[str], tmp_path: Path) -> None:
    """But not where a checkpoint is due, at the first step or at the last; with an ordinary callback, never."""
    model = build_tiny("mixtral", PLAIN)
    done = fit(model, Draws(), **settings(checkpoint=tmp_path / "c", save_every=4), callbacks=[Told(events)])
    order = "step 1, told 1, step 2, step 3, told 2, step 4, told 3, told 4, step 5, step 6, told 5, told 6"
    assert ", ".join(events) == order and [metrics["step"] for metrics in done.history] == [1, 2, 3, 4, 5, 6]
    assert all(metrics["seconds"] > 0 and metrics["busiest_expert"] >= 1 for metrics in done.history)
    events.clear()
    waited = fit(model, Draws(), **settings(), callbacks=[Told(events), Told(events, late=False)])
    assert ", ".join(events[:6]) == "step 1, told 1, told 1, step 2, told 2, told 2"
    same_bits(done, waited)
    for metrics, others in zip(done.history, waited.history, strict=True):
        names = {name for name in metrics if "second" not in name}  # times differ
        assert {k: metrics[k] for k in names} == {k: others[k] for k in names}


@pytest.mark.slow
def test_late_callbacks_see_no_model_and_cannot_stop(events: list[str]) -> None:
    model = build_tiny("mixtral", PLAIN)
    with pytest.raises(ValueError, match="a late callback is called after the next step has started"):
        fit(model, Draws(), **settings(), callbacks=[Told(events, answer=lambda progress: progress.model())])
    with pytest.raises(
        ValueError, match="a late callback cannot stop the training at step 3: remove its `late` attribute"
    ):
        fit(model, Draws(), **settings(), callbacks=[Told(events, answer=lambda progress: progress.step == 3)])


@pytest.mark.slow
def test_no_report_is_lost_where_the_data_are_refused(events: list[str]) -> None:
    batches = [next(Draws())] * 3 + [{"tokens": np.full((4, 9), 99, np.int32)}]
    with pytest.raises(ValueError, match="99"):
        fit(build_tiny("mixtral", PLAIN), batches, **settings(), callbacks=[Told(events)])
    assert events[-1] == "told 3"


class BytesState(Draws):
    """Its state is bytes, as that of grain's DataLoader, or a value that JSON cannot hold."""

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.state = state

    def get_state(self) -> Any:
        return bytes([self.at]) if self.state is None else self.state

    def set_state(self, state: Any) -> None:
        assert isinstance(state, bytes)
        (self.at,) = state


def test_resuming_with_a_state_in_bytes(tmp_path: Path) -> None:
    run = settings(steps=2, checkpoint=tmp_path / "c", save_every=1)
    fit(build_tiny("llama", PLAIN), BytesState(), **run)
    data = BytesState()
    fit(build_tiny("llama", PLAIN), data, **run | {"steps": 3})
    assert data.at == 3
    for state in ({1, 2}, (1, 2), {"at": np.int64(3)}):
        with pytest.raises(CheckpointError, match=r"the state of the data's iterator .*(stored as|preserved by) JSON"):
            fit(build_tiny("llama", PLAIN), BytesState(state), **settings(steps=1, checkpoint=tmp_path / "d"))


def on_another_base(folder: str, mesh: bool) -> None:
    """A run of adapters resumes on equal frozen arrays, also on a mesh, and on no others."""

    def model(change: bool) -> Any:
        made = build_tiny("mixtral", PLAIN)
        table = made.embed.table.get_value()
        made.embed.table.set_value(table[::-1] if change else table)  # the same values in another order
        lora.add(made, 2, rngs=nnx.Rngs(3))
        return made

    run = settings(checkpoint=folder, save_every=1, bias_rate=0.0)
    fit(model(False), Draws(8), **run | {"steps": 1})
    run["mesh"] = nnxmoe.make_mesh(fsdp=4, expert=2) if mesh else None
    assert fit(model(False), Draws(8), **run | {"steps": 2}).history[0]["step"] == 2
    with pytest.raises(CheckpointError, match="contains a run with a different base model: the frozen parameters"):
        fit(model(True), Draws(8), **run | {"steps": 3})


@pytest.mark.slow
def test_resuming_on_another_base_model(tmp_path: Path) -> None:
    on_another_base(str(tmp_path / "c"), False)


@pytest.mark.slow
def test_resuming_on_another_base_model_and_mesh(eight: Callable[..., Any], tmp_path: Path) -> None:
    eight(on_another_base, str(tmp_path / "c"), True)


@pytest.mark.slow
def test_batches_of_lists_and_objects_with_an_array() -> None:
    """As the model takes them: lists, and what NumPy can read (torch tensors)."""

    class Tensor:
        def __init__(self, values: Any) -> None:
            self.values = values

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return np.asarray(self.values, dtype)

    ids = random_tokens(2, 5)
    given = [{"tokens": ids, "loss_mask": ids > 3}]
    others = [{"tokens": Tensor(ids), "loss_mask": (ids > 3).tolist()}]
    model, run = build_tiny("llama", PLAIN), settings(steps=1)
    same_bits(fit(model, given, **run, evaluate=given), fit(model, others, **run, evaluate=others))


@pytest.mark.slow
def test_training_in_64_bits() -> None:
    """With JAX_ENABLE_X64, parameters, moments and losses are those of 32 bits."""
    batch, results = {"tokens": random_tokens(4, 6).astype(np.int64)}, []
    for wide in (False, True):
        with jax.enable_x64(wide):
            model = build_tiny("llama", PLAIN)
            lora.add(model, 2, targets="attention.q", rngs=nnx.Rngs(0))
            done = fit(model, [batch], **settings(steps=2, accumulate=2, bias_rate=0.0, evaluate=[batch]))
            results.append([done.history[-1][name] for name in ("loss", "gradient_norm", "eval_loss")])
            assert {value.dtype.itemsize for value in jax.tree.leaves(done.state.params)} == {4}
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("held", "message"), [([], "evaluate: there are no batches"), ([{"tokens": np.full((2, 5), 53)}], "the id 53")]
)
def test_unusable_evaluation_is_refused_before_the_first_step(held: list[Any], message: str) -> None:
    def called(progress: Any) -> None:
        raise AssertionError("a step was made")

    with pytest.raises(ValueError, match=message):
        fit(
            build_tiny("llama", PLAIN), [{"tokens": random_tokens(2, 5)}], **settings(evaluate=held), callbacks=[called]
        )


@pytest.mark.slow
def test_callback_that_stops_leaves_a_final_evaluation() -> None:
    batch, stop = {"tokens": random_tokens(2, 5)}, [lambda progress: progress.step == 2]
    done = fit(build_tiny("llama", PLAIN), [batch], **settings(evaluate=[batch]), callbacks=stop)
    assert [sorted(metrics.keys() & {"eval_loss"}) for metrics in done.history] == [[], ["eval_loss"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "stops"),
    [
        (lambda: True, True),
        (lambda: np.True_, True),
        (lambda: np.array(True), True),
        (lambda: np.array([True]), True),
        (lambda: jnp.array(True), True),
        (lambda: jnp.ones((1, 1)) > 0, True),
        (lambda: jnp.float32(0.05) < 0.1, True),
        (lambda: jnp.array(False), False),
        (lambda: np.array([False]), False),
        (lambda: 7, False),  # what `file.write` returns
        (lambda: "text", False),
        (lambda: {"loss": 1.0}, False),
        (lambda: np.float32(1.0), False),
    ],
)
def test_callbacks_stop_with_any_boolean(answer: Callable[[], Any], stops: bool) -> None:
    told: list[int] = []
    callbacks = [lambda progress: told.append(progress.step), lambda progress: answer()]
    fit(build_tiny("llama", PLAIN), [{"tokens": random_tokens(2, 5)}], **settings(steps=2), callbacks=callbacks)
    assert told == ([1] if stops else [1, 2])


def test_callback_with_several_booleans_is_refused() -> None:
    run = settings(callbacks=[lambda progress: jnp.ones(3) > 0])
    with pytest.raises(ValueError, match=r"a callback returned booleans of the shape \[3\]: return one"):
        fit(build_tiny("llama", PLAIN), [{"tokens": random_tokens(2, 5)}], **run)


# Finished runs


@pytest.mark.slow
def test_a_finished_run_can_be_evaluated(tmp_path: Path) -> None:
    """Its history is that of its last step, so that a cell that is run again finds its metrics."""
    model, batch, others = build_tiny("llama", PLAIN), {"tokens": random_tokens(2, 5)}, {"tokens": random_tokens(2, 7)}
    run, told = settings(steps=3, checkpoint=tmp_path / "c"), list[Any]()
    done = fit(model, [batch], **run, evaluate=[others])
    (again,) = fit(model, [batch], **run, callbacks=[told.append]).history
    assert again == done.history[-1] and not told
    (measured,) = fit(model, [batch], **run, evaluate=[batch]).history
    assert measured["step"] == 3 and measured["loss"] == done.history[-1]["loss"]
    alone = fit(model, [batch], **settings(steps=3), evaluate=[batch]).history[-1]
    assert measured["eval_loss"] == alone["eval_loss"] != done.history[-1]["eval_loss"]
    assert measured["eval_seconds"] > 0


@pytest.mark.slow
def test_interrupted_fit_without_a_checkpoint_says_that_nothing_was_saved() -> None:
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        pytest.skip("SIGINT is ignored here, as in background jobs")
    batch, options = {"tokens": random_tokens(2, 5)}, {"optimizer": optax.sgd(0.1), "steps": 4}
    press = lambda progress: signal.raise_signal(signal.SIGINT) if progress.step == 1 else None  # noqa: E731
    with pytest.raises(Interrupted, match=r"interrupted at step [12] of 4; nothing was saved: .* pass a checkpoint"):
        fit(build_tiny("llama", PLAIN), [batch], callbacks=[press], **options)


def test_default_checkpoints_are_those_of_a_folder(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=5)
    assert (kept.keep, kept.every) == (5, 100) and not kept.due(1) and kept.due(100)


# Memory


@pytest.mark.slow
@pytest.mark.wrong_types
@pytest.mark.parametrize("known", [True, False])
def test_batches_that_cannot_fit_are_refused_before_compiling(
    known: bool, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they are read, if they tell their size. A batch that fits is not refused, nor one in many parts."""
    model, run = build_tiny("llama", PLAIN), {"optimizer": optax.sgd(0.1), "steps": 1}
    monkeypatch.setenv("NNXMOE_MEMORY", "1MB")
    data: Any = [{"tokens": random_tokens(4096, 8)}]
    if known:
        data = SimpleNamespace(batch_size=4096, seq_len=8, __iter__=None)
    with pytest.raises(ValueError, match=r"a batch of 4096 rows, \[4096, 8\], takes at least .*batch_size"):
        fit(model, data, **run)
    assert "jit(step)" not in compiled
    limit = BatchLimit.of(Step(model, optax.sgd(0.1), accumulate=64), model, 1e6)
    limit.refuse((4096, 8))
    fit(model, [{"tokens": random_tokens(16, 8)}], **run)
    monkeypatch.setenv("NNXMOE_MEMORY", "off")
    BatchLimit.of(Step(model, optax.sgd(0.1)), model, refuse_state(Step(model, optax.sgd(0.1)))).refuse((2**40, 2**40))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"remat": nnxmoe.Remat()}, {"stacking": nnxmoe.Unrolled()}])
def test_the_bound_of_activations_is_below_what_a_step_takes(changes: Any) -> None:
    """By XLA's own account, also where only the adapters of the last layer are trained."""
    rows, length = 64, 64
    for targets in (None, "attention", "head"):
        model = build_tiny("llama", dataclasses.replace(PLAIN, **changes))
        if targets:
            lora.add(model, 2, targets=targets, rngs=nnx.Rngs(0))
        step = Step(model, optax.sgd(0.1), trainable=nnx.PathContains("lora") if targets else nnx.Param)
        batch = {"tokens": jax.ShapeDtypeStruct((rows, length), jnp.int32)}
        memory = step.jitted.lower(step.shapes(), batch).compile().memory_analysis()
        bound = BatchLimit.of(step, model, 0.0).bytes_per_token * rows * length
        assert 0 < bound <= memory.temp_size_in_bytes


# Compiling once, and models whose arrays are on several devices


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that JAX compiles from here on, also those that it reads from its cache on disk."""
    names = list[str]()
    event = "/jax/core/compile/backend_compile_duration"
    note = lambda name, _, **details: names.append(details["fun_name"]) if name == event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


SCALE = 1.0


def scaled(model: nnxmoe.CausalLM, batch: Any) -> Any:
    return SCALE * jnp.mean(model(batch["tokens"]).logits ** 2)


@pytest.mark.slow
@pytest.mark.wrong_types  # checked annotations wrap functions in closures, which have no static key
@pytest.mark.parametrize("of_function", [False, True])
def test_a_second_fit_compiles_nothing(of_function: bool, compiled: list[str], tmp_path: Path) -> None:
    """Equal models, batches and optimizers, which are other objects; also resumed and evaluated."""

    def run(folder: str, steps: int) -> Any:
        batch = {"tokens": random_tokens(3, 6)}
        options = settings(steps=steps, checkpoint=tmp_path / folder, evaluate=[batch], bias_rate=0.0)
        model = build_tiny("mixtral", PLAIN)
        lora.add(model, 2, rngs=nnx.Rngs(0))
        return fit(model, [batch], objective=scaled if of_function else None, **options)

    first = [run("a", 2), run("a", 4)]
    assert any("step" in name for name in compiled)
    compiled.clear()
    again = [run("b", 2), run("b", 4)]
    assert compiled == []
    for one, other in zip(first, again, strict=True):
        same_bits(one, other)
        assert [m["loss"] for m in one.history] == [m["loss"] for m in other.history]


@pytest.mark.slow
def test_what_changes_the_step_compiles_it_again(monkeypatch: pytest.MonkeyPatch, compiled: list[str]) -> None:
    """Settings of optimizers and of JAX, captured arrays, and globals of an objective."""
    model, batch = build_tiny("llama", PLAIN), {"tokens": random_tokens(3, 7)}

    def loss(**changes: Any) -> float:
        compiled.clear()
        run = {"optimizer": optax.sgd(0.1), "steps": 2, "objective": scaled} | changes
        return fit(model, [batch], **run).history[-1]["loss"]

    usual = loss()
    assert loss() == usual and not compiled
    assert loss(optimizer=optax.sgd(0.2)) != usual and "jit(step)" in compiled
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert loss() > 2 * usual and "jit(step)" in compiled
    weights = np.ones(53, np.float32)

    def weighted(model: nnxmoe.CausalLM, batch: Any) -> Any:
        return jnp.mean(model(batch["tokens"]).logits ** 2 * weights)

    one = loss(objective=weighted)
    weights[:] = 5
    assert loss(objective=weighted) > 2 * one
    with jax.default_matmul_precision("bfloat16"):
        loss()
    assert "jit(step)" in compiled


def test_the_last_64_programs_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = programs._program  # a second cache with the same limit, so that other tests keep their programs
    second = functools.lru_cache(**cache.cache_parameters())(cache.__wrapped__)
    monkeypatch.setattr(programs, "_program", second)
    made = [programs.shared_program(key, lambda x: x) for key in range(64)]
    assert programs.shared_program(0, lambda x: x) is made[0]
    programs.shared_program(64, lambda x: x)  # replaces the least recently used program
    assert programs.shared_program(0, lambda x: x) is made[0]
    assert programs.shared_program(1, lambda x: x) is not made[1]


def test_static_keys_compare_what_functions_consist_of() -> None:
    """A large array and an object of the user's class may change, so functions with them have no key."""

    class Settings:
        rate = 1.0

    def scale(factor: Any) -> Any:
        return lambda x: x * factor

    assert static_key(scale(2)) == static_key(scale(2)) != static_key(scale(2.0))
    assert static_key(optax.adamw(1e-3)) == static_key(optax.adamw(1e-3)) != static_key(optax.adamw(2e-3))
    schedules = [optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 1.0, 5, steps)) for steps in (20, 20, 30)]
    assert static_key(schedules[0]) == static_key(schedules[1]) != static_key(schedules[2])
    assert static_key(scale(jnp.ones(3))) == static_key(scale(jnp.ones(3))) != static_key(scale(jnp.zeros(3)))
    assert static_key(0.0) != static_key(-0.0) and static_key(True) != static_key(1)
    for opaque in (np.ones(5000), Settings(), Settings, build_tiny("llama", PLAIN), [object()]):
        assert static_key(scale(opaque)) is None


@pytest.mark.slow
def test_static_keys_keep_no_model(compiled: list[str]) -> None:
    """The programs that are kept hold no arrays of the model, the optimizer's state or the objective."""
    model, batch = build_tiny("llama", PLAIN), {"tokens": random_tokens(2, 5)}
    teacher = build_tiny("llama", PLAIN, seed=1)
    watched = [weakref.ref(part) for part in (model, teacher, *jax.tree.leaves(nnx.state(model)))]

    def objective(model: nnxmoe.CausalLM, batch: Any) -> Any:
        return jnp.mean((model(batch["tokens"]).logits - teacher(batch["tokens"]).logits) ** 2)

    for options in ({}, {"objective": objective}):
        fit(model, [batch], optimizer=train.muon(0.1, model), steps=1, **options)
    del model, teacher, objective, options
    gc.collect()
    assert [part() for part in watched] == [None] * len(watched)


@pytest.mark.slow
def test_models_with_arrays_on_several_devices(eight: Callable[..., Any]) -> None:
    eight(on_several_devices)


def on_several_devices() -> None:
    """Models that are sharded by hand or on another device are trained and sampled there, with equal results."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    spread, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    batch, pairs = {"tokens": random_tokens(4, 8)}, {"tokens": random_tokens(8, 8).reshape(4, 2, 8)}
    pairs["loss_mask"] = np.ones_like(pairs["tokens"])

    def model(place: Callable[[Any], Any], adapters: bool = False) -> Any:
        made = build_tiny("llama", PLAIN)
        nnx.update(
            made, jax.tree.map(lambda a: a if (to := place(a)) is None else jax.device_put(a, to), nnx.state(made))
        )
        if adapters:
            lora.add(made, 2, rngs=nnx.Rngs(0))
        return made

    def results(place: Callable[[Any], Any]) -> list[float]:
        options = {"optimizer": optax.adam(1e-2), "steps": 2}
        plain, adapted = model(place), model(place, adapters=True)
        runs = [
            fit(plain, [batch], evaluate=[batch], **options),
            fit(adapted, [batch], **options),
            fit(adapted, [pairs], objective=train.DPO(lora.without), **options),
            fit(plain, train.with_reference([pairs], plain), objective=train.DPO(), **options),
            fit(fit(plain, [batch], **options).model, [batch], **options),
        ]
        generated = nnxmoe.generate(plain, batch["tokens"], max_new_tokens=3)
        draft = nnxmoe.ModelDraft.of(build_tiny("llama", PLAIN, seed=1), 2)
        (completion,) = nnxmoe.complete(adapted, [[1, 2, 3]], max_new_tokens=3, draft=draft)
        score = nnxmoe.score(plain, [[1, 2, 3]])[0].total
        losses = [metrics["loss"] for done in runs for metrics in done.history]
        return [*losses, *generated.flat, *completion.ids, score]

    usual = results(lambda a: None)
    for place in (
        lambda a: whole,
        lambda a: spread if a.ndim > 1 and a.shape[0] % 2 == 0 else whole,
        lambda a: spread if a.ndim > 1 and a.shape[0] % 2 == 0 else None,  # what is nowhere in particular follows
        lambda a: jax.devices()[3],
    ):
        np.testing.assert_allclose(results(place), usual, rtol=2e-5)
    for place, message in (
        (
            lambda a: spread if a.ndim > 1 and a.shape[0] % 2 == 0 else jax.devices()[0],
            "is on different devices .*mesh=",
        ),
        (lambda a: NamedSharding(jax.make_mesh((2,), ("x",), (AxisType.Explicit,)), PartitionSpec()), "explicit axes"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(model(place), [batch], optimizer=optax.sgd(0.1), steps=1)


def test_fit_shards_dense_kernels_over_fsdp_and_expert(eight: Callable[..., Any], tmp_path: Path) -> None:
    """The rules are not replaced if they were passed to the strategy, or if the kernels are frozen."""
    eight(with_training_rules, str(tmp_path))


def with_training_rules(folder: str) -> None:
    mesh, batch = nnxmoe.make_mesh(fsdp=2, expert=2, devices=jax.devices()[:4]), {"tokens": random_tokens(4, 8)}
    options: dict[str, Any] = {"optimizer": optax.adam(1e-2), "steps": 2}

    def run(strategy: nnxmoe.Strategy, adapters: bool = False, **more: Any) -> tuple[Any, float]:
        """Return the mesh axes that shard the width of a kernel, and the last loss."""
        model = build_tiny("mixtral", strategy)
        if adapters:
            lora.add(model, 2, rngs=nnx.Rngs(0))
        before = nnx.state(model)["stacks"][0]["layer"]["attention"]["q"]["kernel"].get_value().sharding
        done = fit(model, [batch], **options | more)
        assert nnx.state(model)["stacks"][0]["layer"]["attention"]["q"]["kernel"].get_value().sharding == before
        assert model.strategy == strategy, "fit does not change the model that was passed"
        sharding = nnx.state(done.model)["stacks"][0]["layer"]["attention"]["q"]["kernel"].get_value().sharding
        assert done.model.strategy.sharding_of(nnx.state(done.model)["head"]["kernel"]).spec[-1] == sharding.spec[-1]
        return sharding.spec[-1], done.history[-1]["loss"]

    scanned = dataclasses.replace(PLAIN, stacking=nnxmoe.Scanned())
    narrow = dataclasses.replace(scanned, rules={**nnxmoe.RULES})
    on_mesh, narrow_on_mesh = (dataclasses.replace(strategy, mesh=mesh) for strategy in (scanned, narrow))
    axes, loss = run(scanned, mesh=mesh)
    narrow_axes, narrow_loss = run(narrow, mesh=mesh)
    assert (axes, narrow_axes) == (("fsdp", "expert"), "fsdp") and loss == pytest.approx(narrow_loss, rel=1e-6)
    assert run(on_mesh) == (("fsdp", "expert"), loss)
    assert run(scanned, adapters=True, mesh=mesh)[0] == "fsdp"
    run(narrow_on_mesh, checkpoint=folder, steps=1)
    axes, resumed = run(on_mesh, checkpoint=folder)
    assert axes == ("fsdp", "expert") and resumed == pytest.approx(loss, rel=1e-6)


@pytest.mark.slow
def test_fit_on_a_mesh_leaves_the_given_model_where_it_was(eight: Callable[..., Any]) -> None:
    eight(after_a_mesh)


def after_a_mesh() -> None:
    model, batch = build_tiny("mixtral", PLAIN), {"tokens": random_tokens(4, 8)}
    places = [array.sharding for array in jax.tree.leaves(nnx.state(model))]
    options = {"optimizer": optax.adam(1e-2), "steps": 2}
    alone = fit(model, [batch], **options).history[-1]["loss"]
    for sizes in ({"fsdp": 2}, {"data": 2, "expert": 2}):
        count = int(np.prod(list(sizes.values())))
        mesh = nnxmoe.make_mesh(**sizes, devices=jax.devices()[:count])
        assert fit(model, [batch], mesh=mesh, **options).history[-1]["loss"] == pytest.approx(alone, rel=1e-4)
        assert [array.sharding for array in jax.tree.leaves(nnx.state(model))] == places
        assert model.strategy.mesh is None
    assert fit(model, [batch], **options).history[-1]["loss"] == alone


def metrics_of_an_objective(mesh: Any) -> dict[str, float]:
    """Loss and metrics of two microbatches with different values, with an objective that returns metrics."""
    batch = {"tokens": random_tokens(4, 6), "weight": np.array([1.0, 2.0, 5.0, 7.0], np.float32)}

    def weighted(model: nnxmoe.CausalLM, batch: Any) -> Any:
        loss = jnp.mean(model(batch["tokens"]).logits[..., 0].mean(axis=1) * batch["weight"])
        return loss, {"weight": jnp.mean(batch["weight"])}

    options = {"optimizer": optax.sgd(0.1), "steps": 1, "accumulate": 2, "mesh": mesh}
    done = fit(build_tiny("llama", PLAIN), [batch], objective=weighted, **options)
    return {name: done.history[0][name] for name in ("loss", "weight")}


def metrics_on_a_mesh_and_on_one_device() -> list[dict[str, float]]:
    return [metrics_of_an_objective(mesh) for mesh in (nnxmoe.make_mesh(data=2, devices=jax.devices()[:2]), None)]


@pytest.mark.slow
def test_metrics_of_an_objective_on_a_mesh_are_means_over_microbatches(eight: Callable[..., Any]) -> None:
    on_mesh, alone = eight(metrics_on_a_mesh_and_on_one_device)
    assert on_mesh["weight"] == alone["weight"] == 3.75
    assert on_mesh["loss"] == pytest.approx(alone["loss"], rel=1e-4)
