"""One ``shard_map`` around dispatch, experts and combine: each device with its own tokens and its own experts."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from nnxmoe.axes import AnyMesh, axes_of, partition_spec

Body = Callable[..., tuple[Float[Array, "B T D"], Int[Array, ""]]]


def on_shards(
    body: Body,
    x: Float[Array, "B T D"],
    ids: Int[Array, "B T X"],
    weights: Float[Array, "B T X"],
    experts: Any,
    mesh: AnyMesh,
    axes: Sequence[str],
    keep: Sequence[str],
) -> tuple[Float[Array, "B T D"], Int[Array, "S"]]:
    """``body(x, ids, weights, experts) -> y, dropped`` on every device, the batch split over ``axes``.

    Kernels arrive as they lie on the mesh and are gathered over the axes that are not to ``keep``, whose gradient is
    then a reduce-scatter. Where their feed-forward width stays split over ``tensor``, the parts of y are added up.
    """
    graph, state = nnx.split(experts)
    flat = nnx.to_flat_state(state)
    specs = [partition_spec(axes_of(v), v.shape, mesh) for _, v in flat]
    split = {axis for spec in specs for axis in spec} & set(keep) & {"tensor"}

    def local(x: Any, ids: Any, weights: Any, kernels: Any) -> Any:
        whole = [gathered(kernel, spec, keep) for kernel, spec in zip(kernels, specs, strict=True)]
        mine = nnx.merge(graph, nnx.from_flat_state([(p, v.replace(k)) for (p, v), k in zip(flat, whole, strict=True)]))
        y, dropped = body(x, ids, weights, mine)
        return (jax.lax.psum(y, tuple(split)) if split else y), dropped[None]

    rows = PartitionSpec(tuple(axes))
    kernels = [v.get_value() for _, v in flat]
    run = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, rows, specs), out_specs=(rows, rows), check_vma=False)
    return run(x, ids, weights, kernels)


def gathered(kernel: Array, spec: PartitionSpec, keep: Sequence[str]) -> Array:
    """A kernel without its splits over axes that are not kept."""
    for dim, axis in enumerate(spec):
        if axis is not None and axis not in keep:
            kernel = jax.lax.all_gather(kernel, axis, axis=dim, tiled=True)
    return kernel
