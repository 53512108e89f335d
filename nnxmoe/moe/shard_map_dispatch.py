"""``shard_map`` around dispatch, experts and combine."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from nnxmoe.axes import AnyMesh, axes_of
from nnxmoe.layers.linear.kernel import is_kernel
from nnxmoe.layers.linear.multilinear import multilinear
from nnxmoe.sharding import context_shard_axes, shard_map
from nnxmoe.sharding_rules import axes_per_dimension, partition_spec

Body = Callable[..., tuple[Float[Array, "B T D"], Int[Array, ""]]]


def shard_map_dispatch(
    body: Body,
    x: Float[Array, "B T D"],
    chosen: Any,
    experts: Any,
    mesh: AnyMesh,
    axes: Sequence[str],
    expert_axis: str | None,
) -> tuple[Float[Array, "B T D"], Int[Array, "S"]]:
    """Run ``body(x, chosen, experts) -> y, dropped`` on every device, with the batch of x and of the `Assignments`
    sharded over ``axes`` and the tokens of each row over ``context``.

    Experts stay sharded over ``expert_axis``. The feed-forward width stays sharded over mesh axes that do not shard
    tokens, and the partial y are summed; only one of them includes parameters with ``added_once``. All other kernel
    dimensions are all-gathered, in the dtype of ``x`` (gradient: reduce-scatter, in the kernel's own dtype).
    """
    graph, state = nnx.split(experts)
    over = context_shard_axes(x.shape[1], mesh)
    flat = nnx.to_flat_state(state)
    specs = [partition_spec(axes_of(v), v.shape, mesh, experts.rules) for _, v in flat]
    keep = {"expert": {expert_axis}, "mlp": set(mesh.shape) - {*axes, *over, expert_axis}}
    dims = [_split_dims(axes_of(v), axes_per_dimension(axes_of(v), mesh, experts.rules)) for _, v in flat]
    summed = tuple(
        {axis for split in dims for name, _, over in split for axis in over if name == "mlp" and axis in keep[name]}
    )

    def used(variable: nnx.Variable, value: Array, split: list[tuple[str, int, tuple[str, ...]]]) -> Array:
        for name, dim, over in split:
            if gathered := tuple(axis for axis in over if axis not in keep.get(name, ())):
                value = _gathered(value, gathered, dim, x.dtype if is_kernel(variable) else value.dtype)
        once = summed and variable.get_metadata().get("added_once")
        return jnp.where(jax.lax.axis_index(summed) == 0, value, 0) if once else value

    def local(x: Any, chosen: Any, kernels: Any) -> Any:
        kernels = [v.replace(used(v, k, split)) for (_, v), k, split in zip(flat, kernels, dims, strict=True)]
        mine = nnx.merge(graph, nnx.from_flat_state(zip([path for path, _ in flat], kernels, strict=True)))
        y, dropped = body(x, chosen, mine)
        return (jax.lax.psum(y, summed) if summed else y), dropped[None]

    rows, each = PartitionSpec(tuple(axes) or None, over or None), PartitionSpec((*axes, *over))
    kernels = [v.get_value() for _, v in flat]
    return shard_map(local, mesh, (rows, rows, specs), (rows, each))(x, chosen, kernels)


def _gathered(value: Array, axes: tuple[str, ...], dim: int, dtype: Any) -> Array:
    """The shards of a kernel together, rounded to ``dtype`` before they travel if it has fewer bits.

    Products cast kernels to the dtype of their rows anyway, so results do not change; the bytes on the network do.
    """
    if jnp.dtype(dtype).itemsize >= value.dtype.itemsize:
        return jax.lax.all_gather(value, axes, axis=dim, tiled=True)

    def gather(value: Array) -> Array:
        return jax.lax.all_gather(value.astype(dtype), axes, axis=dim, tiled=True).astype(value.dtype)

    def scatter(d_out: Array) -> Array:
        return jax.lax.psum_scatter(d_out, axes, scatter_dimension=dim, tiled=True)

    return multilinear(gather, {0: scatter})(value)


def _split_dims(names: Sequence[str | None], over: Sequence[tuple[str, ...]]) -> list[tuple[str, int, tuple[str, ...]]]:
    """(logical name, dimension, mesh axes) of the sharded dimensions."""
    split = enumerate(zip(names, over, strict=True))
    return [(name, dim, axes) for dim, (name, axes) in split if name is not None and axes]
