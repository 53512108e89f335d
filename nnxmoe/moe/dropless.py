"""Dropless dispatch: a fallback for layers whose assignments exceed the buffers of another dispatch."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.axes import AnyMesh
from nnxmoe.config.printable import short
from nnxmoe.config.validate import check_object
from nnxmoe.moe.dispatch import Dispatch, DispatchInfo, Sorted, dispatch_info, mask_padding
from nnxmoe.moe.experts import ExpertFn
from nnxmoe.moe.router import Routing
from nnxmoe.sharding import context_shard_axes
from nnxmoe.sharding_rules import shard_count


@runtime_checkable
class BufferedDispatch(Dispatch, Protocol):
    """Dispatch that drops assignments if its buffers are too small for the routing."""

    def needed_factor(self, routing: Routing, mesh: AnyMesh | None = None) -> Float[Array, ""]:
        """Return the smallest capacity or buffer factor at which this routing drops no assignments."""
        ...

    def fits(self, routing: Routing, mesh: AnyMesh | None = None) -> Bool[Array, ""]:
        """Return whether this routing drops no assignments. The result is the same on all devices."""
        ...


@dataclasses.dataclass(frozen=True)
class Dropless:
    """Dispatch that uses ``inner`` if all assignments of the batch fit into its buffers, and ``fallback`` otherwise.

    The choice is made per layer and step, and is the same on all devices. Only the chosen dispatch is computed, but XLA
    reserves memory for both. Use a fallback with bounded buffers, such as
    ``ExpertParallel(Sorted(), ChunkedExchange(RaggedAllToAll(), 8))``.

    Attributes:
        inner: Dispatch with bounded buffers: `Capacity`, or `ExpertParallel` with a ``buffer_factor``.
        fallback: Dispatch that drops no assignments.
    """

    inner: BufferedDispatch
    fallback: Dispatch = Sorted()

    def __post_init__(self) -> None:
        if isinstance(self.inner, type) or not isinstance(self.inner, BufferedDispatch):
            raise ValueError(
                f"Dropless(inner={short(self.inner)}): use Capacity, or ExpertParallel with a buffer_factor"
            )
        check_object("Dropless", "fallback", self.fallback, "Sorted()")

    @property
    def token_independent(self) -> bool:
        """Whether the fallback is token-independent. ``inner`` is only used if it drops nothing."""
        return getattr(self.fallback, "token_independent", False)

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, experts: ExpertFn, mesh: AnyMesh | None = None
    ) -> tuple[Float[Array, "B T D"], DispatchInfo]:
        def run(dispatch: Dispatch) -> tuple[Array, DispatchInfo]:
            y, info = dispatch(x, routing, experts, mesh)
            # `dropped_by_shard` must have the same shape in both branches of `cond`.
            return y, dispatch_info(routing, info.dropped)

        # Without `jax.checkpoint`, every layer would reserve memory for the fallback's activations.
        fallback = jax.checkpoint(lambda: run(self.fallback))
        return jax.lax.cond(self.inner.fits(routing, mesh), lambda: run(self.inner), fallback)


def shard_load(routing: Routing, mesh: AnyMesh | None, row_axes: Sequence[str]) -> tuple[Int[Array, ""], int]:
    """Compute the largest and the balanced load of an expert shard in an exchange.

    Args:
        routing: Routing of all tokens.
        mesh: Device mesh.
        row_axes: Mesh axes that shard the batch. The last axis also shards the experts. Devices along the last axis
            exchange rows.

    Returns:
        The largest number of assignments that any expert shard receives in any group of devices that exchange rows, and
        the number of assignments per expert shard if the routing is balanced.
    """
    if mesh is None or mesh.shape[row_axes[-1]] == 1:  # no exchange
        return jnp.zeros((), jnp.int32), 1
    batch, length, _ = routing.experts.shape
    shards, groups = mesh.shape[row_axes[-1]], shard_count(mesh, row_axes[:-1])
    token_shards = shard_count(mesh, context_shard_axes(length, mesh))
    # Padding has the expert id E. Its owner is out of range, so `one_hot` does not count it.
    owners = mask_padding(routing).ids // (routing.scores.shape[-1] // shards)
    counts = jnp.sum(jax.nn.one_hot(owners, shards, dtype=jnp.int32), axis=2)
    loads = jnp.sum(counts.reshape(groups, batch // groups, token_shards, -1, shards), axis=(1, 3))
    return jnp.max(loads), owners.size // (groups * shards * token_shards)
