"""Linear maps."""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions, parameter
from nnxmoe.layers.linear.kernel import Adapter, Kernel, as_weight, kernel_param, with_adapter


class Linear(nnx.Module):
    """Linear map ``x[... *ins] -> [... *outs]`` with a kernel ``[*outs, *ins]`` and an optional bias ``[prod(outs)]``.

    Attributes:
        lora: Adapter of the kernel, set by `nnxmoe.train.lora.add`.
    """

    adapted: ClassVar[Mapping[str, tuple[str, ...]]] = {"lora": ("kernel",)}  # adapter attribute -> its kernels

    def __init__(
        self,
        ins: Sequence[int],
        outs: Sequence[int],
        axes: Sequence[str | None],
        *,
        bias: bool = False,
        gain: float = 1.0,
        **kw: Unpack[ParamOptions],
    ):
        """Create the kernel and the bias.

        Args:
            ins: Sizes of the input dimensions.
            outs: Sizes of the output dimensions, such as heads and head width.
            axes: Logical axes of ``(*ins, *outs)``.
            bias: Whether the linear map has a bias.
            gain: Scale of the initial output relative to the input.
            **kw: Parameter dtype and rngs.
        """
        self.lora: Adapter | None = None
        self.kernel = kernel_param(ins, outs, axes, gain=gain, **kw)
        if bias:
            self.bias = parameter((math.prod(outs),), (axes[len(ins)],), nnx.initializers.zeros, **kw)
            self.bias.set_metadata(outs=tuple(outs))  # shape of the bias in layouts with a head dimension
        else:
            self.bias = None

    def weight(self) -> Kernel:
        """Return the kernel ``[I, O]``, with flattened dimensions and the adapter, if any, attached."""
        return with_adapter(as_weight(self.kernel).read(), self.lora)

    @property
    def ins(self) -> tuple[int, ...]:
        """Sizes of the input dimensions."""
        return as_weight(self.kernel).ins

    @property
    def outs(self) -> tuple[int, ...]:
        """Sizes of the output dimensions."""
        return as_weight(self.kernel).outs

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        ins, outs = self.ins, self.outs
        lead = x.shape[: x.ndim - len(ins)]
        y = self.weight()(x.reshape(*lead, math.prod(ins)))
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias[...].astype(y.dtype), y.shape)
        return y.reshape(*lead, *outs)
