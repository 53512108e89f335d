"""Formats of quantized weights: the storage of codes of 4 or 8 bits, and the values of the codes.

    w[o, i] = (value(code[o, i]) - zero[o // rows, i // columns]) * scale[o // rows, i // columns]

A *tile* of ``rows`` outputs by ``columns`` inputs shares one scale, and one zero point or offset if the format has
them. All functions accept NumPy and JAX arrays with any leading dimensions.
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

CodeDtype = Literal["int8", "int4", "fp8", "fp4", "nf4"]
STORAGE_DTYPES = {name: np.dtype(np.int8 if name == "int8" else np.uint8) for name in get_args(CodeDtype)}
INT4_ZERO = 8  # 4-bit code of the value 0 in formats without zero points
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FULL = 2**31 - 1  # rows or columns of a tile that covers a kernel of any size

# The 16 levels of NormalFloat4 (Dettmers et al. 2023, QLoRA), as bitsandbytes stores them.
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)

# The 16 values of E2M1: 1 sign bit, 2 exponent bits, 1 mantissa bit (OCP Microscaling specification 1.0, 2023).
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
CODEBOOKS = {"nf4": NF4, "fp4": FP4}  # code dtype -> value of each code


@dataclasses.dataclass(frozen=True)
class CodeFormat:
    """Format of a quantized kernel ``[outs, ins]``: the dtype of its codes, and the tile that shares a scale.

    Attributes:
        code_dtype: ``int8`` codes are -128 … 127. ``int4`` codes are 0 … 15, and formats without zero points
            subtract 8. ``nf4`` and ``fp4`` codes are indices into `NF4` or `FP4`. ``fp8`` codes are the bits of
            ``float8_e4m3fn``. A byte contains two 4-bit codes. The low bits are the first half of each tile's columns,
            the high bits the second half.
        tile: (rows, columns). Tiles may extend beyond the kernel's edges, except along the columns of 4-bit codes.
        round_dtype: Dtype to which the quantization tool rounds weights. If None, float32.
        offset: Whether ``zero`` is a float that is added after scaling, as in GGUF's types with a minimum.
    """

    code_dtype: CodeDtype
    tile: tuple[int, int]
    round_dtype: str | None = None
    offset: bool = False

    @property
    def bits(self) -> int:
        """Bits per code."""
        return 4 if self.code_dtype == "int4" or self.code_dtype in CODEBOOKS else 8

    @property
    def is_packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.bits == 4

    def check_inputs(self, ins: int) -> None:
        """Raise ValueError unless the format can store kernels with ``ins`` inputs."""
        if self.is_packed and (self.tile[1] % 2 or ins % self.tile[1]):
            group = math.gcd(ins, self.tile[1])
            remedy = "" if group % 2 else f": use groups of {group} ({self.code_dtype}:{group})"
            groups = f"groups of {self.tile[1]}"
            raise ValueError(f"{self.code_dtype}: {groups} do not divide a kernel's {ins} inputs{remedy}")

    def codes_shape(self, outs: int, ins: int) -> tuple[int, int]:
        """Return the shape of the stored codes."""
        return (outs, ins // 2 if self.is_packed else ins)

    def scales_shape(self, outs: int, ins: int) -> tuple[int, int]:
        """Return the shape of the scales and of the zero points."""
        return -(-outs // self.tile[0]), -(-ins // self.tile[1])

    def can_shard(self, dim: int, size: int, shards: int) -> bool:
        """Return whether the outputs (``dim`` 0) or inputs (``dim`` 1) can be sharded evenly without splitting a tile.

        A single tile over the whole dimension may be split, because every shard has its scale.
        """
        tile = self.tile[dim]
        if tile >= size and not (dim == 1 and self.is_packed):
            return True
        return size % shards == 0 and size // shards % tile == 0

    def input_count(self, codes: Any) -> int:
        """Return the number of inputs of stored codes."""
        return codes.shape[-1] * (2 if self.is_packed else 1)

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """Convert an array with one code per element (0 … 15 for 4 bits) to stored codes."""
        if not self.is_packed:
            return codes
        low, high = self.split_halves(codes.astype(np.uint8))
        return low | high << 4

    def unpack(self, codes: Any) -> Any:
        """Convert stored codes to an array with one code per element."""
        return self.join_halves(self._unpack_halves(codes))

    def _unpack_halves(self, codes: Any) -> tuple[Any, ...]:
        return (codes & 15, codes >> 4) if self.is_packed else (codes,)

    def split_halves(self, columns: Any) -> tuple[Any, ...]:
        """Split an array ``[..., I]`` into the first and the second half of each tile's columns.

        If the format does not pack codes, return one part with all columns.
        """
        if not self.is_packed:
            return (columns,)
        lead = columns.shape[:-1]
        groups = columns.reshape(*lead, -1, 2, self.tile[1] // 2)
        return tuple(groups[..., i, :].reshape(*lead, -1) for i in range(2))

    def join_halves(self, halves: tuple[Any, ...]) -> Any:
        """Invert `split_halves`."""
        if len(halves) == 1:
            return halves[0]
        xp, lead = halves[0].__array_namespace__(), halves[0].shape[:-1]
        groups = [half.reshape(*lead, -1, self.tile[1] // 2) for half in halves]
        return xp.concatenate(groups, axis=-1).reshape(*lead, -1)

    def decode(self, codes: Any, scale: Any, zero: Any, rows: Any) -> Any:
        """Decode the weights ``[*E, R, I]`` of a set of rows, in float32.

        Args:
            codes: Stored codes of these rows, ``[*E, R, stored]``.
            scale: Scales of all rows, ``[*E, …]``.
            zero: Zero points of all rows, or None.
            rows: A slice, or row numbers ``[R]``.
        """
        return self.join_halves(self.decode_halves(codes, scale, zero, rows))

    def decode_halves(self, codes: Any, scale: Any, zero: Any, rows: Any) -> tuple[Any, ...]:
        """Decode like `decode`, but return the parts of `split_halves`. In a loop, joining the parts is slow."""
        weights = []
        for half in self._unpack_halves(codes):
            values = self._look_up(half)
            if zero is not None and not self.offset:
                values = self._apply(operator.sub, values, zero, rows)
            elif self.code_dtype == "int4" and not self.offset:
                values = values - np.float32(INT4_ZERO)
            values = self._apply(operator.mul, values, scale, rows)
            if self.offset:
                values = self._apply(operator.add, values, zero, rows)
            weights.append(self._round(values))
        return tuple(weights)

    def code_values(self, codes: Any) -> Any:
        """Return the float32 values ``[*E, R, I]`` of stored codes, without zero points and scales."""
        return self.join_halves(tuple(map(self._look_up, self._unpack_halves(codes))))

    def _look_up(self, codes: Any) -> Any:
        """Return the values of unpacked codes."""
        if isinstance(codes, np.ndarray):
            return _value_table(self.code_dtype)[codes.view(np.uint8)]
        if self.code_dtype == "fp8":
            return _fp8_values(codes)
        if self.code_dtype in CODEBOOKS:
            return jnp.asarray(CODEBOOKS[self.code_dtype])[codes]
        return codes.astype(jnp.float32)

    def gather_rows(self, grid: Any, rows: Any) -> Any:
        """Return the scales or zero points of a set of rows, ``[*E, R, groups]`` in float32."""
        xp = grid.__array_namespace__()
        if self.tile[0] == 1 and isinstance(rows, slice):
            return grid[..., rows, :].astype(np.float32)
        numbers = xp.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return xp.take(grid, numbers // self.tile[0], axis=-2).astype(np.float32)

    def _apply(self, operation: Any, values: Any, grid: Any, rows: Any) -> Any:
        """Combine each value with the scale, zero point or offset of its tile."""
        shape, columns = values.shape, self.tile[1] // (2 if self.is_packed else 1)
        per_row = self.gather_rows(grid, rows)
        if per_row.shape[-1] > 1 and shape[-1] % columns:
            per_row = per_row.__array_namespace__().repeat(per_row, columns, axis=-1)[..., : shape[-1]]
        elif per_row.shape[-1] > 1:
            values, per_row = values.reshape(*shape[:-1], -1, columns), per_row[..., None]
        return operation(values, per_row).reshape(shape)

    def _round(self, weights: Any) -> Any:
        """Round to ``round_dtype`` with `reduce_precision`, because XLA removes casts to fewer bits and back."""
        if self.round_dtype is None:
            return weights
        dtype = jnp.dtype(self.round_dtype)
        if isinstance(weights, np.ndarray):
            return weights.astype(dtype).astype(np.float32)
        precision = jnp.finfo(dtype)
        return jax.lax.reduce_precision(weights, precision.nexp, precision.nmant)


@functools.cache
def _value_table(code_dtype: CodeDtype) -> np.ndarray:
    """Return the value of every code, indexed by its bits."""
    if code_dtype in CODEBOOKS:
        return CODEBOOKS[code_dtype]
    bits = np.arange(256, dtype=np.uint8)
    return {"int8": bits.view(np.int8), "int4": bits, "fp8": bits.view(FP8)}[code_dtype].astype(np.float32)


def _fp8_values(codes: Any) -> Any:
    """Return the float32 values of float8_e4m3fn bits. NaN is not supported: loading rejects it.

    XLA:CPU casts a whole 8-bit float array before a loop that reads parts of it (jax 0.10.2, 0.12.0). On CPUs, the bits
    are therefore shifted into a float16. Its value is exactly 1/256 of the fp8 value.
    """
    if not on_cpu():
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    bits = codes.astype(jnp.uint16)
    half = jax.lax.bitcast_convert_type((bits & 128) << 8 | (bits & 127) << 7, jnp.float16)
    return half.astype(jnp.float32) * 256
