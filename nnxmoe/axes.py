"""Names of dimensions, logical axes and mesh axes, and the one table between the last two.

Dimension letters, the same in every signature and einsum:

    B batch          T query tokens    S key positions    D model width    V vocabulary
    N query heads    K key/value heads G = N / K          H head width     F feed-forward width
    E experts        X experts a token C slots an expert  R routed rows    L layers

MLA's widths are words: ``q_rank kv_rank nope rope``. ``asked``: T, or 1 where the last token's output alone is wanted.
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
BATCH_AXES = ("data", "fsdp", "expert")  # the batch is split over all of them; attention then needs no communication
AnyMesh = Mesh | AbstractMesh

Rules = Mapping[str, str | None]

# Logical axis of a parameter -> mesh axis that splits it (None: kept whole).
RULES: Rules = FrozenDict(
    {
        "vocab": "tensor",
        "embed": "fsdp",
        "heads": "tensor",
        "kv_heads": "tensor",
        "head": None,
        "mlp": "tensor",
        "expert": "expert",
        "latent": None,  # what MLA projects down to
        "q_rank": None,  # and up from; "fsdp" saves memory where the ranks divide
        "kv_rank": None,
        "norm": None,
        "router": None,
        "layers": None,
        "rank": None,  # of an adapter
        "gate_up": None,  # two maps side by side
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
    """A parameter labelled with its logical axes; without ``rngs`` only its shape: 671B parameters cost nothing.

    ``inputs``: of a linear map, how many dimensions (after those of experts and layers) it contracts; None otherwise.
    """
    shape, axes = tuple(shape), tuple(axes)
    assert len(shape) == len(axes), (shape, axes)
    value = jax.ShapeDtypeStruct(shape, dtype) if rngs is None else init(rngs.params(), shape, dtype)
    return kind(value, axes=axes, inputs=inputs, eager_sharding=False)


def label(part: Any, key: str, layer: int | None = None, stack: int | None = None) -> None:
    """Stamp every parameter of a part with its key, such as ``layer.attention.q.kernel``, and where the part stands:
    the index of its (first) layer and of that layer's stack, None outside of stacks."""
    for path, variable in nnx.iter_graph(part):
        if isinstance(variable, nnx.Variable):
            variable.set_metadata(key=".".join((key, *map(str, path))), layer=layer, stack=stack)


def make_mesh(
    data: int = 1, fsdp: int = 1, expert: int = 1, tensor: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A device mesh with the axes ``data, fsdp, expert, tensor``; one size may be -1: all the devices that are left.

    Raises ValueError where the sizes do not multiply to the number of devices.
    """
    sizes = {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}
    if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes.values()):
        raise ValueError(f"mesh sizes {sizes}: give integers")
    found = np.asarray(jax.devices() if devices is None else devices, dtype=object)
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"mesh sizes {sizes}: every size is at least 1, and at most one is -1 (what is left)")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        sizes[open_axes[0]] = found.size // fixed
    if math.prod(sizes.values()) != found.size:
        raise ValueError(
            f"mesh sizes {sizes} need {math.prod(sizes.values()) or fixed} devices; there are {found.size}"
        )
    return Mesh(found.reshape(tuple(sizes.values())), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh of these sizes without devices, to plan with; axes that are not named have size 1."""
    if unknown := [name for name in sizes if name not in MESH_AXES]:
        raise ValueError(f"{unknown[0]!r} is no axis of a mesh; the axes are {', '.join(MESH_AXES)}")
    every = tuple(sizes.get(name, 1) for name in MESH_AXES)
    return AbstractMesh(every, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def batch_axes(mesh: AnyMesh | None) -> tuple[str, ...]:
    """The axes of a mesh over which the batch is split, those of size 1 left out."""
    return () if mesh is None else tuple(axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1)


def shards(mesh: AnyMesh | None, axes: Sequence[str]) -> int:
    """How many parts these axes make."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)


def divided_over(batch: int, mesh: AnyMesh | None) -> tuple[str, ...]:
    """The batch axes of a mesh where a batch divides over them, else none."""
    axes = batch_axes(mesh)
    return () if batch % shards(mesh, axes) else axes


def partition_spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: AnyMesh, rules: Rules = RULES
) -> PartitionSpec:
    """The mesh axis that splits each dimension; a dimension without a name (None) is kept whole.

    Mesh axes of size 1 are dropped. Raises ValueError for impossible splits.
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
                f"the rule {name!r} -> {axis!r} names no axis of the mesh {dict(mesh.shape)}: "
                "make it with nnxmoe.make_mesh, which has all axes, or give other rules"
            )
        entries.append(axis if axis is not None and mesh.shape[axis] > 1 else None)
        if entries[-1] is not None and size % mesh.shape[entries[-1]]:
            raise ValueError(
                f"{name!r} of size {size} does not divide over the mesh axis {axis!r} of size {mesh.shape[axis]}: "
                f"take another size, or rules that keep it whole, {{**nnxmoe.RULES, {name!r}: None}}"
            )
    used = [entry for entry in entries if entry is not None]
    if len(set(used)) != len(used):
        raise ValueError(f"the rules use a mesh axis twice: axes {tuple(axes)} -> {tuple(entries)}")
    return PartitionSpec(*entries) if used else PartitionSpec()


def constrain(x: jax.Array, mesh: AnyMesh | None, *axes: str | Sequence[str] | None) -> jax.Array:
    """``x`` with its first dimensions split over these mesh axes; untouched where none splits anything."""
    spec = PartitionSpec(*(axis or None for axis in axes))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) if mesh is not None and any(spec) else x


def split_batch(x: jax.Array, mesh: AnyMesh | None) -> jax.Array:
    """``x`` with its rows split over the batch axes; untouched, with a warning, where they do not divide."""
    axes, wanted = divided_over(x.shape[0], mesh), batch_axes(mesh)
    if axes != wanted:
        logger.warning("a batch of %d does not divide over %s: every device computes all of it", x.shape[0], wanted)
    return constrain(x, mesh, axes)


def everywhere(x: jax.Array, mesh: AnyMesh | None) -> jax.Array:
    """``x`` whole on every device of the mesh, where each process can read it."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def axes_of(variable: nnx.Variable) -> tuple[str | None, ...]:
    """The logical axes of a parameter's dimensions; None for each dimension of a parameter without labels.

    Within a scan over layers the axis ``layers`` is absent, as it is from the value.
    """
    axes, rank = variable.get_metadata().get("axes"), len(variable.shape)
    return (None,) * rank if axes is None else tuple(axes[len(axes) - rank :])


def sharding_of(variable: nnx.Variable, mesh: Mesh, rules: Rules = RULES) -> NamedSharding:
    """Where one parameter lies on the mesh."""
    return NamedSharding(mesh, partition_spec(axes_of(variable), variable.shape, mesh, rules))
