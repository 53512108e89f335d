"""Quantise a matrix to DeepSeek's FP8 blocks."""

import ml_dtypes
import numpy as np


def quantise(weight: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns FP8 codes and block scales; each block's largest value maps to 448."""
    grid = [-(-n // b) for n, b in zip(weight.shape, block, strict=True)]
    scales = np.ones(grid, np.float32)
    codes = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn)
    for i in range(grid[0]):
        for j in range(grid[1]):
            part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = np.abs(weight[part]).max() / 448
            codes[part] = (weight[part] / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
    return codes, scales


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 40]}
