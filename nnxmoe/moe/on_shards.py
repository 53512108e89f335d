"""``shard_map`` around dispatch, experts and combine."""

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
    expert_axis: str | None,
) -> tuple[Float[Array, "B T D"], Int[Array, "S"]]:
    """Runs ``body(x, ids, weights, experts) -> y, dropped`` on every device, with the batch sharded over ``axes``.

    Experts stay sharded over ``expert_axis``. The feed-forward width stays sharded over mesh axes that do not shard
    tokens, and the partial y are summed. All other kernel dimensions are all-gathered (gradient: reduce-scatter).
    """
    graph, state = nnx.split(experts)
    flat = nnx.to_flat_state(state)
    specs = [partition_spec(axes_of(v), v.shape, mesh, experts.rules) for _, v in flat]
    keep = {"expert": {expert_axis}, "mlp": set(mesh.shape) - {*axes, expert_axis}}
    dims = [_split_dims(axes_of(v), spec) for (_, v), spec in zip(flat, specs, strict=True)]
    summed = tuple({axis for split in dims for name, _, axis in split if name == "mlp" and axis in keep[name]})

    def whole(kernel: Array, split: list[tuple[str, int, str]]) -> Array:
        for name, dim, axis in split:
            if axis not in keep.get(name, ()):
                kernel = jax.lax.all_gather(kernel, axis, axis=dim, tiled=True)
        return kernel

    def local(x: Any, ids: Any, weights: Any, kernels: Any) -> Any:
        kernels = [v.replace(whole(k, split)) for (_, v), k, split in zip(flat, kernels, dims, strict=True)]
        mine = nnx.merge(graph, nnx.from_flat_state(zip([path for path, _ in flat], kernels, strict=True)))
        y, dropped = body(x, ids, weights, mine)
        return (jax.lax.psum(y, summed) if summed else y), dropped[None]

    rows = PartitionSpec(tuple(axes))
    kernels = [v.get_value() for _, v in flat]
    run = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, rows, specs), out_specs=(rows, rows), check_vma=False)
    return run(x, ids, weights, kernels)


def _split_dims(names: Sequence[str | None], spec: PartitionSpec) -> list[tuple[str, int, str]]:
    """(logical name, dimension, mesh axis) of the sharded dimensions."""
    split = enumerate(zip(names, spec, strict=False))
    return [(name, dim, axis) for dim, (name, axis) in split if name is not None and axis is not None]
