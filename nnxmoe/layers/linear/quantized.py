"""Quantized kernels with 8-bit or 4-bit codes, and the corresponding variables in a model."""

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

ARRAYS = ("codes", "scale", "zero", "order")  # array fields of a quantized kernel; zero and order are optional


class QuantizedProduct(Protocol):
    """Protocol for products of rows with a quantized kernel of a single linear map."""

    def __call__(
        self, x: Float[Array, "R _"], kernel: "QuantizedKernel", transpose: bool = False
    ) -> Float[Array, "R _"]:
        """Return ``x @ kernel``, or ``x @ kernel.T`` if ``transpose``, in float32."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedKernel(Kernel):
    """Kernel stored as codes, with scales and zero points per tile.

    Attributes:
        codes: Stored codes ``[*E, O, I]``, or ``[*E, O, I / 2]`` for 4-bit codes; see `CodeFormat`.
        scale: Scale of each tile.
        zero: Zero point or offset of each tile, if the format has these.
        order: Input index of each column of the codes, ``[*E, I]`` (GPTQ's act order). ``None`` if
            the columns are in input order.
        format: Format of the codes.
        product: Implementation of products of rows with this kernel.
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
        """Dequantize all weights. ``dtype`` defaults to float32."""
        weights = self.format.decode(self.codes, self.scale, self.zero, slice(0, self.codes.shape[-2]))
        if self.order is not None:
            weights = jnp.take_along_axis(weights, jnp.argsort(self.order)[..., None, :], axis=-1)
        return weights if dtype is None else weights.astype(dtype)

    def dense(self, dtype: Any = None) -> Float[Array, "*E I O"]:
        return jnp.swapaxes(self.transposed(dtype), -1, -2)

    def decode_rows(self, start: Int[Array, ""], count: int) -> tuple[Float[Array, "count _"], ...]:
        """Dequantize a range of outputs of one linear map to float32, as the arrays of `CodeFormat.split_halves`."""
        codes, grids = jax.lax.dynamic_slice_in_dim(self.codes, start, count), (self.scale, self.zero)
        if self.format.tile[0] > 1:
            return self.format.decode_halves(codes, *grids, start + jnp.arange(count))
        grids = (None if grid is None else jax.lax.dynamic_slice_in_dim(grid, start, count) for grid in grids)
        return self.format.decode_halves(codes, *grids, slice(0, count))

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        return self._multiply(x, x.dtype)

    def matmul_f32(self, x: Float[Array, "*rows I"], precision: PrecisionLike = None) -> Float[Array, "*rows O"]:
        return self._multiply(x, jnp.float32)

    def vjp_input(self, d: Float[Array, "*rows O"]) -> Float[Array, "*rows I"]:
        return self._multiply(d, d.dtype, transpose=True)

    def matmul_per_head(
        self, x: Float[Array, "N R _"], first: int, count: int, transpose: bool = False
    ) -> Float[Array, "N R _"]:
        """Multiply one head at a time, so only one head's weights are dequantized at a time."""
        if self.order is not None:
            return super().matmul_per_head(x, first, count, transpose)
        width = self.shape[-1] // len(x)

        def multiply_head(operands: tuple[Array, Array]) -> Array:
            head, rows = operands
            weights = self.format.join_halves(self.decode_rows(head * width + first, count)).astype(x.dtype)
            return matmul(rows, weights, not transpose)

        return jax.lax.map(multiply_head, (jnp.arange(len(x)), x))

    def _multiply(self, x: Float[Array, "*rows _"], dtype: Any, transpose: bool = False) -> Float[Array, "*rows _"]:
        """Return the product in ``dtype``.

        The custom gradient includes the cast to ``dtype``, so 16-bit gradients are multiplied in 16 bits.
        """
        leaves, tree = jax.tree.flatten(self)

        def product(transpose: bool) -> Callable[..., Array]:
            def run(x: Array, *leaves: Array) -> Array:
                return tree.unflatten(leaves)._ordered_product(x, transpose).astype(dtype)

            def d_x(*leaves_and_d: Array) -> Array:
                *leaves, d = leaves_and_d
                return product(not transpose)(d, *leaves).astype(x.dtype)

            return multilinear(run, {0: d_x})

        out = product(transpose)(x.reshape(-1, x.shape[-1]), *leaves)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def _ordered_product(self, x: Float[Array, "R _"], transpose: bool) -> Float[Array, "R _"]:
        """Multiply inputs that are permuted to the order of the code columns."""
        unordered_kernel = dataclasses.replace(self, order=None)
        if self.order is None:
            return self.product(x, unordered_kernel, transpose)
        if transpose:
            return self.product(x, unordered_kernel, transpose)[:, jnp.argsort(self.order)]
        return self.product(x[:, self.order], unordered_kernel, transpose)

    def batched_matmul(self, rows: Float[Array, "E R I"]) -> Float[Array, "E R O"]:
        return jax.lax.map(lambda pair: pair[1](pair[0]), (rows, self))


class QuantizedArray(nnx.Variable):
    """Array of a quantized kernel. Optimizers do not update it."""

    keeps_dtype = True


class QuantizedWeight(nnx.Module):
    """Module that replaces a kernel parameter and stores the variables of a `QuantizedKernel`.

    The leading dimensions of the arrays are layers and experts. Inputs and outputs are flattened.

    Attributes:
        codes, scale, zero, order, format, product: See `QuantizedKernel`.
        ins, outs: Sizes of the input and output dimensions before flattening.
        in_axes, out_axes: Logical axes of the input and output dimensions before flattening.
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
        """Sizes of the layer and expert dimensions. Inside a scan over layers, there is no layer dimension."""
        return tuple(self.codes.shape[:-2])

    @property
    def logical_axes(self) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Logical axes as (layers and experts, inputs, outputs)."""
        return axes_of(self.codes)[:-2], self.in_axes, self.out_axes

    @property
    def arrays(self) -> dict[str, nnx.Variable]:
        """Variables by name. ``zero`` and ``order`` are omitted if they are None."""
        variables = {name: getattr(self, name) for name in ARRAYS}
        return {name: variable for name, variable in variables.items() if variable is not None}

    def with_arrays(self, arrays: Mapping[str, nnx.Variable]) -> "QuantizedWeight":
        """Return a copy of the weight with other variables."""
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
        """Return the variables as a `QuantizedKernel`."""
        zero = None if self.zero is None else self.zero[...]
        order = None if self.order is None else self.order[...]
        return QuantizedKernel(self.codes[...], self.scale[...], zero, order, self.format, self.product)
