"""Shard activations: sharding constraints, ``shard_map``, and strategy objects that depend on the mesh."""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from nnxmoe.axes import BATCH_AXES, CONTEXT, TOKEN_AXES, AnyMesh
from nnxmoe.sharding_rules import Rules, shard_count

_logger = logging.getLogger("nnxmoe")
_reduce_dtype = jax.make_user_context(None)  # JAX includes user contexts in the keys of its trace caches


def reduce_gradients_in(dtype: Any, mesh: AnyMesh | None) -> AbstractContextManager[None]:
    """Return a context in which kernel gradients are summed over the devices of ``mesh`` in ``dtype``.

    The context applies to differentiable functions that are called inside it. With a single device along the token
    axes, nothing is summed and the context has no effect.
    """
    token_axes = [] if mesh is None else [axis for axis in TOKEN_AXES if axis in mesh.shape]
    return _reduce_dtype(jnp.dtype(dtype) if shard_count(mesh, token_axes) > 1 else None)


def reduction_dtype(dtype: Any, rows_dtype: Any) -> Any:
    """Return the dtype in which a kernel's gradient is summed over devices. See `reduce_gradients_in`.

    Args:
        dtype: Dtype of the gradient on one device. The result is not wider.
        rows_dtype: Dtype of the rows that are multiplied by the kernel. The result is not narrower.
    """
    reduce_dtype = _reduce_dtype.value
    if reduce_dtype is None:
        return dtype
    is_between = jnp.dtype(rows_dtype).itemsize <= reduce_dtype.itemsize < jnp.dtype(dtype).itemsize
    return reduce_dtype if is_between else dtype


def is_static(*sizes: Any) -> bool:
    """Return whether all sizes are integers, not symbolic dimensions of `jax.export`."""
    return all(isinstance(size, int) for size in sizes)


def manual_axes() -> tuple[str, ...]:
    """Return the manual axes of the enclosing `jax.shard_map`, such as ``pipe`` inside a pipeline stage."""
    return jax.sharding.get_abstract_mesh().manual_axes


def _current_mesh(mesh: AnyMesh) -> AnyMesh:
    """Return the abstract mesh if any axis is manual, because JAX then rejects ``mesh``. Otherwise return ``mesh``."""
    return jax.sharding.get_abstract_mesh() if manual_axes() else mesh


def shard_map(
    run: Callable[..., Any], mesh: AnyMesh, in_specs: Any, out_specs: Any, axes: Iterable[str] | None = None
) -> Callable[..., Any]:
    """Wrap a function in `jax.shard_map` without the replication check.

    Args:
        run: Function to run on each shard.
        mesh: Mesh that the specs refer to.
        in_specs: Partition specs of the arguments.
        out_specs: Partition specs of the outputs.
        axes: Mesh axes that become manual. Defaults to all axes that are not manual yet.
    """
    names = set(mesh.shape) - set(manual_axes()) if axes is None else set(axes)
    specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(run, mesh=_current_mesh(mesh), axis_names=names, check_vma=False, **specs)


def batch_axes(mesh: AnyMesh | None) -> tuple[str, ...]:
    """Return the mesh axes of size > 1 that shard the batch, without manual axes such as ``pipe``."""
    if mesh is None:
        return ()
    manual = manual_axes()
    return tuple(axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1 and axis not in manual)


def batch_shard_axes(batch: Any, mesh: AnyMesh | None) -> tuple[str, ...]:
    """Return the batch axes of a mesh if the number of shards divides the batch size, else ()."""
    axes = batch_axes(mesh)
    return () if batch % shard_count(mesh, axes) else axes


def context_shard_axes(length: int, mesh: AnyMesh | None) -> tuple[str, ...]:
    """Return ``("context",)`` if that axis has a size > 1 that divides ``length``, else ()."""
    size = 1 if mesh is None or CONTEXT in manual_axes() else mesh.shape.get(CONTEXT, 1)
    return (CONTEXT,) if size > 1 and length % size == 0 else ()


def batch_sharding(shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch array ``[B, T, ...]``: rows over the batch axes, tokens over ``context``."""
    token_axes = context_shard_axes(shape[1], mesh) if len(shape) > 1 else ()
    return NamedSharding(mesh, PartitionSpec(batch_axes(mesh) or None, *([token_axes] if token_axes else [])))


def shard_constraint(x: Any, mesh: AnyMesh | None, *axes: str | Sequence[str] | None) -> Any:
    """Constrain dimension i of ``x`` to be sharded over ``axes[i]``. No-op without axes or a mesh."""
    spec = PartitionSpec(*(axis or None for axis in axes))
    if mesh is None or not any(spec):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(_current_mesh(mesh), spec))


def shard_batch(x: jax.Array, mesh: AnyMesh | None) -> jax.Array:
    """Shard the rows of ``x [B, T, ...]`` over the batch axes and the tokens over ``context``.

    A dimension that the mesh does not divide is replicated, and a warning is logged. A single token is
    replicated without a warning.
    """
    rows, tokens = x.shape[:2]
    row_axes, token_axes = batch_shard_axes(rows, mesh), context_shard_axes(tokens, mesh)
    if row_axes != batch_axes(mesh):
        _warn_replicated(f"{rows} rows", batch_axes(mesh))
    if mesh is not None and not token_axes and tokens > 1 and mesh.shape.get(CONTEXT, 1) > 1:
        _warn_replicated(f"{tokens} tokens", (CONTEXT,))
    return shard_constraint(x, mesh, row_axes, token_axes)


def _warn_replicated(count: str, axes: Sequence[str]) -> None:
    _logger.warning(
        "%s cannot be divided evenly over the mesh axes %s, so every device computes all of them", count, axes
    )


def replicate(x: Any, mesh: AnyMesh | None) -> Any:
    """Replicate the arrays of a tree over the mesh so that every process can read them."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def replicated_on(place: Sharding) -> Sharding:
    """Return the sharding that replicates an array to the devices of ``place``."""
    if isinstance(place, NamedSharding):
        return NamedSharding(place.mesh, PartitionSpec())
    if place.num_devices == 1:
        return place
    devices = sorted(place.device_set, key=lambda device: device.id)
    return NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec())


@runtime_checkable
class MeshAware(Protocol):
    """Strategy object that shards its operands explicitly, because XLA cannot partition the computation."""

    def with_mesh(self, mesh: Mesh | None, rules: Rules) -> Any:
        """Return a copy that shards its operands over ``mesh``."""
        ...


def bind_mesh(part: Any, mesh: Mesh | None, rules: Rules) -> Any:
    """Bind a `MeshAware` strategy object to the mesh. Returns other objects unchanged."""
    return part.with_mesh(mesh, rules) if isinstance(part, MeshAware) else part


def spans_hosts(value: object) -> bool:
    """Return whether the value is a JAX array with shards on other hosts."""
    return isinstance(value, jax.Array) and not value.is_fully_addressable
