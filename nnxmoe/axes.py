"""Names of dimensions, logical axes and mesh axes. Creates parameters annotated with logical axes.

Dimension letters in signatures and einsums:

    B batch          T query tokens    S key positions    D model width    V vocabulary
    N query heads    K key/value heads G = N / K          H head width     F feed-forward width
    E experts        X experts/token   C slots/expert     R routed rows    L layers

MLA widths are spelled out: ``q_rank kv_rank nope rope``. ``T_out`` is T, or 1 if only the last token's output is
needed.
"""

from collections.abc import Sequence
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

MESH_AXES = ("pipe", "data", "fsdp", "context", "expert", "tensor")
# Axes that shard the rows of a batch. Attention needs no communication over these axes. Inside a pipeline stage,
# ``pipe`` does not shard the batch.
BATCH_AXES = ("pipe", "data", "fsdp", "expert")
CONTEXT = "context"  # Shards the tokens of each row. Attention exchanges keys and values over this axis.
TOKEN_AXES = (*BATCH_AXES, CONTEXT)  # Devices along these axes process different tokens, so gradients are summed.
LAYER_AXES = ("layers", "stages")  # Logical axes of stacked layers, always the first axis of a parameter.
AnyMesh = Mesh | AbstractMesh


class ParamOptions(TypedDict):
    """Keyword arguments shared by all code that creates parameters.

    Attributes:
        dtype: Dtype of the parameters.
        rngs: Random number generators for the initial values. If None, parameters are abstract
            (shapes and dtypes only).
    """

    dtype: jnp.dtype
    rngs: nnx.Rngs | None


def parameter(
    shape: Sequence[int],
    axes: Sequence[str | None],
    init: nnx.Initializer,
    *,
    param_type: type[nnx.Variable] = nnx.Param,
    inputs: int | None = None,
    keeps_dtype: bool = False,
    **kw: Unpack[ParamOptions],
) -> nnx.Variable:
    """Create a parameter and store its logical axes in its ``out_sharding`` metadata, as Flax does.

    Args:
        shape: Shape of the parameter.
        axes: Logical axis of each dimension, or None for a dimension that is not sharded.
        init: Initializer. Unused if ``rngs`` is None.
        param_type: Type of the variable.
        inputs: Number of trailing input dimensions of a linear layer's kernel. None for parameters that are not
            kernels.
        keeps_dtype: True if casting the model does not change the dtype of this parameter.
        **kw: See `ParamOptions`.
    """
    shape, axes = tuple(shape), tuple(axes)
    assert len(shape) == len(axes), (shape, axes)
    dtype, rngs = kw["dtype"], kw["rngs"]
    value = jax.ShapeDtypeStruct(shape, dtype) if rngs is None else init(rngs.params(), shape, dtype)
    return param_type(value, out_sharding=axes, inputs=inputs, keeps_dtype=keeps_dtype, eager_sharding=False)


def keeps_dtype(variable: nnx.Variable) -> bool:
    """Return whether loading, saving and casting preserve the dtype of a parameter."""
    return bool(getattr(variable, "keeps_dtype", False))


def axes_of(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Return the logical axis of each dimension of a parameter, or None for unlabeled dimensions.

    Inside a scan over layers, parameters have no layer dimension, so the layer axis is omitted.
    """
    axes, rank = variable.get_metadata().get("out_sharding"), len(variable.shape)
    return (None,) * rank if axes is None else tuple(axes[len(axes) - rank :])


def is_stacked(axes: Sequence[str | None]) -> bool:
    """Return whether a parameter with these logical axes stacks several layers along its first dimension."""
    return bool(axes) and axes[0] in LAYER_AXES
