"""Round to nearest: float weights to codes with one scale per tile, without calibration."""

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
    largest = 127


@dataclasses.dataclass(frozen=True)
class Int4:
    """Symmetric int4 with one scale per output and ``group`` inputs: ``scale = max |w| / 7.5``. With groups of 128,
    0.26 of the bytes of bfloat16."""

    group: int = 128
    largest = 7.5

    def __post_init__(self) -> None:
        set_positive(self, "group")

    @property
    def format(self) -> CodeFormat:
        return CodeFormat("int4", (1, self.group))


@dataclasses.dataclass(frozen=True)
class Float8:
    """``float8_e4m3fn`` with one scale per ``block`` outputs by ``block`` inputs, as DeepSeek-V3: ``max |w| / 448``."""

    block: int = 128
    largest = 448

    def __post_init__(self) -> None:
        set_positive(self, "block")

    @property
    def format(self) -> CodeFormat:
        return CodeFormat("fp8", (self.block, self.block))


# Quantises kernels ``[outs, ins]``: ``codes`` is the kind of code and the tile, ``largest`` the value to which a tile's
# largest magnitude is scaled before rounding.
Method = Int8 | Int4 | Float8


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A method for the routed experts, one for attention, dense and shared feed-forwards, and one for the output head;
    None: they stay floats."""

    experts: Method | None
    others: Method | None
    head: Method | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not isinstance(value := getattr(self, field.name), Method | None):
                raise ValueError(f"Mixed({field.name}={short(value)}): give a method such as Int8(), or None")


def parse_method(text: str) -> Method | Mixed:
    """Parse a method of the command line: ``int8``, ``int4``, ``int4:32`` (groups of 32), ``fp8``, ``fp8:64`` (blocks),
    or ``experts=int4:32,others=int8,head=int8``, where parts that are ``float`` or not named stay unchanged. Raises
    ValueError."""
    parts = text.split(",")
    if "=" not in text:
        found = _one(text)
        if found is None:
            raise ValueError(f"{text!r} quantises nothing")
        return found
    names = {name: method for name, _, method in (part.partition("=") for part in parts)}
    if len(names) < len(parts) or not names.keys() <= {"experts", "others", "head"}:
        raise ValueError(f"{text!r} is not like experts=int4:32,others=int8,head=int8")
    return Mixed(*(_one(names.get(name, "float")) for name in ("experts", "others", "head")))


def _one(text: str) -> Method | None:
    name, colon, size = text.partition(":")
    made: dict[str, Callable[..., Method]] = {"int8": Int8, "int4": Int4, "fp8": Float8}
    if name == "float" and not colon:
        return None
    if name not in made or (colon and (name == "int8" or not re.fullmatch("[1-9][0-9]{0,5}", size))):
        raise ValueError(f"{text!r} is not one of int8, int4, int4:GROUP, fp8, fp8:BLOCK")
    return made[name](int(size)) if colon else made[name]()


def check_method(method: Any, name: str = "method", otherwise: str = "") -> None:
    """Raise ValueError unless the argument ``name`` is a quantization method. ``otherwise``: other types to suggest."""
    if not isinstance(method, Method | Mixed):
        raise ValueError(f"{name}={short(method)} is not a method: give one such as nnxmoe.Int8(){otherwise}")


def check_quantize_options(quantize: Method | Mixed | None, keep_quantized: bool) -> None:
    """Raise ValueError if ``quantize`` is combined with ``keep_quantized``, or is not a quantization method."""
    if quantize is not None:
        check_method(quantize, "quantize", ", or None")
    if keep_quantized and quantize is not None:
        raise ValueError(
            "keep_quantized and quantize exclude each other: keep the checkpoint's codes, or make new ones"
        )


def format_for_dtype(method: Method, dtype: Any) -> CodeFormat:
    """The codes of kernels with this dtype, which is that of the scales too."""
    kind = jnp.dtype(dtype)
    return method.format if kind.itemsize > 2 else dataclasses.replace(method.format, round_dtype=str(kind))


def compute_scales(method: Method, weights: np.ndarray, dtype: Any) -> np.ndarray:
    """One scale per tile of ``weights [O, I]``; 1 for a tile of zeros. NaN and infinity give ValueError."""
    peak = np.abs(weights.astype(np.float32))
    for axis, size in enumerate(method.format.tile):
        if size > 1:
            peak = np.maximum.reduceat(peak, np.arange(0, weights.shape[axis], size), axis=axis)
    if not np.isfinite(peak).all():
        raise ValueError("NaN and infinite weights cannot be quantised")
    # A scale that rounds to zero would lose its tile.
    smallest = np.float32(jnp.finfo(dtype).smallest_subnormal)
    found = np.maximum(peak / np.float32(method.largest), smallest)
    return np.where(peak > 0, found, np.float32(1)).astype(dtype)


def encode_weights(codes: CodeFormat, weights: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The codes of ``weights [O, I]``, as they are in memory."""
    (rows, columns), ins = codes.tile, weights.shape[1]
    steps = scale.astype(np.float32)[np.arange(len(weights)) // rows]
    steps = steps if steps.shape[1] == 1 else np.repeat(steps, columns, axis=1)[:, :ins]
    ratio = weights.astype(np.float32) / steps
    if codes.code_dtype == "fp8":
        return np.clip(ratio, -448, 448).astype(FP8).view(np.uint8)
    rounded = np.rint(ratio, out=ratio)
    if codes.code_dtype == "int8":
        return np.clip(rounded, -127, 127).astype(np.int8)
    return codes.pack((np.clip(rounded, -INT4_ZERO, INT4_ZERO - 1) + INT4_ZERO).astype(np.uint8))


class ErrorMeter:
    """The error of quantising so far: ``|w - q| / |w|`` over all quantised weights (root mean square)."""

    def __init__(self) -> None:
        self._lock, self._lost, self._all = threading.Lock(), 0.0, 0.0

    def add(self, weights: np.ndarray, found: np.ndarray) -> None:
        """Add the error of some weights, given their quantised values."""
        weights = weights.astype(np.float32)
        lost, everything = np.vdot(d := (weights - found).ravel(), d), np.vdot(w := weights.ravel(), w)
        with self._lock:
            self._lost, self._all = self._lost + float(lost), self._all + float(everything)

    @property
    def relative(self) -> float:
        """Relative error; 0 if nothing was quantised."""
        return math.sqrt(self._lost / self._all) if self._all else 0.0
