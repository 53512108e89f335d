"""Given routing: models that are told the experts of each token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe.layers.context import Context
from nnxmoe.model.paths import name_of
from nnxmoe.models.laguna import CappedTopK
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import BalancedTopK, Select, SigmoidGroupTopK, SoftmaxGroupTopK, SoftmaxTopK, SqrtSoftplusTopK
from nnxmoe.train import lora
from tests.support.arrays import max_error
from tests.support.families import FAMILIES, load, positions_of
from tests.support.tiny import build_tiny, random_tokens, stacking_of, write_checkpoint

KINDS = tuple(kind for kind in FAMILIES if any(name.startswith("experts.") for name in load(kind).arrays))
E, X = 8, 2
SELECTS: tuple[Select, ...] = (
    SoftmaxTopK(X),
    SoftmaxTopK(X, normalize=False, scale=1.7),
    SoftmaxTopK(X, min_weight_sum=0.9),
    SigmoidGroupTopK(X, 4, 2, True, 2.5),
    SigmoidGroupTopK(X, 4, 2, False, 2.5),
    SigmoidGroupTopK(X, 1, 1, True, 1.5, epsilon=0.5),
    CappedTopK(X, 1, 1, True, 1.5, cap=1.1),
    SoftmaxGroupTopK(X, 4, 2, 3.0),
    SqrtSoftplusTopK(X, 1.5),
    BalancedTopK(X),
)


def numpy_weights(select: Any, logits: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """Weights of given experts, one token at a time, from the formulas of the papers."""
    weights = np.zeros(experts.shape)
    for index in np.ndindex(*experts.shape[:-1]):
        z = logits[index].astype(np.float64)
        if isinstance(select, CappedTopK):
            z = select.cap * np.tanh(z / select.cap)
        if isinstance(select, SigmoidGroupTopK):
            scores = 1 / (1 + np.exp(-z))
        elif isinstance(select, SqrtSoftplusTopK):
            scores = np.sqrt(np.log1p(np.exp(z)))
        else:
            scores = np.exp(z) / np.exp(z).sum()
        w = scores[experts[index]]
        if isinstance(select, BalancedTopK):
            w = np.full(len(w), 1 / select.k)
        elif isinstance(select, SqrtSoftplusTopK) or getattr(select, "normalize", False):
            w = w / max(w.sum() + getattr(select, "epsilon", 0), getattr(select, "min_weight_sum", 0))
        weights[index] = w * getattr(select, "scale", 1.0)
    return weights


def random_experts(*shape: int, seed: int = 0) -> np.ndarray:
    """Distinct expert ids per token."""
    return np.random.RandomState(seed).rand(*shape, E).argsort(-1)[..., :X]


@pytest.mark.every_set
@pytest.mark.parametrize("select", SELECTS, ids=repr)
def test_weights_of_given_experts(select: Any) -> None:
    """Weights equal NumPy's; tokens with -1 select their experts; `flipped` compares sets."""
    logits = np.random.RandomState(1).standard_normal((2, 9, E)).astype(np.float32)
    bias = jnp.linspace(-0.4, 0.3, E)
    own = select(jnp.asarray(logits), bias)
    assert own.flipped is None
    same = select(jnp.asarray(logits), bias, own.experts[..., ::-1])
    assert not same.flipped.any()
    np.testing.assert_array_equal(same.weights, own.weights[..., ::-1])
    given = random_experts(2, 9)
    given[0, 3] = -1
    given[1, 2, 1] = -1
    routing = select(jnp.asarray(logits), bias, jnp.asarray(given))
    chosen = np.where((given >= 0).all(-1, keepdims=True), given, own.experts)
    np.testing.assert_array_equal(routing.experts, chosen)
    assert max_error(routing.weights, numpy_weights(select, logits, chosen)) < 1e-6
    differs = (np.sort(chosen, -1) != np.sort(own.experts, -1)).any(-1)
    np.testing.assert_array_equal(routing.flipped, differs)
    assert differs.any() and not differs.all()


@pytest.mark.every_set
@pytest.mark.parametrize("select", SELECTS[:-1], ids=repr)
def test_gradients_of_given_experts(select: Any) -> None:
    """Gradients reach the logits of experts outside of the top k, and equal finite differences."""
    logits = np.random.RandomState(2).standard_normal((1, 5, E))
    factors = jnp.asarray(np.random.RandomState(3).standard_normal((1, 5, X)))
    given = np.argsort(logits, -1)[..., :X]  # the two least likely experts

    def loss(logits: Any) -> Any:
        return jnp.sum(select(logits, None, jnp.asarray(given)).weights * factors)

    with jax.enable_x64():
        gradient = jax.grad(loss)(jnp.asarray(logits))
        numeric = np.zeros_like(logits)
        for index in np.ndindex(*logits.shape):
            step = np.zeros_like(logits)
            step[index] = 1e-5
            numeric[index] = (loss(jnp.asarray(logits + step)) - loss(jnp.asarray(logits - step))) / 2e-5
    assert max_error(gradient, numeric) < 1e-8
    assert np.abs(np.take_along_axis(np.asarray(gradient), given, -1)).min() > 1e-4


def test_padding_is_ignored() -> None:
    """Ids of padding change neither the other tokens nor the gradients, even if they are out of range."""
    options: Any = {"bias": True, "dtype": jnp.dtype(jnp.float32), "rngs": nnx.Rngs(0)}
    router = Router(6, E, SigmoidGroupTopK(X, 4, 2, True, 2.5), **options)
    x = jnp.asarray(np.random.RandomState(0).standard_normal((2, 4, 6)), jnp.float32)
    valid = jnp.asarray([[True, True, True, False], [True, False, False, False]])

    def loss(router: Router, ids: Any) -> Any:
        routing = router(x, Context(jnp.arange(4), valid, experts=ids))
        return jnp.sum(jnp.where(valid[..., None], routing.weights, 0) * jnp.arange(X))

    given = random_experts(2, 4)
    garbage = np.where(valid[..., None], given, 77)
    value, grads = nnx.value_and_grad(loss)(router, jnp.asarray(given))
    other_value, other_grads = nnx.value_and_grad(loss)(router, jnp.asarray(garbage))
    assert value == other_value
    jax.tree.map(np.testing.assert_array_equal, grads, other_grads)
    assert np.isfinite(jax.tree.leaves(grads)[0]).all()


def given_by(routing: Any) -> dict[str, Any]:
    """Every form in which the routing of a model can be given."""
    ids = {layer: np.asarray(r.experts) for layer, r in routing.items()}
    stacked = np.stack(list(ids.values()), axis=2)
    return {
        "output": routing,
        "uint8": {layer: array.astype(np.uint8) for layer, array in ids.items()},
        "jax": {layer: jnp.asarray(array, jnp.int16) for layer, array in ids.items()},
        "array": stacked,
        "list": stacked.tolist(),
        "without the last token": stacked[:, :-1],
    }


def test_forms_of_routing() -> None:
    model, tokens = build_tiny("mixtral"), random_tokens(2, 9)
    out = model(tokens, return_routing=True)
    for name, given in given_by(out.routing).items():
        again = model(tokens, routing=given, return_routing=True)
        np.testing.assert_array_equal(again.logits, out.logits, err_msg=name)
        assert not any(r.flipped.any() for r in again.routing.values()), name
    one = model(tokens[:1], return_routing=True)
    ids = np.stack([np.asarray(r.experts[0]) for r in one.routing.values()], axis=1)
    np.testing.assert_array_equal(model(tokens[:1], routing=ids).logits, one.logits)


def test_padding_of_a_model_may_have_any_ids() -> None:
    model, tokens = build_tiny("mixtral"), random_tokens(2, 9)
    mask = np.arange(9) < [[9], [4]]
    out = model(tokens, mask, return_routing=True)
    garbage = {i: np.where(mask[..., None], np.asarray(r.experts), -9) for i, r in out.routing.items()}
    np.testing.assert_array_equal(model(tokens, mask, routing=garbage).logits, out.logits)


@pytest.mark.parametrize("kind", KINDS)
def test_own_routing_of_families(kind: str, tmp_path: Path) -> None:
    """Given the routing of the model itself, the logits are equal to the bit, padded too. Half of it suffices."""
    case = load(kind)
    model = nnxmoe.from_pretrained(write_checkpoint(tmp_path, case.fields, case.weights))
    tokens, mask = case.arrays["tokens"], case.arrays["mask"]
    inputs = tokens, mask, positions_of(mask)
    out = model(*inputs, return_routing=True)
    assert out.routing is not None
    again = model(*inputs, routing=out.routing, return_routing=True)
    np.testing.assert_array_equal(again.logits, out.logits)
    assert again.routing is not None
    for layer, routing in again.routing.items():
        np.testing.assert_array_equal(routing.weights[mask > 0], out.routing[layer].weights[mask > 0])
        assert not routing.flipped[mask > 0].any()
    half = {layer: np.where(np.arange(17)[:, None] % 2, np.asarray(r.experts), -1) for layer, r in out.routing.items()}
    np.testing.assert_array_equal(model(*inputs, routing=half).logits, out.logits)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({7: np.zeros((2, 9, 2), int)}, r"routing\[7\]: the layers with routers are \[0, 1\]"),
        ({"0": np.zeros((2, 9, 2), int)}, r"routing\['0'\]: the layers with routers"),
        ({0: np.zeros((2, 9, 3), int)}, r"routing\[0\] has the shape \[2, 9, 3\].*\[2, 9, 2\]"),
        ({0: np.zeros((2, 8, 2), int)}, r"routing\[0\] has the shape \[2, 8, 2\]"),
        ({1: np.full((2, 9, 2), 77)}, r"routing\[1\]: expert ids must be in 0 … \d, or -1, got 77"),
        ({1: np.full((2, 9, 2), -2)}, r"routing\[1\].*got -2"),
        ({1: np.full((2, 9, 2), 3)}, r"routing\[1\]: a token has expert 3 twice"),
        ({1: np.zeros((2, 9, 2))}, r"routing\[1\] has the dtype float64"),
        ({1: [[0, 1], [2]]}, r"routing\[1\] must be an array of expert ids"),
        (np.zeros((2, 9, 3, 2), int), r"routing has the shape \[2, 9, 3, 2\].*L = 2"),
        (np.zeros((9, 2, 2), int), r"routing has the shape \[9, 2, 2\]"),
    ],
)
def test_routing_that_does_not_fit(changed: Any, message: str) -> None:
    model, tokens = build_tiny("mixtral"), random_tokens(2, 9)
    with pytest.raises(ValueError, match=message):
        model(tokens, routing=changed)


# Stacks, caches, packed rows and devices, with experts that the model would not select

GIVEN_KINDS = {"mixtral": 6, "deepseek_v3": 9, "gpt_oss": 6}  # kind -> number of experts
TOKENS = random_tokens(2, 12)


def foreign_experts(model: nnxmoe.CausalLM, tokens: np.ndarray, count: int) -> dict[int, np.ndarray]:
    """Random expert ids for every MoE layer. Tokens 3 and 4 select their experts."""
    out: Any = model(tokens, return_routing=True)
    rng = np.random.RandomState(0)
    ids = {
        layer: rng.rand(*tokens.shape, count).argsort(-1)[..., : r.experts.shape[-1]]
        for layer, r in out.routing.items()
    }
    for array in ids.values():
        array[:, 3:5] = -1
    return ids


def gradients(model: nnxmoe.CausalLM, tokens: np.ndarray, routing: Any, mask: Any = None) -> dict[str, float]:
    """Sum of squares of the gradient of each parameter, over all layers."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, routing: Any) -> jax.Array:
        logits = nnx.merge(graph, params, rest)(tokens, mask, routing=routing).logits
        logps = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), jnp.asarray(tokens)[:, 1:, None], -1)[..., 0]
        return -jnp.mean(logps if mask is None else logps * mask[:, 1:])

    squares: dict[str, float] = {}
    for path, variable in nnx.to_flat_state(jax.jit(jax.grad(loss))(params, routing)):
        key = name_of(model, path).key
        squares[key] = squares.get(key, 0.0) + float(np.sum(np.square(variable.get_value(), dtype=np.float64)))
    return squares


def same_squares(ours: dict[str, float], wanted: dict[str, float]) -> bool:
    return ours.keys() == wanted.keys() and all(abs(ours[k] - wanted[k]) < 1e-5 * (wanted[k] + 0.1) for k in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("kind", GIVEN_KINDS)
def test_given_experts_equal_the_oracle(kind: str, scanned: bool) -> None:
    """With remat, LoRA, traced ids, some layers only, a cache, packed rows and gradients."""
    oracle, strategy = build_tiny(kind), nnxmoe.Strategy(stacking=stacking_of(scanned), remat=nnxmoe.Remat())
    model = build_tiny(kind, strategy)
    ids = foreign_experts(oracle, TOKENS, GIVEN_KINDS[kind])
    wanted = oracle(TOKENS, routing=ids).logits
    assert max_error(wanted, oracle(TOKENS).logits) > 0.1
    assert max_error(model(TOKENS, routing=ids).logits, wanted) < 1e-5
    traced = nnx.jit(lambda model, ids: model(TOKENS, routing=ids).logits)
    assert max_error(traced(model, {layer: jnp.asarray(a, jnp.int8) for layer, a in ids.items()}), wanted) < 1e-5
    assert max_error(traced(model, jnp.asarray(np.stack(list(ids.values()), 2))), wanted) < 1e-5
    last = {max(ids): ids[max(ids)]}
    assert max_error(model(TOKENS, routing=last).logits, oracle(TOKENS, routing=last).logits) < 1e-5
    assert same_squares(gradients(model, TOKENS, ids), gradients(oracle, TOKENS, ids))

    cache, steps = model.empty_cache(2, 16), []
    for start, stop in ((0, 5), *((i, i + 1) for i in range(5, 12))):
        given = {layer: array[:, start:stop] for layer, array in ids.items()}
        out = model(TOKENS[:, start:stop], cache=cache, routing=given)
        cache = out.cache
        steps.append(out.logits)
    assert max_error(jnp.concatenate(steps, 1), wanted) < 1e-5

    def pack(array: np.ndarray) -> np.ndarray:
        return np.concatenate([array[0, :7], array[1, :5]])[None]

    segments, positions = np.repeat([[1, 2]], [7, 5], axis=1), np.concatenate([np.arange(7), np.arange(5)])[None]
    given = {layer: pack(array) for layer, array in ids.items()}
    packed = model(pack(TOKENS), None, positions, segments, routing=given).logits
    assert max_error(packed[0], np.concatenate([wanted[0, :7], wanted[1, :5]])) < 1e-5
    lora.add(model, 2, rngs=nnx.Rngs(0))
    assert max_error(model(TOKENS, routing=ids).logits, wanted) < 1e-5


RAGGED = nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RaggedAllToAll())
WAYS: dict[str, tuple[Any, dict[str, int]]] = {
    "ragged": (RAGGED, {"fsdp": 4, "expert": 2}),
    "dense": (nnxmoe.Dense(), {"fsdp": 4, "expert": 2}),
    "sorted": (nnxmoe.Sorted(), {"fsdp": 4, "expert": 2}),
    "capacity": (nnxmoe.Capacity(8.0), {"fsdp": 4, "expert": 2}),
    "ring": (nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RingOfExperts()), {"fsdp": 4, "expert": 2}),
    "chunked exchange": (
        nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.ChunkedExchange(nnxmoe.RaggedAllToAll(), 2)),
        {"fsdp": 4, "expert": 2},
    ),
    "chunked": (nnxmoe.Chunked(RAGGED, 2), {"fsdp": 4, "expert": 2}),
    "dropless": (
        nnxmoe.Dropless(
            nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RaggedAllToAll(buffer_factor=1.0)), nnxmoe.Sorted()
        ),
        {"fsdp": 4, "expert": 2},
    ),
    "context": (RAGGED, {"context": 2, "fsdp": 2, "expert": 2}),
    "pipeline": (nnxmoe.Sorted(), {"pipe": 2, "fsdp": 2, "expert": 2}),
}


def errors_on_eight_devices(way: str, scanned: bool) -> tuple[float, bool]:
    """Error of the logits against one device, and whether the gradients are equal. Rows have padding."""
    sizes: Any = {"n_routed_experts": 8, "n_group": 4, "num_hidden_layers": 5}
    oracle, tokens = build_tiny("deepseek_v3", **sizes), random_tokens(8, 12)
    mask = np.ones((8, 12), int)
    mask[2, 9:], mask[5, :4] = 0, 0
    ids = foreign_experts(oracle, tokens, 8)
    dispatch, axes = WAYS[way]
    pipeline = nnxmoe.Pipeline(2) if way == "pipeline" else None
    strategy = nnxmoe.Strategy(
        dispatch=dispatch, mesh=nnxmoe.make_mesh(**axes), stacking=stacking_of(scanned), pipeline=pipeline
    )
    model = build_tiny("deepseek_v3", strategy, **sizes)
    wanted = np.asarray(oracle(tokens, mask, routing=ids).logits)[mask > 0]
    error = max_error(np.asarray(model(tokens, mask, routing=ids).logits)[mask > 0], wanted)
    equal = same_squares(gradients(model, tokens, ids, mask), gradients(oracle, tokens, ids, mask))
    return error, equal


@pytest.mark.slow
@pytest.mark.parametrize(("way", "scanned"), [*((way, True) for way in WAYS), ("ragged", False)])
def test_given_experts_on_eight_devices(eight: Callable[..., Any], way: str, scanned: bool) -> None:
    error, equal = eight(errors_on_eight_devices, way, scanned)
    assert error < 1e-5 and equal
