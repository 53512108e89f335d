"""The experts: gated feed-forward networks, one a group of rows."""

from collections.abc import Mapping
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import RULES, Rules, parameter
from nnxmoe.layers.linear import fan_in
from nnxmoe.layers.lora import LoRA
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
    """An `ExpertFn` of gated networks; kernels ``gate up [E D F]``, ``down [E F D]``.

    An adapter of gate and up is one of the two side by side, ``[E D 2 F]``.
    """

    adapted: ClassVar[Mapping[str, tuple[str, ...]]] = {"lora_gate_up": ("gate", "up"), "lora_down": ("down",)}

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
        self.lora_gate_up: LoRA | None = None
        self.lora_down: LoRA | None = None
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
        def product(rows: Float[Array, "..."], kernel: Float[Array, "E I O"]) -> Float[Array, "..."]:
            return equal_groups(rows, kernel) if sizes is None else self.matmul(rows, kernel, sizes)

        gate, up = product(rows, self.gate[...]), product(rows, self.up[...])
        if self.lora_gate_up is not None:
            more, over = self.lora_gate_up.each(rows, product)
            gate, up = gate + more, up + over
        hidden = jax.nn.silu(gate) * up
        y = product(hidden, self.down[...])
        return y if self.lora_down is None else y + self.lora_down(hidden, product)
