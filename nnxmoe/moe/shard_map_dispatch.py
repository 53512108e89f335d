"""``shard_map`` over dispatch, experts and combine."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from nnxmoe.axes import AnyMesh, axes_of
from nnxmoe.layers.linear.kernel import is_kernel
from nnxmoe.layers.linear.multilinear import multilinear
from nnxmoe.sharding import context_shard_axes, reduction_dtype, shard_map
from nnxmoe.sharding_rules import Rules, axes_per_dimension, partition_spec

Body = Callable[..., tuple[Float[Array, "B T D"], Int[Array, ""]]]


class _ShardedDim(NamedTuple):
    """Sharded dimension of a parameter: logical axis name, index, and mesh axes."""

    name: str
    dim: int
    axes: tuple[str, ...]


def shard_map_dispatch(
    body: Body,
    x: Float[Array, "B T D"],
    assignments: Any,
    experts: Any,
    mesh: AnyMesh,
    axes: Sequence[str],
    expert_axis: str | None,
) -> tuple[Float[Array, "B T D"], Int[Array, "S"]]:
    """Run ``body(x, assignments, experts) -> y, dropped`` on the shards of every device.

    Experts remain sharded over ``expert_axis``. The hidden width remains sharded over mesh axes that do not shard
    tokens. The partial outputs of devices along these axes are summed. A parameter with the metadata ``added_once`` is
    used by only one of these devices. All other kernel dimensions are all-gathered in the dtype of ``x``. Gradients are
    summed over devices in the dtype set by `reduce_gradients_in`, and over the rows of a device in the kernel's dtype.

    Args:
        body: Function to run per shard. Returns the outputs and the number of dropped assignments.
        x: Token activations. ``axes`` shard the batch, and axis ``context`` shards the sequence.
        assignments: `Assignments` of the tokens, with the same sharding as the tokens.
        experts: Module with ``rules``, see `ExpertFn`.
        mesh: Device mesh.
        axes: Mesh axes that shard the batch.
        expert_axis: Mesh axis over which experts remain sharded. If ``None``, all experts are gathered.

    Returns:
        The outputs, and the number of dropped assignments per token shard.
    """
    graph, state = nnx.split(experts)
    context_axes = context_shard_axes(x.shape[1], mesh)
    flat_state = nnx.to_flat_state(state)
    paths, variables = [path for path, _ in flat_state], [variable for _, variable in flat_state]
    width_axes = set(mesh.shape) - {*axes, *context_axes, expert_axis}
    local_axes = {"expert": {expert_axis}, "mlp": width_axes}
    sharded_dims = [_sharded_dims(variable, mesh, experts.rules) for variable in variables]
    sum_axes = _partial_sum_axes(sharded_dims, width_axes)

    def gather_parameter(variable: nnx.Variable, value: Array, dims: list[_ShardedDim]) -> Array:
        for name, dim, dim_axes in dims:
            gather_axes = tuple(axis for axis in dim_axes if axis not in local_axes.get(name, ()))
            if gather_axes:
                value = _all_gather(value, gather_axes, dim, x.dtype if is_kernel(variable) else value.dtype)
        value = value.astype(variable.dtype)  # gradients are summed on a device in this dtype
        if sum_axes and variable.get_metadata().get("added_once"):
            return jnp.where(jax.lax.axis_index(sum_axes) == 0, value, 0)
        return value

    def run_on_shard(x: Any, assignments: Any, shards: Any) -> Any:
        local_variables = [
            variable.replace(gather_parameter(variable, shard, dims))
            for variable, shard, dims in zip(variables, shards, sharded_dims, strict=True)
        ]
        local_state = nnx.from_flat_state(zip(paths, local_variables, strict=True))
        y, dropped = body(x, assignments, nnx.merge(graph, local_state))
        return (jax.lax.psum(y, sum_axes) if sum_axes else y), dropped[None]

    tokens, counts = PartitionSpec(tuple(axes) or None, context_axes or None), PartitionSpec((*axes, *context_axes))
    specs = [partition_spec(axes_of(variable), variable.shape, mesh, experts.rules) for variable in variables]
    values = [_to_reduction_dtype(variable, x.dtype) for variable in variables]
    return shard_map(run_on_shard, mesh, (tokens, tokens, specs), (tokens, counts))(x, assignments, values)


def _to_reduction_dtype(variable: nnx.Variable, rows_dtype: Any) -> Array:
    """Return the variable's value. Kernels are cast to the dtype in which their gradients are summed over devices."""
    value = variable.get_value()
    return value.astype(reduction_dtype(value.dtype, rows_dtype)) if is_kernel(variable) else value


def _sharded_dims(variable: nnx.Variable, mesh: AnyMesh, rules: Rules) -> list[_ShardedDim]:
    names = axes_of(variable)
    mesh_axes = axes_per_dimension(names, mesh, rules)
    return [
        _ShardedDim(name, dim, axes)
        for dim, (name, axes) in enumerate(zip(names, mesh_axes, strict=True))
        if name is not None and axes
    ]


def _partial_sum_axes(sharded_dims: Sequence[Sequence[_ShardedDim]], width_axes: set[str]) -> tuple[str, ...]:
    """Return the mesh axes over which the hidden width remains sharded."""
    sum_axes: dict[str, None] = {}
    for dims in sharded_dims:
        for name, _, axes in dims:
            if name == "mlp":
                sum_axes.update(dict.fromkeys(axis for axis in axes if axis in width_axes))
    return tuple(sum_axes)


def _all_gather(value: Array, axes: tuple[str, ...], dim: int, dtype: Any) -> Array:
    """All-gather the shards of a kernel. If ``dtype`` is narrower than the kernel's dtype, cast the shards first.

    Products cast kernels to the dtype of the rows anyway, so the cast saves bandwidth without changing results.
    """
    if jnp.dtype(dtype).itemsize >= value.dtype.itemsize:
        return jax.lax.all_gather(value, axes, axis=dim, tiled=True)

    def gather(value: Array) -> Array:
        return jax.lax.all_gather(value.astype(dtype), axes, axis=dim, tiled=True).astype(value.dtype)

    def scatter(d_out: Array) -> Array:
        return jax.lax.psum_scatter(d_out, axes, scatter_dimension=dim, tiled=True)

    return multilinear(gather, {0: scatter})(value)
