"""LoRA: low-rank adapters of linear maps, ``y + alpha / rank * (x @ a) @ b`` (Hu et al. 2021)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.layers.kernel import DenseKernel, Kernel, KernelParam, Product


class LoRAParam(KernelParam):
    """A parameter of an adapter, trained while the rest of the model is frozen."""


class Kept(nnx.Variable):
    """A value that `nnxmoe.train.lora.merge` keeps for ``unmerge``; not a parameter."""


class LoRA(nnx.Module):
    """The adapter of a kernel ``[*lead, *outs, *ins]``: ``a [*lead, rank, *ins]``, ``b [*lead, *outs, rank]``.

    If several maps share one adapter, such as the experts' gate and up, ``b`` is ``[*lead, maps, *outs, rank]``.
    """

    def __init__(self, a: KernelParam, b: KernelParam, alpha: float):
        self.a = a
        self.b = b
        self.alpha = alpha

    @property
    def rank(self) -> int:
        """The width of the bottleneck."""
        return self.a.outs[0]

    @property
    def scale(self) -> float:
        """The factor ``alpha / rank`` of the adapter's output."""
        return self.alpha / self.rank

    def each(self, x: Float[Array, "*rows I"], product: Product) -> list[Float[Array, "*rows O"]]:
        """The adapter's output for each of several maps, which share ``x @ a``.

        ``b`` is indexed before the product: slicing a sharded output would move data between devices.
        """
        low, b = product(x, self.a.read()), self.b[...]
        return [product(low, DenseKernel(b[..., i, :, :])) * self.scale for i in range(b.shape[-3])]

    def delta(self) -> Float[Array, "*lead I O"]:
        """The matrix that the adapter adds to its kernel, in float32, with inputs and outputs flattened."""
        return _delta(self.a.read(), self.b.read(), self.scale)


def _delta(a: DenseKernel, b: DenseKernel, scale: float) -> Float[Array, "*lead I O"]:
    return jnp.matmul(a.dense(jnp.float32), b.dense(jnp.float32), precision=jax.lax.Precision.HIGHEST) * scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedKernel(Kernel):
    """A kernel plus ``scale * a @ b``; products do not materialise the sum."""

    base: Kernel
    a: DenseKernel
    b: DenseKernel
    scale: float = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the base kernel."""
        return self.base.shape

    def dense(self, dtype: Any = None) -> Float[Array, "*E I O"]:
        """The materialised sum, computed in float32; ``dtype`` None: float32."""
        whole = self.base.dense(jnp.float32) + _delta(self.a, self.b, self.scale)
        return whole if dtype is None else whole.astype(dtype)

    def apply(self, x: Float[Array, "..."], product: Product) -> Float[Array, "..."]:
        return product(x, self.base) + product(product(x, self.a), self.b) * self.scale

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        return self.apply(x, lambda x, kernel: kernel(x))

    def float32(self, x: Float[Array, "*rows I"], precision: jax.lax.PrecisionLike = None) -> Float[Array, "*rows O"]:
        return self.apply(x, lambda x, kernel: kernel.float32(x, precision))


def with_adapter(kernel: Kernel, lora: LoRA | None) -> Kernel:
    """The kernel with its adapter, if there is one."""
    return kernel if lora is None else AdaptedKernel(kernel, lora.a.read(), lora.b.read(), lora.scale)
