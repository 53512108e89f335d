"""Expert feed-forward networks, applied to rows grouped by expert."""

import functools
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol, Unpack

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from nnxmoe.axes import ParamOptions
from nnxmoe.layers.activations import GatedActivation, swiglu
from nnxmoe.layers.linear.kernel import Adapter, Kernel, as_weight, kernel_param, with_adapter
from nnxmoe.moe.grouped_matmul import GroupedMatmul, batched_matmul
from nnxmoe.sharding_rules import RULES, Rules


class ExpertFn(Protocol):
    """Protocol for experts. Dispatches pass rows grouped by expert.

    The rows are ``[R D]``, sorted by expert, with ``sizes[e]`` rows for expert e. If ``sizes`` is ``None``, the rows
    are ``[E R D]``, with R rows per expert. Outputs of rows beyond ``sum(sizes)`` are zero.

    Attributes:
        rules: Sharding rules of the parameters.
    """

    rules: Rules

    @property
    def count(self) -> int:
        """Number of experts, E."""
        ...

    def __call__(self, rows: Float[Array, "..."], sizes: Int[Array, "E"] | None) -> Float[Array, "..."]: ...


class Experts(nnx.Module):
    """Gated experts: ``down(activation(gate(rows), up(rows)))``.

    The kernels are ``gate [E F D]``, ``up [E F D]`` and ``down [E D F]``. ``gate`` and ``up`` share one adapter, as for
    a fused kernel ``[E D 2 F]``.

    Args:
        dim: Width of the rows, D.
        width: Hidden width, F.
        experts: Number of experts, E.
        matmul: Grouped matmul for rows sorted by expert.
        rules: Sharding rules of the parameters.
        activation: Maps the outputs of ``gate`` and ``up`` to the input of ``down``.
        biases: Optional `ExpertBiases`.
        **kw: Parameter dtype and rngs.
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
        hidden_axes, output_axes = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
        self.gate = kernel_param((dim,), (width,), hidden_axes, lead=(experts,), **kw)
        self.up = kernel_param((dim,), (width,), hidden_axes, lead=(experts,), **kw)
        self.down = kernel_param((width,), (dim,), output_axes, lead=(experts,), **kw)

    @property
    def count(self) -> int:
        return as_weight(self.up).lead[-1]

    def __call__(self, rows: Float[Array, "..."], sizes: Int[Array, "E"] | None) -> Float[Array, "..."]:
        matmul = functools.partial(self._matmul, sizes=sizes)
        gate, up = matmul(rows, as_weight(self.gate).read()), matmul(rows, as_weight(self.up).read())
        if self.lora_gate_up is not None:
            gate_delta, up_delta = self.lora_gate_up.outputs_per_map(rows, matmul)
            gate, up = gate + gate_delta, up + up_delta
        if self.biases is not None:
            gate, up = self.biases("gate", gate, sizes), self.biases("up", up, sizes)
        hidden = self.activation(checkpoint_name(gate, "gate"), checkpoint_name(up, "up"))
        down = with_adapter(as_weight(self.down).read(), self.lora_down)
        y = checkpoint_name(down.apply(hidden, matmul), "down")
        return y if self.biases is None else self.biases("down", y, sizes)

    def _matmul(self, rows: Array, kernel: Kernel, sizes: Int[Array, "E"] | None) -> Array:
        return batched_matmul(rows, kernel) if sizes is None else self.matmul(rows, kernel, sizes)


class UngatedExperts(Experts):
    """Ungated experts: ``down(activation(up(rows)))`` (Nemotron 3, 2025)."""

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
        matmul = functools.partial(self._matmul, sizes=sizes)
        up = with_adapter(as_weight(self.up).read(), self.lora_up)
        down = with_adapter(as_weight(self.down).read(), self.lora_down)
        hidden = self.activation(checkpoint_name(up.apply(rows, matmul), "up"))
        return checkpoint_name(down.apply(hidden, matmul), "down")
