"""Methods that round float weights to the nearest codes, with one scale per tile and without calibration."""

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
    """Symmetric int8 with one scale per output: ``scale = max |w| / 127``. Half the bytes of bfloat16."""

    format = CodeFormat("int8", (1, FULL))
    max_value = 127


@dataclasses.dataclass(frozen=True)
class Int4:
    """Symmetric int4 with one scale per output and ``group`` inputs: ``scale = max |w| / 7.5``.

    With groups of 128, the weights take 0.26 of the bytes of bfloat16.
    """

    group: int = 128
    max_value = 7.5

    def __post_init__(self) -> None:
        set_positive(self, "group")

    @property
    def format(self) -> CodeFormat:
        return CodeFormat("int4", (1, self.group))


@dataclasses.dataclass(frozen=True)
class Float8:
    """``float8_e4m3fn`` with one scale per ``block`` outputs by ``block`` inputs, as DeepSeek-V3: ``max |w| / 448``."""

    block: int = 128
    max_value = 448

    def __post_init__(self) -> None:
        set_positive(self, "block")

    @property
    def format(self) -> CodeFormat:
        return CodeFormat("fp8", (self.block, self.block))


# A method for kernels ``[outs, ins]``: ``format`` is the format of the codes, ``max_value`` the value to which a tile's
# largest magnitude is scaled before rounding.
Method = Int8 | Int4 | Float8


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Different methods for parts of a model. Parts with None stay floats.

    Attributes:
        experts: the method for routed experts.
        others: the method for attention, dense and shared feed-forwards.
        head: the method for the output head.
    """

    experts: Method | None
    others: Method | None
    head: Method | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Method | None):
                raise ValueError(f"Mixed({field.name}={short(value)}): give a method such as Int8(), or None")


def parse_method(text: str) -> Method | Mixed:
    """Parse a method of the command line.

    Accepts ``int8``, ``int4``, ``int4:32`` (groups of 32), ``fp8``, ``fp8:64`` (blocks of 64), or
    ``experts=int4:32,others=int8,head=int8``, where parts that are ``float`` or not named stay floats.
    Raises ValueError for other text.
    """
    if "=" not in text:
        method = _parse_single(text)
        if method is None:
            raise ValueError(f"{text!r} quantizes nothing")
        return method
    parts = text.split(",")
    methods = {name: method for name, _, method in (part.partition("=") for part in parts)}
    if len(methods) < len(parts) or not methods.keys() <= {"experts", "others", "head"}:
        raise ValueError(f"{text!r} is not like experts=int4:32,others=int8,head=int8")
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
    """Raise ValueError unless the argument ``name`` is a quantization method. ``alternative``: text on other values."""
    if not isinstance(method, Method | Mixed):
        raise ValueError(f"{name}={short(method)} is not a method: give one such as nnxmoe.Int8(){alternative}")


def check_quantize_options(quantize: Method | Mixed | None, keep_quantized: bool) -> None:
    """Raise ValueError if ``quantize`` is combined with ``keep_quantized``, or is not a quantization method."""
    if quantize is not None:
        check_method(quantize, "quantize", ", or None")
    if keep_quantized and quantize is not None:
        raise ValueError(
            "keep_quantized and quantize exclude each other: keep the checkpoint's codes, or make new ones"
        )


def format_for_dtype(method: Method, dtype: Any) -> CodeFormat:
    """Return the format of a kernel and its scales that have this dtype."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize > 2:
        return method.format
    return dataclasses.replace(method.format, round_dtype=str(dtype))


def compute_scales(method: Method, weights: np.ndarray, dtype: Any) -> np.ndarray:
    """Return one scale per tile of ``weights [O, I]``, and 1 for a tile of zeros.

    Raises ValueError for NaN and infinite weights.
    """
    peak = np.abs(weights.astype(np.float32))
    for axis, size in enumerate(method.format.tile):
        if size > 1:
            peak = np.maximum.reduceat(peak, np.arange(0, weights.shape[axis], size), axis=axis)
    if not np.isfinite(peak).all():
        raise ValueError("NaN and infinite weights cannot be quantized")
    # A scale that rounds to zero would lose its tile.
    min_scale = np.float32(jnp.finfo(dtype).smallest_subnormal)
    scale = np.maximum(peak / np.float32(method.max_value), min_scale)
    return np.where(peak > 0, scale, np.float32(1)).astype(dtype)


def encode_weights(format: CodeFormat, weights: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the stored codes of ``weights [O, I]``."""
    (rows, columns), ins = format.tile, weights.shape[1]
    steps = scale.astype(np.float32)[np.arange(len(weights)) // rows]
    if steps.shape[1] > 1:
        steps = np.repeat(steps, columns, axis=1)[:, :ins]
    ratio = weights.astype(np.float32) / steps
    if format.code_dtype == "fp8":
        return np.clip(ratio, -448, 448).astype(FP8).view(np.uint8)
    rounded = np.rint(ratio, out=ratio)
    if format.code_dtype == "int8":
        return np.clip(rounded, -127, 127).astype(np.int8)
    return format.pack((np.clip(rounded, -INT4_ZERO, INT4_ZERO - 1) + INT4_ZERO).astype(np.uint8))


class ErrorMeter:
    """Accumulates the error of quantization: root mean square of ``w - q`` over that of ``w``, for all weights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._squared_error, self._squared_weights = 0.0, 0.0

    def add(self, weights: np.ndarray, quantized: np.ndarray) -> None:
        """Add the error of some weights, given their quantized values."""
        weights = weights.astype(np.float32).ravel()
        difference = weights - quantized.ravel()
        squared_error, squared_weights = float(np.vdot(difference, difference)), float(np.vdot(weights, weights))
        with self._lock:
            self._squared_error += squared_error
            self._squared_weights += squared_weights

    @property
    def relative(self) -> float:
        """Relative error; 0 if nothing was quantized."""
        return math.sqrt(self._squared_error / self._squared_weights) if self._squared_weights else 0.0
