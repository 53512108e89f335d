"""Optax optimizers in training: Muon per matrix, sharded moments, clipping, skipped steps."""

import re
from collections.abc import Callable
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
from nnxmoe.train import lora
from nnxmoe.train.checkpoints import Checkpoints
from nnxmoe.train.loop.interface import NotFinite
from nnxmoe.train.loop.step import Step
from tests.support.arrays import tensors
from tests.support.tiny import build_tiny, random_tokens, stacking_of

PLAIN = nnxmoe.Strategy(stacking=nnxmoe.Scanned())
RATE, STEPS = 0.05, 2


def files_of(step: Step, params: Any) -> dict[str, Any]:
    """The tensors of a Hugging Face checkpoint: a matrix ``[O, I]`` per layer, expert and projection."""
    state = step.init()
    named = tensors(step.definition.merge(params, state.frozen))
    return {name: jnp.asarray(array) for name, array in named.items() if "score_correction" not in name}


def updated(optimizer: Any, params: Any, gradients: list[Any], places: Any = None) -> Any:
    """The parameters after updates with these gradients."""

    @jax.jit
    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params) if places is None else jax.jit(optimizer.init, out_shardings=places)(params)
    for grads in gradients:
        params, state = update(params, state, grads)
    return params


def muon_against_files(kind: str, scan: bool, mesh: dict[str, Any] | None = None) -> None:
    """`train.muon` on the parameters of a model, and optax's on one array per matrix of its checkpoint."""
    made = None if mesh is None else nnxmoe.make_mesh(**mesh)
    pipeline = nnxmoe.Pipeline(2) if "pipe" in (mesh or {}) else None
    strategy = nnxmoe.Strategy(stacking=stacking_of(scan), mesh=made, pipeline=pipeline)
    model = build_tiny(kind, strategy, vocab_size=54)
    optimizer = train.muon(RATE, model, weight_decay=0.1)
    step, rng = Step(model, optimizer), np.random.default_rng(0)
    params = step.init().params
    drawn = [{n: np.asarray(rng.standard_normal(p.shape), np.float32) for n, p in params.items()} for _ in range(STEPS)]
    gradients = [jax.device_put(grads, step.places.params) for grads in drawn]
    ours = files_of(step, updated(optimizer, params, gradients, step.places.moments))
    files = files_of(step, params)
    outside = ("embed_tokens", "lm_head")
    numbers = {
        name: optax.contrib.MuonDimensionNumbers(1, 0) if a.ndim == 2 and not any(o in name for o in outside) else None
        for name, a in files.items()
    }
    theirs = optax.contrib.muon(
        RATE, weight_decay=0.1, consistent_rms=0.2, muon_weight_dimension_numbers=lambda params: numbers
    )
    wanted = updated(theirs, files, [files_of(step, grads) for grads in gradients])
    assert ours.keys() == wanted.keys() and sum(n is not None for n in numbers.values()) > 10
    for name, array in wanted.items():
        assert np.abs(array - files[name]).max() > 1e-3, name
        np.testing.assert_allclose(ours[name], array, atol=1e-5, err_msg=name)


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize("kind", ["mixtral", pytest.param("deepseek_v3", marks=SLOW)])
def test_muon_equals_one_array_per_matrix(kind: str, scan: bool) -> None:
    muon_against_files(kind, scan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"expert": 2, "tensor": 2, "fsdp": 2},
        pytest.param({"tensor": 2, "fsdp": 4}, marks=SLOW),
        pytest.param({"pipe": 2, "expert": 2, "fsdp": 2}, marks=SLOW),
    ],
)
def test_muon_on_a_mesh_equals_one_array_per_matrix(mesh: dict[str, Any], eight: Callable[..., Any]) -> None:
    eight(muon_against_files, "mixtral", True, mesh)


@pytest.mark.program
@pytest.mark.parametrize("mesh", [{"expert": 8}, {"pipe": 2, "expert": 4}])
def test_muon_gathers_no_experts(mesh: dict[str, Any], eight: Callable[..., Any]) -> None:
    """Each device orthogonalises its own experts, layer by layer."""
    assert eight(collectives_of_experts, mesh) == []


def collectives_of_experts(mesh: dict[str, Any]) -> list[str]:
    """The lines of the compiled update that move arrays of more than one layer's attention."""
    pipeline = nnxmoe.Pipeline(2) if "pipe" in mesh else None
    strategy = nnxmoe.Strategy(stacking=nnxmoe.Scanned(), mesh=nnxmoe.make_mesh(**mesh), pipeline=pipeline)
    model = build_tiny("mixtral", strategy, num_local_experts=8)
    step = Step(model, optimizer := train.muon(RATE, model))
    shapes = step.shapes()
    update = jax.jit(optimizer.update, out_shardings=(step.places.params, step.places.moments))
    text = update.lower(shapes.params, shapes.moments, shapes.params).compile().as_text()
    moved = re.findall(r"(\w+\[[\d,]*\])\S* (?:all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", text)
    return [shape for shape in moved if re.search(r"\b28\b", shape)]  # the experts' width


def test_muon_refuses_another_model() -> None:
    model = build_tiny("llama", PLAIN)
    optimizer = train.muon(RATE, model)
    lora.add(model, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"a model without .*lora\.a: pass the trained model, after lora\.add"):
        Step(model, optimizer, trainable=nnx.Param).shapes()


# Any optimizer


MAKERS: dict[str, Callable[[nnxmoe.CausalLM], optax.GradientTransformation]] = {
    "adafactor": lambda model: optax.adafactor(RATE, min_dim_size_to_factor=8),
    "lion": lambda model: optax.lion(optax.cosine_decay_schedule(1e-3, 9)),
    "muon": lambda model: train.muon(optax.linear_schedule(RATE, 0.0, 9), model),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MAKERS])
def test_any_optimizer_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    model, data = build_tiny("llama", PLAIN), [{"tokens": random_tokens(2, 7, seed=i)} for i in range(4)]
    run: dict[str, Any] = {"optimizer": MAKERS[name](model), "steps": 4}
    straight = train.fit(model, data, **run)
    saved: dict[str, Any] = run | {"checkpoint": Checkpoints(tmp_path / "c", every=1)}
    train.fit(model, data, **saved, callbacks=[lambda told: told.step == 2])
    done = train.fit(model, data, **saved)
    assert [metrics["step"] for metrics in done.history] == [3, 4]
    same_bits((straight.state.params, straight.state.moments), (done.state.params, done.state.moments))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MAKERS])
def test_any_optimizer_resumes_on_another_mesh(name: str, eight: Callable[..., Any], tmp_path: Path) -> None:
    eight(on_another_mesh, name, tmp_path / "c")


def on_another_mesh(name: str, folder: Path) -> None:
    """Two steps on one mesh and two on another, against four on one device."""
    model = build_tiny("mixtral", PLAIN, vocab_size=54)
    run: dict[str, Any] = {"optimizer": MAKERS[name](model), "data": [{"tokens": random_tokens(8, 7)}], "steps": 4}
    straight = train.fit(model, **run)
    saved = run | {"checkpoint": Checkpoints(folder, every=1)}
    first, second = nnxmoe.make_mesh(fsdp=2, expert=2, tensor=2), nnxmoe.make_mesh(data=4, expert=2)
    train.fit(model, **saved, mesh=first, callbacks=[lambda told: told.step == 2])
    done = train.fit(model, **saved, mesh=second)
    assert [metrics["step"] for metrics in done.history] == [3, 4]
    assert done.history[-1]["loss"] == pytest.approx(straight.history[-1]["loss"], rel=1e-4)
    for path, array in jax.device_get(straight.state.params).items():
        apart = np.abs(array - jax.device_get(done.state.params[path]))
        assert np.mean(apart < 1e-4) >= 0.99, path  # the sign of a gradient near zero may differ


def same_bits(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), one, other)


def test_moments_are_sharded_like_their_parameters(eight: Callable[..., Any]) -> None:
    """Also Adafactor's means over rows and columns, without the dimension over which they are taken."""
    eight(check_moments)


def check_moments() -> None:
    mesh = nnxmoe.make_mesh(expert=2, tensor=2, fsdp=2)
    model = build_tiny("mixtral", nnxmoe.Strategy(stacking=nnxmoe.Scanned(), mesh=mesh), vocab_size=54)
    down, counted = "stacks.0.layer.moe.experts.down", dict[str, set[str]]()  # [L, E, D, F]
    for name, make in MAKERS.items():
        places = Step(model, make(model)).places
        assert tuple(places.params[down].spec) == (None, "expert", "fsdp", "tensor")
        leaves = jax.tree_util.tree_leaves_with_path(places.moments)
        named = [(jax.tree_util.keystr(path), place.spec) for path, place in leaves]
        counted[name] = {str(tuple(spec)) for path, spec in named if down in path and any(spec)}
    whole = "(None, 'expert', 'fsdp', 'tensor')"
    assert counted["lion"] == counted["muon"] == {whole}
    assert counted["adafactor"] == {"(None, 'expert', 'fsdp')", "(None, 'expert', 'tensor')"}  # v is [1]


# Clipping and skipped steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", pytest.param("mixtral", marks=SLOW)])
def test_clipping_sees_the_norm_of_all_trained_parameters(kind: str, eight: Callable[..., Any]) -> None:
    """Of adapters only, and over a mesh: the norm is that of one device, and the update's is the limit."""
    mesh: dict[str, Any] = (
        {"fsdp": 2, "tensor": 2, "data": 2} if kind == "llama" else {"expert": 2, "tensor": 2, "fsdp": 2}
    )
    norm, moved = clipped(kind, None, np.inf)
    assert moved == pytest.approx(norm, rel=1e-5)
    assert eight(clipped, kind, mesh, norm / 2) == (pytest.approx(norm, rel=1e-5), pytest.approx(norm / 2, rel=1e-5))


def clipped(kind: str, mesh: dict[str, Any] | None, limit: float) -> tuple[float, float]:
    """The norm of the gradients as the step reports it, and that of the update, by NumPy."""
    made = None if mesh is None else nnxmoe.make_mesh(**mesh)
    model = build_tiny(kind, nnxmoe.Strategy(stacking=nnxmoe.Scanned(), mesh=made), vocab_size=54)
    lora.add(model, 2, rngs=nnx.Rngs(0))
    optimizer = optax.chain(optax.clip_by_global_norm(limit), optax.sgd(1.0))
    step = Step(model, optimizer, trainable=nnx.PathContains("lora"))
    before = jax.device_get(step.init().params)
    state, report = step(step.init(), {"tokens": random_tokens(8, 7)})
    moved = [np.asarray(state.params[name], np.float64) - old for name, old in before.items()]
    return float(report.gradient_norm), float(np.sqrt(sum(np.sum(each**2) for each in moved)))


def not_a_number(x: Any, kernel: Any, targets: Any, weights: Any, z: float, shards: int = 1) -> Any:
    """A head whose gradients are NaN if token 7 is predicted."""
    total, entropy = train.ChunkedLoss()(x, kernel, targets, weights, z, shards)
    return total * jnp.where(jnp.any(targets == 7), jnp.nan, 1.0), entropy


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", pytest.param("deepseek_v3", marks=SLOW)])
def test_steps_that_are_not_finite_are_skipped(kind: str, tmp_path: Path) -> None:
    """Parameters, moments and biases are those of a run without these batches; three in a row end the run, also where
    it is resumed in between."""
    model = build_tiny(kind, PLAIN)
    first, last = ({"tokens": np.full((2, 5), token, np.int32)} for token in (3, 4))
    bad = {"tokens": np.full((2, 5), 7, np.int32)}
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(1e-2, 0.0, 9)))
    run: dict[str, Any] = {"optimizer": optax.apply_if_finite(adam, 2), "objective": train.Objective(head=not_a_number)}
    run["bias_rate"] = 0.01
    with_bad, log = [first, bad, bad, last], train.JsonLog(tmp_path / "metrics")
    done = train.fit(model, with_bad, **run, steps=4, callbacks=[log])
    clean = train.fit(model, [first, last], **run, steps=2)
    assert [metrics["skipped"] for metrics in done.history] == [0, 1, 2, 2]
    assert [metrics["skipped"] for metrics in log.read()] == [0, 1, 2, 2]
    inner = [each.state.moments.inner_state for each in (done, clean)]
    same_bits((done.state.params, inner[0], done.state.frozen), (clean.state.params, inner[1], clean.state.frozen))
    saved: dict[str, Any] = run | {"checkpoint": Checkpoints(tmp_path / "c", every=1)}
    train.fit(model, [first, bad, bad, bad], **saved, steps=3)
    with pytest.raises(NotFinite, match=r"step 4: the gradients of .*embed.table.* The last checkpoint is from step 3"):
        train.fit(model, [first, bad, bad, bad], **saved, steps=4)
