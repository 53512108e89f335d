"""An output head whose logits stay within a cap (Gemma 2, 2024)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxmoe.layers.linear.kernel import Kernel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CappedKernel(Kernel):
    """``cap * tanh(x @ base / cap)``, for products in float32 only: the head's. It is not linear, so that it has no
    dense form."""

    base: Kernel
    cap: float = dataclasses.field(metadata={"static": True})

    @property
    def trained(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.trainable

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def cast(self, dtype: Any) -> "CappedKernel":
        return CappedKernel(self.base.cast(dtype), self.cap)

    def matmul_f32(
        self, x: Float[Array, "*rows I"], precision: jax.lax.PrecisionLike = None
    ) -> Float[Array, "*rows O"]:
        return self.cap * jnp.tanh(self.base.matmul_f32(x, precision) / self.cap)

    def output_grad(self, d: Float[Array, "*rows O"], y: Float[Array, "*rows O"]) -> Float[Array, "*rows O"]:
        return d * (1 - (y / self.cap) ** 2)

    def vjp_input(self, d: Float[Array, "*rows O"]) -> Float[Array, "*rows I"]:
        return self.base.vjp_input(d)

    def vjp_kernel(self, x: Float[Array, "*rows I"], d: Float[Array, "*rows O"]) -> "CappedKernel":
        return CappedKernel(self.base.vjp_kernel(x, d), self.cap)
