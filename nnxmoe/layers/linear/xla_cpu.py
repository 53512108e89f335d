"""Workarounds for XLA:CPU, all of them: each with what goes wrong without it, where that was seen, and its test.

On other backends, and with releases that do not need it, a function here is the plain operation. A test runs each
operation without its workaround and fails once XLA no longer needs it: `tests/layers/test_xla_cpu.py`, and for
`write_rows` `tests/model/test_memory_rules.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from nnxmoe.sharding import is_static

COPIES_16_BITS = jax.__version_info__ < (0, 12)  # 0.12.0 is the oldest release seen not to cast whole 16-bit arrays


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def one_cpu() -> bool:
    """Whether programs run on a single CPU device, so that no batch is split."""
    return on_cpu() and jax.device_count() == 1


def write_rows(buffer: Array, new: Array, slots: Int[Array, "B 1"], axis: int) -> Array:
    """``buffer`` with one new token per row, each at its own slot of ``axis``; slots out of range are not written.

    XLA:CPU fuses a write with each use of the result and copies the whole buffer for each, but not the result of a
    loop (jax 0.10.2, 0.12.0). It unrolls a loop of one trip, so there are at least two, of which the second repeats the
    first. What rows keep is read before the loop: XLA casts all of a bfloat16 buffer for a select inside it.
    """
    size, rows, slots = buffer.shape[axis], buffer.shape[0], slots.astype(jnp.int32)
    at, real = jnp.minimum(slots[:, 0], size - 1), slots < size
    kept = jax.vmap(lambda row, slot: jax.lax.dynamic_slice_in_dim(row, slot, 1, axis - 1))(buffer, at)
    new = jnp.where(real.reshape(rows, *(1,) * (buffer.ndim - 1)), new, kept)
    new = jax.lax.optimization_barrier(new)

    def write(i: Int[Array, ""], buffer: Array) -> Array:
        row = i.astype(jnp.int32) % rows
        start = [jnp.int32(0)] * buffer.ndim
        start[0], start[axis] = row, at[row]
        return jax.lax.dynamic_update_slice(buffer, jax.lax.dynamic_slice_in_dim(new, row, 1, 0), start)

    return jax.lax.fori_loop(0, max(2, rows), write, buffer)


def pad_single_row(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """``x`` with a second row of zeros along ``axis`` if it has one row of a 16-bit dtype.

    A dot of one bfloat16 row becomes a matrix-vector product, for which XLA:CPU casts the whole kernel to float32
    (jax 0.10.2, 0.12.0); with two rows it does not. The barrier keeps XLA from simplifying the padding away.
    """
    if not (on_cpu() and x.shape[axis] == 1 and jnp.finfo(x.dtype).bits == 16):
        return x
    return jax.lax.optimization_barrier(jnp.concatenate([x, jnp.zeros_like(x)], axis=axis))


def kernel_on_the_left(x: Num[Array, "R I"]) -> bool:
    """Whether to compute ``x @ kernel.T`` of few float32 rows x, or of int8 rows, as ``(kernel @ x.T).T``.

    XLA:CPU rearranges all of the right operand before it multiplies, which takes up to three times as long as the
    product of a few rows, and swaps the operands back where it can, unless there is a barrier (jax 0.10.2, 0.12.0).
    With 256 rows it is no slower; one row is a matrix-vector product. In bfloat16 the gain is small from 32 rows on,
    and below it is a loss.

    With jax 0.10.2, products of 2 to 16 int8 rows are up to 1.3 times as fast with the kernel on the left. With 0.12.0
    the side does not matter, except that a kernel of 32000 outputs takes twice as long on the left.
    """
    if x.dtype == jnp.int8:
        return on_cpu() and jax.__version_info__ < (0, 12)
    return on_cpu() and is_static(x.shape[0]) and 2 <= x.shape[0] <= 128 and x.dtype == jnp.float32


def widen(*operands: Float[Array, "..."]) -> tuple[Float[Array, "..."], ...]:
    """The operands of a contraction of arbitrary dimensions, in float32.

    XLA:CPU compiles a bfloat16 x bfloat16 -> float32 dot whose batch dimensions do not lead, such as
    ``bhn,hnr->bhr``, and fails to execute it: "Unsupported element type for DotThunk" (jax 0.10.2, 0.12.0).
    """
    return tuple(operand.astype(jnp.float32) for operand in operands) if on_cpu() else operands


def carried(*values: Any) -> tuple[Any, ...]:
    """Values to be carried through a loop that does not change them.

    XLA:CPU hoists the cast of a 16-bit loop invariant to float32 out of the loop and so copies the whole array
    (jax 0.10.2), and keeps more float32 rows alive around the loops of expert parallelism (jax 0.12.0: a third more
    temporary memory per step; `tests/model/test_modes.py`). A carried value behind a barrier is not a loop invariant.
    """
    return jax.lax.optimization_barrier(values) if on_cpu() else values


def as_bits(array: Array) -> Array:
    """A 16-bit float array as integers, for reads and updates of parts of it in a loop; other arrays unchanged.

    XLA:CPU updates a part of a bfloat16 array by casting all of it to float32 and back (jax 0.10.2: 3 times the time),
    and keeps a float32 copy of all of an array of which a loop reads parts; no longer in 0.12.0.
    """
    needed = COPIES_16_BITS and on_cpu() and array.dtype.itemsize == 2
    return jax.lax.bitcast_convert_type(array, jnp.uint16) if needed else array


def from_bits(array: Array, dtype: jnp.dtype) -> Array:
    """The inverse of `as_bits`."""
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)
