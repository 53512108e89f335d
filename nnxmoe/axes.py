"""Names of dimensions, logical axes and mesh axes, and the rules table that maps logical axes to mesh axes.

Dimension letters, the same in every signature and einsum:

    B batch          T query tokens    S key positions    D model width    V vocabulary
    N query heads    K key/value heads G = N / K          H head width     F feed-forward width
    E experts        X experts/token   C slots/expert     R routed rows    L layers

MLA's widths are words: ``q_rank kv_rank nope rope``. ``asked``: T, or 1 if only the last token's output is needed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from nnxmoe.config.frozen import FrozenDict
from nnxmoe.runtime.progress import logger

MESH_AXES = ("data", "fsdp", "expert", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")  # the batch is sharded over all three, so attention needs no communication
AnyMesh = Mesh | AbstractMesh

Rules = Mapping[str, str | None]

# Logical axis of a parameter -> mesh axis that shards it (None: replicated).
RULES: Rules = FrozenDict(
    {
        "vocab": "tensor",
        "embed": "fsdp",
        "heads": "tensor",
        "kv_heads": "tensor",
        "head": None,
        "mlp": "tensor",
        "expert": "expert",
        "latent": None,  # output of MLA's down projections
        "q_rank": None,  # input of MLA's up projections; "fsdp" saves memory if it divides the ranks
        "kv_rank": None,
        "norm": None,
        "router": None,
        "layers": None,
        "rank": None,  # of a LoRA adapter
        "gate_up": None,  # gate and up in one LoRA adapter
    }
)


def parameter(
    shape: Sequence[int],
    axes: Sequence[str],
    init: nnx.Initializer,
    *,
    dtype: jnp.dtype,
    rngs: nnx.Rngs | None,
    kind: type[nnx.Variable] = nnx.Param,
    inputs: int | None = None,
) -> nnx.Variable:
    """A parameter labelled with its logical axes; ``rngs`` None: a ShapeDtypeStruct instead of a value.

    ``inputs``: how many of the last dimensions a linear map contracts; None for other parameters.
    """
    shape, axes = tuple(shape), tuple(axes)
    assert len(shape) == len(axes), (shape, axes)
    value = jax.ShapeDtypeStruct(shape, dtype) if rngs is None else init(rngs.params(), shape, dtype)
    return kind(value, axes=axes, inputs=inputs, eager_sharding=False)


def label(part: Any, key: str, layer: int | None = None, stack: int | None = None) -> None:
    """Set the metadata of every parameter of a module: its key, such as ``layer.attention.q.kernel``, and the indices
    of its (first) layer and of that layer's stack, None outside of stacks."""
    for path, variable in nnx.iter_graph(part):
        if isinstance(variable, nnx.Variable):
            variable.set_metadata(key=".".join((key, *map(str, path))), layer=layer, stack=stack)


def make_mesh(
    data: int = 1, fsdp: int = 1, expert: int = 1, tensor: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A device mesh with the axes ``data, fsdp, expert, tensor``; one size may be -1: all remaining devices.

    Raises ValueError unless the product of the sizes is the number of devices.
    """
    sizes = {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}
    if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes.values()):
        raise ValueError(f"mesh sizes {sizes}: give integers")
    found = np.asarray(jax.devices() if devices is None else devices, dtype=object)
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"mesh sizes {sizes}: every size must be at least 1; one may be -1 (all remaining devices)")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if found.size % fixed or (found.size != fixed and not open_axes):
        multiple = "a multiple of " if open_axes else ""
        raise ValueError(f"mesh sizes {sizes} need {multiple}{fixed} devices; there are {found.size}")
    if open_axes:
        sizes[open_axes[0]] = found.size // fixed
    return Mesh(found.reshape(tuple(sizes.values())), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh of these sizes without devices, for planning; omitted axes have size 1. ValueError for unknown axes."""
    if unknown := [name for name in sizes if name not in MESH_AXES]:
        raise ValueError(f"{unknown[0]!r} is not a mesh axis; the axes are {', '.join(MESH_AXES)}")
    every = tuple(sizes.get(name, 1) for name in MESH_AXES)
    return AbstractMesh(every, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def batch_axes(mesh: AnyMesh | None) -> tuple[str, ...]:
    """The mesh axes that shard the batch, without those of size 1."""
    return () if mesh is None else tuple(axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1)


def shards(mesh: AnyMesh | None, axes: Sequence[str]) -> int:
    """Number of shards over these mesh axes."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)


def divided_over(batch: int, mesh: AnyMesh | None) -> tuple[str, ...]:
    """The batch axes of a mesh if the batch size is divisible by their shards, else ()."""
    axes = batch_axes(mesh)
    return () if batch % shards(mesh, axes) else axes


def partition_spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: AnyMesh, rules: Rules = RULES
) -> PartitionSpec:
    """The mesh axis that shards each dimension; a dimension without a name (None) is not sharded.

    Mesh axes of size 1 are dropped. ValueError for an indivisible size, a missing rule, or a missing or repeated axis.
    """
    entries: list[str | None] = []
    for name, size in zip(axes, shape, strict=True):
        if name is None:
            entries.append(None)
            continue
        if name not in rules:
            raise ValueError(f"no rule for the logical axis {name!r} of a parameter with axes {tuple(axes)}")
        axis = rules[name]
        if axis is not None and axis not in mesh.shape:
            raise ValueError(
                f"the rule {name!r} -> {axis!r} does not name an axis of the mesh {dict(mesh.shape)}: "
                "create the mesh with nnxmoe.make_mesh, which has all axes, or pass other rules"
            )
        entries.append(axis if axis is not None and mesh.shape[axis] > 1 else None)
        if entries[-1] is not None and size % mesh.shape[entries[-1]]:
            raise ValueError(
                f"{name!r} of size {size} does not divide over the mesh axis {axis!r} of size {mesh.shape[axis]}: "
                f"use another mesh size, or rules that replicate it, {{**nnxmoe.RULES, {name!r}: None}}"
            )
    used = [entry for entry in entries if entry is not None]
    if len(set(used)) != len(used):
        raise ValueError(f"the rules use a mesh axis twice: axes {tuple(axes)} -> {tuple(entries)}")
    return PartitionSpec(*entries) if used else PartitionSpec()


def constrain(x: jax.Array, mesh: AnyMesh | None, *axes: str | Sequence[str] | None) -> jax.Array:
    """``x`` with its first dimensions sharded over these mesh axes; a no-op without axes or mesh."""
    spec = PartitionSpec(*(axis or None for axis in axes))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) if mesh is not None and any(spec) else x


def split_batch(x: jax.Array, mesh: AnyMesh | None) -> jax.Array:
    """``x`` with its rows sharded over the batch axes; unchanged, with a warning, if they are not divisible."""
    axes, wanted = divided_over(x.shape[0], mesh), batch_axes(mesh)
    if axes != wanted:
        logger.warning("a batch of %d does not divide over %s: every device computes all of it", x.shape[0], wanted)
    return constrain(x, mesh, axes)


def everywhere(x: jax.Array, mesh: AnyMesh | None) -> jax.Array:
    """``x`` replicated over the mesh, so that every process can read it."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def axes_of(variable: nnx.Variable) -> tuple[str | None, ...]:
    """The logical axes of a parameter's dimensions; None for each dimension of a parameter without labels.

    Inside a scan over layers, where values have no layer dimension, the axis ``layers`` is omitted.
    """
    axes, rank = variable.get_metadata().get("axes"), len(variable.shape)
    return (None,) * rank if axes is None else tuple(axes[len(axes) - rank :])


def sharding_of(variable: nnx.Variable, mesh: Mesh, rules: Rules = RULES) -> NamedSharding:
    """The sharding of a parameter over the mesh."""
    return NamedSharding(mesh, partition_spec(axes_of(variable), variable.shape, mesh, rules))
