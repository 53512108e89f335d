"""The linear projection."""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import ParamOptions, parameter
from nnxmoe.layers.linear.kernel import Adapter, Kernel, as_weight, kernel_param, with_adapter


class Linear(nnx.Module):
    """A linear map ``x[... *ins] -> [... *outs]`` with a kernel ``[*outs, *ins]`` and an optional flattened bias.

    Attributes:
        lora: an adapter, set by `nnxmoe.train.lora.add`.
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
            ins: sizes of the input dimensions.
            outs: sizes of the output dimensions, such as heads and head width.
            axes: logical axes of ``(*ins, *outs)``.
            bias: whether there is a bias.
            gain: scale of the initial output relative to the input.
        """
        self.lora: Adapter | None = None
        self.kernel = kernel_param(ins, outs, axes, gain=gain, **kw)
        if bias:
            self.bias = parameter((math.prod(outs),), (axes[len(ins)],), nnx.initializers.zeros, **kw)
            self.bias.set_metadata(outs=tuple(outs))  # its shape in layouts with a separate head dimension
        else:
            self.bias = None

    def weight(self) -> Kernel:
        """Return the kernel ``[I, O]``, inputs and outputs flattened, with its adapter if there is one."""
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
