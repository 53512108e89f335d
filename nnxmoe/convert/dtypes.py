"""Dtypes of weights: what may be asked for, what files are loaded as, and what activations take."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from nnxmoe.axes import axes_of
from nnxmoe.model.strategy import Strategy


def float_dtype(dtype: Any) -> np.dtype | None:
    """A dtype for weights; None stays None. ValueError for others than float32, bfloat16 and float16."""
    if dtype is None:
        return None
    try:
        named = jnp.dtype(dtype)
    except TypeError:
        named = dtype
    if named not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"dtype {named} is not supported for weights; supported: float32, bfloat16, float16")
    return named


def natural_dtype(kinds: Iterable[np.dtype]) -> np.dtype:
    """The dtype that arrays of these dtypes are loaded as by default: the widest; FP8 as bfloat16, float64 as
    float32."""
    narrowed = {1: np.dtype(ml_dtypes.bfloat16), 8: np.dtype(np.float32)}
    return np.dtype(jnp.result_type(*(narrowed.get(kind.itemsize, kind) for kind in kinds)))


def activations_dtype(strategy: Strategy, variables: Iterable[nnx.Variable]) -> Any:
    """The strategy's dtype, or that of the matrices among a model's parameters."""
    return matrices_dtype(variables) if strategy.compute_dtype is None else jnp.dtype(strategy.compute_dtype)


def matrices_dtype(variables: Iterable[nnx.Variable]) -> Any:
    """The dtype that holds every matrix among a model's parameters."""
    return jnp.result_type(*{v.dtype for v in variables if is_matrix(v)})


def is_matrix(variable: nnx.Variable) -> bool:
    """Whether activations take a parameter's dtype: norms, biases and routers may have another."""
    axes = [axis for axis in axes_of(variable) if axis != "layers"]
    return isinstance(variable, nnx.Param) and len(axes) > 1 and "router" not in axes
