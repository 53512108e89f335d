"""DeepSeek's FP8 blocks: one float32 scale per block of an 8-bit weight."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnxmoe.config.printable import short
from nnxmoe.storage.errors import CheckpointError
from nnxmoe.storage.safetensors import DTYPES

_FP8 = [dtype for code, dtype in DTYPES.items() if code.startswith("F8_")]


def check_scale_grid(
    name: str, shape: Sequence[int], scale_shape: Sequence[int], block: Sequence[int], file: str | os.PathLike[str]
) -> None:
    """Raises CheckpointError unless scale_inv has one scale per block of the weight, partial blocks included."""
    if len(shape) != 2 or len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise CheckpointError(
            f"{os.fspath(file)}: tensor {short(name)}: FP8 blocks need a weight of two dimensions and a "
            f"weight_block_size of two positive integers, got {list(shape)} and {list(block)}"
        )
    wanted = [-(-size // step) for size, step in zip(shape, block, strict=True)]
    if list(scale_shape) != wanted:
        raise CheckpointError(
            f"{os.fspath(file)}: the scales of tensor {short(name)} have shape {list(scale_shape)}, but "
            f"{list(shape)} in blocks of {list(block)} needs {wanted}; check weight_block_size in config.json"
        )


def dequantize_blocks(
    weight: np.ndarray, scale_inv: np.ndarray, block: tuple[int, int], row_start: int = 0, col_start: int = 0
) -> np.ndarray:
    """Returns float32(weight[i, j]) * float32(scale_inv[i // block rows, j // block columns]), DeepSeek-V3's rule.

    `weight` is the part of the full FP8 tensor that starts at (row_start, col_start); `scale_inv` is the full grid.
    Extra memory stays near a megabyte.
    """
    if weight.dtype not in _FP8:
        raise ValueError(f"FP8 blocks hold 8-bit floats, got {weight.dtype}")
    rows, cols = weight.shape
    starts, steps = (row_start, col_start), block
    grid = [-(-(start + size) // step) for start, size, step in zip(starts, weight.shape, steps, strict=True)]
    if scale_inv.ndim != 2 or any(have < need for have, need in zip(scale_inv.shape, grid, strict=True)):
        raise ValueError(f"scales of shape {list(scale_inv.shape)} do not cover the {grid} blocks of the weight")
    codes = np.arange(256, dtype=np.uint8).view(weight.dtype).astype(np.float32)
    columns = (col_start + np.arange(cols)) // block[1]
    piece = max(1, (1 << 17) // max(cols, 1))
    out = np.empty((rows, cols), np.float32)
    row = 0
    with np.errstate(over="ignore", invalid="ignore"):
        while row < rows:
            line = (row_start + row) // block[0]
            scales = scale_inv[line].astype(np.float32)[columns]
            end = min(rows, (line + 1) * block[0] - row_start)
            for begin in range(row, end, piece):
                part = slice(begin, min(begin + piece, end))
                np.take(codes, weight[part].view(np.uint8), out=out[part], mode="clip")
                out[part] *= scales
            row = end
    return out


def fp8_block(fields: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """The FP8 block size declared by a config.json; None without quantization. Raises for other quantizations."""
    quantization = fields.get("quantization_config")
    if quantization is None:
        return None
    where = f"{where}: quantization_config"
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8":
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"{where}: method {short(method)} is not supported; supported: 'fp8' in blocks, as DeepSeek-V3"
        )
    if quantization.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(f"{where}: fmt {short(quantization['fmt'])} is not supported; supported: 'e4m3'")
    block = quantization.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in block):
        raise CheckpointError(f"{where}: weight_block_size must be two positive integers, got {short(block)}")
    return block[0], block[1]
