"""The experts: gated feed-forward networks, one a group of rows."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import parameter
from nnxmoe.layers.linear import fan_in
from nnxmoe.moe.grouped_matmul import GroupedMatmul


class Experts(nnx.Module):
    """``rows[R D]`` sorted by expert, ``sizes[E]`` rows for each; kernels ``gate up [E D F]``, ``down [E F D]``."""

    def __init__(
        self, dim: int, width: int, experts: int, *, matmul: GroupedMatmul, dtype: jnp.dtype, rngs: nnx.Rngs | None
    ):
        self.matmul = matmul
        into, out = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
        self.gate = parameter((experts, dim, width), into, fan_in((dim,)), inputs=1, dtype=dtype, rngs=rngs)
        self.up = parameter((experts, dim, width), into, fan_in((dim,)), inputs=1, dtype=dtype, rngs=rngs)
        self.down = parameter((experts, width, dim), out, fan_in((width,)), inputs=1, dtype=dtype, rngs=rngs)

    @property
    def count(self) -> int:
        """E."""
        return self.gate.shape[0]

    def __call__(self, rows: Float[Array, "R D"], sizes: Int[Array, "E"]) -> Float[Array, "R D"]:
        gate = self.matmul(rows, self.gate[...], sizes)
        up = self.matmul(rows, self.up[...], sizes)
        return self.matmul(jax.nn.silu(gate) * up, self.down[...], sizes)
