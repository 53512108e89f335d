"""XLA:CPU problems that need workarounds. A failing test means that a workaround can be removed."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from nnxmoe.layers.linear import xla_cpu
from nnxmoe.layers.linear.kernel import DenseKernel
from nnxmoe.layers.linear.matmul import dot_f32, matmul_f32
from nnxmoe.moe import blocked

pytestmark = [
    pytest.mark.program,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="properties of XLA:CPU"),
]
BF16 = jnp.bfloat16


def temporary_bytes(run: Any, *shapes: tuple[int, ...]) -> int:
    given = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    analysis = jax.jit(run).lower(*given).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, kernel, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def test_single_row_16_bit_matmul_casts_the_kernel() -> None:
    shapes, nbytes = ((1, 256), (256, 1024)), 256 * 1024 * 2
    assert temporary_bytes(product, *shapes) > nbytes
    assert temporary_bytes(lambda x, kernel: product(xla_cpu.pad_rows(x, 0), kernel)[:1], *shapes) < nbytes


@pytest.mark.parametrize(("rows", "outs"), [(1, 1024), (1, 1023), (1, 1021), (3, 1024), (4, 1023), (5, 1024)])
def test_few_rows_are_multiplied_in_one_loop(rows: int, outs: int) -> None:
    """The sums of up to four blocks of outputs. XLA multiplies more rows, and a prime number of outputs."""
    x, kernel = (jax.random.normal(jax.random.key(0), shape, BF16) for shape in ((rows, 256), (outs, 256)))

    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return dot_f32(x, kernel, -1, -1)

    program = xla_cpu.jit_outermost(run).lower(x, kernel).compile()
    analysis = program.memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < kernel.nbytes
    assert ("dot(" in program.as_text()) == (outs == 1021 or rows == 5)
    wanted = run(x.astype(jnp.float32), kernel.astype(jnp.float32))
    assert float(jnp.max(jnp.abs(program(x, kernel) - wanted))) < 1e-4


def test_other_programs_do_not_reuse_a_function_that_was_traced_for_sums_in_one_loop() -> None:
    shared = jax.jit(lambda x, kernel: dot_f32(x, kernel, -1, -1))
    operands = [jnp.ones((1, 96), BF16), jnp.ones((64, 96), BF16)]
    texts = [
        jit(lambda *operands: shared(*operands)).lower(*operands).as_text() for jit in (xla_cpu.jit_outermost, jax.jit)
    ]
    assert ["dot_general" in text for text in texts] == [False, True]


def test_16_bit_dot_with_non_leading_batch_dimensions_fails() -> None:
    x, y = jnp.ones((2, 4, 8), BF16), jnp.ones((4, 8, 6), BF16)

    def contract(*operands: jax.Array) -> jax.Array:
        return jnp.einsum("bhn,hnr->bhr", *operands, preferred_element_type=jnp.float32)

    with pytest.raises(jax.errors.JaxRuntimeError, match="DotThunk"):
        jax.block_until_ready(jax.jit(contract)(x, y))
    assert jax.jit(contract)(*xla_cpu.cast_to_f32(x, y)).shape == (2, 4, 6)


def test_16_bit_loop_invariants_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, sizes = jax.ShapeDtypeStruct((8192, 128), BF16), jax.ShapeDtypeStruct((16,), jnp.int32)
    kernels = jax.ShapeDtypeStruct((16, 128, 128), BF16)

    def temporary() -> int:
        def grouped(rows: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
            apply: Any = blocked._apply
            return apply.__wrapped__((64,), rows, DenseKernel(kernel), sizes, False)

        analysis = jax.jit(grouped).lower(rows, kernels, sizes).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary() < 1.5 * rows.size * 2
    monkeypatch.setattr(blocked, "with_barrier", lambda *values: values)
    assert (temporary() > 2 * rows.size * 2) == xla_cpu.COPIES_16_BITS


def test_16_bit_updates_cast_the_whole_array() -> None:
    def update(array: jax.Array) -> jax.Array:
        def write(i: Any, array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(array, (array[0] * 2 + i).astype(BF16), i, 0)

        return jax.lax.fori_loop(0, array.shape[0], write, array)

    text = jax.jit(update).lower(jax.ShapeDtypeStruct((16, 64, 64), BF16)).compile().as_text()
    assert ("f32[16,64,64]" in text) == xla_cpu.COPIES_16_BITS


@pytest.mark.parametrize("dtype", [BF16, jnp.float32])
def test_rows_are_written_to_their_slots(dtype: Any) -> None:
    """Slots outside of the buffer are dropped."""
    buffer = jax.random.normal(jax.random.key(0), (3, 2, 5, 4), dtype)
    new = jax.random.normal(jax.random.key(1), (3, 2, 1, 4), dtype)
    found = jax.jit(xla_cpu.write_rows, static_argnums=3)(buffer, new, jnp.array([[4], [5], [0]]), 2)
    assert jnp.array_equal(found, buffer.at[0, :, 4].set(new[0, :, 0]).at[2, :, 0].set(new[2, :, 0]))


def test_16_bit_slices_in_a_loop_cast_the_whole_array() -> None:
    def squares(array: jax.Array, read: Any) -> jax.Array:
        def add(i: Any, total: jax.Array) -> jax.Array:
            block = read(array, i)
            return total + jax.lax.dot_general(
                block, block, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )

        return jax.lax.fori_loop(0, array.shape[1], add, jnp.zeros((64, 64)))

    def naive(array: jax.Array, i: Any) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(array, i, 1, keepdims=False)

    def as_bits(array: jax.Array, i: Any) -> jax.Array:
        return xla_cpu.from_bits(naive(xla_cpu.as_bits(array), i), array.dtype)

    dims = 64, 64, 64
    assert temporary_bytes(lambda x: squares(x, as_bits), dims) < 64**3 * 2
    assert (temporary_bytes(lambda x: squares(x, naive), dims) > 64**3 * 2) == xla_cpu.COPIES_16_BITS


def test_few_float32_rows_stay_on_the_right() -> None:
    """XLA swaps the operands back without the barrier. Whether they are faster there, only a benchmark can tell."""
    given = jax.ShapeDtypeStruct((8, 256), jnp.float32), jax.ShapeDtypeStruct((512, 256), jnp.float32)

    def kernel_is_left(run: Any) -> bool:
        text = jax.jit(run).lower(*given).compile().as_text()
        (found,) = re.findall(r"f32\[(8,512|512,8)\]\{1,0\} dot\(", text)
        return found == "512,8"

    assert kernel_is_left(lambda x, kernel: matmul_f32(x, kernel, True))
    assert not kernel_is_left(lambda x, kernel: dot_f32(kernel, x, -1, -1).T)
    assert not kernel_is_left(lambda x, kernel: dot_f32(x, kernel, -1, -1))
