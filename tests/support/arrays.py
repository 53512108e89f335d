"""Parameters of models and trees as NumPy arrays by name, and comparisons of them."""

import math
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

import nnxmoe
from nnxmoe.convert.hf import pretrained
from nnxmoe.layers.linear.kernel import flax_order

Flat = dict[str, np.ndarray]


def max_error(a: Any, b: Any, where: Any = None) -> float:
    """Largest absolute difference where the mask is true; inf if shapes differ or anything is NaN."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        return math.inf
    error = np.abs(a - b)
    if where is not None:
        error = error[np.asarray(where, bool)]
    worst = float(error.max(initial=0.0))
    return math.inf if math.isnan(worst) else worst


def inputs_first(kernel: Any) -> np.ndarray:
    """The values of a kernel, ``[*lead, *ins, *outs]``."""
    return np.asarray(kernel[...]).transpose(flax_order(kernel, range(kernel.ndim)))


def flat(tree: Any) -> Flat:
    """Maps paths such as ``params/decoder/…`` to arrays."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}


def nested(arrays: Flat) -> dict[str, Any]:
    return unflatten_dict(arrays, sep="/")


def identical(ours: Flat, theirs: Flat) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype and ours[name].shape == array.shape, name
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


def tensors(model: nnxmoe.CausalLM) -> dict[str, np.ndarray]:
    """Every tensor by its Hugging Face name; independent of the model's strategy."""
    return {name: np.asarray(array) for name, array in pretrained.arrays(model).items()}
