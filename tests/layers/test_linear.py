"""Matmul, batched and einsum products in every dtype and with a single row; none casts a whole kernel."""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxmoe import BlockedMatmul, MaskedMatmul
from nnxmoe.layers.activations import swiglu
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.linear.matmul import batched_matmul_f32, einsum_f32, matmul, matmul_f32
from nnxmoe.layers.mlp import MLP, UngatedMLP
from nnxmoe.moe.blocked import FEW_SIZE_FACTORS, MANY_SIZE_FACTORS, block_sizes
from tests.support.arrays import max_error
from tests.support.running import PART_TOLERANCE

DTYPES = ["float32", "bfloat16"]


def arrays(dtype: str, *shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(sum(shapes[0]))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def exact(*given: jax.Array) -> list[np.ndarray]:
    return [np.asarray(array, np.float64) for array in given]


def close(got: Any, wanted: np.ndarray, dtype: Any) -> bool:
    """Whether the error is within the rounding of ``dtype``; accumulation is in float32."""
    return max_error(got, wanted) <= max(PART_TOLERANCE, float(jnp.finfo(dtype).eps)) * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("lead", [(1,), pytest.param((8, 1), marks=pytest.mark.slow), (2, 3)])
def test_matmul_with_a_kernel(lead: tuple[int, ...], transpose: bool, dtype: str) -> None:
    for ins, outs in itertools.product((1, 64), (1, 96)):
        x, kernel, dy = arrays(dtype, (*lead, ins), (outs, ins) if transpose else (ins, outs), (*lead, outs))
        a, b, c = exact(x, kernel, dy)
        wanted = a @ (b.T if transpose else b)
        y = jax.jit(matmul_f32, static_argnums=2)(x, kernel, transpose)
        assert y.dtype == jnp.float32 and close(y, wanted, jnp.float32)
        y, pull = jax.vjp(lambda x, kernel: matmul(x, kernel, transpose), x, kernel)
        assert y.dtype == x.dtype and y.shape == wanted.shape and close(y, wanted, dtype)
        d_x, d_kernel = pull(dy)
        rows, d_rows = a.reshape(-1, ins), c.reshape(-1, outs)
        assert d_x.dtype == x.dtype and close(d_x, c @ (b if transpose else b.T), dtype)
        assert close(d_kernel, d_rows.T @ rows if transpose else rows.T @ d_rows, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("y_axis", [-2, -1])
@pytest.mark.parametrize(
    "lead",
    [
        pytest.param((1,), marks=pytest.mark.slow),
        pytest.param((8,), marks=pytest.mark.slow),
        pytest.param((1, 4), marks=pytest.mark.slow),
        (8, 2),
    ],
)
def test_batched_matmul(lead: tuple[int, ...], y_axis: int, dtype: str) -> None:
    for count, ins, outs in itertools.product((1, 2, 8), (1, 33), (1, 24)):
        x, y = arrays(dtype, (*lead, count, ins), (*lead, ins, outs) if y_axis == -2 else (*lead, outs, ins))
        (dz,) = arrays("float32", (*lead, count, outs))
        a, b, c = exact(x, y, dz)
        z, pull = jax.jit(lambda x, y: jax.vjp(lambda x, y: batched_matmul_f32(x, y, y_axis), x, y))(x, y)
        assert z.dtype == jnp.float32 and close(z, a @ (b if y_axis == -2 else np.swapaxes(b, -1, -2)), jnp.float32)
        d_x, d_y = pull(dz)
        assert d_x.dtype == d_y.dtype == x.dtype
        assert close(d_x, c @ (np.swapaxes(b, -1, -2) if y_axis == -2 else b), dtype)
        assert close(d_y, np.swapaxes(a, -1, -2) @ c if y_axis == -2 else np.swapaxes(c, -1, -2) @ a, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 8])
def test_einsum_contractions(batch: int, dtype: str) -> None:
    """XLA:CPU compiles some of these in bfloat16 but fails to run them without a workaround."""
    for spec, *shapes in (
        ("BTNH,RNH->BNTR", (batch, 1, 4, 8), (6, 4, 8)),
        ("BNTR,RNH->BTNH", (batch, 4, 1, 6), (6, 4, 8)),
        ("BTEC,EBCD->BTD", (batch, 5, 3, 2), (3, batch, 2, 7)),
        ("ERI,EIO->ERO", (4, batch, 5), (4, 5, 6)),
    ):
        x, y = arrays(dtype, *shapes)
        got = jax.jit(einsum_f32, static_argnums=0)(spec, x, y)
        assert got.dtype == jnp.float32 and close(got, np.einsum(spec, *exact(x, y)), jnp.float32)


def temporary_bytes(run: Callable[..., Any], *given: jax.Array) -> int:
    analysis = jax.jit(run).lower(*given).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.program
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA:CPU does")
def test_single_row_matmul_does_not_cast_the_kernel() -> None:
    x, kernel = arrays("bfloat16", (1, 256), (256, 1024))
    assert temporary_bytes(matmul, x, kernel) < kernel.nbytes
    assert temporary_bytes(lambda x, kernel: matmul(x, kernel, True), x, kernel.T.copy()) < kernel.nbytes


@pytest.mark.program
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA:CPU does")
@pytest.mark.parametrize("rows", [2, 64, 512])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_matmul_copies_few_kernels(dtype: str, rows: int) -> None:
    """Temporaries hold neither all kernels nor one copy of the output per block."""
    groups, width = 16, 128
    x, kernel = arrays(dtype, (rows, width), (groups, width, width))
    sizes = jnp.full((groups,), rows // groups, jnp.int32)
    assert temporary_bytes(BlockedMatmul(), x, kernel, sizes) < 3 * kernel[0].nbytes + 4 * x.nbytes + 20_000


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("sizes", [[2500, 0, 1, 700], [1, 3100, 0, 99], [1024, 1025, 1023, 128], [0, 0, 3200, 0]])
def test_grouped_matmul_with_very_different_group_sizes(sizes: list[int], dtype: str) -> None:
    """Groups are larger than the largest block, and blocks are cut off at the end of the rows."""
    given, counts = arrays(dtype, (3205, 6), (4, 6, 5), (3205, 5)), jnp.asarray(sizes, jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(backend: Any, rows: jax.Array, kernel: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(lambda rows, kernel: backend(rows, kernel, counts), rows, kernel)
        return y, *pull(dy)

    wanted = run(MaskedMatmul(), *(array.astype(jnp.float32) for array in given))
    for a, b in zip(run(BlockedMatmul(), *given), wanted, strict=True):
        assert close(a, np.asarray(b, np.float64), dtype)
    rows, kernel, _ = given
    assert close(jax.jit(BlockedMatmul())(rows, kernel, counts), np.asarray(wanted[0], np.float64), dtype)


def test_block_sizes() -> None:
    assert block_sizes(1024, 8, MANY_SIZE_FACTORS) == (64, 96, 128, 144, 160, 192, 256, 512)
    assert block_sizes(1024, 8, FEW_SIZE_FACTORS) == (64, 144, 192, 256)
    assert block_sizes(8192, 8, FEW_SIZE_FACTORS) == (512, 1152, 1536, 2048, 512)
    assert block_sizes(10**6, 2, MANY_SIZE_FACTORS) == (512,)
    assert block_sizes(2, 8, FEW_SIZE_FACTORS) == (1, 2) and block_sizes(1, 8, FEW_SIZE_FACTORS) == (1,)
    for mean in (48, 128, 1024, 1500):  # nearly even loads leave no block mostly empty
        for means in (FEW_SIZE_FACTORS, MANY_SIZE_FACTORS):
            assert min(size for size in block_sizes(8 * mean, 8, means) if size >= 1.1 * mean) <= 1.34 * mean
    for rows in range(1, 99):
        assert all(1 <= size <= rows for size in block_sizes(rows, 8, MANY_SIZE_FACTORS))


@pytest.mark.parametrize(("rows", "counts"), [(8, (4, 3)), (100, (5, 5)), (1024, (9, 5)), (40_000, (2, 2))])
def test_differentiation_uses_no_more_block_sizes(rows: int, counts: tuple[int, int]) -> None:
    """A product has an outer loop per block size, and an inner loop for the largest block size."""
    kernel, sizes = jax.ShapeDtypeStruct((8, 4, 3), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
    given = jax.ShapeDtypeStruct((rows, 4), jnp.float32), kernel, sizes
    forward = jax.make_jaxpr(BlockedMatmul())(*given)
    differentiated = jax.make_jaxpr(lambda *a: jax.vjp(lambda x: BlockedMatmul()(x, *a[1:]), a[0])[0])(*given)
    assert tuple(str(program).count("while[") for program in (forward, differentiated)) == counts


@pytest.mark.program
@pytest.mark.parametrize(("cls", "saved"), [(MLP, 2), (UngatedMLP, 1)])
def test_mlp_saves_only_the_inputs_of_the_activation(cls: Any, saved: int) -> None:
    """Count the residuals of width F. The backward pass recomputes the activation, but no matmul."""
    activation = swiglu if cls is MLP else jax.nn.silu
    mlp = cls(8, 24, bias=False, activation=activation, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((5, 8), jnp.float32)
    residuals = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(lambda x: mlp(x), x)[1], x))
    assert [a.shape for a in residuals].count((5, 24)) == saved
    program = jax.jit(jax.grad(lambda x: jnp.sum(mlp(x)))).lower(x).compile().as_text()
    assert len(re.findall(r" dot\(", program)) == 2 * saved + 1


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("rows", [5, 300])
def test_gradients_of_lora_by_qwix(rows: int) -> None:
    """qwix recognizes a reshaped parameter only in compiled functions that do not differentiate it."""
    qwix: Any = pytest.importorskip("qwix")
    layer = Linear((4,), (2, 3), ("embed", "heads", "head"), dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    x, d = arrays("float32", (rows, 4), (rows, 6))
    provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=2.0)
    adapted: Any = nnx.jit(lambda layer: qwix.apply_lora_to_model(layer, provider, x, rngs=nnx.Rngs(1)))(layer)
    adapted.kernel_lora_b.set_value(arrays("float32", (2, 6))[0])
    graph, adapter, frozen = nnx.split(adapted, nnx.LoRAParam, ...)
    kernel = layer.kernel[...].reshape(6, 4)

    def adapted_loss(adapter: Any, x: Any) -> jax.Array:
        return jnp.sum(d * nnx.merge(graph, adapter, frozen)(x).reshape(rows, 6))

    def loss(adapter: Any, x: Any) -> jax.Array:
        return jnp.sum(d * (x @ kernel.T + x @ adapter.kernel_lora_a[...] @ adapter.kernel_lora_b[...]))

    got, wanted = (jax.jit(jax.grad(f, (0, 1)))(adapter, x) for f in (adapted_loss, loss))
    assert len(jax.tree.leaves(got)) == 3
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert max_error(ours, theirs) < PART_TOLERANCE * float(jnp.abs(theirs).max())
