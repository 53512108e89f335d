"""Kernels: the weights of linear maps. Callers multiply by kernels and never access the arrays directly.

A module stores ``kernel`` in one of two *storage forms*: an ``nnx.Param`` (a trained float array), or an ``nnx.Module``
with ``ins``, ``outs`` and ``read()``, such as quantized weights. `as_weight` wraps a parameter in `ParamWeight`, so
both forms have the same interface. ``read()`` returns a `Kernel`, the operand of products. For a parameter, ``read()``
returns a `DenseKernel`. For an ``nnx.Module``, ``read()`` returns a subclass with at least ``dense`` and ``shape``.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import PrecisionLike
from jaxtyping import Array, Float, Int

from nnxmoe.axes import LAYER_AXES, axes_of, parameter
from nnxmoe.layers.linear.matmul import batched_matmul_f32, dot_f32, einsum_f32, matmul, matmul_f32
from nnxmoe.layers.linear.staged_gather import gather_first_stage

STACK_AXES = (*LAYER_AXES, "expert")  # logical axes of stacked kernels: each index is a separate linear map

Product = Callable[[Array, "Kernel"], Array]


class Kernel:
    """Base class for kernels: a single linear map ``[I, O]``, or one map per expert ``[E, I, O]``.

    Subclasses are registered pytrees. If there are experts, the first dimension of all leaves is the expert dimension.
    Subclasses must define ``dense`` and ``shape``, and may override the remaining methods with faster implementations.

    Attributes:
        trainable: Whether products are differentiable with respect to the kernel. If True, ``vjp_kernel`` must be
            defined.
    """

    trainable: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape ``(I, O)`` or ``(E, I, O)``, independent of the memory layout."""
        raise TypeError(f"{type(self).__name__} does not define shape")

    def dense(self, dtype: Any = None) -> Float[Array, "*E I O"]:
        """Return the whole kernel as an array. ``dtype`` defaults to the precision of the storage form."""
        raise TypeError(f"{type(self).__name__} does not define dense")

    def transposed(self, dtype: Any = None) -> Float[Array, "*E O I"]:
        """Return `dense` with outputs before inputs, as in checkpoints."""
        return jnp.swapaxes(self.dense(dtype), -1, -2)

    def cast(self, dtype: Any) -> "Kernel":
        """Cast the kernel once for several products with operands of dtype ``dtype``. No-op if products do not cast."""
        return self

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        """Return ``x @ kernel``, accumulated in float32 and cast to ``x``'s dtype."""
        return matmul(x, self.dense(x.dtype))

    def matmul_f32(self, x: Float[Array, "*rows I"], precision: PrecisionLike = None) -> Float[Array, "*rows O"]:
        """Return ``x @ kernel``, accumulated and returned in float32. The kernel is cast to ``x``'s dtype."""
        return matmul_f32(x, self.dense(x.dtype), precision=precision)

    def output_grad(self, d: Float[Array, "*rows O"], y: Float[Array, "*rows O"]) -> Float[Array, "*rows O"]:
        """Convert the gradient ``d`` of `matmul_f32`'s result ``y`` to the gradient of the linear map's output."""
        return d

    def vjp_input(self, d: Float[Array, "*rows O"]) -> Float[Array, "*rows I"]:
        """Return the input gradient ``d @ kernel.T``, accumulated in float32 and cast to ``d``'s dtype."""
        return matmul(d, self.dense(d.dtype), True)

    def batched_matmul(self, rows: Float[Array, "E R I"]) -> Float[Array, "E R O"]:
        """Multiply the same number of rows per expert. XLA can partition this batched product over devices."""
        return einsum_f32("ERI,EIO->ERO", rows, self.dense(rows.dtype)).astype(rows.dtype)

    def matmul_per_head(
        self, x: Float[Array, "N R _"], first: int, count: int, transpose: bool = False
    ) -> Float[Array, "N R _"]:
        """Multiply the rows of each head by a slice of the head's kernel. All ``N`` heads have the same width.

        Args:
            x: Rows per head.
            first: First output of the slice.
            count: Number of outputs in the slice.
            transpose: Whether to multiply by the transposed slice, as in `vjp_input`.
        """
        array = self.transposed(x.dtype)
        head_kernels = array.reshape(len(x), -1, array.shape[-1])[:, first : first + count]
        return batched_matmul_f32(x, head_kernels, -2 if transpose else -1).astype(x.dtype)

    def apply(self, x: Float[Array, "..."], product: "Product") -> Float[Array, "..."]:
        """Return ``product(x, kernel)``. If the kernel is a sum, apply ``product`` to each term and add the results."""
        return product(x, self)

    def expert(self, index: int | Int[Array, ""]) -> Self:
        """Return the kernel of one expert."""
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), self)

    def vjp_kernel(self, x: Float[Array, "*rows I"], d: Float[Array, "*rows O"]) -> Self:
        """Return the float32 gradient ``x.T @ d`` of a single linear map, as a kernel of the same class."""
        raise TypeError(f"{type(self).__name__} is not trainable")


class Adapter(Protocol):
    """Protocol for trainable adapters of a frozen kernel; see `nnxmoe.layers.linear.lora.LoRA`."""

    def adapt(self, kernel: Kernel) -> Kernel: ...

    def outputs_per_map(self, x: Float[Array, "*rows I"], product: Product) -> list[Float[Array, "*rows O"]]: ...

    def lookup(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]: ...


def with_adapter(kernel: Kernel, adapter: Adapter | None) -> Kernel:
    """Return the kernel with the adapter attached, or the kernel itself if ``adapter`` is ``None``."""
    return kernel if adapter is None else adapter.adapt(kernel)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseKernel(Kernel):
    """Kernel stored as a float array ``[*E, O, I]``, or ``[*E, I, O]`` (Flax's order) if ``ins_first``."""

    array: Any  # a float array, or any leaf that a JAX transformation substitutes for the array
    ins_first: bool = dataclasses.field(default=False, metadata={"static": True})

    trainable: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, columns = self.array.shape
        return (*lead, rows, columns) if self.ins_first else (*lead, columns, rows)

    def dense(self, dtype: Any = None) -> Float[Array, "*E I O"]:
        array = self.cast(dtype).array
        return array if self.ins_first else jnp.swapaxes(array, -1, -2)

    def transposed(self, dtype: Any = None) -> Float[Array, "*E O I"]:
        array = self.cast(dtype).array
        return jnp.swapaxes(array, -1, -2) if self.ins_first else array

    def cast(self, dtype: Any) -> "DenseKernel":
        return self if dtype is None else DenseKernel(self.array.astype(dtype), self.ins_first)

    def __call__(self, x: Float[Array, "*rows I"]) -> Float[Array, "*rows O"]:
        return matmul(x, self.array, not self.ins_first)

    def matmul_f32(self, x: Float[Array, "*rows I"], precision: PrecisionLike = None) -> Float[Array, "*rows O"]:
        return matmul_f32(x, self.array.astype(x.dtype), not self.ins_first, precision)

    def vjp_input(self, d: Float[Array, "*rows O"]) -> Float[Array, "*rows I"]:
        return matmul(d, jnp.swapaxes(self.array, -1, -2) if self.ins_first else self.array)

    def batched_matmul(self, rows: Float[Array, "E R I"]) -> Float[Array, "E R O"]:
        spec = "ERI,EIO->ERO" if self.ins_first else "ERI,EOI->ERO"
        return einsum_f32(spec, rows, self.array.astype(rows.dtype)).astype(rows.dtype)

    def vjp_kernel(self, x: Float[Array, "*rows I"], d: Float[Array, "*rows O"]) -> "DenseKernel":
        x, d = x.reshape(-1, x.shape[-1]), d.reshape(-1, d.shape[-1])
        operands = (x, d) if self.ins_first else (d, x)
        return DenseKernel(dot_f32(*operands, -2, -2), self.ins_first)

    def __jax_array__(self) -> Array:
        """Convert to an array, so that a custom `GroupedMatmul` can pass the kernel to `jax.numpy`."""
        return self.dense()


def as_kernel(kernel: Kernel | Float[Array, "*E I O"]) -> Kernel:
    """Convert an array ``[*E, I, O]`` to a `DenseKernel`. A `Kernel` is returned unchanged."""
    return kernel if isinstance(kernel, Kernel) else DenseKernel(kernel, ins_first=True)


def is_kernel(variable: Any) -> bool:
    """Return whether a variable is a linear map's kernel that `kernel_param` created."""
    return isinstance(variable, nnx.Param) and variable.get_metadata().get("inputs") is not None


def as_weight(kernel: Any) -> Any:
    """Return a module's kernel as an object with ``ins``, ``outs``, ``lead``, ``logical_axes`` and ``read()``.

    Parameters are wrapped in `ParamWeight`. Modules such as quantized weights are returned unchanged.
    """
    return ParamWeight(kernel) if isinstance(kernel, nnx.Variable) else kernel


@dataclasses.dataclass(frozen=True)
class ParamWeight:
    """Trained weight of a linear map, stored as an array ``[*lead, *outs, *ins]``. ``lead`` are layers and experts.

    Inputs and outputs may have multiple dimensions, such as heads. ``read`` flattens inputs and outputs to one
    dimension each. Outputs come first as in Hugging Face checkpoints, so loading does not transpose arrays. CPUs
    multiply a few rows faster in this order. XLA's dot products on GPUs and TPUs accept either order. tokamax's grouped
    kernel for Hopper is optimized for this order, but the kernel for TPUs requires inputs first. After
    ``move_inputs_first``, the array is ``[*lead, *ins, *outs]``, as in Linen.

    Attributes:
        variable: An ``nnx.Param`` from `kernel_param`, or an ``nnx.LoRAParam``. Flax's Linen bridge adds only variables
            of these types to the collection ``params``.
    """

    variable: nnx.Variable

    @property
    def ins_first(self) -> bool:
        """Whether the input dimensions come before the output dimensions."""
        return self.variable.get_metadata().get("ins_first", False)

    def split(self, dimensions: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Split a sequence with one element per dimension, such as the shape or the axes, into (lead, ins, outs)."""
        num_lead = sum(axis in STACK_AXES for axis in axes_of(self.variable))
        inputs = self.variable.get_metadata()["inputs"]
        end = num_lead + inputs if self.ins_first else len(dimensions) - inputs
        lead, middle, last = tuple(dimensions[:num_lead]), tuple(dimensions[num_lead:end]), tuple(dimensions[end:])
        return (lead, middle, last) if self.ins_first else (lead, last, middle)

    @property
    def logical_axes(self) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Logical axes as (layers and experts, inputs, outputs)."""
        return self.split(axes_of(self.variable))

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the layer and expert dimensions. Inside a scan over layers, there is no layer dimension."""
        return self.split(self.variable.shape)[0]

    @property
    def ins(self) -> tuple[int, ...]:
        return self.split(self.variable.shape)[1]

    @property
    def outs(self) -> tuple[int, ...]:
        return self.split(self.variable.shape)[2]

    def read(self) -> DenseKernel:
        """Return the kernel ``[*lead, prod(ins), prod(outs)]``."""
        lead, ins, outs = self.split(self.variable.shape)
        sizes = math.prod(ins), math.prod(outs)
        shape = *lead, *(sizes if self.ins_first else sizes[::-1])
        return DenseKernel(gather_first_stage(self.variable).reshape(shape), self.ins_first)

    def move_inputs_first(self) -> None:
        """Transpose the variable in place, so that the input dimensions come first."""
        value = self.variable.get_value()
        if isinstance(value, jax.ShapeDtypeStruct):
            value = jax.ShapeDtypeStruct(flax_order(self.variable, value.shape), value.dtype)
        else:
            value = jnp.transpose(value, flax_order(self.variable, range(self.variable.ndim)))
        axes = flax_order(self.variable, axes_of(self.variable))
        self.variable.set_value(value)
        self.variable.set_metadata(out_sharding=axes, ins_first=True)


def flax_order(variable: nnx.Variable, dimensions: Sequence[Any]) -> tuple[Any, ...]:
    """Reorder a sequence with one element per kernel dimension to Flax's order, ``[*lead, *ins, *outs]``.

    The sequence may omit layers or experts. If the variable is not a kernel, the order does not change.
    """
    inputs = variable.get_metadata().get("inputs")
    if not inputs or variable.get_metadata().get("ins_first"):
        return tuple(dimensions)
    num_lead = len(dimensions) - sum(axis not in STACK_AXES for axis in axes_of(variable))
    end = len(dimensions) - inputs
    return (*dimensions[:num_lead], *dimensions[end:], *dimensions[num_lead:end])


def fan_in(inputs: Sequence[int], gain: float = 1.0) -> nnx.Initializer:
    """Return a normal initializer with standard deviation ``gain / sqrt(fan_in)``.

    With this initializer, the scale of the output is ``gain`` times the scale of the input.
    """
    return nnx.initializers.normal(gain * math.prod(inputs) ** -0.5)


def kernel_param(
    ins: Sequence[int],
    outs: Sequence[int],
    axes: Sequence[str | None],
    *,
    lead: Sequence[int] = (),
    gain: float = 1.0,
    dtype: jnp.dtype,
    rngs: nnx.Rngs | None,
    param_type: type[nnx.Param] = nnx.Param,
) -> nnx.Param:
    """Create a kernel ``[*lead, *outs, *ins]``. ``axes`` are the logical axes of ``(*lead, *ins, *outs)``.

    If ``rngs`` is None, the kernel is abstract (shape and dtype only).
    """
    num_lead, end = len(lead), len(lead) + len(ins)
    shape, names = (*lead, *outs, *ins), (*axes[:num_lead], *axes[end:], *axes[num_lead:end])
    param = parameter(shape, names, fan_in(ins, gain), dtype=dtype, rngs=rngs, param_type=param_type, inputs=len(ins))
    assert isinstance(param, nnx.Param)
    return param
