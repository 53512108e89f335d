"""Formats of quantized weights: storage and values of 4-bit and 8-bit codes.

    w[o, i] = (value(code[o, i]) - zero[o // rows, i // columns]) * scale[o // rows, i // columns]

A *tile* of ``rows`` outputs by ``columns`` inputs shares a scale and, depending on the format, a zero point or an
offset. All functions accept NumPy and JAX arrays with any leading dimensions.
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
INT4_ZERO = 8  # 4-bit code for the value 0 in formats without zero points
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FULL = 2**31 - 1  # tile size that covers a whole dimension of the kernel

# The 16 levels of NormalFloat4 as in bitsandbytes (QLoRA; Dettmers et al. 2023).
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
CODEBOOKS = {"nf4": NF4, "fp4": FP4}  # value of each code, by code dtype


@dataclasses.dataclass(frozen=True)
class CodeFormat:
    """Format of a quantized kernel ``[outs, ins]``: the dtype of the codes, and the shape of a tile.

    Attributes:
        code_dtype: ``int8`` codes are -128 … 127. ``int4`` codes are 0 … 15. Formats without zero points subtract 8
            from ``int4`` codes. ``nf4`` and ``fp4`` codes are indices into `NF4` and `FP4`. ``fp8`` codes are the bits
            of ``float8_e4m3fn``. Two 4-bit codes are packed into a byte: the low bits contain the first half of each
            tile's columns, and the high bits contain the second half.
        tile: Number of rows and columns of a tile. Tiles may extend beyond the edges of the kernel, except along the
            columns of 4-bit codes.
        round_dtype: Dtype to which the quantization tool rounds weights. Defaults to float32.
        offset: Whether ``zero`` is a float that is added after scaling, as in GGUF types with a minimum.
    """

    code_dtype: CodeDtype
    tile: tuple[int, int]
    round_dtype: str | None = None
    offset: bool = False

    @property
    def bits(self) -> int:
        """Number of bits per code."""
        return 4 if self.code_dtype == "int4" or self.code_dtype in CODEBOOKS else 8

    @property
    def is_packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.bits == 4

    def check_inputs(self, ins: int) -> None:
        """Raise ValueError if the format cannot store kernels with ``ins`` inputs."""
        if self.is_packed and (self.tile[1] % 2 or ins % self.tile[1]):
            group = math.gcd(ins, self.tile[1])
            remedy = "" if group % 2 else f". Use groups of {group} ({self.code_dtype}:{group})"
            groups = f"groups of {self.tile[1]}"
            raise ValueError(f"{self.code_dtype}: {groups} do not divide a kernel's {ins} inputs{remedy}")

    def codes_shape(self, outs: int, ins: int) -> tuple[int, int]:
        """Return the shape of the stored codes."""
        return (outs, ins // 2 if self.is_packed else ins)

    def scales_shape(self, outs: int, ins: int) -> tuple[int, int]:
        """Return the shape of the scales and of the zero points."""
        return -(-outs // self.tile[0]), -(-ins // self.tile[1])

    def can_shard(self, dim: int, size: int, shards: int) -> bool:
        """Return whether the outputs (``dim`` 0) or inputs (``dim`` 1) can be sharded evenly without splitting tiles.

        A tile that covers the whole dimension may be split, because the tile's scale is replicated over the shards.
        """
        tile = self.tile[dim]
        if tile >= size and not (dim == 1 and self.is_packed):
            return True
        return size % shards == 0 and size // shards % tile == 0

    def input_count(self, codes: Any) -> int:
        """Return the number of inputs from the shape of stored codes."""
        return codes.shape[-1] * (2 if self.is_packed else 1)

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """Convert an array with one code per element (0 … 15 for 4-bit codes) to stored codes."""
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
        """Split an array ``[..., I]`` into the first half and the second half of each tile's columns.

        If the format does not pack codes, the result is a single array with all columns.
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
        """Dequantize the weights ``[*E, R, I]`` of a set of rows to float32.

        Args:
            codes: Stored codes of these rows, ``[*E, R, stored]``.
            scale: Scales of all rows, ``[*E, …]``.
            zero: Zero points of all rows, if any.
            rows: Slice of rows, or row indices ``[R]``.
        """
        return self.join_halves(self.decode_halves(codes, scale, zero, rows))

    def decode_halves(self, codes: Any, scale: Any, zero: Any, rows: Any) -> tuple[Any, ...]:
        """Like `decode`, but return the arrays of `split_halves`. Joining these arrays in a loop is slow."""
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

    def decode_values(self, codes: Any, has_zero: bool) -> tuple[Any, ...]:
        """Like `decode_halves`, but without scales and zero points."""
        center = np.float32(INT4_ZERO if self.code_dtype == "int4" and not has_zero else 0)
        codes = codes.astype(np.int32) if self.is_packed else codes  # XLA:CPU casts int32 to float32 faster than uint8
        return tuple(self._look_up(half) - center for half in self._unpack_halves(codes))

    def code_values(self, codes: Any) -> Any:
        """Return the float32 values ``[*E, R, I]`` of stored codes, without zero points and scales."""
        return self.join_halves(self.decode_values(codes, has_zero=True))

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
        """Return the scales or zero points ``[*E, R, groups]`` of a set of rows, in float32."""
        xp = grid.__array_namespace__()
        if self.tile[0] == 1 and isinstance(rows, slice):
            return grid[..., rows, :].astype(np.float32)
        indices = xp.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return xp.take(grid, indices // self.tile[0], axis=-2).astype(np.float32)

    def _apply(self, operation: Any, values: Any, grid: Any, rows: Any) -> Any:
        """Apply ``operation`` to each value and the tile's scale, zero point or offset."""
        shape, columns = values.shape, self.tile[1] // (2 if self.is_packed else 1)
        row_scales = self.gather_rows(grid, rows)
        if row_scales.shape[-1] > 1 and shape[-1] % columns:
            row_scales = row_scales.__array_namespace__().repeat(row_scales, columns, axis=-1)[..., : shape[-1]]
        elif row_scales.shape[-1] > 1:
            values, row_scales = values.reshape(*shape[:-1], -1, columns), row_scales[..., None]
        return operation(values, row_scales).reshape(shape)

    def _round(self, weights: Any) -> Any:
        """Round weights to ``round_dtype``. XLA removes casts to fewer bits and back, but not `reduce_precision`."""
        if self.round_dtype is None:
            return weights
        dtype = jnp.dtype(self.round_dtype)
        if isinstance(weights, np.ndarray):
            return weights.astype(dtype).astype(np.float32)
        precision = jnp.finfo(dtype)
        return jax.lax.reduce_precision(weights, precision.nexp, precision.nmant)


@functools.cache
def _value_table(code_dtype: CodeDtype) -> np.ndarray:
    """Return the values of all codes, indexed by the bits of the code."""
    if code_dtype in CODEBOOKS:
        return CODEBOOKS[code_dtype]
    bits = np.arange(256, dtype=np.uint8)
    return {"int8": bits.view(np.int8), "int4": bits, "fp8": bits.view(FP8)}[code_dtype].astype(np.float32)


def _fp8_values(codes: Any) -> Any:
    """Return the float32 values of float8_e4m3fn bits. NaN is not supported, and is rejected during loading.

    If a loop reads slices of an 8-bit float array, XLA:CPU casts the whole array before the loop (jax 0.10.2, 0.12.0).
    On CPUs, the bits are therefore shifted into a float16. The float16 value is exactly 1/256 of the fp8 value.
    """
    if not on_cpu():
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    bits = codes.astype(jnp.uint16)
    scaled_values = jax.lax.bitcast_convert_type((bits & 128) << 8 | (bits & 127) << 7, jnp.float16)
    return scaled_values.astype(jnp.float32) * 256
