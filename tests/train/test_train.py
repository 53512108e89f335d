"""The training step: parity with MaxText, chunked loss, packing, gradient accumulation, router bias and memory."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

import nnxmoe
from nnxmoe.convert import maxtext
from nnxmoe.layers.linear.kernel import DenseKernel
from nnxmoe.models import config_from_hf, model_class
from nnxmoe.moe import balance
from nnxmoe.moe.router import RouterBias
from nnxmoe.train import lora
from nnxmoe.train.loop.batch import targets_of
from nnxmoe.train.loop.feed import put_batch
from nnxmoe.train.loop.loss import ChunkedLoss, Whole
from nnxmoe.train.loop.objective import Objective
from nnxmoe.train.loop.step import Step
from tests.benchmarks import growth, modes
from tests.support.arrays import flat, max_error
from tests.support.tiny import TINY, build_tiny, random_tokens, stacking_of

PLAIN = nnxmoe.Strategy(stacking=nnxmoe.Scanned())


@pytest.mark.slow
def test_training_allows_strict_rank_promotion(eight: Callable[..., Any]) -> None:
    """Research code often runs with ``jax_numpy_rank_promotion="raise"``."""
    for kind, changes in (("llama", {}), ("mixtral", {"dispatch": nnxmoe.Capacity(2.0)}), ("deepseek_v3", {})):
        trace_strictly(kind, dataclasses.replace(PLAIN, **changes))
    eight(trace_strictly, "mixtral", dataclasses.replace(PLAIN, dispatch=modes.RAGGED), {"fsdp": 4, "expert": 2})


def trace_strictly(kind: str, strategy: nnxmoe.Strategy, mesh: dict[str, int] | None = None) -> None:
    """Trace a forward pass with padding and segments, and a step with every loss term and adapters."""
    strategy = dataclasses.replace(strategy, mesh=None if mesh is None else nnxmoe.make_mesh(**mesh))
    config, objective = config_from_hf(TINY[kind]), Objective(z_loss=0.1, balance=0.1, router_z_loss=0.1)
    model = model_class(config)(config, strategy, rngs=None)
    lora.add(model, 2, rngs=None)
    step = Step(model, optax.adamw(0.1), objective, bias_rate=0.1)
    batch = {"tokens": jnp.ones((8, 9), jnp.int32), "segment_ids": jnp.ones((8, 9), jnp.int32)}
    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(step.definition.step, step.shapes(), batch)
        jax.eval_shape(lambda state: step.definition.merge(state.params, state.frozen)(**batch).logits, step.shapes())


def test_steps_compile_ahead_of_time(eight: Callable[..., Any]) -> None:
    """The program of an abstract model and shapes gives the same results as the step."""
    eight(compiled_ahead_of_time)


def compiled_ahead_of_time() -> None:
    mesh = nnxmoe.make_mesh(fsdp=2, context=2, devices=jax.devices()[:4])
    strategy = dataclasses.replace(PLAIN, mesh=mesh)
    config = config_from_hf(TINY["llama"])
    model = model_class(config)(config, strategy, rngs=None)
    step = Step(model, optax.sgd(0.1), accumulate=2)
    tokens = np.asarray(random_tokens(4, 8), np.int64)
    program = step.lower({"tokens": jax.ShapeDtypeStruct(tokens.shape, jnp.int32)}).compile()
    assert step.lower({"tokens": tokens.tolist()}).as_text() == step.lower({"tokens": tokens}).as_text()

    running = Step(build_tiny("llama", strategy), optax.sgd(0.1), accumulate=2)
    batch = put_batch({"tokens": tokens}, running)
    assert step.batch_shapes(batch)["tokens"].sharding == batch["tokens"].sharding
    state, report = program(running.init(), batch)
    wanted_state, wanted = running(running.init(), batch)
    assert report.losses.total == wanted.losses.total
    assert jax.tree.all(jax.tree.map(np.array_equal, state.params, wanted_state.params))

    for shape, message in (((3, 8), "accumulate=2"), ((2, 3, 4), "must be")):
        with pytest.raises(ValueError, match=message):
            step.lower({"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)})


@pytest.mark.slow
def test_forward_mode_and_hessian_vector_products() -> None:
    """Through a scan, rematerialisation, dispatch, grouped products and the chunked loss."""
    model = build_tiny("mixtral", dataclasses.replace(PLAIN, remat=nnxmoe.Remat()))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    moved = tree.unflatten([jnp.asarray(rng.standard_normal(a.shape), a.dtype) for a in leaves])
    objective, batch = Objective(head=ChunkedLoss(4 * 53), balance=0.1), {"tokens": random_tokens(2, 9)}

    def loss(params: Any) -> Any:
        return objective(nnx.merge(graph, params, rest), batch)[0]

    def along(tree: Any) -> float:
        return float(sum(map(jnp.vdot, jax.tree.leaves(tree), jax.tree.leaves(moved))))

    @jax.jit
    def derivatives(params: Any) -> Any:
        (_, forward), (slope, curved) = (jax.jvp(f, (params,), (moved,)) for f in (loss, jax.grad(loss)))
        return forward, slope, curved

    forward, slope, curved = derivatives(params)
    assert forward == pytest.approx(along(slope), rel=1e-5)
    ahead, behind = (derivatives(jax.tree.map(lambda a, d, s=s: a + s * d, params, moved))[1] for s in (2e-4, -2e-4))
    assert (along(ahead) - along(behind)) / 4e-4 == pytest.approx(along(curved), rel=1e-2)


# Parity with MaxText


def eight_steps(mesh: dict[str, int] | None, accumulate: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of eight steps and the final parameters."""
    made = None if mesh is None else nnxmoe.make_mesh(**mesh)
    strategy = dataclasses.replace(PLAIN, mesh=made, remat=nnxmoe.Remat())
    if mesh is not None and "expert" in mesh:
        strategy = dataclasses.replace(strategy, dispatch=modes.RAGGED)
    settings = json.loads((modes.CASE / "train.json").read_text())
    objective = Objective(head=ChunkedLoss(1 << 9))  # 4 tokens at a time on one device
    model = modes.load("params_step0", strategy)
    step = Step(model, modes.optimizer(settings), objective, accumulate=accumulate)
    state, losses = step.init(), []
    batch = {"tokens": modes.tokens()[:, :-1], "targets": modes.tokens()[:, 1:]}
    for _ in range(8):
        state, report = step(state, batch)
        losses.append(float(report.losses.total))
        assert bool(report.finite.all()) and float(report.losses.tokens) == 256
    return losses, flat(maxtext.to_tree(step.model(state)))


@pytest.mark.parametrize(
    ("mesh", "accumulate"),
    [
        (None, 4),
        pytest.param(None, 1, marks=pytest.mark.slow),
        pytest.param({"fsdp": 8}, 2, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "expert": 4}, 1, marks=pytest.mark.slow),
    ],
)
def test_eight_steps_equal_maxtext(mesh: Any, accumulate: int, eight: Callable[..., Any]) -> None:
    losses, params = (eight if mesh else lambda f, *a: f(*a))(eight_steps, mesh, accumulate)
    wanted = json.loads((modes.CASE / "train.json").read_text())["losses"]
    np.testing.assert_allclose(losses, wanted, rtol=0, atol=5e-6)
    theirs = load_file(modes.CASE / "params_step8.safetensors")
    assert params.keys() == theirs.keys()
    apart = np.concatenate([np.abs(params[name] - theirs[name]).ravel() for name in theirs])
    print("differences at 50, 99, 99.9, 100 %:", np.quantile(apart, [0.5, 0.99, 0.999, 1.0]))
    assert np.mean(apart < 1e-4) >= 0.999


# Chunked loss


def head_case(seed: int, tied: bool, dtype: Any, shape: tuple[int, int]) -> tuple[Any, ...]:
    rng, dim, vocab = np.random.default_rng(seed), 12, 37
    x = jnp.asarray(rng.normal(size=(*shape, dim)), dtype)
    kernel = DenseKernel(jnp.asarray(rng.normal(size=(vocab, dim) if tied else (dim, vocab)), jnp.float32), not tied)
    targets = jnp.asarray(rng.integers(0, vocab, shape), jnp.int32)
    return x, kernel, targets, jnp.asarray(rng.random(shape) * (rng.random(shape) > 0.3), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("shape", "logits"), [((1, 23), 1), ((1, 23), 37 * 5), ((3, 7), 37 * 6), ((2, 5), 1 << 20), ((1, 1), 40)]
)
def test_chunked_loss_equals_the_full_loss(shape: tuple[int, int], logits: int, tied: bool) -> None:
    """Covers lengths that the chunk size does not divide, zero weights and a z-loss."""
    x, kernel, *rest = head_case(0, tied, jnp.float32, shape)
    runs = [
        jax.jit(jax.value_and_grad(lambda x, k, head=head: head(x, k, *rest, 1e-2), (0, 1), has_aux=True))
        for head in (Whole(), ChunkedLoss(logits))
    ]
    ((one, entropy), grads), ((other, entropy_2), grads_2) = (run(x, kernel) for run in runs)
    assert abs(one - other) < 1e-6 * max(1, abs(one)) and abs(entropy - entropy_2) < 1e-6 * max(1, abs(entropy))
    assert all(max_error(a, b) < 1e-5 for a, b in zip(*map(jax.tree.leaves, (grads, grads_2)), strict=True))
    assert ChunkedLoss(logits)(x, kernel, *rest, 1e-2)[0] == pytest.approx(float(one), rel=1e-6)  # without gradients


@pytest.mark.slow
def test_head_gradient_is_float32_with_bfloat16_activations() -> None:
    x, kernel, *rest = head_case(1, False, jnp.bfloat16, (2, 9))
    runs = [jax.grad(lambda x, k, head=head: head(x, k, *rest, 0.0)[0], (0, 1)) for head in (Whole(), ChunkedLoss(99))]
    (by_x, by_kernel), (by_x_2, by_kernel_2) = (run(x, kernel) for run in runs)
    by_kernel, by_kernel_2 = by_kernel.dense(), by_kernel_2.dense()
    assert by_x.dtype == by_x_2.dtype == jnp.bfloat16 and by_kernel.dtype == by_kernel_2.dtype == jnp.float32
    assert max_error(by_x, by_x_2) < 0.05 and max_error(by_kernel, by_kernel_2) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("count", [700, pytest.param(900, marks=pytest.mark.slow)])
def test_mean_over_tokens_does_not_bias_bfloat16_gradients(count: int) -> None:
    """1 / 700 and 1 / 900 are 0.13 % and 0.25 % from the nearest bfloat16."""
    x, kernel, *rest = head_case(2, False, jnp.bfloat16, (1, count))
    wanted, ours = (
        np.asarray(jax.grad(lambda x, head=head: head(x, kernel, *rest, 0.0)[0] / count)(x), np.float64)
        for head in (Whole(), ChunkedLoss(256 * 29))
    )
    assert abs(np.sum(ours * wanted) / np.sum(wanted * wanted) - 1) < 3e-4


@pytest.mark.program
def test_chunk_size_is_per_device(eight: Callable[..., Any]) -> None:
    """The number of chunks, and with it of head gathers, does not grow with the rows that a mesh adds."""
    assert {loops({"fsdp": 1}, 2), eight(loops, {"fsdp": 8}, 16), eight(loops, {"fsdp": 2, "expert": 4}, 16)} == {5}


def loops(mesh: dict[str, int], rows: int) -> int:
    """Number of chunks for rows of 9 tokens, with a limit of 4 tokens per chunk and device."""
    made = nnxmoe.make_mesh(**mesh, devices=jax.devices()[: math.prod(mesh.values())])
    config = config_from_hf(TINY["llama"])
    model = model_class(config)(config, dataclasses.replace(PLAIN, mesh=made), rngs=None)
    step = Step(model, optax.sgd(0.1), Objective(head=ChunkedLoss(2 * 2 * config.vocab_size)))
    batch = {"tokens": jax.ShapeDtypeStruct((rows, 9), jnp.int32)}
    text = str(jax.make_jaxpr(step.definition.step)(step.shapes(), batch))
    found = {int(length) for length in re.findall(r"length=(\d+)", text)} - {config.num_hidden_layers}
    assert len(found) == 1, found
    return found.pop()


@pytest.mark.program
@pytest.mark.parametrize("tied", [False, True])
def test_chunked_loss_never_materialises_all_logits(tied: bool) -> None:
    """With a 128k vocabulary and 8k tokens it needs under 1/8 of the temporary bytes, the head gradient aside."""
    vocab, dim, length = 128_000, 64, 8192

    def temporary(head: Any) -> int:
        def total(x: Any, kernel: Any, targets: Any, weights: Any) -> Any:
            return head(x, DenseKernel(kernel, not tied), targets, weights, 1e-4)[0]

        kernel = (vocab, dim) if tied else (dim, vocab)
        shapes = [((1, length, dim), "bfloat16"), (kernel, "float32"), ((1, length), "int32"), ((1, length), "float32")]
        given = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        return jax.jit(jax.grad(total, (0, 1))).lower(*given).compile().memory_analysis().temp_size_in_bytes

    assert temporary(ChunkedLoss()) - vocab * dim * 4 < temporary(Whole()) / 8


@pytest.mark.program
def test_head_gradients_share_an_optimization_barrier() -> None:
    """XLA:TPU postpones the reduction in large programs only, so this tests the barrier and not the schedule."""

    def total(x: Any, kernel: Any) -> Any:
        targets, weights = jnp.zeros((1, 8), jnp.int32), jnp.ones((1, 8))
        return ChunkedLoss()(x, DenseKernel(kernel), targets, weights, 0.0)[0]

    x, kernel = jax.ShapeDtypeStruct((1, 8, 4), jnp.bfloat16), jax.ShapeDtypeStruct((32, 4), jnp.float32)
    program = jax.jit(jax.grad(total, (0, 1))).lower(x, kernel).as_text()
    assert re.findall(r"optimization_barrier .* : (.*)", program) == ["tensor<1x8x4xbf16>, tensor<32x4xf32>"]


# Targets, packing and accumulation


def test_targets_and_loss_weights() -> None:
    batch = {
        "tokens": np.array([[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 1, 2]]),
        "segment_ids": np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]]),
        "loss_mask": np.array([[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 0, 1]]),
    }
    targets, counts = targets_of(batch)
    assert targets[0, :5].tolist() == [2, 3, 4, 5, 0]
    assert counts.tolist() == [[1, 1, 0, 1, 0, 0], [0, 0, 1, 0, 1, 0]]
    given = {"tokens": batch["tokens"], "targets": batch["tokens"], "loss_mask": batch["loss_mask"]}
    assert targets_of(given)[1].tolist() == batch["loss_mask"].tolist()


@pytest.mark.parametrize(
    "kind",
    ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mixtral", "deepseek_v3"))],
)
def test_packed_documents_train_as_separate_rows(kind: str) -> None:
    """Compares the loss, including the router losses, and all gradients."""
    model = build_tiny(kind, PLAIN)
    lengths, rng = [5, 3, 8, 1, 6], np.random.default_rng(0)
    documents = [rng.integers(0, 53, n) for n in lengths]
    fields = {name: np.zeros((2, 13), np.int32) for name in ("tokens", "segment_ids", "positions")}
    for row, members in enumerate([[0, 2], [1, 3, 4]]):
        at = 0
        for segment, i in enumerate(members):
            part = slice(at, at + lengths[i])
            fields["tokens"][row, part], fields["segment_ids"][row, part] = documents[i], segment + 1
            fields["positions"][row, part] = np.arange(lengths[i])
            at += lengths[i]
    alone = {name: np.zeros((5, 8), np.int32) for name in ("tokens", "attention_mask")}
    for i, document in enumerate(documents):
        alone["tokens"][i, : lengths[i]], alone["attention_mask"][i, : lengths[i]] = document, 1
    objective = Objective(z_loss=1e-3, balance=0.1, router_z_loss=1e-2)
    one, other = (gradients(model, objective, batch) for batch in (fields, alone))
    assert abs(one[0] - other[0]) < 1e-6 * 5
    for name, grad in one[1].items():
        assert max_error(grad, other[1][name]) < 1e-5, name


def gradients(model: nnxmoe.CausalLM, objective: Objective, batch: Any) -> tuple[Any, dict[str, Any]]:
    step = Step(model, optax.sgd(1.0), objective)
    state = step.init()
    grads, losses = jax.jit(step.definition.gradients)(state, batch, state.key)
    return losses.total, grads


@pytest.mark.slow
def test_gradient_accumulation_equals_the_whole_batch() -> None:
    """The parts have different numbers of real tokens."""
    model = build_tiny("mixtral", PLAIN)
    tokens = random_tokens(6, 9)
    mask = (np.arange(9) < np.array([[9], [2], [5], [7], [1], [9]])).astype(np.int32)
    batch, objective = {"tokens": tokens, "attention_mask": mask}, Objective(z_loss=1e-2)
    states = []
    for parts in (1, 3):
        step = Step(model, optax.sgd(0.1), objective, accumulate=parts)
        state, report = step(step.init(), batch)
        states.append((state.params, report.losses.cross_entropy, report.losses.load, report.losses.tokens))
    for other in states[1:]:
        for a, b in zip(jax.tree.leaves(states[0]), jax.tree.leaves(other), strict=True):
            assert max_error(a, b) < 1e-5


@pytest.mark.slow
def test_router_losses_are_averaged_over_accumulated_parts() -> None:
    """The balance and router terms are means over the parts, not sums."""
    model, losses = build_tiny("mixtral", PLAIN), []
    batch = {"tokens": np.repeat(random_tokens(2, 9), 2, axis=0)}  # part i takes every second row, from row i
    for parts in (1, 2):
        step = Step(model, optax.sgd(0.1), Objective(balance=0.5, router_z_loss=0.5), accumulate=parts)
        _, report = step(step.init(), batch)
        losses.append((report.losses.total, report.losses.balance, report.losses.router_z))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


# Router bias and non-finite values


@pytest.mark.slow
@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_router_bias_is_updated_by_the_load_only(scan: bool) -> None:
    """It moves by ``bias_rate`` towards the mean load after the optimizer step, without weight decay or gradient."""
    model = build_tiny("deepseek_v3", nnxmoe.Strategy(stacking=stacking_of(scan)))
    before = nnx.to_flat_state(nnx.state(model, RouterBias))
    step = Step(model, optax.adamw(0.1, weight_decay=0.9), bias_rate=0.25)
    state = step.init()
    assert not any("bias" in name and "router" in name for name in step.names)
    state, report = step(state, {"tokens": random_tokens(3, 11)})
    after = dict(nnx.to_flat_state(nnx.state(step.model(state), RouterBias)))
    row = 0
    for path, variable in before:
        values, moved = (np.atleast_2d(np.asarray(v.get_value())) for v in (variable, after[path]))
        for old, new in zip(values, moved, strict=True):
            wanted = balance.update_bias(jnp.asarray(old), report.losses.load[row], 0.25)
            np.testing.assert_array_equal(new, wanted)
            row += 1
    assert row == len(report.losses.load) == 2 and int(report.losses.load.sum()) == 2 * 33 * 3


@pytest.mark.slow
def test_non_finite_gradients_skip_the_update() -> None:
    model = build_tiny("llama", PLAIN)
    model.stacks[0].layer.feed_forward.down.kernel.set_value(
        model.stacks[0].layer.feed_forward.down.kernel.get_value().at[1, 3].set(jnp.nan)
    )
    step = Step(model, optax.adam(0.1))
    start = step.init()
    state, report = step(step.init(), {"tokens": random_tokens(2, 6)})
    finite = dict(zip(step.names, np.asarray(report.finite).tolist(), strict=True))
    assert [name for name in finite if "head" in name] and not any(ok for name, ok in finite.items() if "q/" in name)
    for name, value in state.params.items():
        np.testing.assert_array_equal(value, start.params[name])
    jax.tree.map(np.testing.assert_array_equal, state.moments, start.moments)


# Dtypes and memory


@pytest.mark.slow
def test_bfloat16_models_train_float32_master_weights() -> None:
    """Small updates accumulate, and the resulting model has its original dtypes."""
    model = build_tiny("mixtral", nnxmoe.Strategy())
    fields = {"tokens": random_tokens(2, 7)}
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.state(model))
    nnx.update(model, narrow)
    model.dtype = jnp.dtype(jnp.bfloat16)
    step = Step(model, optax.sgd(1e-5))
    state = step.init()
    assert {value.dtype for value in state.params.values()} == {jnp.dtype(jnp.float32)}
    first = {name: np.asarray(value) for name, value in state.params.items()}
    for _ in range(3):
        state, _ = step(state, fields)
    assert all((np.asarray(value) != first[name]).any() for name, value in state.params.items() if "kernel" in name)
    out = step.model(state)
    assert {v.dtype for _, v in nnx.to_flat_state(nnx.state(out))} == {jnp.dtype(jnp.bfloat16)}
    assert out(fields["tokens"]).logits.dtype == jnp.float32 and out.dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "length"),
    [
        *(pytest.param(kind, 128, marks=pytest.mark.slow) for kind in growth.KINDS),
        ("llama", 256),
    ],
)
def test_each_remat_layer_stores_only_its_input(kind: str, length: int) -> None:
    """Beyond its gradients, which all exist before the update. Length 256 uses blockwise attention."""
    found = growth.measure(kind, (4, 8), length=length)
    print(found)
    assert found.layer <= found.inputs + found.gradients + 256  # the expert load


# Errors


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": np.ones((2, 3), int)}, "unknown field 'input_ids' in a batch: the fields are tokens"),
        ({"loss_mask": np.ones((2, 3), int)}, r"a batch needs tokens \[B, T\], got loss_mask"),
        ({"tokens": np.ones(3, int)}, r"tokens has the shape \[3\]: it must be \[B, T\]"),
        (
            {"tokens": np.ones((2, 3), int), "targets": np.ones((2, 2), int)},
            r"targets has the shape \[2, 2\], but tokens has",
        ),
        ({"tokens": np.ones((3, 3), int)}, "3 rows cannot be split into accumulate=2 parts"),
    ],
)
def test_malformed_batches(batch: Any, message: str) -> None:
    step = Step(build_tiny("llama", PLAIN), optax.sgd(0.1), accumulate=2)
    with pytest.raises(ValueError, match=message):
        step(step.init(), batch)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_optimizers_get_value_grad_and_value_fn(accumulate: int) -> None:
    """Line searches and plateau schedules take these for the whole batch, also with accumulation."""

    def update(updates: Any, state: Any, params: Any, *, value: Any, grad: Any, value_fn: Any) -> Any:
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, grad)
        return updates, jnp.stack([value, value_fn(params), value_fn(moved)])

    asking = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(3), update)
    step = Step(build_tiny("mixtral", PLAIN), optax.chain(asking, optax.sgd(0.1)), accumulate=accumulate)
    batch = {"tokens": random_tokens(2, 9)}
    state, report = step(step.init(), batch)
    (value, again, moved), _ = state.moments
    state, second = step(state, batch)
    assert value == report.losses.total == pytest.approx(float(again), rel=1e-6)
    assert moved == pytest.approx(float(second.losses.total), rel=1e-6) and moved < value


@pytest.mark.slow
def test_lbfgs_traces() -> None:
    step = Step(build_tiny("llama", PLAIN), optax.lbfgs())
    state, _ = jax.eval_shape(step.definition.step, step.shapes(), {"tokens": jax.ShapeDtypeStruct((2, 9), jnp.int32)})
    assert jax.tree.structure(state) == jax.tree.structure(step.shapes())


@pytest.mark.slow
def test_invalid_settings() -> None:
    model = build_tiny("llama", PLAIN)
    for wrong, message in (({"accumulate": 0}, "accumulate must be"), ({"trainable": nnx.BatchStat}, "no variable")):
        with pytest.raises(ValueError, match=message):
            Step(model, optax.sgd(0.1), **wrong)
    with pytest.raises(ValueError, match="logits=0"):
        ChunkedLoss(0)
