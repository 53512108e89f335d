"""Grouped matmul: test problems, and a product with its gradients in one program."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

GROUPS: dict[str, tuple[int, list[int]]] = {
    "even": (23, [6, 6, 6, 5]),
    "uneven": (23, [1, 9, 0, 13]),
    "empty-ends": (23, [0, 0, 23, 0]),
    "all-on-the-first": (23, [23, 0, 0, 0]),
    "all-on-the-last": (23, [0, 0, 0, 23]),
    "rows-left-over": (23, [3, 0, 4, 0]),
    "all-left-over": (23, [0, 0, 0, 0]),
    "one-row": (1, [0, 1, 0]),
    "one-row-no-group": (1, [0, 0, 0]),
    "one-group": (7, [7]),
    "more-groups-than-rows": (5, [0, 1, 0, 0, 2, 0, 1, 0, 0, 1, 0]),
    "no-rows": (0, [0, 0, 0]),
}


@functools.partial(jax.jit, static_argnums=0)
def product_and_gradients(backend: Any, rows: Any, kernel: Any, sizes: Any) -> tuple[Any, Any, Any]:
    """Returns y and the gradients of a nonlinear loss with a different weight per output."""

    def loss(rows: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = backend(rows, kernel, sizes)
        scale = jnp.linspace(0.5, 1.5, max(y.size, 1))[: y.size].reshape(y.shape)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)) * scale), y

    (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(rows, kernel)
    return y, *grads


def problem(name: str, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    count, sizes = GROUPS[name]
    rng = np.random.default_rng(count)
    rows = jnp.asarray(rng.standard_normal((count, 6)), dtype)
    kernel = jnp.asarray(rng.standard_normal((len(sizes), 6, 5)) / 6**0.5, dtype)
    return rows, kernel, jnp.asarray(sizes, jnp.int32)
