"""Experts: feed-forward networks, one per group of rows."""

import functools
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol, Unpack

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from nnxmoe.axes import ParamOptions
from nnxmoe.layers.activations import GatedActivation, swiglu
from nnxmoe.layers.linear.kernel import Adapter, Kernel, as_weight, kernel_param, with_adapter
from nnxmoe.moe.grouped_matmul import GroupedMatmul, equal_groups
from nnxmoe.sharding_rules import RULES, Rules


class ExpertFn(Protocol):
    """Applies the experts to ``rows[R D]`` sorted by expert with group ``sizes[E]``, or to ``rows[E R D]`` with None.

    The output of rows beyond ``sum(sizes)`` is zero. ``rules``: the sharding rules of the parameters.
    """

    rules: Rules

    @property
    def count(self) -> int:
        """Number of experts, E."""
        ...

    def __call__(self, rows: Float[Array, "..."], sizes: Int[Array, "E"] | None) -> Float[Array, "..."]: ...


class Experts(nnx.Module):
    """An `ExpertFn` of gated networks; kernels ``gate up [E F D]``, ``down [E D F]``.

    ``activation``: of gate and up; ``biases``: `ExpertBiases`, None for experts without. Gate and up share one adapter,
    of a kernel ``[E D 2 F]``.
    """

    adapted: ClassVar[Mapping[str, tuple[str, ...]]] = {"lora_gate_up": ("gate", "up"), "lora_down": ("down",)}

    def __init__(
        self,
        dim: int,
        width: int,
        experts: int,
        *,
        matmul: GroupedMatmul,
        rules: Rules = RULES,
        activation: GatedActivation = swiglu,
        biases: Callable[..., Array] | None = None,
        **kw: Unpack[ParamOptions],
    ):
        self.lora_gate_up: Adapter | None = None
        self.lora_down: Adapter | None = None
        self.matmul = matmul
        self.rules = rules
        self.activation = activation
        self.biases = biases
        into, out = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
        self.gate = kernel_param((dim,), (width,), into, lead=(experts,), **kw)
        self.up = kernel_param((dim,), (width,), into, lead=(experts,), **kw)
        self.down = kernel_param((width,), (dim,), out, lead=(experts,), **kw)

    @property
    def count(self) -> int:
        return as_weight(self.up).lead[-1]

    def __call__(self, rows: Float[Array, "..."], sizes: Int[Array, "E"] | None) -> Float[Array, "..."]:
        product = functools.partial(self._product, sizes=sizes)
        gate, up = product(rows, as_weight(self.gate).read()), product(rows, as_weight(self.up).read())
        if self.lora_gate_up is not None:
            more, over = self.lora_gate_up.outputs_per_map(rows, product)
            gate, up = gate + more, up + over
        if self.biases is not None:
            gate, up = self.biases("gate", gate, sizes), self.biases("up", up, sizes)
        y = self.activation(checkpoint_name(gate, "gate"), checkpoint_name(up, "up"))
        y = checkpoint_name(with_adapter(as_weight(self.down).read(), self.lora_down).apply(y, product), "down")
        return y if self.biases is None else self.biases("down", y, sizes)

    def _product(self, rows: Array, kernel: Kernel, sizes: Int[Array, "E"] | None) -> Array:
        return equal_groups(rows, kernel) if sizes is None else self.matmul(rows, kernel, sizes)


class UngatedExperts(Experts):
    """`Experts` without gate: ``down(activation(up(rows)))`` (Nemotron 3, 2025)."""

    adapted = {"lora_up": ("up",), "lora_down": ("down",)}

    def __init__(
        self,
        dim: int,
        width: int,
        experts: int,
        *,
        matmul: GroupedMatmul,
        rules: Rules = RULES,
        activation: Callable[[Array], Array],
        **kw: Unpack[ParamOptions],
    ):
        self.lora_up: Adapter | None = None
        self.lora_down: Adapter | None = None
        self.matmul, self.rules, self.activation = matmul, rules, activation
        self.up = kernel_param((dim,), (width,), ("expert", "embed", "mlp"), lead=(experts,), **kw)
        self.down = kernel_param((width,), (dim,), ("expert", "mlp", "embed"), lead=(experts,), **kw)

    def __call__(self, rows: Float[Array, "..."], sizes: Int[Array, "E"] | None) -> Float[Array, "..."]:
        product = functools.partial(self._product, sizes=sizes)
        up = checkpoint_name(with_adapter(as_weight(self.up).read(), self.lora_up).apply(rows, product), "up")
        y = with_adapter(as_weight(self.down).read(), self.lora_down).apply(self.activation(up), product)
        return checkpoint_name(y, "down")
