"""Names of dimensions, logical axes and mesh axes, and parameters that carry logical axes.

Dimension letters, the same in every signature and einsum:

    B batch          T query tokens    S key positions    D model width    V vocabulary
    N query heads    K key/value heads G = N / K          H head width     F feed-forward width
    E experts        X experts/token   C slots/expert     R routed rows    L layers

MLA's widths are words: ``q_rank kv_rank nope rope``. ``asked`` is T, or 1 if only the last token's output is needed.
"""

from collections.abc import Sequence
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

MESH_AXES = ("pipe", "data", "fsdp", "context", "expert", "tensor")
# The batch is sharded over all of these axes, so attention needs no communication. Inside the stages of a pipeline,
# ``pipe`` does not shard the batch.
BATCH_AXES = ("pipe", "data", "fsdp", "expert")
CONTEXT = "context"  # shards the tokens of every row; attention exchanges keys and values over this axis
TOKEN_AXES = (*BATCH_AXES, CONTEXT)  # shards of different tokens, so gradients are summed over these axes
LAYER_AXES = ("layers", "stages")  # logical axes that count layers; a parameter has at most one, first
AnyMesh = Mesh | AbstractMesh


class ParamOptions(TypedDict):
    """Options of every constructor of parameters.

    Attributes:
        dtype: Dtype of the parameters.
        rngs: Random keys of the initial values. If None, parameters have shapes but no values.
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
    """Create a parameter with its logical axes in the metadata ``out_sharding``. Flax also reads this metadata.

    Args:
        shape: Shape of the parameter.
        axes: Logical axis of each dimension. Dimensions with None are not sharded.
        init: Initializer of the value. Unused if ``rngs`` is None.
        param_type: Type of the variable.
        inputs: Number of trailing dimensions that a linear map contracts. None if the parameter is not the kernel of
            a linear map.
        keeps_dtype: Whether casting the model leaves this parameter unchanged.
        **kw: The dtype and rngs of the parameter.
    """
    shape, axes = tuple(shape), tuple(axes)
    assert len(shape) == len(axes), (shape, axes)
    dtype, rngs = kw["dtype"], kw["rngs"]
    value = jax.ShapeDtypeStruct(shape, dtype) if rngs is None else init(rngs.params(), shape, dtype)
    return param_type(value, out_sharding=axes, inputs=inputs, keeps_dtype=keeps_dtype, eager_sharding=False)


def keeps_dtype(variable: nnx.Variable) -> bool:
    """Return whether loading and saving leave the parameter's dtype unchanged."""
    return bool(getattr(variable, "keeps_dtype", False))


def axes_of(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Return the logical axis of each dimension of a parameter. Dimensions without a label have None.

    Inside a scan over layers, values have no layer dimension. The layer axis is then omitted.
    """
    axes, rank = variable.get_metadata().get("out_sharding"), len(variable.shape)
    return (None,) * rank if axes is None else tuple(axes[len(axes) - rank :])


def is_stacked(axes: Sequence[str | None]) -> bool:
    """Return whether a parameter with these logical axes stacks several layers along its first dimension."""
    return bool(axes) and axes[0] in LAYER_AXES
