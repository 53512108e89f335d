"""Matrix products of arrays, for all dots of the package, with accumulation in float32 and custom backward passes.

Products of float32 operands use the precision set by ``jax.default_matmul_precision``, by default TF32 on NVIDIA GPUs
and bfloat16 on TPUs. Pass ``precision`` where float32 is needed on every platform.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxmoe.layers.linear.multilinear import multilinear
from nnxmoe.layers.linear.xla_cpu import kernel_on_the_left, pad_single_row, widen


def matmul(x: Float[Array, "*rows I"], kernel: Float[Array, "_ _"], transpose: bool = False) -> Float[Array, "*rows O"]:
    """``x @ kernel``, or ``x @ kernel.T`` with ``transpose``; the kernel is cast to ``x``'s dtype.

    Products accumulate in float32 and return ``x``'s dtype, also in the backward pass, where JAX's own derivative would
    multiply float32 copies of bfloat16 operands. The gradient of a float32 kernel is accumulated and returned in
    float32, without rounding to ``x``'s dtype. Supports forward mode and higher derivatives.
    """

    def product(x: Array, kernel: Array) -> Array:
        return matmul_f32(x, kernel.astype(x.dtype), transpose).astype(x.dtype)

    def d_x(kernel: Array, d_out: Array) -> Array:
        rows, kernel = d_out.reshape(-1, d_out.shape[-1]), kernel.astype(d_out.dtype)
        out = dot_f32(rows, kernel, -1, -2 if transpose else -1).astype(d_out.dtype)
        return out.reshape(*d_out.shape[:-1], out.shape[-1])

    def d_kernel(x: Array, d_out: Array) -> Array:
        x, d_out = x.reshape(-1, x.shape[-1]), d_out.reshape(-1, d_out.shape[-1])
        pair = (d_out, x) if transpose else (x, d_out)
        return dot_f32(*pair, -2, -2).astype(dtype)

    dtype = kernel.dtype
    return multilinear(product, {0: d_x, 1: d_kernel})(x, kernel)


def dot_f32(
    x: Float[Array, "*b _ _"], y: Float[Array, "*b _ _"], of_x: int, of_y: int, precision: jax.lax.PrecisionLike = None
) -> Float[Array, "*b _ _"]:
    """Contraction of dimension ``of_x`` of x with ``of_y`` of y (-2 or -1 each), accumulated in float32.

    Batch dimensions come first: XLA:CPU cannot execute all bfloat16 products with other orders.
    """
    padded, lead = pad_single_row(x, -3 - of_x), tuple(range(x.ndim - 2))
    dims = ((x.ndim + of_x,), (y.ndim + of_y,)), (lead, lead)
    out = jax.lax.dot_general(padded, y, dims, precision=precision, preferred_element_type=jnp.float32)
    return out if padded is x else out[..., :1, :]


def matmul_f32(
    x: Float[Array, "*rows I"],
    kernel: Float[Array, "_ _"],
    transpose: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*rows O"]:
    """``x @ kernel`` or ``x @ kernel.T`` of operands in their own dtype, accumulated and returned in float32."""
    rows = x.reshape(-1, x.shape[-1])
    if transpose and kernel_on_the_left(rows):
        out = jax.lax.optimization_barrier(dot_f32(kernel, rows, -1, -1, precision)).T
    else:
        out = dot_f32(rows, kernel, -1, -1 if transpose else -2, precision)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def batched_matmul_f32(x: Float[Array, "*b M I"], y: Float[Array, "*b _ _"], of_y: int) -> Float[Array, "*b M N"]:
    """``x @ y`` for each matrix (``of_y`` -2), or ``x @ y.T`` (-1), accumulated and returned in float32.

    The backward casts both operands to float32, and its results back to the operands' dtypes.
    """

    def product(x: Array, y: Array) -> Array:
        return dot_f32(x, y, -1, of_y)

    def d_x(y: Array, d_out: Array) -> Array:
        return dot_f32(d_out, y.astype(jnp.float32), -1, -3 - of_y).astype(dtypes[0])

    def d_y(x: Array, d_out: Array) -> Array:
        pair = (d_out, x.astype(jnp.float32)) if of_y == -1 else (x.astype(jnp.float32), d_out)
        return dot_f32(*pair, -2, -2).astype(dtypes[1])

    dtypes = x.dtype, y.dtype
    return multilinear(product, {0: d_x, 1: d_y})(x, y)


def einsum_f32(spec: str, *operands: Float[Array, "..."]) -> Float[Array, "..."]:
    """A contraction of any dimensions, accumulated and returned in float32; XLA can partition it over devices."""
    return jnp.einsum(spec, *widen(*operands), preferred_element_type=jnp.float32)
