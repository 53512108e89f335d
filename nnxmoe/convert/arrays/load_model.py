"""Loads abstract models (shapes only) from arrays, after comparing what they need with what is stored."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import plain, some
from nnxmoe.convert.arrays.array_layout import ArrayLayout
from nnxmoe.convert.arrays.lazy_array import LazyArray, LazyArrays
from nnxmoe.convert.arrays.load_parameters import load_parameters
from nnxmoe.convert.arrays.load_report import LoadError, LoadReport
from nnxmoe.layers.linear.quantized import QuantizedArray
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.strategy import Strategy, with_mesh
from nnxmoe.models import model_class

DTYPES = tuple(map(np.dtype, (np.float32, jnp.bfloat16, np.float16, np.float64)))
INTEGERS = tuple(map(np.dtype, (np.int64, np.int32)))
_SHOWN = 20


def check_config(config: DecoderConfig) -> None:
    """Raise ValueError unless ``config`` is a DecoderConfig."""
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"config is a {type(config).__name__}: pass the result of nnxmoe.config_from_hf")


def abstract_model(
    config: DecoderConfig, strategy: Strategy | None, mesh: Mesh | None, *, mtp: bool = False
) -> CausalLM:
    """A model with shapes but no values; ``mesh`` None: the strategy's; ``mtp``: see `CausalLM`."""
    return model_class(config)(config, with_mesh(strategy, mesh), rngs=None, mtp=mtp)


def fold_query_scale_if_cast(
    config: DecoderConfig, arrays: Iterable[LazyArray], dtype: np.dtype | None
) -> tuple[DecoderConfig, float]:
    """``(config, 1.0)`` if all arrays keep their dtype. Otherwise `config.folded()`: the config without the queries'
    scale and the factor that removes it, so that scaling and casting round only once."""
    kept = dtype is None or all(array.dtype == dtype for array in arrays)
    return (config, 1.0) if kept else config.folded()


def compare_arrays(
    leaves: Mapping[str, ArrayLayout], arrays: LazyArrays, report: LoadReport, *, strict: bool = False
) -> LoadReport:
    """A report with the differences between the arrays that a layout needs and those that are stored. ``strict``:
    unexpected arrays are wrong."""
    unexpected = tuple(sorted(arrays.keys() - leaves.keys()))
    strange = [f"{name} {list(arrays[name].shape)} is not a parameter" for name in unexpected if strict]
    wrong = [line for name in leaves if name in arrays for line in _wrong(name, leaves[name], arrays)]
    missing = tuple(sorted(leaves.keys() - arrays.keys()))
    return dataclasses.replace(report, missing=missing, unexpected=unexpected, wrong=(*strange, *wrong))


def _wrong(name: str, leaf: ArrayLayout, arrays: LazyArrays) -> Iterator[str]:
    array, variable = arrays[name], leaf.parts[0].variable
    where = f"{plain(name)} in {array.file}" if array.file else plain(name)
    whole = np.dtype(variable.dtype).kind in "iu"
    allowed = (np.dtype(variable.dtype),) if isinstance(variable, QuantizedArray) else INTEGERS if whole else DTYPES
    if array.fault is not None:
        yield array.fault
        return
    if array.shape != leaf.shape:
        turned = " (it looks transposed)" if array.shape == leaf.shape[::-1] else ""
        yield f"{where} has shape {list(array.shape)}, the config asks for {list(leaf.shape)}{turned}"
    if array.dtype not in allowed:
        yield f"{where} is {array.dtype}: weights are {', '.join(map(str, allowed))}"


def load_model(
    model: CausalLM,
    leaves: Mapping[str, ArrayLayout],
    arrays: LazyArrays,
    dtype: np.dtype | None,
    report: LoadReport,
    misfit: str,
    remedy: str = "",
) -> None:
    """Set the values and ``load_report`` of an abstract model. Raises LoadError if, according to the report, arrays are
    missing or wrong: its message begins with ``misfit`` and lists up to 20 of them; ``remedy`` is for missing ones."""
    lines = [f"{name} is missing, {list(leaves[name].shape)}" for name in report.missing] + list(report.wrong)
    if lines:
        more = [f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        more += [f"and nothing reads {some(report.unexpected)}"] if report.missing and report.unexpected else []
        shown = "\n  ".join(lines[:_SHOWN] + more)
        raise LoadError(f"{misfit}:\n  {shown}{remedy if report.missing else ''}", report)
    load_parameters(model, leaves, arrays, dtype, report)
