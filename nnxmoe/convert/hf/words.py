"""How quantised checkpoints pack codes into words: from the words of a file to one code per element, ``[outs, ins]``.

The layouts are those of the tools' own readers: compressed-tensors (``compressors/pack_quantized``), AutoAWQ
(``utils/packing_utils``), AutoGPTQ and GPTQModel (``nn_modules/qlinear``).
"""

import numpy as np
from jaxtyping import Int, Shaped, UInt8

AWQ_COLUMNS = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # the nibble of a word that holds each of its eight columns


def fields(words: Shaped[np.ndarray, "... W"], bits: int) -> UInt8[np.ndarray, "... N"]:
    """The unsigned numbers of 4 or 8 bits in little-endian 32-bit words, the lowest bits first."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)


def along_columns(packed: Int[np.ndarray, "R W"], bits: int, columns: int) -> UInt8[np.ndarray, "R C"]:
    """Numbers packed along the last dimension, without the padding of the last word."""
    return fields(packed, bits)[..., :columns]


def along_rows(packed: Int[np.ndarray, "W C"], bits: int, rows: int) -> UInt8[np.ndarray, "C R"]:
    """Numbers packed along the first dimension, transposed."""
    return fields(np.ascontiguousarray(packed.T), bits)[..., :rows]


def awq(packed: Int[np.ndarray, "R W"]) -> UInt8[np.ndarray, "R C"]:
    """4-bit numbers of AWQ's ``gemm`` version: eight columns to a word, in AWQ's order."""
    words = fields(packed, 4).reshape(*packed.shape, 8)
    return words[..., AWQ_COLUMNS].reshape(packed.shape[0], -1)


def signed(codes: UInt8[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    """Bytes in offset binary (value + 128) as int8."""
    return (codes ^ 128).view(np.int8)


def packed(numbers: UInt8[np.ndarray, "R N"], bits: int) -> Int[np.ndarray, "R W"]:
    """The inverse of `along_columns`: the last word is filled up with zeros."""
    per_word = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per_word)))
    octets = padded if bits == 8 else padded[:, ::2] | padded[:, 1::2] << 4
    return np.ascontiguousarray(octets).view(np.int32)
