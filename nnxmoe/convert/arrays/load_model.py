"""Compare the arrays that an abstract model (shapes only) requires with the stored arrays, and load them."""

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from nnxmoe.axes import keeps_dtype
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.printable import plain, some
from nnxmoe.convert.arrays.array_layout import ArrayLayout, Parameter, Path, parameters
from nnxmoe.convert.arrays.dtypes import default_dtype, matrix_dtype
from nnxmoe.convert.arrays.lazy_array import LazyArray, LazyArrays
from nnxmoe.convert.arrays.load_report import LoadError, LoadReport
from nnxmoe.convert.arrays.parameter_loader import LoadGroup, LoadTarget, ParameterLoader
from nnxmoe.layers.linear.quantized import QuantizedArray
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.quantization.quantized_kernels import bytes_by_dtype
from nnxmoe.model.strategy import Strategy, with_mesh
from nnxmoe.models import model_class
from nnxmoe.runtime.memory import local_bytes, refuse_beyond_memory
from nnxmoe.runtime.progress import bytes_bar

DTYPES = tuple(map(np.dtype, (np.float32, jnp.bfloat16, np.float16, np.float64)))
INTEGERS = tuple(map(np.dtype, (np.int64, np.int32)))
_SHOWN = 20


def check_config(config: DecoderConfig) -> None:
    """Raise ValueError unless ``config`` is a DecoderConfig."""
    if not isinstance(config, DecoderConfig):
        raise ValueError(
            f"config is a {type(config).__name__}, not a DecoderConfig: pass the result of nnxmoe.config_from_hf"
        )


def abstract_model(
    config: DecoderConfig, strategy: Strategy | None, mesh: Mesh | None, *, mtp: bool = False
) -> CausalLM:
    """Build an abstract model (shapes only).

    Args:
        config: Config of the model.
        strategy: Computation strategy of the model. Defaults to `Strategy.auto()`.
        mesh: Mesh of the model. Defaults to the strategy's mesh.
        mtp: Whether to add the multi-token prediction layers.
    """
    return model_class(config)(config, with_mesh(strategy, mesh), rngs=None, mtp=mtp)


def fold_query_scale_if_cast(
    config: DecoderConfig, arrays: Iterable[LazyArray], dtype: np.dtype | None
) -> tuple[DecoderConfig, float]:
    """Fold the config's query scale into the weights if loading casts them, so that they are rounded only once.

    Returns:
        Tuple of the config to load with and the factor on the query weights: `DecoderConfig.fold_query_scale`, or the
        unchanged config and 1.0 if no array is cast.
    """
    is_cast = dtype is not None and any(array.dtype != dtype for array in arrays)
    return config.fold_query_scale() if is_cast else (config, 1.0)


def compare_arrays(
    layouts: Mapping[str, ArrayLayout], arrays: LazyArrays, report: LoadReport, *, strict: bool = False
) -> LoadReport:
    """Report the differences between the arrays that a model requires and the stored arrays.

    Args:
        layouts: Array name -> layout of an array that the model requires.
        arrays: Stored arrays by name.
        report: Report to extend.
        strict: Whether unexpected arrays are errors.

    Returns:
        The report with ``missing``, ``unexpected`` and ``wrong`` set.
    """
    unexpected = tuple(sorted(arrays.keys() - layouts.keys()))
    wrong = [f"{name} {list(arrays[name].shape)} is not a parameter" for name in unexpected if strict]
    for name, layout in layouts.items():
        if name in arrays:
            wrong += _differences(name, layout, arrays[name])
    missing_names = tuple(sorted(layouts.keys() - arrays.keys()))
    return dataclasses.replace(report, missing=missing_names, unexpected=unexpected, wrong=tuple(wrong))


def _differences(name: str, layout: ArrayLayout, array: LazyArray) -> Iterator[str]:
    if array.fault is not None:
        yield array.fault
        return
    location = f"{plain(name)} in {array.file}" if array.file else plain(name)
    if array.shape != layout.shape:
        hint = " (it looks transposed)" if array.shape == layout.shape[::-1] else ""
        yield f"{location} has shape {list(array.shape)}, but the config requires {list(layout.shape)}{hint}"
    variable = layout.parts[0].variable
    dtype = np.dtype(variable.dtype)
    allowed = INTEGERS if dtype.kind in "iu" else DTYPES
    if isinstance(variable, QuantizedArray):
        allowed = (dtype,)
    if array.dtype not in allowed:
        yield f"{location} is {array.dtype}; supported dtypes: {', '.join(map(str, allowed))}"


def load_model(
    model: CausalLM,
    layouts: Mapping[str, ArrayLayout],
    arrays: LazyArrays,
    dtype: np.dtype | None,
    report: LoadReport,
    mismatch: str,
    remedy: str = "",
) -> None:
    """Set the values and ``load_report`` of an abstract model.

    Args:
        model: Abstract model (shapes only).
        layouts: Array name -> layout of the model's parameters in that array.
        arrays: Arrays of the checkpoint by name.
        dtype: Dtype of the parameters, except parameters with a fixed dtype. Defaults to the stored dtype.
        report: Result of `compare_arrays`.
        mismatch: First line of the error message.
        remedy: Last line of the error message if arrays are missing.

    Raises:
        LoadError: Arrays are missing or wrong. The message lists up to 20 arrays.
    """
    lines = [f"{name} is missing, {list(layouts[name].shape)}" for name in report.missing] + list(report.wrong)
    if lines:
        extra_lines = [f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        extra_lines += [f"unused tensors: {some(report.unexpected)}"] if report.missing and report.unexpected else []
        listing = "\n  ".join(lines[:_SHOWN] + extra_lines)
        raise LoadError(f"{mismatch}:\n  {listing}{remedy if report.missing else ''}", report)
    _load_parameters(model, layouts, arrays, dtype, report)


def _load_parameters(
    model: CausalLM, layouts: Mapping[str, ArrayLayout], arrays: LazyArrays, dtype: np.dtype | None, report: LoadReport
) -> None:
    start_time, groups = time.perf_counter(), _group_parameters(model, layouts, arrays, dtype)
    _refuse_beyond_memory(groups, report.source)
    total = sum(arrays[name].nbytes for name in layouts)
    with bytes_bar(total, f"loading {os.path.basename(report.source)}") as bar:
        loader = ParameterLoader(layouts, arrays, bar)
        values = loader.load(groups)
    state = {path: variable.replace(values[path]) for path, variable in nnx.to_flat_state(nnx.state(model))}
    nnx.update(model, nnx.from_flat_state(state))
    compute_dtype = model.strategy.compute_dtype
    model.dtype = matrix_dtype(state.values()) if compute_dtype is None else jnp.dtype(compute_dtype)
    model.load_report = dataclasses.replace(
        report,
        loaded=report.loaded or tuple(sorted(layouts)),
        casts=_casts(groups, layouts, arrays),
        nonfinite=dict(sorted(loader.nonfinite.items())),
        weights=bytes_by_dtype(model),
        bytes_read=loader.bytes_read,
        seconds=time.perf_counter() - start_time,
    )
    model.load_report.warn()


def _refuse_beyond_memory(groups: list[LoadGroup], source: str) -> None:
    targets = [target for group in groups for target in group.targets]
    remedy = "shard them over more devices (mesh=…)"
    if any(target.dtype.itemsize > 2 for target in targets):
        remedy += ", or load them as bfloat16 (dtype=…)"
    sizes_and_shardings = [(target.parameter.shape, target.dtype, target.sharding) for target in targets]
    refuse_beyond_memory(local_bytes(sizes_and_shardings), f"{source}: the weights take", remedy)


def _casts(
    groups: list[LoadGroup], layouts: Mapping[str, ArrayLayout], arrays: LazyArrays
) -> dict[str, tuple[str, ...]]:
    """Group the names of cast arrays by "stored dtype -> loaded dtype"."""
    casts: dict[str, set[str]] = {}
    for group in groups:
        dtypes = {target.parameter.path: target.dtype for target in group.targets}
        for name in group.names:
            stored_dtype, loaded_dtype = arrays[name].kind, str(dtypes[layouts[name].parts[0].path])
            if stored_dtype != loaded_dtype:
                casts.setdefault(f"{stored_dtype} -> {loaded_dtype}", set()).add(name)
    return {cast: tuple(sorted(names)) for cast, names in sorted(casts.items())}


def _group_parameters(
    model: CausalLM, layouts: Mapping[str, ArrayLayout], arrays: LazyArrays, dtype: np.dtype | None
) -> list[LoadGroup]:
    """Group the model's parameters in order. Parameters that share an array are in the same group."""
    groups = {parameter.path: ([parameter], list[str]()) for parameter in parameters(model, codes=True)}
    stored_arrays: dict[Path, list[LazyArray]] = {path: [] for path in groups}
    for name, layout in layouts.items():
        paths = {part.path: None for part in layout.parts}
        group, *other_groups = {id(groups[path]): groups[path] for path in paths}.values()
        group[1].append(name)
        for members, names in other_groups:
            group[0].extend(members)
            group[1].extend(names)
            groups |= dict.fromkeys((member.path for member in members), group)
        for path in paths:
            stored_arrays[path].append(arrays[name])

    def target(parameter: Parameter) -> LoadTarget:
        variable = parameter.variable
        if keeps_dtype(variable):
            new_dtype = np.dtype(variable.dtype)
        else:
            new_dtype = dtype or default_dtype(stored_arrays[parameter.path])
        return LoadTarget(parameter, new_dtype, model.strategy.sharding_of(variable))

    distinct_groups = {id(group): group for group in groups.values()}.values()
    return [LoadGroup([target(member) for member in members], names) for members, names in distinct_groups]
