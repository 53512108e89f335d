"""The experts: gated feed-forward networks, one a group of rows."""

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import RULES, Rules, parameter
from nnxmoe.layers.linear import fan_in
from nnxmoe.moe.grouped_matmul import GroupedMatmul, equal_groups


class ExpertFn(Protocol):
    """``rows[R D]`` sorted by expert with ``sizes[E]``, or ``rows[E R D]`` and None: equally many for each.

    Rows beyond ``sum(sizes)`` belong to nobody and come out as zeros. ``rules`` split its parameters over a mesh.
    """

    rules: Rules

    @property
    def count(self) -> int:
        """E."""
        ...

    def __call__(self, rows: Float[Array, "..."], sizes: Int[Array, "E"] | None) -> Float[Array, "..."]: ...


class Experts(nnx.Module):
    """An `ExpertFn` of gated networks; kernels ``gate up [E D F]``, ``down [E F D]``."""

    def __init__(
        self,
        dim: int,
        width: int,
        experts: int,
        *,
        matmul: GroupedMatmul,
        dtype: jnp.dtype,
        rngs: nnx.Rngs | None,
        rules: Rules = RULES,
    ):
        self.matmul = matmul
        self.rules = rules
        into, out = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
        self.gate = parameter((experts, dim, width), into, fan_in((dim,)), inputs=1, dtype=dtype, rngs=rngs)
        self.up = parameter((experts, dim, width), into, fan_in((dim,)), inputs=1, dtype=dtype, rngs=rngs)
        self.down = parameter((experts, width, dim), out, fan_in((width,)), inputs=1, dtype=dtype, rngs=rngs)

    @property
    def count(self) -> int:
        """E."""
        return self.gate.shape[0]

    def __call__(self, rows: Float[Array, "..."], sizes: Int[Array, "E"] | None) -> Float[Array, "..."]:
        def product(rows: Float[Array, "..."], kernel: nnx.Variable) -> Float[Array, "..."]:
            return equal_groups(rows, kernel[...]) if sizes is None else self.matmul(rows, kernel[...], sizes)

        return product(jax.nn.silu(product(rows, self.gate)) * product(rows, self.up), self.down)
