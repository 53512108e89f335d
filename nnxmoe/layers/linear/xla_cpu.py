"""Workarounds for XLA:CPU. Each docstring describes the problem and the affected JAX releases.

Workarounds are applied on CPUs only. Tests run each operation without the workaround, and fail as soon as XLA no longer
needs the workaround. See `tests/layers/test_xla_cpu.py`, and `tests/model/test_memory_rules.py` for `write_rows`.
Slowdowns are ratios of CPU time without the workaround to CPU time with the workaround, on two cores with jax 0.10.2.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nnxmoe.sharding import is_static

COPIES_16_BITS = jax.__version_info__ < (0, 12)  # jax 0.12.0 is the oldest tested release without these copies
FEW_ROWS = 4  # number of rows for which XLA:CPU has a fast 16-bit product

# True while a program of `jit_outermost` is traced. JAX caches traces separately for each value.
_vectorizes_sums = jax.make_user_context(False)


def on_cpu() -> bool:
    """Return whether programs are compiled for a CPU: the platform of `jax.default_device` if set, else the backend."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return (jax.default_backend() if device is None else getattr(device, "platform", device)) == "cpu"


def is_single_cpu() -> bool:
    """Return whether programs are compiled for a CPU and JAX has a single device, so batches are not sharded."""
    return on_cpu() and jax.device_count() == 1


def write_rows(buffer: Array, new: Array, slots: Int[Array, "B 1"], axis: int) -> Array:
    """Write one new token per row to the row's slot in ``buffer`` along ``axis``. Out-of-range slots are dropped.

    XLA:CPU fuses a write with each use of the result, and copies the whole buffer for each use (jax 0.10.2, 0.12.0).
    The result of a loop is not fused. XLA unrolls loops with one trip, so the loop has at least two trips. Without the
    workaround, a write followed by attention to 4096 slots takes 1.8 times as long in float32, and 1.3 times as long in
    bfloat16.
    """
    write = _write_by_select if COPIES_16_BITS and buffer.dtype.itemsize == 2 else _write_row_by_row
    return write(buffer, new, slots.astype(jnp.int32), axis)


def _write_by_select(buffer: Array, new: Array, slots: Int[Array, "B 1"], axis: int) -> Array:
    """Write all rows in each of two trips with a select.

    jax 0.10.2 casts a 16-bit buffer on each trip. With one trip per row, a decoding step of eight rows of a Llama with
    156M parameters takes 1.25 times as long.
    """
    is_slot = jnp.arange(buffer.shape[axis]) == slots
    is_slot = jnp.expand_dims(is_slot, [i for i in range(1, buffer.ndim) if i != axis])
    new = jax.lax.optimization_barrier(new)
    return jax.lax.fori_loop(0, 2, lambda _, buffer: jnp.where(is_slot, new, buffer), buffer)


def _write_row_by_row(buffer: Array, new: Array, slots: Int[Array, "B 1"], axis: int) -> Array:
    """Write one row per trip. With a single row, the second trip repeats the first.

    The old values of dropped slots are read before the loop, because a select inside the loop would cast the whole
    bfloat16 buffer.
    """
    size, rows = buffer.shape[axis], buffer.shape[0]
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


def pad_rows(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Pad a single 16-bit row along ``axis`` to four rows with zeros. On a single CPU, also pad two or three rows.

    XLA:CPU rewrites a matmul with a single bfloat16 row as a matrix-vector product and casts the whole kernel (jax
    0.10.2, 0.12.0). With additional rows, XLA:CPU does not cast the kernel. Without them, the product takes 11 times
    as long. A bfloat16 product with two rows takes twice as long as with four rows (jax 0.10.2). The barrier prevents
    XLA from removing the rows.
    """
    rows = x.shape[axis]
    if not on_cpu() or not is_static(rows) or jnp.finfo(x.dtype).bits != 16 or not 1 <= rows < FEW_ROWS:
        return x
    if rows > 1 and not is_single_cpu():
        return x
    zeros = jnp.zeros_like(x, shape=(*x.shape[:axis], FEW_ROWS - rows, *x.shape[axis:][1:]))
    return jax.lax.optimization_barrier(jnp.concatenate([x, zeros], axis=axis))


def jit_outermost(function: Callable[..., Any], **options: Any) -> jax.stages.Wrapped:
    """Compile a program that is never called inside a transformation. On a single CPU, enables `sum_in_one_loop`.

    XLA:CPU vectorizes the loops of `sum_in_one_loop` only if sums may be reordered (jax 0.10.2). Fast math permits
    this. The other effects of fast math, such as on NaN and infinity, are turned off. JAX rejects options of a program
    that is called inside a transformation.
    """
    if not is_single_cpu():
        return jax.jit(function, **options)
    honored = ("nans", "infs", "division", "functions")
    fast_math = {"xla_cpu_enable_fast_math": True} | {f"xla_cpu_fast_math_honor_{name}": True for name in honored}

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with _vectorizes_sums(is_single_cpu()):  # it may be retraced for another device
            return function(*args)

    return jax.jit(run, compiler_options=fast_math, **options)


def output_blocks(x: Float[Array, "R _"], outs: int, max_rows: int) -> int:
    """Return the number of equal blocks into which `sum_in_one_loop` splits the outputs, or 0 if it is not used.

    It is used inside of `jit_outermost`, for up to ``max_rows`` rows, if the outputs can be divided. The loop computes
    one sum per row and block. More blocks are faster for a single row, but compile slowly for several rows.
    """
    is_enabled = _vectorizes_sums.value and is_static(x.shape[0]) and 1 <= x.shape[0] <= max_rows
    counts = (4, 3, 2) if x.shape[0] == 1 else (2, 3)
    return next((count for count in counts if outs % count == 0), 0) if is_enabled else 0


def sum_in_one_loop(blocks: int, terms: Callable[..., Sequence[Array]], *arrays: Array | None) -> Float[Array, "R O"]:
    """Return the sums over all axes except the first of the ``R`` arrays ``[O, ...]`` that ``terms(*arrays)`` returns.

    Axis 0 of ``arrays`` is split into ``blocks`` equal blocks (see `output_blocks`). XLA:CPU computes the sums of all
    blocks in one loop, together with the operations of ``terms``, such as casts. A loop with several sums reads memory
    at full speed. The sum of a single array is computed by a different, slower implementation (jax 0.10.2).

    Before a product with two or more bfloat16 rows, XLA:CPU rearranges the whole kernel. For a kernel of 2048 x 1024,
    this product takes 2.2 times as long for two rows (also for one row with `pad_rows`), and 1.7 times as long for four
    rows. For eight rows, it is equally fast, unless the loop also dequantizes (jax 0.10.2, 0.12.0).
    """
    splits = ([None] * blocks if array is None else jnp.split(array, blocks) for array in arrays)
    by_row = zip(*(terms(*block) for block in zip(*splits, strict=True)), strict=True)
    operands = tuple(itertools.chain(*by_row))
    zeros, axes = (np.float32(0),) * len(operands), tuple(range(1, operands[0].ndim))
    sums = jax.lax.reduce(operands, zeros, lambda x, y: tuple(map(jnp.add, x, y)), axes)
    return jnp.concatenate(sums).reshape(len(operands) // blocks, -1)


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
