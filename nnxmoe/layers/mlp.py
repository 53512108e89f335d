"""Gated (SwiGLU; Shazeer 2020) and ungated feed-forward networks, and a gated shared expert."""

from collections.abc import Callable
from typing import ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key

from nnxmoe.axes import ParamOptions
from nnxmoe.layers.activations import GatedActivation, swiglu
from nnxmoe.layers.context import Context
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.stateful import checkpoint_unless_stateful


class MLP(nnx.Module):
    """Gated feed-forward network: ``down(activation(gate(x), up(x)))``."""

    name: ClassVar[str] = "mlp"

    def __init__(
        self, dim: int, width: int, *, bias: bool, activation: GatedActivation = swiglu, **kw: Unpack[ParamOptions]
    ):
        self.activation = activation
        self.gate = Linear((dim,), (width,), ("embed", "mlp"), bias=bias, **kw)
        self.up = Linear((dim,), (width,), ("embed", "mlp"), bias=bias, **kw)
        self.down = Linear((width,), (dim,), ("mlp", "embed"), bias=bias, **kw)

    def __call__(self, x: Float[Array, "*rows D"], context: Context | None = None) -> Float[Array, "*rows D"]:
        gate, up = checkpoint_name(self.gate(x), "gate"), checkpoint_name(self.up(x), "up")
        return self._activate_and_project(gate, up)

    def _activate_and_project(self, *inputs: Float[Array, "*rows F"]) -> Float[Array, "*rows D"]:
        """Compute ``down(activation(*inputs))``. The backward pass recomputes the activation."""
        project = checkpoint_unless_stateful(lambda *inputs: self.down(self.activation(*inputs)), self)
        return checkpoint_name(project(*inputs), "down")

    def token_independent(self, key: Key[Array, ""] | None) -> bool:
        return True


class FusedMLP(MLP):
    """`MLP` with a fused kernel ``[2 * F, D]`` of gate and up, as in checkpoints of Granite."""

    def __init__(
        self, dim: int, width: int, *, bias: bool, activation: GatedActivation = swiglu, **kw: Unpack[ParamOptions]
    ):
        self.activation = activation
        self.gate_up = Linear((dim,), (2 * width,), ("embed", "mlp"), bias=bias, **kw)
        self.down = Linear((width,), (dim,), ("mlp", "embed"), bias=bias, **kw)

    def __call__(self, x: Float[Array, "*rows D"], context: Context | None = None) -> Float[Array, "*rows D"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self._activate_and_project(checkpoint_name(gate, "gate"), checkpoint_name(up, "up"))


class UngatedMLP(MLP):
    """Ungated feed-forward network: ``down(activation(up(x)))``."""

    def __init__(
        self, dim: int, width: int, *, bias: bool, activation: Callable[[Array], Array], **kw: Unpack[ParamOptions]
    ):
        self.activation = activation
        self.up = Linear((dim,), (width,), ("embed", "mlp"), bias=bias, **kw)
        self.down = Linear((width,), (dim,), ("mlp", "embed"), bias=bias, **kw)

    def __call__(self, x: Float[Array, "*rows D"], context: Context | None = None) -> Float[Array, "*rows D"]:
        return self._activate_and_project(checkpoint_name(self.up(x), "up"))


class GatedSharedExpert(MLP):
    """Shared expert with one gate per token: ``sigmoid(output_gate(x)) * mlp(x)``.

    The kernel of ``output_gate`` is ``[1, D]``. This is the shared expert of Qwen1.5-MoE and Qwen2-MoE (Yang et al.
    2024). Source: ``Qwen2MoeSparseMoeBlock`` in transformers.
    """

    def __init__(self, dim: int, width: int, **kw: Unpack[ParamOptions]):
        super().__init__(dim, width, bias=False, **kw)
        self.output_gate = Linear((dim,), (1,), ("embed", "router"), **kw)

    def __call__(self, x: Float[Array, "*rows D"], context: Context | None = None) -> Float[Array, "*rows D"]:
        return jax.nn.sigmoid(self.output_gate(x)) * super().__call__(x)
