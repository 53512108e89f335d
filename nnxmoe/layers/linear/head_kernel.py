"""Kernels of output heads that cap or scale the logits."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxmoe.layers.linear.kernel import Kernel


@dataclasses.dataclass(frozen=True)
class HeadKernel(Kernel):
    """Base class for kernels of output heads that transform the logits ``x @ base``.

    The only supported product is `matmul_f32`. There is no dense form. Subclasses define ``transform`` and
    ``output_grad``.
    """

    base: Kernel

    def transform(self, logits: Float[Array, "*rows O"]) -> Float[Array, "*rows O"]:
        """Transform the logits."""
        raise TypeError(f"{type(self).__name__} does not define transform")

    @property
    def trainable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.trainable

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def cast(self, dtype: Any) -> Self:
        return dataclasses.replace(self, base=self.base.cast(dtype))

    def matmul_f32(
        self, x: Float[Array, "*rows I"], precision: jax.lax.PrecisionLike = None
    ) -> Float[Array, "*rows O"]:
        return self.transform(self.base.matmul_f32(x, precision))

    def vjp_input(self, d: Float[Array, "*rows O"]) -> Float[Array, "*rows I"]:
        return self.base.vjp_input(d)

    def vjp_kernel(self, x: Float[Array, "*rows I"], d: Float[Array, "*rows O"]) -> Self:
        return dataclasses.replace(self, base=self.base.vjp_kernel(x, d))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CappedKernel(HeadKernel):
    """Kernel of an output head with capped logits: ``cap * tanh(x @ base / cap)`` (Gemma 2, 2024)."""

    cap: float = dataclasses.field(metadata={"static": True})

    def transform(self, logits: Float[Array, "*rows O"]) -> Float[Array, "*rows O"]:
        return self.cap * jnp.tanh(logits / self.cap)

    def output_grad(self, d: Float[Array, "*rows O"], y: Float[Array, "*rows O"]) -> Float[Array, "*rows O"]:
        return d * (1 - (y / self.cap) ** 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledKernel(HeadKernel):
    """Kernel of an output head with scaled logits: ``x @ base / divisor`` (Granite, 2024)."""

    divisor: float = dataclasses.field(metadata={"static": True})

    def transform(self, logits: Float[Array, "*rows O"]) -> Float[Array, "*rows O"]:
        return logits / self.divisor

    def output_grad(self, d: Float[Array, "*rows O"], y: Float[Array, "*rows O"]) -> Float[Array, "*rows O"]:
        return d / self.divisor
