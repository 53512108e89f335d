"""Quantised kernels of random codes, and their weights by the formula, one at a time."""

from typing import Any

import jax.numpy as jnp
import numpy as np

import nnxmoe
from nnxmoe.layers.linear.code_format import FULL, CodeFormat
from nnxmoe.layers.linear.quantized import QuantizedKernel
from tests.support.quantised import NF4

FORMS = {
    "int8 channel": CodeFormat("int8", (1, FULL)),
    "int8 bfloat16": CodeFormat("int8", (1, FULL), "bfloat16"),
    "int8 tensor": CodeFormat("int8", (FULL, FULL)),
    "int8 ragged groups": CodeFormat("int8", (1, 20)),
    "int4 groups": CodeFormat("int4", (1, 8)),
    "int4 channel": CodeFormat("int4", (1, 48)),
    "int4 bfloat16": CodeFormat("int4", (1, 16), "bfloat16"),
    "int4 float16": CodeFormat("int4", (1, 16), "float16"),
    "fp8 blocks": CodeFormat("fp8", (16, 20)),
    "fp8 tensor": CodeFormat("fp8", (FULL, FULL)),
    "nf4": CodeFormat("nf4", (1, 16), "bfloat16"),
}
OUTS, INS = 37, 48


def random_kernel(form: str, *, zero: bool = False, order: bool = False, experts: int | None = None) -> QuantizedKernel:
    """A kernel ``[48, 37]`` of random codes, or one per expert."""
    return random_codes(FORMS[form], OUTS, INS, zero=zero, order=order, experts=experts)


def random_codes(
    codes: CodeFormat, outs: int, ins: int, *, zero: bool = False, order: bool = False, experts: int | None = None
) -> QuantizedKernel:
    """A kernel ``[ins, outs]`` of random codes, or one per expert."""
    rng = np.random.default_rng(len(codes.code_dtype) + ins)
    lead = () if experts is None else (experts,)
    high = 16 if codes.is_packed else 255
    raw = rng.integers(0, high, (*lead, outs, ins)).astype(np.uint8)
    if codes.code_dtype == "fp8":
        raw = np.where((raw & 127) == 127, np.uint8(3), raw)
    stored = codes.pack(raw) if codes.is_packed else raw.view(np.int8 if codes.code_dtype == "int8" else np.uint8)
    grid = (*lead, *codes.scales_shape(outs, ins))
    scale = (2.0 ** rng.integers(-9, -6, grid) * rng.uniform(1, 2, grid)).astype(codes.round_dtype or "float32")
    zeros = rng.integers(5, 11, grid).astype(np.uint8 if codes.is_packed else np.int8) if zero else None
    orders = rng.permuted(np.broadcast_to(np.arange(ins, dtype=np.int32), (*lead, ins)), axis=-1) if order else None
    leaves = [None if leaf is None else jnp.asarray(leaf) for leaf in (stored, scale, zeros, orders)]
    return QuantizedKernel(*leaves, codes, nnxmoe.DequantizedProduct())


def by_the_formula(kernel: QuantizedKernel) -> np.ndarray:
    """The weights ``[O, I]``, one at a time."""
    codes = kernel.format
    raw = np.asarray(codes.unpack(np.asarray(kernel.codes)))
    out = np.empty((OUTS, INS), np.float32)
    for o in range(OUTS):
        for i in range(INS):
            at = o // codes.tile[0], i // codes.tile[1]
            value = codes_value(codes.code_dtype, raw[o, i])
            zero = 8 if codes.code_dtype == "int4" else 0
            zero = zero if kernel.zero is None else np.asarray(kernel.zero)[at]
            out[o, i] = (value - np.float32(zero)) * np.float32(np.asarray(kernel.scale)[at])
    out = out.astype(jnp.dtype(codes.round_dtype or "float32")).astype(np.float32)
    return out if kernel.order is None else out[:, np.argsort(np.asarray(kernel.order))]


def codes_value(kind: str, code: Any) -> np.float32:
    if kind == "nf4":
        return np.float32(NF4[code])
    if kind == "fp8":
        sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (int(exponent) - 7)
        return np.float32(-size if sign else size)
    return np.float32(code)
