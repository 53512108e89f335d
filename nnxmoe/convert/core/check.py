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


def checked(leaves: Mapping[str, Leaf], arrays: LazyArrays, report: LoadReport) -> LoadReport:
    """A report with the differences between the arrays that a layout needs and those that are stored."""
    return dataclasses.replace(
        report,
        missing=tuple(sorted(leaves.keys() - arrays.keys())),
        unexpected=tuple(sorted(arrays.keys() - leaves.keys())),
        wrong=tuple(line for name in leaves if name in arrays for line in _wrong(name, leaves[name], arrays)),
    )


def _wrong(name: str, leaf: Leaf, arrays: LazyArrays) -> Iterator[str]:
    array, variable = arrays[name], leaf.parts[0].variable
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


def refuse(leaves: Mapping[str, Leaf], report: LoadReport, misfit: str, remedy: str = "") -> None:
    """Raise LoadError if arrays are missing or wrong. The message begins with ``misfit`` and lists up to 20 of them;
    ``remedy`` is for missing ones."""
    lines = [f"{name} is missing, {list(leaves[name].shape)}" for name in report.missing] + list(report.wrong)
    if lines:
        more = [f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        more += [f"and nothing reads {some(report.unexpected)}"] if report.missing and report.unexpected else []
        shown = "\n  ".join(lines[:_SHOWN] + more)
        raise LoadError(f"{misfit}:\n  {shown}{remedy if report.missing else ''}", report)
