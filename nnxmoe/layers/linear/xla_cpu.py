"""Workarounds for XLA:CPU. Each docstring describes the problem and the affected JAX releases.

Workarounds are applied on CPUs only. Tests run each operation without the workaround, and fail as soon as XLA no longer
needs the workaround. See `tests/layers/test_xla_cpu.py`, and `tests/model/test_memory_rules.py` for `write_rows`.
Slowdowns are ratios of CPU time without the workaround to CPU time with the workaround, on two cores with jax 0.10.2.
"""

import contextlib
import contextvars
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nnxmoe.sharding import is_static

COPIES_16_BITS = jax.__version_info__ < (0, 12)  # jax 0.12.0 is the oldest tested release without these copies
FEW_ROWS = 4  # number of rows for which XLA:CPU has a fast 16-bit product

_sums_are_vectorized = contextvars.ContextVar("_sums_are_vectorized", default=False)


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def is_single_cpu() -> bool:
    """Return whether the backend is a single CPU device, so batches are not sharded."""
    return on_cpu() and jax.device_count() == 1


def write_rows(buffer: Array, new: Array, slots: Int[Array, "B 1"], axis: int) -> Array:
    """Write one new token per row to the row's slot in ``buffer`` along ``axis``. Out-of-range slots are dropped.

    XLA:CPU fuses a write with each use of the result, and copies the whole buffer for each use (jax 0.10.2, 0.12.0).
    The result of a loop is not fused. XLA unrolls loops with one trip, so the loop has at least two trips. With a
    single row, the second trip repeats the first. The old values of dropped slots are read before the loop, because a
    select inside the loop would cast the whole bfloat16 buffer. Without the workaround, a write followed by attention
    to 4096 slots takes 1.8 times as long in float32, and 1.3 times as long in bfloat16.
    """
    size, rows, slots = buffer.shape[axis], buffer.shape[0], slots.astype(jnp.int32)
    starts, in_range = jnp.minimum(slots[:, 0], size - 1), slots < size
    old_values = jax.vmap(lambda row, slot: jax.lax.dynamic_slice_in_dim(row, slot, 1, axis - 1))(buffer, starts)
    new = jnp.where(in_range.reshape(rows, *(1,) * (buffer.ndim - 1)), new, old_values)
    new = jax.lax.optimization_barrier(new)

    def write(i: Int[Array, ""], buffer: Array) -> Array:
        row = i.astype(jnp.int32) % rows
        start_indices = [jnp.int32(0)] * buffer.ndim
        start_indices[0], start_indices[axis] = row, starts[row]
        return jax.lax.dynamic_update_slice(buffer, jax.lax.dynamic_slice_in_dim(new, row, 1, 0), start_indices)

    return jax.lax.fori_loop(0, max(2, rows), write, buffer)


def missing_rows(x: Float[Array, "..."], axis: int) -> int:
    """Return how many rows of zeros `add_zero_rows` should append to one, two or three 16-bit rows.

    XLA:CPU rewrites a matmul with a single bfloat16 row as a matrix-vector product and casts the whole kernel (jax
    0.10.2, 0.12.0). With additional rows, XLA:CPU does not cast the kernel. Without them, the product takes 11 times
    as long. A bfloat16 product with two rows takes twice as long as with four rows (jax 0.10.2).
    """
    rows = x.shape[axis]
    if not on_cpu() or not is_static(rows) or jnp.finfo(x.dtype).bits != 16:
        return 0
    return FEW_ROWS - rows if rows == 1 or (is_single_cpu() and 1 < rows < FEW_ROWS) else 0


def add_zero_rows(x: Float[Array, "..."], axis: int, count: int) -> Float[Array, "..."]:
    """Append rows of zeros. The barrier prevents XLA from removing the rows."""
    zeros = jnp.zeros_like(x, shape=(*x.shape[:axis], count, *x.shape[axis:][1:]))
    return jax.lax.optimization_barrier(jnp.concatenate([x, zeros], axis=axis))


def sum_options() -> dict[str, bool] | None:
    """Return the compiler options of programs that are traced in `vectorized_sums`, or None on other backends.

    XLA:CPU vectorizes the loops of `sum_in_one_loop` only if sums may be reordered (jax 0.10.2). The options of fast
    math permit this. Its other effects, such as on NaN and infinity, are turned off. JAX rejects options of a program
    that is called inside a transformation.
    """
    honored = ("nans", "infs", "division", "functions")
    options = {"xla_cpu_enable_fast_math": True} | {f"xla_cpu_fast_math_honor_{name}": True for name in honored}
    return options if on_cpu() else None


@contextlib.contextmanager
def vectorized_sums() -> Generator[None]:
    """Use `sum_in_one_loop` where it is faster. The program must be compiled with `sum_options`."""
    token = _sums_are_vectorized.set(True)
    try:
        yield
    finally:
        _sums_are_vectorized.reset(token)


def output_blocks(outs: int) -> int:
    """Return the number of equal blocks of outputs for `sum_in_one_loop`, or 1 if it is not faster."""
    is_enabled = _sums_are_vectorized.get() and is_single_cpu()
    return next(count for count in (4, 3, 2, 1) if outs % count == 0) if is_enabled else 1


def sum_in_one_loop(arrays: Sequence[Float[Array, "..."]]) -> list[Float[Array, "R"]]:
    """Return the sums of each array ``[R, ...]`` over all axes except the first.

    XLA:CPU computes the sums of all arrays in one loop, together with the operations that compute the arrays, such as
    casts. A loop with several sums reads memory at full speed. The sum of a single array is computed by a different,
    slower implementation (jax 0.10.2).
    """
    zeros = (np.float32(0),) * len(arrays)
    axes = tuple(range(1, arrays[0].ndim))
    return list(jax.lax.reduce(tuple(arrays), zeros, lambda x, y: tuple(map(jnp.add, x, y)), axes))


def multiply_row(x: Float[Array, "1 I"], kernel: Float[Array, "O I"]) -> Float[Array, "1 O"]:
    """Return ``x @ kernel.T`` in float32 for a single row. ``outs`` must have at least two `output_blocks`.

    For a bfloat16 row and a kernel of 1536 x 576, `add_zero_rows` takes 2 times as long, because XLA:CPU rearranges
    the whole kernel before a product of two rows (jax 0.10.2).
    """
    row, blocks = x.astype(jnp.float32), jnp.split(kernel, output_blocks(kernel.shape[0]))
    return jnp.concatenate(sum_in_one_loop([block.astype(jnp.float32) * row for block in blocks]))[None]


def is_faster_with_kernel_first(x: Float[Array, "R I"]) -> bool:
    """Return whether ``(kernel @ x.T).T`` is faster than ``x @ kernel.T``, for a few float32 rows.

    XLA:CPU rearranges the whole right operand before the multiplication. With few rows, the rearrangement takes up to
    three times as long as the product. XLA may swap the operands back, so callers add a barrier (jax 0.10.2, 0.12.0).
    With 256 rows, the order does not matter. A single row is a matrix-vector product. In bfloat16, swapping is slower
    below 32 rows. ``x @ kernel.T`` takes 3.1 times as long for 2 rows, 1.6 times for 16 rows, and 1.2 times for 64
    rows.
    """
    return on_cpu() and is_static(x.shape[0]) and 2 <= x.shape[0] <= 128 and x.dtype == jnp.float32


def cast_to_f32(*operands: Float[Array, "..."]) -> tuple[Float[Array, "..."], ...]:
    """Cast the operands of a contraction over arbitrary dimensions to float32.

    XLA:CPU cannot execute a bfloat16 x bfloat16 -> float32 product unless the batch dimensions come first. For example,
    ``bhn,hnr->bhr`` compiles, but execution fails with "Unsupported element type for DotThunk" (jax 0.10.2, 0.12.0).
    """
    return tuple(operand.astype(jnp.float32) for operand in operands)


def with_barrier(*values: Any) -> tuple[Any, ...]:
    """Put a barrier around loop invariants in the carry of a loop, so XLA does not treat the values as invariants.

    XLA:CPU hoists the float32 cast of a 16-bit loop invariant out of the loop, and thus copies the whole array (jax
    0.10.2). In jax 0.12.0, more float32 rows remain alive around the loops of expert parallelism. The loops then need a
    third more temporary memory per step (`tests/model/test_modes.py`). Without the barrier, a bfloat16 product with
    eight experts takes 16 times as long for 2 rows, and 4 times as long for 256 rows.
    """
    return jax.lax.optimization_barrier(values) if on_cpu() else values


def as_bits(array: Array) -> Array:
    """Bitcast a 16-bit float array to integers, for a loop that reads or updates slices. No-op if not needed.

    In jax 0.10.2, XLA:CPU updates a slice of a bfloat16 array by casting the whole array to float32 and back, so an
    update takes 3 times as long. If a loop reads slices, XLA allocates a float32 copy of the whole array. jax 0.12.0
    does neither. Without the bitcast, a product of 256 rows with eight experts takes 1.4 times as long.
    """
    needs_bitcast = COPIES_16_BITS and on_cpu() and array.dtype.itemsize == 2
    return jax.lax.bitcast_convert_type(array, jnp.uint16) if needs_bitcast else array


def from_bits(array: Array, dtype: jnp.dtype) -> Array:
    """Invert `as_bits`."""
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)
