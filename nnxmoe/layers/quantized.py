"""Quantised kernels, and how to multiply with them without a float copy of the kernel."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nnxmoe.axes import axes_of
from nnxmoe.config.validate import check_positive
from nnxmoe.layers.codes import Codes
from nnxmoe.layers.dots import dot_f32, matmul, matmul_f32
from nnxmoe.layers.kernel import Kernel
from nnxmoe.layers.multilinear import multilinear
from nnxmoe.layers.xla_cpu import carried, on_cpu

LAST = 127.0  # the largest int8
FEW = 8  # rows up to which CPUs decode a kernel for longer than they multiply with it


class QuantizedProduct(Protocol):
    """``x @ kernel`` or, with ``back``, ``x @ kernel.T``, of rows with a quantised kernel of one linear map."""

    def __call__(self, x: Float[Array, "R _"], kernel: "QuantizedKernel", back: bool = False) -> Float[Array, "R _"]:
        """The product in float32."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedKernel(Kernel):
    """Codes ``[*E, O, I]`` (4 bits: ``[*E, O, I / 2]``) with scales and zero points per tile; see `Codes`. Not trained.

    ``order [*E, I]``: the input that each column of the codes multiplies (GPTQ's act order); None: their own.
    """

    codes: Any
    scale: Any
    zero: Any
    order: Any
    kind: Codes = dataclasses.field(metadata={"static": True})
    product: QuantizedProduct = dataclasses.field(metadata={"static": True})

    trained: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        """``(I, O)`` or ``(E, I, O)``."""
        return (*self.codes.shape[:-2], self.kind.ins(self.codes), self.codes.shape[-2])

    def turned(self, dtype: Any = None) -> Float[Array, "*E O I"]:
        """All weights; ``dtype`` None: in float32."""
        found = self.kind.decode(self.codes, self.scale, self.zero, slice(0, self.codes.shape[-2]))
        if self.order is not None:
            found = jnp.take_along_axis(found, jnp.argsort(self.order)[..., None, :], axis=-1)
        return found if dtype is None else found.astype(dtype)

    def dense(self, dtype: Any = None) -> Float[Array, "*E I O"]:
        return jnp.swapaxes(self.turned(dtype), -1, -2)

    def rows(self, start: Int[Array, ""], count: int) -> tuple[Float[Array, "count _"], ...]:
        """The weights of some outputs of one linear map in float32, in the pieces of `Codes.split`."""
        codes, grids = jax.lax.dynamic_slice_in_dim(self.codes, start, count), (self.scale, self.zero)
        if self.kind.tile[0] > 1:
            return self.kind.pieces(codes, *grids, start + jnp.arange(count))
        grids = (None if grid is None else jax.lax.dynamic_slice_in_dim(grid, start, count) for grid in grids)
        return self.kind.pieces(codes, *grids, slice(0, count))

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        return self._times(x).astype(x.dtype)

    def float32(self, x: Float[Array, "*rows I"], precision: jax.lax.PrecisionLike = None) -> Float[Array, "*rows O"]:
        return self._times(x)

    def back(self, d: Float[Array, "*rows O"]) -> Float[Array, "*rows I"]:
        return self._times(d, back=True).astype(d.dtype)

    def by_head(self, x: Float[Array, "N R _"], first: int, count: int, back: bool = False) -> Float[Array, "N R _"]:
        """One head at a time, so that only its weights become floats."""
        if self.order is not None:
            return super().by_head(x, first, count, back)
        width = self.shape[-1] // len(x)

        def one(given: tuple[Array, Array]) -> Array:
            head, rows = given
            weights = self.kind.join(self.rows(head * width + first, count)).astype(x.dtype)
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

    def equal_groups(self, rows: Float[Array, "E R I"]) -> Float[Array, "E R O"]:
        return jax.lax.map(lambda pair: pair[1](pair[0]), (rows, self))


@dataclasses.dataclass(frozen=True)
class Dequantized:
    """Decodes the whole kernel and multiplies with it: the reference for the others."""

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, back: bool = False) -> Float[Array, "R _"]:
        return matmul_f32(x, kernel.turned(x.dtype), not back)


@dataclasses.dataclass(frozen=True)
class InBlocks:
    """Decodes at most ``size`` weights, or a quarter of all, at a time in a loop: no float copy of the kernel exists.

    Few rows of 16 bits are multiplied in float32, into which codes decode faster on CPUs than into bfloat16.
    """

    size: int = 2**18

    def __post_init__(self) -> None:
        check_positive("InBlocks", "size", self.size)

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, back: bool = False) -> Float[Array, "R _"]:
        ins, outs = kernel.shape
        count, dtype = max(1, min(self.size // ins, outs // 4)), x.dtype
        if dtype.itemsize == 2:  # rounding weights to 16 bits adds nothing to the rounding of the rows
            kernel = dataclasses.replace(kernel, kind=dataclasses.replace(kernel.kind, rounded=None))
            dtype = jnp.dtype(jnp.float32) if x.shape[0] <= FEW else dtype
        x = x.astype(dtype)

        def forward(i: Array, state: Any) -> Any:
            xs, kernel, out = state
            start = jnp.minimum(i * count, outs - count)  # the last block may repeat rows of the one before
            pairs = zip(xs, kernel.rows(start, count), strict=True)
            part = functools.reduce(jnp.add, [matmul_f32(x, w.astype(dtype), True) for x, w in pairs])
            return *carried(xs, kernel), jax.lax.dynamic_update_slice_in_dim(out, part, start, 1)

        def backward(i: Array, state: Any) -> Any:
            x, kernel, sums = state
            start = jnp.minimum(i * count, outs - count)
            part = jax.lax.dynamic_slice_in_dim(x, start, count, 1)
            part = jnp.where(start + jnp.arange(count) >= i * count, part, 0)
            weights = kernel.rows(start, count)
            added = tuple(s + dot_f32(part, w.astype(dtype), -1, -2) for s, w in zip(sums, weights, strict=True))
            return *carried(x, kernel), added

        blocks = -(-outs // count)
        if back:
            zeros = kernel.kind.split(jnp.zeros((x.shape[0], kernel.shape[0]), jnp.float32))
            return kernel.kind.join(jax.lax.fori_loop(0, blocks, backward, (x, kernel, zeros))[-1])
        zeros = jnp.zeros((x.shape[0], outs), jnp.float32)
        return jax.lax.fori_loop(0, blocks, forward, (kernel.kind.split(x), kernel, zeros))[-1]


@dataclasses.dataclass(frozen=True)
class TwoInt8:
    """Integer products of int8 codes with rows as the sum of two int8 terms: exact but for the rounding of the second
    term, 4e-5 of a row's largest value. For one scale per output, without zero points, and up to ``most`` rows, beyond
    which the doubled products take longer than decoding; ``otherwise`` for the rest."""

    otherwise: QuantizedProduct = InBlocks()
    most: int = 16

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, back: bool = False) -> Float[Array, "R _"]:
        if back or not _per_output_int8(kernel, x) or len(x) > self.most:
            return self.otherwise(x, kernel, back)
        x = x.astype(jnp.float32)
        step = _steps(x)
        first = jnp.round(x / step)
        second = jnp.round((x - first * step) * (2 * LAST) / step)
        high, low = jnp.split(_int8_sums(jnp.concatenate([first, second]), kernel), 2)
        return (high + low / (2 * LAST)) * (step * _per_output(kernel))


@dataclasses.dataclass(frozen=True)
class W8A8:
    """Integer products of int8 codes with rows rounded to int8, one scale per row. **Changes numbers** by about 1 %, as
    no other product does; never a default. ``otherwise`` for other kernels than those of `TwoInt8`."""

    otherwise: QuantizedProduct = InBlocks()

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, back: bool = False) -> Float[Array, "R _"]:
        if back or not _per_output_int8(kernel, x):
            return self.otherwise(x, kernel, back)
        x = x.astype(jnp.float32)
        step = _steps(x)
        # A second row of zeros: XLA:CPU multiplies one row by int8 codes 30 times slower than two (jax 0.10.2).
        rows = jnp.pad(jnp.round(x / step), ((0, 1 if len(x) == 1 else 0), (0, 0)))
        return _int8_sums(rows, kernel)[: len(x)] * (step * _per_output(kernel))


def _per_output_int8(kernel: QuantizedKernel, x: Float[Array, "R _"]) -> bool:
    """Whether a kernel has int8 codes with one scale per output, without zero points, for rows ``x``."""
    plain = kernel.kind.kind == "int8" and kernel.zero is None and kernel.scale.shape[-1] == 1
    return plain and _need_no_rounding(kernel, x)


def _need_no_rounding(kernel: QuantizedKernel, x: Float[Array, "R _"]) -> bool:
    """Whether scales may be applied to the result, so that the weights are not rounded as the tool does (`Codes`)."""
    return kernel.kind.rounded is None or x.dtype.itemsize == 2


def _steps(x: Float[Array, "R I"]) -> Float[Array, "R 1"]:
    """What one int8 step stands for in each row: a 127th of its largest magnitude, and never zero."""
    return jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny * 2**24) / LAST


def _int8_sums(rows: Float[Array, "R I"], kernel: QuantizedKernel) -> Float[Array, "R O"]:
    """The kernel is on the left: XLA:CPU multiplies 2 to 16 rows up to 1.3 times as fast (jax 0.10.2)."""
    dims = (((1,), (1,)), ((), ()))
    sums = jax.lax.dot_general(kernel.codes, rows.astype(jnp.int8), dims, preferred_element_type=jnp.int32)
    return sums.astype(jnp.float32).T


def _per_output(kernel: QuantizedKernel) -> Float[Array, "1 O"]:
    return kernel.kind.of_rows(kernel.scale, slice(0, kernel.codes.shape[-2])).T


@dataclasses.dataclass(frozen=True)
class Converted:
    """One product with the converted codes, which compilers for GPUs and TPUs fuse into it; one scale per output is
    applied to the result."""

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, back: bool = False) -> Float[Array, "R _"]:
        tiles = kernel.zero is not None or kernel.scale.shape[-1] > 1 or kernel.kind.halves
        if back or tiles or not _need_no_rounding(kernel, x):
            return Dequantized()(x, kernel, back)
        return matmul_f32(x, kernel.kind.values(kernel.codes).astype(x.dtype), True) * _per_output(kernel)


@dataclasses.dataclass(frozen=True)
class ByBackend:
    """On CPUs `TwoInt8` for rows of 16 bits, whose rounding is larger, and `InBlocks` for float32; on GPUs and TPUs
    `Converted`."""

    def __call__(self, x: Float[Array, "R _"], kernel: QuantizedKernel, back: bool = False) -> Float[Array, "R _"]:
        if not on_cpu():
            return Converted()(x, kernel, back)
        return (TwoInt8() if x.dtype.itemsize == 2 else InBlocks())(x, kernel, back)


class QuantizedArray(nnx.Variable):
    """Codes, scales or zero points: values that no optimizer changes."""


class QuantizedWeight(nnx.Module):
    """The storage form of quantised kernels, in place of a `KernelParam`: the arrays of a `QuantizedKernel`, each with
    ``lead`` dimensions of layers and experts. Inputs and outputs are flattened; ``ins``, ``outs``, ``in_axes`` and
    ``out_axes``: their sizes and logical axes before.
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
        kind: Codes,
        product: QuantizedProduct,
        in_axes: Sequence[Any],
        out_axes: Sequence[Any],
    ):
        self.codes, self.scale, self.zero, self.order = codes, scale, zero, order
        self.ins, self.outs = tuple(ins), tuple(outs)
        self.in_axes, self.out_axes = tuple(in_axes), tuple(out_axes)
        self.kind, self.product = kind, product

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
        """Its variables by name."""
        every = {"codes": self.codes, "scale": self.scale, "zero": self.zero, "order": self.order}
        return {name: variable for name, variable in every.items() if variable is not None}

    def holding(self, arrays: Mapping[str, nnx.Variable]) -> "QuantizedWeight":
        """The same with other variables."""
        own = (arrays.get(name) for name in ("codes", "scale", "zero", "order"))
        return QuantizedWeight(
            *own,
            ins=self.ins,
            outs=self.outs,
            kind=self.kind,
            product=self.product,
            in_axes=self.in_axes,
            out_axes=self.out_axes,
        )

    def read(self) -> QuantizedKernel:
        """The kernel, for products."""
        zero, order = (None if one is None else one[...] for one in (self.zero, self.order))
        return QuantizedKernel(self.codes[...], self.scale[...], zero, order, self.kind, self.product)


def labels_of(weight: nnx.Variable | QuantizedWeight) -> tuple[str, Mapping[str, Any]]:
    """The key of a kernel in whichever storage form, and its other labels (see `axes.label`)."""
    labels = (weight.codes if isinstance(weight, QuantizedWeight) else weight).get_metadata()
    return str(labels.get("key", "")).removesuffix(".codes"), labels
