"""Multilinear functions with custom transposes: every differentiation mode against plain JAX products."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxmoe import BlockedMatmul
from nnxmoe.layers.linear.matmul import batched_matmul_f32, matmul
from nnxmoe.layers.linear.multilinear import multilinear
from nnxmoe.moe.permute import gather_rows
from tests.support.arrays import max_error
from tests.support.running import PART_TOLERANCE

SIZES = jnp.asarray([3, 0, 2, 4], jnp.int32)  # of ten rows; the last one is in no group
INDEX = jnp.asarray([4, 0, 2, 5, 1], jnp.int32)
BACK = jnp.asarray([[1], [4], [2], [5], [0]], jnp.int32)


def grouped(rows: Any, kernel: Any) -> Any:
    rank = jnp.searchsorted(jnp.cumsum(SIZES), jnp.arange(10), side="right")
    return jnp.einsum("ri,rio->ro", rows, jnp.pad(kernel, [(0, 1), (0, 0), (0, 0)])[rank])


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "matmul": (matmul, jnp.matmul, [(3, 4, 5), (5, 6)]),
    "transposed": (lambda x, k: matmul(x, k, True), lambda x, k: x @ k.T, [(3, 5), (6, 5)]),
    "batched": (
        lambda x, y: batched_matmul_f32(x, y, -1),
        lambda x, y: x @ jnp.swapaxes(y, -1, -2),
        [(2, 3, 4), (2, 5, 4)],
    ),
    "blocked": (lambda x, k: BlockedMatmul(2)(x, k, SIZES), grouped, [(10, 5), (4, 5, 6)]),
    "gathered": (lambda x: gather_rows(x, INDEX, BACK), lambda x: jnp.pad(x, [(0, 1), (0, 0)])[INDEX], [(5, 3)]),
}


def modes(function: Callable[..., Any], given: list[Any], moved: list[Any]) -> dict[str, Any]:
    """Results of every differentiation mode, including vmap inside and outside of a gradient."""
    every, given, moved = tuple(range(len(given))), tuple(given), tuple(moved)

    def curved(*given: Any) -> Any:
        return jnp.sum(jnp.sin(function(*given)))

    slope = jax.grad(curved, every)

    def along(*given: Any) -> Any:
        return sum(map(jnp.vdot, slope(*given), moved))

    two = [jnp.stack([a, -a]) for a in given]
    shared = (0,) + (None,) * (len(given) - 1)
    return {
        "forward": jax.jvp(function, given, moved),
        "reverse": slope(*given),
        "forward over reverse": jax.jvp(slope, given, moved),
        "reverse over reverse": jax.grad(along, every)(*given),
        "reverse over forward": jax.grad(lambda *given: jax.jvp(curved, given, moved)[1], every)(*given),
        "batch of gradients": jax.vmap(slope)(*two),
        "gradient of a batch": jax.grad(lambda *a: jnp.sum(jnp.sin(jax.vmap(function, shared)(*a))), every)(
            two[0], *given[1:]
        ),
        "jacobian": jax.jit(jax.jacfwd(function))(*given),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_differentiation_mode(name: str) -> None:
    function, plain, shapes = CASES[name]
    rng = np.random.default_rng(0)
    given, moved = ([jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes] for _ in range(2))
    wanted = modes(plain, given, moved)
    for mode, found in modes(function, given, moved).items():
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted[mode]), strict=True):
            assert max_error(a, b) < PART_TOLERANCE, mode


def test_reverse_mode_uses_the_given_transpose() -> None:
    """Also under vmap with a shared argument, in a scan, and under remat."""
    double = multilinear(lambda x: 2 * x, {0: lambda d: 7 * d})  # deliberately not its transpose
    loop = lambda x: jax.lax.scan(lambda c, _: (double(c), None), x, None, length=2)[0]  # noqa: E731
    for run, forward, backward in ((double, 2, 7), (jax.checkpoint(double), 2, 7), (loop, 4, 49)):
        assert jax.jvp(run, (1.0,), (1.0,))[1] == forward and jax.jit(jax.grad(run))(1.0) == backward
    product = multilinear(lambda x, y: x * y, {0: lambda y, d: 7 * d, 1: lambda x, d: 9 * d})
    total = lambda x, y: jnp.sum(jax.vmap(product, (None, 0))(x, y))  # noqa: E731
    d_x, d_y = jax.grad(total, (0, 1))(1.0, jnp.ones(3))
    assert d_x == 21 and d_y.tolist() == [9, 9, 9]


def test_integer_arguments_and_unused_gradients() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    scaled = multilinear(lambda x, y, n: x * y * n, {0: lambda y, n, d: d * y * n, 1: never})
    assert jax.grad(scaled)(2.0, 3.0, jnp.int32(2)) == 6
