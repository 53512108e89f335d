"""Dtypes of weights: supported dtypes, the default dtype for loading, and the dtype of a model's matrices."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnxmoe.axes import axes_of
from nnxmoe.config.validate import as_dtype
from nnxmoe.convert.arrays.lazy_array import LazyArray
from nnxmoe.layers.linear.kernel import STACK_AXES


def float_dtype(dtype: Any) -> np.dtype | None:
    """Convert a dtype argument to a NumPy dtype.

    Args:
        dtype: NumPy, JAX or torch dtype, a name such as "bf16", None or "auto".

    Returns:
        float32, bfloat16 or float16. `None` for None and "auto".

    Raises:
        ValueError: The dtype is not supported for weights.
    """
    if dtype is None or dtype == "auto":
        return None
    numpy_dtype = as_dtype(dtype)
    if numpy_dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        label = dtype if numpy_dtype is None else numpy_dtype
        raise ValueError(f"dtype {label} is not supported for weights; use float32, bfloat16 or float16")
    return numpy_dtype


def default_dtype(arrays: Iterable[LazyArray]) -> np.dtype:
    """Return the default dtype of a parameter loaded from arrays, promoted from their `LazyArray.load_dtype`."""
    return np.dtype(jnp.result_type(*{array.load_dtype for array in arrays}))


def matrix_dtype(variables: Iterable[nnx.Variable]) -> Any:
    """Return the promoted dtype of all matrices among a model's parameters."""
    return jnp.result_type(*{v.dtype for v in variables if is_matrix(v)})


def is_matrix(variable: nnx.Variable) -> bool:
    """Return whether a parameter determines the dtype of activations: True except for norms, biases and routers."""
    axes = [axis for axis in axes_of(variable) if axis not in STACK_AXES]
    return isinstance(variable, nnx.Param) and len(axes) > 1 and "router" not in axes
