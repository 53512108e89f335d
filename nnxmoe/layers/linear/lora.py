"""LoRA adapters of linear maps: ``y + alpha / rank * (x @ a) @ b`` (Hu et al. 2021)."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import PrecisionLike
from jaxtyping import Array, Float, Int

from nnxmoe.layers.linear.kernel import DenseKernel, Kernel, ParamWeight, Product

LayerRanks = tuple[tuple[int, tuple[int, float]], ...]


class UnmergeValue(nnx.Variable):
    """Non-trainable value that `nnxmoe.train.lora.merge` stores for ``unmerge``."""


class LoRA(nnx.Module):
    """LoRA adapter of a kernel ``[*lead, *outs, *ins]``.

    Both matrices are of type ``nnx.LoRAParam``. Training updates only adapters and freezes the rest of the model.

    Attributes:
        a: Matrix ``[*lead, rank, *ins]``.
        b: Matrix ``[*lead, *outs, rank]``, or ``[*lead, maps, *outs, rank]`` if several linear maps share the adapter,
            such as gate and up of the experts.
        alpha: Numerator of the scale.
        layers: Pairs (layer, (rank, alpha)) if stacked layers differ. ``None`` if all layers are equal. Layers without
            a pair have no adapter. Unused elements of ``a`` and ``b`` are zero and have no gradient.
    """

    def __init__(self, a: nnx.Param, b: nnx.Param, alpha: float, layers: LayerRanks | None = None):
        self.a = a
        self.b = b
        self.alpha = alpha
        self.layers = nnx.static(layers)

    def rank_and_alpha(self, layer: int) -> tuple[int, float] | None:
        """Return (rank, alpha) of a layer, or ``None`` if the layer has no adapter."""
        return (self.rank, self.alpha) if self.layers is None else dict(self.layers).get(layer)

    @property
    def rank(self) -> int:
        """Inner dimension of the adapter."""
        return ParamWeight(self.a).outs[0]

    @property
    def scale(self) -> float:
        """Scale factor for the adapter's output, ``alpha / rank``."""
        return self.alpha / self.rank

    def outputs_per_map(self, x: Float[Array, "*rows I"], product: Product) -> list[Float[Array, "*rows O"]]:
        """Return the adapter's output for each linear map. All maps share the product ``x @ a``.

        ``b`` is indexed before the product, because slicing a sharded output would move data between devices.
        """
        low_rank, b = product(x, ParamWeight(self.a).read()), self.b[...]
        return [product(low_rank, DenseKernel(b[..., i, :, :])) * self.scale for i in range(b.shape[-3])]

    def adapt(self, kernel: Kernel) -> "AdaptedKernel":
        """Return the kernel with this adapter attached."""
        return AdaptedKernel(kernel, ParamWeight(self.a).read(), ParamWeight(self.b).read(), self.scale)

    def lookup(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return the float32 update of embeddings, for ``a [rank, V]`` and ``b [D, rank]``."""
        low_rank = jnp.take(self.a[...], tokens, axis=1)
        return jnp.einsum("RBT,DR->BTD", low_rank, self.b[...], preferred_element_type=jnp.float32) * self.scale

    def delta(self) -> Float[Array, "*lead I O"]:
        """Return the float32 update of the kernel, with flattened inputs and outputs."""
        return _delta(ParamWeight(self.a).read(), ParamWeight(self.b).read(), self.scale)


def _delta(a: DenseKernel, b: DenseKernel, scale: float) -> Float[Array, "*lead I O"]:
    return jnp.matmul(a.dense(jnp.float32), b.dense(jnp.float32), precision=jax.lax.Precision.HIGHEST) * scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedKernel(Kernel):
    """Kernel plus ``scale * a @ b``. Products do not materialize the sum."""

    base: Kernel
    a: DenseKernel
    b: DenseKernel
    scale: float = dataclasses.field(metadata={"static": True})

    trainable: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def dense(self, dtype: Any = None) -> Float[Array, "*E I O"]:
        """Materialize the sum in float32, and cast the sum to ``dtype``. ``dtype`` defaults to float32."""
        kernel = self.base.dense(jnp.float32) + _delta(self.a, self.b, self.scale)
        return kernel if dtype is None else kernel.astype(dtype)

    def apply(self, x: Float[Array, "..."], product: Product) -> Float[Array, "..."]:
        """Return ``product(x, base) + scale * product(product(x, a), b)``.

        The barriers keep XLA:GPU from merging the products that share x, and their gradients, into one product with a
        concatenated copy of the base kernel (jax 0.10.2).
        """
        update = product(product(jax.lax.optimization_barrier(x), self.a), self.b) * self.scale
        return product(x, self.base) + jax.lax.optimization_barrier(update)

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        return self.apply(x, lambda x, kernel: kernel(x))

    def matmul_f32(self, x: Float[Array, "*rows I"], precision: PrecisionLike = None) -> Float[Array, "*rows O"]:
        return self.apply(x, lambda x, kernel: kernel.matmul_f32(x, precision))

    def vjp_kernel(self, x: Float[Array, "*rows I"], d: Float[Array, "*rows O"]) -> "AdaptedKernel":
        """Return the gradients of the adapter and the base kernel, with zeros if the base kernel is not trainable."""
        zeros_like = functools.partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, jnp.float32))
        d_base = self.base.vjp_kernel(x, d) if self.base.trainable else zeros_like(self.base)
        d_adapter = d * self.scale
        d_a, d_b = self.a.vjp_kernel(x, self.b.vjp_input(d_adapter)), self.b.vjp_kernel(self.a(x), d_adapter)
        return AdaptedKernel(d_base, d_a, d_b, self.scale)
