"""Tensors that form the quantized weight of a module. Access checks their presence, dtype and shape."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Shaped, UInt8

from nnxmoe.convert.arrays.boxes import Box
from nnxmoe.convert.arrays.coded_array import coded_array
from nnxmoe.convert.arrays.lazy_array import AT_ONCE, Empty, LazyArray
from nnxmoe.convert.files.safetensors import TensorInfo
from nnxmoe.convert.formats.plain_array import plain_array
from nnxmoe.convert.formats.scheme import MalformedTensor, QuantizationScheme
from nnxmoe.convert.storage.checkpoint import Checkpoint
from nnxmoe.layers.linear.code_format import STORAGE_DTYPES, CodeFormat

# Suffixes of the scales and zero points of activations and caches, which nnxmoe does not quantize.
ACTIVATION_SCALES = tuple(
    f".{of}_{kind}"
    for of in ("input", "output", "q", "k", "v", "kv")
    for kind in ("scale", "global_scale", "zero_point")
)
Unpack = Callable[[LazyArray, slice], np.ndarray]  # (tensor in the file, range of the weight's rows) -> codes
FLOATS = ("F32", "BF16", "F16")
Allowed = Literal["positive", "not zero", "not negative"]
_ALLOWED = {"positive": np.greater, "not zero": np.not_equal, "not negative": np.greater_equal}
_SCALES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SCALES |= dict.fromkeys(("F8_E8M0", "U8", "F8_E4M3"), "float32")


class ModuleTensors:
    """Tensors of a module in a checkpoint.

    Attributes:
        module: Prefix of the tensors' names.
        tensors: Header entries of all tensors in the checkpoint, by name.
        scheme: Quantization settings.
        checkpoint: Checkpoint to read from. `None` if only the headers are available.
        used: Names of the tensors that were accessed, in order, as keys.
    """

    def __init__(
        self, module: str, tensors: Mapping[str, TensorInfo], scheme: QuantizationScheme, checkpoint: Checkpoint | None
    ):
        self.module, self.tensors, self.scheme, self.checkpoint = module, tensors, scheme, checkpoint
        self.used: dict[str, None] = {}

    def where(self, info: TensorInfo) -> str:
        """Return the tensor's name and file, for messages."""
        return f"{info.name} in {info.file.name}" if info.file.name else info.name

    def tensor(self, ending: str, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]] | None = None) -> TensorInfo:
        """Return a tensor of the module. Raises MalformedTensor if it is missing or has a wrong dtype or shape."""
        info = self.tensors.get(f"{self.module}.{ending}")
        if info is None:
            raise MalformedTensor(f"{self.module}.{ending} is missing: the codes of {self.module} require it")
        self.used[info.name] = None
        if info.dtype not in dtypes:
            raise MalformedTensor(f"{self.where(info)} is {info.dtype}: it must be {' or '.join(dtypes)}")
        if shapes is not None and info.shape not in shapes:
            expected_shapes = " or ".join(str(list(shape)) for shape in shapes)
            subject = "its scales must be" if "scale" in ending else "it must be"
            raise MalformedTensor(f"{self.where(info)} has shape {list(info.shape)}: {subject} {expected_shapes}")
        return info

    def has(self, ending: str) -> bool:
        """Return whether the module has a tensor with this suffix."""
        return f"{self.module}.{ending}" in self.tensors

    def values(self, info: TensorInfo) -> np.ndarray | None:
        """Read a small tensor. `None` if only the headers are available."""
        return None if self.checkpoint is None else self.checkpoint.read(info.name)

    def matrix(self, info: TensorInfo) -> tuple[int, int]:
        """Return the shape of a tensor of codes. Raises MalformedTensor unless it has two dimensions."""
        self.used[info.name] = None
        if len(info.shape) != 2 or 0 in info.shape:
            raise MalformedTensor(f"{self.where(info)}: quantized weights have two dimensions, got {list(info.shape)}")
        return info.shape[0], info.shape[1]

    def scale(
        self, info: TensorInfo, grid: tuple[int, ...], transposed: bool = False, allowed: Allowed = "positive"
    ) -> LazyArray:
        """Return the scales per tile, ``[*experts, rows, columns]``.

        Reading the scales raises MalformedTensor if a scale is invalid.

        Args:
            info: Tensor of the scales.
            grid: Shape of the result.
            transposed: Whether the file stores columns first.
            allowed: Condition on valid scales. AutoRound writes negative scales, so that the code -8 can represent
                the largest weight of either sign. Scales that underflow in FP8 are zero.
        """
        dtype = jnp.dtype(_SCALES[info.dtype])
        file_array, compare = plain_array(self.checkpoint, info), _ALLOWED[allowed]

        def read(box: Box, empty: Empty) -> np.ndarray:
            reads_whole = transposed or info.shape != grid
            raw_scales = np.asarray(file_array) if reads_whole else file_array.read_box(box, np.empty)
            if info.dtype == "U8":
                raw_scales = raw_scales.view(ml_dtypes.float8_e8m0fnu)
            scales = raw_scales.astype(dtype) if raw_scales.dtype != dtype else raw_scales
            if reads_whole:
                scales = np.ascontiguousarray(scales.T if transposed else scales).reshape(grid)[box]
            values = scales.astype(np.float32)
            valid = np.isfinite(values) & compare(values, 0)
            if not valid.all():
                index = tuple(int(i) for i in np.argwhere(~valid)[0])
                tile = [part.start + i for part, i in zip(box, index, strict=True)]
                requirement = f"it must be finite and {allowed}"
                raise MalformedTensor(
                    f"{self.where(info)} has a scale of {values[index]} at tile {tile}: {requirement}"
                )
            return scales

        return dataclasses.replace(file_array, shape=grid, dtype=dtype, read_box=read)

    def weight(self, codes: CodeFormat, shape: tuple[int, ...], parts: Mapping[str, LazyArray]) -> LazyArray:
        """Combine the arrays of a quantized weight into one lazy array.

        `LazyArray.tensors` of the codes includes all used tensors that belong to no other array. Raises MalformedTensor
        if the format does not support the number of inputs.
        """
        try:
            codes.check_inputs(shape[-1])
        except ValueError as error:
            raise MalformedTensor(f"{self.module}: {error}") from None
        listed_names = {name for part_name, part in parts.items() if part_name != "codes" for name in part.tensors}
        code_tensors = tuple(name for name in self.used if name not in listed_names)
        codes_array = dataclasses.replace(parts["codes"], tensors=code_tensors)
        return coded_array(codes, shape, {**parts, "codes": codes_array})

    def byte_codes(
        self,
        codes: CodeFormat,
        info: TensorInfo,
        scale: TensorInfo,
        allowed: Allowed = "positive",
        **extra_parts: LazyArray,
    ) -> LazyArray:
        """Return a quantized weight that stores one code per byte, without conversion.

        ``extra_parts`` are parts other than codes and scales, such as ``zero``.
        """
        shape = self.matrix(info)
        file_array = plain_array(
            self.checkpoint, dataclasses.replace(info, dtype="I8" if codes.code_dtype == "int8" else "U8")
        )
        scales = self.scale(scale, codes.scales_shape(*shape), allowed=allowed)
        return self.weight(codes, shape, {"codes": file_array, "scale": scales, **extra_parts})

    def codes(
        self, codes: CodeFormat, shape: tuple[int, int], info: TensorInfo, unpack: Unpack, block: int = AT_ONCE
    ) -> LazyArray:
        """Return the codes of a weight whose packing in the file differs from `CodeFormat`'s packing.

        Args:
            codes: Quantization format.
            shape: Shape of the weight.
            info: Tensor of the packed codes.
            unpack: Function that returns the unsigned codes of a range of rows, one code per element.
            block: Preferred size of a read in bytes.
        """
        file_array = plain_array(self.checkpoint, info)

        def read(box: Box, empty: Empty) -> np.ndarray:
            code_values = np.ascontiguousarray(unpack(file_array, box[0]))
            return (codes.pack(code_values) if codes.is_packed else _signed(code_values))[:, box[1]]

        return LazyArray(codes.codes_shape(*shape), STORAGE_DTYPES[codes.code_dtype], read, block, file=info.file.name)

    def zero_words(
        self, codes: CodeFormat, shape: tuple[int, int], info: TensorInfo, unpack: Callable[[np.ndarray], np.ndarray]
    ) -> LazyArray:
        """Return zero points that are packed in words in the file. ``unpack`` returns all zero points, unsigned."""
        convert = unpack if codes.is_packed else lambda packed: _signed(np.ascontiguousarray(unpack(packed)))
        return plain_array(self.checkpoint, info).map_whole(
            codes.scales_shape(*shape), STORAGE_DTYPES[codes.code_dtype], convert
        )

    def zero_numbers(self, info: TensorInfo, grid: tuple[int, int]) -> LazyArray:
        """Return the zero points of int8 codes, which are not packed in the file."""

        def check(zeros: np.ndarray) -> np.ndarray:
            if zeros.min() < -128 or zeros.max() > 127:
                raise MalformedTensor(f"{self.where(info)}: zero points must be from -128 to 127")
            return zeros.astype(np.int8).reshape(grid)

        return plain_array(self.checkpoint, info).map_whole(grid, np.dtype(np.int8), check)


def unpack_words(words: Shaped[np.ndarray, "... W"], bits: int) -> UInt8[np.ndarray, "... N"]:
    """Unpack unsigned numbers of 4 or 8 bits from little-endian 32-bit words, the lowest bits first.

    The order follows compressed-tensors (``compressors/pack_quantized``), AutoGPTQ and GPTQModel
    (``nn_modules/qlinear``).
    """
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)


def _signed(codes: UInt8[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    """Convert bytes in offset binary (value + 128) to int8."""
    return (codes ^ 128).view(np.int8)


def rounding_dtype(scale: TensorInfo) -> str | None:
    """Return the dtype to which the tools round dequantized weights: the scales' dtype, or `None` for float32."""
    dtype = _SCALES[scale.dtype]
    return None if dtype == "float32" else dtype
