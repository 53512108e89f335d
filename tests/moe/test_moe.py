"""Routing, dispatch and grouped matmul: every fast implementation against a simple one, gradients included."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import nnxmoe
from nnxmoe import (
    AlignedMatmul,
    BlockedMatmul,
    Capacity,
    ChunkedExchange,
    Dense,
    Dropless,
    ExpertParallel,
    MaskedMatmul,
    RaggedAllToAll,
    RaggedDotMatmul,
    Sorted,
)
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear import kernel as kernels
from nnxmoe.layers.linear.lora import LoRA
from nnxmoe.layers.mlp import MLP
from nnxmoe.moe import experts as experts_module
from nnxmoe.moe.block import MoE
from nnxmoe.moe.dispatch import DispatchInfo
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.permute import (
    clip_to_capacity,
    combine,
    compute_gradients_together,
    gather_rows,
    permute,
    sort_by_expert,
    unpermute,
)
from nnxmoe.moe.router import Router, RouterBias
from nnxmoe.moe.selection import BalancedTopK, SigmoidGroupTopK, SoftmaxTopK
from tests.support.arrays import inputs_first, max_error
from tests.support.grouped import GROUPS, problem, product_and_gradients
from tests.support.numpy_decoder import as_weights, sigmoid_weights, softmax_weights
from tests.support.running import PART_TOLERANCE, of_valid, randomise
from tests.support.tiny import build_tiny, random_tokens

# Expert selection


@pytest.mark.parametrize(("count", "k"), [(8, 2), (5, 1), (4, 4), (1, 1)])
def test_softmax_equals_numpy(count: int, k: int) -> None:
    logits = np.random.default_rng(count).standard_normal((3, 7, count)).astype(np.float32) * 3
    routing = SoftmaxTopK(k)(jnp.asarray(logits), None)
    assert routing.experts.shape == routing.weights.shape == (3, 7, k)
    assert max_error(as_weights(routing.experts, routing.weights, count), softmax_weights(logits, k)) < 1e-6
    assert max_error(np.sum(np.asarray(routing.weights), -1), np.ones((3, 7))) < 1e-6
    assert max_error(np.sum(np.asarray(routing.scores), -1), np.ones((3, 7))) < 1e-6
    if k == 1:
        assert np.all(np.asarray(routing.weights) == 1)


@pytest.mark.parametrize("shift", [0.0, -3.0, 5.0])
@pytest.mark.parametrize(
    ("count", "groups", "top_groups", "k"), [(16, 4, 2, 3), (12, 3, 1, 4), (8, 1, 1, 2), (6, 3, 3, 6), (4, 2, 1, 2)]
)
@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_groups_equal_numpy(
    count: int, groups: int, top_groups: int, k: int, normalize: bool, shift: float
) -> None:
    """Includes biases that make every score negative, where masking with 0 would select masked experts."""
    rng = np.random.default_rng(count + k)
    logits = rng.standard_normal((40, count)).astype(np.float32)
    bias = (rng.standard_normal(count) * 0.5 + shift).astype(np.float32)
    select = SigmoidGroupTopK(k, groups, top_groups, normalize, 2.5)
    routing = select(jnp.asarray(logits), jnp.asarray(bias))
    scores = np.asarray(jax.nn.sigmoid(logits))
    wanted = sigmoid_weights(
        scores, bias, k=k, groups=groups, top_groups=top_groups, normalize=normalize, scale=2.5
    )  # in float32 up to here, so that the choices agree
    assert max_error(as_weights(routing.experts, routing.weights, count), wanted) < 1e-5
    assert max_error(routing.scores, scores) == 0  # affinities exclude the bias


def test_softmax_unnormalised_and_scaled() -> None:
    logits = jax.random.normal(jax.random.key(0), (5, 8))
    plain, usual = SoftmaxTopK(3, normalize=False)(logits, None), SoftmaxTopK(3)(logits, None)
    assert max_error(plain.weights, jnp.take_along_axis(plain.scores, plain.experts, -1)) == 0
    assert max_error(SoftmaxTopK(3, scale=2.5)(logits, None).weights, 2.5 * usual.weights) < 1e-6
    after = jax.nn.softmax(jnp.take_along_axis(logits, usual.experts, -1), axis=-1)
    assert max_error(usual.weights, after) < 1e-6, "softmax before or after the choice is one"


@pytest.mark.parametrize(("rows", "count", "k"), [((4, 10), 8, 2), ((3, 7), 5, 3), ((1, 1), 4, 4)])
def test_random_routing_is_balanced(rows: tuple[int, ...], count: int, k: int) -> None:
    logits = jax.random.normal(jax.random.key(0), (*rows, count))
    routing = BalancedTopK(k, seed=3)(logits, None)
    load = np.bincount(np.asarray(routing.experts).reshape(-1), minlength=count)
    assert load.max() - load.min() <= 1 and max_error(jnp.sum(routing.weights, -1), np.ones(rows)) < 1e-6
    assert all(len(set(row)) == k for row in np.asarray(routing.experts).reshape(-1, k).tolist())
    again, other = BalancedTopK(k, seed=3)(logits * 2, None), BalancedTopK(k, seed=4)(logits, None)
    assert np.array_equal(routing.experts, again.experts)
    assert math.prod(rows) == 1 or not np.array_equal(routing.experts, other.experts)


@pytest.mark.slow
def test_nan_logits_give_nan_weights() -> None:
    """Expert ids stay in range, and other tokens are unaffected."""
    logits = jax.random.normal(jax.random.key(0), (6, 8))
    for select in (SoftmaxTopK(2), SigmoidGroupTopK(2, 4, 2, True, 2.5)):
        routing, sound = select(logits.at[2, 3].set(jnp.nan), None), select(logits, None)
        assert np.isnan(routing.weights[2]).any()
        assert 0 <= int(routing.experts.min()) and int(routing.experts.max()) < 8
        rest = np.asarray([0, 1, 3, 4, 5])
        assert np.array_equal(routing.weights[rest], sound.weights[rest])


@pytest.mark.slow
def test_underflowing_affinities_have_a_gradient() -> None:
    def of(logits: Any) -> Any:
        routing = SigmoidGroupTopK(2, 4, 2, True, 2.5)(logits, None)
        return jnp.sum(routing.weights * jnp.arange(1.0, 3.0))

    logits = jnp.full((1, 8), -120.0)
    assert np.isfinite(jax.grad(of)(logits)).all() and float(of(logits)) == 0
    usual = jax.random.normal(jax.random.key(0), (4, 8))
    step = jnp.zeros_like(usual).at[1, 2].set(1e-2)
    slope = (of(usual + step) - of(usual - step)) / 2e-2
    assert abs(float(jax.grad(of)(usual)[1, 2] - slope)) < 1e-3


@pytest.mark.slow
def test_ties_go_to_the_lower_index() -> None:
    """Exact ties among experts and among groups; integer logits produce hundreds of them."""
    flat = SigmoidGroupTopK(3, 4, 2, True, 1.0)(jnp.zeros((1, 8)), jnp.zeros(8))
    assert np.asarray(flat.experts).tolist() == [[0, 1, 2]]
    assert np.asarray(SoftmaxTopK(2)(jnp.zeros((1, 5)), None).experts).tolist() == [[0, 1]]
    logits = np.random.default_rng(0).integers(-1, 2, (200, 12)).astype(np.float32)
    bias = np.full(12, -1.0, np.float32)
    routing = SigmoidGroupTopK(4, 3, 2, True, 1.0)(jnp.asarray(logits), jnp.asarray(bias))
    scores = np.asarray(jax.nn.sigmoid(logits))
    wanted = sigmoid_weights(scores, bias, k=4, groups=3, top_groups=2, normalize=True, scale=1.0)
    assert max_error(as_weights(routing.experts, routing.weights, 12), wanted) < 1e-6


def test_underflowing_affinities_give_zero_weights() -> None:
    logits = jnp.full((2, 8), -200.0)  # affinities of exactly 0: 0 / (0 + 1e-20) is 0, not NaN
    routing = SigmoidGroupTopK(2, 4, 2, True, 2.5)(logits, None)
    assert np.all(np.asarray(routing.weights) == 0)


def test_the_correction_bias_gets_no_gradient() -> None:
    select, logits = SigmoidGroupTopK(2, 2, 1, True, 2.5), jnp.asarray(np.random.default_rng(0).standard_normal((5, 6)))
    grads = jax.grad(lambda b: jnp.sum(jnp.sin(select(logits, b).weights)))(jnp.full(6, 0.1))
    assert np.all(np.asarray(grads) == 0)
    router = Router(4, 6, select, bias=True, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))
    assert isinstance(router.bias, RouterBias) and not isinstance(router.bias, nnx.Param)
    assert {path[-1] for path, _ in nnx.to_flat_state(nnx.state(router, nnx.Param))} == {"kernel"}


def test_router_computes_in_float32() -> None:
    """Also in a bfloat16 model; the correction bias is always float32."""
    router = Router(64, 8, SoftmaxTopK(2), bias=True, dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(0))
    assert router.kernel.dtype == jnp.bfloat16 and router.bias.dtype == jnp.float32
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 64)), jnp.bfloat16)
    routing = router(x, of_valid(jnp.ones((2, 3), bool)))
    exact = np.asarray(x, np.float64) @ inputs_first(router.kernel).astype(np.float64)
    assert routing.logits.dtype == routing.weights.dtype == routing.scores.dtype == jnp.float32
    assert max_error(routing.logits, exact) < PART_TOLERANCE
    assert routing.valid is not None and routing.valid.shape == (2, 3)


@pytest.mark.program
def test_router_products_have_full_precision() -> None:
    """TPUs and NVIDIA GPUs round float32 operands by default; the tests' global precision is disabled here."""
    router = Router(6, 4, SoftmaxTopK(2), bias=False, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))
    labels = {"inputs": 1, "eager_sharding": False}
    a = nnx.LoRAParam(jnp.ones((2, 6)), out_sharding=("rank", "embed"), **labels)
    router.lora = nnx.data(LoRA(a, nnx.LoRAParam(jnp.ones((4, 2)), out_sharding=("router", "rank"), **labels), 1.0))
    graph, state = nnx.split(router)
    rows, order = permute(jnp.ones((3, 6)), jnp.zeros((3, 2), jnp.int32), 6, 1)

    def route(state: Any, x: Any) -> Any:
        routing = nnx.merge(graph, state)(x)
        return jnp.sum(combine(rows, order, routing.weights)) + jnp.sum(routing.logits)

    with jax.default_matmul_precision(None):
        jaxpr = jax.make_jaxpr(jax.grad(route, (0, 1)))(state, jnp.ones((3, 6)))
        assert products(jax.make_jaxpr(jnp.dot)(jnp.ones(3), jnp.ones(3)).jaxpr) == [None]
    found = products(jaxpr.jaxpr)
    assert len(found) >= 9 and set(found) == {(jax.lax.Precision.HIGHEST,) * 2}


def products(jaxpr: Any) -> list[Any]:
    """Precision of every dot_general, including inner jaxprs."""
    found = [e.params["precision"] for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    return found + [p for e in jaxpr.eqns for inner in jaxprs_in_params(e.params) for p in products(inner)]


# Grouped matmul
BACKENDS = {
    "blocked": BlockedMatmul(),
    "blocked-1": BlockedMatmul(1),
    "blocked-3": BlockedMatmul(3),
    "blocked-64": BlockedMatmul(64),
    "ragged": RaggedDotMatmul(),
    "aligned-1": AlignedMatmul(BlockedMatmul(), 1),
    "aligned-4": AlignedMatmul(BlockedMatmul(4), 4),
    "aligned-8": AlignedMatmul(RaggedDotMatmul(), 8),
}


def by_hand(name: str, rows: Any, kernel: Any) -> np.ndarray:
    count, sizes = GROUPS[name]
    out, start = np.zeros((count, 5)), 0
    for group, size in enumerate(sizes):
        part = slice(start, start + size)
        out[part] = np.asarray(rows, np.float64)[part] @ np.asarray(kernel, np.float64)[group]
        start += size
    return out


@pytest.mark.parametrize("name", GROUPS)
def test_grouped_matmul_backends_equal_the_oracle(name: str) -> None:
    """Forward and backward against MaskedMatmul and a loop over groups, in float32."""
    arrays = problem(name, jnp.float32)
    wanted = product_and_gradients(MaskedMatmul(), *arrays)
    assert max_error(wanted[0], by_hand(name, *arrays[:2])) < PART_TOLERANCE
    for label, backend in BACKENDS.items():
        got = product_and_gradients(backend, *arrays)
        for a, b, what in zip(got, wanted, ("y", "d rows", "d kernel"), strict=True):
            assert a.dtype == b.dtype and max_error(a, b) < PART_TOLERANCE, (label, what)
        used = sum(GROUPS[name][1])
        for a in got[:2]:
            assert np.all(np.asarray(a)[used:] == 0), (label, "rows that belong to no group")
        empty = np.asarray(GROUPS[name][1]) == 0
        assert np.all(np.asarray(got[2])[empty] == 0), (label, "kernels of empty groups")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uneven", "rows-left-over", "one-row"])
def test_grouped_matmul_in_bfloat16(name: str) -> None:
    """bfloat16 in and out with float32 accumulation: within one rounding of the exact product."""
    arrays = problem(name, jnp.bfloat16)
    wanted = product_and_gradients(MaskedMatmul(), *(a.astype(jnp.float32) for a in arrays[:2]), arrays[2])
    for label in ("masked", "blocked", "blocked-3", "ragged"):
        got = product_and_gradients({"masked": MaskedMatmul(), **BACKENDS}[label], *arrays)
        for a, b, what in zip(got, wanted, ("y", "d rows", "d kernel"), strict=True):
            assert a.dtype == jnp.bfloat16, (label, what)
            assert max_error(a, b) <= 0.02 * max(1.0, float(jnp.max(jnp.abs(b), initial=0))), (label, what)


@pytest.mark.slow
def test_rows_without_a_group_do_not_reach_the_output() -> None:
    """Rows after the last group are the unused end of a buffer and may be NaN; zero times NaN is NaN."""
    rows, kernel, sizes = problem("rows-left-over", jnp.float32)
    clean = product_and_gradients(MaskedMatmul(), rows, kernel, sizes)
    spoiled = rows.at[7:].set(jnp.nan)
    for label, backend in {"masked": MaskedMatmul(), **BACKENDS}.items():
        y = backend(spoiled, kernel, sizes)
        assert max_error(y, clean[0]) < PART_TOLERANCE, label


@pytest.mark.parametrize("name", ["blocked", "blocked-3", "aligned-4"])
def test_rows_without_a_group_do_not_reach_the_gradients(name: str) -> None:
    """NaN in these rows and in their output gradients is ignored."""
    rows, kernel, _ = problem("uneven", jnp.float32)
    sizes = jnp.asarray([1, 4, 0, 2])

    def gradients(beyond: float) -> Any:
        _, pull = jax.vjp(lambda r, k: BACKENDS[name](r, k, sizes), rows.at[7:].set(beyond), kernel)
        return pull(jnp.ones((rows.shape[0], kernel.shape[2])).at[7:].set(beyond))

    for spoiled, clean in zip(gradients(jnp.nan), gradients(0.0), strict=True):
        assert max_error(spoiled, clean) < PART_TOLERANCE


@pytest.mark.program
def test_group_sizes_do_not_recompile() -> None:
    """One compilation serves every distribution of rows over groups."""
    rows, kernel, _ = problem("uneven", jnp.float32)
    for backend in (MaskedMatmul(), BlockedMatmul(), BlockedMatmul(4), RaggedDotMatmul()):
        run = jax.jit(backend)
        for sizes in ([1, 9, 0, 13], [0, 0, 0, 23], [6, 6, 6, 5], [0, 2, 0, 0]):
            counts = jnp.asarray(sizes)
            assert max_error(run(rows, kernel, counts), MaskedMatmul()(rows, kernel, counts)) < 1e-5
        assert run._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (count, _) in GROUPS.items() if count])
def test_aligned_groups_are_multiples_of_the_block(name: str) -> None:
    """Groups start at block boundaries, and the buffer holds all rows."""
    rows, kernel, sizes = problem(name, jnp.float32)
    seen: list[Any] = []

    def spy(rows: Any, kernel: Any, sizes: Any) -> Any:
        seen.append((rows.shape[0], np.asarray(sizes)))
        return MaskedMatmul()(rows, kernel, sizes)

    assert max_error(AlignedMatmul(spy, 4)(rows, kernel, sizes), MaskedMatmul()(rows, kernel, sizes)) < PART_TOLERANCE
    (room, filled), have = seen[0], np.asarray(sizes)
    assert np.array_equal(filled, -(-have // 4) * 4) and room % 4 == 0 and room >= filled.sum()


def test_aligned_rejects_invalid_blocks() -> None:
    with pytest.raises(ValueError, match="block=0"):
        AlignedMatmul(BlockedMatmul(), 0)


def test_blocked_stores_only_its_inputs_for_backward() -> None:
    """Residuals of size rows times groups would not fit into memory."""
    rows, kernel, sizes = problem("uneven", jnp.float32)
    _, pull = jax.vjp(lambda r, k: BlockedMatmul(4)(r, k, sizes), rows, kernel)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull))
    assert kept <= rows.nbytes + kernel.nbytes + 16 * sizes.nbytes


def count_products(monkeypatch: pytest.MonkeyPatch, backend: Any, sizes: list[int]) -> int:
    """Number of matmuls that a backend executes, counted by a debug callback."""
    seen: list[int] = []
    true = kernels.matmul

    def counted(x: Any, kernel: Any, *transpose: bool) -> Any:
        jax.debug.callback(lambda _: seen.append(1), x[:1, :1])
        return true(x, kernel, *transpose)

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "matmul", counted)
        rng = np.random.default_rng(0)
        rows = jnp.asarray(rng.standard_normal((sum(sizes), 6)), jnp.float32)
        kernel = jnp.asarray(rng.standard_normal((len(sizes), 6, 5)), jnp.float32)
        jax.block_until_ready(jax.jit(backend.__call__)(rows, kernel, jnp.asarray(sizes, jnp.int32)))
        jax.effects_barrier()
    return len(seen)


@pytest.mark.slow
def test_work_scales_with_rows_and_not_with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense oracle MaskedMatmul scales with experts, which validates the counter."""
    few, many = [8, 8, 16, 0], [8, 8, 16, *[0] * 29]
    assert count_products(monkeypatch, MaskedMatmul(), few) == 4
    assert count_products(monkeypatch, MaskedMatmul(), many) == 32
    assert count_products(monkeypatch, BlockedMatmul(4), few) == 8
    assert count_products(monkeypatch, BlockedMatmul(4), many) == 8
    assert count_products(monkeypatch, BlockedMatmul(4), [16, 16, 32, 0]) == 16
    assert count_products(monkeypatch, BlockedMatmul(4), [0] * 9) == 0
    scattered = [1 if e % 8 == 0 else 0 for e in range(64)]
    assert count_products(monkeypatch, BlockedMatmul(4), scattered) == 8  # at most one block per non-empty group
    assert count_products(monkeypatch, BlockedMatmul(), scattered) == 8


# Stages of a dispatch


@pytest.mark.parametrize(("rows", "groups"), [(12, 5), (7, 5), (1, 5), (12, 2**28)])
def test_permute_sorts_rows_by_expert_and_unpermute_inverts_it(rows: int, groups: int) -> None:
    """The sort is stable; the out-of-range expert id 5 sorts last; assignments without a row are restored as 0.

    With so many experts that id and index do not fit in one integer, the order is the same.
    """
    ids = np.array([[4, 0], [0, 5], [2, 4], [5, 5], [0, 2], [1, 0]], np.int32)
    x = np.arange(1.0, 13).reshape(6, 2).astype(np.float32)
    order = np.argsort(ids.reshape(-1), kind="stable")[:rows]
    sorted_rows, found = permute(jnp.asarray(x), jnp.asarray(ids), rows, groups)
    np.testing.assert_array_equal(sorted_rows, x[order // 2])
    wanted = np.zeros((12, 2), np.float32)
    wanted[order] = x[order // 2]
    np.testing.assert_array_equal(unpermute(sorted_rows, found), wanted)


@pytest.mark.program
def test_permute_and_combine_have_no_scatter_in_backward() -> None:
    """Both passes use gathers; the transpose of plain indexing is a scatter-add."""
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 4, (6, 2)), jnp.int32)
    x, weights = jnp.ones((6, 3)), jnp.ones((6, 2))

    def ours(x: jax.Array, weights: jax.Array) -> jax.Array:
        rows, order = permute(x, ids, 12, 4)
        return jnp.sum(jnp.sin(combine(jnp.cos(rows), order, weights)))

    def plain(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x[jnp.argsort(ids.reshape(-1)) // 2]) * weights.reshape(-1, 1))

    programs = [str(jax.make_jaxpr(jax.grad(f, argnums=(0, 1)))(x, weights)) for f in (ours, plain)]
    assert ["scatter-add" in program or "scatter_add" in program for program in programs] == [False, True]


@pytest.mark.parametrize("rows", [12, 7, 1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_combine_derivatives_match_einsum(dtype: Any, rows: int) -> None:
    """First and second derivatives, forward and reverse mode, with dropped rows, empty experts and padding (id 4)."""
    rng = np.random.default_rng(0)
    ids = jnp.asarray([[0, 3], [4, 4], [3, 0], [2, 0], [0, 2], [4, 4]], jnp.int32)
    order = sort_by_expert(ids.reshape(-1), rows, 4)
    values = jnp.asarray(rng.standard_normal((rows, 8)), dtype)
    weights = jnp.where(ids < 4, jnp.asarray(rng.random((6, 2)), jnp.float32), 0)
    d_y = jnp.asarray(rng.standard_normal((6, 8)), dtype).astype(jnp.float32)
    selected = jax.nn.one_hot(order.row.reshape(6, 2), rows)

    def oracle(values: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.einsum("nxr,nx,rd->nd", selected, weights, values.astype(jnp.float32))

    def run(function: Any) -> Any:
        y, vjp = jax.vjp(function, values, weights)
        d_values = jax.jvp(function, (values, weights), (values + 1, weights * weights))[1]
        curvature = jax.grad(lambda w: jnp.sum(jax.vjp(function, values, w)[1](d_y)[0].astype(jnp.float32) ** 2))
        return y, *vjp(d_y), d_values, curvature(weights)

    limit = 1e-6 if dtype == jnp.float32 else 2e-2
    found = run(lambda values, weights: combine(values, order, weights))
    for ours, wanted in zip(found, run(oracle), strict=True):
        assert ours.dtype == wanted.dtype and max_error(ours, wanted) <= limit * max(1, float(jnp.abs(wanted).max()))


@pytest.mark.program
def test_gradient_of_combine_has_no_float32_copy_of_the_rows() -> None:
    """Only the gathered rows and the gathered gradient have this size, in the rows' dtype. XLA may copy one of them."""
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 4, (512, 2)), jnp.int32)
    order = sort_by_expert(ids.reshape(-1), 1024, 4)
    rows, weights = jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16), jax.ShapeDtypeStruct((512, 2), jnp.float32)

    def gradients(rows: jax.Array, weights: jax.Array, d_y: jax.Array) -> Any:
        _, vjp = jax.vjp(lambda rows, weights: combine(rows, order, weights).astype(jnp.bfloat16), rows, weights)
        return vjp(d_y)

    program = jax.jit(gradients).lower(rows, weights, jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1.6 * (1024 * 256 * 2 * 2)


@pytest.mark.program
def test_gradients_are_computed_together_but_not_of_frozen_arrays() -> None:
    """The arrays are used in a rematerialized scan."""

    def loss(x: Any, kernel: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, _: None) -> tuple[Any, None]:
            return jnp.sin(jnp.dot(*compute_gradients_together(x, kernel))), None

        return jnp.sum(jax.lax.scan(layer, x, None, length=3)[0])

    for argnums, products, results in ((0, 3, 1), ((0, 1), 4, 2)):  # forward, recomputation, one or two gradients
        program = str(jax.make_jaxpr(jax.grad(loss, argnums))(jnp.ones((2, 4)), jnp.ones((4, 4))))
        (barrier,) = (line for line in program.splitlines() if "optimization_barrier" in line)
        assert (program.count("dot_general["), barrier.split("=")[0].count(":")) == (products, results)


# Dispatch


def make_moe(
    dispatch: Any, matmul: Any = None, *, count: int = 5, k: int = 2, shared: bool = True, seed: int = 0
) -> MoE:
    kw: dict[str, Any] = {"dtype": jnp.dtype(jnp.float32), "rngs": nnx.Rngs(0)}
    router = Router(8, count, SoftmaxTopK(k), bias=False, **kw)
    experts = Experts(8, 7, count, matmul=matmul or MaskedMatmul(), **kw)
    moe = MoE(router, experts, dispatch, MLP(8, 6, bias=False, **kw) if shared else None)
    return randomise(moe, seed)


def run_moe(moe: MoE, x: Any, valid: Any = None, gradients: bool = True) -> tuple[Any, DispatchInfo, Any]:
    """Output, DispatchInfo, and gradients of x and every parameter for a loss over valid tokens."""
    graph, state = nnx.split(moe)
    keep = jnp.ones(x.shape[:2]) if valid is None else jnp.asarray(valid, jnp.float32)

    def loss(state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        y, info = nnx.merge(graph, state)(x, of_valid(valid))
        return jnp.sum(jnp.sin(y) * keep[..., None]), (y, info.dispatch)

    if not gradients:
        _, (y, info) = jax.jit(loss)(state, x)
        return y, info, None
    grads, (y, info) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(state, x)
    return y, info, grads


def inputs(batch: int, length: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((batch, length, 8)), jnp.float32)


@pytest.mark.parametrize(
    ("k", "masked"),
    [pytest.param(1, False, marks=pytest.mark.slow), (2, True), pytest.param(5, False, marks=pytest.mark.slow)],
)
def test_dispatches_agree(k: int, masked: bool) -> None:
    """Outputs, loads and all gradients (x, router, experts, shared) of every dispatch with every backend."""
    x, valid = inputs(2, 9), None
    if masked:
        valid = jnp.ones((2, 9), bool).at[0, :4].set(False).at[1, -2:].set(False)
    keep = np.ones((2, 9), bool) if valid is None else np.asarray(valid)
    wanted, wanted_info, wanted_grads = run_moe(make_moe(Dense(), k=k), x, valid)
    assert int(wanted_info.dropped) == 0
    assert int(jnp.sum(wanted_info.load)) == keep.sum() * k
    assert all(float(jnp.max(jnp.abs(g))) > 0 for g in jax.tree.leaves(wanted_grads) if k > 1)
    ways: list[tuple[Any, Any]] = [(Sorted(), BlockedMatmul()), (Capacity(5.0), MaskedMatmul())]
    if masked:
        ways += [
            (Sorted(), MaskedMatmul()),
            (Sorted(), RaggedDotMatmul()),
            (Dense(), BlockedMatmul(4)),
            (Capacity(100.0), BlockedMatmul()),
        ]
    for dispatch, matmul in ways:
        y, info, grads = run_moe(make_moe(dispatch, matmul, k=k), x, valid)
        assert max_error(y, wanted, keep) < PART_TOLERANCE, dispatch
        assert int(info.dropped) == 0, dispatch
        assert np.array_equal(info.load, wanted_info.load), dispatch
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True)
        assert all(max_error(a, b) < PART_TOLERANCE for a, b in pairs), (dispatch, matmul)


@pytest.mark.slow
def test_router_kernel_gradient_equals_finite_differences() -> None:
    """Checked where no expert choice flips."""
    x = inputs(1, 4)
    gradient = np.asarray(run_moe(make_moe(Sorted(), BlockedMatmul()), x)[2][0]["router"]["kernel"][...])

    def loss(at: tuple[int, int], step: float) -> float:
        moe = make_moe(Dense())
        moe.router.kernel[...] = moe.router.kernel[...].at[at].add(step)
        return float(jnp.sum(jnp.sin(moe(x)[0])))

    for at in ((0, 0), (2, 3), (4, 7)):
        assert abs((loss(at, 1e-2) - loss(at, -1e-2)) / 2e-2 - gradient[at]) < 2e-3, at


def test_a_shared_expert_is_added_once_and_unweighted() -> None:
    moe, x = make_moe(Dense()), inputs(2, 3)
    alone = make_moe(Dense())
    alone.shared = None
    assert moe.shared is not None
    assert max_error(moe(x)[0] - alone(x)[0], moe.shared(x)) < PART_TOLERANCE


@pytest.mark.slow
def test_zero_tokens() -> None:
    x = jnp.zeros((2, 0, 8))
    for dispatch, matmul in ((Dense(), MaskedMatmul()), (Sorted(), BlockedMatmul()), (Sorted(), RaggedDotMatmul())):
        y, info = make_moe(dispatch, matmul)(x)
        assert y.shape == (2, 0, 8) and int(jnp.sum(info.dispatch.load)) == 0


@pytest.mark.slow
def test_dispatches_agree_in_bfloat16() -> None:
    """Routing is equal, and outputs agree within bfloat16 rounding."""
    x = inputs(2, 9).astype(jnp.bfloat16)
    outs = []
    for dispatch, matmul in (
        (Dense(), MaskedMatmul()),
        (Sorted(), BlockedMatmul()),
        (Sorted(), RaggedDotMatmul()),
        (Capacity(5.0), MaskedMatmul()),
    ):
        moe = make_moe(dispatch, matmul)
        nnx.update(moe, jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.state(moe)))
        y, info = moe(x)
        assert y.dtype == jnp.bfloat16
        outs.append((np.asarray(y, np.float32), np.asarray(info.routing.experts)))
    for y, experts in outs[1:]:
        assert np.array_equal(experts, outs[0][1])
        assert max_error(y, outs[0][0]) < 0.05


def test_combine_inverts_sorting() -> None:
    rng = np.random.default_rng(0)
    experts = np.stack([rng.permutation(6)[:3] for _ in range(10)])
    weights, x = jnp.asarray(rng.random((10, 3)), jnp.float32), inputs(2, 5).reshape(10, 8)
    order = sort_by_expert(jnp.asarray(experts.reshape(-1)), 30, 6)
    rows = gather_rows(x, order.assignment // 3, order.row.reshape(10, 3))
    ids = experts.reshape(-1)[np.asarray(order.assignment)]
    assert np.all(np.diff(ids) >= 0) and np.array_equal(np.asarray(order.assignment)[order.row], np.arange(30))
    ties = np.diff(np.asarray(order.assignment))[np.diff(ids) == 0]
    assert np.all(ties > 0), "the sort is stable"
    assert np.array_equal(rows, np.asarray(x)[np.asarray(order.assignment) // 3])
    assert max_error(combine(rows, order, weights), x * jnp.sum(weights, axis=-1, keepdims=True)) < PART_TOLERANCE


@pytest.mark.program
def test_gather_rows_has_a_gather_as_backward() -> None:
    """The gradient equals that of plain indexing, with rows cut off, and compiles without a scatter."""
    ids, x = jnp.asarray([2, 0, 1, 2, 0, 0, 3, 1, 3, 2]), inputs(1, 5)[0]
    order, weights = sort_by_expert(ids, 7, 4), jnp.arange(1.0, 57).reshape(7, 8)

    def ours(x: Any) -> Any:
        return jnp.sum(weights * gather_rows(x, order.assignment // 2, order.row.reshape(5, 2)) ** 2)

    def plain(x: Any) -> Any:
        return jnp.sum(weights * x[order.assignment // 2] ** 2)

    assert max_error(jax.grad(ours)(x), jax.grad(plain)(x)) < 1e-5
    assert "scatter" not in jax.jit(jax.grad(ours)).lower(x).compile().as_text()
    assert "scatter" in jax.jit(jax.grad(plain)).lower(x).compile().as_text()
    assert np.array_equal(clip_to_capacity(jnp.asarray([3, 0, 4, 2]), 5), [3, 0, 2, 0])


# Capacity


def expected_drops(experts: np.ndarray, count: int, slots: int, valid: np.ndarray) -> np.ndarray:
    """Mask ``[B T X]`` of kept assignments: first come, first served, per batch row."""
    kept = np.zeros(experts.shape, bool)
    for b in range(experts.shape[0]):
        room = [slots] * count
        for t in range(experts.shape[1]):
            for x in range(experts.shape[2]):
                if valid[b, t] and room[experts[b, t, x]]:
                    room[experts[b, t, x]] -= 1
                    kept[b, t, x] = True
    return kept


@pytest.mark.parametrize(
    ("length", "k", "count", "factor", "slots"),
    [
        (9, 2, 5, 1.0, 4),  # ceil(18 / 5) = 4
        (9, 2, 5, 0.5, 2),
        (9, 2, 5, 1.3, 5),  # 5.2 rounded down
        (9, 2, 5, 0.1, 1),  # at least one slot
        (16, 1, 4, 1.0, 4),
        (16, 1, 4, 1.25, 5),
        (3, 1, 8, 2.5, 2),  # ceil(3 / 8) * 2.5, and never below the factor
        (6, 2, 3, 99.0, 6),  # an expert gets each token at most once
    ],
)
def test_capacity_drops_exactly_the_overflow(
    length: int, k: int, count: int, factor: float, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = inputs(3, length, seed=length)
    valid = np.random.default_rng(0).random((3, length)) < 0.8
    moe = make_moe(Capacity(factor), count=count, k=k, shared=False)
    rows: list[tuple[int, ...]] = []
    true = experts_module.batched_matmul
    monkeypatch.setattr(
        experts_module, "batched_matmul", lambda r, kernel: (rows.append(r.shape[:2]), true(r, kernel))[1]
    )
    y, info = jax.jit(lambda x, valid: moe(x, of_valid(valid)))(x, jnp.asarray(valid))
    assert rows == [(count, 3 * slots)] * 3  # gate, up and down
    experts, weights = np.asarray(info.routing.experts), np.asarray(info.routing.weights)
    kept = expected_drops(experts, count, slots, valid)
    assert int(info.dispatch.dropped) == (valid[..., None] & ~kept).sum()
    wanted_load = [(experts[valid] == e).sum() for e in range(count)]  # includes dropped assignments
    assert np.asarray(info.dispatch.load).tolist() == wanted_load
    wanted = np.zeros(x.shape)
    for b, t, i in zip(*np.nonzero(kept), strict=True):
        e = experts[b, t, i]
        g, u, d = (inputs_first(getattr(moe.experts, n))[e].astype(np.float64) for n in ("gate", "up", "down"))
        gate = np.asarray(x[b, t], np.float64) @ g
        wanted[b, t] += weights[b, t, i] * ((gate / (1 + np.exp(-gate)) * (np.asarray(x[b, t]) @ u)) @ d)
    assert max_error(y, wanted) < PART_TOLERANCE


@pytest.mark.slow
def test_kept_tokens_are_unaffected_by_drops() -> None:
    moe, x = make_moe(Capacity(0.6), shared=False), inputs(2, 12)
    y, info = moe(x)
    assert int(info.dispatch.dropped) > 0
    whole = make_moe(Dense(), shared=False)(x)[0]
    slots = int(np.ceil(12 * 2 / 5) * 0.6)
    kept = expected_drops(np.asarray(info.routing.experts), 5, slots, np.ones((2, 12), bool)).all(axis=-1)
    assert 0 < kept.sum() < kept.size
    assert max_error(y, whole, kept) < PART_TOLERANCE


@pytest.mark.parametrize("factor", [0.6, 3.0])
def test_dropless_uses_its_fallback_if_assignments_would_be_dropped(factor: float) -> None:
    """`needed_factor` is the smallest factor that drops nothing. Outputs and gradients equal a dense dispatch."""
    x, dense = inputs(2, 12), make_moe(Dense(), shared=False)
    capacity, routing = Capacity(factor), dense(x)[1].routing
    needed = float(capacity.needed_factor(routing))
    assert 0.6 < needed < 3.0
    for scale, drops in ((1.0, False), (0.9, True)):
        assert (int(make_moe(Capacity(scale * needed), shared=False)(x)[1].dispatch.dropped) > 0) == drops
        assert bool(Capacity(scale * needed).fits(routing)) == (not drops)
    y, info, grads = run_moe(make_moe(Dropless(capacity, Sorted()), shared=False), x)
    wanted_y, _, wanted_grads = run_moe(dense, x)
    assert int(info.dropped) == 0 and max_error(y, wanted_y) < PART_TOLERANCE
    for ours, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        assert max_error(ours, wanted) < PART_TOLERANCE
    with pytest.raises(ValueError, match="RaggedAllToAll"):
        make_moe(Dropless(ExpertParallel(Sorted(), RaggedAllToAll())), shared=False)(x)


@pytest.mark.wrong_types
def test_dropless_refuses_a_dispatch_without_buffers() -> None:
    with pytest.raises(ValueError, match="inner=Sorted"):
        Dropless(Sorted())  # pyright: ignore[reportArgumentType]


def test_dropless_exchanges(eight: Callable[..., Any]) -> None:
    eight(dropless_exchanges)


def dropless_exchanges() -> None:
    """Run `Dropless` with a receive buffer on two groups of four shards. Only one group needs the fallback."""
    mesh, x = nnxmoe.make_mesh(fsdp=2, expert=4), inputs(8, 6)

    def build(dispatch: Any) -> MoE:
        moe = make_moe(dispatch, BlockedMatmul(), count=8, shared=False)
        moe.mesh = mesh
        return moe

    whole, _, wanted_grads = run_moe(build(Sorted()), x)
    routing = jax.jit(build(Sorted()))(x)[1].routing
    exchange = ExpertParallel(Sorted(), RaggedAllToAll(1.0))
    by_group = np.asarray(routing.experts).reshape(2, -1) // 2
    loads = [[(owners == shard).sum() for shard in range(4)] for owners in by_group]
    needed = float(exchange.needed_factor(routing, mesh))
    assert needed == pytest.approx(np.max(loads) / (6 * 2)) and needed > 1
    low, high = sorted(max(group) for group in loads)
    assert low < high, "a predicate per group would take different branches"
    for rows, drops in ((high, False), (high - 1, True)):
        inner = ExpertParallel(Sorted(), RaggedAllToAll(rows / (6 * 2)))
        assert bool(inner.fits(routing, mesh)) == (not drops)
        assert (int(jax.jit(build(inner))(x)[1].dispatch.dropped) > 0) == drops
    fallback = ExpertParallel(Sorted(), ChunkedExchange(RaggedAllToAll(), 3))
    y, info, grads = run_moe(build(Dropless(inner, fallback)), x)
    assert int(info.dropped) == 0 and max_error(y, whole) < PART_TOLERANCE
    for ours, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        assert max_error(ours, wanted) < PART_TOLERANCE


@pytest.mark.slow
def test_batch_rows_do_not_share_capacity() -> None:
    moe, x = make_moe(Capacity(0.6), shared=False), inputs(3, 12)
    together = moe(x)[0]
    alone = jnp.concatenate([moe(x[b : b + 1])[0] for b in range(3)])
    assert max_error(together, alone) < PART_TOLERANCE


@pytest.mark.slow
def test_padding_uses_no_capacity() -> None:
    """With leading padding, each expert still has capacity for the real tokens."""
    moe, x = make_moe(Capacity(1.0), shared=False), inputs(1, 24)
    valid = jnp.arange(24)[None] >= 18
    y, info = moe(x, of_valid(valid))
    assert int(info.dispatch.dropped) == 0
    assert max_error(y, make_moe(Dense(), shared=False)(x)[0], valid) < PART_TOLERANCE
    assert np.all(np.asarray(y)[0, :18] == 0)


@pytest.mark.parametrize("factor", [0, -1.0, float("nan")])
def test_capacity_rejects_invalid_factors(factor: float) -> None:
    with pytest.raises(ValueError, match="factor"):
        Capacity(factor)


def test_strategy_objects_are_hashable() -> None:
    """Strategies are static arguments of compiled programs."""
    for make in (
        Dense,
        Sorted,
        lambda: Capacity(1.5),
        MaskedMatmul,
        BlockedMatmul,
        lambda: BlockedMatmul(8),
        RaggedDotMatmul,
    ):
        assert hash(make()) == hash(make()) and make() == make()
    select: Callable[[], Any] = lambda: SigmoidGroupTopK(2, 4, 2, True, 2.5)  # noqa: E731
    assert hash(select()) == hash(select())
    assert dataclasses.replace(select(), k=3) != select()


# Jitter


def test_jitter_needs_a_key_and_scales_the_router_input() -> None:
    """With an identity kernel the logits equal the jittered input."""
    router = Router(4, 4, SoftmaxTopK(2), bias=False, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0), jitter=0.25)
    router.kernel.set_value(jnp.eye(4))
    x = jax.random.normal(jax.random.key(1), (3, 50, 4))
    assert max_error(router(x).logits, x) < 1e-6
    ratio = np.asarray(router(x, Context(jnp.arange(1), key=jax.random.key(2))).logits / x)
    assert 0.75 - 1e-5 <= ratio.min() < 0.77 and 1.23 < ratio.max() <= 1.25 + 1e-5 and abs(ratio.mean() - 1) < 0.02


@pytest.mark.slow
def test_jitter_depends_on_the_key_and_not_on_the_stacking() -> None:
    models = {
        name: build_tiny("mixtral", strategy, router_jitter_noise=0.5)
        for name, strategy in {
            "unrolled": nnxmoe.Strategy(),
            "scanned": nnxmoe.Strategy(stacking=nnxmoe.Scanned()),
            "remat": nnxmoe.Strategy(remat=nnxmoe.Remat(), stacking=nnxmoe.Scanned()),
        }.items()
    }
    tokens, key = random_tokens(2, 7), jax.random.key(5)
    plain = models["unrolled"](tokens, return_routing=True)
    noisy = models["unrolled"](tokens, key=key, return_routing=True)
    assert max_error(plain.logits, noisy.logits) > 1e-3
    for model in models.values():
        assert max_error(model(tokens, key=key).logits, noisy.logits) < 1e-5
        assert max_error(model(tokens).logits, plain.logits) < 1e-5


@pytest.mark.slow
def test_every_layer_has_jitter_of_its_own() -> None:
    """Layers that add nothing and share a router see equal inputs: only their noise can differ."""
    model = build_tiny("mixtral", nnxmoe.Strategy(), router_jitter_noise=0.5)
    first, second = model.stacks[0].layers
    for kernel in (first.attention.o.kernel, first.feed_forward.experts.down, second.attention.o.kernel):
        kernel.set_value(jnp.zeros_like(kernel[...]))
    second.feed_forward.router.kernel.set_value(first.feed_forward.router.kernel[...])
    second.feed_forward_norm.scale.set_value(first.feed_forward_norm.scale[...])

    def logits(**options: Any) -> list[Any]:
        routing = model(random_tokens(2, 7), return_routing=True, **options).routing
        return [one.logits for one in routing.values()]

    assert max_error(*logits()) < 1e-6
    assert max_error(*logits(key=jax.random.key(5))) > 1e-2


@pytest.mark.wrong_types
@pytest.mark.parametrize("noise", [-0.1, 1.0, True, "much"])
def test_jitter_out_of_range(noise: object) -> None:
    with pytest.raises(nnxmoe.ConfigError, match="router_jitter_noise must be at least 0 and below 1"):
        build_tiny("mixtral", router_jitter_noise=noise)
