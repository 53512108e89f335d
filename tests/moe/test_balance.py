"""Balance losses against plain loops, at perfect balance, and with padding."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxmoe.moe import balance
from nnxmoe.moe.dispatch import dispatch_info
from nnxmoe.moe.selection import Routing, SigmoidGroupTopK, SoftmaxTopK
from tests.support.arrays import max_error

E, X = 8, 2
SELECTS = {"softmax": SoftmaxTopK(X), "sigmoid": SigmoidGroupTopK(X, 4, 2, True, 2.5)}


def routing_of(select: str = "softmax", valid: Any = None, seed: int = 0) -> Routing:
    logits = jax.random.normal(jax.random.key(seed), (3, 7, E)) * 2
    found = SELECTS[select](logits, None)
    return Routing(found.experts, found.weights, found.scores, found.logits, valid)


def numpy_losses(routing: Routing) -> dict[str, float]:
    """Every loss by loops over tokens."""
    experts, scores = np.asarray(routing.experts), np.asarray(routing.scores, np.float64)
    logits = np.asarray(routing.logits, np.float64)
    valid = np.ones(experts.shape[:2], bool) if routing.valid is None else np.asarray(routing.valid)
    pooled_f, pooled_p, z, tokens = np.zeros(E), np.zeros(E), 0.0, 0
    sequence, maxtext = [], []
    for b in range(experts.shape[0]):
        f, p, soft, length = np.zeros(E), np.zeros(E), np.zeros(E), 0
        for t in range(experts.shape[1]):
            if not valid[b, t]:
                continue
            length += 1
            tokens += 1
            for e in experts[b, t]:
                f[e] += 1
                pooled_f[e] += 1
            pooled_p += scores[b, t]
            p += scores[b, t] / scores[b, t].sum()
            soft += np.exp(logits[b, t]) / np.exp(logits[b, t]).sum()
            z += math.log(np.exp(logits[b, t]).sum()) ** 2
        if length:
            sequence.append(np.sum(E / (X * length) * f * p / length))
            maxtext.append(np.mean(f / length * soft / length) * E**2)
    return {
        "switch_loss": E * np.sum(pooled_f / tokens * pooled_p / tokens),
        "sequence_loss": float(np.mean(sequence)),
        "maxtext_loss": float(np.mean(maxtext)),
        "z_loss": z / tokens,
    }


VALID = jnp.asarray(np.random.default_rng(0).random((3, 7)) < 0.6).at[1].set(False)


@pytest.mark.parametrize("valid", [None, VALID], ids=["whole", "padded"])
@pytest.mark.parametrize("select", SELECTS)
def test_losses_equal_numpy_loops(select: str, valid: Any) -> None:
    routing = routing_of(select, valid)
    for name, wanted in numpy_losses(routing).items():
        assert abs(float(getattr(balance, name)(routing)) - wanted) < 1e-5 * max(1.0, wanted), name


@pytest.mark.slow
def test_losses_at_perfect_balance() -> None:
    tokens = jnp.arange(8)
    experts = jnp.stack([tokens, (tokens + 1) % E], axis=-1)[None]
    even = jnp.zeros((1, 8, E))
    routing = Routing(experts, jnp.full(experts.shape, 0.5), jax.nn.softmax(even), even)
    assert float(balance.switch_loss(routing)) == pytest.approx(X)
    assert float(balance.maxtext_loss(routing)) == pytest.approx(X)
    assert float(balance.sequence_loss(routing)) == pytest.approx(1)
    assert float(balance.z_loss(routing)) == pytest.approx(math.log(E) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["switch_loss", "sequence_loss", "maxtext_loss", "z_loss"])
@pytest.mark.parametrize("select", SELECTS)
def test_losses_ignore_padding_and_have_gradients(name: str, select: str) -> None:
    loss = getattr(balance, name)
    logits = jax.random.normal(jax.random.key(3), (3, 7, E)) * 2

    def of(logits: Any) -> Any:
        found = SELECTS[select](logits, None)
        return loss(Routing(found.experts, found.weights, found.scores, found.logits, VALID))

    value, grad = jax.value_and_grad(of)(logits)
    other = jnp.where(VALID[..., None], logits, 9.0)
    assert float(of(other)) == pytest.approx(float(value))
    assert not np.asarray(grad)[~np.asarray(VALID)].any() and np.abs(np.asarray(grad)).max() > 1e-5


def test_losses_without_tokens_are_zero() -> None:
    routing = routing_of(valid=jnp.zeros((3, 7), bool))
    for name in ("switch_loss", "sequence_loss", "maxtext_loss", "z_loss"):
        assert float(getattr(balance, name)(routing)) == 0


@pytest.mark.slow
def test_gradient_descent_on_switch_loss_balances_the_load() -> None:
    """The descent shifts the router logits."""
    logits = jax.random.normal(jax.random.key(0), (4, 64, E)).at[..., 0].add(2.0)

    def of(shift: Any) -> Any:
        return balance.switch_loss(SoftmaxTopK(X)(logits + shift, None))

    shift = jnp.zeros(E)
    for _ in range(60):
        shift -= 0.3 * jax.grad(of)(shift)
    before, after = (dispatch_info(SoftmaxTopK(X)(logits + s, None)).load for s in (jnp.zeros(E), shift))
    assert int(after.max()) < 0.7 * int(before.max())


def test_updated_bias_follows_the_load() -> None:
    bias = balance.update_bias(jnp.zeros((2, 4)), jnp.asarray([[0, 4, 8, 4], [5, 5, 5, 5]]), 0.001)
    assert max_error(bias, [[0.001, 0, -0.001, 0], [0, 0, 0, 0]]) < 1e-9


@pytest.mark.slow
def test_utilisation() -> None:
    load = jnp.asarray([[4, 4, 4, 4], [16, 0, 0, 0], [0, 0, 0, 0]])
    found = balance.utilization(load, jnp.asarray([0, 4, 0]))
    assert max_error(found.entropy, [1, 0, 0]) < 1e-6 and max_error(found.busiest, [1, 4, 0]) < 1e-6
    assert found.idle.tolist() == [0, 3, 4] and max_error(found.dropped, [0, 0.25, 0]) < 1e-6
    assert max_error(jnp.sum(found.share, -1), [1, 1, 0]) < 1e-6


@pytest.mark.slow
def test_losses_with_nan_padding_and_underflowing_affinities() -> None:
    valid = jnp.ones((3, 7), bool).at[:, 5:].set(False)
    clean = routing_of("sigmoid", valid)
    spoiled = Routing(
        clean.experts,
        clean.weights,
        jnp.where(valid[..., None], clean.scores, jnp.nan),
        jnp.where(valid[..., None], clean.logits, jnp.nan),
        valid,
    )
    for loss in (balance.switch_loss, balance.sequence_loss, balance.maxtext_loss, balance.z_loss):
        assert float(loss(spoiled)) == float(loss(clean))
    nothing = SELECTS["sigmoid"](jnp.full((1, 4, E), -200.0), None)
    assert float(balance.sequence_loss(nothing)) == 0
