"""Expert biases for rows grouped by expert."""

from typing import Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import ParamOptions, parameter
from nnxmoe.layers.linear.matmul import einsum_f32
from nnxmoe.layers.linear.multilinear import multilinear


class ExpertBiases(nnx.Module):
    """Biases of the three linear maps of `Experts`: ``gate [E F]``, ``up [E F]``, ``down [E D]``."""

    def __init__(self, dim: int, width: int, experts: int, **kw: Unpack[ParamOptions]):
        zeros, hidden_axes, output_axes = nnx.initializers.zeros, ("expert", "mlp"), ("expert", "embed")
        self.gate = parameter((experts, width), hidden_axes, zeros, **kw)
        self.up = parameter((experts, width), hidden_axes, zeros, **kw)
        self.down = parameter((experts, dim), output_axes, zeros, **kw)
        # `shard_map_dispatch` sums partial outputs over shards of the hidden width. Only one shard may add this bias.
        self.down.set_metadata(added_once=True)

    def __call__(self, name: str, rows: Float[Array, "*E R F"], sizes: Int[Array, "E"] | None) -> Array:
        """Add the biases of the linear map ``name`` to the rows; see `add_bias`."""
        return add_bias(rows, getattr(self, name), sizes)


def add_bias(
    rows: Float[Array, "*E R F"], biases: nnx.Variable, sizes: Int[Array, "E"] | None
) -> Float[Array, "*E R F"]:
    """Add the bias of its expert to each row.

    Args:
        rows: ``[R F]`` sorted by expert, or ``[E R F]`` with the same number of rows per expert.
        biases: Biases ``[E F]``.
        sizes: Number of rows per expert. Rows beyond ``sum(sizes)`` are unchanged. ``None`` if the rows are
            ``[E R F]``.
    """
    bias = biases[...].astype(rows.dtype)
    if sizes is None:
        return rows + jnp.broadcast_to(bias[:, None, :], rows.shape)
    ends, index = jnp.cumsum(sizes), jnp.arange(rows.shape[0])
    # The default method is a loop, in which GPUs wait for the host. Rows past the last group get the index E.
    expert = jnp.searchsorted(ends, index, side="right", method="compare_all")

    def gather(bias: Array, expert: Array) -> Array:
        return bias.at[expert].get(mode="fill", fill_value=0)

    def bias_grad(expert: Array, d_rows: Array) -> Array:
        # A matrix product replaces the scatter-add that is the transpose of the gather.
        is_member = expert[None, :] == jnp.arange(bias.shape[0])[:, None]
        return einsum_f32("ER,RF->EF", is_member.astype(d_rows.dtype), d_rows).astype(d_rows.dtype)

    return rows + multilinear(gather, {0: bias_grad})(bias, expert)
