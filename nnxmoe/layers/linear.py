"""Matrix products: the one home of every dot, and the projection built on it.

Products of float32 operands have the precision that ``jax.default_matmul_precision`` sets, which by default is TF32 on
NVIDIA GPUs and bfloat16 on TPUs. A caller that needs float32 everywhere passes ``precision``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnxmoe.axes import parameter
from nnxmoe.layers.lora import LoRA


def matmul(x: Float[Array, "*rows I"], kernel: Float[Array, "_ _"], transpose: bool = False) -> Float[Array, "*rows O"]:
    """``x @ kernel``, or with ``transpose`` ``x @ kernel.T``, accumulated in float32 and returned in ``x``'s dtype, to
    which the kernel is cast.

    So are the products of its backward, which JAX would compute in float32, of float32 copies of bfloat16 operands;
    and the gradient of a float32 kernel is what was accumulated, never rounded to ``x``'s dtype.
    """
    return _matmul(x, kernel, transpose)


def _product(x: Array, kernel: Array, transpose: bool) -> Array:
    # The product itself, not a call of `matmul`: policies of remat are to find it.
    return matmul_f32(x, kernel.astype(x.dtype), transpose).astype(x.dtype)


def _matmul_forward(x: Array, kernel: Array, transpose: bool) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, kernel, transpose), (x, kernel)


def _matmul_backward(transpose: bool, kept: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    x, kernel = kept
    rows, d_rows = x.reshape(-1, x.shape[-1]), d_out.reshape(-1, d_out.shape[-1])
    d_x = dot_f32(d_rows, kernel.astype(x.dtype), -1, -2 if transpose else -1).astype(x.dtype)
    d_kernel = dot_f32(d_rows, rows, -2, -2) if transpose else dot_f32(rows, d_rows, -2, -2)
    return d_x.reshape(x.shape), d_kernel.astype(kernel.dtype)


_matmul = jax.custom_vjp(_product, nondiff_argnums=(2,))
_matmul.defvjp(_matmul_forward, _matmul_backward)


def dot_f32(
    x: Float[Array, "*b _ _"], y: Float[Array, "*b _ _"], of_x: int, of_y: int, precision: jax.lax.PrecisionLike = None
) -> Float[Array, "*b _ _"]:
    """Sum over dimension ``of_x`` of x and ``of_y`` of y (-2 or -1), accumulated in float32; batch dimensions lead.

    XLA:CPU fails to run some bfloat16 products whose batch dimensions do not lead, and casts all of y to float32 where
    x has a single row: one row of 16 bits is computed as two.
    """
    rows = -3 - of_x
    alone = x.shape[rows] == 1 and jnp.finfo(x.dtype).bits == 16 and jax.default_backend() == "cpu"
    if alone:
        x = jax.lax.optimization_barrier(jnp.concatenate([x, jnp.zeros_like(x)], axis=rows))
    lead = tuple(range(x.ndim - 2))
    dims = ((x.ndim + of_x,), (y.ndim + of_y,)), (lead, lead)
    out = jax.lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)
    return out[..., :1, :] if alone else out


def matmul_f32(
    x: Float[Array, "*rows I"],
    kernel: Float[Array, "_ _"],
    transpose: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*rows O"]:
    """``x @ kernel`` or ``x @ kernel.T`` of operands in their own dtype, accumulated and returned in float32."""
    out = dot_f32(x.reshape(-1, x.shape[-1]), kernel, -1, -1 if transpose else -2, precision)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def batched(x: Float[Array, "*b M I"], y: Float[Array, "*b _ _"], of_y: int) -> Float[Array, "*b M N"]:
    """``x @ y`` for each matrix (``of_y`` -2), or ``x @ y.T`` (-1), accumulated and returned in float32.

    The backward casts both operands to float32, and its results back to the operands' dtypes.
    """
    return _batched(x, y, of_y)


def _batched_product(x: Array, y: Array, of_y: int) -> Array:
    return dot_f32(x, y, -1, of_y)


def _batched_forward(x: Array, y: Array, of_y: int) -> tuple[Array, tuple[Array, Array]]:
    return _batched_product(x, y, of_y), (x, y)


def _batched_backward(of_y: int, kept: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    x, y = (operand.astype(jnp.float32) for operand in kept)
    d_x = dot_f32(d_out, y, -1, -3 - of_y)
    d_y = dot_f32(d_out, x, -2, -2) if of_y == -1 else dot_f32(x, d_out, -2, -2)
    return d_x.astype(kept[0].dtype), d_y.astype(kept[1].dtype)


_batched = jax.custom_vjp(_batched_product, nondiff_argnums=(2,))
_batched.defvjp(_batched_forward, _batched_backward)


def einsum(spec: str, *operands: Float[Array, "..."]) -> Float[Array, "..."]:
    """A contraction accumulated and returned in float32, of any dimensions, which compilers split over devices.

    XLA:CPU compiles some bfloat16 -> float32 dots and fails when it runs them, so there the operands are cast.
    """
    if jax.default_backend() == "cpu":
        operands = tuple(operand.astype(jnp.float32) for operand in operands)
    return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)


def fan_in(inputs: Sequence[int], gain: float = 1.0) -> nnx.Initializer:
    """Normal with variance 1 / inputs, so that a projection keeps the scale of what it is given, or ``gain`` of it."""
    return nnx.initializers.normal(gain * math.prod(inputs) ** -0.5)


class Linear(nnx.Module):
    """``x[… *ins] -> [… *outs]``; kernel ``[*ins, *outs]``: heads are dimensions; bias flat, as it is stored.

    ``gain``: how much of its input's scale the output starts with. ``lora``: an adapter (`nnxmoe.train.lora.add`).
    """

    adapted: ClassVar[Mapping[str, tuple[str, ...]]] = {"lora": ("kernel",)}  # by an adapter: which kernels

    def __init__(
        self,
        ins: Sequence[int],
        outs: Sequence[int],
        axes: Sequence[str],
        *,
        bias: bool = False,
        gain: float = 1.0,
        dtype: jnp.dtype,
        rngs: nnx.Rngs | None,
    ):
        self.rank = len(ins)
        self.lora: LoRA | None = None
        self.kernel = parameter((*ins, *outs), axes, fan_in(ins, gain), dtype=dtype, rngs=rngs, inputs=len(ins))
        if bias:
            zeros = nnx.initializers.zeros
            self.bias = parameter((math.prod(outs),), (axes[len(ins)],), zeros, dtype=dtype, rngs=rngs)
        else:
            self.bias = None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        kernel = self.kernel[...]
        ins, outs = kernel.shape[: self.rank], kernel.shape[self.rank :]
        lead = x.shape[: x.ndim - self.rank]
        x = x.reshape(*lead, math.prod(ins))
        y = matmul(x, kernel.reshape(math.prod(ins), math.prod(outs)))
        y = y if self.bias is None else y + jnp.broadcast_to(self.bias[...].astype(y.dtype), y.shape)
        y = y if self.lora is None else y + self.lora(x, matmul)
        return y.reshape(*lead, *outs)

    def whole(self) -> Float[Array, "..."]:
        """The kernel with what its adapter adds, for those that do not call it: in float32 where there is one."""
        kernel = self.kernel[...]
        return kernel if self.lora is None else kernel.astype(jnp.float32) + self.lora.delta().reshape(kernel.shape)
