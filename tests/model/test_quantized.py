"""Codes of quantised kernels and the products with them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxmoe
from nnxmoe.layers.linear.quantized import QuantizedKernel
from nnxmoe.layers.linear.quantized_products import FewRowsProduct
from nnxmoe.layers.linear.xla_cpu import jit_outermost
from nnxmoe.moe.grouped_matmul import MaskedMatmul
from tests.support.arrays import max_error
from tests.support.codes import FORMS, INS, OUTS, by_the_formula, random_codes, random_kernel
from tests.support.grouped import GROUPS
from tests.support.running import PART_TOLERANCE

PRODUCTS = (
    nnxmoe.BlockwiseProduct(5 * INS),
    nnxmoe.BlockwiseProduct(),
    nnxmoe.TwoInt8Product(),
    nnxmoe.CastProduct(),
    nnxmoe.AutoProduct(),
)

CASES = [(form, False, False) for form in FORMS] + [
    ("int4 groups", True, False),
    ("int8 channel", True, False),
    ("int4 float16", True, True),
    ("int8 channel", False, True),
]


@pytest.mark.parametrize(("form", "zero", "order"), CASES)
def test_decoding_by_the_formula(form: str, zero: bool, order: bool) -> None:
    """In NumPy and in JAX, whole and in rows; exactly."""
    kernel = random_kernel(form, zero=zero, order=order)
    wanted = by_the_formula(kernel)
    np.testing.assert_array_equal(jax.jit(lambda k: k.transposed())(kernel), wanted)
    plain = dataclasses.replace(kernel, order=None)
    wanted = by_the_formula(plain)
    found = jax.jit(lambda k, start: k.decode_rows(start, 5))(plain, 30)
    np.testing.assert_array_equal(plain.format.join_halves(tuple(map(np.asarray, found))), wanted[30:35])
    host = [None if leaf is None else np.asarray(leaf) for leaf in (plain.codes, plain.scale, plain.zero)]
    np.testing.assert_array_equal(plain.format.decode(*host, slice(0, OUTS)), wanted)


@pytest.mark.parametrize(("form", "zero", "order"), CASES)
def test_products_agree(form: str, zero: bool, order: bool) -> None:
    """Forward, with the transpose, and their gradients; with float32 rows within the error of two int8 terms."""
    kernel = random_kernel(form, zero=zero, order=order)
    rows, back = (jnp.asarray(np.random.default_rng(1).standard_normal((3, n)), jnp.float32) for n in (INS, OUTS))

    @functools.partial(jax.jit, static_argnums=1)
    def run(kernel: QuantizedKernel, product: Any) -> list[Any]:
        kernel = dataclasses.replace(kernel, product=product)
        loss = lambda x: jnp.sum(jnp.sin(kernel(x)))  # noqa: E731
        return [kernel(rows), kernel.vjp_input(back), jax.grad(loss)(rows), jax.jvp(kernel, (rows,), (rows,))[1]]

    wanted = [np.asarray(one) for one in run(kernel, nnxmoe.DequantizedProduct())]
    np.testing.assert_allclose(wanted[0], np.asarray(rows) @ by_the_formula(kernel).T, rtol=1e-4, atol=1e-4)
    for product in PRODUCTS:
        limit = 2e-4 if isinstance(product, nnxmoe.TwoInt8Product) else PART_TOLERANCE
        for ours, theirs, what in zip(run(kernel, product), wanted, ("y", "back", "d x", "jvp"), strict=True):
            assert max_error(ours, theirs) <= limit * np.abs(theirs).max(), (product, what)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("form", "zero", "order"), CASES)
def test_few_rows_in_one_loop(form: str, zero: bool, order: bool, count: int) -> None:
    """Forward, with the transpose, and their gradients, with the options of decoding programs."""
    kernel = random_codes(FORMS[form], 36, INS, zero=zero, order=order)  # 37 outputs cannot be divided
    rows, back = (jnp.asarray(np.random.default_rng(1).standard_normal((count, n)), jnp.float32) for n in (INS, 36))

    def run(kernel: QuantizedKernel, x: jax.Array) -> list[jax.Array]:
        loss = lambda x: jnp.sum(jnp.sin(kernel(x)))  # noqa: E731
        rounded = kernel.matmul_f32(x.astype(jnp.bfloat16))
        return [kernel(x), kernel.vjp_input(back), jax.grad(loss)(x), jax.jvp(kernel, (x,), (x,))[1], rounded]

    wanted = jax.jit(run)(dataclasses.replace(kernel, product=nnxmoe.DequantizedProduct()), rows)
    found = jit_outermost(run)(dataclasses.replace(kernel, product=FewRowsProduct()), rows)
    for ours, theirs, what in zip(found, wanted, ("y", "back", "d x", "jvp", "bfloat16"), strict=True):
        # DequantizedProduct rounds the weights to bfloat16 if the row is bfloat16.
        limit = 1e-2 if what == "bfloat16" else PART_TOLERANCE
        assert max_error(ours, theirs) <= limit * np.abs(theirs).max(), what


@pytest.mark.slow
def test_w8a8_changes_numbers_and_is_never_a_default() -> None:
    kernel = random_kernel("int8 channel")
    for count in (1, 5):
        rows = jnp.asarray(np.random.default_rng(0).standard_normal((count, INS)), jnp.float32)
        exact, rough = kernel(rows), dataclasses.replace(kernel, product=nnxmoe.W8A8Product())(rows)
        assert 1e-4 < max_error(exact, rough) / float(jnp.abs(exact).max()) < 2e-2
    assert "W8A8Product" not in nnxmoe.Strategy.auto().explain()
    assert "AutoProduct" in nnxmoe.Strategy.auto().explain()


@pytest.mark.parametrize("rows", [[0.0] * INS, [1e-30] * INS, [3e38] + [0.0] * (INS - 1)])
def test_two_int8_terms_at_the_ends_of_the_range(rows: list[float]) -> None:
    kernel = dataclasses.replace(random_kernel("int8 channel"), product=nnxmoe.TwoInt8Product())
    found = np.asarray(kernel(jnp.asarray([rows], jnp.float32)))
    assert np.isfinite(found).all() or max(rows) > 1e38
    wanted = np.asarray(
        dataclasses.replace(kernel, product=nnxmoe.DequantizedProduct())(jnp.asarray([rows], jnp.float32))
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=float(np.abs(wanted).max()) * 1e-4 + 1e-35)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8 channel", "int4 bfloat16", "fp8 blocks"])
@pytest.mark.parametrize("group", ["uneven", "empty-ends", "all-left-over", "one-row"])
def test_grouped_products_of_experts(form: str, group: str) -> None:
    """Each expert's rows by its own codes, for all that computes groups of rows."""
    count, sizes = GROUPS[group]
    kernel = random_kernel(form, experts=len(sizes), order=form == "int8 channel")
    rows = jnp.asarray(np.random.default_rng(count).standard_normal((count, INS)), jnp.float32)
    wanted = MaskedMatmul()(rows, kernel.dense(jnp.float32), jnp.asarray(sizes))
    for matmul in (
        nnxmoe.BlockedMatmul(),
        nnxmoe.RaggedDotMatmul(),
        nnxmoe.AlignedMatmul(nnxmoe.BlockedMatmul(), 8),
        MaskedMatmul(),
    ):
        for product in (nnxmoe.BlockwiseProduct(5 * INS), nnxmoe.TwoInt8Product()):
            own = dataclasses.replace(kernel, product=product)
            found = jax.jit(matmul)(rows, own, jnp.asarray(sizes))
            assert max_error(found, wanted) <= 1e-3 * float(jnp.abs(wanted).max()) + 1e-6, (matmul, product)


@given(st.integers(1, 40), st.integers(1, 24), st.sampled_from(["int8", "int4", "fp8"]), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_rounding_is_to_the_nearest_code(outs: int, pairs: int, kind: str, seed: int) -> None:
    """The error of a weight is at most half a step of its tile (FP8: a sixteenth of its size, or of the smallest)."""
    from nnxmoe.model.quantization.methods import compute_scales, encode_weights, format_for_dtype

    method = {"int8": nnxmoe.Int8(), "int4": nnxmoe.Int4(2 * pairs), "fp8": nnxmoe.Float8(7)}[kind]
    weights = np.random.default_rng(seed).standard_normal((outs, 4 * pairs)).astype(np.float32)
    weights[0] = 0
    codes = format_for_dtype(method, np.float32)
    scale = compute_scales(method, weights, np.float32)
    found = codes.decode(encode_weights(codes, weights, scale), scale, None, slice(0, outs))
    lines = codes.gather_rows(scale, slice(0, outs))
    steps = np.repeat(lines, min(codes.tile[1], 4 * pairs), 1)[:, : 4 * pairs] if lines.shape[1] > 1 else lines
    limit = np.maximum(np.abs(weights) / 16, steps * 2.0**-10) if kind == "fp8" else steps * 0.5001
    assert (np.abs(found - weights) <= limit * 1.0001).all() and (found[0] == 0).all()
