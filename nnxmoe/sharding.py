"""Sharding of activations: constraints, ``shard_map``, and parts of a model that shard their operands themselves."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnxmoe.axes import BATCH_AXES, CONTEXT, AnyMesh
from nnxmoe.sharding_rules import Rules, shard_count

_logger = logging.getLogger("nnxmoe")


def is_static(*sizes: Any) -> bool:
    """Return whether all sizes are numbers, not the symbolic dimensions of `jax.export`."""
    return all(isinstance(size, int) for size in sizes)


def _manual_axes() -> tuple[str, ...]:
    """Return the mesh axes over which the code being traced runs per device: ``pipe`` in the stages of a pipeline."""
    return jax.sharding.get_abstract_mesh().manual_axes


def _current_mesh(mesh: AnyMesh) -> AnyMesh:
    """Return the mesh for shardings in the code being traced. JAX refuses ``mesh`` itself if an axis is manual."""
    return jax.sharding.get_abstract_mesh() if _manual_axes() else mesh


def shard_map(
    run: Callable[..., Any], mesh: AnyMesh, in_specs: Any, out_specs: Any, axes: Iterable[str] | None = None
) -> Callable[..., Any]:
    """Return ``jax.shard_map`` of a function over mesh axes, by default all that are not manual already."""
    names = set(mesh.shape) - set(_manual_axes()) if axes is None else set(axes)
    specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(run, mesh=_current_mesh(mesh), axis_names=names, check_vma=False, **specs)


def batch_axes(mesh: AnyMesh | None) -> tuple[str, ...]:
    """Return the mesh axes of size above 1 that shard the batch; in the stages of a pipeline without ``pipe``."""
    if mesh is None:
        return ()
    manual = _manual_axes()
    return tuple(axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1 and axis not in manual)


def batch_shard_axes(batch: Any, mesh: AnyMesh | None) -> tuple[str, ...]:
    """Return the batch axes of a mesh if their shards divide the batch size, else ()."""
    axes = batch_axes(mesh)
    return () if batch % shard_count(mesh, axes) else axes


def context_shard_axes(length: int, mesh: AnyMesh | None) -> tuple[str, ...]:
    """Return the mesh axis ``context`` if it has several devices and divides rows of this many tokens, else ()."""
    size = 1 if mesh is None or CONTEXT in _manual_axes() else mesh.shape.get(CONTEXT, 1)
    return (CONTEXT,) if size > 1 and length % size == 0 else ()


def shard_constraint(x: Any, mesh: AnyMesh | None, *axes: str | Sequence[str] | None) -> Any:
    """Constrain the first dimensions of ``x`` to be sharded over these mesh axes. No-op without axes or mesh."""
    spec = PartitionSpec(*(axis or None for axis in axes))
    if mesh is None or not any(spec):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(_current_mesh(mesh), spec))


def shard_batch(x: jax.Array, mesh: AnyMesh | None) -> jax.Array:
    """Shard the rows of ``x [B, T, ...]`` over the batch axes and its tokens over ``context``.

    A dimension that the mesh does not divide is replicated, with a warning, except a single token.
    """
    rows, tokens = x.shape[:2]
    row_axes, token_axes = batch_shard_axes(rows, mesh), context_shard_axes(tokens, mesh)
    if row_axes != batch_axes(mesh):
        _warn_replicated(f"{rows} rows", batch_axes(mesh))
    if mesh is not None and not token_axes and tokens > 1 and mesh.shape.get(CONTEXT, 1) > 1:
        _warn_replicated(f"{tokens} tokens", (CONTEXT,))
    return shard_constraint(x, mesh, row_axes, token_axes)


def _warn_replicated(count: str, axes: Sequence[str]) -> None:
    _logger.warning("%s do not divide over %s: every device computes all of them", count, axes)


def replicate(x: jax.Array, mesh: AnyMesh | None) -> jax.Array:
    """Replicate ``x`` over the mesh, so that every process can read it."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


@runtime_checkable
class MeshAware(Protocol):
    """A part of a strategy that XLA cannot partition, so it shards its operands itself."""

    def with_mesh(self, mesh: Mesh | None, rules: Rules) -> Any:
        """Return the part for a model on this mesh."""
        ...


def bind_mesh(part: Any, mesh: Mesh | None, rules: Rules) -> Any:
    """Return a part of a strategy for a model on this mesh: `MeshAware` parts learn the mesh, others are unchanged."""
    return part.with_mesh(mesh, rules) if isinstance(part, MeshAware) else part


def spans_hosts(value: object) -> bool:
    """Return whether an array has shards on other hosts."""
    return isinstance(value, jax.Array) and not value.is_fully_addressable
