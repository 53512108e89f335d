"""Quantized kernels: weights as codes of 8 or 4 bits, their variables in a model, and their products."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import PrecisionLike
from jaxtyping import Array, Float, Int

from nnxmoe.axes import axes_of
from nnxmoe.layers.linear.code_format import CodeFormat
from nnxmoe.layers.linear.kernel import Kernel
from nnxmoe.layers.linear.matmul import matmul
from nnxmoe.layers.linear.multilinear import multilinear

ARRAYS = ("codes", "scale", "zero", "order")  # of a quantized kernel; the last two may be None


class QuantizedProduct(Protocol):
    """The product of rows with the quantized kernel of one linear map."""

    def __call__(
        self, x: Float[Array, "R _"], kernel: "QuantizedKernel", transpose: bool = False
    ) -> Float[Array, "R _"]:
        """Return ``x @ kernel``, or ``x @ kernel.T`` if ``transpose``, in float32."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedKernel(Kernel):
    """A kernel of codes ``[*E, O, I]`` (4 bits: ``[*E, O, I / 2]``), with scales and zero points per tile.

    Attributes:
        codes: the stored codes; see `CodeFormat`.
        scale: one scale per tile.
        zero: one zero point per tile, or None.
        order: ``[*E, I]``, the input that column j of the codes multiplies (GPTQ's act order). None: input j.
        format: the format of the codes.
        product: how rows are multiplied with the kernel.
    """

    codes: Any
    scale: Any
    zero: Any
    order: Any
    format: CodeFormat = dataclasses.field(metadata={"static": True})
    product: QuantizedProduct = dataclasses.field(metadata={"static": True})

    trainable: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-2], self.format.input_count(self.codes), self.codes.shape[-2])

    def transposed(self, dtype: Any = None) -> Float[Array, "*E O I"]:
        """Return all weights, by default in float32."""
        weights = self.format.decode(self.codes, self.scale, self.zero, slice(0, self.codes.shape[-2]))
        if self.order is not None:
            weights = jnp.take_along_axis(weights, jnp.argsort(self.order)[..., None, :], axis=-1)
        return weights if dtype is None else weights.astype(dtype)

    def dense(self, dtype: Any = None) -> Float[Array, "*E I O"]:
        return jnp.swapaxes(self.transposed(dtype), -1, -2)

    def decode_rows(self, start: Int[Array, ""], count: int) -> tuple[Float[Array, "count _"], ...]:
        """Return the weights of some outputs of one linear map in float32, as in `CodeFormat.split_halves`."""
        codes, grids = jax.lax.dynamic_slice_in_dim(self.codes, start, count), (self.scale, self.zero)
        if self.format.tile[0] > 1:
            return self.format.decode_halves(codes, *grids, start + jnp.arange(count))
        grids = (None if grid is None else jax.lax.dynamic_slice_in_dim(grid, start, count) for grid in grids)
        return self.format.decode_halves(codes, *grids, slice(0, count))

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        return self._multiply(x).astype(x.dtype)

    def matmul_f32(self, x: Float[Array, "*rows I"], precision: PrecisionLike = None) -> Float[Array, "*rows O"]:
        return self._multiply(x)

    def vjp_input(self, d: Float[Array, "*rows O"]) -> Float[Array, "*rows I"]:
        return self._multiply(d, transpose=True).astype(d.dtype)

    def matmul_per_head(
        self, x: Float[Array, "N R _"], first: int, count: int, transpose: bool = False
    ) -> Float[Array, "N R _"]:
        """Multiply one head at a time, so that only the weights of that head are decoded."""
        if self.order is not None:
            return super().matmul_per_head(x, first, count, transpose)
        width = self.shape[-1] // len(x)

        def multiply_head(operands: tuple[Array, Array]) -> Array:
            head, rows = operands
            weights = self.format.join_halves(self.decode_rows(head * width + first, count)).astype(x.dtype)
            return matmul(rows, weights, not transpose)

        return jax.lax.map(multiply_head, (jnp.arange(len(x)), x))

    def _multiply(self, x: Float[Array, "*rows _"], transpose: bool = False) -> Float[Array, "*rows _"]:
        leaves, tree = jax.tree.flatten(self)

        def product(transpose: bool) -> Callable[..., Array]:
            def run(x: Array, *leaves: Array) -> Array:
                return tree.unflatten(leaves)._ordered_product(x, transpose)

            def d_x(*leaves_and_d: Array) -> Array:
                *leaves, d = leaves_and_d
                return product(not transpose)(d, *leaves).astype(x.dtype)

            return multilinear(run, {0: d_x})

        out = product(transpose)(x.reshape(-1, x.shape[-1]), *leaves)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def _ordered_product(self, x: Float[Array, "R _"], transpose: bool) -> Float[Array, "R _"]:
        """Apply the product with the inputs in the order of the codes' columns."""
        plain = dataclasses.replace(self, order=None)
        if self.order is None:
            return self.product(x, plain, transpose)
        if transpose:
            return self.product(x, plain, transpose)[:, jnp.argsort(self.order)]
        return self.product(x[:, self.order], plain, transpose)

    def batched_matmul(self, rows: Float[Array, "E R I"]) -> Float[Array, "E R O"]:
        return jax.lax.map(lambda pair: pair[1](pair[0]), (rows, self))


class QuantizedArray(nnx.Variable):
    """An array of a quantized kernel. Optimizers do not change it."""

    keeps_dtype = True


class QuantizedWeight(nnx.Module):
    """The variables of a `QuantizedKernel`, stored in a model in place of a parameter.

    The arrays have leading dimensions of layers and experts, and flattened inputs and outputs.

    Attributes:
        ins, outs: sizes of the inputs and outputs before flattening.
        in_axes, out_axes: their logical axes.
    """

    def __init__(
        self,
        codes: Any,
        scale: Any,
        zero: Any = None,
        order: Any = None,
        *,
        ins: Sequence[int],
        outs: Sequence[int],
        format: CodeFormat,
        product: QuantizedProduct,
        in_axes: Sequence[Any],
        out_axes: Sequence[Any],
    ):
        self.codes, self.scale, self.zero, self.order = codes, scale, zero, order
        self.ins, self.outs = tuple(ins), tuple(outs)
        self.in_axes, self.out_axes = tuple(in_axes), tuple(out_axes)
        self.format, self.product = format, product

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the leading layer and expert dimensions; within a scan over layers, without the layers."""
        return tuple(self.codes.shape[:-2])

    @property
    def logical_axes(self) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Logical axes as (layers and experts, inputs, outputs)."""
        return axes_of(self.codes)[:-2], self.in_axes, self.out_axes

    @property
    def arrays(self) -> dict[str, nnx.Variable]:
        """The variables by name, without zero points and order if there are none."""
        variables = {name: getattr(self, name) for name in ARRAYS}
        return {name: variable for name, variable in variables.items() if variable is not None}

    def with_arrays(self, arrays: Mapping[str, nnx.Variable]) -> "QuantizedWeight":
        """Return a weight of the same format with other variables."""
        return QuantizedWeight(
            *map(arrays.get, ARRAYS),
            ins=self.ins,
            outs=self.outs,
            format=self.format,
            product=self.product,
            in_axes=self.in_axes,
            out_axes=self.out_axes,
        )

    def read(self) -> QuantizedKernel:
        """Return the kernel for products."""
        zero = None if self.zero is None else self.zero[...]
        order = None if self.order is None else self.order[...]
        return QuantizedKernel(self.codes[...], self.scale[...], zero, order, self.format, self.product)
