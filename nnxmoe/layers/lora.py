"""Low-rank adapters of linear maps (Hu et al. 2021): ``y + alpha / rank * (x @ a) @ b``."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import axes_of

LEAD = ("layers", "expert")  # axes of a kernel with a map of their own for each index
Product = Callable[[Array, Array], Array]


class LoRAParam(nnx.Param):
    """A parameter of an adapter: what is trained where the rest is not."""


class Kept(nnx.Variable):
    """A value that `nnxmoe.train.lora.unmerge` needs; no parameter."""


class LoRA(nnx.Module):
    """The adapter of a kernel ``[*lead, *ins, *outs]``: ``a [*lead, *ins, rank]``, ``b [*lead, rank, *outs]``.

    Its owner hands it the product that its own kernel goes through, so it runs wherever that does.
    """

    def __init__(self, a: nnx.Variable, b: nnx.Variable, alpha: float):
        self.a = a
        self.b = b
        self.alpha = alpha

    @property
    def rank(self) -> int:
        """How many numbers the input is projected down to."""
        return self.a.shape[-1]

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return self.alpha / self.rank

    def factors(self) -> tuple[Float[Array, "*lead I rank"], Float[Array, "*lead rank O"]]:
        """``a`` and ``b`` with their inputs and outputs flat."""
        lead = [size for size, axis in zip(self.a.shape, axes_of(self.a), strict=True) if axis in LEAD]
        ins, outs = self.a.shape[len(lead) : -1], self.b.shape[len(lead) + 1 :]
        a = self.a[...].reshape(*lead, math.prod(ins), self.rank)
        return a, self.b[...].reshape(*lead, self.rank, math.prod(outs))

    def __call__(self, x: Float[Array, "*rows I"], product: Product) -> Float[Array, "*rows O"]:
        a, b = self.factors()
        return product(product(x, a), b) * self.scale

    def each(self, x: Float[Array, "*rows I"], product: Product) -> list[Float[Array, "*rows O"]]:
        """The same of an adapter of maps side by side, ``b [*lead, rank, maps, O]``, for each of them.

        Cut after the product, what a mesh has split would change places.
        """
        low = product(x, self.factors()[0])
        return [product(low, self.b[...][..., i, :]) * self.scale for i in range(self.b.shape[-2])]

    def delta(self) -> Float[Array, "*lead I O"]:
        """What the adapter adds to its flat kernel, in float32."""
        a, b = (factor.astype(jnp.float32) for factor in self.factors())
        return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST) * self.scale
