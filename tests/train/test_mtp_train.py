"""The loss of multi-token prediction: against NumPy, packed documents, accumulation, router bias, adapters, runs."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

import nnxmoe
from nnxmoe.convert.peft.adapter_slots import adapted_slots
from nnxmoe.models import DeepSeekV3
from nnxmoe.train import lora
from nnxmoe.train.loop.fit import fit
from nnxmoe.train.loop.loss import ChunkedLoss, Whole
from nnxmoe.train.loop.objective import Objective
from nnxmoe.train.loop.step import Step
from tests.support.arrays import max_error, tensors
from tests.support.mtp import tiny_mtp
from tests.support.numpy_decoder import reference_ahead
from tests.support.tiny import ORACLE, Weights, build, random_tokens

PLAIN = nnxmoe.Strategy(stacking=nnxmoe.Scanned())
DEPTHS, WEIGHT = 2, 0.3
LENGTHS = ((5, 3), (2, 6), (1, 4))  # of the documents in each row of 9 tokens; the rest is padding
OBJECTIVE = Objective(mtp=WEIGHT)
SMALL = {"num_hidden_layers": 1, "first_k_dense_replace": 0}


@functools.cache
def tiny(strategy: nnxmoe.Strategy = ORACLE) -> nnxmoe.CausalLM:
    return build(*tiny_mtp(DEPTHS, **SMALL), strategy, mtp=True)


def without() -> nnxmoe.CausalLM:
    return build(*tiny_mtp(0, **SMALL))


def documents() -> list[tuple[int, int, np.ndarray, np.ndarray]]:
    """Row, first position, tokens and loss mask of each document."""
    tokens, mask = random_tokens(3, 9), np.random.default_rng(3).random((3, 9)) < 0.8
    found = []
    for row, lengths in enumerate(LENGTHS):
        starts = np.cumsum([0, *lengths])[:-1]
        found += [(row, s, tokens[row, s : s + n], mask[row, s : s + n]) for s, n in zip(starts, lengths, strict=True)]
    return found


def batch_of(places: list[tuple[int, int, int]]) -> dict[str, np.ndarray]:
    """Six rows of 9 tokens with each document at a row and position and with a segment id."""
    fields = {name: np.zeros((6, 9), np.int32) for name in ("tokens", "segment_ids", "positions", "loss_mask")}
    for (row, start, segment), (_, _, tokens, mask) in zip(places, documents(), strict=True):
        part = slice(start, start + len(tokens))
        fields["tokens"][row, part], fields["loss_mask"][row, part] = tokens, mask
        fields["segment_ids"][row, part], fields["positions"][row, part] = segment, np.arange(len(tokens))
    return fields


def packed() -> dict[str, np.ndarray]:
    return batch_of([(row, start, 1 + i) for i, (row, start, _, _) in enumerate(documents())])


def separate() -> dict[str, np.ndarray]:
    return batch_of([(i, 0, 1) for i in range(len(documents()))])


def merged() -> dict[str, np.ndarray]:
    """Packed, with one segment per row: the planted mistake."""
    return batch_of([(row, start, 1) for row, start, _, _ in documents()])


def reference_losses(weights: Weights) -> tuple[float, float]:
    """Cross-entropy of the model and the loss of its prediction layers, one document and one token at a time."""
    fields, _ = tiny_mtp(DEPTHS, **SMALL)
    sums, counts = np.zeros(DEPTHS + 1), np.zeros(DEPTHS + 1)
    for _, _, tokens, mask in documents():
        depths = {"num_nextn_predict_layers": min(DEPTHS, len(tokens) - 1)}
        for k, logits in enumerate(reference_ahead(fields | depths, weights, tokens[None])):
            for i in range(len(tokens) - k - 1):
                if mask[i + k + 1]:
                    row = logits[0, i]
                    norm = row.max() + np.log(np.exp(row - row.max()).sum())
                    sums[k] += norm - row[tokens[i + k + 1]]
                    counts[k] += 1
    means = sums / counts
    return means[0], means[1:].mean()


Gradients = tuple[Any, dict[str, Any]]


@functools.cache
def stepper(objective: Objective, accumulate: int) -> tuple[Step, Any]:
    step = Step(tiny(), optax.sgd(1.0), objective, accumulate=accumulate)
    return step, jax.jit(step.definition.gradients)


@functools.cache
def gradients(made: Callable[[], Any], objective: Objective = OBJECTIVE, accumulate: int = 1) -> Gradients:
    """Losses and gradients of a batch."""
    step, run = stepper(objective, accumulate)
    state = step.init()
    grads, losses = run(state, jax.tree.map(jnp.asarray, made()), state.key)
    return losses, grads


def same_gradients(one: Gradients, other: Gradients) -> None:
    for name in ("total", "cross_entropy", "mtp", "tokens"):
        assert abs(getattr(one[0], name) - getattr(other[0], name)) < 1e-5, name
    for name, grad in one[1].items():
        assert max_error(grad, other[1][name]) < 1e-5, name


def test_loss_equals_numpy() -> None:
    losses, _ = gradients(packed)
    main, ahead = reference_losses(tiny_mtp(DEPTHS, **SMALL)[1])
    assert abs(losses.cross_entropy - main) < 1e-5 and abs(losses.mtp - ahead) < 1e-5
    assert abs(losses.total - (main + WEIGHT * ahead)) < 1e-5


DIRECTIONS = [
    ("eh_proj", "enorm", "hnorm"),
    ("layers.1.shared_head.norm",),
    ("layers.1.mlp.", "layers.1.post"),
    ("layers.1.self_attn.", "layers.1.input"),
    ("layers.2.",),
    ("embed_tokens", "lm_head"),
    ("layers.0.", "model.norm"),
]


def test_gradients_equal_finite_differences() -> None:
    """Of the loss in NumPy, in float64, along a random direction of several groups of parameters."""
    _, grads = gradients(packed)
    step = stepper(OBJECTIVE, 1)[0]
    ours = tensors(step.definition.merge(grads, step.init().frozen))
    _, weights = tiny_mtp(DEPTHS, **SMALL)
    rng, seen = np.random.default_rng(0), set[str]()
    for parts in DIRECTIONS:
        names = [n for n in weights if any(part in n for part in parts) and "correction_bias" not in n]
        along = {name: rng.standard_normal(weights[name].shape) for name in names}
        slope, tiny_step = 0.0, 1e-6
        for sign in (1, -1):
            moved = {n: w.astype(np.float64) + sign * tiny_step * along.get(n, 0.0) for n, w in weights.items()}
            main, ahead = reference_losses(moved)
            slope += sign * (main + WEIGHT * ahead) / (2 * tiny_step)
        wanted = sum(float(np.sum(ours[name] * along[name])) for name in names)
        assert abs(slope) > 1e-3 and abs(wanted - slope) < 1e-4 * max(1.0, abs(slope)), (parts, wanted, slope)
        seen |= set(names)
    assert seen == {name for name in weights if "correction_bias" not in name}


def test_packed_documents_equal_separate_ones() -> None:
    one, other = gradients(packed), gradients(separate)
    same_gradients(one, other)
    np.testing.assert_array_equal(one[0].load, other[0].load)  # pairs that do not exist reach no expert
    assert abs(gradients(merged)[0].mtp - one[0].mtp) > 1e-2


@pytest.mark.slow
def test_logits_are_computed_in_chunks() -> None:
    """All logits at once are in no array of the program; the slow oracle has them."""
    vocab, batch = 53, jax.tree.map(jnp.asarray, packed())
    for head, rows in ((ChunkedLoss(4 * vocab), 4), (Whole(), 54)):
        step = Step(tiny(), optax.sgd(1.0), dataclasses.replace(OBJECTIVE, head=head))
        program = str(jax.make_jaxpr(step.definition.gradients)(step.shapes(), batch, jax.random.key(0)))
        assert {each for each in (4, 54) if f"f32[1,{each},{vocab}]" in program} == {rows}


@pytest.mark.slow
def test_chunks_give_the_loss_of_whole_logits() -> None:
    heads = (dataclasses.replace(OBJECTIVE, head=head) for head in (ChunkedLoss(4 * 53), Whole()))
    same_gradients(*(gradients(packed, objective) for objective in heads))


@pytest.mark.slow
def test_accumulated_parts_equal_the_whole_batch() -> None:
    """Parts with other numbers of tokens at every depth; means are over the whole batch."""
    same_gradients(gradients(separate), gradients(separate, accumulate=3))


def on_a_mesh(batch: dict[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray], bool]:
    """The prediction loss and the gradients on two devices, and whether they initialise a model to the same values."""
    mesh = nnxmoe.make_mesh(fsdp=2, devices=jax.devices()[:2])
    fields, weights = tiny_mtp(DEPTHS, **SMALL)
    strategy = dataclasses.replace(PLAIN, mesh=mesh)
    step = Step(build(fields, weights, strategy, mtp=True), optax.sgd(1.0), OBJECTIVE)
    state = step.init()
    grads, losses = jax.jit(step.definition.gradients)(state, batch, state.key)
    config = nnxmoe.config_from_hf(fields)
    drawn = [
        jax.tree.leaves(nnx.state(DeepSeekV3(config, each, rngs=nnx.Rngs(0), mtp=True).mtp))
        for each in (PLAIN, strategy)
    ]
    same = all(max_error(one, other) < 1e-6 for one, other in zip(*drawn, strict=True))
    return float(losses.mtp), {name: np.asarray(grad) for name, grad in grads.items()}, same


@pytest.mark.slow
def test_a_mesh_gives_the_same_gradients(eight: Callable[..., Any]) -> None:
    loss, grads, same = eight(on_a_mesh, packed())
    wanted = gradients(packed)
    assert same and abs(loss - wanted[0].mtp) < 1e-5
    for name, grad in grads.items():
        if name.startswith("mtp.") or name in ("embed.table", "head.kernel"):  # other layers are stacked
            assert max_error(grad, wanted[1][name]) < 1e-5, name


@pytest.mark.slow
def test_router_bias_of_prediction_layers_is_updated() -> None:
    step = Step(tiny(), optax.sgd(0.0), OBJECTIVE, bias_rate=0.25)
    before = step.init()
    after, report = step(step.init(), packed())
    names = [name for name in before.frozen if name.startswith("mtp.") and name.endswith("router.bias")]
    assert len(names) == DEPTHS and report.losses.load.shape[0] == 1 + DEPTHS
    pairs = [sum(max(n - k, 0) for row in LENGTHS for n in row) for k in range(DEPTHS + 1)]
    for k, name in enumerate(sorted(names), 1):
        load = np.asarray(report.losses.load[k])
        assert load.sum() == 3 * pairs[k]  # three experts per pair of a state and a token
        moved, apart = 0.25 * np.sign(load.mean() - load), load != load.mean()  # equal loads may round either way
        assert apart.sum() > 4 and max_error(after.frozen[name] - before.frozen[name], moved, apart) < 1e-6


@pytest.mark.slow
def test_layers_that_the_objective_leaves_out_stay_as_they_are() -> None:
    """They have no moments, no decay and no gradients, and the step is that of a model without them."""
    names = []
    for model in (tiny(), without()):
        step = Step(model, optax.adamw(0.1, weight_decay=0.9), bias_rate=0.25)
        state, batch = step.shapes(), jax.tree.map(jnp.asarray, packed())
        after, report = jax.eval_shape(step.definition.step, state, batch)
        assert report.losses.mtp is None and report.losses.load.shape[0] == 1
        names.append(
            (step.names, [leaf.shape for leaf in jax.tree.leaves(after.moments)], set(step.definition._biases))
        )
    assert names[0] == names[1] and not any(name.startswith("mtp.") for name in names[0][0])


def test_a_model_without_them_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Objective\(mtp=0\.3\): the model has no .* mtp=True"):
        Step(without(), optax.sgd(0.1), OBJECTIVE)
    with pytest.raises(ValueError, match=r"mtp must be .*, got -1"):
        Objective(mtp=-1)


# Adapters and runs


@pytest.mark.slow
def test_adapters_reach_prediction_layers(tmp_path: Path) -> None:
    """They are saved under the layers' numbers, and loaded."""
    model = nnx.clone(tiny())
    lora.add(model, 2, targets=["mtp", "attention", "experts"], rngs=nnx.Rngs(0))
    places = {slot.place for slot in adapted_slots(model) if slot.path[0] == "mtp"}
    assert {"mtp.0.project.lora", "mtp.1.layer.attention.kv_a.lora"} < places
    names = Step(model, optax.sgd(0.1), OBJECTIVE, trainable=nnx.LoRAParam).names
    assert {name for name in names if "mtp" in name} == {f"{place}.{which}" for place in places for which in "ab"}
    lora.save(model, tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.2.eh_proj.lora_A.weight" in stored
    again = nnx.clone(tiny())
    lora.load(again, tmp_path / "adapter")
    for one, other in zip(*(jax.tree.leaves(nnx.state(each)) for each in (model, again)), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [PLAIN, dataclasses.replace(PLAIN, remat=nnxmoe.Remat())])
def test_trained_adapters_are_merged(strategy: nnxmoe.Strategy) -> None:
    model = nnx.clone(tiny(strategy))
    lora.add(model, 2, rngs=nnx.Rngs(0))
    fitted = fit(model, [packed()] * 2, optimizer=optax.adam(1e-2), steps=2, objective=OBJECTIVE)
    assert fitted.history[1]["mtp"] < fitted.history[0]["mtp"]
    project: Any = fitted.model.mtp[0].project
    assert np.any(np.asarray(project.lora.b[...]))
    wanted = OBJECTIVE(fitted.model, packed())[1].mtp
    lora.merge(fitted.model)
    assert abs(OBJECTIVE(fitted.model, packed())[1].mtp - wanted) < 1e-5


@pytest.mark.slow
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    def run(steps: int, **options: Any) -> Any:
        data = [packed(), separate()]
        optimizer, model = optax.adamw(1e-2), tiny(PLAIN)
        return fit(model, data, optimizer=optimizer, steps=steps, objective=OBJECTIVE, bias_rate=0.1, **options)

    whole = run(4)
    run(2, checkpoint=tmp_path)
    resumed = run(4, checkpoint=tmp_path)
    assert len(resumed.history) == 2 and resumed.history[-1]["mtp"] == whole.history[-1]["mtp"]
    assert whole.history[-1]["mtp"] < whole.history[1]["mtp"]
    for one, other in zip(*(jax.tree.leaves(nnx.state(each.model)) for each in (whole, resumed)), strict=True):
        assert np.array_equal(one, other)
