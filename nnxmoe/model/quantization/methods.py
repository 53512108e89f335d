"""Calibration-free quantization methods that round weights to the nearest code, with one scale per tile."""

import dataclasses
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from nnxmoe.config.printable import short
from nnxmoe.config.validate import set_positive
from nnxmoe.layers.linear.code_format import FP8, FULL, INT4_ZERO, CodeFormat


@dataclasses.dataclass(frozen=True)
class Int8:
    """Symmetric int8 with one scale per output: ``scale = max |w| / 127``.

    The weights take half the bytes of bfloat16.
    """

    format = CodeFormat("int8", (1, FULL))
    max_value = 127


@dataclasses.dataclass(frozen=True)
class Int4:
    """Symmetric int4 with one scale per output and group of ``group`` inputs: ``scale = max |w| / 7.5``.

    With groups of 128, the weights take 0.26 times the bytes of bfloat16. If ``group`` does not divide the inputs of a
    kernel, the kernel has groups of the greatest common divisor, of at least `min_group`: 64 for 576 inputs.
    """

    group: int = 128
    max_value = 7.5
    min_group = 32

    def __post_init__(self) -> None:
        set_positive(self, "group")

    def for_inputs(self, ins: int) -> "Int4":
        """Return the method for kernels with ``ins`` inputs."""
        group = math.gcd(self.group, ins)
        return Int4(group) if self.min_group <= group < self.group else self

    @property
    def format(self) -> CodeFormat:
        return CodeFormat("int4", (1, self.group))


@dataclasses.dataclass(frozen=True)
class Float8:
    """``float8_e4m3fn`` with one scale per block of ``block`` outputs by ``block`` inputs: ``scale = max |w| / 448``.

    This is the format of DeepSeek-V3.
    """

    block: int = 128
    max_value = 448

    def __post_init__(self) -> None:
        set_positive(self, "block")

    @property
    def format(self) -> CodeFormat:
        return CodeFormat("fp8", (self.block, self.block))


# A method for kernels ``[outs, ins]``. ``format`` is the format of the codes. ``max_value`` is the value to which the
# largest magnitude of a tile is scaled before rounding.
Method = Int8 | Int4 | Float8


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Separate quantization methods for experts, other layers and the output head. ``None`` leaves weights as floats.

    Attributes:
        experts: Method for routed experts.
        others: Method for attention, dense and shared feed-forwards.
        head: Method for the output head.
    """

    experts: Method | None
    others: Method | None
    head: Method | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Method | None):
                raise ValueError(f"Mixed({field.name}={short(value)}): use a method such as Int8(), or None")


def parse_method(text: str) -> Method | Mixed:
    """Parse a quantization method from the command line.

    Args:
        text: ``int8``, ``int4``, ``int4:32`` (groups of 32), ``fp8``, ``fp8:64`` (blocks of 64), or a method for each
            group of kernels, as in ``experts=int4:32,others=int8,head=int8``. Groups that are ``float`` or not listed
            are not quantized.

    Raises:
        ValueError: The text is not a method, or is ``float``.
    """
    if "=" not in text:
        method = _parse_single(text)
        if method is None:
            raise ValueError(f"{text!r} does not quantize anything: use a method such as int8")
        return method
    parts = text.split(",")
    methods = {name: method for name, _, method in (part.partition("=") for part in parts)}
    if len(methods) < len(parts) or not methods.keys() <= {"experts", "others", "head"}:
        raise ValueError(f"{text!r} must have the form experts=int4:32,others=int8,head=int8")
    return Mixed(*(_parse_single(methods.get(name, "float")) for name in ("experts", "others", "head")))


def _parse_single(text: str) -> Method | None:
    name, colon, size = text.partition(":")
    methods: dict[str, Callable[..., Method]] = {"int8": Int8, "int4": Int4, "fp8": Float8}
    if name == "float" and not colon:
        return None
    if name not in methods or (colon and (name == "int8" or not re.fullmatch("[1-9][0-9]{0,5}", size))):
        raise ValueError(f"{text!r} is not one of int8, int4, int4:GROUP, fp8, fp8:BLOCK")
    return methods[name](int(size)) if colon else methods[name]()


def check_method(method: Any, name: str = "method", alternative: str = "") -> None:
    """Raise ValueError unless ``method`` is a quantization method.

    Args:
        name: Name of the argument, for the error message.
        alternative: Text appended to the error message, for other values that the argument accepts.
    """
    if not isinstance(method, Method | Mixed):
        raise ValueError(
            f"{name}={short(method)} is not a quantization method: use a method such as nnxmoe.Int8(){alternative}"
        )


def check_quantize_options(quantize: Method | Mixed | None, keep_quantized: bool) -> None:
    """Raise ValueError if ``quantize`` is not a quantization method or is combined with ``keep_quantized``."""
    if quantize is not None:
        check_method(quantize, "quantize", ", or None")
    if keep_quantized and quantize is not None:
        raise ValueError(
            "keep_quantized=True cannot be combined with quantize=…: omit quantize to keep the checkpoint's quantized "
            "kernels, or omit keep_quantized to quantize its weights"
        )


def format_for_dtype(method: Method, dtype: Any) -> CodeFormat:
    """Return the method's code format for kernels and scales of this dtype."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize > 2:
        return method.format
    return dataclasses.replace(method.format, round_dtype=str(dtype))


def compute_scales(method: Method, weights: np.ndarray, dtype: Any) -> np.ndarray:
    """Return one scale per tile of ``weights [O, I]``. The scale of a tile of zeros is 1.

    Raises:
        ValueError: A weight is NaN or infinite.
    """
    max_abs = np.abs(weights.astype(np.float32))
    for axis, size in enumerate(method.format.tile):
        if size > 1:
            max_abs = np.maximum.reduceat(max_abs, np.arange(0, weights.shape[axis], size), axis=axis)
    if not np.isfinite(max_abs).all():
        raise ValueError("NaN and infinite weights cannot be quantized")
    # If a tile's scale were rounded to zero, all values of the tile would be zero.
    min_scale = np.float32(jnp.finfo(dtype).smallest_subnormal)
    scale = np.maximum(max_abs / np.float32(method.max_value), min_scale)
    return np.where(max_abs > 0, scale, np.float32(1)).astype(dtype)


def encode_weights(format: CodeFormat, weights: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Round ``weights [O, I]`` to codes in the storage layout of ``format``."""
    (tile_rows, tile_columns), num_inputs = format.tile, weights.shape[1]
    weight_scales = scale.astype(np.float32)[np.arange(len(weights)) // tile_rows]
    if weight_scales.shape[1] > 1:
        weight_scales = np.repeat(weight_scales, tile_columns, axis=1)[:, :num_inputs]
    scaled_weights = weights.astype(np.float32) / weight_scales
    if format.code_dtype == "fp8":
        return np.clip(scaled_weights, -448, 448).astype(FP8).view(np.uint8)
    rounded = np.rint(scaled_weights, out=scaled_weights)
    if format.code_dtype == "int8":
        return np.clip(rounded, -127, 127).astype(np.int8)
    return format.pack((np.clip(rounded, -INT4_ZERO, INT4_ZERO - 1) + INT4_ZERO).astype(np.uint8))


class ErrorMeter:
    """Accumulator of the quantization error ``rms(w - q) / rms(w)`` over all weights. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._squared_error, self._squared_weights = 0.0, 0.0

    def add(self, weights: np.ndarray, quantized: np.ndarray) -> None:
        """Add weights and their dequantized values."""
        weights = weights.astype(np.float32).ravel()
        difference = weights - quantized.ravel()
        squared_error, squared_weights = float(np.vdot(difference, difference)), float(np.vdot(weights, weights))
        with self._lock:
            self._squared_error += squared_error
            self._squared_weights += squared_weights

    @property
    def relative(self) -> float:
        """Relative error. 0 if nothing was quantized."""
        return math.sqrt(self._squared_error / self._squared_weights) if self._squared_weights else 0.0
