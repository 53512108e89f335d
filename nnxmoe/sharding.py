"""Sharding of activations: constraints, ``shard_map``, and strategy parts that shard their own operands."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnxmoe.axes import BATCH_AXES, CONTEXT, AnyMesh
from nnxmoe.sharding_rules import Rules, shard_count

_logger = logging.getLogger("nnxmoe")


def is_static(*sizes: Any) -> bool:
    """Return whether all sizes are integers. Symbolic dimensions of `jax.export` are not."""
    return all(isinstance(size, int) for size in sizes)


def _manual_axes() -> tuple[str, ...]:
    """Return the axes that an enclosing `jax.shard_map` made manual, such as ``pipe`` inside a pipeline stage."""
    return jax.sharding.get_abstract_mesh().manual_axes


def _current_mesh(mesh: AnyMesh) -> AnyMesh:
    """Return the mesh for shardings in the code being traced. JAX rejects ``mesh`` if one of its axes is manual."""
    return jax.sharding.get_abstract_mesh() if _manual_axes() else mesh


def shard_map(
    run: Callable[..., Any], mesh: AnyMesh, in_specs: Any, out_specs: Any, axes: Iterable[str] | None = None
) -> Callable[..., Any]:
    """Apply `jax.shard_map` to a function, without its replication check.

    Args:
        run: Function of one shard.
        mesh: The mesh.
        in_specs: Partition specs of the arguments.
        out_specs: Partition specs of the outputs.
        axes: Mesh axes to make manual. If None, all axes that are not manual already.
    """
    names = set(mesh.shape) - set(_manual_axes()) if axes is None else set(axes)
    specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(run, mesh=_current_mesh(mesh), axis_names=names, check_vma=False, **specs)


def batch_axes(mesh: AnyMesh | None) -> tuple[str, ...]:
    """Return the mesh axes of size above 1 that shard the batch. Manual axes are omitted, such as ``pipe``."""
    if mesh is None:
        return ()
    manual = _manual_axes()
    return tuple(axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1 and axis not in manual)


def batch_shard_axes(batch: Any, mesh: AnyMesh | None) -> tuple[str, ...]:
    """Return the batch axes of a mesh if the number of shards divides the batch size, else ()."""
    axes = batch_axes(mesh)
    return () if batch % shard_count(mesh, axes) else axes


def context_shard_axes(length: int, mesh: AnyMesh | None) -> tuple[str, ...]:
    """Return ``("context",)`` if that axis has several devices and their number divides ``length``, else ()."""
    size = 1 if mesh is None or CONTEXT in _manual_axes() else mesh.shape.get(CONTEXT, 1)
    return (CONTEXT,) if size > 1 and length % size == 0 else ()


def shard_constraint(x: Any, mesh: AnyMesh | None, *axes: str | Sequence[str] | None) -> Any:
    """Constrain dimension i of ``x`` to be sharded over ``axes[i]``. No-op without axes or without a mesh."""
    spec = PartitionSpec(*(axis or None for axis in axes))
    if mesh is None or not any(spec):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(_current_mesh(mesh), spec))


def shard_batch(x: jax.Array, mesh: AnyMesh | None) -> jax.Array:
    """Shard the rows of ``x [B, T, ...]`` over the batch axes and the tokens over ``context``.

    Replicates a dimension that the mesh does not divide, and logs a warning. A single token is replicated silently.
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
    """Replicate ``x`` over the mesh, so every process can read it."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


@runtime_checkable
class MeshAware(Protocol):
    """Strategy part that shards its own operands, because XLA cannot partition it."""

    def with_mesh(self, mesh: Mesh | None, rules: Rules) -> Any:
        """Return a copy of the part for a model on this mesh."""
        ...


def bind_mesh(part: Any, mesh: Mesh | None, rules: Rules) -> Any:
    """Pass the mesh to a `MeshAware` part of a strategy. Other parts are returned unchanged."""
    return part.with_mesh(mesh, rules) if isinstance(part, MeshAware) else part


def spans_hosts(value: object) -> bool:
    """Return whether an array has shards on other hosts."""
    return isinstance(value, jax.Array) and not value.is_fully_addressable
