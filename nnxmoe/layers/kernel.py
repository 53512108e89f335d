"""Kernels: the weights of linear maps. The rest of the package multiplies with them and never reads their arrays.

A *storage form* is what a module holds as its ``kernel``: `KernelParam`, one float array that is trained, is the only
one here. Its ``read()`` returns a `Kernel`, the value that products take. Another form (quantised weights) is another
file with two classes: an ``nnx.Variable`` or ``nnx.Module`` with ``ins``, ``outs`` and ``read()``, whose arrays carry
logical axes as every parameter does, and a subclass of `Kernel` with at least ``dense``.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import axes_of, parameter
from nnxmoe.layers.dots import dot_f32, einsum, matmul, matmul_f32

LEAD = ("layers", "expert")  # logical axes along which kernels are stacked: one linear map per index


Product = Callable[[Array, "Kernel"], Array]


class Kernel:
    """The weight of one linear map ``[I, O]``, or of one map per expert ``[E, I, O]``, for use in products.

    Subclasses are registered pytrees whose leaves all have the expert dimension first, if there is one. Only ``dense``
    and ``shape`` are required; the other methods are defined by it and may be overridden by faster ones.
    ``trained``: whether products have gradients with respect to the kernel; then ``outer`` must exist.
    """

    trained: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        """``(I, O)`` or ``(E, I, O)``, whatever the orientation in memory."""
        raise TypeError(f"{type(self).__name__} does not define shape")

    def dense(self, dtype: Any = None) -> Float[Array, "*E I O"]:
        """The whole kernel as one array; ``dtype`` None: in its own precision."""
        raise TypeError(f"{type(self).__name__} does not define dense")

    def cast(self, dtype: Any) -> "Kernel":
        """The kernel as several products with operands of this dtype want it: cast once, if it is cast at all."""
        return self

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        """``x @ kernel`` in ``x``'s dtype, accumulated in float32."""
        return matmul(x, self.dense(x.dtype))

    def float32(self, x: Float[Array, "*rows I"], precision: jax.lax.PrecisionLike = None) -> Float[Array, "*rows O"]:
        """``x @ kernel`` with the kernel cast to ``x``'s dtype, returned in float32 as accumulated."""
        return matmul_f32(x, self.dense(x.dtype), precision=precision)

    def back(self, d: Float[Array, "*rows O"]) -> Float[Array, "*rows I"]:
        """``d @ kernel.T`` in ``d``'s dtype, accumulated in float32: the gradient with respect to the input."""
        return matmul(d, self.dense(d.dtype), True)

    def equal_groups(self, rows: Float[Array, "E R I"]) -> Float[Array, "E R O"]:
        """One batched product with equally many rows per expert, which compilers also split over devices."""
        return einsum("ERI,EIO->ERO", rows, self.dense(rows.dtype)).astype(rows.dtype)

    def apply(self, x: Float[Array, "..."], product: "Product") -> Float[Array, "..."]:
        """``product(x, kernel)``, for each of the kernels whose products add up to this one's."""
        return product(x, self)

    def at(self, expert: int | Int[Array, ""]) -> Self:
        """The kernel of one expert."""
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert, keepdims=False), self)

    def outer(self, x: Float[Array, "*rows I"], d: Float[Array, "*rows O"]) -> Self:
        """The gradient ``x.T @ d`` of one linear map, in float32, as a kernel of the same form."""
        raise TypeError(f"{type(self).__name__} is not trained")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseKernel(Kernel):
    """One float array ``[*E, I, O]``, or with ``transposed`` ``[*E, O, I]``."""

    array: Any  # a float array; transformations of JAX put other leaves in its place
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})

    trained: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, ...]:
        """``(I, O)`` or ``(E, I, O)``, whatever the orientation in memory."""
        *lead, first, last = self.array.shape
        return (*lead, last, first) if self.transposed else (*lead, first, last)

    def dense(self, dtype: Any = None) -> Float[Array, "*E I O"]:
        """The array, turned to ``[*E, I, O]``; ``dtype`` None: in its own precision."""
        array = self.array if dtype is None else self.array.astype(dtype)
        return jnp.swapaxes(array, -1, -2) if self.transposed else array

    def cast(self, dtype: Any) -> "DenseKernel":
        return DenseKernel(self.array.astype(dtype), self.transposed)

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        return matmul(x, self.array, self.transposed)

    def float32(self, x: Float[Array, "*rows I"], precision: jax.lax.PrecisionLike = None) -> Float[Array, "*rows O"]:
        return matmul_f32(x, self.array.astype(x.dtype), self.transposed, precision)

    def back(self, d: Float[Array, "*rows O"]) -> Float[Array, "*rows I"]:
        return matmul(d, self.array, not self.transposed)

    def equal_groups(self, rows: Float[Array, "E R I"]) -> Float[Array, "E R O"]:
        spec = "ERI,EOI->ERO" if self.transposed else "ERI,EIO->ERO"
        return einsum(spec, rows, self.array.astype(rows.dtype)).astype(rows.dtype)

    def outer(self, x: Float[Array, "*rows I"], d: Float[Array, "*rows O"]) -> "DenseKernel":
        x, d = x.reshape(-1, x.shape[-1]), d.reshape(-1, d.shape[-1])
        pair = (d, x) if self.transposed else (x, d)
        return DenseKernel(dot_f32(*pair, -2, -2), self.transposed)

    def __jax_array__(self) -> Array:
        """Lets `jax.numpy` functions take it where an array is expected, as in a user's own `GroupedMatmul`."""
        return self.dense()


def as_kernel(kernel: Kernel | Float[Array, "*E I O"]) -> Kernel:
    """A kernel as it is; an array ``[*E, I, O]`` wrapped."""
    return kernel if isinstance(kernel, Kernel) else DenseKernel(kernel)


class KernelParam(nnx.Param):
    """The trained weight of a linear map in one array ``[*lead, *ins, *outs]``; ``lead`` counts layers and experts.

    Made by `kernel_param`. Input and output features may have several dimensions, such as heads; ``read`` flattens
    each to one.
    """

    def split(self, dimensions: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """What describes the dimensions, such as the shape or the logical axes, as (lead, ins, outs)."""
        first = sum(axis in LEAD for axis in axes_of(self))
        end = first + self.get_metadata()["inputs"]
        return tuple(dimensions[:first]), tuple(dimensions[first:end]), tuple(dimensions[end:])

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the leading layer and expert dimensions; within a scan over layers, without the layers."""
        return self.split(self.shape)[0]

    @property
    def ins(self) -> tuple[int, ...]:
        """Sizes of the input dimensions."""
        return self.split(self.shape)[1]

    @property
    def outs(self) -> tuple[int, ...]:
        """Sizes of the output dimensions."""
        return self.split(self.shape)[2]

    def read(self) -> DenseKernel:
        """The kernel ``[*lead, prod(ins), prod(outs)]``, for products."""
        lead, ins, outs = self.split(self.shape)
        return DenseKernel(self[...].reshape(*lead, math.prod(ins), math.prod(outs)))


def fan_in(inputs: Sequence[int], gain: float = 1.0) -> nnx.Initializer:
    """Normal with variance 1 / inputs, so that a projection keeps the scale of its input, or ``gain`` times it."""
    return nnx.initializers.normal(gain * math.prod(inputs) ** -0.5)


def kernel_param(
    ins: Sequence[int],
    outs: Sequence[int],
    axes: Sequence[str],
    *,
    lead: Sequence[int] = (),
    gain: float = 1.0,
    dtype: jnp.dtype,
    rngs: nnx.Rngs | None,
    kind: type[KernelParam] = KernelParam,
) -> KernelParam:
    """A kernel ``[*lead, *ins, *outs]`` with the logical ``axes`` of these dimensions; ``rngs`` None: a shape only."""
    shape, init = (*lead, *ins, *outs), fan_in(ins, gain)
    made = parameter(shape, axes, init, dtype=dtype, rngs=rngs, kind=kind, inputs=len(ins))
    assert isinstance(made, KernelParam)
    return made
