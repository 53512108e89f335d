"""Matrix products with float32 accumulation (`dot_f32`) and custom backward passes.

The call path of `nnxmoe.layers.linear.linear.Linear` is ``Linear -> DenseKernel -> matmul``.

The precision of float32 products is set by ``jax.default_matmul_precision``. The default is TF32 on NVIDIA GPUs and
bfloat16 on TPUs. Pass ``precision`` if full float32 precision is required on every platform.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jaxtyping import Array, Float

from nnxmoe.layers.linear import xla_cpu
from nnxmoe.layers.linear.multilinear import multilinear
from nnxmoe.sharding import reduction_dtype

_DOT_GENERAL = jax.lax.dot_general.__code__


def _is_intercepted() -> bool:
    """Return whether qwix has replaced the code of `jax.lax.dot_general`, for example to add LoRA to products."""
    return jax.lax.dot_general.__code__ is not _DOT_GENERAL


def matmul(x: Float[Array, "*rows I"], kernel: Float[Array, "_ _"], transpose: bool = False) -> Float[Array, "*rows O"]:
    """Return ``x @ kernel``, or ``x @ kernel.T`` if ``transpose``. The kernel is cast to ``x``'s dtype.

    Products accumulate in float32 and return ``x``'s dtype. This also holds for the backward pass, whereas JAX's
    built-in derivative would multiply float32 copies of bfloat16 operands. The gradient of a float32 kernel is
    accumulated and returned in float32, without rounding to ``x``'s dtype. On a mesh, XLA sums this gradient over
    devices in the dtype set by `reduce_gradients_in`. Forward mode and higher-order derivatives are supported.

    If qwix intercepts `jax.lax.dot_general`, JAX derives the gradients, because the custom gradients lack the terms
    that qwix adds.
    """
    kernel_dtype, sum_dtype = kernel.dtype, reduction_dtype(jnp.float32, x.dtype)

    def product(x: Array, kernel: Array) -> Array:
        return matmul_f32(x, kernel.astype(x.dtype), transpose).astype(x.dtype)

    def x_gradient(kernel: Array, d_out: Array) -> Array:
        rows, kernel = d_out.reshape(-1, d_out.shape[-1]), kernel.astype(d_out.dtype)
        out = dot_f32(rows, kernel, -1, -2 if transpose else -1).astype(d_out.dtype)
        return out.reshape(*d_out.shape[:-1], out.shape[-1])

    def kernel_gradient(x: Array, d_out: Array) -> Array:
        x, d_out = x.reshape(-1, x.shape[-1]), d_out.reshape(-1, d_out.shape[-1])
        left, right = (d_out, x) if transpose else (x, d_out)
        return dot_f32(left, right, -2, -2, dtype=sum_dtype).astype(kernel_dtype)

    if _is_intercepted():
        return product(x, kernel)
    return multilinear(product, {0: x_gradient, 1: kernel_gradient})(x, kernel)


def matmul_f32(
    x: Float[Array, "*rows I"],
    kernel: Float[Array, "_ _"],
    transpose: bool = False,
    precision: PrecisionLike = None,
) -> Float[Array, "*rows O"]:
    """Return ``x @ kernel`` or ``x @ kernel.T``, accumulated and returned in float32. Operands are not cast."""
    rows = x.reshape(-1, x.shape[-1])
    # qwix applies LoRA only to kernels that are the right operand.
    if transpose and not _is_intercepted() and xla_cpu.is_faster_with_kernel_first(rows):
        out = jax.lax.optimization_barrier(dot_f32(kernel, rows, -1, -1, precision)).T
    else:
        out = dot_f32(rows, kernel, -1, -1 if transpose else -2, precision)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def dot_f32(
    x: Float[Array, "*b _ _"],
    y: Float[Array, "*b _ _"],
    x_axis: int,
    y_axis: int,
    precision: PrecisionLike = None,
    dtype: Any = jnp.float32,
) -> Float[Array, "*b _ _"]:
    """Contract axis ``x_axis`` of x with axis ``y_axis`` of y (-2 or -1). Accumulate in float32, return ``dtype``.

    Batch dimensions come first, because XLA:CPU cannot execute some bfloat16 products with other dimension orders.
    """
    row_axis = -3 - x_axis
    is_linear = x.ndim == 2 and x_axis == y_axis == -1 and x.dtype.itemsize == 2 and not _is_intercepted()
    if is_linear and (blocks := xla_cpu.output_blocks(x, y.shape[0], max_rows=xla_cpu.FEW_ROWS)):
        rows = x.astype(jnp.float32)
        terms = lambda weights: [weights.astype(jnp.float32) * row for row in rows]  # noqa: E731
        return xla_cpu.sum_in_one_loop(blocks, terms, y).astype(dtype)
    padded = xla_cpu.pad_rows(x, row_axis)
    if padded is not x:
        return dot_f32(padded, y, x_axis, y_axis, precision, dtype)[..., : x.shape[row_axis], :]
    batch = tuple(range(x.ndim - 2))
    dimensions = ((x.ndim + x_axis,), (y.ndim + y_axis,)), (batch, batch)
    return jax.lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=dtype)


def batched_matmul_f32(x: Float[Array, "*b M I"], y: Float[Array, "*b _ _"], y_axis: int) -> Float[Array, "*b M N"]:
    """Return batched products ``x @ y`` (``y_axis`` -2) or ``x @ y.T`` (``y_axis`` -1) in float32.

    The backward pass casts the operands to float32, and the gradients to the dtypes of the operands.
    """
    x_dtype, y_dtype = x.dtype, y.dtype

    def product(x: Array, y: Array) -> Array:
        return dot_f32(x, y, -1, y_axis)

    def x_gradient(y: Array, d_out: Array) -> Array:
        return dot_f32(d_out, y.astype(jnp.float32), -1, -3 - y_axis).astype(x_dtype)

    def y_gradient(x: Array, d_out: Array) -> Array:
        x = x.astype(jnp.float32)
        left, right = (d_out, x) if y_axis == -1 else (x, d_out)
        return dot_f32(left, right, -2, -2).astype(y_dtype)

    return multilinear(product, {0: x_gradient, 1: y_gradient})(x, y)


def einsum_f32(spec: str, *operands: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute an einsum, accumulated and returned in float32. XLA can partition the product over devices."""
    if xla_cpu.on_cpu():
        operands = xla_cpu.cast_to_f32(*operands)
    return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)
