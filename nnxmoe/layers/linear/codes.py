"""Codes: how numbers of 4 or 8 bits are stored, and what they stand for.

    w[o, i] = (value(code[o, i]) - zero[o // rows, i // columns]) * scale[o // rows, i // columns]

A *tile* of ``rows`` outputs by ``columns`` inputs shares a scale and, if there is one, a zero point or an offset. All
functions take arrays of NumPy and of JAX, with any leading dimensions.
"""

import dataclasses
import functools
import math
import operator
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from nnxmoe.layers.linear.xla_cpu import on_cpu

Kind = Literal["int8", "int4", "fp8", "fp4", "nf4"]
STORED = {kind: np.dtype(np.int8 if kind == "int8" else np.uint8) for kind in get_args(Kind)}
MIDDLE = 8  # the 4-bit code of zero without zero points
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
WHOLE = 2**31 - 1  # rows or columns of a tile that is as large as any kernel

# The 16 levels of NormalFloat4 (Dettmers et al. 2023, QLoRA), as bitsandbytes stores them.
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)

# The 16 values of E2M1: a sign, two bits of exponent and one of mantissa (OCP Microscaling specification 1.0, 2023).
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
LEVELS = {"nf4": NF4, "fp4": FP4}  # by the code, of the kinds that look values up


@dataclasses.dataclass(frozen=True)
class Codes:
    """How a kernel ``[outs, ins]`` is quantised: the kind of its codes, and the tile that shares a scale.

    ``int8``: -128 … 127. ``int4``: 0 … 15, less 8 where there are no zero points. ``nf4``, ``fp4``: an index into
    `NF4` or `FP4`. Two of 4 bits share a byte, of which the low ones are the first half of each tile's columns.
    ``fp8``: the bits of ``float8_e4m3fn``. ``tile`` (rows, columns) may reach beyond the kernel's edges, except in
    columns of 4-bit codes.
    ``rounded``: the dtype to which weights are rounded, where the tool that made the codes does that; None: float32.
    ``offset``: ``zero`` is a float that is added after the scale, as in GGUF's types with a minimum.
    """

    kind: Kind
    tile: tuple[int, int]
    rounded: str | None = None
    offset: bool = False

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" or self.kind in LEVELS else 8

    @property
    def halves(self) -> bool:
        """Whether two codes share a byte."""
        return self.bits == 4

    def check(self, ins: int) -> None:
        """Raise ValueError unless kernels with ``ins`` inputs can be stored."""
        if self.halves and (self.tile[1] % 2 or ins % self.tile[1]):
            fits = math.gcd(ins, self.tile[1])
            remedy = "" if fits % 2 else f": use groups of {fits} ({self.kind}:{fits})"
            raise ValueError(f"{self.kind}: groups of {self.tile[1]} do not divide a kernel's {ins} inputs{remedy}")

    def stored(self, outs: int, ins: int) -> tuple[int, int]:
        """Shape of the codes in memory."""
        return (outs, ins // 2 if self.halves else ins)

    def grid(self, outs: int, ins: int) -> tuple[int, int]:
        """Shape of the scales."""
        return -(-outs // self.tile[0]), -(-ins // self.tile[1])

    def splits(self, dim: int, size: int, shards: int) -> bool:
        """Whether the outputs (``dim`` 0) or inputs (1) of a kernel can be split evenly between tiles."""
        tile = self.tile[dim]
        if tile >= size and not (dim == 1 and self.halves):  # one tile, whose scale every shard has
            return True
        return size % shards == 0 and size // shards % tile == 0

    def ins(self, codes: Any) -> int:
        """The number of inputs of codes in memory."""
        return codes.shape[-1] * (2 if self.halves else 1)

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """Pack codes, one per element (4 bits: 0 … 15), as they are stored in memory."""
        if not self.halves:
            return codes
        low, high = self.split(codes.astype(np.uint8))
        return low | high << 4

    def unpack(self, codes: Any) -> Any:
        """The inverse of `pack`."""
        return self.join(self._one_each(codes))

    def _one_each(self, codes: Any) -> tuple[Any, ...]:
        """Codes in memory in the pieces of `split`, with one code per element."""
        return (codes & 15, codes >> 4) if self.halves else (codes,)

    def split(self, columns: Any) -> tuple[Any, ...]:
        """An array ``[..., I]`` in pieces: one with all columns, or, where two codes share a byte, one with the first
        and one with the second half of each tile's columns."""
        if not self.halves:
            return (columns,)
        groups = columns.reshape(*columns.shape[:-1], -1, 2, self.tile[1] // 2)
        return tuple(groups[..., i, :].reshape(*columns.shape[:-1], -1) for i in range(2))

    def join(self, pieces: tuple[Any, ...]) -> Any:
        """The inverse of `split`."""
        if len(pieces) == 1:
            return pieces[0]
        xp, shape = pieces[0].__array_namespace__(), (*pieces[0].shape[:-1], -1, self.tile[1] // 2)
        both = xp.concatenate([piece.reshape(shape) for piece in pieces], axis=-1)
        return both.reshape(*pieces[0].shape[:-1], -1)

    def decode(self, codes: Any, scale: Any, zero: Any, rows: Any) -> Any:
        """The weights ``[*E, R, I]`` of some rows (a slice or numbers ``[R]``), in float32.

        ``codes [*E, R, stored]``: of these rows; ``scale``, ``zero`` (or None) ``[*E, …]``: of all rows.
        """
        return self.join(self.pieces(codes, scale, zero, rows))

    def pieces(self, codes: Any, scale: Any, zero: Any, rows: Any) -> tuple[Any, ...]:
        """`decode` in the pieces of `split`, for products with each: joining them takes longer in a loop."""
        found = []
        for part in self._one_each(codes):
            values = self._values(part)
            if zero is not None and not self.offset:
                values = self._with(values, zero, rows, "minus")
            elif self.kind == "int4" and not self.offset:
                values = values - np.float32(MIDDLE)
            values = self._with(values, scale, rows, "times")
            found.append(self._round(self._with(values, zero, rows, "plus") if self.offset else values))
        return tuple(found)

    def values(self, codes: Any) -> Any:
        """The values of codes in memory ``[*E, R, stored]`` before zero points and scales: ``[*E, R, I]`` float32."""
        return self.join(tuple(map(self._values, self._one_each(codes))))

    def _values(self, codes: Any) -> Any:
        """`values` of codes with one per element."""
        if isinstance(codes, np.ndarray):
            return _table(self.kind)[codes.view(np.uint8)]
        if self.kind == "fp8":
            return _fp8_values(codes)
        return jnp.asarray(LEVELS[self.kind])[codes] if self.kind in LEVELS else codes.astype(jnp.float32)

    def of_rows(self, grid: Any, rows: Any) -> Any:
        """The scales or zero points of each of some rows, ``[*E, R, groups]`` float32."""
        xp = grid.__array_namespace__()
        if self.tile[0] == 1 and isinstance(rows, slice):
            return grid[..., rows, :].astype(np.float32)
        numbers = xp.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return xp.take(grid, numbers // self.tile[0], axis=-2).astype(np.float32)

    def _with(self, values: Any, grid: Any, rows: Any, what: Literal["minus", "times", "plus"]) -> Any:
        """Subtract a tile's zero point from all of its values, multiply them by its scale, or add its offset."""
        lines, ins, columns = self.of_rows(grid, rows), values.shape[-1], self.tile[1] // (1 + self.halves)
        shape = values.shape
        if lines.shape[-1] > 1 and ins % columns:
            lines = lines.__array_namespace__().repeat(lines, columns, axis=-1)[..., :ins]
        elif lines.shape[-1] > 1:
            values, lines = values.reshape(*shape[:-1], -1, columns), lines[..., None]
        run = {"minus": operator.sub, "times": operator.mul, "plus": operator.add}[what]
        return run(values, lines).reshape(shape)

    def _round(self, weights: Any) -> Any:
        """Rounded to the dtype of the tool; `reduce_precision`, because XLA drops casts to fewer bits and back."""
        if self.rounded is None:
            return weights
        dtype = jnp.dtype(self.rounded)
        if isinstance(weights, np.ndarray):
            return weights.astype(dtype).astype(np.float32)
        bits = jnp.finfo(dtype)
        return jax.lax.reduce_precision(weights, bits.nexp, bits.nmant)


@functools.cache
def _table(kind: Kind) -> np.ndarray:
    """The value of every code, by its bits."""
    every = np.arange(256, dtype=np.uint8)
    if kind in LEVELS:
        return LEVELS[kind]
    return {"int8": every.view(np.int8), "int4": every, "fp8": every.view(FP8)}[kind].astype(np.float32)


def _fp8_values(codes: Any) -> Any:
    """XLA:CPU widens all of an 8-bit float array before a loop that reads parts of it (jax 0.10.2, 0.12.0), so the
    codes are integers; shifted into the bits of a float16 they are 256 times too small, exactly. NaN is not met:
    loading refuses it."""
    if not on_cpu():
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    wide = codes.astype(jnp.uint16)
    half = jax.lax.bitcast_convert_type((wide & 128) << 8 | (wide & 127) << 7, jnp.float16)
    return half.astype(jnp.float32) * 256
