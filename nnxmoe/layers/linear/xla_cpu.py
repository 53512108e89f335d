"""All workarounds for XLA:CPU, each with what goes wrong without it, the releases where that was seen, and its test.

Callers apply a workaround in one branch, which is false on other backends. A test runs each operation without its
workaround and fails once XLA no longer needs it: `tests/layers/test_xla_cpu.py`, and for `write_rows`
`tests/model/test_memory_rules.py`. Costs are processor time without the workaround, relative to with it, on two cores
with jax 0.10.2.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nnxmoe.sharding import is_static

COPIES_16_BITS = jax.__version_info__ < (0, 12)  # 0.12.0 is the oldest release seen not to cast whole 16-bit arrays


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def one_cpu() -> bool:
    """Return whether programs run on a single CPU device, so that no batch is sharded."""
    return on_cpu() and jax.device_count() == 1


def write_rows(buffer: Array, new: Array, slots: Int[Array, "B 1"], axis: int) -> Array:
    """Write one new token per row into ``buffer``, at the row's slot along ``axis``. Drops slots out of range.

    XLA:CPU fuses a write with each use of the result and copies the whole buffer for each, but not the result of a
    loop (jax 0.10.2, 0.12.0). XLA unrolls a loop of one trip, so the loop has at least two; the second trip repeats the
    first. The values of dropped slots are read before the loop: XLA casts all of a bfloat16 buffer for a select inside.
    Cost of a write and the attention that reads 4096 slots: 1.8 in float32, 1.3 in bfloat16.
    """
    size, rows, slots = buffer.shape[axis], buffer.shape[0], slots.astype(jnp.int32)
    starts, in_range = jnp.minimum(slots[:, 0], size - 1), slots < size
    old = jax.vmap(lambda row, slot: jax.lax.dynamic_slice_in_dim(row, slot, 1, axis - 1))(buffer, starts)
    new = jnp.where(in_range.reshape(rows, *(1,) * (buffer.ndim - 1)), new, old)
    new = jax.lax.optimization_barrier(new)

    def write(i: Int[Array, ""], buffer: Array) -> Array:
        row = i.astype(jnp.int32) % rows
        start = [jnp.int32(0)] * buffer.ndim
        start[0], start[axis] = row, starts[row]
        return jax.lax.dynamic_update_slice(buffer, jax.lax.dynamic_slice_in_dim(new, row, 1, 0), start)

    return jax.lax.fori_loop(0, max(2, rows), write, buffer)


def casts_kernel_of_single_row(x: Float[Array, "..."], axis: int) -> bool:
    """Return whether XLA casts the whole other operand of a dot to float32, because ``x`` is a single 16-bit row.

    A dot of one bfloat16 row becomes a matrix-vector product, for which XLA:CPU casts the whole kernel (jax 0.10.2,
    0.12.0). It does not with two rows; see `add_zero_row`. Cost of the product: 11.
    """
    return on_cpu() and x.shape[axis] == 1 and jnp.finfo(x.dtype).bits == 16


def add_zero_row(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Append a row of zeros to a single row. The barrier keeps XLA from simplifying it away."""
    return jax.lax.optimization_barrier(jnp.concatenate([x, jnp.zeros_like(x)], axis=axis))


def is_faster_with_kernel_first(x: Float[Array, "R I"]) -> bool:
    """Return whether to compute ``x @ kernel.T`` of a few float32 rows as ``(kernel @ x.T).T``.

    XLA:CPU rearranges all of the right operand before it multiplies, which takes up to three times as long as the
    product of a few rows. It swaps the operands back where it can, unless there is a barrier (jax 0.10.2, 0.12.0). With
    256 rows the order does not matter; one row is a matrix-vector product. In bfloat16 it is slower below 32 rows. Cost
    of the product: 3.1 for 2 rows, 1.6 for 16 rows, 1.2 for 64 rows.
    """
    return on_cpu() and is_static(x.shape[0]) and 2 <= x.shape[0] <= 128 and x.dtype == jnp.float32


def widen(*operands: Float[Array, "..."]) -> tuple[Float[Array, "..."], ...]:
    """Cast the operands of a contraction of arbitrary dimensions to float32.

    XLA:CPU compiles a bfloat16 x bfloat16 -> float32 dot whose batch dimensions do not lead, such as
    ``bhn,hnr->bhr``, and fails to execute it: "Unsupported element type for DotThunk" (jax 0.10.2, 0.12.0).
    """
    return tuple(operand.astype(jnp.float32) for operand in operands)


def carried(*values: Any) -> tuple[Any, ...]:
    """Return values for the carry of a loop that does not change them.

    XLA:CPU hoists the cast of a 16-bit loop invariant to float32 out of the loop and so copies the whole array
    (jax 0.10.2), and keeps more float32 rows alive around the loops of expert parallelism (jax 0.12.0: a third more
    temporary memory per step; `tests/model/test_modes.py`). A carried value behind a barrier is not a loop invariant.
    Cost of a product of eight experts in bfloat16: 16 for 2 rows, 4 for 256 rows.
    """
    return jax.lax.optimization_barrier(values) if on_cpu() else values


def as_bits(array: Array) -> Array:
    """Return a 16-bit float array as integers, to read and update parts of it in a loop; other arrays unchanged.

    XLA:CPU updates a part of a bfloat16 array by casting all of it to float32 and back (jax 0.10.2: 3 times the time),
    and keeps a float32 copy of all of an array of which a loop reads parts; no longer in 0.12.0. Cost of a product of
    eight experts: 1.4 for 256 rows.
    """
    needed = COPIES_16_BITS and on_cpu() and array.dtype.itemsize == 2
    return jax.lax.bitcast_convert_type(array, jnp.uint16) if needed else array


def from_bits(array: Array, dtype: jnp.dtype) -> Array:
    """Invert `as_bits`."""
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)
