"""Compares the arrays that a model needs with those that a checkpoint stores, by name, shape and dtype.

Loading and ``nnxmoe inspect`` use the same check.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from nnxmoe.config.printable import plain, some
from nnxmoe.convert.core.layout import Leaf
from nnxmoe.convert.core.lazy_array import LazyArrays
from nnxmoe.convert.core.report import LoadError, LoadReport
from nnxmoe.layers.quantized import QuantizedArray

DTYPES = tuple(map(np.dtype, (np.float32, jnp.bfloat16, np.float16, np.float64)))
_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Faults:
    """``missing``: names without an array; ``unexpected``: names that the model does not use; ``wrong``: messages about
    arrays of the wrong shape or dtype."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    wrong: tuple[str, ...]


def check(leaves: Mapping[str, Leaf], arrays: LazyArrays) -> Faults:
    """The differences between the arrays that a layout needs and those that are stored."""
    return Faults(
        tuple(sorted(leaves.keys() - arrays.keys())),
        tuple(sorted(arrays.keys() - leaves.keys())),
        tuple(line for name in leaves if name in arrays for line in _wrong(name, leaves[name], arrays)),
    )


def _wrong(name: str, leaf: Leaf, arrays: LazyArrays) -> Iterator[str]:
    array, variable = arrays[name], leaf.parts[0].parameter.variable
    where = f"{plain(name)} in {array.file}" if array.file else plain(name)
    allowed = (np.dtype(variable.dtype),) if isinstance(variable, QuantizedArray) else DTYPES
    if array.fault is not None:
        yield array.fault
        return
    if array.shape != leaf.shape:
        turned = " (it looks transposed)" if array.shape == leaf.shape[::-1] else ""
        yield f"{where} has shape {list(array.shape)}, the config asks for {list(leaf.shape)}{turned}"
    if array.dtype not in allowed:
        yield f"{where} is {array.dtype}: weights are {', '.join(map(str, allowed))}"


def refuse(faults: Faults, leaves: Mapping[str, Leaf], report: LoadReport, misfit: str, remedy: str = "") -> None:
    """Raise LoadError if arrays are missing or wrong. The message begins with ``misfit`` and lists up to 20 of them."""
    lines = [f"{name} is missing, {list(leaves[name].shape)}" for name in faults.missing] + list(faults.wrong)
    if lines:
        more = [f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        more += [f"and nothing reads {some(report.unexpected)}"] if faults.missing and report.unexpected else []
        shown = "\n  ".join(lines[:_SHOWN] + more)
        raise LoadError(f"{misfit}:\n  {shown}{remedy}", report)
