"""Kernels that are kept as codes of 8 or 4 bits: their arrays in a model, and their products."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import axes_of
from nnxmoe.layers.linear.code_format import CodeFormat
from nnxmoe.layers.linear.dots import matmul
from nnxmoe.layers.linear.kernel import Kernel
from nnxmoe.layers.linear.multilinear import multilinear

ARRAYS = ("codes", "scale", "zero", "order")  # of a quantised kernel; the last two may be None


class QuantizedProduct(Protocol):
    """``x @ kernel`` or, with ``back``, ``x @ kernel.T``, for rows and the quantised kernel of one linear map."""

    def __call__(self, x: Float[Array, "R _"], kernel: "QuantizedKernel", back: bool = False) -> Float[Array, "R _"]:
        """The product in float32."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedKernel(Kernel):
    """Codes ``[*E, O, I]`` (4 bits: ``[*E, O, I / 2]``) with scales and zero points per tile (`CodeFormat`).

    ``order [*E, I]``: the input that column j of the codes multiplies (GPTQ's act order); None: input j.
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
        """All weights; ``dtype`` None: in float32."""
        found = self.format.decode(self.codes, self.scale, self.zero, slice(0, self.codes.shape[-2]))
        if self.order is not None:
            found = jnp.take_along_axis(found, jnp.argsort(self.order)[..., None, :], axis=-1)
        return found if dtype is None else found.astype(dtype)

    def dense(self, dtype: Any = None) -> Float[Array, "*E I O"]:
        return jnp.swapaxes(self.transposed(dtype), -1, -2)

    def rows(self, start: Int[Array, ""], count: int) -> tuple[Float[Array, "count _"], ...]:
        """The weights of some outputs of one linear map in float32, in the pieces of `CodeFormat.split_halves`."""
        codes, grids = jax.lax.dynamic_slice_in_dim(self.codes, start, count), (self.scale, self.zero)
        if self.format.tile[0] > 1:
            return self.format.decode_halves(codes, *grids, start + jnp.arange(count))
        grids = (None if grid is None else jax.lax.dynamic_slice_in_dim(grid, start, count) for grid in grids)
        return self.format.decode_halves(codes, *grids, slice(0, count))

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        return self._times(x).astype(x.dtype)

    def matmul_f32(
        self, x: Float[Array, "*rows I"], precision: jax.lax.PrecisionLike = None
    ) -> Float[Array, "*rows O"]:
        return self._times(x)

    def vjp_input(self, d: Float[Array, "*rows O"]) -> Float[Array, "*rows I"]:
        return self._times(d, back=True).astype(d.dtype)

    def matmul_per_head(
        self, x: Float[Array, "N R _"], first: int, count: int, back: bool = False
    ) -> Float[Array, "N R _"]:
        """One head at a time, so that only its weights become floats."""
        if self.order is not None:
            return super().matmul_per_head(x, first, count, back)
        width = self.shape[-1] // len(x)

        def one(given: tuple[Array, Array]) -> Array:
            head, rows = given
            weights = self.format.join_halves(self.rows(head * width + first, count)).astype(x.dtype)
            return matmul(rows, weights, not back)

        return jax.lax.map(one, (jnp.arange(len(x)), x))

    def _times(self, x: Float[Array, "*rows _"], back: bool = False) -> Float[Array, "*rows _"]:
        leaves, tree = jax.tree.flatten(self)

        def product(back: bool) -> Callable[..., Array]:
            def run(x: Array, *leaves: Array) -> Array:
                kernel = tree.unflatten(leaves)
                order = kernel.order
                plain = dataclasses.replace(kernel, order=None)
                if order is None:
                    return self.product(x, plain, back)
                if back:
                    return self.product(x, plain, back)[:, jnp.argsort(order)]
                return self.product(x[:, order], plain, back)

            def d_x(*given: Array) -> Array:
                *leaves, d = given
                return product(not back)(d, *leaves).astype(x.dtype)

            return multilinear(run, {0: d_x})

        out = product(back)(x.reshape(-1, x.shape[-1]), *leaves)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def batched_matmul(self, rows: Float[Array, "E R I"]) -> Float[Array, "E R O"]:
        return jax.lax.map(lambda pair: pair[1](pair[0]), (rows, self))


class QuantizedArray(nnx.Variable):
    """One of the arrays of a quantised kernel, which no optimizer changes."""

    keeps_dtype = True


class QuantizedWeight(nnx.Module):
    """Variables of a `QuantizedKernel`, stored in a model in place of a parameter, with leading dimensions of layers
    and experts. Inputs and outputs are flattened. ``ins``, ``outs``, ``in_axes`` and ``out_axes`` are their sizes and
    logical axes before flattening.
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
        """The logical axes of layers and experts, of inputs, and of outputs."""
        return axes_of(self.codes)[:-2], self.in_axes, self.out_axes

    @property
    def arrays(self) -> dict[str, nnx.Variable]:
        """Its variables by name; without zero points and order if there are none."""
        return {name: variable for name in ARRAYS if (variable := getattr(self, name)) is not None}

    def holding(self, arrays: Mapping[str, nnx.Variable]) -> "QuantizedWeight":
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
        zero, order = (None if one is None else one[...] for one in (self.zero, self.order))
        return QuantizedKernel(self.codes[...], self.scale[...], zero, order, self.format, self.product)
