"""Abstract models (shapes only), and loading them from arrays that must match their parameters one to one."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
from jax.sharding import Mesh

from nnxmoe.config.base import DecoderConfig
from nnxmoe.convert.core.check import checked, refuse
from nnxmoe.convert.core.fill import fill
from nnxmoe.convert.core.layout import Leaf
from nnxmoe.convert.core.lazy_array import LazyArray, LazyArrays
from nnxmoe.convert.core.report import LoadReport
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.strategy import Strategy
from nnxmoe.models import model_class


def check_config(config: DecoderConfig) -> None:
    """Raise ValueError unless ``config`` is a DecoderConfig."""
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"config is a {type(config).__name__}: pass the result of nnxmoe.config_from_hf")


def abstract(config: DecoderConfig, strategy: Strategy | None, mesh: Mesh | None, *, mtp: bool = False) -> CausalLM:
    """A model with shapes but no values; ``mesh`` None: the strategy's; ``mtp``: see `CausalLM`."""
    strategy = strategy or Strategy.auto()
    strategy = dataclasses.replace(strategy, mesh=strategy.mesh if mesh is None else mesh)
    return model_class(config)(config, strategy, rngs=None, mtp=mtp)


def unless_cast(
    config: DecoderConfig, arrays: Iterable[LazyArray], dtype: np.dtype | None
) -> tuple[DecoderConfig, float]:
    """``(config, 1.0)`` if all arrays keep their dtype. Otherwise `config.folded()`: the config without the queries'
    scale and the factor that removes it, so that scaling and casting round only once."""
    kept = dtype is None or all(array.dtype == dtype for array in arrays)
    return (config, 1.0) if kept else config.folded()


def restore(
    model: CausalLM,
    leaves: Mapping[str, Leaf],
    arrays: LazyArrays,
    dtype: np.dtype | None,
    report: LoadReport,
    misfit: str,
) -> None:
    """Set the values and ``load_report`` of an abstract model. Raises LoadError, whose message begins with ``misfit``,
    if arrays are missing, unexpected or wrong."""
    report = checked(leaves, arrays, report)
    strange = tuple(f"{name} {list(arrays[name].shape)} is not a parameter" for name in report.unexpected)
    refuse(leaves, dataclasses.replace(report, wrong=(*strange, *report.wrong)), misfit)
    fill(model, leaves, arrays, dtype, report)
