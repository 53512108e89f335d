"""FP4 weights with two codes in a byte, that of the even input in the low bits: groups of 16 with an FP8 scale each and
one factor for the tensor (NVFP4, Nvidia 2025), or groups of 32 with an exponent each (MXFP4).

    w[o, i] = FP4[code[o, i]] * scale[o, i // size] * factor
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from nnxmoe.convert.core.lazy_array import Box, Empty, LazyArray
from nnxmoe.convert.hf.module_tensors import ModuleTensors
from nnxmoe.convert.hf.mxfp4 import of_pairs
from nnxmoe.convert.hf.raw import raw
from nnxmoe.convert.hf.scheme import Malformed
from nnxmoe.layers.codes import Codes
from nnxmoe.storage.safetensors import TensorInfo

NVFP4 = Codes("fp4", (1, 16))


def in_pairs(
    files: ModuleTensors,
    info: TensorInfo,
    codes: Codes,
    scales: str,
    dtypes: Sequence[str],
    scaled: Callable[[np.ndarray], np.ndarray] | None = None,
) -> LazyArray:
    """The weight of bytes ``[O, I / 2]`` and of the module's tensor ``scales [O, I / size]``, to which ``scaled`` is
    applied in float32. Raises Malformed."""
    outs, octets = files.matrix(info)
    size = codes.tile[1]
    if 2 * octets % size:
        raise Malformed(f"{files.where(info)} has rows of {2 * octets} codes: FP4 has groups of {size} here")
    shape = outs, 2 * octets
    scale = files.tensor(scales, dtypes, [codes.grid(*shape)])
    grid = files.scale(scale, scale.shape, zero=scaled is not None)
    if scaled is not None:
        grid = _changed(grid, scaled)
    stored = of_pairs(raw(files.checkpoint, dataclasses.replace(info, dtype="U8")), size)
    return files.made(codes, shape, {"codes": stored, "scale": grid})


def nvfp4(files: ModuleTensors, info: TensorInfo, codes: Codes, factor: str, divides: bool) -> LazyArray:
    """NVFP4. ``factor``: the module's tensor that holds it; ``divides``: scales are divided by it. Raises Malformed."""
    one = files.tensor(factor, ("F32",), [(), (1,)])
    value = files.values(one)
    if value is not None and not (np.isfinite(value).all() and (value > 0).all()):
        raise Malformed(f"{files.where(one)} is {value.item()}: it must be positive and finite")

    def scaled(found: np.ndarray) -> np.ndarray:
        assert value is not None, "headers only"
        return found / value.reshape(()) if divides else found * value.reshape(())

    return in_pairs(files, info, codes, "weight_scale", ("F8_E4M3",), scaled)


def _changed(array: LazyArray, change: Callable[[np.ndarray], np.ndarray]) -> LazyArray:
    def read(box: Box, empty: Empty) -> np.ndarray:
        return change(array.read_box(box, np.empty))

    return dataclasses.replace(array, read_box=read)
